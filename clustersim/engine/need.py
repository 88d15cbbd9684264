"""Memory a run will take, told before it starts, so that one that cannot fit is refused instead of killed.

What is kept grows with four things: the machine's links (routes and loads), a program's ops, the ops times the ranks
where ranks go at paces of their own, and transfers. The bytes of each were measured on the shipped scenarios, from 8 to
16,384 ranks, as peak memory of a process of its own; tests/test_need.py holds the sum to within a factor of two.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clustersim.errors import ProgramError
from clustersim.program import Compute, Program, Recv, Role, Send
from clustersim.topology import Topology
from clustersim.units import format_bytes

BASE = 45 * 2**20
"""The interpreter, numpy and this package [bytes]."""

LINK, OP, RANK_OP, SEND = 1000.0, 3000.0, 16.0, 6000.0
"""[bytes] of a link; of an op; of an op on one rank, where ranks differ; of a send with its recv."""

REPLAYED = 210.0
"""[bytes] of a transfer at chunk fidelity: its place in the schedule, what it waits for, its times, its stretch."""

SMALL = 2**28
"""What every machine has [bytes]: so little is not asked for."""

GROUPS = Path("/sys/fs/cgroup")


def flow(program: Program, topology: Topology) -> float:
    """[bytes] of playing a Program with a flow per transfer, and reading its figures: the whole process."""
    kept = sum(OP * len(role.ops) + SEND * _sends(role) for role in program.roles)
    apart = sum(RANK_OP * len(role.ops) * len(role.ranks) for role in program.roles if _differ(role))
    return BASE + LINK * topology.n_links + kept + apart


def replay(transfers: int) -> float:
    """[bytes] more for playing so many transfers one by one."""
    return REPLAYED * transfers


def _sends(role: Role) -> int:
    return sum(int((op.peer >= 0).sum()) for op in role.ops if isinstance(op, Send | Recv)) // 2


def _differ(role: Role) -> bool:
    """Whether a role's ranks go at paces of their own."""
    return role.pace is not None or any(isinstance(op, Compute) and np.ndim(op.duration) > 0 for op in role.ops)


def check(needed: float, what: str, instead: str) -> None:
    """Raise :class:`ProgramError` where ``needed`` bytes are more than this process can still get.

    ``what`` : ``"at chunk fidelity"``. ``instead`` : what would fit.
    """
    free = free_memory() if needed > SMALL else None
    if free is not None and needed > free:
        told = f"the run needs about {format_bytes(needed)} {what}, {format_bytes(free)} are free"
        raise ProgramError(f"{told}; {instead}")


def free_memory() -> float | None:
    """[bytes] this process can still get: what the machine has, or its control group allows; None where unknown."""
    known = [_meminfo(), _left("memory.max", "memory.current"),
             _left("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")]  # fmt: skip
    return min((value for value in known if value is not None), default=None)


def _meminfo() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024.0 * float(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _left(limit: str, used: str) -> float | None:
    """Of a control group's limit; what it caches of files would be given back, so it is not counted as used."""
    try:
        most, now = (GROUPS / limit).read_text().strip(), float((GROUPS / used).read_text())
        stat = (GROUPS / limit).with_name("memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    names = "inactive_file ", "total_inactive_file "
    cached = next((float(line.split()[1]) for line in stat if line.startswith(names)), 0.0)
    return None if most == "max" else max(0.0, float(most) - now + cached)
