"""Sends and recvs, paired: the k-th send of a tag between two ranks meets the k-th recv of that tag there.

Every use of an op by a rank is a row of columns, and sorting pairs them all at once: half a million sends of a pipeline
cost a few sorts. A server's ops are its own, one for every client, while the clients share one op list. So the meetings
of a client's op are one site, however many ops they meet on the other side.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby
from typing import TypeAlias, cast

import msgspec
import numpy as np

from clustersim.core.arrays import Bools, Ints
from clustersim.core.errors import ProgramError
from clustersim.core.program import Program, Recv, Role, Send

OpKey: TypeAlias = tuple[int, int]
"""(role, op in the role's list)."""

NOBODY = -1


class Pairs(msgspec.Struct, frozen=True, eq=False):
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


class _PairUses(msgspec.Struct, frozen=True, eq=False):
    """Columns of uses in order of role, op and position; ``op`` counts all ops of the Program, list after list."""

    op: Ints
    position: Ints
    tag: Ints
    src: Ints
    dst: Ints
    sends: Bools


def pairs(program: Program) -> list[Pairs]:
    """All meetings of sends and recvs.

    Raises
    ------
    ProgramError : for a peer that cannot be, and where a send and its recv differ in size.
    """
    first = np.cumsum([0, *(len(role.ops) for role in program.roles)])
    uses = _uses(program, first)
    if not len(uses.op):
        return []
    firsts, seconds, name = _meetings(uses)
    met = seconds != NOBODY
    keys = uses.op[seconds], np.where(met, uses.op[seconds], NOBODY)
    sizes = np.zeros(first[-1])
    many = np.zeros(first[-1], dtype=np.bool_)
    for r, role in enumerate(program.roles):
        sizes[first[r] : first[r + 1]] = [getattr(op, "nbytes", 0.0) for op in role.ops]
        many[first[r] : first[r + 1]] = len(role.ranks) > 1
    wrong = np.flatnonzero(met & (sizes[uses.op[firsts]] != sizes[keys[0]]))
    if len(wrong):
        raise _differ(program, first, uses, [int(column[wrong[0]]) for column in (firsts, seconds)])
    # Two ops of many ranks meet pair by pair; ops of single ranks that meet one op are one site with it.
    with_whom = np.where(met, np.where(many[keys[0]], keys[0], NOBODY - 1), NOBODY)
    order = np.lexsort((name, keys[1], with_whom, uses.op[firsts]))
    firsts = firsts[order]
    seconds = seconds[order]
    with_whom = with_whom[order]
    op = uses.op[firsts]
    gathering = _Gathering(program, first, uses, firsts, seconds)
    starts = np.flatnonzero(np.r_[True, (op[1:] != op[:-1]) | (with_whom[1:] != with_whom[:-1])])
    spans = zip(starts.tolist(), [*starts[1:].tolist(), len(firsts)], strict=True)
    return [gathering.of(a, b) for a, b in spans]


def _uses(program: Program, first: Ints) -> _PairUses:
    tags: dict[str, int] = {}
    parts: list[tuple[Ints, ...]] = [(np.zeros(0, dtype=np.int64),) * 6]
    for r, role in enumerate(program.roles):
        message_ops = [i for i, op in enumerate(role.ops) if isinstance(op, Send | Recv)]
        if not message_ops:
            continue
        ops = [cast("Send | Recv", role.ops[i]) for i in message_ops]
        peers = np.concatenate([op.peer for op in ops]).reshape(len(ops), -1)
        which, position = np.nonzero(peers >= 0)
        rank = role.ranks[position]
        peer = peers[which, position]
        _must_be(program, role, np.array(message_ops)[which], rank, peer)
        tag = np.array([tags.setdefault(op.tag, len(tags)) for op in ops])[which]
        sends = np.array([isinstance(op, Send) for op in ops])[which]
        ends = np.where(sends, rank, peer), np.where(sends, peer, rank)
        parts.append((first[r] + np.array(message_ops)[which], position, tag, *ends, sends))
    op_, op_position, tag, src, dst, is_send = (np.concatenate(column) for column in zip(*parts, strict=True))
    return _PairUses(op_, op_position, tag, src, dst, is_send.astype(np.bool_))


def _must_be(program: Program, role: Role, op: Ints, rank: Ints, peer: Ints) -> None:
    """Raise where a peer is outside the world, or the rank itself; of each use: the op's place, who, whom."""
    wrong = np.flatnonzero((peer >= program.world_size) | (peer == rank))
    if len(wrong):
        k = wrong[0]
        place_text = f"role {role.name!r}, op {op[k]} {role.ops[op[k]].name!r}"
        raise ProgramError(
            f"{place_text}: rank {rank[k]} names rank {peer[k]} as its peer in a world of {program.world_size}"
        )


def _meetings(uses: _PairUses) -> tuple[Ints, Ints, Ints]:
    """Of each meeting: the use that comes first in order of roles and ops, the other (-1: none), and a number by which
    meetings of one op are in order of who sends."""
    n = len(uses.op)
    ranks = int(max(uses.src.max(), uses.dst.max())) + 1
    # Names (tag, sender, receiver), of each its recvs and then its sends, in order.
    names = (uses.tag * ranks + uses.src) * ranks + uses.dst
    by = np.argsort(2 * names + uses.sends, kind="stable")
    names = names[by]
    sends = uses.sends[by]
    start = np.flatnonzero(np.r_[True, names[1:] != names[:-1]])
    size = np.diff(np.r_[start, n])
    sent = np.add.reduceat(sends, start, dtype=np.int64)
    name = np.repeat(np.arange(len(start)), size)
    # The k-th recv of a name meets its k-th send; those that nobody meets stay alone.
    received = (size - sent)[name]
    k = np.arange(n) - start[name] - np.where(sends, received, 0)
    alone = k >= np.where(sends, received, sent[name])
    places = np.flatnonzero(alone | ~sends)
    first = by[places]
    second = np.where(alone[places], NOBODY, by[np.minimum(places + received[places], n - 1)])
    met = second != NOBODY
    firsts = np.where(met, np.minimum(first, second), first)
    seconds = np.where(met, np.maximum(first, second), NOBODY)
    # Names are numbered by their first send, and those that are only received after them.
    order = np.where(uses.sends, np.cumsum(uses.sends), n + np.arange(n))
    number = order[by[np.where(sent > 0, start + size - sent, start)]]
    return firsts, seconds, number[name[places]] * np.int64(n) + k[places]


class _Gathering:
    """Meetings in order, ``firsts`` and ``seconds`` of their uses, of which those of one op are looked at together."""

    def __init__(self, program: Program, first: Ints, uses: _PairUses, firsts: Ints, seconds: Ints) -> None:
        self._program = program
        self._first = first.tolist()
        self._met = (seconds != NOBODY).tolist()
        self._op = uses.op[firsts].tolist()
        self._other_op = uses.op[seconds].tolist()
        self._positions = uses.position[firsts]
        self._other_positions = uses.position[seconds]
        self._ranks = np.stack([uses.src[firsts], uses.dst[firsts]], axis=1)

    def of(self, a: int, b: int) -> Pairs:
        """The meetings from ``a`` to before ``b``: of one op, and somebody comes to all of them or to none."""
        key = _key(self._first, self._op[a])
        op = cast("Send | Recv", self._program.roles[key[0]].ops[key[1]])
        met = slice(a, b if self._met[a] else a)
        others = tuple(_key(self._first, number) for number, _ in groupby(self._other_op[met]))
        return Pairs(key, op, self._positions[a:b], self._ranks[a:b], others, self._other_positions[met])


def _key(first: list[int], number: int) -> OpKey:
    role = bisect_right(first, number) - 1
    return role, number - first[role]


def _differ(program: Program, first: Ints, uses: _PairUses, pair: list[int]) -> ProgramError:
    who = []
    for use in pair:
        r, i = _key(first.tolist(), int(uses.op[use]))
        role = program.roles[r]
        op = cast("Send | Recv", role.ops[i])
        caller = f"rank {role.ranks[uses.position[use]]} (role {role.name!r}, op {i} {op.name!r})"
        who.append(f"{caller} calls {'send' if isinstance(op, Send) else 'recv'} of {op.nbytes:.0f} bytes")
    return ProgramError(f"{who[0]} where {who[1]}; a send and its recv must have one size")
