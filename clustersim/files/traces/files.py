"""Opening what others wrote: plain or gzipped by content, never by name, within a limit, with one clear error."""

from __future__ import annotations

import bz2
import codecs
import lzma
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO

from clustersim.core.errors import TraceError, few
from clustersim.core.outputs import MANIFEST
from clustersim.core.paths import RUN_FILE
from clustersim.core.texts import is_folder, plain_file, short, there
from clustersim.core.units import format_bytes

HEAD = 64 * 1024
"""How much of a file a sniffer sees [bytes], decompressed."""

LARGEST = 3 * 2**30
"""Largest trace read [bytes], decompressed: a few steps of a large run; more does not fit a laptop's memory."""

RESULT = "result.json"
"""What `clustersim run --out` writes of a run's figures, beside all of it."""

PICTURES = frozenset({".html", ".png", ".svg", ".pdf", ".gif"})
"""What is in a folder of traces, but is none: what reports and pictures of them were written to."""

MOST_UNPACKING = 2**28
"""Memory that a stream of xz may ask for [bytes]: ``xz -9`` asks for a quarter of this."""
_GZIP = b"\x1f\x8b"
_BZIP2 = b"BZh"
_XZ = b"\xfd7zXZ\x00"
_ZIP = b"PK\x03\x04"
_UNPACKED = (_GZIP, _BZIP2, _XZ)
_PACKED = {b"\x28\xb5\x2f\xfd": "zstd", b"7z\xbc\xaf\x27\x1c": "7-Zip"}
_WIDE = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
"""How PowerShell's ``>`` and ``Tee-Object`` write text, by its first bytes."""
_UNMARKED = (
    (re.compile(rb"(?:[\t\n\r -~]\0){8,}\Z"), "utf-16-le"),
    (re.compile(rb"(?:\0[\t\n\r -~]){8,}\Z"), "utf-16-be"),
)
"""Such a text without its mark, as a pipe or an editor leaves it: letters and zeros in turn."""


def files_of(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files named, and what is directly inside the folders named but pictures and pages.

    Raises :class:`TraceError` for a missing one, and for one that is named twice: it says no more than once, and
    another was meant.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    all_files: list[Path] = []
    for path in map(Path, given):
        if is_folder(path):
            files = (p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
            inside = _inputs(sorted(p for p in files if p.suffix not in PICTURES))
            if not inside:
                raise TraceError(f"{path}: {_nothing_in(path)}; name the trace files, or a folder that holds them")
            all_files += inside
        elif there(path):
            plain_file(path, TraceError)
            all_files.append(path)
        else:
            raise TraceError(f"{short(str(path))}: no such file")
    if not all_files:
        raise TraceError("no trace file was named")
    twice = [path for path, times in Counter(path.absolute() for path in all_files).items() if times > 1]
    if twice:
        first = next(path for path in all_files if path.absolute() == twice[0])
        raise TraceError(f"{first}: named twice, by itself or in a folder; name each file once")
    return all_files


def _nothing_in(folder: Path) -> str:
    """What a folder holds in which no trace file is: nothing, or only folders, which are not looked into."""
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    return f"no trace file, only the folder(s) {few(folders, 3)}" if folders else "an empty folder"


def _inputs(inside: list[Path]) -> list[Path]:
    """Without what a command of this program left beside the traces: its manifest, and runs that it saved."""
    trace_files = [path for path in inside if path.name != MANIFEST]
    if len(trace_files) == len(inside):
        return inside
    if {RUN_FILE, RESULT} <= {path.name for path in trace_files}:
        return [path for path in trace_files if path.name == RUN_FILE]  # the other files are told from it
    traces = [path for path in trace_files if path.suffix != ".npz"]
    return traces or trace_files


def head(path: Path, size: int = HEAD) -> bytes:
    """The first ``size`` bytes, decompressed, or those that are there of a file that is cut off. Raises
    :class:`TraceError` for a file that is empty or damaged there."""
    head_bytes = bytearray()
    try:
        for piece in _pieces(path):
            head_bytes += piece
            if len(head_bytes) >= size:
                break
    except CutOffError:
        if not head_bytes:
            raise
    if not head_bytes:
        raise TraceError(f"{path}: the file is empty")
    return bytes(head_bytes[:size])


class CutOffError(TraceError):
    """A compressed file that ends before its end."""


def whole(path: Path) -> bytes | bytearray:
    """All of the file, decompressed, without the mark that Windows' editors put before text. Raises
    :class:`TraceError` where it is cut off or larger than :data:`LARGEST`."""
    out = bytearray()
    for piece in _limited(path):
        out += piece
    if out.startswith(codecs.BOM_UTF8):
        del out[: len(codecs.BOM_UTF8)]
    return out


def as_far(path: Path) -> tuple[bytes | bytearray, bool]:
    """All of the file that is there, decompressed, and whether it is cut off. Raises :class:`TraceError` as
    :func:`whole` does for anything else."""
    out = bytearray()
    try:
        for piece in _limited(path):
            out += piece
    except CutOffError:
        if not out:
            raise
        return out, True
    return out, False


def _limited(path: Path) -> Iterator[bytes]:
    """Pieces of a file that is no larger than :data:`LARGEST`."""
    if path.stat().st_size > LARGEST:
        raise TraceError(_too_large(path, path.stat().st_size))
    size = 0
    for piece in _pieces(path):
        size += len(piece)
        if size > LARGEST:
            raise TraceError(_too_large(path, None))
        yield piece


def text(path: Path) -> str:
    """All of the file as text; bytes that are not UTF-8 (a terminal's) are replaced. Raises :class:`TraceError`."""
    return whole(path).decode("utf-8-sig", errors="replace")


def log(path: Path) -> str:
    """All of a log that is there, as text: one that is cut off has whole lines before. Raises :class:`TraceError`."""
    return as_far(path)[0].decode("utf-8-sig", errors="replace")


def is_cut(path: Path) -> bool:
    """Whether a compressed file ends before its end."""
    with open(path, "rb") as file:
        packed = file.read(6).startswith(_UNPACKED)
    return packed and as_far(path)[1]


def _too_large(path: Path, size: int | None) -> str:
    size_text = format_bytes(size) if size else "more, decompressed,"
    return (
        f"{path}: {size_text} is above the {format_bytes(LARGEST)} that are read at once; record fewer steps "
        "(torch.profiler.schedule(active=2)) or without stacks and memory"
    )


_TAR = slice(257, 262)
"""Where an archive of tar says ``ustar``; the files in it stand one behind the other, and would be read as one."""


def _pieces(path: Path, step: int = 4 * 2**20) -> Iterator[bytes]:
    """Decompressed pieces of a file. Raises :class:`TraceError` for an archive, and where it cannot be read."""
    first = True
    for piece in _decompressed(path, step):
        if first and piece[_TAR] == b"ustar":
            raise TraceError(f"{path}: a tar archive, which is not read; unpack it and name its traces")
        first = False
        yield piece


def _decompressed(path: Path, step: int) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            mark = file.read(64)
            packer = next((name for magic, name in _PACKED.items() if mark.startswith(magic)), None)
            if packer is not None:
                raise TraceError(f"{path}: packed by {packer}, which is not read; unpack it, or pack it with gzip")
            file.seek(0)
            wide = _WIDE.get(mark[:2]) or next((name for shape, name in _UNMARKED if shape.match(mark)), None)
            if mark.startswith(_GZIP):
                yield from _gunzip(path, file, step)
            elif mark.startswith(_ZIP) and (members := _members_of(path, file)):
                yield from _unzip(path, members, step)
            elif mark.startswith((_BZIP2, _XZ)):
                yield from _unpack(path, file, step)
            elif wide is not None:
                file.seek(2 if mark[:2] in _WIDE else 0)
                yield from _narrowed(file, wide, step)
            else:
                while piece := file.read(step):
                    yield piece
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None


_ARRAY = ".npy"
"""How numpy names what is in an archive of its own, as runs are saved."""


def _members_of(path: Path, file: BinaryIO) -> list[str]:
    """The files in a zip that people packed; none of one that a program writes in this form, and reads itself.

    Raises :class:`TraceError` where it is cut off or damaged.
    """
    try:
        names = [name for name in zipfile.ZipFile(file).namelist() if not name.endswith("/")]
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        names = []
    file.seek(0)
    is_of_people = all("." in Path(name).name and not name.endswith((_ARRAY, ".pkl")) for name in names)
    return [name for name in names if not name.startswith("__MACOSX/")] if is_of_people else []


def _unzip(path: Path, members: Sequence[str], step: int) -> Iterator[bytes]:
    """Decompressed pieces of the one file in a zip. Raises :class:`TraceError` for several."""
    if len(members) > 1:
        raise TraceError(f"{path}: a zip of {len(members)} files ({few(members, 3)}); unpack it and name its traces")
    try:
        with zipfile.ZipFile(path) as archive:
            with archive.open(members[0]) as member:
                is_packed = member.read(len(_GZIP)) == _GZIP
            with archive.open(members[0]) as member:
                yield from _gunzip(path, member, step) if is_packed else iter(lambda: member.read(step), b"")
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise TraceError(f"{path}: {members[0]} cannot be unpacked: {error}") from None


def _unpack(path: Path, file: BinaryIO, step: int) -> Iterator[bytes]:
    """Decompressed pieces of a file of bzip2 or xz, which may hold several streams."""
    is_xz = file.read(len(_XZ)) == _XZ
    packer = "xz" if is_xz else "bzip2"
    file.seek(0)
    unpacker: bz2.BZ2Decompressor | lzma.LZMADecompressor | None = None
    left = b""
    try:
        while data := left or file.read(step):
            if unpacker is None or unpacker.eof:
                if unpacker is not None and data.strip(b"\0") == b"":
                    return  # what fills a stream of xz to four bytes
                unpacker = lzma.LZMADecompressor(memlimit=MOST_UNPACKING) if is_xz else bz2.BZ2Decompressor()
            yield unpacker.decompress(data, step)
            while not unpacker.eof and not unpacker.needs_input:
                yield unpacker.decompress(b"", step)
            left = unpacker.unused_data if unpacker.eof else b""
    except (OSError, lzma.LZMAError) as error:
        raise TraceError(f"{path}: the {packer} file is damaged: {error}") from None
    if unpacker is not None and not unpacker.eof:
        raise CutOffError(f"{path}: the {packer} file is cut off; copy it again")


def _narrowed(file: BinaryIO, wide: str, step: int) -> Iterator[bytes]:
    """A text in UTF-16 as UTF-8; what is none is replaced."""
    decoder = codecs.getincrementaldecoder(wide)(errors="replace")
    while piece := file.read(step):
        yield decoder.decode(piece).encode("utf-8", errors="replace")
    yield decoder.decode(b"", final=True).encode("utf-8", errors="replace")


def _gunzip(path: Path, file: IO[bytes], step: int) -> Iterator[bytes]:
    """Decompressed pieces of at most ``step`` bytes; a file may hold several gzip members."""
    inflate = zlib.decompressobj(wbits=31)
    left = b""
    try:
        while True:
            data = left or file.read(step)
            if not data and (inflate.eof or not (piece := inflate.decompress(b"", step))):
                break  # the end of the file, and nothing held back inside the decompressor
            if not data:
                yield piece
                continue
            if inflate.eof:
                if data.strip(b"\0") == b"":
                    return
                inflate = zlib.decompressobj(wbits=31)
            piece = inflate.decompress(data, step)
            left = inflate.unconsumed_tail or inflate.unused_data
            if piece:
                yield piece
        if not inflate.eof:
            raise CutOffError(f"{path}: the gzip file is cut off; copy it again, or let the profiler finish writing")
    except zlib.error as error:
        raise TraceError(f"{path}: the gzip file is damaged: {error}") from None
