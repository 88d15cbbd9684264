"""The report on ranks that wait for each other forever."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clustersim.engine.order import Task
from clustersim.engine.sites import Site, Standing
from clustersim.errors import ProgramError
from clustersim.program import Collective, Op, Program, Send

SHOWN = 4
"""Meetings, and ranks of one list, that a message names before it says how many more there are."""


def deadlock(program: Program, standing: dict[int, Standing], tasks: list[list[Task]]) -> ProgramError:
    """The error for a run in which nothing more can happen: which ranks wait, at which op, for whom.

    Meetings with somebody there and somebody missing are listed by their first rank, at most :data:`SHOWN` of them.
    """
    lines: list[tuple[int, str]] = []
    for one in standing.values():
        missing = one.split() if one.started else np.zeros(0, dtype=np.int64)
        for meeting in np.flatnonzero((missing > 0) & (missing < one.site.ranks.shape[1])).tolist():
            lines.append(_line(program, one.site, meeting, tasks))
    lines.sort()
    shown = "; ".join(text for _, text in lines[:SHOWN])
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return ProgramError(
        f"the program never ends, ranks wait for each other forever: {shown}{more}. "
        "All members must issue the ops they share in the same order on each stream"
    )


def _line(program: Program, site: Site, meeting: int, tasks: list[list[Task]]) -> tuple[int, str]:
    here: list[int] = []
    at: list[str] = []
    sides = site.sides_of(np.array([meeting]))
    for side in sides:
        (r, i), role = side.key, program.roles[side.key[0]]
        task = tasks[r][i]
        came = role.ranks[(side.meeting_of == meeting) & (np.asarray(task.unmet) == 0)].tolist()
        here += came
        at += [f"op {i} {task.op.name!r}{_words(task.op)}"] if came else []
    missing = sorted(set(site.ranks[meeting].tolist()) - set(here))
    known = np.concatenate([program.roles[side.key[0]].ranks[side.meeting_of == meeting] for side in sides])
    never = sorted(set(missing) - set(known.tolist()))
    tail = f" ({_ranks(np.array(never))} never {'does' if len(never) == 1 else 'do'})" if never else ""
    verb = "waits" if len(here) == 1 else "wait"
    text = f"{_ranks(np.array(sorted(here)))} {verb} at {' and '.join(at)} for {_ranks(np.array(missing))}{tail}"
    return min(here), text


def _words(op: Op) -> str:
    if isinstance(op, Collective):
        return f" ({op.kind} on communicator {op.communicator!r}, stream {op.stream!r})"
    return f" ({'send' if isinstance(op, Send) else 'recv'}, stream {op.stream!r})"


def _ranks(ranks: npt.NDArray[np.int64]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return "ranks " + ", ".join(map(str, ranks[:SHOWN].tolist())) + more
