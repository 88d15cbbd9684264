"""Micro-batches that recompute all layers beside others that recompute some (Megatron-LM
core/pipeline_parallel/schedules.py ``num_microbatches_with_partial_activation_checkpoints``; Korthikanti et al.,
arXiv:2205.05198, appendix C): a stage holds as many activations as its warm-up has forwards, later stages fewer, and
keeps what it has room for.
"""

from __future__ import annotations

from dataclasses import replace

from clustersim.partition.base import Partition
from clustersim.schedules.base import Order, Orders


def partly_recomputed(some: Partition, every: Partition, orders: Orders, count: int) -> Partition:
    """The partition ``some``, whose stages pass the micro-batches that ``count`` leaves over as those of ``every``.

    Parameters
    ----------
    some, every : with some of the layers, and with all of them recomputed. count : micro-batches of each window that
        recompute some; 0 is none.
    """
    pairs = zip(some.stages, every.stages, orders, strict=True)
    stages = tuple(replace(one, again=all_.chunks, repeated=beyond(order, count)) for one, all_, order in pairs)
    return replace(some, stages=stages)


def beyond(order: Order, count: int) -> frozenset[tuple[int, int]]:
    """(micro-batch, chunk) of the forwards that are not among the first ``count`` of their window, which is as many as
    may be in flight: those ahead of the first backward.

    >>> from clustersim.schedules.notation import parse
    >>> sorted(beyond(parse("F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"), 2))
    [(2, 0)]
    """
    kinds = [(action.kind, action.microbatch, action.chunk) for slot in order for action in slot]
    window = next((i for i, action in enumerate(kinds) if action[0] != "F"), len(kinds))
    forwards = [action[1:] for action in kinds if action[0] == "F"]
    return frozenset(action for i, action in enumerate(forwards) if i % window >= count)
