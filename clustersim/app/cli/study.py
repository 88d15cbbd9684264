"""What the commands of a study share: its folder, its pictures and its page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import print_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from clustersim.core.outputs import Folder


def needs_out(page: Path | None, out: Path | None) -> None:
    """Raise :class:`click.UsageError` for a page without the folder that it is made of."""
    if page is not None and out is None:
        raise click.UsageError("--report needs --out: the page is made of what is there")


def written_study(folder: Folder, file: str, answer: object, figures: Mapping[str, Figure]) -> list[str]:
    """Write a study's answer and its pictures to its folder; returns what was written."""
    from clustersim.app import plots

    pictures = {f"{name}.png": partial(plots.save, figure) for name, figure in figures.items()}
    folder.write(file, answer, pictures)
    return [f"{folder.path}/{name}" for name in (file, *pictures)]


def say_study(
    said: object, out: Path | None, page: Path | None, as_json: bool, show: Callable[[list[str]], None]
) -> None:
    """Write the page of a study that is in a folder, where one is asked for; then print JSON, or ``show`` it.

    ``show`` is given the names of the pages that were written.
    """
    pages = []
    if page is not None and out is not None:
        from clustersim.app.report.study import write_study

        write_study(out, page)
        pages.append(str(page))
    if as_json:
        print_json(said)
    else:
        show(pages)
