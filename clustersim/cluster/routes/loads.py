"""Link loads of many transfers, grouped by structure: equal pairs of equal nodes are worked out once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from clustersim.core.errors import TopologyError
from clustersim.core.topology import Floats, Ints

if TYPE_CHECKING:
    from clustersim.cluster.routes.router import Router

_NONE = np.zeros(0, dtype=np.int64)


class Transfers(NamedTuple):
    """Columns of :meth:`Router.loads`, one row a transfer."""

    src: Ints
    dst: Ints
    amount: Floats
    rail: Ints
    flow: Ints

    @classmethod
    def of(cls, *columns: npt.ArrayLike) -> Transfers:
        """Columns or scalars, each as long as the longest."""
        src, dst, amount, rail, flow = np.broadcast_arrays(*map(np.atleast_1d, columns))
        integers: list[Ints] = [column.astype(np.int64) for column in (src, dst, rail, flow)]
        return cls(integers[0], integers[1], amount.astype(np.float64), integers[2], integers[3])


class _LoadSum:
    """Loads per link, ``crossed`` (links, amounts, of), and the stretches inside islands still to be turned into loads,
    ``inside`` (from, to, amounts, of). ``apart`` : ``of`` has the transfer of each; else it is all 0 or empty.
    """

    def __init__(self, router: Router, apart: bool) -> None:
        self.router = router
        self.apart = apart
        self.inside: list[tuple[Ints, Ints, Floats, Ints]] = []
        self.crossed: list[tuple[Ints, Floats, Ints]] = [(_NONE, np.zeros(0), _NONE)]

    def per_link(self) -> tuple[Ints, Floats]:
        """Links with a load, ascending, and their loads."""
        crossed, loads, _ = map(np.concatenate, zip(*self.crossed, strict=True))
        # A small group on a large machine: sort what it crosses; else count on all links.
        if len(crossed) * 8 < self.router.topology.n_links:
            links, crossed = np.unique(crossed, return_inverse=True)
        else:
            links = np.arange(self.router.topology.n_links)
        load = np.bincount(crossed, weights=loads, minlength=len(links))
        return links[load != 0], load[load != 0]

    def per_transfer(self, n: int) -> tuple[Ints, Ints, Floats]:
        """The same of each of ``n`` transfers by itself: ``(ptr (n + 1,), links, loads)``."""
        size = self.router.topology.n_links
        crossed, loads, transfer_of = map(np.concatenate, zip(*self.crossed, strict=True))
        cells, cell = np.unique(transfer_of * size + crossed, return_inverse=True)
        load = np.bincount(cell, weights=loads, minlength=len(cells))
        cells = cells[load != 0]
        load = load[load != 0]
        return np.searchsorted(cells, np.arange(n + 1) * size), cells % size, load


def laid(router: Router, all_: Transfers, *, apart: bool) -> _LoadSum:
    """All transfers on their links."""
    total, home, (a, b, much, _, _) = _LoadSum(router, apart), router.islands.of, all_
    offsets = np.arange(len(a)) * apart
    _engine(total, a[b < 0], much[b < 0], offsets[b < 0], to_switch=True)
    _engine(total, b[a < 0], much[a < 0], offsets[a < 0], to_switch=False)
    pair = (a >= 0) & (b >= 0) & (a != b) & (much != 0)
    same = pair & (home[a] == home[b]) & (home[a] >= 0)
    total.inside.append((a[same], b[same], much[same], offsets[same]))
    away = pair & ~same
    if away.any():
        _outside(total, Transfers(*(column[away] for column in all_)), offsets[away])
    _inside(total)
    return total


def _engine(total: _LoadSum, gpus: Ints, amount: Floats, transfer_of: Ints, *, to_switch: bool) -> None:
    """Traffic between GPUs and the multicast/reduction engine of their own switches."""
    islands = total.router.islands
    for key, rows in _groups(islands.template[islands.of[gpus]], islands.local[gpus]):
        template, local = key
        links, share = islands.templates[template].engine(local, to_switch=to_switch)
        if not len(links):
            name = total.router.topology.vertex_names[gpus[rows[0]]]
            raise TopologyError(f"{total.router.topology.name}: {name!r} has no NVSwitch to reduce or multicast in")
        _tile(total, gpus[rows], links, share, amount[rows], transfer_of[rows])


def _inside(total: _LoadSum) -> None:
    a, b, amount, transfer_of = map(np.concatenate, zip(*total.inside, strict=True))
    islands = total.router.islands
    for key, rows in _groups(islands.template[islands.of[a]], islands.local[a], islands.local[b]):
        template, src, dst = key
        links, share = islands.templates[template].spread(src, dst)
        if not len(links) and src != dst:
            raise total.router._unreachable(int(a[rows[0]]), int(b[rows[0]]))
        _tile(total, a[rows], links, share, amount[rows], transfer_of[rows])


def _tile(total: _LoadSum, vertices: Ints, links: Ints, share: Floats, amount: Floats, transfer_of: Ints) -> None:
    """The same local links, in the island of each vertex."""
    islands = total.router.islands
    home = islands.of[vertices]
    if not total.apart:  # channels run over the same links: what crosses an island's together is added up first
        sums: Floats = np.bincount(home, amount).astype(np.float64)
        home = np.flatnonzero(sums)
        amount = sums[home]
    crossed = islands.links[(islands.link_start[home][:, None] + links).ravel()]
    total.crossed.append(
        (crossed, (amount[:, None] * share).ravel(), np.repeat(transfer_of, len(links)) if total.apart else _NONE)
    )


def _groups(*columns: Ints) -> list[tuple[tuple[int, ...], Ints]]:
    """Rows of equal columns: (values, row numbers)."""
    if not len(columns[0]):
        return []
    code = np.ravel_multi_index(columns, [int(column.max()) + 1 for column in columns])
    order = np.argsort(code.astype(np.min_scalar_type(code.max())), kind="stable")  # of short numbers in no time
    pieces = np.split(order, np.flatnonzero(np.diff(code[order])) + 1)
    return [(tuple(int(column[rows[0]]) for column in columns), rows) for rows in pieces]


def _outside(total: _LoadSum, transfers: Transfers, transfer_of: Ints) -> None:
    """Transfers between islands: the legs at both ends, and the network between their ports."""
    router, (a, b, amount, rails, flows) = total.router, transfers
    leave = _PortEnds(router, a, rails)
    enter = _PortEnds(router, b, rails)
    if len(cut := np.flatnonzero((leave.count == 0) | (enter.count == 0))):
        raise router._unreachable(int(a[cut[0]]), int(b[cut[0]]))
    ways = np.maximum(leave.count, enter.count)
    row = np.repeat(np.arange(len(a)), ways)
    route_number = np.arange(len(row)) - np.repeat(np.cumsum(ways) - ways, ways)
    out = leave.place(row, route_number)
    into = enter.place(row, route_number)
    much: Floats = (amount / ways)[row]
    # A row's legs one after another: those that leave, then those that enter, from the port to the vertex.
    leg, tails, heads = leave.legs(row, out)
    back, to, fro = enter.legs(row, into)
    order = np.argsort(np.concatenate([leg, back]), kind="stable")
    leg = np.concatenate([leg, back])[order]
    tails = np.concatenate([tails, fro])[order]
    heads = np.concatenate([heads, to])[order]
    total.inside.append((tails, heads, much[leg], transfer_of[row[leg]]))
    try:
        crossed, links = router.network.paths(leave.ports(row, out), enter.ports(row, into), flows[row])
    except LookupError as error:
        k = row[error.args[0]]
        raise router._unreachable(int(a[k]), int(b[k])) from None
    size = router.topology.n_links
    cells, cell = np.unique(transfer_of[row[crossed]] * size + links, return_inverse=True)
    load = np.bincount(cell, much[crossed], len(cells)).astype(np.float64)
    total.crossed.append((cells % size, load, cells // size))


class _PortEnds:
    """The ports that vertices may use with a rail, and the legs to each: of row ``r``, ``count[r]`` ports.

    Islands built alike are asked about once; ports and legs are kept as places in an island.
    """

    def __init__(self, router: Router, vertices: Ints, rails: Ints) -> None:
        cut = router.islands
        island = cut.of[vertices]
        low = int(rails.min(initial=0))
        span = int(rails.max(initial=0)) - low + 1
        codes = (router.builds[island] * (1 + int(cut.local.max())) + cut.local[vertices]) * span + rails - low
        _, firsts, self._of = np.unique(codes, return_index=True, return_inverse=True)
        ends = [router.ends(v, r) for v, r in zip(vertices[firsts].tolist(), rails[firsts].tolist(), strict=True)]
        self._n = np.array([len(end) for end in ends], dtype=np.int64)
        self.count, self._first = self._n[self._of], np.cumsum(self._n) - self._n
        self._base = cut.vertex_start[island]
        self._vertices = cut.vertices
        flat = [end for vertex_ends in ends for end in vertex_ends]
        self._ports = cut.local[np.array([port for port, _ in flat], dtype=np.int64)]
        self._n_legs = np.array([len(legs) for _, legs in flat], dtype=np.int64)
        self._legs = cut.local[np.array([leg for _, legs in flat for leg in legs], dtype=np.int64).reshape(-1, 2)]

    def place(self, row: Ints, route_number: Ints) -> Ints:
        """Which port is each row's way, counted round."""
        place: Ints = self._first[self._of[row]] + route_number % self._n[self._of[row]]
        return place

    def ports(self, row: Ints, place: Ints) -> Ints:
        """The ports at these places."""
        ports: Ints = self._vertices[self._base[row] + self._ports[place]]
        return ports

    def legs(self, row: Ints, place: Ints) -> tuple[Ints, Ints, Ints]:
        """Legs of the ports at these places: which of them each is of, and its two ends."""
        count = self._n_legs[place]
        which = np.repeat(np.arange(len(place)), count)
        first = np.cumsum(self._n_legs) - self._n_legs
        leg_places = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + first[place][which]
        tail, head = self._vertices[self._base[row[which]] + self._legs[leg_places].T]
        return which, tail, head
