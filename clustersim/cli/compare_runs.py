"""``clustersim compare``: where two runs differ."""

from __future__ import annotations

import click

from clustersim.cli.common import json_option, print_json, working
from clustersim.cli.explain import load


@click.command(short_help="Say where two runs differ, worst first.")
@click.argument("a")
@click.argument("b")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="How many ops to print.")
@json_option
def compare(a: str, b: str, top: int, as_json: bool) -> None:
    """Say where two runs differ, worst first.

    A and B are folders that `clustersim run --out` wrote, scenarios, or profiler traces, in any mixture.
    """
    from clustersim.analysis.compare import compare as compared
    from clustersim.analysis.compare import sentences

    one, other = load(a), load(b)
    with working("comparing"):
        found = compared(one.timeline, other.timeline)
    if as_json:
        print_json({"a": one.title, "b": other.title, **found})
        return
    click.echo(f"A: {one.title}")
    click.echo(f"B: {other.title}")
    for text in found["text"]:
        click.echo(text)
    for i, text in enumerate(sentences(found, top), 1):
        click.echo(f"{i:2d}. {text}")
