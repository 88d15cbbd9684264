"""What the commands share: options, JSON and progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from clustersim.core.errors import ClusterSimError
from clustersim.core.limits import MOST_RANKS, counted
from clustersim.core.outputs import check_file, check_folder
from clustersim.core.paths import json_text
from clustersim.core.texts import short, shown

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

PATH = click.Path(path_type=Path)
"""Of what is read."""


class OutputFile(click.Path):
    """A file that a command writes: refused before any work where it cannot be (:func:`check_file`)."""

    def __init__(self, *endings: str) -> None:
        super().__init__(path_type=Path)
        self.endings = endings

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path. Raises :class:`ClusterSimError`."""
        path = Path(str(super().convert(value, param, ctx)))
        check_file(path, self.endings)
        return path


class OutputFolder(click.Path):
    """A folder that a command writes to: refused before any work where it cannot be (:func:`check_folder`)."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path. Raises :class:`ClusterSimError`."""
        path = Path(str(super().convert(value, param, ctx)))
        check_folder(path)
        return path


OUT_FILE = OutputFile()
OUT_PICTURE = OutputFile(".png", ".svg", ".pdf")
OUT_FOLDER = OutputFolder()
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout and nothing else.")
BACKEND = click.Choice(["nccl", "gloo", "mpi", "mpi_cuda", "ideal"])
"""Keys of :data:`clustersim.collectives.backends.BACKENDS`, which this file does not load."""
set_option: Decorator = click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY.PATH=VALUE",
    help="Change one value of the scenario, written as in its file; KEY= takes it away. May be repeated.",
)
option_option: Decorator = click.option(
    "--option",
    "place",
    type=click.IntRange(min=1),
    help="Of a plan's folder: the number of an option, as plan prints it.  [1]",
)
ranks_option: Decorator = click.option(
    "--ranks", "--rank", "ranks", multiple=True, metavar="0-7,12", help="Only these ranks; may be repeated."
)

format_option: Decorator = click.option(
    "--format",
    "fmt",
    metavar="FORMAT",
    help="The format of trace files, a name of `clustersim list formats`.  [found by their content]",
)

page_option: Decorator = click.option("--report", "page", type=OUT_FILE, help="Write the answer as one HTML page, too.")
jobs_option: Decorator = click.option(
    "--jobs", type=click.IntRange(min=1), help="How many processes work at once.  [one a core]"
)

QUIET_SECONDS = 2.0
"""How long a command may work without saying so."""
TOLD_SECONDS = 10.0
"""How long work that is told in a file or a pipe goes on between two lines."""


def print_json(value: Any) -> None:
    """JSON on stdout."""
    click.echo(json_text(value).decode(), nl=False)


def label_of(strategy: str, variant: str, *, split: bool = False) -> str:
    """A row of strategies side by side; ways to split a model all have one strategy, which is left out."""
    return variant if split else f"{strategy} {variant}".strip()


class ProgressLine:
    """How far some work is; :meth:`show` tells stderr, from a thread of its own, once it takes long.

    ``then`` : what is done once all steps are, which takes a while, too: all of them done is not the end.
    """

    def __init__(self, title: str, then: str = "") -> None:
        self.what = title
        self._then = then
        self.done = 0
        self.total = 0
        self.over = threading.Event()

    def name(self, title: str) -> None:
        """Called by the work: what it does now."""
        self.what = title

    def __call__(self, done: int, total: int) -> None:
        """Called by the work: ``done`` of ``total`` steps."""
        self.done = done
        self.total = total

    @property
    def stage(self) -> tuple[str, int, int]:
        """What runs now, and how many of how many steps of it are done; of 0 where nobody counts them."""
        if self._then and self.total and self.done >= self.total:
            return self._then, 0, 0
        return self.what, self.done, self.total

    def show(self) -> None:
        """Wait :data:`QUIET_SECONDS`, then say on a terminal what is going on, how far it is and how long it may take;
        elsewhere, where nothing can be drawn over, a line every :data:`TOLD_SECONDS`."""
        if self.over.wait(QUIET_SECONDS):
            return
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        if not console.is_terminal:
            self._tell()
            return
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("so far,"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("left"),
        )
        with progress.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(self.what, total=None)
            while not self.over.wait(0.1):
                task_name, done, total = self.stage
                bar.update(task, description=task_name, completed=done, total=total or None)

    def _tell(self) -> None:
        """A line every :data:`TOLD_SECONDS` until the work is over: what it does, how far it is, since when."""
        began = time.monotonic() - QUIET_SECONDS
        pause = TOLD_SECONDS - QUIET_SECONDS
        while not self.over.wait(pause):
            task_name, done, total = self.stage
            done_text = f"{done / total:.0%}, " if total else ""
            click.echo(f"{task_name}: {done_text}{time.monotonic() - began:.0f} s so far", err=True)
            pause = TOLD_SECONDS


@contextmanager
def working(title: str, then: str = "") -> Iterator[ProgressLine]:
    """Say on stderr what takes long, once it has. The block may tell how far it is through what this yields; ``then`` :
    what it does after the last step."""
    progress = ProgressLine(title, then)
    thread = threading.Thread(target=progress.show, daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        progress.over.set()
        thread.join()


def rank_list(texts: tuple[str, ...], option: str = "--ranks") -> list[int] | None:
    """``("0-7,12",)`` as ranks, where ``option`` said it; None for nothing. Raises :class:`ClusterSimError`."""
    ranks: list[int] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        low, dash, high = part.partition("-")
        digits = len(part) <= 40 and low.isdecimal() and (not dash or high.isdecimal())
        if not digits or (dash and int(high) < int(low)):
            raise ClusterSimError(f"cannot read {shown(part)} as ranks; write them like '0-7,12' (at {option})")
        counted(int(high or low) - int(low), MOST_RANKS, f"{option} {short(part)}: ranks", ClusterSimError)
        ranks += range(int(low), int(high or low) + 1)
    return ranks or None


def rank_words(ranks: Sequence[int], world_size: int) -> str:
    """``"ranks 0-7, 12 of 1,024"``, or ``"all 8 ranks"``."""
    if len(ranks) == world_size:
        return f"all {world_size:,} ranks" if world_size > 1 else "the only rank"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    runs_text = ", ".join(f"{low}-{high}" if high > low else f"{low}" for low, high in runs)
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {runs_text} of {world_size:,}"
