"""A run's times in few bytes, bit for bit.

Most times repeat: a row is ready the moment an earlier row ended, and starts when it is ready. So the ends are kept as
they are, and of the other times only which end they equal, as the distance in rows, which hardly changes along an op.
Distances and sets fall into runs, which zlib squeezes; the ends of ranks that jitter are noise, which nothing does.
Blocks share their columns, and columns their values, already: each is kept once, the two first bytes of a time squeezed
and the noise behind them as it is; and values that are a mix of others (the later of two ends, whichever that was) are
kept as which.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.core.blocks import Block, Column
from clustersim.core.sheets import distinct

Array: TypeAlias = npt.NDArray[Any]

NO_ROW = np.iinfo(np.int32).min
"""The time equals no row's end and is kept itself."""
MISSES = 3
"""Elements of a column that are found nowhere, after which the rest of it is taken for new as well."""
AT_ONCE = 2**20
"""Elements of columns that are looked up together."""
SQUEEZED = 1
"""How hard zlib tries: at its usual 6 it takes four times as long, for a twentieth of the bytes."""
NOISE = "_noise"
"""Ends the names of arrays that nothing squeezes."""


def packed(ready: Array, start: Array, end: Array) -> dict[str, Array]:
    """Columns of float [s] as arrays that compress well; :func:`unpacked` gives the same bits back."""
    arrays = {"row_end": _shuffled(end)}
    end_bits, first = np.unique(end.view(np.int64), return_index=True)
    for name, column, same in (("ready", ready, None), ("start", start, ready)):
        bits = column.view(np.int64)
        position = np.minimum(np.searchsorted(end_bits, bits), max(len(end_bits) - 1, 0))
        is_known = end_bits[position] == bits if len(end_bits) else np.zeros(0, dtype=bool)
        distance = np.where(is_known, first[position] - np.arange(len(bits)), NO_ROW) if len(bits) else bits
        arrays[f"row_{name}_back"] = distance.astype(np.int32)
        if same is not None:  # as ready as can be: distance 0, which no row has to its own end unless it took no time
            equal = bits == same.view(np.int64)
            arrays[f"row_{name}_same"] = np.packbits(equal)
            arrays[f"row_{name}_back"][equal] = 0
            is_known = is_known | equal
        arrays[f"row_{name}_own"] = column[~is_known]
    return arrays


def unpacked(arrays: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Ready, start and end of every row, from what :func:`packed` made."""
    end = _unshuffled(arrays["row_end"])
    ready = _followed(arrays, "ready", end)
    start = _followed(arrays, "start", end)
    equal = np.unpackbits(arrays["row_start_same"], count=len(end)).astype(bool)
    start[equal] = ready[equal]
    return ready, start, end


def _followed(arrays: dict[str, Array], name: str, end: Array) -> Array:
    back = arrays[f"row_{name}_back"].astype(np.int64)
    own = back == NO_ROW
    column: Array = end[np.where(own, 0, np.arange(len(back)) + back)] if len(end) else np.zeros(0)
    column[own] = arrays[f"row_{name}_own"]
    return column


def _shuffled(column: Array) -> Array:
    """(8, n) bytes: first bytes first, since signs and exponents repeat where the rest does not."""
    return np.ascontiguousarray(np.ascontiguousarray(column).view(np.uint8).reshape(-1, 8).T)


def _unshuffled(rows: Array) -> Array:
    return np.ascontiguousarray(rows.T).reshape(-1).view(np.float64).copy()


def packed_blocks(blocks: tuple[Block, ...]) -> dict[str, Array]:
    """Blocks as arrays; :func:`unpacked_blocks` gives them back, with the same bits and the same columns shared.

    Columns stay as they are, values counted from another column's among them: written out they would be many times as
    much. Values, and the meetings that they are of, are kept once however many columns have them.
    """
    ends = [block.columns[2] for block in blocks]  # first: most of the other times are somebody's end
    shared, numbers = distinct(ends + [column for block in blocks for column in block.columns])
    columns, place = _behind_their_since(shared)
    number = {id(column): i for i, column in enumerate(columns)}
    values, values_of = distinct([column.values for column in columns])
    meetings, met_of = distinct([_NO_MEETINGS if column.of is None else column.of for column in [_NOWHERE, *columns]])
    ranks, whose = distinct([block.ranks for block in blocks])
    ptr = np.cumsum([0, *map(len, values)], dtype=np.int64)
    times = np.concatenate([*values, np.zeros(0)])
    mixes = _mixes(times, ptr)
    over_ranks = np.array([(column.low, column.high, column.mean) for column in columns]).reshape(-1, 3).T.copy()
    since = [-1 if column.since is None else number[id(column.since)] for column in columns]
    return {
        "block_op": np.array([block.op for block in blocks], dtype=np.int32),
        "block_whose": whose.astype(np.int32),
        "block_which": place[numbers[len(blocks) :]].astype(np.int32).reshape(-1, 3),
        **ragged("block_ranks", tuple(ranks)),
        **ragged("block_meetings", tuple(meetings)),
        "column_values": values_of.astype(np.int32),
        "column_meetings": met_of[1:].astype(np.int32),
        "column_since": np.array(since, dtype=np.int32),
        **_halved("column_over_ranks", over_ranks.ravel()),
        "block_mix_ptr": ptr,
        "block_mix_items": mixes if values else np.zeros(0, dtype=np.int64),  # as :func:`ragged` has nothing
        **_halved("block_times", times[mixes < 0]),
    }


_NO_MEETINGS: Array = np.zeros(0, dtype=np.int64)
_NOWHERE = Column(np.zeros(0), None, 0.0, 0.0, 0.0)
"""So that the meetings numbered 0 are none."""


def _behind_their_since(shared: list[Column]) -> tuple[list[Column], Array]:
    """Columns and those that they are counted from, which come before them; and where each of ``shared`` is there."""
    known = {id(column) for column in shared}
    columns = list(shared)
    for column in columns:
        if column.since is not None and id(column.since) not in known:
            known.add(id(column.since))
            columns.append(column.since)
    order = np.argsort(np.fromiter((column.depth for column in columns), np.int64, len(columns)), kind="stable")
    place = np.empty(len(columns), dtype=np.int64)
    place[order] = np.arange(len(columns))
    return [columns[i] for i in order.tolist()], place


def unpacked_blocks(arrays: Mapping[str, Array]) -> tuple[Block, ...]:
    """Blocks from what :func:`packed_blocks` made. Raises :class:`ValueError` for a column counted from itself."""
    ptr = arrays["block_mix_ptr"]
    times = _followed_back(_whole("block_times", arrays), ptr, arrays["block_mix_items"])
    values = np.split(times, ptr[1:-1]) if len(ptr) > 1 else []
    ranks = parts("block_ranks", arrays)
    meetings = (None, *parts("block_meetings", arrays)[1:])
    over_ranks = _whole("column_over_ranks", arrays).reshape(3, -1)
    since = arrays["column_since"]
    if (since >= np.arange(len(since))).any():
        raise ValueError("a column that is counted from itself")
    facts = (arrays["column_values"], arrays["column_meetings"], *over_ranks, since)
    columns: list[Column] = []
    for which, met, low, high, mean, before in zip(*(fact.tolist() for fact in facts), strict=True):
        columns.append(Column(values[which], meetings[met], low, high, mean, columns[before] if before >= 0 else None))
    rows = zip(arrays["block_op"].tolist(), arrays["block_whose"].tolist(), arrays["block_which"].tolist(), strict=True)
    return tuple(Block(op, ranks[whose], (columns[a], columns[b], columns[c])) for op, whose, (a, b, c) in rows)


def _halved(name: str, column: Array) -> dict[str, Array]:
    """A column of float [s] as what nothing squeezes and as the rest; :func:`_whole` puts it together again."""
    rows = _shuffled(column)
    # Little-endian: the last two bytes are sign, exponent and the first bits of the fraction.
    return {f"{name}{NOISE}": rows[:6].copy(), f"{name}_top": rows[6:].copy()}


def _whole(name: str, arrays: Mapping[str, Array]) -> Array:
    """What :func:`_halved` made two of."""
    return _unshuffled(np.concatenate([arrays[f"{name}{NOISE}"], arrays[f"{name}_top"]]))


def _followed_back(times: Array, ptr: Array, mixes: Array) -> Array:
    """Columns one after another, each from ``ptr`` on: elements of their own from ``times``, the others from the column
    that :func:`_mixes` names, at the same place, or its only one."""
    lengths = np.diff(ptr)
    filled = np.empty(len(mixes))
    used = 0
    for chunk in pairwise(_chunk_edges(ptr)):
        first, last = ptr[list(chunk)].tolist()
        mix = mixes[first:last]
        own = mix < 0
        place = np.arange(first, last) - np.repeat(ptr[slice(*chunk)], lengths[slice(*chunk)])
        source = np.where(own, np.arange(first, last), ptr[mix] + np.where(lengths[mix] > 1, place, 0))
        while True:  # as long as what is named in this chunk names another itself
            inside = np.flatnonzero(source >= first)
            further = source[source[inside] - first]
            if np.array_equal(further, source[inside]):
                break
            source[inside] = further
        after = used + int(own.sum())
        filled[first:last][own] = times[used:after]
        filled[first:last] = filled[source]
        used = after
    return filled


def _chunk_edges(ptr: Array) -> list[int]:
    """Numbers of columns between which lie about :data:`AT_ONCE` elements."""
    at_least = np.arange(0, int(ptr[-1]) + AT_ONCE, AT_ONCE)
    edges: list[int] = np.unique(np.minimum(np.searchsorted(ptr, at_least), len(ptr) - 1)).tolist()
    return edges


def _mixes(times: Array, ptr: Array) -> Array:
    """Which earlier column each element is found in (same place, same bits), -1 for none; of columns that lie one after
    another: ``times``, each from ``ptr`` on."""
    mixes = np.full(len(times), -1, dtype=np.int32)
    bits = times.view(np.int64)
    lengths = np.diff(ptr)
    single = np.flatnonzero(lengths == 1)  # one time for all ranks may be any rank's
    values, first = np.unique(bits[ptr[single]], return_index=True)
    of_all = single[first].astype(np.int32)
    for length in np.unique(lengths[lengths != 1]).tolist():
        numbers = np.flatnonzero(lengths == length).astype(np.int32)
        step = max(1, AT_ONCE // max(length, 1))
        table = np.empty((len(numbers), length), dtype=np.int64)
        mix = np.full(table.shape, -1, dtype=np.int32)
        for begin in range(0, len(numbers), step):
            chunk = slice(begin, begin + step)
            table[chunk] = bits[ptr[numbers[chunk], None] + np.arange(length)]
            if len(values):
                place = np.minimum(np.searchsorted(values, table[chunk]), len(values) - 1)
                known = (values[place] == table[chunk]) & (of_all[place] < numbers[chunk, None])
                mix[chunk] = np.where(known, of_all[place], np.int32(-1))
        _mix(table, numbers, mix)
        for begin in range(0, len(numbers), step):
            chunk = slice(begin, begin + step)
            mixes[ptr[numbers[chunk], None] + np.arange(length)] = mix[chunk]
    return mixes


def _mix(table: Array, names: Array, mix: Array) -> None:
    """Fill in what is left of the ``mix`` of each row of a table; ``names`` are the rows'."""
    before = _LastEqual(table)
    fresh = (mix < 0).all(axis=1)
    for place in range(min(table.shape[1], MISSES)):
        fresh &= before.at(place) < 0
    for row in np.flatnonzero(~fresh).tolist():
        misses = 0
        bits = table[row]
        left = np.flatnonzero(mix[row] < 0)
        while len(left) and misses < MISSES:
            earlier = before.at(left.item(0)).item(row)
            if earlier >= 0:
                equal = table[earlier, left] == bits[left]
                mix[row, left[equal]] = names[earlier]
                left = left[~equal]
            else:
                left = left[1:]
                misses = misses + 1


class _LastEqual:
    """Of each row of a table the last one before it that has the same at a place: one sort for each place that is asked
    for, so that a table of many rows is not looked through for each of them."""

    def __init__(self, table: Array) -> None:
        self._table = table
        self._known: dict[int, Array] = {}

    def at(self, place: int) -> Array:
        """(rows,) the number of a row; -1 for none."""
        if place not in self._known:
            column = self._table[:, place]
            order = np.argsort(column, kind="stable")
            same = np.flatnonzero(column[order[1:]] == column[order[:-1]])
            last = self._known[place] = np.full(len(column), -1, dtype=np.int32)
            last[order[same + 1]] = order[same]
        return self._known[place]


def ragged(name: str, arrays: tuple[Array, ...]) -> dict[str, Array]:
    """Arrays of different lengths as one, and where each begins."""
    ptr = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int64)
    return {f"{name}_ptr": ptr, f"{name}_items": np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)}


def parts(name: str, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
    """The arrays that :func:`ragged` joined."""
    ptr = arrays[f"{name}_ptr"]
    return tuple(np.split(arrays[f"{name}_items"], ptr[1:-1])) if len(ptr) > 1 else ()


def zipped(arrays: Mapping[str, Array]) -> bytes:
    """What ``numpy.load`` reads: squeezed, but for arrays of :data:`NOISE`, which would only cost time."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy")  # of 1980: the same run gives the same bytes
            member.compress_type = zipfile.ZIP_STORED if name.endswith(NOISE) else zipfile.ZIP_DEFLATED
            written = io.BytesIO()
            np.lib.format.write_array(written, np.asanyarray(array), allow_pickle=False)
            archive.writestr(member, written.getbuffer(), compresslevel=SQUEEZED)
        archive.comment = seal(archive)
    return data.getvalue()


def seal(archive: zipfile.ZipFile) -> bytes:
    """What an archive's comment must say: a digest of its members' checksums."""
    members = [(member.filename, member.CRC, member.file_size) for member in archive.infolist()]
    return hashlib.sha256(repr(members).encode()).hexdigest().encode()
