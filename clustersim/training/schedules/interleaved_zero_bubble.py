"""PyTorch's ScheduleInterleavedZeroBubble: ZB-H1 by counting, over any number of chunks (arXiv 2401.10241).

The backward is split. The stage before waits only for I; W fits anywhere later. Rank r therefore starts its backwards
after half of interleaved 1F1B's warm-up (one forward for each rank behind it, not two: on the way back only I is on the
path), runs F and I in turn, and lets W lag r passes behind I, so that ranks near the end, which have their gradients
early, keep W for the end of the step, where 1F1B would drain idly. With one chunk it is ZB-H1, order for order:

    bubble = (p-1)(F + I - W) of a chunk, a third of 1F1B's where F = I = W, as long as W is the shortest
    peak   = min(vm, (v-1)g + p) chunk passes on every rank until W, with groups of g micro-batches

No durations are looked at. Where W is longer than F or I, the lag is not what would be best; see
:mod:`clustersim.training.schedules.zero_bubble` for the search.
"""

from __future__ import annotations

from typing import Any

from clustersim.training.schedules.base import Action, Order, Orders, PassCosts, Schedule
from clustersim.training.schedules.interleaved import group_of, passes, warmup, works


def interleaved_zero_bubble(p: int, chunks: int, m: int, **options: Any) -> Orders:
    """Of each rank: its warm-up, F and I in turn, the rest of I, with W following r passes behind I; the rest of W."""
    group = group_of(p, m, options)
    forwards = passes("F", m, chunks, group)
    gradients = passes("I", m, chunks, group)
    return tuple(_order(forwards, gradients, warmup(rank, p, chunks, m, group, 1), rank) for rank in range(p))


def _order(forwards: list[Action], gradients: list[Action], warm: int, lag: int) -> Order:
    order = forwards[:warm]
    weights = [action._replace(kind="W") for action in gradients]
    for position, gradient in enumerate(gradients):
        order += forwards[warm + position : warm + position + 1]
        order.append(gradient)
        order += weights[position - lag : position - lag + 1] if position >= lag else []
    order += weights[max(0, len(weights) - lag) :]
    return tuple((action,) for action in order)


def skew_less_weights(p: int, chunks: int, m: int, cost: PassCosts) -> float | None:
    """(p-1)(F + I - W): 1F1B's bubble, less the weight gradients that each rank keeps for the drain."""
    if m < p or cost.weight_gradient > min(cost.forward, cost.input_gradient):
        return None
    return (p - 1) * (cost.forward + cost.input_gradient - cost.weight_gradient)


INTERLEAVED_ZERO_BUBBLE = Schedule(
    "interleaved_zero_bubble",
    interleaved_zero_bubble,
    chunks=None,
    splits_backward=True,
    microbatches=works,
    needs="equal groups of at least pp micro-batches: a multiple of pp is always right",
    bubble=skew_less_weights,
    peak=lambda rank, p, chunks, m: min(chunks * m, (chunks - 1) * group_of(p, m, {}) + p),
)
