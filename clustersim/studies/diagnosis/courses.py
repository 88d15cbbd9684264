"""The course of a fault over the steps of a run: from a step on, growing, now and then, or once.

Most faults that slow a run look alike in the worst step, and differ in which steps are slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clustersim.studies.diagnosis.suspects import PARTLY, SELDOM, SURE, UNLIKELY

ONCE = "once"
AGAIN = "now and then"
STAYS = "from then on"
GROWS = "more and more"
COURSES: Mapping[str, Mapping[str, float]] = {
    ONCE: {"ecc_stall": SURE, "garbage_collection": SELDOM, "blocking_checkpoint": SELDOM, "flapping_link": PARTLY},
    AGAIN: {"garbage_collection": SURE, "blocking_checkpoint": SURE, "flapping_link": SURE},
    STAYS: {
        **dict.fromkeys(("slow_gpu", "slow_host", "slow_data", "slow_link", "congestion"), SURE),
        "hot_gpu": PARTLY,
        "flapping_link": PARTLY,
    },
    GROWS: {"hot_gpu": SURE, "flapping_link": SELDOM, **dict.fromkeys(("slow_gpu", "slow_host", "slow_data"), SELDOM)},
}
"""How likely each course is, were a kind to blame; of others it is UNLIKELY."""
GROWTH = 0.85
"""A slow step that has less than this share of the last one's excess is still growing."""


def course_of(excess: Sequence[float], limit: float) -> str:
    """The course of what steps have more than usual; those above ``limit`` are slow.

    A fault that begins within a step has a part of it in that step: whether it grows is seen from the next one on.
    """
    slow = [i for i, more in enumerate(excess) if more > limit]
    if len(slow) == 1 and slow[0] < len(excess) - 1:
        return ONCE
    if len(slow) != len(excess) - slow[0]:
        return AGAIN
    later = [excess[i] for i in slow[1:]]
    if len(later) >= 2 and later[0] < GROWTH * later[-1]:
        return GROWS
    return STAYS


def likely(course: str, kind: str) -> float:
    """How likely a course is of a kind."""
    return COURSES[course].get(kind, UNLIKELY)
