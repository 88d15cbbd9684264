"""The error for a run in which nothing more can happen: who waits, at which op, for whom."""

from __future__ import annotations

import numpy as np

from clustersim.core.arrays import Ints
from clustersim.core.errors import ProgramError
from clustersim.core.program import Collective, Op, Program, Send
from clustersim.engine.order import OpTask
from clustersim.engine.sites import Site, SitePlay

SHOWN = 4
"""Meetings, and ranks of one list, that a message names before it says how many more there are."""


def deadlock(program: Program, standing: dict[int, SitePlay], tasks: list[list[OpTask]]) -> ProgramError:
    """The error for a run in which nothing more can happen: which ranks wait, at which op, for whom.

    Meetings with somebody there and somebody missing are listed by their first rank, at most :data:`SHOWN` of them.
    """
    lines: list[tuple[int, str]] = []
    for waiting in standing.values():
        missing = waiting.split() if waiting.started else np.zeros(0, dtype=np.int64)
        for meeting in np.flatnonzero((missing > 0) & (missing < waiting.site.ranks.shape[1])).tolist():
            lines.append(_line(program, waiting.site, meeting, tasks))
    lines.sort()
    shown = "; ".join(text for _, text in lines[:SHOWN])
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return ProgramError(
        f"the program never ends, ranks wait for each other forever: {shown}{more}. "
        "All members must issue the ops they share in the same order on each stream"
    )


def _line(program: Program, site: Site, meeting: int, tasks: list[list[OpTask]]) -> tuple[int, str]:
    present: list[int] = []
    places: list[str] = []
    sides = site.sides_of(np.array([meeting]))
    for side in sides:
        (r, i), role = side.key, program.roles[side.key[0]]
        task = tasks[r][i]
        came = role.ranks[(side.meeting_of == meeting) & (np.asarray(task.unmet) == 0)].tolist()
        present += came
        places += [f"op {i} {task.op.name!r}{_words(task.op)}"] if came else []
    missing = sorted(set(site.ranks[meeting].tolist()) - set(present))
    members = np.concatenate([program.roles[side.key[0]].ranks[side.meeting_of == meeting] for side in sides])
    never = sorted(set(missing) - set(members.tolist()))
    tail = f" ({_ranks(np.array(never))} never {'does' if len(never) == 1 else 'do'})" if never else ""
    verb = "waits" if len(present) == 1 else "wait"
    text = f"{_ranks(np.array(sorted(present)))} {verb} at {' and '.join(places)} for {_ranks(np.array(missing))}{tail}"
    return min(present), text


def _words(op: Op) -> str:
    if isinstance(op, Collective):
        return f" ({op.kind} on communicator {op.communicator!r}, stream {op.stream!r})"
    return f" ({'send' if isinstance(op, Send) else 'recv'}, stream {op.stream!r})"


def _ranks(ranks: Ints) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return "ranks " + ", ".join(map(str, ranks[:SHOWN].tolist())) + more
