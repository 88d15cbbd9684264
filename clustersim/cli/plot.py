"""``clustersim plot``: a picture of a saved run."""

from __future__ import annotations

from pathlib import Path

import click

from clustersim.cli.common import picture_path, rank_list, ranks_option, stdout, working, write_picture
from clustersim.errors import ClusterSimError


def span(text: str | None) -> tuple[float, float] | None:
    """``"700 ms..1.06 s"`` in seconds. Raises :class:`ClusterSimError`."""
    from clustersim.units import parse_time

    if text is None:
        return None
    begin, dots, end = text.partition("..")
    if not dots:
        raise ClusterSimError(f"cannot read {text!r} as a part of the run; write it like '700 ms..1.06 s'")
    low, high = (parse_time(part.strip()) if part.strip() not in {"0", ""} else 0.0 for part in (begin, end))
    if high <= low:
        raise ClusterSimError(f"{text!r} ends before it begins")
    return low, high


@click.command(short_help="Draw a saved run.")
@click.argument("kind")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
@ranks_option
@click.option("--window", default=None, help="A part of the run, such as '700 ms..1.06 s'.")
@click.option("--zoom", default=None, help="A part to draw once more below a Gantt chart, or 'last' step.")
@click.option("--title", default=None, help="Instead of the run's own name.")
@click.option("--dpi", type=click.IntRange(min=40, max=600), default=180, show_default=True, help="10 inches wide.")
def plot(
    kind: str,
    run_dir: Path,
    file: Path,
    ranks: tuple[str, ...],
    window: str | None,
    zoom: str | None,
    title: str | None,
    dpi: int,
) -> None:
    """Draw a saved run to FILE (.png, .svg or .pdf). KIND is gantt, breakdown, topology, links or memory."""
    from clustersim import plots
    from clustersim.traces.saved import load_run

    picture_path(file)
    with working(f"drawing {file}"):
        run = load_run(run_dir)
        part = plots.last_step(run.timeline) if zoom == "last" else span(zoom)
        figure = plots.picture(kind, run, plots.View(title, rank_list(ranks), span(window), part))
        said = write_picture(figure, file, dpi)
    stdout().print(said, markup=False, soft_wrap=True)
