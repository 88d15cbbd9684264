"""nccl-tests' own output: the table it prints, of any version.

Columns are found by the header's names, never by position: ``redop`` and ``root`` came in 2.11, ``error`` became
``#wrong``, ``-I`` puts per-iteration columns between, ``-T`` a time stamp behind (nccl-tests src/util.cu). What
launchers put before lines is taken off (:mod:`clustersim.files.traces.prefixes`). S is the ``size`` column: the full
tensor, also of all_gather and reduce_scatter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from clustersim.collectives.nccl.settings import environment_of
from clustersim.core.errors import TraceError
from clustersim.files.traces import files, nccl_tests_page, prefixes
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.nccl_tests_guess import BARE, Cells, columns_of, guessed, no_table, ranks_of
from clustersim.files.traces.nccl_tests_run import (
    LOGGED_CHANNELS,
    LOGGED_SETTING,
    OF_CPU,
    PROGRAM,
    NcclTestsRun,
    number_of,
    version_text,
)
from clustersim.files.traces.samples import Sample, Samples, SampleSieve, dtype_of, kind_of

_RANK = re.compile(
    r"#?\s*Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?(?:Pid\s+\d+\s+)?(?:on\s+(\S+)|uses)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)"
)
"""As it is, of NCCL 1's tests, and where a page took the # for a heading."""
_START = re.compile(r"#?\s*nThreads?:?\s+(\d+)\s+nGpus:?\s+(\d+)")
_CONCLUDED = re.compile(r"Collective test concluded:\s*([a-z_]+)_perf")
_WANTED = (
    r"\s*(?:#|\d+\s+\d+\s+[A-Za-z_]\w*\s+\S|[RN]CCL version|\S+:\d+:\d+ \[|"
    r"\d+\.\d+\s+\d+\.\d+\s+\d+\.\d+\s+(?:\d+|\de[+-]\d+|N/A)\s)"
)
"""How lines of interest begin: a comment, a row, the library's own, the rest of a row that its lines have cut."""
_OWN = re.compile(r"(?<!\S)(\S*):\d{1,12}:\d{1,12} \[\d+\] [RN]?CCL (?:INFO|WARN)")
"""Where a line of the library's own begins, with what a row before it has right in front."""
_CELL = re.compile(r"-?\d[\d.]*(?:e[+-]?\d+)?|N/A|nan|inf")
_VERSION = re.compile(r"[RN]CCL version\s*:?\s*(\d+\.\d+(?:\.\d+)?)|[rn]ccl-library=(\d+)")
_TABLE = re.compile(r"(?:size|bytes)\s+(?:count|N)\s+type\s.*\btime\s+algbw\s+busbw")
UNNAMED = "a collective the log does not name (write the command, such as all_gather_perf, above)"
OWN_LINES = "NCCL's own lines are in it, too: `clustersim trace` tells below the rows what they say"
"""A note for those who read the rows alone."""
UNPLAYED = "hypercube"
"""The one program of nccl-tests whose collective is none that is known: NCCL's sends between neighbours of a cube."""
_HEADER = ("size", "count", "type")


def sniff(head: Head) -> Likeness:
    """Whether this is nccl-tests' text."""
    named = "# nThread" in head.text or "algbw" in head.text or nccl_tests_page.is_named(head.text)
    found = likeness(named=named, shaped=bool(_TABLE.search(head.text)))
    return max(found, Likeness.AMONG) if BARE.search(head.text) else found


@dataclass(frozen=True)
class _Row:
    """A row's cells by column, and what the lines above named: the collective, and what was set."""

    cells: Cells
    kind: str | None
    source: str
    env: str


def read(path: Path) -> Samples:
    """The tables of a log. Raises :class:`TraceError` where it has none."""
    sieve = SampleSieve()
    run = NcclTestsRun()
    columns = list[str]()
    tables = 0
    rows: list[_Row] = []
    own = bare = 0
    begun: list[str] = []  # of a row that a line of NCCL's own has cut
    page = files.log(path)
    text, taken = nccl_tests_page.as_printed(page)
    notes = [f"{path}: {note}" for note in taken]
    for number, raw in enumerate(prefixes.lines_of(text, _WANTED), start=1):
        line = raw.strip()
        own += " NCCL INFO " in line
        if not line:
            continue
        words = line.lstrip("#").split()
        if not columns and (columns := columns_of(line)):
            tables += 1
            bare = number
            run.pasted()
        if tuple(words[:3]) == _HEADER or tuple(words[:3]) == ("bytes", "N", "type"):
            _table(rows, run, sieve, str(path), notes)
            columns = words
            run.milliseconds = words[0] == "bytes"
            tables = tables + 1
            if text is not page:
                run.pasted()
        elif columns and line[0].isdigit():
            begun, words = _whole_row(begun, line, words, columns)
            if not begun:
                rows += _row_of(_by_name(words, columns), run, f"{path}:{number}", sieve)
        elif match := _START.match(line):  # the lines that name its program and library come before this one
            _table(rows, run, sieve, str(path), notes)
            run = NcclTestsRun(run.kind, int(match[1]), int(match[2]), run.version, run.env, run.own, started=True)
        elif match := _CONCLUDED.search(line):  # of the table above, where nothing before it named it
            rows = [replace(row, kind=row.kind or kind_of(match[1])) for row in rows]
        else:
            _learn(run, line, sieve)
    _table(rows, run, sieve, str(path), notes)
    if not tables:
        raise TraceError(f"{path}: {no_table(text)}")
    if bare:
        _ask(f"{path}:{bare}", sieve, notes)
    notes += _ending(path, sieve, own=own > 0)
    return sieve.done(str(path), notes)


def _row_of(cells: Cells | None, run: NcclTestsRun, source: str, sieve: SampleSieve) -> list[_Row]:
    """The row of these cells; none of a line that has no cell for each column."""
    if cells is None:
        sieve.skip("a row that is cut off, or has columns its header does not name")
        return []
    return [_Row(cells, run.kind, source, run.settings)]


def _ending(path: Path, sieve: SampleSieve, *, own: bool) -> Iterator[str]:
    """Notes on a log as a whole; ``own`` : NCCL's own lines are in it."""
    if not sieve.rows and not sieve.skipped:
        yield f"{path}: the table is empty: the run ended before its first row"
    if own:
        yield f"{path}: {OWN_LINES}"


def _ask(where: str, sieve: SampleSieve, notes: list[str]) -> None:
    """Notes of rows without the lines that nccl-tests prints above them. Raises :class:`TraceError` where nothing tells
    their collective."""
    if not sieve.rows and UNNAMED in sieve.skipped:
        raise TraceError(
            f"{where}: rows of nccl-tests without the lines above them, and their bus bandwidth tells no collective; "
            "write above them the command that printed them, such as all_reduce_perf, and its lines # Rank, which "
            "say how many ranks it had"
        )
    notes.append(f"{where}: no header above the rows: thirteen columns, in the order that nccl-tests prints them")
    if any(not row.ranks for row in sieve.rows):
        notes.append(f"{where}: nothing says how many ranks these rows are of; keep the lines # Rank above them")


def _whole_row(begun: list[str], line: str, words: list[str], columns: list[str]) -> tuple[list[str], list[str]]:
    """(what of a row was printed so far, its words): nccl-tests prints a row in two goes, and with NCCL_DEBUG=INFO the
    library's lines come between."""
    named = [_NAMES.get(name, name) for name in columns]
    before = named.index("time") if "time" in named else 0
    own = _OWN.search(line)
    if own is None:
        rest = begun and len(words) == len(named) - before and all(map(_CELL.fullmatch, words))
        if rest:
            return [], [*begun, *words]
        return (words, words) if before and len(words) == before and words[2].isidentifier() else ([], words)
    head = line[: own.start()].split()
    root = re.match(r"-?\d", own[1])
    if len(head) == before - 1 and root is not None:  # printed without a space between
        head.append(root[0])
    return (head, words) if before and len(head) == before else ([], words)


def _table(rows: list[_Row], run: NcclTestsRun, sieve: SampleSieve, path: str, notes: list[str]) -> None:
    """Put the rows of one table into the sieve, and forget them. What the log does not say of the collective and the
    ranks follows from the table as a whole."""
    if run.milliseconds and _in_milliseconds([row.cells for row in rows]):
        for cells in (row.cells for row in rows if "time" in row.cells):
            cells["time"] = [f"{number_of(word) * 1e3:g}" for word in cells["time"]]
    unnamed = [row.cells for row in rows if row.kind is None and dtype_of(row.cells["type"][0]) is not None]
    ranks, nodes = run.members()
    guess = guessed(unnamed, ranks) if unnamed else None
    if guess is not None:
        how = f"{guess.kind} of {guess.ranks} ranks, by its bus bandwidth"
        notes.append(f"{path}: the log does not name its collective: {how}")
    elif not ranks and rows:
        counted = ranks_of([row.cells for row in rows], rows[0].kind or "")
        if counted:
            notes.append(f"{path}: the log does not list its ranks: {counted}, by the bus bandwidth")
            ranks = counted
    if rows and ranks == 1:
        alone = f"{path}: one rank ran alone, so nothing went from GPU to GPU"
        notes.append(f"{alone}; a launcher that starts several needs nccl-tests built with MPI=1")
    for row in rows:
        kind = row.kind or (guess.kind if guess is not None else None)
        _keep(row, kind, (guess.ranks if guess is not None else ranks, nodes), run, sieve, path)
    rows.clear()


def _in_milliseconds(table: Sequence[Cells]) -> bool:
    """Whether times of a table without units are [ms], as they were: its bandwidths tell, where they are not too small
    to."""
    first = [{name: number_of(words[0]) for name, words in cells.items() if words} for cells in table]
    ratios = [
        row.get("size", math.nan) / (row["time"] * 1e3) / row["algbw"]
        for row in first
        if row.get("time", 0.0) > 0 and row.get("algbw", 0.0) > 0.1
    ]
    ratios = [ratio for ratio in ratios if math.isfinite(ratio)]
    return not ratios or median(ratios) > 30


def _learn(run: NcclTestsRun, line: str, sieve: SampleSieve) -> None:
    if match := _RANK.match(line):
        rank, group, host, device = match.groups()
        run.hosts[rank] = f"{host or ''}\t{device}"
        run.groups[rank] = group or "0"
        return
    library_line = re.search(r"NCCL (?:INFO|WARN)", line) is not None
    told = {} if library_line else environment_of(line)
    if library_line:
        _learn_of_library(run, line)
    if match := PROGRAM.search(line):
        name = match.group(1)
        run.kind = UNPLAYED if name == UNPLAYED else kind_of(name) or run.kind
        run.own = run.own if line.startswith("#") else told  # a command has its own
    else:
        run.env |= told
    if match := _VERSION.search(line):
        run.version = match.group(1) or version_text(int(match.group(2)))
    if "Test NCCL failure" in line or "Test CUDA failure" in line:
        sieve.skip("the run failed: a line says 'Test NCCL failure' or 'Test CUDA failure'")


def _learn_of_library(run: NcclTestsRun, line: str) -> None:
    """What a line of the library's own says of the run: a variable that it found set, and whether it has NVLS."""
    if match := LOGGED_SETTING.search(line):
        run.env[match[1]] = match[2]
    if match := LOGGED_CHANNELS.search(line):
        run.no_nvls = match[3] == "0"


def _keep(
    row: _Row, kind: str | None, members: tuple[int, int], run: NcclTestsRun, sieve: SampleSieve, case: str
) -> None:
    cells = row.cells
    alone = all(cells.get(name, [])[:1] == ["N/A"] and len(cells[name]) > 1 for name in ("time", "algbw", "busbw"))
    place = 1 if alone else 0  # measured in place alone
    busbw = number_of(cells.get("busbw", [""])[place:][0])
    try:
        size = float(cells["size"][0])
        seconds = number_of(cells["time"][place]) * 1e-6
    except (KeyError, ValueError):
        return sieve.skip("a row without size or time")
    dtype = dtype_of(cells["type"][0])
    if kind is None:
        return sieve.skip(UNNAMED)
    if kind == UNPLAYED:
        return sieve.skip(f"a collective that is not known ({UNPLAYED})")
    if "cputime" in cells:
        return sieve.skip(OF_CPU)
    if dtype is None:
        return sieve.skip(f"an element type that is not known ({cells['type'][0]})")
    wrong = [number_of(word) for word in cells.get("#wrong", [])]
    if any(count > 0 for count in wrong):
        return sieve.skip("a row whose results nccl-tests found wrong")
    in_place = [number_of(time) * 1e-6 for time in cells["time"][1:]]
    sample = Sample(
        kind=kind,
        nbytes=size,
        seconds=seconds,
        ranks=members[0],
        dtype=dtype,
        nodes=members[1],
        redop="" if cells.get("redop", [""])[0] == "none" else cells.get("redop", [""])[0],
        seconds_in_place=in_place[0] if in_place else float("nan"),
        launch=run.launch,
        version=run.version,
        env=row.env,
        device=run.device,
        source=row.source,
        case=f"{case} {kind}",
    )
    return sieve.add(sample, busbw * 1e9)


_NAMES = {"bytes": "size", "N": "count", "cputime": "time", "op": "redop", "res": "error"}
"""Columns of older versions, and of -C."""
_NUMBER = re.compile(r"^-?[\d.]+(e[+-]?\d+)?$")


def _by_name(cell_words: list[str], columns: list[str]) -> Cells | None:
    """Column name -> its cells (out of place first). None where words are missing; a time stamp's are extra."""
    named = [_NAMES.get(name, name) for name in columns]
    if "timestamp" in named:
        named.remove("timestamp")
        cell_words = cell_words[: len(named)]
    cell_words = _filled(cell_words, named)
    if len(cell_words) != len(named):
        body = _one_place(named)
        if body is None or len(cell_words) != len(body):
            return None
        named = body  # nccl-tests leaves out-of-place blank where it only measured in place
    cells: Cells = {}
    for name, word in zip(named, cell_words, strict=True):
        cells.setdefault(name, []).append(word)
    return cells | ({"cputime": []} if "cputime" in columns else {})


def _filled(words: list[str], named: list[str]) -> list[str]:
    """With ``none`` and ``-1`` where old versions leave redop and root blank."""
    for name, blank in (("redop", "none"), ("root", "-1")):
        at = named.index(name) if name in named else -1
        short = len(words) < len(named) and at >= 0 and len(words) > at
        if short and _NUMBER.match(words[at]) and ("." in words[at] or name == "redop"):
            words = [*words[:at], blank, *words[at:]]
    return words


def _one_place(named: list[str]) -> list[str] | None:
    """The columns of a row that has one group of times, where the header has two."""
    times = [i for i, name in enumerate(named) if name == "time"]
    return named[: times[1]] if len(times) == 2 else None
