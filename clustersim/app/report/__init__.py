"""One self-contained HTML file that says what a run, a sweep or a plan came to and why. It opens by mail, offline, on a
phone, in print.

Everything printed is escaped by Jinja2 or the SVG writers, and the page's own policy forbids it to load anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from clustersim.core.saved_run import SavedRun

if TYPE_CHECKING:
    from clustersim.scenario.run.running import Prepared

PAGE = b'<meta name="generator" content="clustersim">'
"""Near the beginning of every page, by which one is known again."""

__all__ = ["write_page", "write_report"]


def write_report(run: SavedRun, path: str | Path, title: str | None = None, prepared: Prepared | None = None) -> None:
    """Write the report of a run, whole or not at all; ``title`` None takes the run's own name.

    ``prepared`` : the scenario of it; where it is short it is run again with one thing changed after the other. Raises
    :class:`ClusterSimError` where it cannot be written.
    """
    from clustersim.app.report.content import page

    write_page(page(run, title, prepared), Path(path))


def write_page(text: str, path: Path) -> None:
    """Write a page, whole or not at all. Raises :class:`ClusterSimError` where it cannot be written."""
    from clustersim.core.outputs import fresh, ours, writing

    ours(path, PAGE)
    with writing(path), fresh(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
