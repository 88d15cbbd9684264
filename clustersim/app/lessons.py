"""The lessons: notebooks that come with the package, to be copied where they can be opened, changed and run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from clustersim.core.errors import ClusterSimError, needs
from clustersim.core.outputs import fresh, output_folder, together
from clustersim.core.paths import data_path


@dataclass(frozen=True)
class Lesson:
    """One notebook: its ``path``, and its ``title``, the first line of it."""

    path: Path
    title: str

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name


def lessons() -> list[Lesson]:
    """Every lesson that comes with the package, in order."""
    return [Lesson(path, _title(path)) for path in sorted(data_path("notebooks").glob("[0-9]*.ipynb"))]


def _title(path: Path) -> str:
    first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]
    return str("".join(first).splitlines()[0]).lstrip("# ").split(". ", 1)[-1]


def copy(folder: Path, *, force: bool = False) -> list[Lesson]:
    """Copy every lesson into ``folder``, made if need be; returns the copies.

    A copy that is there already and is as it was stays. Raises :class:`ClusterSimError` for a folder that cannot be
    written, and, without ``force``, for a file that somebody has changed; then nothing is copied at all.
    """
    shipped_lessons = lessons()
    texts = {lesson.name: lesson.path.read_bytes() for lesson in shipped_lessons}
    changed = [name for name, text in texts.items() if _differs(folder / name, text)]
    if changed and not force:
        raise ClusterSimError(
            f"{folder / changed[0]} is there and is not the lesson as it comes (changed, or run and saved); "
            "choose another folder, or overwrite it with --force"
        )
    with output_folder(folder), together(folder) as path_of:
        for name, text in texts.items():
            path_of(name).write_bytes(text)
    return [Lesson(folder / lesson.name, lesson.title) for lesson in shipped_lessons]


def _differs(path: Path, text: bytes) -> bool:
    try:
        return path.exists() and path.read_bytes() != text
    except OSError:
        return True


def run(lesson: Lesson, told: Callable[[int, int], None] | None = None) -> str:
    """Run a copied lesson from top to bottom and save what it shows in it; returns what failed, empty if nothing did.

    ``told`` is called with (cells run, cells in all). Raises :class:`ClusterSimError` without nbclient and ipykernel.
    """
    try:
        nbclient, nbformat, _ = (import_module(name) for name in ("nbclient", "nbformat", "ipykernel"))
    except ImportError as error:
        raise ClusterSimError(needs(f"running lessons (there is no {error.name})", "notebooks")) from None
    notebook = nbformat.read(lesson.path, as_version=4)
    n = len(notebook.cells)
    failed = ""
    resources = {"metadata": {"path": str(lesson.path.parent)}}
    quiet = ["--IPKernelApp.log_level=ERROR"]  # a kernel on this machine warns of its own open port
    client = nbclient.NotebookClient(
        notebook, timeout=None, resources=resources, extra_arguments=quiet, record_timing=False
    )  # without times the same run gives the same file, which can be kept
    if told:
        client.on_cell_complete = lambda cell, cell_index, **_: told(cell_index + 1, n)
    try:
        client.execute()
    except nbclient.exceptions.CellExecutionError as error:
        failed = f"{error.ename}: {error.evalue}".strip(": ")
    with output_folder(lesson.path.parent), fresh(lesson.path) as temporary:
        nbformat.write(notebook, temporary)
    return failed
