"""How many hops switches are away from leaves, and the links that lead a hop nearer: asked of one, or looked up.

Around some leaves lie the switches a hop away from one of them, those two hops away, and so on, until they repeat: a
switch is as many hops away as the first of these levels that has it. Leaves under the same spines share all but one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from clustersim.core.topology import Ints

Leaves = tuple[int, ...]


class Level:
    """Some switches, ``members``, as many hops away from some leaves.

    ``number`` : from 0, of all levels. ``links`` : those from switches to members, by where they begin. ``farther`` :
    the level a hop farther away, once asked for.
    """

    def __init__(self, number: int, switches: tuple[int, ...], links: dict[int, list[int]]) -> None:
        self.number, self.members, self.links = number, frozenset(switches), links
        self.farther: Level | None = None


class Levels:
    """The levels of a network.

    Parameters
    ----------
    switch : (V,) bool, which vertices are switches. tails : of each link, where it begins. into : links by their end.
    """

    def __init__(self, switch: npt.NDArray[np.bool_], tails: list[int], into: dict[int, list[int]]) -> None:
        is_switch = switch.tolist()
        self.switch = switch
        self._tails = tails
        self._into = {v: [e for e in links if is_switch[tails[e]]] for v, links in into.items() if is_switch[v]}
        self._known: dict[tuple[int, ...], Level] = {}
        self._table: tuple[Ints, ...] = (_END, _END, _END)
        self._n_tabled = 0

    def around(self, leaves: Leaves) -> Iterator[Level]:
        """The leaves, the switches a hop away from one of them, and so on."""
        level = self._level(v for v in leaves if self.switch[v])
        seen: set[Level] = set()
        while level not in seen:
            yield level
            seen.add(level)
            if level.farther is None:
                level.farther = self._level(level.links)
            level = level.farther

    def nearer(self, switch: int, leaves: Leaves) -> Sequence[int]:
        """Links from a switch to those a hop nearer to the leaves; none from a leaf."""
        nearer: Level | None = None
        for level in self.around(leaves):
            if switch in level.members:
                return nearer.links.get(switch, ()) if nearer else ()
            nearer = level
        return ()

    def nearest(self, heads: Sequence[int], leaves: Leaves) -> list[int]:
        """Places of those switches from which the leaves are nearest."""
        for level in self.around(leaves):
            if nearest := [k for k, v in enumerate(heads) if v in level.members]:
                return nearest
        return []

    # ---- many at once -----------------------------------------------------------------------------------------------

    def numbers(self, leaves: Sequence[Leaves]) -> Ints:
        """(hops, n) the number of the level so many hops away from each of some leaves; -1 where there is none."""
        level_numbers = [[level.number for level in self.around(leaf_set)] for leaf_set in leaves]
        numbers_of = np.full((max(map(len, level_numbers), default=0), len(level_numbers)), -1, dtype=np.int64)
        for column, numbers in enumerate(level_numbers):
            numbers_of[: len(numbers), column] = numbers
        return numbers_of

    def away(self, switches: Ints, levels: Ints) -> Ints:
        """(k,) hops of each switch from the leaves around which ``levels`` (hops, k) lie; as many as these are where
        there is no way."""
        members = self._tables()[0]
        hops_of = np.full(len(switches), len(levels))
        left = np.arange(len(switches))
        for hops, level in enumerate(levels):
            wanted = level[left] * len(self.switch) + switches[left]
            is_member = members[np.searchsorted(members, wanted)] == wanted
            hops_of[left[is_member]] = hops
            left = left[~is_member]
        return hops_of

    def links(self, switches: Ints, level: Ints, turn: npt.NDArray[np.int64 | np.uint64]) -> Ints:
        """(k,) of the links from each switch to members of a level the ``turn``-th, counted round."""
        _, begins, links = self._tables()
        wanted = level * len(self.switch) + switches
        first = np.searchsorted(begins, wanted)
        count = np.searchsorted(begins, wanted, side="right") - first
        links_up: Ints = links[first + (turn % count.astype(turn.dtype)).astype(np.int64)]
        return links_up

    def _tables(self) -> tuple[Ints, ...]:
        """Of all levels, told by their number, one after another: members; where links to them begin; these links."""
        if self._n_tabled < len(self._known):
            new = list(self._known.values())[self._n_tabled :]
            size = len(self.switch)
            members = [level.number * size + v for level in new for v in sorted(level.members)]
            begins = [level.number * size + v for level in new for v, link in level.links.items() for _ in link]
            links = [link for level in new for hop_links in level.links.values() for link in hop_links]
            more = zip(self._table, (members, begins, links), strict=True)
            self._table = tuple(_longer(column, rows) for column, rows in more)
            self._n_tabled = len(self._known)
        return self._table

    def _level(self, switches: Iterable[int]) -> Level:
        key = tuple(sorted(switches))
        if key not in self._known:
            links: dict[int, list[int]] = {}
            for link in sorted(link for v in key for link in self._into.get(v, ())):
                links.setdefault(self._tails[link], []).append(link)
            self._known[key] = Level(len(self._known), key, dict(sorted(links.items())))
        return self._known[key]


def _longer(column: Ints, rows: list[int]) -> Ints:
    """More rows, before the last one."""
    return np.concatenate([column[:-1], np.array(rows, dtype=np.int64), _END])


_END = np.array([np.iinfo(np.int64).max])
"""The last row of each table, for what is not in it."""
