"""``clustersim compare``: where two runs differ."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from clustersim.app.cli.common import PATH, format_option, json_option, print_json, working
from clustersim.app.cli.explain import load
from clustersim.app.cli.pictures import picture_path, write_picture


@click.command(short_help="Say where two runs differ, worst first.")
@click.argument("a", nargs=-1, required=True)
@click.argument("b")
@click.option("--top", type=click.IntRange(min=1), default=10, help="How many differences to print.")
@click.option("--plot", type=PATH, help="Draw both on one time axis (.png, .svg, .pdf).")
@format_option
@json_option
def compare(a: tuple[str, ...], b: str, top: int, plot: Path | None, fmt: str | None, as_json: bool) -> None:
    """Say where two runs differ, worst first.

    A and B are folders that `clustersim run --out` wrote, scenarios, or profiler traces, one of each if you like. A may
    be several traces, one per rank; so many of B are a folder.
    """
    from clustersim.explain.compare import compare as compared
    from clustersim.explain.compare import sentences

    if plot is not None:
        picture_path(plot)
    if len(a) > 1 and Path(b).is_file() and Path(b).suffix != ".toml":
        raise click.UsageError(f"which of {len(a) + 1} files are of B? give the traces of each run as a folder")
    run_a = load(a[0], (), *a[1:], fmt=fmt)
    run_b = load(b, fmt=fmt)
    with working("comparing"):
        difference = compared(run_a.timeline, run_b.timeline)
    names = f"A: {run_a.title}", f"B: {run_b.title}"
    drawn = ""
    if plot is not None:
        from clustersim.app import plots

        with working(f"drawing {plot}"):
            figure = plots.gantt_pair((names[0], run_a.timeline), (names[1], run_b.timeline))
            drawn = write_picture(figure, plot)
    if as_json:
        print_json({"a": run_a.title, "b": run_b.title, **msgspec.structs.asdict(difference)})
        return
    for text in (*names, *difference.text):
        click.echo(text)
    for i, text in enumerate(sentences(difference, top), 1):
        click.echo(f"{i:2d}. {text}")
    if drawn:
        click.echo(drawn)
