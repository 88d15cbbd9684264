"""What launchers, containers and loggers put before a program's lines, taken off.

mpirun (tags, timestamps, both), srun -l, torchrun, hydra, pdsh, Ray, DeepSpeed, pods and their containers, kubectl
--timestamps and --prefix, stern, containerd's CRI lines (parts of a long line are joined), docker compose, Docker's
json-file, syslog and ts. Prefixes stand in any number and order; a line whose rest is none that is wanted stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import msgspec

from clustersim.core.texts import unstyled
from clustersim.files.traces import files, quoted

_CRI = re.compile(r"^(\S+ (?:stdout|stderr) )([FP]) (.*)$")
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d+)?"
_PIECES = (
    rf"\[?\d{{4}}[-/]\d\d[-/]\d\d[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d| UTC)?\]?[:,]?[ \t]?",
    rf"(?:{_DAY},?\s+)?{_MONTH}\s+\d{{1,2}} {_CLOCK}(?: [A-Z]{{3,5}})?(?: \d{{4}})?[ \t]?",
    rf"\[?{_CLOCK}\]?[ \t]",
    rf"[IWEF]\d{{4}} {_CLOCK}\s+\d+ [\w.-]+:\d+\][ \t]",
    r"(?:stdout|stderr) [FP][ \t]",
    r"(?:[->]|\|{1,2})[ \t]",
    r"\+(?=[ \t#])",
    r"<(?:trace|debug|info|warning|error|critical)>[ \t]{1,8}",
    r"[\w.]{1,120}:[\w.<>]{1,120}:\d{1,6} - ",
    r"\d{10}(?:\d{3}|\.\d{1,9})?[ \t]",
    r"(?:\[[^\]\s]{0,120}\])?<std(?:out|err|diag)>:?[ \t]?",
    r"\[[^\[\]]{1,120}\]:?[ \t]?",
    r"\([^()]{1,120}\)[ \t]?",
    r"[ \t]{2,8}(?=\S)",
    r"[ \t]{0,8}\d{1,7}[:>][ \t]?",
    r"[\w.@/-]{1,120}:[ \t]?",
    r"[\w.@/-]{1,120}[ \t]{0,40}\|[ \t]?",
    r"[A-Za-z][\w.-]{0,120}(?:\[\d+\]:)?[ \t]",
)
"""Each is one prefix: dates of three kinds, glog's and CRI's marks, dashes, strokes and a quotation's, a patch's, a
level of Determined's, loguru's place, seconds since 1970, mpirun's tag, brackets, Ray's parentheses, blanks between
two, a rank, a name."""


@lru_cache(maxsize=8)
def _before(wanted: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:{'|'.join(_PIECES)}){{0,10}}?(?={wanted})")


def lines(path: Path, wanted: str) -> Iterator[str]:
    """The lines of a file, without prefixes where what follows begins as ``wanted`` (a regular expression) says.

    Raises :class:`TraceError` where the file cannot be read.
    """
    yield from lines_of(files.log(path), wanted)


def lines_of(text: str, wanted: str) -> Iterator[str]:
    """The same, of a text."""
    before = _before(wanted)
    for line in _joined(unpacked(text)):
        match = before.match(line)
        yield line[match.end() :] if match else line


def stripped(line: str, wanted: str) -> str:
    """One line without prefixes, where what follows begins as ``wanted`` says; else as it is."""
    plain = unstyled(line)
    match = _before(wanted).match(plain)
    return plain[match.end() :] if match else plain


def unpacked(text: str) -> Iterator[str]:
    """Lines of a text, without a terminal's colours; those that Docker or a collector wraps in JSON, and those inside
    strings of a report, as they were."""
    return quoted.taken_out(_unwrapped(text))


def _unwrapped(text: str) -> Iterator[str]:
    for line in text.splitlines():
        plain = unstyled(line)
        plain = quoted.unescaped(plain)
        yield _logged(plain) if plain.startswith('{"') and _WRAPPED.search(plain) else plain


_HOLDING = ("log", "message", "msg", "textPayload", "line")
_WRAPPED = re.compile(rf'"({"|".join(_HOLDING)})"\s*:\s*"')
"""Fields that hold a line, of Docker, Fluent Bit, Vector, journald's, Google's and Loki's JSON."""


def _logged(line: str) -> str:
    """A line that a collector of logs has wrapped in JSON, as it was; another line as it is."""
    try:
        said = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return line
    about = {"stream", "time", "timestamp", "ts", "@timestamp", "kubernetes", "pod"}
    if not isinstance(said, dict) or not about & said.keys():
        return line
    return next(str(said[key]).rstrip("\n") for key in _HOLDING if key in said)


def _joined(each: Iterator[str]) -> Iterator[str]:
    """Whole lines: containerd cuts long ones into parts, of which the last is marked F."""
    parts: dict[str, list[str]] = {}
    for line in each:
        match = _CRI.match(line)
        if match is None:
            yield line
            continue
        stream = match[1].split(" ")[1]
        parts.setdefault(stream, []).append(match[3])
        if match[2] == "F":
            yield match[1] + "F " + "".join(parts.pop(stream))
    for stream, left in parts.items():
        yield f"{stream} F {''.join(left)}"
