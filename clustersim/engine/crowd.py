"""The network for transfers that come and go one by one: sends between many pairs, each at its own time.

Max-min fair rates have a certificate (Bertsekas & Gallager, section 6.5.2): every flow has a *bottleneck*, a full link
of its way on which nobody is faster, or it is at its own ceiling. Flows of one bottleneck have one rate, so they are
kept together as a :class:`Sharing`: what is left of each is one number that falls at a common rate, and a flow that
begins or ends changes a handful of rates, not hundreds. After each change the rates that the old bottlenecks would give
are computed from a small linear system, and the certificate is checked on every link of the connected part. Where it
holds these *are* the max-min rates; where it does not, :func:`~clustersim.engine.fairshare.max_min` finds the new
bottlenecks of that part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.clock import SOLVE, Clock
from clustersim.engine.fairshare import max_min
from clustersim.engine.slots import INSTANT, Loads
from clustersim.engine.spells import Sharing, Spells

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

SLACK = 1e-10
"""How far, relatively, a link may be above its capacity, or a rate above the bottleneck's, by rounding alone."""

NOTHING = 1e-9
"""Bytes of a link per byte of payload that are left by rounding where nobody crosses it."""

FEW = 12
"""Sharings among which looking for the connected part costs more than it saves."""


class Crowd:
    """Active flows on one topology; the same answers as :class:`clustersim.engine.network.Network`.

    Parameters
    ----------
    clock, loads : the run's.
    on_end : called as ``on_end(transfers, now)`` with the sorted ids of all transfers that end at an instant.
    """

    def __init__(self, clock: Clock, loads: Loads, on_end: Callable[[Ints, float], None]) -> None:
        self.clock, self.loads, self.on_end = clock, loads, on_end
        self.segments = Spells()
        self.n_flows = self.n_solves = self.n_full = 0
        # Links in use have a slot each. Rows of ``_taken`` are sharings: bytes of a link per byte of payload, summed
        # over their flows.
        self._slot = np.full(loads.topology.n_links, -1, dtype=np.int64)
        self._n_slots = 0
        self._capacity = np.zeros(64)
        self._users = np.zeros(64, dtype=np.int64)
        self._held_by = np.full(64, -1, dtype=np.int64)  # the sharing whose bottleneck a slot is
        self._taken = np.zeros((16, 64))
        self._ways: dict[int, tuple[Ints, Floats]] = {}
        self._sharings: list[Sharing] = []
        self._new: list[tuple[int, int, float, float]] = []
        self._gone: list[Ints] = []
        self._solve_at = self._due = -1.0

    def begin(self, transfers: Ints, loads: Ints, nbytes: Floats, ceilings: Floats) -> None:
        """Start a flow per transfer, now: ``nbytes`` > 0 of payload each, at most ``ceilings`` [bytes/s]."""
        columns = transfers.tolist(), loads.tolist(), nbytes.tolist(), ceilings.tolist()
        self._new += zip(*columns, strict=True)
        self.n_flows += len(transfers)
        self._ask_solve()

    def _ask_solve(self) -> None:
        if self._solve_at != self.clock.now:
            self._solve_at = self.clock.now
            self.clock.call(self.clock.now, self._solve, priority=SOLVE)

    def _solve(self) -> None:
        """Bring rates up to date with every change of this instant, then ask to be woken at the next end."""
        self._solve_at = -1.0
        now, touched, new = self.clock.now, self._gone, self._new
        self._gone, self._new = [], []
        for transfer, load, nbytes, ceiling in new:
            slots, weights = self._way(load)
            if not self._users[slots].any():
                self._alone(transfer, load, nbytes, ceiling, slots, weights)
            else:
                self._join(transfer, load, nbytes, ceiling, slots, weights)
                touched.append(slots)
            self._users[slots] += 1
        touched = [slots for slots in touched if self._users[slots].any()]
        if touched:
            self.n_solves += 1
            rows = self._connected(touched)
            if not self._relevel(rows, now):
                self._regroup(rows, now)
        self._sleep()

    def _way(self, load: int) -> tuple[Ints, Floats]:
        """Slots and weights of a load's links."""
        if load not in self._ways:
            links, weights = self.loads.pairs[load]
            fresh = links[self._slot[links] < 0]
            self._slot[fresh] = self._n_slots + np.arange(len(fresh))
            self._n_slots += len(fresh)
            while self._n_slots > len(self._capacity):
                n = len(self._capacity)
                self._capacity = np.concatenate([self._capacity, np.zeros(n)])
                self._users = np.concatenate([self._users, np.zeros(n, dtype=np.int64)])
                self._held_by = np.concatenate([self._held_by, np.full(n, -1)])
                self._taken = np.concatenate([self._taken, np.zeros_like(self._taken)], axis=1)
            self._capacity[self._slot[fresh]] = self.loads.topology.link_bandwidth[fresh]
            self._ways[load] = self._slot[links], weights
        return self._ways[load]

    def _alone(self, transfer: int, load: int, nbytes: float, ceiling: float, slots: Ints, weights: Floats) -> None:
        """A flow with its links to itself."""
        alone = self.loads.alone[load]
        slot = -1 if ceiling <= alone else int(slots[np.argmin(self._capacity[slots] / weights)])
        sharing = self._sharing(slot, min(alone, ceiling))
        self._enter(sharing, transfer, load, nbytes, ceiling, slots, weights)

    def _join(self, transfer: int, load: int, nbytes: float, ceiling: float, slots: Ints, weights: Floats) -> None:
        """A flow among others: it is put where it seems to belong, for :meth:`_relevel` to judge."""
        held = [self._sharings[h] for h in self._held_by[slots].tolist() if h >= 0]
        if held:
            sharing = min(held, key=lambda s: s.rate)
        else:
            n = len(self._sharings)
            rates = np.array([s.rate for s in self._sharings])
            spare = self._capacity[slots] - rates @ self._taken[:n, slots]
            at = int(np.argmin(spare / weights))
            # Several may come at one instant, to links that are not shared out yet: any rate will do until they are.
            rate = float(spare[at] / weights[at]) if spare[at] > 0 else self.loads.alone[load]
            sharing = self._sharing(-1 if ceiling <= rate else int(slots[at]), min(rate, ceiling))
        self._enter(sharing, transfer, load, nbytes, ceiling, slots, weights)

    def _sharing(self, slot: int, rate: float) -> Sharing:
        """A new sharing, empty. ``slot`` : its bottleneck, or -1 for a ceiling."""
        row = len(self._sharings)
        if row == len(self._taken):
            self._taken = np.concatenate([self._taken, np.zeros_like(self._taken)])
        self._sharings.append(Sharing(row, slot, rate, self.clock.now))
        if slot >= 0:
            self._held_by[slot] = row
        return self._sharings[-1]

    def _enter(
        self, sharing: Sharing, transfer: int, load: int, nbytes: float, ceiling: float, slots: Ints, weights: Floats
    ) -> None:
        sharing.enter(self.clock.now, transfer, load, nbytes, ceiling)
        self._taken[sharing.row, slots] += weights

    def _connected(self, touched: Sequence[Ints]) -> Ints:
        """Rows of the sharings on these slots, and of all that share with them, and so on."""
        n = len(self._sharings)
        if n <= FEW:
            return np.arange(n)
        used = self._taken[:n, : self._n_slots] > NOTHING
        rows = used[:, np.concatenate(touched)].any(axis=1)
        while True:
            wider = used[:, used[rows].any(axis=0)].any(axis=1)
            if np.array_equal(wider, rows):
                return np.flatnonzero(rows)
            rows = wider

    def _relevel(self, rows: Ints, now: float) -> bool:
        """Set the rates these sharings would have with the bottlenecks they have; False, and nothing done, where those
        are not max-min fair."""
        mine = [self._sharings[row] for row in rows.tolist()]
        taken = (
            self._taken[rows, : self._n_slots]
            if len(rows) < len(self._sharings)
            else self._taken[: len(rows), : self._n_slots]
        )
        rates = np.array([s.rate for s in mine])
        held = np.array([s.slot for s in mine], dtype=np.int64)
        bound = held >= 0
        at = held[bound]
        across = taken[:, at]
        if len(at):
            room = self._capacity[at] - rates[~bound] @ across[~bound]
            try:
                rates[bound] = np.linalg.solve(across[bound].T, room) if len(at) > 1 else room / across[bound][0]
            except np.linalg.LinAlgError:
                return False
        if not (rates.min() > 0) or any(s.least < r * (1 - SLACK) for s, r in zip(mine, rates.tolist(), strict=True)):
            return False
        if np.any((across > NOTHING) & (rates[:, None] > rates[bound] * (1 + SLACK))):
            return False
        if np.any(rates @ taken > self._capacity[: self._n_slots] * (1 + SLACK)):
            return False
        for sharing, rate in zip(mine, rates.tolist(), strict=True):
            sharing.set(now, rate)
        return True

    def _regroup(self, rows: Ints, now: float) -> None:
        """Solve for the flows of these sharings, and share them out by their new bottlenecks."""
        self.n_full += 1
        flows = [flow for row in rows.tolist() for flow in self._sharings[row].leave_all(now, self.segments)]
        for row in sorted(rows.tolist(), reverse=True):
            self._drop(row)
        ways = [self._way(load) for _, load, _, _ in flows]
        ptr = np.cumsum([0, *(len(slots) for slots, _ in ways)])
        slots, weights = np.concatenate([w[0] for w in ways]), np.concatenate([w[1] for w in ways])
        ceilings = np.array([flow[3] for flow in flows])
        rates = max_min(ptr, slots, weights, self._capacity, ceilings)
        found: dict[tuple[int, float], Sharing] = {}
        for flow, way, rate, slot in zip(
            flows, ways, rates.tolist(), self._bottlenecks(ptr, slots, weights, rates, ceilings), strict=True
        ):
            key = slot, rate if slot < 0 else 0.0
            if key not in found:
                found[key] = self._sharing(slot, rate)
            transfer, load, left, ceiling = flow
            self._enter(found[key], transfer, load, left, ceiling, *way)

    def _bottlenecks(self, ptr: Ints, slots: Ints, weights: Floats, rates: Floats, ceilings: Floats) -> list[int]:
        """Slot of each flow's bottleneck; -1 where it is at its ceiling."""
        owner = np.repeat(np.arange(len(rates)), np.diff(ptr))
        carried = np.bincount(slots, weights=weights * rates[owner], minlength=self._n_slots)
        fastest = np.zeros(self._n_slots)
        np.maximum.at(fastest, slots, rates[owner])
        holds = (carried[slots] >= self._capacity[slots] * (1 - SLACK)) & (rates[owner] >= fastest[slots] * (1 - SLACK))
        # Where more than one link holds a flow, the one with the lowest slot: flows of one rate stay together.
        found = np.full(len(rates), self._n_slots)
        np.minimum.at(found, owner[holds], slots[holds])
        found[(rates >= ceilings * (1 - SLACK)) | (found == self._n_slots)] = -1
        at: list[int] = found.tolist()
        return at

    def _drop(self, row: int) -> None:
        """Forget an empty sharing; the last one takes its row."""
        gone, last = self._sharings[row], self._sharings.pop()
        if gone.slot >= 0 and self._held_by[gone.slot] == row:
            self._held_by[gone.slot] = -1
        if last is not gone:
            self._sharings[row] = last
            self._taken[row] = self._taken[last.row]
            if last.slot >= 0:
                self._held_by[last.slot] = row
        self._taken[last.row] = 0.0
        last.row = row

    def _sleep(self) -> None:
        """Ask the clock for the next end; an earlier request that no longer holds is recognised when it comes."""
        due = min((s.due for s in self._sharings), default=-1.0)
        if due not in (-1.0, self._due):
            self.clock.call(due, self._end)
        self._due = due

    def _end(self) -> None:
        now = self.clock.now
        if now != self._due:
            return
        self._due = -1.0
        done = []
        for sharing in list(self._sharings):
            if sharing.due > now * (1 + INSTANT):
                continue
            for transfer, load in sharing.pop_due(now, self.segments):
                slots, weights = self._ways[load]
                self._taken[sharing.row, slots] -= weights
                self._users[slots] -= 1
                self._gone.append(slots)
                done.append(transfer)
            if not sharing.flows:
                self._drop(sharing.row)
        self._ask_solve()
        self.on_end(np.array(sorted(done), dtype=np.int64), now)
