"""Op lists of random Programs: a Program is written as a list of events, each appended by every role it involves.

All roles append in one order, so a Program of such events ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import msgspec
import numpy as np

from clustersim.core.byte_matrix import byte_matrix
from clustersim.core.program import Collective, Compute, Op, Program, Recv, Role, Send


class Numbers:
    """Times, bytes and factors. ``even``: from few round values, so that many things happen at one instant.

    ``idle``: some kernels take no time at all.
    """

    def __init__(self, rng: Random, even: bool) -> None:
        self.rng = rng
        self.even = even
        self.idle = True

    def of(self, *values: float) -> float:
        """One of these, or something near one of them."""
        value = self.rng.choice(values)
        return value if self.even else value * self.rng.uniform(0.5, 1.5)

    def seconds(self) -> float:
        """A duration [s]; sometimes none."""
        return 0.0 if self.idle and self.rng.random() < 0.1 else self.of(0.5, 1.0, 2.0, 4.0)

    def per_rank(self, n: int) -> float | np.ndarray:
        """One duration, or one per rank."""
        if self.rng.random() < 0.5:
            return self.seconds()
        return np.array([self.seconds() for _ in range(n)])

    def nbytes(self) -> float:
        """Bytes of a transfer; sometimes none."""
        return 0.0 if self.rng.random() < 0.1 else self.of(1.0, 4.0, 16.0, 32.0)


class Draft:
    """Op lists in the making, one per role."""

    def __init__(self, rng: Random, sizes: Sequence[int], even: bool) -> None:
        self.rng, self.numbers = rng, Numbers(rng, even)
        order = list(range(sum(sizes)))
        if rng.random() < 0.3:  # roles need not be neighbours
            rng.shuffle(order)
        bounds = np.cumsum([0, *sizes]).tolist()
        self.ranks = [sorted(order[a:b]) for a, b in pairwise(bounds)]
        self.ops: list[list[Op]] = [[] for _ in sizes]
        self.step = 0
        self.streams = ["comm", "comm", "comm2", "compute"]

    def _next(self, role: int, before: int | None = None) -> tuple[int, ...]:
        """A few earlier ops of a role, of those below ``before``."""
        earlier = len(self.ops[role]) if before is None else before
        count = min(earlier, self.rng.choice([0, 0, 1, 1, 2]))
        near = range(max(0, earlier - 6), earlier)
        return tuple(sorted(self.rng.sample(near, min(count, len(near)))))

    def compute(self, role: int, stream: str | None = None, after: tuple[int, ...] | None = None) -> int:
        """A kernel of a role."""
        n = len(self.ranks[role])
        rng = self.rng
        stream = stream or rng.choice(["compute", "compute", "compute", "copy"])
        after = self._next(role) if after is None else after
        op = Compute(f"k{len(self.ops[role])}", self.numbers.per_rank(n), stream, after, step=self.step)
        return self.add(role, msgspec.structs.replace(op, paced=rng.random() < 0.8))

    def add(self, role: int, op: Op) -> int:
        """Append an op; its place in the list."""
        self.ops[role].append(op)
        return len(self.ops[role]) - 1

    def collective(self, roles: Sequence[int], whole: bool = False) -> None:
        """Groups over the ranks of these roles: all of them in one group, or as many as divide into a random size."""
        rng = self.rng
        pool = [rank for role in roles for rank in self.ranks[role]]
        if not whole:
            rng.shuffle(pool)
        size = len(pool) if whole else rng.randint(1, len(pool))
        rows = len(pool) // size if whole or rng.random() < 0.7 else rng.randint(1, len(pool) // size)
        groups = np.array(pool[: rows * size], dtype=np.int64).reshape(rows, size)
        kind = rng.choice(["all_reduce", "all_gather", "broadcast", "barrier", "all_to_all"])
        uneven = kind == "all_to_all" and size > 1 and rng.random() < 0.5
        matrix = byte_matrix([[rng.random() for _ in range(size)] for _ in range(size)]) if uneven else None
        op = Collective(
            "c",
            kind,
            self.numbers.nbytes(),
            groups,
            rng.choice(self.streams),
            root=rng.randrange(size),
            step=self.step,
            communicator=rng.choice(["world", "tp"]),
            matrix=matrix,
        )
        for role in roles:
            mine = groups[np.isin(groups, self.ranks[role]).any(axis=1)] if rng.random() < 0.5 else groups
            if len(mine):
                name = f"c{len(self.ops[role])}"
                self.add(role, msgspec.structs.replace(op, name=name, groups=mine, after=self._next(role)))

    def send(self, source: int, target: int) -> None:
        """Some ranks of one role send to some of another, or of the same."""
        rng = self.rng
        ring = source == target and self.rng.random() < 0.3
        senders = self.ranks[source][:]
        receivers = self.ranks[target][:]
        if ring:
            receivers = receivers[1:] + receivers[:1]
        else:
            rng.shuffle(senders)
            rng.shuffle(receivers)
            if source == target:
                half = len(senders) // 2
                senders, receivers = senders[:half], senders[half:]
        pairs = list(zip(senders, receivers, strict=False))
        pairs = [pair for pair in pairs if pair[0] != pair[1] and rng.random() < 0.9]
        nbytes = self.numbers.nbytes()
        tag = rng.choice(["", "", "x"])
        if not pairs:
            return
        to = dict(pairs)
        by = {b: a for a, b in pairs}
        streams = ("comm", "comm2") if ring else rng.choices(self.streams, k=2)
        places = len(self.ops[source]), len(self.ops[target])
        for verb, role, peers, stream, before in (
            (Send, source, to, streams[0], places[0]),
            (Recv, target, by, streams[1], places[1]),
        ):
            peer = np.array([peers.get(rank, -1) for rank in self.ranks[role]], dtype=np.int64)
            after = self._next(role, before)
            self.add(role, verb(f"p{len(self.ops[role])}", nbytes, peer, stream, after, tag, step=self.step))

    def program(self, stages: bool = False, serves: Sequence[int] = ()) -> Program:
        """The finished lists, each role at its own pace or none."""
        rng = self.rng
        roles = []
        for r, (ranks, ops) in enumerate(zip(self.ranks, self.ops, strict=True)):
            steps = 1 + max((op.step for op in ops), default=0)
            pace = None
            if rng.random() < 0.5:
                pace = np.array([[self.numbers.of(1.0, 2.0) for _ in ranks] for _ in range(steps)])
            stage = r if stages else -1
            roles.append(Role(f"role{r}", np.array(ranks), tuple(ops), pace, stage, serves=r in serves))
        slowdown = rng.choice([0.0, 0.0, 0.125, 0.5, 2.0]) if self.numbers.even else rng.choice([0.0, 0.16, 0.7])
        return Program(sum(map(len, self.ranks)), tuple(roles), slowdown)
