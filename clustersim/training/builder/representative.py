"""Part of a Program's ranks, which stand for all: data-parallel replicas do the same at the same time.

The ranks that are kept do what they did, among themselves. A group of which only some members are kept has the plan of
the whole group, so that its transfer takes as long, and uses the same links, as with everybody: what the others' ranks
would use beside it on *their* nodes is what the kept ones use on theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from clustersim.core.arrays import Ints
from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective, Compute, Op, Program, Role


@dataclass(frozen=True, eq=False)
class Representative:
    """A Program of fewer ranks.

    program, mesh : of the kept ranks, numbered anew. whole : communicator and a group's kept ranks, as bytes -> the
        GPUs of all of it.
    """

    program: Program
    mesh: Mesh
    whole: Mapping[tuple[str, bytes], Ints]


def representative(program: Program, mesh: Mesh, kept: Ints) -> Representative:
    """The Program of the ``kept`` ranks (ascending).

    Raises :class:`ProgramError` where they cannot: a peer is missing, or groups have different numbers of kept members.
    """
    part = _ArrayPart(mesh, kept)
    roles = tuple(role for role in map(part.role, program.roles) if len(role.ranks))
    per_node = int(np.gcd(mesh.nproc_per_node, len(kept)))
    small = Mesh(mesh.gpus[kept], per_node)
    return Representative(replace(program, world_size=len(kept), roles=roles), small, part.whole)


@dataclass(eq=False)
class _ArrayPart:
    """The kept ranks' part of arrays; ops share theirs, so that each is cut once."""

    mesh: Mesh
    kept: Ints
    whole: dict[tuple[str, bytes], Ints] = field(default_factory=dict)
    _known: dict[tuple[int, object], tuple[object, Ints]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.at = np.full(self.mesh.world_size, -1, dtype=np.int64)
        self.at[self.kept] = np.arange(len(self.kept))

    def role(self, role: Role) -> Role:
        """A role's kept ranks."""
        mine = np.flatnonzero(self.at[role.ranks] >= 0)
        ops = tuple(self._op(op, mine) for op in role.ops)
        pace = None if role.pace is None else role.pace[:, mine]
        return replace(role, ranks=self.at[role.ranks[mine]], ops=ops, pace=pace)

    def _op(self, op: Op, mine: Ints) -> Op:
        if isinstance(op, Compute):
            if isinstance(op.duration, np.ndarray) and op.duration.ndim:
                return msgspec.structs.replace(op, duration=op.duration[mine])
            return op
        if isinstance(op, Collective):
            return msgspec.structs.replace(op, groups=self._groups(op.groups, op.communicator))
        return msgspec.structs.replace(op, peer=self._peers(op.peer, mine))

    def _groups(self, groups: Ints, communicator: str) -> Ints:
        key = id(groups), communicator
        if key not in self._known:
            mine = self.at[groups]
            some = (mine >= 0).any(axis=1)
            mine = mine[some]
            everybody = groups[some]
            counts = (mine >= 0).sum(axis=1)
            if len(set(counts.tolist())) != 1:
                raise ProgramError("groups have different numbers of the ranks that stand for all")
            few = np.ascontiguousarray(mine[mine >= 0].reshape(len(mine), counts[0]))
            if counts[0] < groups.shape[1]:
                for ranks, gpus in zip(few, self.mesh.gpus[everybody], strict=True):
                    self.whole[communicator, ranks.tobytes()] = gpus
            self._known[key] = groups, few
        return self._known[key][1]

    def _peers(self, peer: Ints, mine: Ints) -> Ints:
        key = id(peer), id(mine)
        if key not in self._known:
            other = np.where(peer[mine] >= 0, self.at[peer[mine]], -1)
            if np.any((other < 0) & (peer[mine] >= 0)):
                raise ProgramError("a rank that stands for others sends to one that does not")
            self._known[key] = (peer, mine), other
        return self._known[key][1]
