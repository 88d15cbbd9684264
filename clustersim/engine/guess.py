"""Which transfers share links: guessed, and checked after the play.

A play in which every *free* transfer goes at the rate it has alone, and the clocked ones share among themselves, is the
exact one if at no moment a slot that a free transfer crosses is asked for more than it has. For then every free flow
has its holder (its ceiling, or a link that is full with it alone), every clocked flow has one among the clocked, and
nobody's rate is above what the links carry: the rates are max-min at every moment
(:mod:`clustersim.engine.flows.network`). A run is causal, so by induction from one moment to the next it is *the* run.
Where the check finds a slot asked for too much, the sites of the flows that were there are clocked from then on, and
the program is played again. The clocked only become more, so this ends; a wrong guess costs time, never truth.

Most slots need no check. Meetings of the same ranks on the same stream, a *lane*, follow one another, so a slot that
only one lane's group ever uses is never shared; nor is one that carries all of its users at full rate at once. What is
left is all that the clock's network is told of: elsewhere, the rate that a flow has alone holds it. And a site is only
looked at where it moves bytes while another lane does that uses one of its slots: of twenty thousand tensor-parallel
collectives, none.

Some are clocked from the start: meetings of one op that share, and collectives of two streams of which neither waits
for the other. A pipeline's list leaves many sends unordered that never meet in time: they are clocked only where the
kernels between are shorter than the transfers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.program import Collective, Compute, Op, Program, Recv
from clustersim.engine.batches import SendBatches
from clustersim.engine.columns import highest, lowest
from clustersim.engine.flows.loads import ROOM, Loads, Slots, crowded
from clustersim.engine.inside import StretchPlans
from clustersim.engine.planning import GroupPlans
from clustersim.engine.sites import Site
from clustersim.engine.stretches import Stretch
from clustersim.engine.under_way import EarlierCollectives, UnderWay, still

Entries: TypeAlias = tuple[Ints, Ints, Floats]
"""Of flows on slots: which meeting of the site, which slot, and what part of it the flow asks for."""

AT_ONCE = 2**20
"""Uses of slots that are looked at together."""

OFTEN = 0.5
"""The part of a stream's sends that share from which all of them are put on the clock: one more there costs less than
a play too many. (Infinite: no send is there for others.)"""


class SharingGuess:
    """What is known of who may share with whom.

    ``clocked`` : the sites played on the clock, by their first meeting. ``slots`` : those that several may ask for more
    than they have; None where there are none. ``asks_once`` : what one role's list told of is not asked of another's.
    """

    asks_once = True

    def __init__(self, program: Program, sites: tuple[Site, ...], loads: Loads) -> None:
        self._program = program
        self._sites = [site for site in sites if highest(site.plans.nbytes) > 0]
        self.clocked: set[int] = set()
        self.slots: Slots | None = None
        self.batches = SendBatches(program, (), loads)
        self._firsts = np.array([site.first for site in sites], dtype=np.int64)
        self._open: dict[int, Entries] = {}
        self._lane: dict[int, int] = {}
        self._near: dict[int, list[int]] = {}
        lanes: dict[object, int] = {}
        kinds: dict[tuple[int, int], Site] = {}
        users = [0]  # the groups of each lane, one after another
        for site in self._sites:
            lane = self._lane[site.first] = lanes.setdefault(_lane(program, site), len(lanes))
            if lane == len(users) - 1:
                users.append(users[-1] + len(site.ranks))
            kinds.setdefault((lane, id(site.plans)), site)
        if users[-1] > 1 or (users[-1] and loads.varying):
            self._look(kinds, np.array(users), loads)
        else:
            self._sites = []

    def _look(self, kinds: dict[tuple[int, int], Site], starts: Ints, loads: Loads) -> None:
        """Find the slots that may be asked for too much, and what can be seen to share before anything is played."""
        slots = loads.slots()
        user = []
        slots_of = []
        most = []
        own: set[int] = set()
        entries: dict[int, Entries] = {}
        for (lane, plans), site in kinds.items():
            if plans not in entries:
                entries[plans] = _asks(site.plans, slots)
            which, slot, demands = entries[plans]
            user.append(starts[lane] + which)
            slots_of.append(slot)
            most.append(demands)
            if len(site.ranks) > 1 and len(slot) and np.bincount(slot, demands).max() > 1 + ROOM:
                own.add(plans)
        users, slot, demands = _most(np.concatenate(user), np.concatenate(slots_of), np.concatenate(most))
        several = np.bincount(slot, minlength=slots.n) > 1
        crowded_slots = several & (np.bincount(slot, demands, slots.n) > 1 + ROOM)
        crowded_slots[slots.slot[slots.ptr[len(loads.pairs)] :]] = True  # and links that vary, whoever is there
        self.slots = slots.only(crowded_slots)
        shared = crowded_slots[slot]
        lanes = np.searchsorted(starts, users[shared], side="right") - 1
        self._near = self._neighbours(lanes, slot[shared])
        for plans, (which, slot, demands) in entries.items():
            in_crowded = crowded_slots[slot]
            if in_crowded.any():
                self._open[plans] = which[in_crowded], slot[in_crowded], demands[in_crowded]
        self._sites = [site for site in self._sites if id(site.plans) in self._open]
        self.clocked.update(site.first for site in self._sites if id(site.plans) in own)
        self._batch(loads)
        self._look_at_lists()

    def _batch(self, loads: Loads) -> None:
        """Find sends that begin together: each asks for as much less as it is slower."""
        free = [site for site in self._sites if site.first not in self.clocked]
        self.batches = SendBatches(self._program, free, loads)
        for alone, batched in self.batches.plans:
            which, slot, demands = self._open[id(alone)]
            self._open[id(batched)] = which, slot, demands * (batched.alone / alone.alone)[which]

    def _look_at_lists(self) -> None:
        """Put on the clock what the roles' lists alone say will share."""
        numbers: dict[frozenset[int], int] = {}
        self._crossed = {
            plans: numbers.setdefault(frozenset(slot.tolist()), len(numbers))
            for plans, (_, slot, _) in self._open.items()
        }
        self._slots = list(numbers)
        self._sharing: dict[tuple[int, int], bool] = {}
        sites_of: list[dict[int, Site]] = [{} for _ in self._program.roles]
        own_sites: list[dict[int, Site]] = [{} for _ in self._program.roles]
        for site in self._sites:
            r, i = site.sides[0].key
            own_sites[r][i] = site
            for side in site.sides:
                sites_of[side.key[0]][side.key[1]] = site
        for role in range(len(self._program.roles)):
            self.clocked.update(self._unordered(role, own_sites[role]))
            # What follows a batch mostly waits for it, whatever the list tells.
            self.clocked.update(self._beside_sends(role, sites_of[role]) - self.batches.firsts)

    def _unordered(self, r: int, site_of: dict[int, Site]) -> set[int]:
        """Collectives of a role on different streams, neither of which waits for the other, that share a slot: on some
        rank they will be there at once, or nearly. ``site_of`` : of ops that come first at theirs."""
        ops = self._program.roles[r].ops
        collectives = [i for i in site_of if isinstance(ops[i], Collective)]
        number = {stream: n for n, stream in enumerate(dict.fromkeys(ops[i].stream for i in collectives))}
        if len(number) < 2 or all(site.first in self.clocked for site in site_of.values()):
            return set()
        unordered: set[int] = set()
        earlier: dict[tuple[int, int], EarlierCollectives] = {}  # by stream and slots
        for i, reached in zip(sorted(collectives), _reached(ops, number, set(collectives)), strict=True):
            own = number[ops[i].stream]
            crossed = self._crossed[id(site_of[i].plans)]
            for (stream, other), others in earlier.items():
                if stream == own or others.last <= reached[stream] or not self._share(crossed, other):
                    continue
                unordered.add(site_of[i].first)
                unordered.update(site_of[k].first for k in others.told(reached[stream]))
            earlier.setdefault((own, crossed), EarlierCollectives()).add(i)
        return unordered

    def _share(self, crossed: int, other: int) -> bool:
        """Whether two of the sets of slots that transfers cross have one in common."""
        share = self._sharing.get((crossed, other))
        if share is None:
            share = self._sharing[crossed, other] = not self._slots[crossed].isdisjoint(self._slots[other])
        return share

    def _beside_sends(self, r: int, site_of: dict[int, Site]) -> set[int]:
        """Sends of a role, and transfers of its other streams that share a slot with one while its list is no further
        than both take alone: time is that of the list's kernels, one after another, and no rank waits. ``site_of`` : of
        each op that meets others."""
        beside: set[int] = set()
        now = pruned = 0.0
        under_way: dict[tuple[bool, int], UnderWay] = {}  # by whether they are collectives, and slots
        fresh: dict[tuple[bool, int], UnderWay] = {}  # of these, with some that nobody was told of
        alone: dict[int, tuple[float, float]] = {}  # of plans: the longest latency, and what moving takes at most
        for i, op in enumerate(self._program.roles[r].ops):
            if isinstance(op, Compute):
                now += lowest(op.duration)
            elif isinstance(op, Stretch):
                now += op.kernels
            if i not in site_of:
                continue
            first = site_of[i].first
            plans = site_of[i].plans
            stream = self.batches.streams.get((r, i), op.stream)
            together = isinstance(op, Collective)
            crossed = self._crossed[id(plans)]
            if now > pruned:
                under_way, fresh, pruned = still(under_way, now), still(fresh, now), now
            own = stream, together, crossed
            known = self.asks_once and first in self.clocked  # another role's list told of it
            near = list(self._beside(fresh, own, now))
            if near or (not (known or first in beside) and any(self._beside(under_way, own, now))):
                beside.add(first)
            for kind in near:
                transfers = under_way[kind]
                beside.update(transfers.told(stream, now))
                if not transfers.untold:
                    fresh.pop(kind, None)
            if id(plans) not in alone:
                latency, moving = plans.columns
                alone[id(plans)] = highest(latency), highest(moving)
            end = now + alone[id(plans)][0] + alone[id(plans)][1]
            if end > now:
                kind = together, crossed
                transfers = under_way.setdefault(kind, UnderWay())
                transfers.add(stream, end, None if known else first)
                if not known:
                    fresh[kind] = transfers
        return beside

    def _beside(
        self, kinds: dict[tuple[bool, int], UnderWay], own: tuple[str, bool, int], now: float
    ) -> Iterator[tuple[bool, int]]:
        """Kinds with transfers of other streams under way then that share with one; two collectives are not asked
        about. ``own`` : its stream, whether it is a collective, and its slots."""
        stream, together, crossed = own
        for kind, transfers in kinds.items():
            if transfers.beside(stream) > now and not (kind[0] and together) and self._share(crossed, kind[1]):
                yield kind

    def _neighbours(self, lane: Ints, slot: Ints) -> dict[int, list[int]]:
        """Of each lane those that use a slot of it: its own, too, where two of its groups do, for they need not follow
        one another. ``lane`` : of each user of each slot, slot by slot."""
        neighbours: dict[int, set[int]] = {}
        for together in {tuple(lanes.tolist()) for lanes in np.split(lane, np.flatnonzero(np.diff(slot)) + 1)}:
            for own_lane in set(together):
                neighbours.setdefault(own_lane, set()).update(
                    neighbour for neighbour in together if neighbour != own_lane
                )
                if together.count(own_lane) > 1:
                    neighbours[own_lane].add(own_lane)
        return {own_lane: sorted(lanes) for own_lane, lanes in neighbours.items()}

    @property
    def open(self) -> set[int]:
        """Every site that could share with another, by its first meeting."""
        return firsts(self._sites)

    def wrong(self, begin: Floats, end: Floats, since: float = 0.0) -> set[int]:
        """Free sites of a finished play, by first meeting, whose transfers did share.

        ``begin``, ``end`` : of every meeting, when it moves bytes [s]. ``since`` : what was over then is not looked at
        again [s].
        """
        if all(site.first in self.clocked for site in self._sites):
            return set()
        together = self._together(begin, end, since)
        entries = sum(len(self._open[id(site.plans)][1]) for site in together)
        parts = 1 + entries // AT_ONCE
        crowded_sites = (self._crowded(begin, end, together, part, parts) for part in range(parts))
        return self.batches.whole(self.batches.apart(begin, end).union(*crowded_sites) - self.clocked)

    def in_each_step(self, some: set[int]) -> set[int]:
        """Sites, by first meeting, and those that could share as theirs could and are at their place in other steps."""
        place_of: dict[int, tuple[int, str, int]] = {}
        passed: Counter[tuple[int, str, int]] = Counter()
        for site in self._sites:
            r, i = site.sides[0].key
            op = self._program.roles[r].ops[i]
            place_of[site.first] = r, op.stream, passed[r, op.stream, op.step]
            passed[r, op.stream, op.step] += 1
        places = {place_of[first] for first in some}
        return {first for first, place in place_of.items() if place in places}

    def in_each_pass(self, some: set[int], end: Floats, often: float) -> set[int]:
        """Sites, by first meeting, and what is as likely to share in other micro-batches: collectives of the same name
        and stream; and sends of a stream of which many share, for which of them depends on little.

        ``end`` : of every meeting, so far [s], inf where it is not over. ``often`` : what part of the sends of a stream
        that are over, or known to share, is many.
        """
        kinds: dict[tuple[int, str, str], set[int]] = {}
        some = some | self._in_each_role(some)
        for site in self._sites:
            r, i = site.sides[0].key
            op = self._program.roles[r].ops[i]
            kinds.setdefault((r, op.stream, op.name if isinstance(op, Collective) else ""), set()).add(site.first)
        known = self.clocked | some
        widened = set(some)
        for (_, _, name), alike in kinds.items():
            if alike.isdisjoint(some):
                continue
            sharing = len(alike & known)
            over = sum(0.0 < end.item(first) < np.inf for first in alike - known)
            if name or sharing >= often * (sharing + over):
                widened |= alike
        return widened

    def _in_each_role(self, some: set[int]) -> set[int]:
        """Collectives that are at the place of one of these in other roles: of those of their stream that ask for the
        same, so many are before it. What comes down a pipeline meets the same in each stage."""
        alike: dict[object, set[int]] = {}
        passed: Counter[object] = Counter()
        for site in self._sites:
            r, i = site.sides[0].key
            op = self._program.roles[r].ops[i]
            if isinstance(op, Collective):
                asks = op.stream, site.plans.request
                alike.setdefault((asks, passed[r, asks]), set()).add(site.first)
                passed[r, asks] += 1
        return set().union(*(places for places in alike.values() if not places.isdisjoint(some)))

    def _together(self, begin: Floats, end: Floats, since: float) -> list[Site]:
        """Sites that are played while another lane's are with which they have a slot in common, and one is free."""
        which = np.searchsorted(self._firsts, [site.first for site in self._sites])
        low = np.minimum.reduceat(begin, self._firsts)[which]
        high = np.maximum.reduceat(end, self._firsts)[which]
        lane = np.array([self._lane[site.first] for site in self._sites])
        free = np.array([site.first not in self.clocked for site in self._sites])
        moves = high > np.maximum(low, since)
        shares = np.zeros(len(which), dtype=np.bool_)
        for own_lane, lanes in self._near.items():
            near = moves & np.isin(lane, lanes)
            for chosen, with_whom in ((free, near), (~free, near & free)):
                a = np.flatnonzero(moves & (lane == own_lane) & chosen)
                met = np.searchsorted(np.sort(low[with_whom]), high[a], side="left")
                met -= np.searchsorted(np.sort(high[with_whom]), low[a], side="right")
                shares[a] = met > with_whom[a]  # more than itself
        return [self._sites[i] for i in np.flatnonzero(shares).tolist()]

    def _crowded(self, begin: Floats, end: Floats, sites: list[Site], part: int, parts: int) -> set[int]:
        """Sites among these that share, on every slot of a part of them."""
        alike: dict[int, list[int]] = {}
        for site in sites:
            alike.setdefault(id(site.plans), []).append(site.first)
        owners = [np.zeros(0, dtype=np.int64)]
        columns = [(np.zeros(0, dtype=np.int64), *[np.zeros(0)] * 3)]
        for key, site_numbers in alike.items():
            which, slot, demands = self._open[key]
            in_part = slot % parts == part
            place = (np.array(site_numbers)[:, None] + which[in_part]).ravel()
            owners.append(np.repeat(site_numbers, in_part.sum()))
            columns.append(
                (
                    np.tile(slot[in_part], len(site_numbers)),
                    begin[place],
                    end[place],
                    np.tile(demands[in_part], len(site_numbers)),
                )
            )
        slot, begin, end, demands = (np.concatenate(column) for column in zip(*columns, strict=True))
        in_part = end > begin * (1 + 1e-12)
        owner = np.concatenate(owners)[in_part]
        return set(np.unique(owner[crowded(slot[in_part], begin[in_part], end[in_part], demands[in_part])]).tolist())


def _reached(ops: Sequence[Op], number: Mapping[str, int], asked: set[int]) -> Iterator[list[int]]:
    """Of each of some ops, in order: of each numbered stream the last op that is over when it begins; -1 for none."""
    before: list[list[int]] = []
    last: dict[str, int] = {}
    for i, op in enumerate(ops):
        needs = (last[op.stream], *op.after) if op.stream in last else op.after
        reached = before[needs[0]].copy() if needs else [-1] * len(number)
        for need in needs[1:]:
            reached = [*map(max, reached, before[need])]
        for need in needs:
            stream = number.get(ops[need].stream)
            if stream is not None and reached[stream] < need:
                reached[stream] = need
        before.append(reached)
        last[op.stream] = i
        if i in asked:
            yield reached


def _most(users: Ints, slot: Ints, demands: Floats) -> Entries:
    """Of each user on each slot the most it ever asks for, slot by slot."""
    order = np.lexsort((demands, users, slot))
    users = users[order]
    slot = slot[order]
    demands = demands[order]
    last = np.ones(len(users), dtype=np.bool_)
    last[:-1] = (users[1:] != users[:-1]) | (slot[1:] != slot[:-1])
    return users[last], slot[last], demands[last]


def _lane(program: Program, site: Site) -> object:
    """Meetings of a lane and group follow one another: the same ranks on one stream; who sends is not who receives."""
    r, i = site.sides[0].key
    op = program.roles[r].ops[i]
    return r, op.stream, isinstance(op, Recv), id(site.ranks)


def _asks(plans: GroupPlans, slots: Slots) -> Entries:
    """What each meeting asks of which slots; of a stretch the most that any of its collectives does."""
    if not isinstance(plans, StretchPlans):
        return _entries(plans, *slots.entries(plans.load))
    distinct = {id(each): each for each in plans.collectives}
    parts = [_asks(each, slots) for each in distinct.values()]
    which, slot, demands = (np.concatenate(column) for column in zip(*parts, strict=True))
    return _most(which, slot, demands)


def _entries(plans: GroupPlans, which: Ints, slot: Ints, weight: Floats) -> Entries:
    """What each meeting asks of its slots, alone."""
    moves = plans.nbytes[which] > 0
    return which[moves], slot[moves], (weight * plans.alone[which])[moves]


def firsts(sites: Iterable[Site]) -> set[int]:
    """All sites, by their first meeting."""
    return {site.first for site in sites}
