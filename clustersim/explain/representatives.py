"""Which ranks, and which seconds, of a Timeline are worth looking at."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clustersim.core.op_infos import kinds, of_each
from clustersim.core.timeline import Timeline, alike
from clustersim.explain.columns import did
from clustersim.explain.last_rank import last_to_most
from clustersim.explain.metrics import steady_window
from clustersim.explain.pace import pace_ratios

MAX_RANKS = 4
"""Ranks that a chart has room for."""


def representatives(timeline: Timeline, n: int = MAX_RANKS) -> dict[int, str]:
    """Up to ``n`` ranks worth looking at, ascending, each with what it is: the first and last rank, and where paces
    differ in the steady state the slowest against its role's median (its peers wait for it, and the verdict names it)
    and the fastest of its role. Of a measured run the one that most collectives wait for: its kernels need not be the
    slowest."""
    if timeline.world_size <= 2:
        return dict.fromkeys(range(timeline.world_size), "")
    chosen: dict[int, str] = {}
    classes, _ = alike(timeline)
    roles = _roles(timeline)
    steady = steady_window(timeline)
    last = last_to_most(timeline) if timeline.source != "simulated" else None
    pace = pace_ratios(timeline, steady.begin, steady.end)[classes]
    slowest = int(classes[pace.argmax()])
    peers = roles[classes] == roles[slowest]
    if np.ptp(pace[peers]) > 1e-9:
        fastest = int(classes[peers][pace[peers].argmin()])
        longest, shortest = ("slowest", "fastest") if last is None else ("longest kernels", "shortest kernels")
        chosen = {slowest: longest, fastest: shortest}
    if last is not None:
        also = f", {chosen[last.rank]}" if last.rank in chosen else ""
        chosen[last.rank] = f"last to most collectives{also}"
    other_roles = {int(rank): str(roles[rank]) for rank in classes.tolist() if roles[rank] != roles[0]}
    for rank in (*list(other_roles)[:1], 0, timeline.world_size - 1, *classes.tolist()):
        if len(chosen) < n:
            chosen.setdefault(rank, other_roles.get(rank, ""))
    return dict(sorted(chosen.items()))


def last_step(timeline: Timeline) -> tuple[float, float]:
    """(begin, end) [s] of the last step: from the end of the one before, on whichever rank that was latest."""
    steady = steady_window(timeline)
    ended = timeline.per_op()["end"]
    steps = timeline.op_steps
    before = ended[steps < steady.steps[-1]].max(initial=-np.inf)
    return (float(before) if steady.begin < before < steady.end else steady.begin), steady.end


def _roles(timeline: Timeline) -> npt.NDArray[np.str_]:
    """(world_size,) the role of each rank."""
    names = list(dict.fromkeys(op.role for op in kinds(timeline.ops)))
    if len(names) <= 1:
        return np.full(timeline.world_size, names[0] if names else "")
    number = of_each(timeline.ops, lambda op: names.index(op.role), np.int64)
    role = np.zeros(timeline.world_size, dtype=np.int64)
    for k in range(len(names)):
        role[did(timeline, number == k)] = k
    return np.array(names)[role]
