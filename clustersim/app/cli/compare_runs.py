"""``clustersim compare``: where two runs differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from clustersim.app.cli.common import OUT_PICTURE, format_option, json_option, print_json, working
from clustersim.app.cli.explain import load
from clustersim.app.cli.pictures import write_picture
from clustersim.core.errors import several

if TYPE_CHECKING:
    from clustersim.core.facts import RunFacts


@click.command(short_help="Say where two runs differ, worst first.")
@click.argument("a", nargs=-1, required=True)
@click.argument("b")
@click.option("--top", type=click.IntRange(min=1), default=10, help="How many differences to print.")
@click.option("--plot", type=OUT_PICTURE, help="Draw both on one time axis (.png, .svg, .pdf).")
@format_option
@json_option
def compare(a: tuple[str, ...], b: str, top: int, plot: Path | None, fmt: str | None, as_json: bool) -> None:
    """Say where two runs differ, worst first.

    A and B are folders that `clustersim run --out` wrote, scenarios, or profiler traces, one of each if you like. A may
    be several traces, one per rank; so many of B are a folder.
    """
    from clustersim.explain.compare import compare as compared
    from clustersim.explain.compare import sentences

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
    for text in (*names, *_unlike_steps(run_a.run.facts, run_b.run.facts), *difference.text):
        click.echo(text)
    for i, text in enumerate(sentences(difference, top), 1):
        click.echo(f"{i:2d}. {text}")
    if drawn:
        click.echo(drawn)


def _unlike_steps(facts_a: RunFacts, facts_b: RunFacts) -> Iterator[str]:
    """That the steps of two runs have different work: of such steps the longer may be the better."""
    rates = [facts.samples_per_s or 0.0 for facts in (facts_a, facts_b)]
    times = [facts.figures.get("step_time_s", 0.0) for facts in (facts_a, facts_b)]
    samples = [round(rate * time) for rate, time in zip(rates, times, strict=True)]
    if not all(samples) or samples[0] == samples[1]:
        return
    on_a, on_b = (f" on {several(facts.gpus, 'GPU')}" if facts.gpus else "" for facts in (facts_a, facts_b))
    yield (
        f"a step has {samples[0]:,} samples{on_a} in A and {samples[1]:,}{on_b} in B, so that its length does not "
        f"compare: A does {rates[0]:,.4g} samples per second, and B {rates[1]:,.4g}"
    )
