"""What backward computes again, said by Megatron's names or by the model table's one word."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from clustersim.core.errors import ScenarioError
from clustersim.training.parallel.config import ParallelConfig


class Recompute(msgspec.Struct, frozen=True):
    """What backward computes again.

    Parameters
    ----------
    granularity : ``none``; ``full``: whole layers, from their inputs; ``selective``: ``modules`` of every layer;
        ``selective_op``: all but attention and every second matrix product, as torchtitan's default does.
    method : of ``full``: ``uniform``: units of ``num_layers`` layers keep their input; ``block``: the first
        ``num_layers`` of each (virtual) stage keep their inputs, the others everything.
    """

    granularity: Literal["none", "full", "selective", "selective_op"] = "none"
    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = 1
    modules: tuple[str, ...] = ()


def recompute(parallel: ParallelConfig, activation_checkpointing: str = "none") -> Recompute:
    """What ``[parallel]``'s ``recompute_*`` and ``[model]``'s ``activation_checkpointing`` mean together.

    They are two names of one thing: Megatron's ``full`` is the model table's ``full`` (each layer keeps its input) with
    more knobs; Megatron's ``selective`` recomputes modules, while the model table's is torchtitan's, which picks
    operators. So only one of them may be said, but for both saying ``full``.

    Raises :class:`ScenarioError` where they contradict each other.
    """
    granularity = parallel.recompute_granularity
    if granularity is None:
        plain: Any = {"none": "none", "full": "full", "selective": "selective_op"}
        return Recompute(plain[activation_checkpointing])
    if activation_checkpointing not in {"none", granularity} or (activation_checkpointing == "selective"):
        raise ScenarioError(
            f"recompute_granularity = {granularity!r} and model.activation_checkpointing = "
            f"{activation_checkpointing!r} both say what backward recomputes; say one "
            "(at $.parallel.recompute_granularity)"
        )
    if granularity == "selective":
        return Recompute("selective", modules=parallel.recompute_modules or ("core_attn",))
    return Recompute("full", parallel.recompute_method or "uniform", parallel.recompute_num_layers or 1)
