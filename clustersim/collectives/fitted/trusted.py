"""Which measured numbers can be believed: a warm-up spike or a slip of a unit must not move a whole machine.

A number is kept apart where the wires do not allow it, where no machine of its kind would need so long, where fewer
bytes took longer, where it is alone and very far from its kind, or far and what it says makes the other numbers worse.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations

import numpy as np

from clustersim.collectives.bounds import lower_bound
from clustersim.collectives.costs import costs_of_kind
from clustersim.collectives.fitted.machine import few_numbers
from clustersim.collectives.nccl_backend import NcclChoice, seconds
from clustersim.core.calibrated import MeasuredNumber
from clustersim.core.costs import CommunicationCosts
from clustersim.core.units import format_bytes, format_time

SLOWEST = 100.0
"""Times what its kind takes; a number beyond it is a slip of unit or of scale, not a machine."""

FAR = float(np.log(1.5))
"""|ln(predicted / measured)| from its kind from which on a number must not contradict the others."""

APART = float(np.log(2.0))
"""|ln(predicted / measured)| of a number, with all of them known, from which on it contradicts the others."""

LONE = float(np.log(2.2))
"""|ln(predicted / measured)| from its kind up to which one number moves a machine that nothing else bears out."""

WORSE = 0.08
"""By how much a number may worsen |ln(predicted / measured)| of the others, all together."""


def impossible(
    numbers: Sequence[MeasuredNumber], choices: Sequence[NcclChoice], times: Sequence[float], usual: Sequence[float]
) -> dict[int, str]:
    """Numbers that the wires do not allow, or that no machine of this kind would need, and why.

    ``times``, ``usual`` : (n,) seconds, measured and as their kind takes them.
    """
    apart = {}
    for i, (one, chosen, time, kind) in enumerate(zip(numbers, choices, times, usual, strict=True)):
        bound = lower_bound(chosen.request, chosen.group)
        what = f"{one.kind} of {format_bytes(one.nbytes)} over {one.nodes} node(s) in {format_time(time)}"
        if time < bound:
            apart[i] = f"{what} is faster than the wires allow, {format_time(bound)} at line rate"
        elif time > SLOWEST * kind:
            apart[i] = f"{what} is more than {SLOWEST:.0f} times what machines of its kind take, {format_time(kind)}"
    return apart


def beyond_reason(chosen: NcclChoice, time: float) -> str:
    """Why no machine of this kind can have taken so long or so short; empty where one can."""
    if time < lower_bound(chosen.request, chosen.group):
        return "is faster than the wires allow"
    usual = seconds(chosen, costs_of_kind(chosen.group))
    return f"took more than {SLOWEST:.0f} times what machines of its kind take" if time > SLOWEST * usual else ""


def disordered(
    numbers: Sequence[MeasuredNumber], times: Sequence[float], usual: Sequence[float], without: Collection[int]
) -> dict[int, str]:
    """Of two numbers of a collective and a scale of which fewer bytes took longer, the one less like its kind."""
    apart: dict[int, str] = {}
    alike = ("kind", "nodes", "gpus", "launch", "version")
    for pair in combinations([i for i in range(len(numbers)) if i not in without], 2):
        small, large = sorted(pair, key=lambda i: numbers[i].nbytes)
        same = all(getattr(numbers[small], name) == getattr(numbers[large], name) for name in alike)
        if apart.keys() & {small, large} or not same or times[small] <= 2.0 * times[large]:
            continue
        odd = max(pair, key=lambda i: abs(np.log(times[i] / usual[i])))
        other = large if odd == small else small
        apart[odd] = (
            f"it contradicts {numbers[other].where.rpartition(': ')[2]}: {format_bytes(numbers[small].nbytes)} in "
            f"{format_time(times[small])}, but {format_bytes(numbers[large].nbytes)} in {format_time(times[large])}"
        )
    return apart


def contradicting(
    choices: Sequence[NcclChoice], times: Sequence[float], kind: CommunicationCosts, without: Collection[int]
) -> dict[int, str]:
    """Numbers far from their kind that make the others worse, the farthest first, and why; one of two is believed."""
    apart: dict[int, str] = {}
    left = [i for i in range(len(times)) if i not in without]
    usual = {i: seconds(choices[i], kind) for i in left}
    for i in sorted(left, key=lambda i: -abs(np.log(usual[i] / times[i]))):
        others = [j for j in left if j != i and j not in apart]
        far = abs(float(np.log(usual[i] / times[i])))
        if far < FAR:
            break
        if not others:
            if far > LONE:
                apart[i] = (
                    f"{format_time(times[i])} is {np.exp(far):.1f} times off what machines of its kind take, "
                    f"{format_time(usual[i])}, and no other number bears it out: give a second one"
                )
            break
        known = [i, *others]
        together = few_numbers([choices[j] for j in known], [times[j] for j in known], kind).costs
        moved = sum(_error(choices[j], times[j], together) - _error(choices[j], times[j], kind) for j in others)
        if moved > WORSE:
            apart[i] = _reason(choices, times, kind, i, others)
    every = [i for i in left if i not in apart]
    while len(every) > 1:  # and none may be left far off by all together
        costs = few_numbers([choices[i] for i in every], [times[i] for i in every], kind).costs
        worst = max(every, key=lambda i: _error(choices[i], times[i], costs))
        if _error(choices[worst], times[worst], costs) <= APART:
            break
        every.remove(worst)
        apart[worst] = _reason(choices, times, kind, worst, every)
    return apart


def _reason(
    choices: Sequence[NcclChoice], times: Sequence[float], kind: CommunicationCosts, i: int, others: Sequence[int]
) -> str:
    known = few_numbers([choices[j] for j in others], [times[j] for j in others], kind).costs
    expected = seconds(choices[i], known)
    return (
        f"{format_time(times[i])} contradicts the other numbers, with which it would be about {format_time(expected)}"
    )


def _error(chosen: NcclChoice, time: float, costs: CommunicationCosts) -> float:
    return abs(float(np.log(seconds(chosen, costs) / time)))
