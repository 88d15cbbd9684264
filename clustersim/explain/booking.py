"""What causes have cost, added up: many losses at once, each with whom it is charged to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.explain.pieces import Pieces


@dataclass(frozen=True)
class Blame:
    """What lost time is charged to: a ``cause`` and its ``subject``; who held whom, in which op, and over which link
    (-1: none)."""

    cause: str
    subject: str
    holder: int = -1
    holder_op: int = -1
    link: int = -1

    @property
    def charged(self) -> tuple[str, str]:
        """Cause and subject."""
        return self.cause, self.subject


@dataclass(frozen=True, eq=False)
class LostSeconds:
    """Seconds that each rank of a class (``owner``) lost in one ``op`` (-1: none) by one ``rule``, from its first
    ``piece`` of the partition to its ``last``, of which one is the ``longest``; ``state`` is the first one's. Columns,
    (n,) each."""

    seconds: Floats
    piece: Ints
    last: Ints
    owner: Ints
    op: Ints
    rule: Ints
    state: Ints
    longest: Ints

    def at(self, places: Ints) -> LostSeconds:
        """Those at some places."""
        return LostSeconds(*(getattr(self, column.name)[places] for column in fields(self)))


@dataclass
class Charge:
    """What one cause has cost so far [s, of all ranks together], and its costliest piece."""

    cause: str
    subject: str
    seconds: float = 0.0
    count: int = 0
    worst: float = 0.0
    op: int = -1
    rank: int = -1
    holder_rank: int = -1
    holder_op: int = -1
    link: int = -1
    begin: float = 0.0
    end: float = 0.0
    ranks: set[int] = field(default_factory=set)

    def worst_is(self, lost: LostSeconds, place: int, blame: Blame, cut: Pieces) -> None:
        """Take the loss at a place for the costliest piece."""
        self.worst = lost.seconds.item(place)
        self.op = lost.op.item(place)
        self.rank = cut.ranks.item(lost.owner.item(place))
        self.holder_rank, self.holder_op, self.link = blame.holder, blame.holder_op, blame.link
        self.begin = cut.start.item(lost.piece.item(place))
        self.end = cut.stop.item(lost.last.item(place))


def booked(
    lost: LostSeconds, blames: Sequence[Blame], blamed: Ints, cut: Pieces, weight: Floats
) -> dict[tuple[str, str], Charge]:
    """Charges by cause and subject.

    blamed : (n,) int, of each loss which of the ``blames`` it is charged to. weight : (c,) float, ranks of each class.
    """
    charges = {blame.charged: Charge(*blame.charged) for blame in blames}
    number = {key: i for i, key in enumerate(charges)}
    of = np.array([number[blame.charged] for blame in blames], dtype=np.int64)[blamed]
    seconds = np.bincount(of, weights=lost.seconds * weight[lost.owner], minlength=len(charges))
    count = np.bincount(of, minlength=len(charges))
    lots = np.split(np.argsort(of, kind="stable"), np.cumsum(count)[:-1])
    for charge, spent, lot in zip(charges.values(), seconds.tolist(), lots, strict=True):
        charge.seconds = spent
        charge.count = len(lot)
        classes = np.zeros(len(cut.ranks), dtype=np.bool_)
        classes[lost.owner[lot]] = True
        charge.ranks.update(np.flatnonzero(classes[cut.class_of]).tolist())
        known = lot[lost.op[lot] >= 0]  # where an op is known, the costliest is one of those
        candidates = known if len(known) else lot[lost.seconds[lot] > 0]
        if len(candidates):
            worst = int(candidates[np.argmax(lost.seconds[candidates])])
            charge.worst_is(lost, worst, blames[blamed.item(worst)], cut)
    return charges


def by_step(
    lost: LostSeconds, blames: Sequence[Blame], blamed: Ints, step: Ints, weight: Floats
) -> dict[int, dict[tuple[str, str], float]]:
    """Seconds of all ranks together by the step of each loss, (n,) int, and what it is charged to."""
    keys = {blame.charged: i for i, blame in enumerate(blames)}
    of = np.array([keys[blame.charged] for blame in blames], dtype=np.int64)[blamed]
    pairs, first, which = np.unique(step * len(blames) + of, return_index=True, return_inverse=True)
    seconds = np.bincount(which.reshape(-1), weights=lost.seconds * weight[lost.owner], minlength=len(pairs)).tolist()
    sums: dict[int, dict[tuple[str, str], float]] = {}
    for k in np.argsort(first).tolist():
        own_step, blame = divmod(int(pairs[k]), len(blames))
        sums.setdefault(own_step, {})[blames[blame].charged] = seconds[k]
    return sums
