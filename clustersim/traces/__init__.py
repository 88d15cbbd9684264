"""Files <-> Timeline. A format is a row: the ends of names it answers to, and how it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustersim.errors import TraceError
from clustersim.timeline import Timeline
from clustersim.traces import perfetto, pftrace


@dataclass(frozen=True)
class Format:
    """A trace format: ``write(timeline, path, ranks) -> ranks written``."""

    name: str
    suffixes: tuple[str, ...]
    write: Callable[[Timeline, str | Path, Sequence[int] | None], tuple[int, ...]]


FORMATS: dict[str, Format] = {
    "chrome": Format("chrome", (".json", ".json.gz"), perfetto.write_chrome_trace),
    "pftrace": Format("pftrace", (".pftrace", ".perfetto-trace"), pftrace.write_pftrace),
}
"""Every format by name."""


def write(timeline: Timeline, path: str | Path, ranks: Sequence[int] | None = None) -> tuple[int, ...]:
    """Write a trace in the format its name ends with; returns the ranks written. Raises :class:`TraceError`."""
    for row in FORMATS.values():
        if str(path).endswith(row.suffixes):
            return row.write(timeline, path, ranks)
    known = ", ".join(suffix for row in FORMATS.values() for suffix in row.suffixes)
    raise TraceError(f"{path}: no trace format has this ending; known: {known}")
