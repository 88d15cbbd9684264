"""Memory a run will take, told before it starts, so that one that cannot fit is refused instead of killed.

What is kept grows with four things: the machine's links (routes and loads), a program's ops, the ops times the ranks
where ranks go at paces of their own, and transfers. The bytes of each were measured on the shipped scenarios, from 8 to
16,384 ranks, as peak memory of a process of its own; tests/test_need.py holds the sum to within a factor of two.
"""

from __future__ import annotations

import numpy as np

from clustersim.core.limits import check
from clustersim.core.program import Compute, Program, Recv, Role, Send
from clustersim.core.repeated import distinct, written
from clustersim.core.topology import Topology

__all__ = ["check", "flow", "replay"]

BASE = 45 * 2**20
"""The interpreter, numpy and this package [bytes]."""

LINK = 1000.0
OP = 3000.0
RANK_OP = 16.0
SEND = 6000.0
"""[bytes] of a link; of an op; of an op on one rank, where ranks differ; of a send with its recv."""

REPLAYED = 210.0
"""[bytes] of a transfer at chunk fidelity: its place in the schedule, what it waits for, its times, its stretch."""


def flow(program: Program, topology: Topology) -> float:
    """[bytes] of playing a Program with a flow per transfer, and reading its figures: the whole process."""
    op_bytes = sum(OP * len(role.ops) + SEND * _sends(role) for role in program.roles)
    apart = sum(RANK_OP * len(role.ops) * len(role.ranks) for role in program.roles if _differ(role))
    return BASE + LINK * topology.n_links + op_bytes + apart


def replay(transfers: int) -> float:
    """[bytes] more for playing so many transfers one by one."""
    return REPLAYED * transfers


def _sends(role: Role) -> int:
    peers = [op.peer for op in written(role.ops) if isinstance(op, Send | Recv)]
    return int(np.count_nonzero(np.concatenate(peers) >= 0)) // 2 if peers else 0


def _differ(role: Role) -> bool:
    """Whether a role's ranks go at paces of their own."""
    computed = (op.duration for _, op in distinct(role.ops) if isinstance(op, Compute))
    return role.pace is not None or any(isinstance(duration, np.ndarray) for duration in computed)
