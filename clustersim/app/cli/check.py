"""``clustersim check``: what a topology file describes, and what in it looks wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import json_option, print_json, working
from clustersim.cluster import files as fabrics
from clustersim.cluster.files.leaves import spread_words
from clustersim.core import gpu_file
from clustersim.core.texts import Plain
from clustersim.core.units import format_bandwidth, format_bytes

if TYPE_CHECKING:
    from clustersim.cluster.files.check import TopologyReport
    from clustersim.core.device import Device
    from clustersim.core.topology import Topology


@click.command(short_help="Say what a topology file describes, and what looks wrong.")
@click.argument("file")
@click.option("--nodes", type=click.IntRange(min=1), help="How many nodes.  [the file's own, or 1]")
@json_option
def check(file: str, nodes: int | None, as_json: bool) -> None:
    """Say what a topology describes (GPUs, NICs, links, bisection bandwidth) and what looks wrong in it.

    FILE is a .toml file or the name of a shipped one; `clustersim plot topology FILE PICTURE` draws it. A file with a
    GPU (`clustersim new device`) is checked as well: what of it is assumed, and how far that may put steps off.
    """
    import dataclasses

    from clustersim.collectives.base import Group
    from clustersim.collectives.nccl.uneven import of_group

    if gpu_file.is_gpu(file):
        gpu = gpu_file.load(file)
        print_json(_doubts(gpu)) if as_json else click.echo("\n".join(_of_gpu(gpu)))
        return
    with working(f"checking {file}"):
        topology = fabrics.load(file, nodes=nodes)
        report = fabrics.check(topology)
        own = {kind.device: kind.own_gpu for kind in topology.node_types if kind.own_gpu is not None}
        numbers = [*_of_numbers(topology, file)] if topology.measured else []
        uneven = [*of_group(Group(topology, topology.gpus))] if len(topology.gpus) and not report.n_unreachable else []
        report = dataclasses.replace(report, warnings=(*report.warnings, *uneven))
    if as_json:
        print_json(dataclasses.asdict(report) | ({"gpus": [_doubts(gpu) for gpu in own.values()]} if own else {}))
    else:
        gpus = [line for gpu in own.values() for line in _of_gpu(gpu)]
        click.echo("\n".join([*_lines(report), *gpus, *numbers]))


def _of_numbers(topology: Topology, file: str) -> Iterator[str]:
    """What the numbers say that were measured on a machine."""
    from clustersim.collectives.fitted import informed

    return informed(topology.measured, file).words()


def _of_gpu(gpu: Device) -> Iterator[str]:
    """A GPU that a file describes: its figures, and what is assumed."""
    from clustersim.model.seconds.base import MODES
    from clustersim.model.seconds.unstated import doubts, half_width

    peaks = ", ".join(f"{dtype} {rate / 1e12:,.4g}" for dtype, rate in gpu.peak.items())
    memory = f"{format_bytes(gpu.memory_bytes)} at {format_bandwidth(gpu.memory_bandwidth)}"
    yield f"{gpu.name}: {memory}, dense TFLOP/s {peaks}"
    units = "CUs" if gpu.amd else "SMs"
    yield f"{'':24s} {gpu.sms} {units} at {gpu.clock / 1e6:,.0f} MHz, {gpu.tdp:,.0f} W, generation {gpu.arch}"
    for doubt in doubts(gpu):
        entry = doubt.assumed
        block = "a block"
        moved = "no step depends on it"
        if entry.moves in gpu.peak and entry.moves in MODES:  # what acts on one dtype is told of steps in that
            block = f"a block in {entry.moves}"
            doubt = next(other for other in doubts(gpu, entry.moves) if other.assumed == entry)
        if doubt.half_width >= NOTHING:
            moved = f"{block} takes {doubt.faster:+.1%} to {doubt.slower:+.1%}"
        yield f"assumed: {entry.field:15s} {entry.value} (+-{entry.spread:.0%}: {moved})"
    together = half_width(gpu)
    if together >= NOTHING:
        yield f"together they put steps up to {together:.0%} off, nine times in ten; ranges are wider by that"
    elif gpu.assumed:
        yield "usual steps depend on none of them"
    else:
        yield "nothing is assumed"


NOTHING = 5e-4
"""Relative changes below this are none."""


def _doubts(gpu: Device) -> Plain:
    from clustersim.model.seconds.unstated import doubts, half_width

    rows = [
        {
            "field": d.assumed.field,
            "value": d.assumed.value,
            "spread": d.assumed.spread,
            "slower": d.slower,
            "faster": d.faster,
        }
        for d in doubts(gpu)
    ]
    return {"name": gpu.name, "assumed": rows, "half_width": half_width(gpu)}


def _lines(report: TopologyReport) -> Iterator[str]:
    yield f"{report.name}: {report.n_nodes} node(s), fabric {report.fabric or 'none'}"
    chips = ", ".join(f"{count} x {name}" for name, count in report.devices.items())
    yield f"{'GPUs' if 'gpu' in report.vertices else 'CPUs':24s} {chips}"
    if report.ports:
        ports = ", ".join(f"{count} x {8 * rate / 1e9:,.4g} Gb/s" for rate, count in report.ports.items())
        rail_text = f"; {report.rails} rails (leaf switches that a node is plugged into)" if report.rails > 1 else ""
        yield f"{'NICs':24s} {ports}{rail_text}"
    if report.n_nodes > 1 and report.spread:
        yield f"{'leaves':24s} {spread_words(report.spread)}"
    for label, counts in (("vertices", report.vertices), ("directed links", report.links)):
        parts = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        yield f"{label:24s} {sum(counts.values())} ({parts})"
    if len(report.injection_bandwidth):
        low = float(report.injection_bandwidth.min())
        high = float(report.injection_bandwidth.max())
        spread = "" if low == high else f" to {format_bandwidth(high)}"
        rail_text = "injection per GPU" if "gpu" in report.vertices else "injection per CPU"
        yield f"{rail_text:24s} {format_bandwidth(low)}{spread}"
    yield f"{'bisection, one direction':24s} {format_bandwidth(report.bisection_bandwidth)}"
    pairs = ", ".join(f"{a} -> {b}" for a, b in report.unreachable)
    yield f"{'unreachable pairs':24s} {report.n_unreachable}" + (f" (such as {pairs})" if pairs else "")
    yield from (f"warning: {warning}" for warning in report.warnings)
    if not report.warnings:
        yield "nothing looks wrong"
