"""Spans of ranks side by side: tables of ranks x ops, for whoever has to follow each rank through its time.

A run keeps an op's times over ranks. What a rank does when is the other way round, and turning one into the other for a
whole run at once would need every span in memory several times over. A :class:`Sheet` is a part of that table: some
ranks that did the same ops, a few megabytes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.blocks import AT_ONCE, Block, Column, Columns, values_at

Marks: TypeAlias = npt.NDArray[np.uint64]
Rows: TypeAlias = tuple[tuple[Ints, ...], Ints, Ints, Floats, Floats, Floats]
"""Rank sets, and per row its op, its set, ready, start and end; by op, then start."""


class Sheet(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Spans of ranks that did the same ops as often.

    Parameters
    ----------
    ranks : (k,) int, ascending. op : (m,) int, ascending; as often as each rank did it.
    ready, start, end : (k, m) float [s].
    """

    ranks: Ints
    op: Ints
    ready: Floats
    start: Floats
    end: Floats


FEW = 4
"""Columns that are asked whether one of them alone tells all ranks apart, as paces of their own do."""


class Shelf:
    """Rows and blocks by who did them, looked through once for many sheets."""

    def __init__(self, rows: Rows, blocks: Sequence[Block], world_size: int) -> None:
        self._rows = rows
        self._world = world_size
        self._blocks = blocks
        self._kind = self._kinds()

    @cached_property
    def columns(self) -> list[BlockColumns]:
        """The blocks, those of the same ranks together."""
        whose, of = distinct([block.ranks for block in self._blocks])
        lots = np.split(np.argsort(of, kind="stable"), np.cumsum(np.bincount(of, minlength=len(whose)))[:-1])
        return [BlockColumns([self._blocks[i] for i in lot.tolist()], lot) for lot in lots if len(lot)]

    def _kinds(self) -> Marks:
        """(world_size,) a number for each rank, equal for those that did the same ops as often."""
        sets, op, set_of, *_ = self._rows
        kinds = np.zeros(self._world, dtype=np.uint64)
        draw = np.random.default_rng(0)
        of_op = draw.integers(2**63, size=int(op.max(initial=-1)) + 1, dtype=np.uint64)
        of_set = np.zeros(len(sets), dtype=np.uint64)
        np.add.at(of_set, set_of, of_op[op])
        for ranks, mark in zip(sets, of_set, strict=True):
            kinds[ranks] += mark
        for blocks in self.columns:
            kinds[blocks.ranks] += draw.integers(2**63, dtype=np.uint64)
        return kinds

    def courses(self) -> Marks:
        """(world_size,) a number for each rank, equal for those that have exactly the same spans."""
        sets, _, set_of, *_ = self._rows
        courses = np.zeros(self._world, dtype=np.uint64)
        draw = np.random.default_rng(0)
        mark = draw.integers(2**63, size=len(sets), dtype=np.uint64)
        for s in np.unique(set_of).tolist():
            courses[sets[s]] += mark[s]
        for blocks in self.columns:  # and where each has its own times, when those are the same bits
            ranks = blocks.ranks
            courses[ranks] += draw.integers(2**63, dtype=np.uint64)
            # A column that several blocks share tells nothing new the second time.
            distinct = [blocks.columns[i] for i in np.flatnonzero(blocks.low < blocks.high).tolist()]
            alone = next((c for c in distinct[:FEW] if len(np.unique(c.all)) == len(ranks)), None)
            alike: dict[int, list[Column]] = {}
            for column in distinct if alone is None else [alone]:
                alike.setdefault(id(column.of), []).append(column)
            for columns in alike.values():
                meeting = columns[0].of
                length = len(ranks) if meeting is None else len(columns[0].values)
                step = max(1, AT_ONCE // length)
                total = np.zeros(length, dtype=np.uint64)
                for first in range(0, len(columns), step):
                    chunk = [c.all if meeting is None else c.values for c in columns[first : first + step]]
                    bits = np.concatenate(chunk).view(np.uint64).reshape(-1, length)
                    odd = draw.integers(2**63, size=(len(bits), 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
                    total += ((bits ^ (bits >> np.uint64(31))) * odd).sum(axis=0, dtype=np.uint64)
                courses[ranks] += total if meeting is None else total[meeting]
        return courses

    def parts(self, ranks: Ints, at_once: int = AT_ONCE, least: int = 1) -> Iterator[SheetPart]:
        """These ranks (ascending), those that did the same ops together, about ``at_once`` spans in a part, but
        ``least`` ranks where there are so many."""
        kinds, kind_of = np.unique(self._kind[ranks], return_inverse=True)
        for kind in range(len(kinds)):
            members = ranks[kind_of == kind]
            block_places = [
                (_places(blocks.ranks, members), blocks) for blocks in self.columns if members[0] in blocks.ranks
            ]
            step = max(least, at_once // max(sum(len(blocks.op) for _, blocks in block_places), 1))
            for first in range(0, len(members), step):
                chunk = members[first : first + step]
                rows = _of_rows(self._rows, chunk) if len(self._rows[1]) else None
                yield SheetPart(
                    chunk, rows, [(places[first : first + step], blocks) for places, blocks in block_places]
                )

    def sheets(self, ranks: Ints, at_once: int = AT_ONCE, of_ops: Bools | None = None) -> Iterator[Sheet]:
        """Spans of these ranks (ascending), about ``at_once`` of them in a sheet; ``of_ops`` : (n_ops,) of which ops,
        None for all."""
        return (self._sheet(part, of_ops) for part in self.parts(ranks, at_once))

    def _sheet(self, part: SheetPart, of_ops: Bools | None) -> Sheet:
        parts = [] if part.rows is None else [_some(part.rows, of_ops)]
        parts += [Sheet(part.ranks, *blocks.spans(places, of_ops)) for places, blocks in part.held]
        n = len(part.ranks)
        if len(parts) == 1 and len(parts[0].start) == n:
            return parts[0]
        none = np.zeros((n, 0))
        op = np.concatenate([np.zeros(0, dtype=np.int64), *(part.op for part in parts)])
        order = np.argsort(op, kind="stable")
        tables = (
            [np.broadcast_to(getattr(part, name), (n, len(part.op))) for part in parts]
            for name in ("ready", "start", "end")
        )
        times = (np.concatenate([none, *columns], axis=1)[:, order] for columns in tables)
        return Sheet(part.ranks, op[order], *times)


class BlockColumns:
    """The distinct columns of blocks of the same ranks, by number.

    ``ranks`` : (k,) int. ``place`` : (m,) int, of each block among those of all ranks. ``columns`` : (c,).
    ``op`` : (m,) int, of each block. ``which`` : (3, m) int, the numbers of its ready, start and end.
    ``low``, ``high``, ``mean`` : (c,) float [s], of each column over ranks.
    """

    def __init__(self, blocks: Sequence[Block], place: Ints) -> None:
        self.ranks = blocks[0].ranks
        self.place = place
        columns, which = distinct([column for block in blocks for column in block.columns])
        self.columns: list[Column] = columns
        self.op = np.array([block.op for block in blocks], dtype=np.int64)
        self.which = which.reshape(-1, 3).T.copy()
        self.low = np.array([column.low for column in columns], dtype=np.float64)
        self.high = np.array([column.high for column in columns], dtype=np.float64)
        self.mean = np.array([column.mean for column in columns], dtype=np.float64)
        self._all, self._since = with_since(columns)
        of = distinct([column.of for column in self._all])[1]
        self._values = [column.values for column in self._all]
        sizes = np.fromiter(map(len, self._values), dtype=np.int64, count=len(self._values))
        counted = np.where(self._since < 0, 0, sizes)
        wide = np.array([column.low < column.high for column in self._all], dtype=np.bool_)
        # Columns of one kind are looked up together: those counted from 0, others by how many values they have.
        self._kind = 2 * (of * (counted.max(initial=0) + 1) + counted) + wide
        self._counted = _Distinct(self._values)

    def spans(self, places: Ints, of_ops: Bools | None) -> tuple[Ints, Floats, Floats, Floats]:
        """(m,) int the op of each of ``m`` blocks; (k, m) float [s] ready, start and end at ``k`` places. An op begins
        when another ends: each column is looked at once, however many ops have it. ``of_ops`` : as of sheets."""
        op = self.op
        which = self.which
        if of_ops is not None:
            chosen_blocks = of_ops[op]
            op = op[chosen_blocks]
            which = which[:, chosen_blocks]
        asked = np.zeros(len(self.columns), dtype=np.bool_)
        asked[which] = True
        table = self.stacked(np.flatnonzero(asked), places)
        row_of = np.cumsum(asked) - 1
        ready, start, end = (np.take(table, row_of[chosen], axis=1) for chosen in which)
        return op, ready, start, end

    def stacked(self, numbers: Ints, places: Ints) -> Floats:
        """(k, m) float [s]: what ``m`` columns are at ``k`` places."""
        return np.ascontiguousarray(self._looked_up(numbers, stretch(places), len(places)).T)

    def _looked_up(self, numbers: Ints, own: Ints | slice, n: int) -> Floats:
        """(m, n) float [s]: what ``m`` columns are at each of ``n`` places."""
        table = np.empty((len(numbers), n))
        kind = self._kind[numbers]
        for which in (np.flatnonzero(kind == own_kind) for own_kind in np.unique(kind).tolist()):
            chosen = numbers[which].tolist()
            first = self._all[chosen[0]]
            if first.since is not None:  # many are counted from one, and as many have what they count in common
                since, since_of = np.unique(self._since[chosen], return_inverse=True)
                counted, counted_of = self._counted.among(numbers[which])
                after = np.stack([values_at(values, first.of, own) for values in counted])
                table[which] = self._looked_up(since, own, n)[since_of] + after[counted_of]
                continue
            values = [self._values[i] for i in chosen]
            if first.wide and first.of is None:
                if not (isinstance(own, slice) and own.start == 0 and len(values[0]) == n):
                    values = [column[own] for column in values]
                table[which] = np.concatenate(values).reshape(-1, n)
            else:  # a value for all ranks, or one for each meeting
                shared = np.concatenate(values).reshape(len(chosen), -1)
                table[which] = shared if first.of is None else shared[:, first.of[own]]
        return table


def with_since(columns: list[Column]) -> tuple[list[Column], Ints]:
    """Columns, and behind them those that any is counted from, each once; and the number of what each is counted from,
    -1 for 0."""
    held = list(columns)
    number = dict(zip(map(id, held), range(len(held)), strict=True))
    numbers = [np.zeros(0, dtype=np.int64)]
    fresh = columns
    while fresh:
        since, since_of = distinct([column.since for column in fresh])
        fresh = [column for column in since if column is not None and id(column) not in number]
        number.update(zip(map(id, fresh), range(len(held), len(held) + len(fresh)), strict=True))
        held += fresh
        numbers.append(np.array([number.get(id(column), -1) for column in since], dtype=np.int64)[since_of])
    return held, np.concatenate(numbers)


def distinct(objects: Sequence[Any]) -> tuple[list[Any], Ints]:
    """Objects of a list, each once, in the order in which they come first; and of each place which is there."""
    names = np.fromiter(map(id, objects), dtype=np.int64, count=len(objects))
    _, first, of = np.unique(names, return_index=True, return_inverse=True)
    is_first = np.zeros(len(names), dtype=np.bool_)
    is_first[first] = True
    number = np.cumsum(is_first)[first] - 1
    return [objects[i] for i in np.flatnonzero(is_first).tolist()], number[of.reshape(-1)]


class _Distinct:
    """Objects of a list that are there more than once, each once."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects, self._of = distinct(objects)

    def among(self, places: Ints) -> tuple[list[Any], Ints]:
        """Those at some places of the list, and of each place which."""
        numbers, of = np.unique(self._of[places], return_inverse=True)
        return [self._objects[number] for number in numbers.tolist()], of.reshape(-1)


class SheetPart(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Some ranks that did the same ops, and where those are kept.

    Parameters
    ----------
    ranks : (k,) int. rows : what is kept as rows, if anything is; its times are (1, m) where all ranks agree.
    held : the ranks' places in columns, and the columns of the blocks of the same ranks.
    """

    ranks: Ints
    rows: Sheet | None
    held: list[tuple[Ints, BlockColumns]]


def stretch(places: Ints) -> Ints | slice:
    """Places, or where they follow one another the slice that needs no copy."""
    n = len(places)
    first = int(places[0])
    straight = int(places[-1]) - first == n - 1 and (np.diff(places) == 1).all()
    return slice(first, first + n) if straight else places


class ColumnGlance:
    """What is at some places of columns: each column, and what it is counted from, is looked up once.

    ``places`` : (k,) int. ``columns`` : those of the blocks that it looks at.
    """

    def __init__(self, places: Ints, columns: BlockColumns) -> None:
        self.places = places
        self.columns = columns
        self._own = stretch(places)
        self._known: dict[int, Floats] = {}
        self._row_of = np.full(len(columns.columns), -1, dtype=np.int64)  # in the table, by column
        self._table = np.empty((0, len(places)))

    def __call__(self, column: Column) -> Floats:
        """(k,), or where all agree (1,) [s]."""
        counted = self._known.get(id(column))
        if counted is None:
            counted = column.counted(self._own)
            if column.since is not None:
                counted = self(column.since) + counted
            self._known[id(column)] = counted
        return counted

    def stacked(self, numbers: Ints) -> Floats:
        """(k, m) float [s]: what ``m`` columns are at the places. Who asks again for some of them, among others, has
        them from the same table."""
        self.look(numbers)
        return np.ascontiguousarray(self._table[self._row_of[numbers]].T)

    def look(self, numbers: Ints) -> None:
        """These columns will be asked for."""
        fresh = np.unique(numbers[self._row_of[numbers] < 0])
        if len(fresh):
            self._row_of[fresh] = len(self._table) + np.arange(len(fresh))
            self._table = np.concatenate([self._table, self.columns.stacked(fresh, self.places).T])


def _places(among: Ints, ranks: Ints) -> Ints:
    """Positions of ``ranks`` among others."""
    order = np.argsort(among, kind="stable")
    places: Ints = order[np.searchsorted(among, ranks, sorter=order)]
    return places


def _some(sheet: Sheet, of_ops: Bools | None) -> Sheet:
    """A sheet with the spans of some ops."""
    if of_ops is None:
        return sheet
    chosen = of_ops[sheet.op]
    times = (column[:, chosen] for column in (sheet.ready, sheet.start, sheet.end))
    return Sheet(sheet.ranks, sheet.op[chosen], *times)


def _of_rows(rows: Rows, ranks: Ints) -> Sheet:
    """What these ranks did, as far as it is kept as rows; they are in as many. Tables of one row where all agree."""
    sets, op, set_of, *times = rows
    owner = np.repeat(np.arange(len(sets)), [len(members) for members in sets])
    count = np.bincount(owner[np.isin(np.concatenate(sets), ranks)], minlength=len(sets))[set_of]
    if ((count == 0) | (count == len(ranks))).all():
        wanted = np.flatnonzero(count)
        wanted = wanted[np.lexsort((times[1][wanted], op[wanted]))]
        return Sheet(ranks, op[wanted], *(column[wanted][None] for column in times))
    rank, op, *times = expanded(rows, ranks)
    order = np.lexsort((times[1], op, rank))
    tables = (column[order].reshape(len(ranks), -1) for column in times)
    return Sheet(ranks, op[order[: len(op) // len(ranks)]], *tables)


def expanded(rows: Rows, wanted: Ints | None = None) -> Columns:
    """Rank, op, ready, start and end of each span of the rows, those of the ranks ``wanted`` alone."""
    sets, op, set_of, ready, start, end = rows
    sizes = np.array([len(s) for s in sets], dtype=np.int64)
    members = np.concatenate(sets) if sets else np.array([], dtype=np.int64)
    if wanted is not None:
        chosen = np.isin(members, wanted)
        owner = np.repeat(np.arange(len(sizes)), sizes)[chosen]
        members = members[chosen]
        sizes = np.bincount(owner, minlength=len(sizes))
    repeat = sizes[set_of]
    # Each row's members are a slice of ``members``: its set's offset, plus 0, 1, 2... inside the row.
    inside = np.arange(repeat.sum()) - np.repeat(np.cumsum(repeat) - repeat, repeat)
    rank = members[np.repeat((np.cumsum(sizes) - sizes)[set_of], repeat) + inside]
    ready, start, end = (np.repeat(column, repeat) for column in (ready, start, end))
    return rank, np.repeat(op, repeat), ready, start, end
