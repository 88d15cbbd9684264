"""What an nccl-tests table is of, where nothing above it says so: its columns, its collective, how many ranks.

A table prints two bandwidths whose ratio is the collective's bus factor (nccl-tests doc/PERFORMANCE.md), with two
decimals: small rows say little, so the whole table is one witness. What it reduces, its root, and whether in-place
results are checked (an all_to_all's and a sendrecv's are not; the latter's rows name an operation all the same) tell
the rest; what they leave open stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from clustersim.collectives.base import bus_factor
from clustersim.files.traces.unread import shared_advice

Cells: TypeAlias = dict[str, list[str]]
"""Column name -> its cells, out of place first."""
MOST_RANKS = 512
"""Ranks that a ratio is tried for; the factors of larger groups lie closer together than what is printed."""
BARE = re.compile(
    r"(?m)\b\d+[ \t]+\d+[ \t]+[a-z]\w*[ \t]+(?:sum|prod|min|max|avg|mulsum|none)[ \t]+-?\d+"
    r"(?:[ \t]+\d+(?:\.\d+)?){3}[ \t]+(\d+|\d(?:\.\d+)?e[+-]\d+|N/A)"
    r"(?:[ \t]+\d+(?:\.\d+)?){3}[ \t]+(?:\d+|\d(?:\.\d+)?e[+-]\d+|N/A)[ \t\r]*$"
)
"""A row of thirteen cells, which every version that prints as many has in one order."""


def columns_of(line: str) -> list[str]:
    """The columns of a row that was pasted without its header; none where they cannot be those, as where size and
    time do not give algbw.

    >>> columns_of("4096 1024 float sum -1 10.0 0.41 0.72 0 9.9 0.41 0.72 0")[5:9]
    ['time', 'algbw', 'busbw', '#wrong']
    """
    match = BARE.fullmatch(line.strip())
    words = line.split()
    if match is None or float(words[5]) <= 0.0:
        return []
    rate = float(words[0]) / float(words[5]) / 1e3  # bytes a us are MB/s
    if abs(rate - float(words[6])) > 0.02 * rate + 0.01:
        return []
    timed = ["time", "algbw", "busbw", "error" if "e" in match[1] else "#wrong"]
    return ["size", "count", "type", "redop", "root", *timed, *timed]


FEWEST = 3
"""Marks between the columns of a sheet or a page's table that has nccl-tests' own."""


def no_table(text: str) -> str:
    """Why a text of nccl-tests has no table: columns of a sheet or a page that are not nccl-tests' alone, or none."""
    parted = (line for line in text.splitlines() if "busbw" in line.lower())
    if any(max(map(line.count, ",;|")) >= FEWEST for line in parted):
        instead = shared_advice("table").removeprefix("give ")
        return (
            "beside busbw stand columns or units that are not nccl-tests' (size in bytes, count, type, redop, root, "
            "time in us, algbw and busbw in GB/s, #wrong), empty cells, or a size over its time that is not its algbw: "
            f"give the log as it was printed, or {instead}"
        )
    return "no table of nccl-tests: no header with size, count, type, time, algbw and busbw"


@dataclass(frozen=True)
class Guess:
    """A collective and its ranks."""

    kind: str
    ranks: int


def guessed(rows: Sequence[Cells], ranks: int) -> Guess | None:
    """What the rows of one table are; ``ranks`` 0: not known. None where that stays open."""
    kinds = _kinds(rows)
    low, high = _ratio(rows)
    if not kinds or low >= high:
        return None
    counts = [ranks] if ranks else range(2, MOST_RANKS)
    fits = [Guess(kind, n) for kind in kinds for n in counts if low <= bus_factor(kind, n) <= high]
    if len({guess.kind for guess in fits}) != 1:
        return None
    return Guess(fits[0].kind, fits[0].ranks if len(fits) == 1 else 0)


def ranks_of(rows: Sequence[Cells], kind: str) -> int:
    """How many ranks a table of a collective that is known is of; 0 where its factor does not tell."""
    low, high = _ratio(rows)
    fits = [n for n in range(2, MOST_RANKS) if kind and low <= bus_factor(kind, n) <= high]
    return fits[0] if len(fits) == 1 else 0


def _kinds(rows: Sequence[Cells]) -> list[str]:
    """What the table's words leave possible."""
    if not rows:
        return []
    row = rows[0]
    reduces = row.get("redop", ["none"])[0] not in {"none", "N/A", ""}
    rooted = _whole(row.get("root", ["-1"])[0]) >= 0
    if rooted:
        return ["reduce"] if reduces else ["broadcast"]
    checks = [word for cells in rows for word in cells.get("#wrong", cells.get("error", []))[:1]]
    in_place = [word for cells in rows for word in cells.get("#wrong", cells.get("error", []))[1:]]
    if reduces and in_place and all(word == "N/A" for word in in_place) and "N/A" not in checks:
        return ["sendrecv"]
    if reduces:
        unchecked = not in_place or "N/A" in checks
        return ["all_reduce", "reduce_scatter", *(["sendrecv"] if unchecked else [])]
    if not in_place or "N/A" in checks:
        return []
    return ["all_to_all"] if all(word == "N/A" for word in in_place) else ["all_gather"]


def _ratio(rows: Sequence[Cells]) -> tuple[float, float]:
    """What busbw / algbw lies between, by all rows; where they contradict each other, by the fastest alone."""
    bounds = [(algbw, low, high) for algbw, low, high in map(_bounds, rows) if high > low]
    if not bounds:
        return 0.0, 0.0
    low = max(bound[1] for bound in bounds)
    high = min(bound[2] for bound in bounds)
    return (low, high) if low < high else max(bounds)[1:]


def _bounds(cells: Cells) -> tuple[float, float, float]:
    """A row's algbw, and what its ratio lies between: columns have two decimals, or fewer where they are narrow."""
    try:
        algbw = float(cells["algbw"][0])
        busbw = float(cells["busbw"][0])
    except (KeyError, ValueError):
        return 0.0, 0.0, 0.0
    half = max(_half(cells["algbw"][0]), _half(cells["busbw"][0]))
    if algbw <= half:
        return 0.0, 0.0, 0.0
    return algbw, (busbw - half) / (algbw + half), (busbw + half) / (algbw - half)


def _half(word: str) -> float:
    decimals = len(word.partition(".")[2])
    return 0.5 * 10.0**-decimals if decimals else 0.5


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        return -1
