"""``clustersim check``: what a topology file describes, and what in it looks wrong."""

from __future__ import annotations

import click

from clustersim.cli.common import json_option, print_json, working


@click.command(short_help="Count, cut and question a topology file.")
@click.argument("file")
@click.option("--nodes", type=click.IntRange(min=1), default=None, help="Machines; 1, or the file's own, when absent.")
@json_option
def check(file: str, nodes: int | None, as_json: bool) -> None:
    """Check a topology: FILE is a .toml file or the name of a shipped one."""
    import dataclasses

    from clustersim import fabrics

    with working(f"checking {file}"):
        report = fabrics.check(fabrics.load(file, nodes=nodes))
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        click.echo(report.describe())
