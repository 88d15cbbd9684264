"""The rows of a sweep on disk: one JSON object a line, only ever appended to.

Every append is one write, flushed to the disk before it counts, so whatever kills the process leaves whole lines and
at most one torn line at the end, which the next writer cuts off, once it has seen that the file is of a sweep. One
process writes at a time.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from clustersim.core.errors import ClusterSimError
from clustersim.core.outputs import MANIFEST, Folder, output_folder, regular, writing
from clustersim.studies.sweep.row import SweepRow, row_of

RESULTS = "results.jsonl"

_ROW = re.compile(rb'\{"key":"([0-9a-f]{64})",.*\}\n\Z')
_TORN = re.compile(rb'\{"key":"[0-9a-f]{0,64}\Z|\{"key":"[0-9a-f]{64}"')
_BEGINNING = b'{"key":"'


@dataclass(frozen=True)
class Store:
    """The rows in a folder. path : the folder."""

    path: Path

    @property
    def file(self) -> Path:
        """Where the rows are."""
        return self.path / RESULTS

    def lines(self) -> Iterator[tuple[str, bytes]]:
        """(key, line) of every row, in the order they finished; a torn last line is left out.

        Raises :class:`ClusterSimError` for a line that is no row.
        """
        regular(self.file)
        if not self.file.is_file():
            return
        with self.file.open("rb") as file:
            for number, text in enumerate(file, 1):
                match = _ROW.match(text)
                # Behind rows of ours, what begins like one is ours, however many times it was cut short.
                ours = _TORN.match(text) or _BEGINNING.startswith(text) or (number > 1 and text.startswith(_BEGINNING))
                if not match and not text.endswith(b"\n") and ours:
                    return
                if not match:
                    raise ClusterSimError(
                        f"{self.file}: line {number} is no row of a sweep: {text[:40]!r}; "
                        "take it out, or use another folder"
                    )
                yield match.group(1).decode(), text

    def keys(self) -> set[str]:
        """Keys of the rows that are there. The rows themselves are not kept."""
        return {key for key, _ in self.lines()}

    def places(self) -> dict[str, int]:
        """Key -> where in the file its row begins [bytes]. Of two rows with one key the later counts."""
        places = {}
        place = 0
        for key, text in self.lines():
            places[key] = place
            place += len(text)
        return places

    def rows(self) -> Iterator[SweepRow]:
        """Every row. Raises :class:`ClusterSimError` for one that is damaged."""
        return (row_of(text, f"{self.file}: row {number}") for number, (_, text) in enumerate(self.lines(), 1))

    @contextmanager
    def writing(self, folder: Folder | None = None, *, resume: bool = True) -> Iterator[RowWriter]:
        """A writer, alone in the folder; without ``resume`` the rows that are there are dropped.

        ``folder`` : whose it must be. A folder in which nothing came to be written is left as it was.

        Raises :class:`ClusterSimError` where the folder is of something else, its rows are none, it cannot be written,
        or another process writes.
        """
        if folder is not None:
            folder.check(replace=not resume)
        for _ in self.lines():  # every line is a row before a byte of the file is touched
            pass
        names = (RESULTS, MANIFEST, *(folder.names if folder else ()))
        new_files = [self.path / name for name in names if not (self.path / name).exists()]
        new_files += [] if self.path.exists() else [self.path]
        with output_folder(self.path):
            file = self.file.open("r+b" if self.file.exists() else "x+b", buffering=0)
        with file:
            _lock(file, self.path)
            file.truncate(_whole(file) if resume else 0)
            file.seek(0, os.SEEK_END)
            try:
                if folder is not None:
                    folder.claim(replace=not resume)
                yield RowWriter(file, self.file)
            except BaseException:
                if self.file in new_files and not os.fstat(file.fileno()).st_size:
                    with contextlib.suppress(OSError):  # files, and last their folder, that were made for nothing
                        for path in new_files:
                            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
                raise


@dataclass(frozen=True)
class RowWriter:
    """Appends rows."""

    file: IO[bytes]
    path: Path

    def append(self, lines: Sequence[bytes]) -> None:
        """Write lines, each ending in a newline, and wait until the disk has them."""
        text = memoryview(b"".join(lines))
        with writing(self.path):
            while text:
                text = text[self.file.write(text) :]
            os.fsync(self.file.fileno())


def _whole(file: IO[bytes]) -> int:
    """Bytes up to the end of the last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - 65536)
        file.seek(begin)
        last = file.read(end - begin).rfind(b"\n")
        if last >= 0:
            return begin + last + 1
        end = begin
    return 0


def _lock(file: IO[bytes], folder: Path) -> None:
    """Hold the file as long as it is open; the system lets go however the process ends."""
    try:
        import fcntl
    except ImportError:  # Windows: two sweeps in one folder are the user's to avoid
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ClusterSimError(f"{folder}: another sweep is writing here; wait for it, or use another --out") from None
