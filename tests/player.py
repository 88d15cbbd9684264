"""The plainest way to play a one-role Program: every collective takes a given time, links do not exist.

Tests use it as an oracle that shares nothing with the engine.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clustersim.core.program import Collective, Compute, Program
from clustersim.core.program import seconds as spent
from clustersim.core.timeline import LinkUse, OpInfo, Timeline
from clustersim.testing import toy_cost as toy_cost
from clustersim.testing import toy_model as toy_model


def play(program: Program, seconds: Callable[[Collective], float]) -> Timeline:
    """Timeline of a Program whose collectives last ``seconds(op)`` after their last member arrives."""
    program.check()
    (role,) = program.roles
    n = program.world_size
    free = {}
    ends = []
    infos = []
    rows: list[tuple[int, int, float, float, float]] = []
    sets = [np.arange(n), *(np.array([r]) for r in range(n))]
    for i, op in enumerate(role.ops):
        ready = np.maximum.reduce([free.get(op.stream, np.zeros(n)), *(ends[j] for j in op.after)])
        start = ready
        detail = {}
        if isinstance(op, Compute):
            end = start + spent(role, op)
            kind = "compute"
            flops = op.flops
        else:
            start = np.empty(n)
            for group in op.groups:
                start[group] = ready[group].max()
            end = start + seconds(op)
            kind = op.kind
            flops = 0.0
            detail = {"group_size": op.groups.shape[1], "dtype": op.dtype}
        ends.append(end)
        free[op.stream] = end
        bound = op.bound if isinstance(op, Compute) else "communication"
        infos.append(
            OpInfo(op.name, kind, op.stream, op.phase, bound, op.nbytes, flops, op.step, role.name, op.after, detail)
        )
        if np.ptp(ready) == np.ptp(start) == np.ptp(end) == 0:
            rows.append((i, 0, ready[0], start[0], end[0]))
        else:
            rows += [(i, 1 + r, ready[r], start[r], end[r]) for r in range(n)]
    op, who, ready_, start_, end_ = (np.array(column) for column in zip(*rows, strict=True))
    return Timeline(n, tuple(infos), tuple(sets), op, who, ready_, start_, end_, rank_node=np.arange(n) // 8)


def link_use(segments):
    """segments: (transfer, start, end, rate); transfer 0 loads links 0 and 1, transfer 1 link 1 doubly."""
    columns = [np.array(c) for c in zip(*segments, strict=True)]
    loads = ((np.array([0, 1]), np.array([1.0, 1.0])), (np.array([1]), np.array([2.0])))
    zero_one = np.array([0, 1])
    return LinkUse(
        columns[0],
        *(c.astype(float) for c in columns[1:]),
        zero_one,
        zero_one,
        loads,
        ["a -> b", "b -> c", "c -> d"],
        np.array([10.0, 20.0, 20.0]),
    )
