"""What a capture writes: lines that survive whatever comes after them, and a clock that keeps the budget."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TextIO, TypeAlias

from clustersim.core.errors import TraceError
from clustersim.core.outputs import fresh

VERSION = 1
"""Of the lines' layout; every file begins with a line that says it."""

PARTS = ("collectives", "compute", "steps")
"""What can be measured, each a file."""

CaptureRow: TypeAlias = dict[str, "CaptureValue"]
CaptureValue: TypeAlias = "str | float | list[str] | list[int] | dict[str, str] | None"
"""What a line says, by name: a number, a text, a shape, settings."""
PARTIAL = ".partial"
"""Ending of a part that is not finished."""


def free(folder: Path) -> None:
    """Raise :class:`TraceError` where a folder holds a capture, or files with the names of one: what was measured is
    never written over, and two captures are not mixed."""
    names = ("provenance.json", *(f"{part}.jsonl{end}" for part in PARTS for end in ("", PARTIAL)))
    existing = next((name for name in names if os.path.lexists(folder / name)), None)
    if existing is not None:
        raise TraceError(
            f"{folder / existing}: is there, and what was measured is not written over; use another folder"
        )
    if os.path.lexists(folder) and not folder.is_dir():
        raise TraceError(f"{folder}: is a file; --out names a folder")


class CaptureFile:
    """A file of JSON lines. Every line is on disk before the next is measured; :meth:`done` gives the file its name.

    Only rank 0 holds one; ``CaptureFile(None, ...)`` takes everything and keeps nothing.
    """

    def __init__(self, folder: Path | None, name: str, fields: CaptureRow) -> None:
        self.path = folder / f"{name}.jsonl" if folder is not None else None
        self.file: TextIO | None = None
        self.rows = 0
        if self.path is not None:
            try:
                self.file = open(f"{self.path}{PARTIAL}", "w", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                raise _cannot(self.path, error) from None
            self.write({"clustersim_capture": VERSION, "part": name, **fields})

    def write(self, row: CaptureRow) -> None:
        """Append a line. Raises :class:`TraceError` where the disk is full; what was written stays."""
        if self.file is None or self.path is None:
            return
        try:
            self.file.write(json.dumps(row, allow_nan=False, default=str) + "\n")
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise _cannot(self.path, error) from None
        self.rows += 1

    def done(self) -> None:
        """Close the file and give it its name."""
        if self.file is not None and self.path is not None:
            try:
                self.file.close()
                os.replace(f"{self.path}{PARTIAL}", self.path)
            except OSError as error:
                raise _cannot(self.path, error) from None


def _cannot(path: Path, error: OSError) -> TraceError:
    return TraceError(
        f"{path}: cannot be written: {error.strerror}; the lines before it stay readable ({path}{PARTIAL})"
    )


def write_whole(path: Path, data: bytes) -> None:
    """A file that appears whole or not at all. Raises :class:`TraceError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise _cannot(path, error) from None


class Budget:
    """Wall-clock time a part may take, handed out in equal shares to what is still to do."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.end - time.monotonic())

    def share(self, items: int) -> float:
        """Seconds for the next of ``items`` that are left."""
        return self.left / max(items, 1)
