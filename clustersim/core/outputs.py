"""How files are written: whole or not at all, sets of them together, and never over a file of somebody else.

A folder of outputs carries :data:`MANIFEST`, which says what they are of. A folder that holds another run, or a file
without a manifest under a name that would be written, is refused before anything is touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from clustersim.core.errors import ClusterSimError
from clustersim.core.paths import json_text

MANIFEST = "clustersim.json"
"""In every folder of outputs: its kind, its name in words, and a digest of what decides it."""

UNFINISHED: set[Path] = set()
"""Temporary files of this process that are being written: what is left to remove where a process ends at once."""


@contextmanager
def together(folder: Path) -> Iterator[Callable[[str], Path]]:
    """Files of one folder that appear together: the block asks for a temporary path by name and writes there.

    The folder is made if need be. All get their names when the block ends well; else none does, and those that were
    there stay. Raises :class:`ClusterSimError` for a name that is a link, a device or a folder.
    """
    temporaries: dict[Path, Path] = {}

    def path_of(name: str) -> Path:
        """The temporary path for this name. Raises as ``regular`` does."""
        path = folder / name
        regular(path)
        folder.mkdir(parents=True, exist_ok=True)
        _sweep_up(path)
        # The suffix stays last: writers choose gzip or PNG by it.
        temporary = path.with_name(f".{os.getpid()}-{path.name}")
        UNFINISHED.add(temporary)
        temporaries[temporary] = path
        return temporary

    try:
        yield path_of
        for temporary, path in temporaries.items():
            os.replace(temporary, path)
    except ClusterSimError as error:  # of a file that was read back: nobody knows it by its temporary name
        for temporary, path in temporaries.items():
            error.args = tuple(str(part).replace(temporary.name, path.name) for part in error.args)
        raise
    finally:
        for temporary in temporaries:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            UNFINISHED.discard(temporary)


Picture = Callable[[Path], None]
"""Draws to a path."""


def draw_all(pictures: Mapping[str, Picture], path_of: Callable[[str], Path]) -> None:
    """Draw pictures by name."""
    for name, draw in pictures.items():
        draw(path_of(name))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise :class:`ClusterSimError` where the block cannot write ``path``."""
    try:
        yield
    except OSError as error:
        raise ClusterSimError(f"{path}: cannot be written: {error.strerror or error}") from None


@contextmanager
def fresh(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` to write to; renamed to ``path`` when the block ends well, removed otherwise."""
    with together(path.parent) as path_of:
        yield path_of(path.name)


def regular(path: Path) -> None:
    """Raise :class:`ClusterSimError` where ``path`` is there and is not a plain file: what a link points to, a device
    and a pipe are not replaced."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe"}
        raise ClusterSimError(f"{path}: is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file to write to")


def check_file(path: Path, endings: Collection[str] = ()) -> None:
    """Raise :class:`ClusterSimError` where no file can be written to ``path``, before any work is done for it: what is
    there is no plain file, its name has none of the ``endings``, or its folder neither is there nor can be made."""
    if endings and path.suffix not in endings:
        *others, last = endings
        these = f"{', '.join(others)} or {last}" if others else last
        raise ClusterSimError(f"{path}: is to end with {these}, not {path.suffix or 'nothing'!r}")
    regular(path)
    _check_room(path, path.parent)


def check_folder(path: Path) -> None:
    """The same of a folder, which need not be there."""
    _check_room(path, path)


def _check_room(path: Path, folder: Path) -> None:
    """Raise :class:`ClusterSimError` where ``path`` cannot be made, in ``folder`` or as it."""
    existing = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not existing.is_dir():
        raise ClusterSimError(f"{path}: cannot be written: {existing} is no folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ClusterSimError(f"{path}: cannot be written: {existing} may not be written to")


def ours(path: Path, mark: bytes) -> None:
    """Raise :class:`ClusterSimError` where a file is there that does not have ``mark`` near its beginning."""
    regular(path)
    with writing(path):
        own_file = not path.exists() or mark in path.read_bytes()[:4096]
    if not own_file:
        raise ClusterSimError(f"{path}: is there, and clustersim did not write it; use another name, or remove it")


def _sweep_up(path: Path) -> None:
    """Remove temporary files for this path that processes which are no more have left."""
    for left in path.parent.glob(f".*-{_literal(path.name)}"):
        match = re.fullmatch(rf"\.(\d+)-{re.escape(path.name)}", left.name)
        if match and left not in UNFINISHED and not _alive(int(match.group(1))):
            with contextlib.suppress(OSError):
                left.unlink()


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # it is somebody else's
    return True


@contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """``path`` as a folder, made if need be. Raises :class:`ClusterSimError` where it cannot be written."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        yield path


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder's outputs are of: ``kind``, ``name`` in words, and ``digest`` of what decides them."""

    kind: str
    name: str
    digest: str


class Folder(msgspec.Struct, frozen=True):
    """A folder that one run writes.

    Parameters
    ----------
    path : of the folder. kind, name : of the run, in words. names : of its files.
    of : whatever decides the run; two runs of equal ``of`` are the same.
    """

    path: Path
    kind: str
    name: str
    names: Collection[str]
    of: Any

    @property
    def manifest(self) -> Manifest:
        """What :data:`MANIFEST` says."""
        text = msgspec.json.encode(self.of, order="sorted", enc_hook=str)
        return Manifest(kind=self.kind, name=self.name, digest=hashlib.sha256(text).hexdigest())

    def check(self, *, replace: bool = False) -> None:
        """Raise :class:`ClusterSimError` where the folder holds what this run may not write over.

        ``replace`` : another run of the same kind may be there.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ClusterSimError(f"{self.path}: is a file; --out names a folder")
        manifest = _read(self.path / MANIFEST)
        own_manifest = self.manifest
        if manifest is None:
            existing = next((name for name in self.names if os.path.lexists(self.path / name)), None)
            if existing is not None:
                raise ClusterSimError(
                    f"{self.path / existing}: is there, and no {self.kind} of clustersim wrote it; use another folder"
                )
        elif manifest.kind != own_manifest.kind or (manifest.digest != own_manifest.digest and not replace):
            article = "another" if manifest.kind == own_manifest.kind else "a"
            raise ClusterSimError(
                f"{self.path}: holds {article} {manifest.kind}, {manifest.name!r}; outputs of two are not mixed: use "
                f"another folder, or remove this one"
            )
        for name in (MANIFEST, *self.names):
            regular(self.path / name)

    def claim(self, *, replace: bool = False) -> None:
        """Check, and leave the manifest: for outputs that come bit by bit. Raises :class:`ClusterSimError`."""
        self.check(replace=replace)
        with output_folder(self.path), fresh(self.path / MANIFEST) as file:
            file.write_bytes(self._said())

    @contextmanager
    def files(self) -> Iterator[Callable[[str], Path]]:
        """All files of the run, with the manifest, as :func:`together` writes them. Raises :class:`ClusterSimError`."""
        self.check()
        with output_folder(self.path), together(self.path) as path_of:
            yield path_of
            path_of(MANIFEST).write_bytes(self._said())

    def write(self, name: str, said: Any, pictures: Mapping[str, Picture] | None = None) -> None:
        """Plain values as the JSON file ``name``, and pictures beside it, all or none. Raises :class:`ClusterSimError`
        where they cannot be written, or the folder holds something else."""
        with self.files() as path_of:
            path_of(name).write_bytes(json_text(said))
            draw_all(pictures or {}, path_of)

    def _said(self) -> bytes:
        return json_text(msgspec.structs.asdict(self.manifest))


def _read(path: Path) -> Manifest | None:
    """The manifest of a folder; None where it has none. Raises :class:`ClusterSimError` for one that is damaged."""
    regular(path)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        raise ClusterSimError(
            f"{path}: does not say what the folder holds; use another folder, or remove this one"
        ) from None
