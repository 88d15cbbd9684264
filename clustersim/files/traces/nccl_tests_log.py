"""nccl-tests' own output: the table it prints, of any version, and its ``-J`` report.

Columns are found by the header's names, never by position: ``redop`` and ``root`` came in 2.11, ``error`` became
``#wrong``, ``-I`` puts per-iteration columns between, ``-T`` a time stamp behind (nccl-tests src/util.cu). What
launchers put before lines is taken off (:mod:`clustersim.files.traces.prefixes`). S is the ``size`` column: the full
tensor, also of all_gather and reduce_scatter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import msgspec

from clustersim.core.errors import TraceError
from clustersim.core.texts import Table
from clustersim.files.traces import files, prefixes
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.nccl_tests_guess import BARE, Cells, columns_of, guessed, no_table, ranks_of
from clustersim.files.traces.samples import Sample, Samples, SampleSieve, dtype_of, kind_of

_RANK = re.compile(
    r"#?\s*Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?(?:Pid\s+\d+\s+)?(?:on\s+(\S+)|uses)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)"
)
"""As it is, of NCCL 1's tests, and where a page took the # for a heading."""
_START = re.compile(r"#?\s*nThreads?:?\s+(\d+)\s+nGpus:?\s+(\d+)")
_CONCLUDED = re.compile(r"Collective test concluded:\s*([a-z_]+)_perf")
_NAMED = re.compile(r"\b([a-z_]+)_(?:perf(?:_mpi)?|test)\b")
"""Programs, of NCCL 1 ``_test``."""
_WANTED = (
    r"\s*(?:#|\d+\s+\d+\s+[A-Za-z_]\w*\s+\S|[RN]CCL version|\S+:\d+:\d+ \[|"
    r"\d+\.\d+\s+\d+\.\d+\s+\d+\.\d+\s+(?:\d+|\de[+-]\d+|N/A)\s)"
)
"""How lines of interest begin: a comment, a row, the library's own, the rest of a row that its lines have cut."""
_OWN = re.compile(r"(?<!\S)(\S*):\d{1,12}:\d{1,12} \[\d+\] [RN]?CCL (?:INFO|WARN)")
"""Where a line of the library's own begins, with what a row before it has right in front."""
_CELL = re.compile(r"-?\d[\d.]*(?:e[+-]?\d+)?|N/A|nan|inf")
_VERSION = re.compile(r"[RN]CCL version\s*:?\s*(\d+\.\d+(?:\.\d+)?)|nccl-library=(\d+)")
_ENV = re.compile(
    r"\b(NCCL_(?:ALGO|PROTO|NVLS_ENABLE|MAX_NCHANNELS|MIN_NCHANNELS|P2P_DISABLE|SHM_DISABLE))=([^\s\"']+)"
)
_TABLE = re.compile(r"(?:size|bytes)\s+(?:count|N)\s+type\s.*\btime\s+algbw\s+busbw")
UNNAMED = "a collective the log does not name (write the command, such as all_gather_perf, above)"
UNPLAYED = "hypercube"
"""The one program of nccl-tests whose collective is none that is known: NCCL's sends between neighbours of a cube."""
OF_CPU = "a time of the CPU (-C), not of the collective"
_HEADER = ("size", "count", "type")


def sniff(head: Head) -> Likeness:
    """Whether this is nccl-tests' text."""
    named = "# nThread" in head.text or "algbw" in head.text
    found = likeness(named=named, shaped=bool(_TABLE.search(head.text)))
    return max(found, Likeness.AMONG) if BARE.search(head.text) else found


def sniff_json(head: Head) -> Likeness:
    """Whether this is nccl-tests' ``-J`` report: its settings, and a list of results by size."""
    named = {"nccl_version", "args"} <= head.members.keys() or {"config", "results"} <= head.members.keys()
    return likeness(named=named, shaped=head.holds("config") and head.lists("results", "size", "type"))


def version_text(code: int) -> str:
    """NCCL's version from its number.

    >>> version_text(22809), version_text(2708)
    ('2.28.9', '2.7.8')
    """
    big = 10000 if code >= 10000 else 1000
    return f"{code // big}.{code % big // 100}.{code % 100}"


@dataclass(frozen=True)
class _Row:
    """A row's cells by column, and what the lines above named: the collective, and what was set."""

    cells: Cells
    kind: str | None
    source: str
    env: str


@dataclass
class _NcclTestsRun:
    """What the lines above a table said of it."""

    kind: str | None = None
    threads: int = 1
    gpus: int = 1
    version: str = ""
    env: dict[str, str] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)  # of its command line
    hosts: dict[str, str] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    started: bool = False  # its threads and GPUs were said
    milliseconds: bool = False  # of a table without units, as NCCL 1 and the first nccl-tests print it

    @property
    def launch(self) -> str:
        """How ranks were started; empty where it does not say."""
        if not self.gpus:  # of rows without the lines above them
            return ""
        return "threads" if self.threads > 1 else "single_process" if self.gpus > 1 else "process_per_gpu"

    @property
    def settings(self) -> str:
        """NCCL's variables, NAME=VALUE, each once: those of the command before those that were set above it."""
        return " ".join(f"{name}={value}" for name, value in (self.env | self.own).items())

    def members(self) -> tuple[int, int]:
        """Ranks and nodes of the first group (NCCL_TESTS_SPLIT runs several at once); 0 where the log lists none, or
        not all that there must be."""
        if len(self.hosts) <= max(map(int, self.hosts), default=0):
            return 0, 0
        first = min(self.groups.values(), default="0")
        group_ranks = [rank for rank, group in self.groups.items() if group == first]
        return len(group_ranks), len({self.hosts[rank].split("\t")[0] for rank in group_ranks})

    @property
    def device(self) -> str:
        """The first rank's GPU; empty where it does not say."""
        return next(iter(self.hosts.values()), "\t").split("\t")[1].strip()


def read(path: Path) -> Samples:
    """The tables of a log. Raises :class:`TraceError` where it has none."""
    sieve = SampleSieve()
    run = _NcclTestsRun()
    columns = list[str]()
    tables = 0
    rows: list[_Row] = []
    notes: list[str] = []
    own = bare = 0
    begun: list[str] = []  # of a row that a line of NCCL's own has cut
    for number, raw in enumerate(prefixes.lines(path, _WANTED), start=1):
        line = raw.strip()
        own += " NCCL INFO " in line
        if not line:
            continue
        words = line.lstrip("#").split()
        if not columns and (columns := columns_of(line)):
            tables += 1
            bare = number
            run.gpus = run.gpus if run.started else 0
        if tuple(words[:3]) == _HEADER or tuple(words[:3]) == ("bytes", "N", "type"):
            _table(rows, run, sieve, str(path), notes)
            columns = words
            run.milliseconds = words[0] == "bytes"
            tables = tables + 1
        elif columns and line[0].isdigit():
            begun, words = _whole_row(begun, line, words, columns)
            if begun:
                continue
            cells = _by_name(words, columns)
            if cells is None:
                sieve.skip("a row that is cut off, or has columns its header does not name")
            else:
                rows.append(_Row(cells, run.kind, f"{path}:{number}", run.settings))
        elif match := _START.match(line):  # the lines that name its program and library come before this one
            _table(rows, run, sieve, str(path), notes)
            run = _NcclTestsRun(run.kind, int(match[1]), int(match[2]), run.version, run.env, run.own, started=True)
        elif match := _CONCLUDED.search(line):  # of the table above, where nothing before it named it
            rows = [replace(row, kind=row.kind or kind_of(match[1])) for row in rows]
        else:
            _learn(run, line, sieve)
    _table(rows, run, sieve, str(path), notes)
    if not tables:
        raise TraceError(f"{path}: {no_table(files.log(path))}")
    if bare:
        _ask(f"{path}:{bare}", sieve, notes)
    notes += _ending(path, sieve, own=own > 0)
    return sieve.done(str(path), notes)


def _ending(path: Path, sieve: SampleSieve, *, own: bool) -> Iterator[str]:
    """Notes on a log as a whole; ``own`` : NCCL's own lines are in it."""
    if not sieve.rows and not sieve.skipped:
        yield f"{path}: the table is empty: the run ended before its first row"
    if own:
        yield f"{path}: NCCL's own lines are in it, too; `clustersim trace --format nccl_debug` tells what they say"


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


def _table(rows: list[_Row], run: _NcclTestsRun, sieve: SampleSieve, path: str, notes: list[str]) -> None:
    """Put the rows of one table into the sieve, and forget them. What the log does not say of the collective and the
    ranks follows from the table as a whole."""
    if run.milliseconds and _in_milliseconds([row.cells for row in rows]):
        for cells in (row.cells for row in rows if "time" in row.cells):
            cells["time"] = [f"{_number(word) * 1e3:g}" for word in cells["time"]]
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
    first = [{name: _number(words[0]) for name, words in cells.items() if words} for cells in table]
    ratios = [
        row.get("size", math.nan) / (row["time"] * 1e3) / row["algbw"]
        for row in first
        if row.get("time", 0.0) > 0 and row.get("algbw", 0.0) > 0.1
    ]
    ratios = [ratio for ratio in ratios if math.isfinite(ratio)]
    return not ratios or median(ratios) > 30


def _learn(run: _NcclTestsRun, line: str, sieve: SampleSieve) -> None:
    if match := _RANK.match(line):
        rank, group, host, device = match.groups()
        run.hosts[rank] = f"{host or ''}\t{device}"
        run.groups[rank] = group or "0"
        return
    told = {} if re.search(r"NCCL (?:INFO|WARN)", line) else dict(_ENV.findall(line))
    if match := _NAMED.search(line):
        name = match.group(1)
        run.kind = UNPLAYED if name == UNPLAYED else kind_of(name) or run.kind
        run.own = run.own if line.startswith("#") else told  # a command has its own
    else:
        run.env |= told
    if match := _VERSION.search(line):
        run.version = match.group(1) or version_text(int(match.group(2)))
    if "Test NCCL failure" in line or "Test CUDA failure" in line:
        sieve.skip("the run failed: a line says 'Test NCCL failure' or 'Test CUDA failure'")


def _keep(
    row: _Row, kind: str | None, members: tuple[int, int], run: _NcclTestsRun, sieve: SampleSieve, case: str
) -> None:
    cells = row.cells
    alone = all(cells.get(name, [])[:1] == ["N/A"] and len(cells[name]) > 1 for name in ("time", "algbw", "busbw"))
    place = 1 if alone else 0  # measured in place alone
    busbw = _number(cells.get("busbw", [""])[place:][0])
    try:
        size = float(cells["size"][0])
        seconds = _number(cells["time"][place]) * 1e-6
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
    wrong = [_number(word) for word in cells.get("#wrong", [])]
    if any(count > 0 for count in wrong):
        return sieve.skip("a row whose results nccl-tests found wrong")
    in_place = [_number(time) * 1e-6 for time in cells["time"][1:]]
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


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return float("nan")


# ---- the -J report --------------------------------------------------------------------------------------------------


def read_json(path: Path) -> Samples:
    """A ``-J`` report. Raises :class:`TraceError` for one that is cut off."""
    try:
        report = msgspec.json.decode(files.whole(path))
        run = _reported(report)
        results = report["results"]
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not a whole nccl-tests -J report: {error}") from None
    sieve = SampleSieve()
    for number, cells in enumerate(results if isinstance(results, list) else []):
        if isinstance(cells, dict):
            _row_of_report(cells, run, sieve, f"{path} results[{number}]", str(path))
    return sieve.done(str(path))


def _reported(report: Table) -> _NcclTestsRun:
    """What a report says of its run."""
    config = report["config"]
    run = _NcclTestsRun(threads=int(config.get("nthreads", 1)), gpus=int(config.get("ngpus", 1)))
    run.version = version_text(int(report.get("nccl_version", 0)))
    run.env = dict(_ENV.findall("\n".join(map(str, report.get("env", [])))))
    for device in config.get("devices", []):
        rank = str(int(device.get("rank")))
        run.hosts[rank] = f"{device.get('hostname')}\t{device.get('device_info', '')}"
        run.groups[rank] = str(device.get("group", 0))
    named = [match.group(1) for word in report.get("args", []) if (match := _NAMED.search(str(word)))]
    run.kind = kind_of(named[0]) if named else None
    return run


def _row_of_report(cells: Table, run: _NcclTestsRun, sieve: SampleSieve, source: str, case: str) -> None:
    places = {name: timed for name in ("out_of_place", "in_place") if isinstance(timed := cells.get(name), dict)}

    def seconds(place: str) -> float:
        """Seconds in place or out of place; NaN where it was not measured."""
        return _number(str(places.get(place, {}).get("time", "nan"))) * 1e-6

    cells_of = {name: [str(cells.get(name, ""))] for name in ("size", "count", "type", "redop", "root")}
    timed = places.get("out_of_place") or places.get("in_place") or {}
    cells_of |= {"algbw": [str(timed.get("alg_bw", ""))], "busbw": [str(timed.get("bus_bw", ""))]}
    ranks, nodes = run.members()
    kind = kind_of(str(cells.get("experiment_name", ""))) or run.kind
    guess = guessed([cells_of], ranks) if kind is None else None
    kind = guess.kind if guess is not None else kind
    if _number(str(timed.get("nwrong"))) > 0:
        return sieve.skip("a row whose results nccl-tests found wrong")
    dtype = dtype_of(cells_of["type"][0])
    if "cpu_time" in timed and "time" not in timed:
        return sieve.skip(OF_CPU)
    if kind is None or dtype is None:
        return sieve.skip("a collective or element type the report does not name")
    out = seconds("out_of_place")
    within = seconds("in_place")
    row = Sample(
        kind=kind,
        nbytes=_number(cells_of["size"][0]),
        seconds=out if out == out else within,
        ranks=ranks,
        dtype=dtype,
        redop=cells_of["redop"][0].replace("none", ""),
        nodes=nodes,
        seconds_in_place=within,
        launch=run.launch,
        version=run.version,
        env=run.settings,
        device=run.device,
        source=source,
        case=f"{case} {kind}",
    )
    return sieve.add(row, _number(str(timed.get("bus_bw", "nan"))) * 1e9)
