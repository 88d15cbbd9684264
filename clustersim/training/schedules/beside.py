"""Forwards beside backwards: the steady state's pairs run together, so that each hides the other's expert all-to-all.

Megatron-LM core/pipeline_parallel/combined_1f1b.py (``overlap_moe_expert_parallel_comm``): from the first backward on,
the forward of one micro-batch and the backward of another run layer by layer together. A rank has run one forward more
by then than plain 1F1B, so that the two are of different micro-batches.
"""

from __future__ import annotations

from clustersim.training.schedules.base import Order, Slot


def beside(order: Order) -> Order:
    """The order with each backward of its steady state joined to the forward behind it, of another micro-batch.

    The forward before it would be one too early: the next stage's backward, which this one waits for, would itself run
    beside a forward that waits for that one.

    >>> from clustersim.training.schedules.notation import parse, text
    >>> [text(beside(parse(line))) for line in ("F0 F1 F2 B0 F3 B1 B2 B3", "F0 B0 F1 B1")]
    ['F0 F1 F2 (F3|B0) B1 B2 B3', 'F0 (F1|B0) B1']
    """
    joined: list[Slot] = []
    for slot in order:
        before = joined[-1] if joined else ()
        if len(before) == len(slot) == 1 and (before[0].kind, slot[0].kind) == ("B", "F"):
            joined[-1] = (*slot, *before)
        else:
            joined.append(slot)
    return tuple(joined)
