"""One attempt of NCCL's search: as many channels as fit at a given speed, over paths of given classes.

A channel takes its speed from every link it crosses. Channels are laid one after the other, depth first with
backtracking, nearest and widest neighbours first, within a budget of steps, as NCCL does (nccl src/graph/search.cc);
the order in which neighbours are tried is part of the answer because the budget is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from clustersim.collectives.nccl.layout import (
    BALANCED_TREE,
    COLLNET_DIRECT,
    NVLS,
    RING,
    SPLIT_TREE,
    TREE,
    Layout,
    better,
)
from clustersim.collectives.nccl.view import DIS, INTEL_P2P_OVERHEAD, PHB, PIX
from clustersim.collectives.nccl.wiring import Vertex, Wiring

_FREE, _AS_LISTED, _REPLAY = 0, 1, 2
_LISTED_BUDGET = 1 << 10


@dataclass(frozen=True, slots=True)
class _At:
    """A place in the walk: at a GPU, ``step`` GPUs into the channel. ``net_at`` and ``home_at`` are the steps at which
    to go out to a NIC or back to the first GPU (-1: not)."""

    gpu: int
    step: int
    net_at: int
    home_at: int
    order: int


Costs = list[tuple[int, int]]
_Moves = Iterator["_At | None"]


class Walk:
    """One attempt. :meth:`run` returns the better of what it found and ``best``, and the budget left: -1 if as many
    channels as asked for were found, 0 if it ran out.

    ``most`` bounds the channels there can be: NCCL's walk does not know when it can do no better and spends its budget;
    this one stops there, and reports the budget spent.
    """

    def __init__(self, wiring: Wiring, ask: Layout, best: Layout, budget: int, most: int) -> None:
        self.wiring = wiring
        self.ask = ask
        self.best = best
        self.budget = budget
        self.most = most
        self.n = wiring.n_gpus
        self.free = [round(rate * 1000) for rate in wiring.bandwidth]
        self.net_free = [nic.bandwidth for nic in wiring.view.nics]
        self.costs: dict[tuple[Vertex, Vertex, float], Costs | None] = {}
        self.ranks: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]] = {}
        self.hops = 0
        self.vain: dict[tuple[object, ...], int] = {}
        self.orders: list[list[int]] = []
        self.nets: list[list[int]] = []
        self.stopped = False

    def run(self) -> tuple[Layout, int]:
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

    # ------------------------------------------------------------------------------------------ links

    def _take(self, start: Vertex, end: Vertex, speed: float, limit: int) -> Costs | None:
        """Charge a path with a speed [GB/s] if it is near enough and every link still has that much."""
        key = (start, end, speed)
        if key not in self.costs:
            self.costs[key] = self._cost(start, end, speed, limit)
        costs = self.costs[key]
        if costs is None:
            return None
        free = self.free
        for done, (link, amount) in enumerate(costs):
            if free[link] < amount:
                for back, given in costs[:done]:
                    free[back] += given
                return None
            free[link] -= amount
        self.hops += len(self.wiring.between(start, end).links)
        return costs

    def _give(self, start: Vertex, end: Vertex, costs: Costs) -> None:
        for link, amount in costs:
            self.free[link] += amount
        self.hops -= len(self.wiring.between(start, end).links)

    def _cost(self, start: Vertex, end: Vertex, speed: float, limit: int) -> Costs | None:
        """What a path costs each link [MB/s], None if it is too far.

        GPU to GPU traffic crosses an Intel root complex in small packets, and a GPU before Ampere answers inbound PCIe
        traffic with an eighth of it.
        """
        wiring = self.wiring
        path = wiring.between(start, end)
        back = wiring.between(end, start) if self.ask.pattern <= TREE else path
        if path.kind >= DIS or max(path.kind, back.kind) > limit:
            return None
        whole = round(speed * 1000)
        through_intel = path.kind == PHB and start[0] == "gpu" and wiring.view.cpu_vendor == "intel"
        over_pcie = round(whole * INTEL_P2P_OVERHEAD) if through_intel else whole
        costs: Costs = []
        for link in path.links:
            amount = over_pcie if wiring.link_kind[link] == PIX else whole
            costs.append((link, amount))
            if wiring.view.sm < 80 and start[0] != "gpu" and wiring.ends[link][1][0] == "gpu":
                costs.append((link ^ 1, amount // 8))
        return costs

    # ------------------------------------------------------------------------------------------ moves

    def _channel(self) -> _Moves:
        """Where the next channel may start. What found nothing finds nothing again, and takes as much of the budget:
        behind NVSwitches channels of other orders leave the same links with the same room."""
        state, before, best = self._state(), self.budget, self.best
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
        told = () if self.wiring.n_nets and not self.ask.same_channels and order is not self.orders else order
        nets = self.nets[-1:] if self._alternating() else ()
        return len(self.orders), self.hops, *self.free, *self.net_free, *map(tuple, told), *map(tuple, nets)

    def _from_gpus(self) -> _Moves:
        home = self.n - 1 if self.ask.pattern == RING else -1
        count = len(self.orders) - 1
        if self.ask.pattern == NVLS:
            yield _At(count, 0, -1, home, _FREE)
            return
        if count == 0:
            yield _At(0, 0, -1, home, _AS_LISTED)
        else:
            yield _At(self.orders[-2][0], 0, -1, home, _REPLAY)
        if count == 0 or not self.ask.same_channels:
            for gpu in range(self.n):
                yield _At(gpu, 0, -1, home, _FREE)

    def _from_nets(self) -> _Moves:
        ask, count = self.ask, len(self.orders) - 1
        nets = self._candidates(None)
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
        net_at = {RING: self.n - 1, SPLIT_TREE: 1}.get(ask.pattern, 0)
        self.nets[-1][:] = [net, net]
        local = self.wiring.local_gpu(net)
        if ask.pattern in (NVLS, COLLNET_DIRECT):
            if local is not None and self._new_head(net):
                yield from self._enter(net, _At(local, 0, net_at, -1, _FREE))
        elif count and ask.same_channels:
            yield from self._enter(net, _At(self.orders[-2][0], 0, net_at, -1, _REPLAY))
        else:
            if count == 0 and not self.wiring.has_switch:
                self._listed_first(net, net_at)
            near = self.wiring.nearest(("net", net), "gpu")
            first = [] if local is None else [local]
            for gpu in first + [g for g in near if g != local]:
                yield from self._enter(net, _At(gpu, 0, net_at, -1, _FREE))

    def _new_head(self, net: int) -> bool:
        """Whether a port's GPU heads no channel yet: a GPU with several NICs is head once."""
        local = self.wiring.local_gpu(net)
        return local is not None and local not in [order[0] for order in self.orders[:-1]]

    def _listed_first(self, net: int, net_at: int) -> None:
        """Set a reference with the GPUs in their listed order; it does not count against the budget."""
        budget, self.budget = self.budget, _LISTED_BUDGET
        self._drive(self._enter(net, _At(0, 0, net_at, -1, _AS_LISTED)))
        if not self.stopped:
            self.budget = budget

    def _enter(self, net: int, place: _At) -> _Moves:
        start: Vertex = ("net", net)
        end: Vertex = ("gpu", place.gpu)
        costs = self._take(start, end, self.ask.bw_inter, self.ask.type_inter)
        if costs is not None:
            yield place
            self._give(start, end, costs)

    def _moves(self, at: _At) -> _Moves:
        ask = self.ask
        if at.step == self.n:
            yield from self._finished()
            return
        order = self.orders[-1]
        fresh = len(order) == at.step
        if fresh:
            order.append(at.gpu)
        if at.step == at.net_at:
            yield from self._leave(at)
        elif ask.pattern == NVLS:
            yield from self._pull(at)
        elif ask.pattern == COLLNET_DIRECT:
            yield from self._fan(at)
        elif at.step < self.n - 1:
            for gpu in self._next(at):
                yield from self._hop(at.gpu, _At(gpu, at.step + 1, at.net_at, at.home_at, at.order))
        elif at.step == at.home_at:
            yield from self._hop(at.gpu, _At(order[0], self.n, at.net_at, -1, at.order))
        else:
            yield _At(at.gpu, self.n, -1, -1, at.order)
        if fresh:
            order.pop()

    def _hop(self, gpu: int, place: _At) -> _Moves:
        start: Vertex = ("gpu", gpu)
        end: Vertex = ("gpu", place.gpu)
        costs = self._take(start, end, self.ask.bw_intra, self.ask.type_intra)
        if costs is not None:
            yield place
            self._give(start, end, costs)

    def _finished(self) -> _Moves:
        """A whole channel is laid: keep it if that is better, then try for one more."""
        ask, count = self.ask, len(self.orders)
        found = replace(
            ask,
            n_channels=count,
            hops=self.hops,
            orders=tuple(map(tuple, self.orders)),
            nets=tuple((net[0], net[1]) for net in self.nets if net),
        )
        if better(found, self.best, self.n):
            self.best = found
            if count == ask.max_channels:
                self.budget, self.stopped = -1, True
                return
            if count >= self.most:
                self.budget, self.stopped = 0, True
                return
        if count < ask.max_channels:
            yield None

    def _leave(self, at: _At) -> _Moves:
        """Out to a NIC. A balanced tree goes out twice, at half the speed, from its first and its second GPU."""
        ask, start = self.ask, self.nets[-1][0]
        balanced = ask.pattern == BALANCED_TREE
        again = 1 if balanced and at.step == 0 else -1
        speed = ask.bw_inter / 2 if balanced else ask.bw_inter
        here: Vertex = ("gpu", at.gpu)
        for net in self._candidates(at.gpu):
            if not self._may_leave(net, start):
                continue
            if balanced and at.step > 0 and net != self.nets[-1][1]:
                continue
            costs = self._take(here, ("net", net), speed, ask.type_inter)
            if costs is not None:
                before = self.nets[-1][1]
                self.nets[-1][1] = net
                yield _At(at.gpu, at.step, again, at.home_at, at.order)
                self.nets[-1][1] = before
                self._give(here, ("net", net), costs)

    def _may_leave(self, net: int, start: int) -> bool:
        if self.ask.pattern == TREE and net != start:
            return False
        if self._alternating():
            return len(self.orders) % 2 == 1 or net == self.nets[-2][0]
        return self.ask.cross_nic != 0 or net == start

    def _alternating(self) -> bool:
        return self.ask.pattern == RING and self.ask.cross_nic == 2

    def _pull(self, at: _At) -> _Moves:
        """NVLS: every GPU's bytes cross the switch once each way, the head's twice."""
        switch: Vertex = ("nvs", 0)
        gpus: list[Vertex] = [("gpu", g) for g in range(self.n)]
        speed = {gpu: self.ask.bw_intra * (2 if gpu[1] == at.gpu else 1) for gpu in gpus}
        legs = [(switch, gpu, speed[gpu]) for gpu in gpus] + [(gpu, switch, speed[gpu]) for gpu in gpus]
        yield from self._all_legs(at, legs)

    def _fan(self, at: _At) -> _Moves:
        """CollNetDirect: the head exchanges an equal part with every other GPU."""
        share = self.ask.bw_intra / max(1, self.n - 1)
        head: Vertex = ("gpu", at.gpu)
        others: list[Vertex] = [("gpu", g) for g in range(self.n) if g != at.gpu]
        self.orders[-1].extend(gpu[1] for gpu in others)
        yield from self._all_legs(at, [(head, g, share) for g in others] + [(g, head, share) for g in others])
        del self.orders[-1][1:]

    def _all_legs(self, at: _At, legs: list[tuple[Vertex, Vertex, float]]) -> _Moves:
        """On if every leg fits."""
        taken: list[tuple[Vertex, Vertex, Costs]] = []
        for start, end, speed in legs:
            costs = self._take(start, end, speed, self.ask.type_intra)
            if costs is None:
                break
            taken.append((start, end, costs))
        if len(taken) == len(legs):
            yield _At(at.gpu, self.n, -1, -1, _FREE)
        for start, end, costs in taken:
            self._give(start, end, costs)

    # ------------------------------------------------------------------------------------------ order of trying

    def _next(self, at: _At) -> list[int]:
        if at.order == _AS_LISTED:
            return [at.step + 1]
        if at.order == _REPLAY:
            return [self.orders[-2][at.step + 1]]
        visited = self.orders[-1]
        towards_net = 0 if at.net_at == -1 else 1 if at.net_at == at.step + 1 else -1
        ranked = self._ranked(at.gpu, visited, towards_net)
        return self._neighbours(at.gpu, ranked) if self.wiring.has_switch else ranked

    def _ranked(self, gpu: int, visited: list[int], towards_net: int) -> list[int]:
        """GPUs not yet visited: well connected to the channel's NIC first if it matters, then wide, near, next."""
        net = self.nets[-1][0] if towards_net else -1
        if (gpu, net) not in self.ranks:
            self.ranks[gpu, net] = self._rank_all(gpu, net)
        left = [(other, intra) for other, intra in self.ranks[gpu, net] if other not in visited]
        ranked = [other for other, _ in left]
        alike = all(intra == left[0][1] for _, intra in left)
        return ranked[::-1] if towards_net == -1 and alike else ranked

    def _rank_all(self, gpu: int, net: int) -> list[tuple[int, tuple[int, int]]]:
        scores = []
        for i in range(1, self.n):
            other = (gpu + i) % self.n
            path = self.wiring.between(("gpu", gpu), ("gpu", other))
            if not path.links:
                continue
            inter = (0, 0, 0)
            if net >= 0:
                way = self.wiring.between(("net", net), ("gpu", other))
                inter = (-int(way.bandwidth), -int(self.wiring.view.gpus[other].bandwidth), len(way.links))
            scores.append((inter, (-int(path.bandwidth), len(path.links)), i, other))
        return [(other, intra) for _, intra, _, other in sorted(scores)]

    def _neighbours(self, gpu: int, ranked: list[int]) -> list[int]:
        """Behind NVSwitches all GPUs look alike; NCCL keeps to the next and the previous one."""
        after, before = (gpu + 1) % self.n, (gpu - 1) % self.n
        wanted = {RING: [before, after], TREE: [after]}.get(self.ask.pattern, [after, before])
        return [g for g in dict.fromkeys(wanted) if g in ranked]

    def _candidates(self, gpu: int | None) -> list[int]:
        """Ports to try, the GPU's (or GPUs') preferred ones first, then by path class."""
        return self.wiring.ports(self.ask.type_inter, gpu)
