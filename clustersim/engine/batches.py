"""Sends that begin together: as many times slower, and still no need of a clock.

Where a pipeline has micro-batches in both directions, or several stages on a rank, two ranks send each other two
messages at once: both sides come to them behind the same ops. Such a *batch* shares its links, but with nobody else.
Its flows are alike, so each has the rate of its ceiling or its part of the narrowest link, which is known before
anything is played. A batch is a guess as any other (:mod:`clustersim.engine.guess`): that its sends begin at one
instant, and that nobody else asks for what they leave, is looked at after the play. Where it is wrong, all of the batch
are put on the clock, each with the rate that it has alone for its ceiling.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import msgspec
import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.program import Program, Recv, Send
from clustersim.engine.flows.loads import Loads
from clustersim.engine.planning import GroupPlans
from clustersim.engine.sites import Site

BATCHED_FROM = 2
"""Sends that begin together from which they are a batch. (Infinitely many: each is played by itself.)"""


class SendBatch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Sites whose meetings begin together. alone : the plans of each, with its links to itself."""

    sites: tuple[Site, ...]
    alone: GroupPlans


class SendBatches:
    """The batches of a Program.

    ``plans`` : by the plans of one send alone, those of a send in batches of so many. ``streams`` : of an op in a batch
    the stream that all of its batch in this role are told by.
    """

    def __init__(self, program: Program, sites: Iterable[Site], loads: Loads) -> None:
        self.plans: list[tuple[GroupPlans, GroupPlans]] = []
        self.streams: dict[tuple[int, int], str] = {}
        self._of: dict[int, SendBatch] = {}  # by the first meeting of each of its sites
        known: dict[tuple[int, int], GroupPlans] = {}
        for batched in _begin_together(program, sites):
            alone = batched[0].plans
            key = id(alone), len(batched)
            if key not in known:
                known[key] = _slower(alone, len(batched), loads)
                self.plans.append((alone, known[key]))
            batch = SendBatch(tuple(batched), alone)
            for site in batched:
                site.plans = known[key]
                self._of[site.first] = batch
            for sides in zip(*(site.sides for site in batched), strict=True):
                names = [program.roles[side.key[0]].ops[side.key[1]].stream for side in sides]
                self.streams.update((side.key, min(names)) for side in sides)
        self._firsts, self._others = self._meetings()

    def _meetings(self) -> tuple[Ints, Ints]:
        """Of each meeting of a batch but those of its first site: the one of the first, and itself."""
        pairs = [(batch.sites[0], site) for batch in self._all() for site in batch.sites[1:]]
        none = np.zeros(0, dtype=np.int64)
        firsts = [first.first + np.arange(len(first.ranks)) for first, _ in pairs]
        others = [site.first + np.arange(len(site.ranks)) for _, site in pairs]
        return np.concatenate([none, *firsts]), np.concatenate([none, *others])

    @property
    def firsts(self) -> Set[int]:
        """All sites in batches, by their first meeting."""
        return self._of.keys()

    def _all(self) -> list[SendBatch]:
        return list({id(batch): batch for batch in self._of.values()}.values())

    def apart(self, begin: Floats, end: Floats) -> set[int]:
        """Sites of batches, by first meeting, that did not begin together. ``begin``, ``end`` : of every meeting [s];
        of what is not over the end is 0."""
        first, other = self._firsts, self._others
        over = (end[first] > 0.0) & (end[other] > 0.0)
        wrong = np.unique(other[over & (begin[first] != begin[other])])
        starts = np.array(sorted(self._of), dtype=np.int64)
        return set(starts[np.unique(np.searchsorted(starts, wrong, side="right") - 1)].tolist())

    def whole(self, some: set[int]) -> set[int]:
        """Sites, by first meeting, and all of the batches that they are in."""
        batches = [self._of[first] for first in some if first in self._of]
        return some.union(*({site.first for site in batch.sites} for batch in batches))

    def part(self, clocked: set[int]) -> None:
        """These are on the clock, where each has the rate of its own; all of a batch are, or none."""
        clocked |= self.whole(clocked)
        gone = clocked & self._of.keys()
        for first in gone:
            batch = self._of.pop(first)
            for site in batch.sites:
                site.plans = batch.alone
        if gone:
            self._firsts, self._others = self._meetings()


def _begin_together(program: Program, sites: Iterable[Site]) -> list[list[Site]]:
    """Sends of equal size between the same ranks, each on streams of its own, that both sides come to behind the same
    ops."""
    alike: dict[tuple[object, ...], list[Site]] = {}
    for site in sites:
        ops = [program.roles[side.key[0]].ops[side.key[1]] for side in site.sides]
        if len(ops) != 2 or site.apart or not isinstance(ops[0], Send | Recv) or not all(op.after for op in ops):
            continue
        waits = [(side.key[0], *sorted(op.after)) for side, op in zip(site.sides, ops, strict=True)]
        alike.setdefault((id(site.ranks), id(site.plans), *waits), []).append(site)
    return [batched for batched in alike.values() if len(batched) >= BATCHED_FROM and _on_streams(program, batched)]


def _on_streams(program: Program, batched: list[Site]) -> bool:
    """Whether no two of them follow one another on a stream."""
    for sides in zip(*(site.sides for site in batched), strict=True):
        if len({program.roles[side.key[0]].ops[side.key[1]].stream for side in sides}) < len(batched):
            return False
    return True


def _slower(plans: GroupPlans, n: int, loads: Loads) -> GroupPlans:
    """Plans of one of ``n`` sends at once; what none is shorter than is what it was."""
    links = np.array([loads.alone[load] for load in plans.load.tolist()])
    rate = np.minimum(plans.alone, links / n)
    moving = np.where(plans.nbytes > 0, plans.nbytes, 0.0) / rate
    return msgspec.structs.replace(plans, alone=rate, moving=moving)
