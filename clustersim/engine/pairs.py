"""Sends and recvs, paired: the k-th send of a tag between two ranks meets the k-th recv of that tag there.

A server's ops are its own, one for every client, while the clients share one op list. So the meetings of a client's op
are one site, however many ops they meet on the other side.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.errors import ProgramError
from clustersim.program import Program, Recv, Role, Send

Ints: TypeAlias = npt.NDArray[np.int64]
OpKey: TypeAlias = tuple[int, int]
"""(role, op in the role's list)."""
Use: TypeAlias = tuple[int, int, int]
"""Role, op and position in the role of the rank that comes."""
Pair: TypeAlias = tuple[int, int]
"""Sender and receiver, global ranks."""
Met: TypeAlias = tuple[Use, Use | None, Pair]
"""One meeting: who comes first in order of roles and ops, who second, if anybody does."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Meetings of one op with its peers.

    Parameters
    ----------
    key, op : the op. positions : (G,) int, of the ranks in its role, one a meeting. ranks : (G, 2) int, who meets.
    others : the ops of the other side: one for all meetings, one each, or none where nobody ever comes.
    other_positions : (G,) int, of their ranks.
    """

    key: OpKey
    op: Send | Recv
    positions: Ints
    ranks: Ints
    others: tuple[OpKey, ...]
    other_positions: Ints


class Matching:
    """Collects the sends and recvs of a Program."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ops: dict[OpKey, Send | Recv] = {}
        self._sends: dict[tuple[str, int, int], list[Use]] = defaultdict(list)
        self._recvs: dict[tuple[str, int, int], list[Use]] = defaultdict(list)

    def add(self, key: OpKey, op: Send | Recv, role: Role) -> None:
        """Note an op of every rank that has a peer. Raises :class:`ProgramError` for a peer that cannot be."""
        sends, (r, i) = isinstance(op, Send), key
        self._ops[key] = op
        for position, peer in enumerate(op.peer.tolist()):
            if peer < 0:
                continue
            rank = int(role.ranks[position])
            if peer >= self.world_size or peer == rank:
                where = f"role {role.name!r}, op {i} {op.name!r}"
                raise ProgramError(
                    f"{where}: rank {rank} names rank {peer} as its peer in a world of {self.world_size}"
                )
            if sends:
                self._sends[op.tag, rank, peer].append((r, i, position))
            else:
                self._recvs[op.tag, peer, rank].append((r, i, position))

    def pairs(self, program: Program) -> list[Pairs]:
        """All meetings. Raises :class:`ProgramError` where a send and its recv differ in size."""
        together: dict[tuple[OpKey, ...], list[Met]] = {}
        for name in dict.fromkeys([*self._sends, *self._recvs]):
            for sent, came in zip_longest(self._sends.get(name, ()), self._recvs.get(name, ())):
                uses = sorted(use for use in (sent, came) if use is not None)
                one, other = uses[0], uses[1] if len(uses) > 1 else None
                ops: tuple[OpKey, ...] = (one[:2],)
                if other is not None:
                    self._same_size(program, one, other)
                    if len(program.roles[other[0]].ranks) > 1:
                        ops = one[:2], other[:2]  # two ops of many ranks, which meet pair by pair
                else:
                    ops = one[:2], (-1, -1)
                together.setdefault(ops, []).append((one, other, name[1:]))
        return [self._gathered(met) for met in together.values()]

    def _gathered(self, met: list[Met]) -> Pairs:
        met.sort(key=lambda m: (m[1] or (-1, -1, -1))[:2])  # stable: pairs of one op stay in order of ranks
        others = [other for _, other, _ in met if other is not None]
        key = met[0][0][:2]
        return Pairs(
            key,
            self._ops[key],
            np.array([one[2] for one, _, _ in met], dtype=np.int64),
            np.array([pair for _, _, pair in met], dtype=np.int64),
            tuple(dict.fromkeys(other[:2] for other in others)),
            np.array([other[2] for other in others], dtype=np.int64),
        )

    def _same_size(self, program: Program, one: Use, other: Use) -> None:
        ops = [self._ops[use[:2]] for use in (one, other)]
        if ops[0].nbytes == ops[1].nbytes:
            return
        who = []
        for (r, i, position), op in zip((one, other), ops, strict=True):
            role, verb = program.roles[r], "send" if isinstance(op, Send) else "recv"
            caller = f"rank {role.ranks[position]} (role {role.name!r}, op {i} {op.name!r})"
            who.append(f"{caller} calls {verb} of {op.nbytes:.0f} bytes")
        raise ProgramError(f"{who[0]} where {who[1]}; a send and its recv must have one size")
