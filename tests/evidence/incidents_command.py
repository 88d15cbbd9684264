"""``python -m tests.evidence incidents``: how often planted incidents are diagnosed right."""

from __future__ import annotations

import click
import msgspec

from clustersim.app.cli.common import json_option, markdown_table, number_table, print_json, stdout, working
from clustersim.app.cli.validate import markdown_option, percent

HEAD = ("files", "incidents", "cause and place right", "cause right", "confident", "confident and wrong")


@click.command()
@click.option("--seeds", type=click.IntRange(min=1), default=100, help="How many incidents.")
@click.option("--first", type=click.IntRange(min=0), default=0, help="The first seed.")
@click.option("--difficulty", default="easy", help="easy or hard.")
@click.option("--mistakes", is_flag=True, help="List what was taken for what.")
@markdown_option
@json_option
def incidents(seeds: int, first: int, difficulty: str, mistakes: bool, markdown: bool, as_json: bool) -> None:
    """Planted incidents: how often our diagnosis names the cause and the place, and how often it is sure and wrong."""
    from tests.evidence import incidents as exams

    rows = []
    with working(f"diagnosing {seeds} incident(s)") as progress:
        for done, seed in enumerate(range(first, first + seeds)):
            progress(done, seeds)
            rows += exams.diagnosed(seed, difficulty)
    table = exams.shares(rows)
    if as_json:
        print_json({"shares": msgspec.to_builtins(table), "incidents": msgspec.to_builtins(rows)})
        return
    cells = [
        [row.files, f"{row.count:,}", *map(percent, (row.right, row.cause, row.confident, row.confident_wrong))]
        for row in table
    ]
    if markdown:
        click.echo("\n".join(markdown_table(HEAD, cells)))
    else:
        stdout().print(number_table(f"planted incidents, {difficulty}", HEAD, cells))
    if mistakes:
        for files, right, given, count in exams.mistaken(rows):
            click.echo(f"{count:4d}  {files}: {right} taken for {given}")


@click.command()
@click.option("--times", type=click.IntRange(min=1), default=1, help="Jobs of each kind, each on another rank.")
@json_option
def gloo_faults(times: int, as_json: bool) -> None:
    """Real jobs of this machine's torch over Gloo with a planted fault: how often our diagnosis is right."""
    from tests.evidence import gloo_faults as real

    rows = []
    with working(f"running {times * len(real.KINDS)} job(s)") as progress:
        for done, row in enumerate(real.real_faults(times=times), start=1):
            progress(done, times * len(real.KINDS))
            rows.append(row)
    if as_json:
        print_json(msgspec.to_builtins(rows))
        return
    for row in rows:
        place = next((str(part) for part in row.given.place if part is not None), "an unknown place")
        word = "right" if row.is_right else f"wrong, it says {row.given.kind} of {place}"
        click.echo(f"{row.right.kind} of rank {row.right.rank}: {word} ({row.confidence:.0%} sure, {row.files} files)")
    click.echo(f"{sum(row.is_right for row in rows)} of {len(rows)} right")
