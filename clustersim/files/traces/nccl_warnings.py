"""What NCCL warns of (``NCCL WARN``) where no line of its transports tells more: what failed, and what to look at."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache

import msgspec

from clustersim.core.texts import data_table, short
from clustersim.files.traces.told import Cause

SHOWN = 3
"""Warnings that nobody explains, named in a conclusion each."""
_LINE = re.compile(r"NCCL WARN (.+)$")


class KnownWarning(msgspec.Struct, frozen=True):
    """A row of ``data/nccl_warnings.toml``, which says what each field is."""

    pattern: str
    failed: str
    see: str


@cache
def _known() -> list[KnownWarning]:
    return msgspec.convert(data_table("nccl_warnings")["warning"], list[KnownWarning])


def warning(line: str) -> str:
    """What a line warns of; empty for another line."""
    match = _LINE.search(line)
    return short(match[1].strip()) if match else ""


def warned(warnings: Iterable[str]) -> Iterator[Cause]:
    """A cause of each kind of warning, and of the first of those that are of none."""
    explained: set[str] = set()
    unknown = 0
    for text in warnings:
        known = next((row for row in _known() if re.search(row.pattern, text)), None)
        if known is None and unknown < SHOWN:
            unknown += 1
            yield Cause("warned", f"NCCL warned: {text}", "the line is NCCL's own; what comes before it says more")
        elif known is not None and known.failed not in explained:
            explained.add(known.failed)
            yield Cause("warned", f"{known.failed}: {text}", known.see)
