"""``clustersim plot``: a picture of a saved or measured run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import OUT_PICTURE, PATH, format_option, rank_list, ranks_option, working
from clustersim.app.cli.pictures import write_picture
from clustersim.app.cli.tables import stdout
from clustersim.core.errors import ClusterSimError
from clustersim.core.paths import RUN_FILE
from clustersim.core.units import parse_time

if TYPE_CHECKING:
    from clustersim.core.saved_run import SavedRun


def span(text: str | None) -> tuple[float, float] | None:
    """``"700 ms..1.06 s"`` in seconds. Raises :class:`ClusterSimError`."""
    if text is None:
        return None
    begin, dots, end = text.partition("..")
    if not dots:
        raise ClusterSimError(f"cannot read {text!r} as a part of the run; write it like '700 ms..1.06 s'")
    low, high = (parse_time(part.strip()) if part.strip() not in {"0", ""} else 0.0 for part in (begin, end))
    if high <= low:
        raise ClusterSimError(f"{text!r} ends before it begins")
    return low, high


def _run(path: Path, fmt: str | None) -> SavedRun:
    """A saved run, or a trace. Raises :class:`ClusterSimError`."""
    from clustersim.core.saved_run import SavedRun
    from clustersim.files import traces
    from clustersim.files.traces.saved import load_run

    trace = path.is_dir() and not (path / RUN_FILE).is_file() and any(p.is_file() for p in path.iterdir())
    if not trace and (path.is_dir() or not path.is_file() or path.suffix == ".npz"):
        return load_run(path)
    read = traces.read(path, fmt)
    if isinstance(read, traces.Samples | traces.Told):
        raise ClusterSimError(f"{path}: a table or a log has no run to draw; `clustersim trace` tells what it holds")
    return SavedRun(read)


@click.command(short_help="Draw a saved run, a trace or a topology.")
@click.argument("kind")
@click.argument("run_dir", metavar="RUN", type=PATH)
@click.argument("file", type=OUT_PICTURE)
@ranks_option
@click.option("--window", help="Draw only this part of the run, such as '700 ms..1.06 s'.")
@click.option("--zoom", help="Draw this part once more, larger, below a Gantt chart; 'last' is the last step.")
@click.option("--step", type=int, help="Draw only this step, by its number, instead of --window.")
@click.option("--arrows", is_flag=True, help="In a pipeline, draw who hands a micro-batch to whom.")
@click.option("--nodes", type=click.IntRange(min=1), help="How many nodes, where RUN is a topology.")
@click.option("--title", help="A title instead of the run's own.")
@click.option(
    "--dpi", type=click.IntRange(min=40, max=600), default=180, help="Dots an inch; a picture is 10 inches wide."
)
@format_option
def plot(
    kind: str,
    run_dir: Path,
    file: Path,
    ranks: tuple[str, ...],
    window: str | None,
    zoom: str | None,
    step: int | None,
    arrows: bool,
    nodes: int | None,
    title: str | None,
    dpi: int,
    fmt: str | None,
) -> None:
    """Draw a run to FILE (.png, .svg or .pdf). KIND is gantt, breakdown, waterfall, topology, links,
    memory or traffic; of a split model pipeline, stages, stage-memory or mesh, too.

    RUN is a folder that `clustersim run --out` wrote, or a trace: a file, or a folder. Of topology it may be a machine,
    too: a topology's file or name.
    """
    import numpy as np

    from clustersim.app import plots

    with working(f"drawing {file}"):
        if kind == "topology" and (run_dir.suffix == ".toml" or not run_dir.exists()):
            from clustersim.cluster import files as fabrics

            topology = fabrics.load(str(run_dir), nodes=nodes)
            figure = plots.loaded_topology(topology, np.zeros(topology.n_links), title or topology.name)
        elif nodes is not None:
            raise click.UsageError("--nodes is for the picture of a machine; a run has its own")
        else:
            run = _run(run_dir, fmt)
            part = plots.last_step(run.timeline) if zoom == "last" else span(zoom)
            view = plots.View(title, rank_list(ranks), span(window), part, step, arrows)
            figure = plots.picture(kind, run, view)
        written = write_picture(figure, file, dpi)
    stdout().say(written)
