"""One attempt of NCCL's search: as many channels as fit at a given speed, over paths of given classes.

A channel takes its speed from every link it crosses. Channels are laid one after the other, depth first with
backtracking, nearest and widest neighbours first, within a budget of steps, as NCCL does (nccl src/graph/search.cc);
the order in which neighbours are tried is part of the answer because the budget is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from clustersim.collectives.nccl.graph import BALANCED_TREE, COLLNET_DIRECT, NVLS, RING, TREE, ChannelGraph, better
from clustersim.collectives.nccl.links import Vertex
from clustersim.collectives.nccl.room import Costs, FreeBandwidth, GpuTurns
from clustersim.collectives.nccl.wiring import Wiring

_FREE = 0
_AS_LISTED = 1
_REPLAY = 2
_LISTED_BUDGET = 1 << 10


class _WalkPlace(NamedTuple):
    """A place in the walk: at a GPU, ``step`` GPUs into the channel. ``net_at`` and ``home_at`` are the steps at which
    to go out to a NIC or back to the first GPU (-1: not)."""

    gpu: int
    step: int
    net_at: int
    home_at: int
    order: int


_Moves = Iterator["_WalkPlace | None"]


class ChannelWalk:
    """One attempt. :meth:`run` returns the better of what it found and ``best``, and the budget left: -1 if as many
    channels as asked for were found, 0 if it ran out.

    ``most`` bounds the channels there can be: NCCL's walk does not know when it can do no better and spends its budget;
    this one stops there, and reports the budget spent.
    """

    def __init__(self, wiring: Wiring, ask: ChannelGraph, best: ChannelGraph, budget: int, most: int) -> None:
        self.wiring = wiring
        self.ask = ask
        self.best = best
        self.budget = budget
        self.most = most
        self.n = wiring.n_gpus
        self.room = FreeBandwidth(wiring, both_ways=ask.pattern <= TREE)
        self.net_free = [nic.bandwidth for nic in wiring.view.nics]
        self.turns = GpuTurns(wiring, ask.pattern)
        self.vain: dict[tuple[object, ...], int] = {}
        self.orders: list[list[int]] = []
        self.nets: list[list[int]] = []
        self.stopped = False

    def run(self) -> tuple[ChannelGraph, int]:
        """Try. The walk is a stack of generators: each makes a move, yields where it led, and takes it back."""
        self._drive(self._channel())
        return self.best, self.budget

    def _drive(self, start: _Moves) -> None:
        stack = [start]
        while stack and not self.stopped:
            place = next(stack[-1], self)
            if place is self:
                stack.pop()
                continue
            if place is None:
                stack.append(self._channel())
                continue
            if self.budget <= 0:
                continue  # only take moves back
            self.budget -= 1
            stack.append(self._moves(place))  # type: ignore[arg-type]

    def _channel(self) -> _Moves:
        """Where the next channel may start. What found nothing finds nothing again, and takes as much of the budget:
        behind NVSwitches channels of other orders leave the same links with the same room."""
        state = self._state()
        before = self.budget
        best = self.best
        if state in self.vain:
            self.budget = max(before - self.vain[state], 0)
            return
        self.orders.append([])
        self.nets.append([])
        if self.n and self.wiring.n_nets:
            yield from self._from_nets()
        else:
            yield from self._from_gpus()
        self.orders.pop()
        self.nets.pop()
        if self.budget > 0 and self.best is best:
            self.vain[state] = before - self.budget

    def _state(self) -> tuple[object, ...]:
        """All that channels to come depend on."""
        order = self.orders if self.ask.pattern in (NVLS, COLLNET_DIRECT) else self.orders[-1:]
        listed = () if self.wiring.n_nets and not self.ask.same_channels and order is not self.orders else order
        nets = self.nets[-1:] if self._alternating() else ()
        return len(self.orders), self.room.hops, *self.room.free, *self.net_free, *map(tuple, listed), *map(tuple, nets)

    def _from_gpus(self) -> _Moves:
        home = self.n - 1 if self.ask.pattern == RING else -1
        count = len(self.orders) - 1
        if self.ask.pattern == NVLS:
            yield _WalkPlace(count, 0, -1, home, _FREE)
            return
        if count == 0:
            yield _WalkPlace(0, 0, -1, home, _AS_LISTED)
        else:
            yield _WalkPlace(self.orders[-2][0], 0, -1, home, _REPLAY)
        if count == 0 or not self.ask.same_channels:
            for gpu in range(self.n):
                yield _WalkPlace(gpu, 0, -1, home, _FREE)

    def _from_nets(self) -> _Moves:
        ask = self.ask
        count = len(self.orders) - 1
        nets = self.wiring.ports(ask.type_inter, None)
        speed = int(ask.bw_inter)
        for i in range(len(nets)):
            net = nets[(count + i) % len(nets)]
            if self.net_free[net] < speed:
                continue
            if self._alternating() and count & 1 and net != self.nets[-2][1]:
                continue
            self.net_free[net] -= speed
            yield from self._starts(net, count)
            self.net_free[net] += speed
            if ask.pattern in (NVLS, COLLNET_DIRECT) and self._new_head(net):
                return

    def _starts(self, net: int, count: int) -> _Moves:
        ask = self.ask
        net_at = self.n - 1 if ask.pattern == RING else 0
        self.nets[-1][:] = [net, net]
        local = self.wiring.local_gpu(net)
        if ask.pattern in (NVLS, COLLNET_DIRECT):
            if local is not None and self._new_head(net):
                yield from self._go(("net", net), _WalkPlace(local, 0, net_at, -1, _FREE))
        elif count and ask.same_channels:
            yield from self._go(("net", net), _WalkPlace(self.orders[-2][0], 0, net_at, -1, _REPLAY))
        else:
            if count == 0 and not self.wiring.has_switch:
                self._listed_first(net, net_at)
            near = self.wiring.nearest(("net", net), "gpu")
            first = [] if local is None else [local]
            for gpu in first + [g for g in near if g != local]:
                yield from self._go(("net", net), _WalkPlace(gpu, 0, net_at, -1, _FREE))

    def _new_head(self, net: int) -> bool:
        """Whether a port's GPU heads no channel yet: a GPU with several NICs is head once."""
        local = self.wiring.local_gpu(net)
        return local is not None and local not in [order[0] for order in self.orders[:-1]]

    def _listed_first(self, net: int, net_at: int) -> None:
        """Set a reference with the GPUs in their listed order; it does not count against the budget."""
        budget = self.budget
        self.budget = _LISTED_BUDGET
        self._drive(self._go(("net", net), _WalkPlace(0, 0, net_at, -1, _AS_LISTED)))
        if not self.stopped:
            self.budget = budget

    def _moves(self, place: _WalkPlace) -> _Moves:
        ask = self.ask
        if place.step == self.n:
            yield from self._finished()
            return
        order = self.orders[-1]
        fresh = len(order) == place.step
        if fresh:
            order.append(place.gpu)
        if place.step == place.net_at:
            yield from self._leave(place)
        elif ask.pattern == NVLS:
            yield from self._pull(place)
        elif ask.pattern == COLLNET_DIRECT:
            yield from self._fan(place)
        elif place.step < self.n - 1:
            for gpu in self._next(place):
                yield from self._go(
                    ("gpu", place.gpu), _WalkPlace(gpu, place.step + 1, place.net_at, place.home_at, place.order)
                )
        elif place.step == place.home_at:
            yield from self._go(("gpu", place.gpu), _WalkPlace(order[0], self.n, place.net_at, -1, place.order))
        else:
            yield _WalkPlace(place.gpu, self.n, -1, -1, place.order)
        if fresh:
            order.pop()

    def _go(self, start: Vertex, place: _WalkPlace) -> _Moves:
        """On to a GPU, from a NIC or another GPU."""
        ask = self.ask
        end = ("gpu", place.gpu)
        speed, limit = (ask.bw_inter, ask.type_inter) if start[0] == "net" else (ask.bw_intra, ask.type_intra)
        costs = self.room.take(start, end, speed, limit)
        if costs is not None:
            yield place
            self.room.give(start, end, costs)

    def _finished(self) -> _Moves:
        """A whole channel is laid: keep it if that is better, then try for one more."""
        ask = self.ask
        count = len(self.orders)
        candidate = replace(
            ask,
            n_channels=count,
            hops=self.room.hops,
            orders=tuple(map(tuple, self.orders)),
            nets=tuple((net[0], net[1]) for net in self.nets if net),
        )
        if better(candidate, self.best, self.n):
            self.best = candidate
            if count == ask.max_channels:
                self.budget = -1
                self.stopped = True
                return
            if count >= self.most:
                self.budget = 0
                self.stopped = True
                return
        if count < ask.max_channels:
            yield None

    def _leave(self, place: _WalkPlace) -> _Moves:
        """Out to a NIC. A balanced tree goes out twice, at half the speed, from its first and its second GPU."""
        ask = self.ask
        start = self.nets[-1][0]
        balanced = ask.pattern == BALANCED_TREE
        again = 1 if balanced and place.step == 0 else -1
        speed = ask.bw_inter / 2 if balanced else ask.bw_inter
        vertex: Vertex = ("gpu", place.gpu)
        for net in self.wiring.ports(ask.type_inter, place.gpu):
            if not self._may_leave(net, start):
                continue
            if balanced and place.step > 0 and net != self.nets[-1][1]:
                continue
            costs = self.room.take(vertex, ("net", net), speed, ask.type_inter)
            if costs is not None:
                before = self.nets[-1][1]
                self.nets[-1][1] = net
                yield _WalkPlace(place.gpu, place.step, again, place.home_at, place.order)
                self.nets[-1][1] = before
                self.room.give(vertex, ("net", net), costs)

    def _may_leave(self, net: int, start: int) -> bool:
        if self.ask.pattern == TREE and net != start:
            return False
        if self._alternating():
            return len(self.orders) % 2 == 1 or net == self.nets[-2][0]
        return self.ask.cross_nic != 0 or net == start

    def _alternating(self) -> bool:
        return self.ask.pattern == RING and self.ask.cross_nic == 2

    def _pull(self, place: _WalkPlace) -> _Moves:
        """NVLS: every GPU's bytes cross the switch once each way, the head's twice."""
        switch: Vertex = ("nvs", 0)
        gpus: list[Vertex] = [("gpu", g) for g in range(self.n)]
        speed = {gpu: self.ask.bw_intra * (2 if gpu[1] == place.gpu else 1) for gpu in gpus}
        legs = [(switch, gpu, speed[gpu]) for gpu in gpus] + [(gpu, switch, speed[gpu]) for gpu in gpus]
        yield from self._all_legs(place, legs)

    def _fan(self, place: _WalkPlace) -> _Moves:
        """CollNetDirect: the head exchanges an equal part with every other GPU."""
        share = self.ask.bw_intra / max(1, self.n - 1)
        head: Vertex = ("gpu", place.gpu)
        peers: list[Vertex] = [("gpu", g) for g in range(self.n) if g != place.gpu]
        self.orders[-1].extend(gpu[1] for gpu in peers)
        yield from self._all_legs(place, [(head, g, share) for g in peers] + [(g, head, share) for g in peers])
        del self.orders[-1][1:]

    def _all_legs(self, place: _WalkPlace, legs: list[tuple[Vertex, Vertex, float]]) -> _Moves:
        """On if every leg fits."""
        taken: list[tuple[Vertex, Vertex, Costs]] = []
        for start, end, speed in legs:
            costs = self.room.take(start, end, speed, self.ask.type_intra)
            if costs is None:
                break
            taken.append((start, end, costs))
        if len(taken) == len(legs):
            yield _WalkPlace(place.gpu, self.n, -1, -1, _FREE)
        for start, end, costs in taken:
            self.room.give(start, end, costs)

    def _next(self, place: _WalkPlace) -> list[int]:
        """GPUs to go on to, in the order NCCL tries them."""
        if place.order == _AS_LISTED:
            return [place.step + 1]
        if place.order == _REPLAY:
            return [self.orders[-2][place.step + 1]]
        towards_net = 0 if place.net_at == -1 else 1 if place.net_at == place.step + 1 else -1
        return self.turns.after(place.gpu, self.orders[-1], towards_net, self.nets[-1][0] if towards_net else -1)
