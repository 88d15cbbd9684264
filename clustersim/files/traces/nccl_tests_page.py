"""A table of nccl-tests that stands in a page or a sheet (Markdown, reStructuredText, CSV), as the program prints it.

Its columns are known by their names, whatever units are written beside; a table with a column of another kind, such as
one of configurations, is not nccl-tests' and stays. Sizes in KB, MB and GB are 1,024 of the next smaller, as -b takes
them, and 1,000 where the bandwidth says so.
"""

from __future__ import annotations

import re

from clustersim.core.page_tables import Rows, with_tables

_HEAD = re.compile(r"bus[ _-]?b(?:w|andwidth)", re.IGNORECASE)
_NAMES = {
    "size": r"(?:message|msg|data|buffer)?(?:size|bytes)b?",
    "count": r"count|elements|elems",
    "type": r"d?(?:ata)?type",
    "redop": r"redop|op",
    "root": "root",
    "time": r"time(?:us)?",
    "algbw": r"alg(?:o|orithm)?b(?:w|andwidth)(?:gb/?s|gbps)?",
    "busbw": r"busb(?:w|andwidth)(?:gb/?s|gbps)?",
    "#wrong": r"#?(?:wrong|errors?)",
}
"""Columns, by what their names are without blanks, underscores, units and places."""
_UNIT = re.compile(r"\(([^()]*)\)|\[([^\[\]]*)\]")
_IN_PLACE = re.compile(r"(?<!of[ _-])(?<!\w)in[ _-]place|(?<![a-z])ip_|\bip\b", re.IGNORECASE)
_OUT_OF_PLACE = re.compile(r"out[ _-]of[ _-]place|(?<![a-z])oop_|\boop\b", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B|bytes)?", re.IGNORECASE)
_POWERS = ("", "k", "m", "g", "t")
_TIMES = {"": 1.0, "us": 1.0, "µs": 1.0, "μs": 1.0, "usec": 1.0, "ms": 1e3, "s": 1e6}
"""us in each."""
_RATES = ("", "GB/s", "GB/sec", "GBps", "gb/s")
"""Of gigabytes a second; Gb/s and Gbps are of bits."""
TIMED = "the table has no times: they are its sizes over algbw"
TYPED = "the table has no types: as if of float, which nccl-tests takes where nothing else is said"
Columns = list[tuple[str, str]]
"""Name and unit of each."""


def is_named(text: str) -> bool:
    """Whether a text has columns called as those of nccl-tests."""
    return re.search(rf"[|,;][^|,;\n]*{_HEAD.pattern}", text, re.IGNORECASE) is not None


def as_printed(text: str) -> tuple[str, list[str]]:
    """The text with such tables as nccl-tests prints them, and what was taken for what they do not say."""
    notes: dict[str, None] = {}

    def printed(rows: Rows) -> list[str]:
        """A table's lines; what was taken for it is kept."""
        lines, taken = _table(rows)
        notes.update(dict.fromkeys(taken))
        return lines

    return with_tables(text, _HEAD, printed), list(notes)


def _table(rows: Rows) -> tuple[list[str], list[str]]:
    """A table's lines, and what was taken; no lines where it is not nccl-tests'."""
    order = sorted(range(len(rows[0])), key=lambda place: _IN_PLACE.search(rows[0][place]) is not None)
    columns = [_column(rows[0][place]) for place in order]
    names = [name for name, _ in columns]
    whole = {"size", "busbw"} <= set(names) and not {"time", "algbw"}.isdisjoint(names)
    if not whole or not all(map(_is_known, columns)):
        return [], []
    body = [[row[place].replace(",", "") for place in order] for row in rows[1:] if len(row) == len(order)]
    lines = [_line(columns, cells) for cells in body if cells[names.index("busbw")]]
    if not lines or not all(lines):
        return [], []
    places = 2 if names.count("time") > 1 else 1
    head = " ".join(["# size count type redop root", *["time algbw busbw #wrong"] * places])
    taken = [note for name, note in (("time", TIMED), ("type", TYPED)) if name not in names]
    return [head, *lines], taken


def _column(head: str) -> tuple[str, str]:
    """Its name, empty where nccl-tests has none like it, and its unit."""
    unit = _UNIT.search(head)
    plain = _OUT_OF_PLACE.sub("", _IN_PLACE.sub("", _UNIT.sub("", head)))
    plain = re.sub(r"[\s_-]", "", plain.strip("# ") if "wrong" not in plain else plain).lower()
    name = next((name for name, pattern in _NAMES.items() if re.fullmatch(pattern, plain)), "")
    return name, (unit[1] or unit[2] or "").strip() if unit else ""


def _is_known(column: tuple[str, str]) -> bool:
    """Whether a column is nccl-tests', in a unit that is known."""
    name, unit = column
    if name == "size":
        return unit == "" or _SIZE.fullmatch(f"1{unit}") is not None
    return bool(name) and (name != "time" or unit in _TIMES) and (not name.endswith("bw") or unit in _RATES)


def _line(columns: Columns, cells: list[str]) -> str:
    """A row as it is printed; empty where a cell is none of its column's, or size, time and algbw do not agree."""
    values: dict[str, list[str]] = {}
    for (name, _), cell in zip(columns, cells, strict=True):
        values.setdefault(name, []).append(cell)
    units = dict(reversed(columns))
    size = _SIZE.fullmatch(values["size"][0])
    try:
        rates = [float(word) for word in values.get("algbw", [])]
        times = [float(word) * _TIMES[units["time"]] for word in values.get("time", [])]
    except ValueError:
        return ""
    if size is None or not (rates or times) or (not times and not rates[0] > 0.0):
        return ""
    power = _POWERS.index(size[2].lower() or re.sub(r"i?b(?:ytes)?$", "", units["size"].lower()))
    nbytes = next((n for n in _bytes(float(size[1]), power) if _agree(n, times, rates)), 0)
    if not nbytes:
        return ""
    times = times or [nbytes / rates[0] / 1e3]
    line = [str(nbytes), "0", *(values.get(name, [other])[0] or other for name, other in _ELSE.items())]
    for place, time in enumerate(times):
        rate = values["algbw"][place] if place < len(rates) else f"{nbytes / time / 1e3:.2f}"
        bus = values["busbw"][place] if place < len(values["busbw"]) else "N/A"
        wrong = values.get("#wrong", [])
        line += [f"{time:.10g}", rate, bus, (wrong[place] if place < len(wrong) else "") or "0"]
    return "  ".join(line)


_ELSE = {"type": "float", "redop": "none", "root": "-1"}
"""What a row has where its table does not say."""


def _bytes(number: float, power: int) -> list[int]:
    """What a size may be."""
    return [round(number * base**power) for base in ((1024, 1000) if power else (1,))]


def _agree(nbytes: int, times: list[float], rates: list[float]) -> bool:
    """Whether a size over a time [us] is its algbw [GB/s], as far as printed; so where one of them is not there."""
    if not times or not rates:
        return nbytes > 0
    return times[0] > 0.0 and abs(nbytes / times[0] / 1e3 - rates[0]) <= 0.02 * rates[0] + 0.01
