"""What a model file holds: layers, their tensors, and what each does forward and backward, by the types it runs in.

The file is JSON. It is data: reading it runs nothing, and needs no torch. Sizes are per sample, in bytes and elements
as they were traced; layers that are equal but for a number in their names are written once.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

FORMAT = "clustersim-model"
VERSION = 1
"""Of the fields below. A file of another version is refused, and traced again."""

TypesName: TypeAlias = Literal["bf16", "autocast", "fp32"]
TYPES: tuple[TypesName, ...] = ("bf16", "autocast", "fp32")
"""Parameters and products in bf16; fp32 parameters under ``torch.autocast``; everything in fp32. In the order of
:data:`clustersim.core.model.ByteSizes`."""

Count = Annotated[int, Meta(ge=0, le=2**53)]
Amount = Annotated[float, Meta(ge=0, le=1e30)]
Positive = Annotated[int, Meta(ge=1, le=2**53)]


class KernelRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A kernel as :class:`clustersim.core.model.Kernel` has it, with bytes in place of elements.

    Parameters
    ----------
    nbytes, backward_nbytes : moved per sample. kept : per sample, from forward to its backward. working : per sample,
        that its backward holds beside what is kept and its layer's gradient. fp32, flash : as a kernel's.
    """

    name: str
    kind: Literal["gemm", "conv", "attention", "memory"]
    m: Count = 0
    n: Count = 0
    k: Count = 0
    batch: Count = 0
    groups: Positive = 1
    heads: Count = 0
    head_dim: Count = 0
    seq: Count = 0
    causal: bool = False
    fp32: bool = False
    flash: bool = True
    repeat: Positive = 1
    launches: Count = 1
    backward_launches: Count = 0
    flops: Amount = 0.0
    backward_flops: Amount = 0.0
    nbytes: Amount = 0.0
    backward_nbytes: Amount = 0.0
    kept: Amount = 0.0
    working: Amount = 0.0

    def __post_init__(self) -> None:
        sized = self.heads and self.head_dim and self.seq
        if self.kind == "attention" and (self.flops or self.backward_flops) and not sized:
            raise ValueError("an attention kernel that has FLOPs has heads, head_dim and seq above 0")


class LayerWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a layer does in one setting of types: ``kernels`` in forward order, and bytes per sample of its input that
    needs a gradient, its ``boundary``."""

    kernels: tuple[KernelRow, ...]
    boundary: Amount = 0.0


class TensorRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A parameter as :class:`clustersim.core.model.Tensor` has it."""

    name: str
    numel: Positive
    width: Positive = 1
    tied_to: str = ""


class LayerRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A layer, or ``count`` of them that are equal: the braces in its name and in those of its tensors are the numbers
    from ``first`` on.

    Parameters
    ----------
    work : index into the file's ``works``. buffers : elements of floating-point buffers.
    """

    name: str
    kind: str
    work: Count
    tensors: tuple[TensorRow, ...] = ()
    buffers: Count = 0
    count: Positive = 1
    first: Count = 0


class ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A traced model.

    Parameters
    ----------
    format, version : :data:`FORMAT` and :data:`VERSION`.
    name : of the model. source : what was traced, in the words of the command. torch : its version.
    inputs : as the command names them. batch : samples that were traced.
    sample, seq_len, hidden, heads, kv_heads, head_dim, vocab : as of :class:`clustersim.core.model.Model`.
    chained : each layer takes what the one before it gives, and nothing else that needs a gradient: a pipeline can be
        cut between any two.
    notes : what was assumed.
    works : by the names of :data:`TYPES`, what layers do; layers that do the same share one.
    """

    format: Literal["clustersim-model"]
    version: Literal[1]
    name: str
    source: str
    torch: str
    inputs: tuple[str, ...]
    batch: Positive
    sample: Literal["sequence", "image", "clip"]
    seq_len: Count
    hidden: Count = 0
    heads: Count = 0
    kv_heads: Count = 0
    head_dim: Count = 0
    vocab: Count = 0
    chained: bool
    notes: tuple[str, ...] = ()
    layers: tuple[LayerRow, ...]
    works: tuple[dict[TypesName, LayerWork], ...]
