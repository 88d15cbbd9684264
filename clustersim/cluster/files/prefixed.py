"""A tool's text from under what a launcher or a collector of logs puts before each line: ranks, hosts, times of day."""

from __future__ import annotations

import re
from pathlib import Path

from clustersim.cluster.files import matrix_tables
from clustersim.core import texts
from clustersim.core.errors import TopologyError

_MARK = re.compile(
    r"[ \t]*GPU0[ \t]+GPU1\b|<system\b|<topology\b|CA '[\w.-]+'|Infiniband device '|hca_id:[ \t]|GPU 0: "
    r"|=+ ROCm System Management Interface|=+ Link Type between two GPUs|LINK TYPE TABLE:"
)
"""How a line begins that a tool is known by."""
_LONGEST = 160
"""Characters of a prefix."""
_LEAST = 3
"""Lines that a prefix stands before."""
_TIME = re.compile(r"(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?")


def plain_text(path: Path) -> str:
    """The text of a file, without prefixes, and with a page's tables as they were printed.

    Raises :class:`TopologyError` where it cannot be read.
    """
    return without_prefixes(matrix_tables.as_printed(texts.text_of(path, TopologyError)))


def without_prefixes(text: str) -> str:
    """The lines of each prefix one after another, as each host printed them; a text without prefixes as it is."""
    lines = text.splitlines()
    patterns = {_pattern(line) for line in lines} - {None}
    groups: list[list[str]] = []
    rest = lines
    for pattern in sorted(filter(None, patterns)):
        prefix = re.compile(pattern)
        here = [line for line in rest if prefix.match(line)]
        if len(here) >= _LEAST:
            groups.append([prefix.sub("", line, count=1) for line in here])
            rest = [line for line in rest if not prefix.match(line)]
    filled = sum(1 for line in rest if line.strip())
    if not groups or filled > sum(map(len, groups)):
        return text
    return "\n".join(line for group in [rest, *groups] for line in group) + "\n"


def _pattern(line: str) -> str | None:
    """A regular expression of what stands before a tool's mark; times of day in it may differ. None without one."""
    plain = texts.unstyled(line)
    mark = _MARK.search(plain)
    before = plain[: mark.start()] if mark else ""
    if not before.strip() or len(before) > _LONGEST or (before.rstrip()[-1].isalnum() and not _TIME.search(before)):
        return None
    literals = [re.escape(part) for part in _TIME.split(before.rstrip())]
    return "^" + _TIME.pattern.join(literals) + "[ ]?"
