"""What a collective is made of, for who plans or prices one and needs no Program: its kinds, types of elements, and
kernels that libraries have for it."""

from __future__ import annotations

import msgspec

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "all_to_all",
    "sendrecv",
    "barrier",
)
"""Kinds of :class:`clustersim.core.program.Collective`, by torch.distributed's names; ``sendrecv`` sends S bytes to the
next member."""
REDUCING = frozenset({"all_reduce", "reduce_scatter", "reduce"})
ROOTED = frozenset({"broadcast", "reduce", "scatter", "gather"})
SPLIT = frozenset({"all_gather", "reduce_scatter", "all_to_all", "scatter", "gather"})
"""Of these, those that add up, those with a root, and those of which nccl-tests counts a member's part."""

COPY_ENGINE = "CE"
"""Protocol of a ``sendrecv`` that copy engines make over NVLink: no kernel, and so no channels to open."""

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "int32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "uint8": 1, "int64": 8}
"""Bytes of one element. ``tf32`` is stored as fp32."""


class ExchangeKernel(msgspec.Struct, frozen=True, gc=False):
    """A library's own kernel that makes an all_to_all of tokens, in place of NCCL's sends and receives.

    Parameters
    ----------
    library : ``"deepep"``, ``"uccl"`` or ``"hybridep"``. phase : ``"dispatch"`` or ``"combine"``. row : elements of a
    token. copies : of a token, to ranks or nodes. sms : that DeepEP's kernel runs on. far : between nodes, and not
    inside them.
    within : this is a hop of a kernel that is listed beside it, and runs on that one's SMs.
    """

    library: str
    phase: str
    row: float
    copies: float
    sms: int
    far: bool = False
    within: bool = False
