"""One self-contained HTML file that says what a run, a sweep or a plan came to and why. It opens by mail, offline, on a
phone, in print.

Everything printed is escaped by Jinja2 or the SVG writers, and the page's own policy forbids it to load anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from clustersim.traces.saved import SavedRun

if TYPE_CHECKING:
    from clustersim.scenario.running import Prepared

PAGE = b'<meta name="generator" content="clustersim">'
"""Near the beginning of every page, by which one is known again."""

__all__ = ["holds_study", "html", "rendered", "study_html", "write_report", "write_study"]


def html(run: SavedRun, title: str | None = None, prepared: Prepared | None = None) -> str:
    """The report of a run as one HTML document; ``title`` None takes the run's own name.

    ``prepared`` : the scenario of it; where it is short it is run again with one thing changed after the other.
    """
    from clustersim.report.content import content

    return rendered("report.html.j2", content(run, title, prepared))


def study_html(folder: str | Path, title: str | None = None) -> str:
    """The report of the sweep, plan or study in a folder as one HTML document; ``title`` None takes its own.

    Raises :class:`ClusterSimError` where the folder holds none, or nothing in it has a result.
    """
    from clustersim.report.study import page_of

    page = page_of(Path(folder))
    return rendered("study.html.j2", page if title is None else msgspec.structs.replace(page, title=title))


def holds_study(folder: str | Path) -> bool:
    """Whether a folder holds a sweep, a plan or a sensitivity study."""
    from clustersim.report.study import holds_study

    return holds_study(Path(folder))


def rendered(template: str, values: msgspec.Struct) -> str:
    """A template of ``data/`` with the fields of ``values``, every text of them escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from clustersim.paths import data_path

    environment = Environment(
        loader=FileSystemLoader(data_path("data")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_arrows,
    )
    return environment.get_template(template).render(msgspec.structs.asdict(values))


def _arrows(value: object) -> object:
    """Names of links with an arrow that no line ends inside of, and a sign for both ways."""
    return value.replace("->", "→").replace("+-", "±") if type(value) is str else value


def write_report(run: SavedRun, path: str | Path, title: str | None = None, prepared: Prepared | None = None) -> None:
    """Write the report of a run (:func:`html`), whole or not at all. Raises :class:`ClusterSimError` where it cannot be
    written."""
    _write(html(run, title, prepared), Path(path))


def write_study(folder: str | Path, path: str | Path, title: str | None = None) -> None:
    """Write the report of a sweep, a plan or a sensitivity study, as :func:`write_report` does."""
    _write(study_html(folder, title), Path(path))


def _write(text: str, path: Path) -> None:
    from clustersim.outputs import fresh, ours, writing

    ours(path, PAGE)
    with writing(path), fresh(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
