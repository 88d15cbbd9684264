"""One self-contained HTML file that says what a run came to and why. It opens by mail, offline, on a phone, in print.

Everything printed is escaped by Jinja2 or the SVG writers, and the page's own policy forbids it to load anything.
"""

from __future__ import annotations

from pathlib import Path

from clustersim.errors import ClusterSimError
from clustersim.traces.saved import SavedRun

__all__ = ["html", "write_report"]


def html(run: SavedRun, title: str | None = None) -> str:
    """The report of a run as one HTML document; ``title`` None takes the run's own name."""
    from jinja2 import Environment, StrictUndefined

    from clustersim.paths import data_path
    from clustersim.report.content import content

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_arrows
    )
    source = data_path("data") / "report.html.j2"
    return environment.from_string(source.read_text(encoding="utf-8")).render(content(run, title))


def _arrows(value: object) -> object:
    """Names of links with an arrow that no line ends inside of."""
    return value.replace("->", "→") if type(value) is str else value


def write_report(run: SavedRun, path: str | Path, title: str | None = None) -> None:
    """Write the report, whole or not at all. Raises :class:`ClusterSimError` where it cannot be written."""
    path = Path(path)
    from clustersim.paths import fresh

    try:
        with fresh(path) as temporary:
            temporary.write_text(html(run, title), encoding="utf-8")
    except OSError as error:
        raise ClusterSimError(f"{path}: cannot be written: {error.strerror or error}") from None
