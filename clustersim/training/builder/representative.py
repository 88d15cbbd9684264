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


def representative(program: Program, mesh: Mesh, kept_ranks: Ints) -> Representative:
    """The Program of the ``kept_ranks`` ranks (ascending).

    Raises :class:`ProgramError` where they cannot: a peer is missing, or groups have different numbers of kept members.
    """
    part = _ArrayPart(mesh, kept_ranks)
    roles = tuple(role for role in map(part.role, program.roles) if len(role.ranks))
    per_node = int(np.gcd(mesh.nproc_per_node, len(kept_ranks)))
    small = Mesh(mesh.gpus[kept_ranks], per_node)
    return Representative(replace(program, world_size=len(kept_ranks), roles=roles), small, part.whole)


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
        positions = np.flatnonzero(self.at[role.ranks] >= 0)
        ops = tuple(self._op(op, positions) for op in role.ops)
        pace = None if role.pace is None else role.pace[:, positions]
        return replace(role, ranks=self.at[role.ranks[positions]], ops=ops, pace=pace)

    def _op(self, op: Op, positions: Ints) -> Op:
        if isinstance(op, Compute):
            if isinstance(op.duration, np.ndarray) and op.duration.ndim:
                return msgspec.structs.replace(op, duration=op.duration[positions])
            return op
        if isinstance(op, Collective):
            return msgspec.structs.replace(op, groups=self._groups(op.groups, op.communicator))
        return msgspec.structs.replace(op, peer=self._peers(op.peer, positions))

    def _groups(self, groups: Ints, communicator: str) -> Ints:
        key = id(groups), communicator
        if key not in self._known:
            kept_groups = self.at[groups]
            present = (kept_groups >= 0).any(axis=1)
            kept_groups = kept_groups[present]
            everybody = groups[present]
            counts = (kept_groups >= 0).sum(axis=1)
            if len(set(counts.tolist())) != 1:
                raise ProgramError("groups have different numbers of the ranks that stand for all")
            few = np.ascontiguousarray(kept_groups[kept_groups >= 0].reshape(len(kept_groups), counts[0]))
            if counts[0] < groups.shape[1]:
                for ranks, gpus in zip(few, self.mesh.gpus[everybody], strict=True):
                    self.whole[communicator, ranks.tobytes()] = gpus
            self._known[key] = groups, few
        return self._known[key][1]

    def _peers(self, peer: Ints, positions: Ints) -> Ints:
        key = id(peer), id(positions)
        if key not in self._known:
            peers = np.where(peer[positions] >= 0, self.at[peer[positions]], -1)
            if np.any((peers < 0) & (peer[positions] >= 0)):
                raise ProgramError("a rank that stands for others sends to one that does not")
            self._known[key] = (peer, positions), peers
        return self._known[key][1]
