"""One self-contained HTML file that says what a run, a sweep or a plan came to and why. It opens by mail, offline, on a
phone, in print.

Everything printed is escaped by Jinja2 or the SVG writers, and the page's own policy forbids it to load anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from clustersim.files.traces.saved import SavedRun

if TYPE_CHECKING:
    from clustersim.scenario.running import Prepared

PAGE = b'<meta name="generator" content="clustersim">'
"""Near the beginning of every page, by which one is known again."""

__all__ = ["study_html", "write_report", "write_study"]


def study_html(folder: str | Path, title: str | None = None) -> str:
    """The report of the sweep, plan or study in a folder as one HTML document; ``title`` None takes its own.

    Raises :class:`ClusterSimError` where the folder holds none, or nothing in it has a result.
    """
    from clustersim.app.report.pages import rendered
    from clustersim.app.report.study import page_of

    page = msgspec.structs.asdict(page_of(Path(folder)))
    return rendered("study.html.j2", **page | ({} if title is None else {"title": title}))


def write_report(run: SavedRun, path: str | Path, title: str | None = None, prepared: Prepared | None = None) -> None:
    """Write the report of a run, whole or not at all; ``title`` None takes the run's own name.

    ``prepared`` : the scenario of it; where it is short it is run again with one thing changed after the other. Raises
    :class:`ClusterSimError` where it cannot be written.
    """
    from clustersim.app.report.content import page

    _write(page(run, title, prepared), Path(path))


def write_study(folder: str | Path, path: str | Path, title: str | None = None) -> None:
    """Write the report of a sweep, a plan or a sensitivity study, as :func:`write_report` does."""
    _write(study_html(folder, title), Path(path))


def _write(text: str, path: Path) -> None:
    from clustersim.core.outputs import fresh, ours, writing

    ours(path, PAGE)
    with writing(path), fresh(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
