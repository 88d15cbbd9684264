"""``clustersim check``: what a topology file describes, and what in it looks wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import json_option, print_json, working
from clustersim.core.units import format_bandwidth

if TYPE_CHECKING:
    from clustersim.cluster.files.check import TopologyReport


@click.command(short_help="Say what a topology file describes, and what looks wrong.")
@click.argument("file")
@click.option("--nodes", type=click.IntRange(min=1), help="How many nodes.  [the file's own, or 1]")
@json_option
def check(file: str, nodes: int | None, as_json: bool) -> None:
    """Say what a topology describes (GPUs, NICs, links, bisection bandwidth) and what looks wrong in it.

    FILE is a .toml file or the name of a shipped one; `clustersim plot topology FILE PICTURE` draws it.
    """
    import dataclasses

    from clustersim.cluster import files as fabrics
    from clustersim.collectives import fitted as fitting

    with working(f"checking {file}"):
        topology = fabrics.load(file, nodes=nodes)
        report = fabrics.check(topology)
        numbers = list(fitting.informed(topology.measured, file).words()) if topology.measured else []
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        click.echo("\n".join([*_lines(report), *numbers]))


def _lines(report: TopologyReport) -> Iterator[str]:
    yield f"{report.name}: {report.n_nodes} node(s), fabric {report.fabric or 'none'}"
    chips = ", ".join(f"{count} x {name}" for name, count in report.devices.items())
    yield f"{'GPUs' if 'gpu' in report.vertices else 'CPUs':24s} {chips}"
    if report.ports:
        ports = ", ".join(f"{count} x {8 * rate / 1e9:,.4g} Gb/s" for rate, count in report.ports.items())
        each = f"; {report.rails} rails (leaf switches that a node is plugged into)" if report.rails > 1 else ""
        yield f"{'NICs':24s} {ports}{each}"
    for what, counts in (("vertices", report.vertices), ("directed links", report.links)):
        parts = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        yield f"{what:24s} {sum(counts.values())} ({parts})"
    if len(report.injection_bandwidth):
        low = float(report.injection_bandwidth.min())
        high = float(report.injection_bandwidth.max())
        spread = "" if low == high else f" to {format_bandwidth(high)}"
        each = "injection per GPU" if "gpu" in report.vertices else "injection per CPU"
        yield f"{each:24s} {format_bandwidth(low)}{spread}"
    yield f"{'bisection, one direction':24s} {format_bandwidth(report.bisection_bandwidth)}"
    pairs = ", ".join(f"{a} -> {b}" for a, b in report.unreachable)
    yield f"{'unreachable pairs':24s} {report.n_unreachable}" + (f" (such as {pairs})" if pairs else "")
    yield from (f"warning: {warning}" for warning in report.warnings)
    if not report.warnings:
        yield "nothing looks wrong"
