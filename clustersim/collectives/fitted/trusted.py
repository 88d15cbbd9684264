"""Which measured numbers can be believed: a warm-up spike or a slip of a unit must not move a whole machine.

A number is kept apart where the wires do not allow it, where no machine of its kind would need so long, where fewer
bytes took longer, or where it is likelier to be a slip than what the others and the spread of machines let expect.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

import numpy as np

from clustersim.collectives.bounds import lower_bound
from clustersim.collectives.costs import costs_of_kind
from clustersim.collectives.fitted.machine import FewNumbers, expected_times, few_numbers
from clustersim.collectives.nccl_backend import NcclChoice, seconds
from clustersim.core.arrays import Floats, Ints
from clustersim.core.calibrated import MeasuredNumber
from clustersim.core.costs import CommunicationCosts
from clustersim.core.units import format_bytes, format_time

SLOWEST = 100.0
"""Times what its kind takes; a number beyond it is a slip of unit or of scale, not a machine."""

SLIPS = 0.02
"""Share of numbers that say nothing of their machine. With 0.05 a bandwidth that a published machine really has is
taken for one; with 0.01 fewer of planted ones are found."""

LONE = float(np.log(2.2))
"""|ln(expected / measured)| up to which a number moves what no other speaks of: beyond it, a second one is due."""

ODD = 0.2
"""Standard deviation of ln(seconds), beside the priors', of machines that nobody would publish: a NIC at half rate."""


def impossible(
    numbers: Sequence[MeasuredNumber], choices: Sequence[NcclChoice], times: Sequence[float], usual: Sequence[float]
) -> dict[int, str]:
    """Numbers that the wires do not allow, or that no machine of this kind would need, and why.

    ``times``, ``usual`` : (n,) seconds, measured and as their kind takes them.
    """
    apart = {}
    for i, (number, chosen, time, kind) in enumerate(zip(numbers, choices, times, usual, strict=True)):
        bound = lower_bound(chosen.request, chosen.group)
        measurement = (
            f"{number.kind} of {format_bytes(number.nbytes)} over {number.nodes} node(s) in {format_time(time)}"
        )
        if time < bound:
            apart[i] = f"{measurement} is faster than the wires allow, {format_time(bound)} at line rate"
        elif time > SLOWEST * kind:
            apart[i] = (
                f"{measurement} is more than {SLOWEST:.0f} times what machines of its kind take, {format_time(kind)}"
            )
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


def improbable(
    choices: Sequence[NcclChoice], times: Sequence[float], kind: CommunicationCosts, without: Collection[int]
) -> dict[int, str]:
    """Numbers that are likelier to be slips than this machine's, and why.

    Which numbers are slips is what the data make most likely: times of a machine are normal in their logarithms about
    its kind's, with the covariance that the priors give them (:func:`expected_times`), and a slip, one number of
    :data:`SLIPS`, is anywhere within :data:`SLOWEST` of its kind. What is left beyond :data:`LONE` of what the others
    let expect is kept apart as well.
    """
    left = [i for i in range(len(times)) if i not in without]
    if not left:
        return {}
    expected = expected_times([choices[i] for i in left], kind)
    off: Floats = np.log(np.array([times[i] for i in left])) - expected.log_seconds
    spread: Floats = expected.covariance + ODD**2 * np.eye(len(left))
    slips = _likeliest_slips(off, spread)
    while len(slips) < len(left):
        used = np.array([k for k in range(len(left)) if k not in slips])
        alone = np.array([abs(_beyond(k, off, spread, used[used != k])) for k in used.tolist()])
        if alone.max() <= LONE:
            break
        slips = slips | {int(used[int(alone.argmax())])}
    used = np.array([k for k in range(len(left)) if k not in slips], dtype=int)
    apart = {}
    for k in sorted(slips):
        beyond = _beyond(k, off, spread, used)
        apart[left[k]] = _reason(times[left[k]], beyond, bool(len(used)))
    return apart


def trusted_machine(
    choices: Sequence[NcclChoice], times: Sequence[float], kind: CommunicationCosts, refused: Mapping[int, str]
) -> tuple[FewNumbers, dict[int, str]]:
    """The machine of those numbers that can be believed; and of all others by index, those ``refused`` before among
    them, the reasons."""
    apart = {**refused, **improbable(choices, times, kind, refused)}
    used = [i for i in range(len(times)) if i not in apart]
    return few_numbers([choices[i] for i in used], [times[i] for i in used], kind), apart


def _likeliest_slips(off: Floats, covariance: Floats) -> frozenset[int]:
    """Which of (n,) numbers are slips, one or two at a time told apart or taken back while that is likelier.

    off : (n,) ln(measured / expected). covariance : (n, n) of what machines have.
    """
    price = -math.log(SLIPS / (1.0 - SLIPS) / (2.0 * math.log(SLOWEST)))

    def surprise(slips: frozenset[int]) -> float:
        """What these slips cost: their price, and minus the log likelihood of all other numbers."""
        used = [k for k in range(len(off)) if k not in slips]
        inner = covariance[np.ix_(used, used)]
        misses = off[used]
        spread = float(np.linalg.slogdet(inner)[1]) if used else 0.0
        return price * len(slips) + 0.5 * (
            float(misses @ np.linalg.solve(inner, misses)) + spread + len(used) * math.log(2.0 * math.pi)
        )

    numbers = range(len(off))
    flips = [frozenset(flip) for count in (1, 2) for flip in combinations(numbers, count)]
    best = frozenset[int]()
    least = surprise(best)
    while True:
        tried = min((best ^ flip for flip in flips), key=surprise)
        if surprise(tried) >= least:
            return best
        best = tried
        least = surprise(best)


def _beyond(k: int, off: Floats, covariance: Floats, used: Ints) -> float:
    """ln(measured / expected) of number ``k``, given the numbers ``used``."""
    used_covariance = covariance[np.ix_(used, used)]
    return float(off[k] - covariance[k, used] @ np.linalg.solve(used_covariance, off[used]))


def _reason(time: float, beyond: float, others: bool) -> str:
    likely = format_time(time / math.exp(beyond))
    if others:
        return f"{format_time(time)} contradicts the other numbers, with which it would be about {likely}"
    return (
        f"{format_time(time)} is {math.exp(abs(beyond)):.1f} times off what machines of its kind take, {likely}, and "
        "no other number bears it out: give a second one"
    )
