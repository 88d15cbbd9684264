"""``clustersim calibrate``: constants of a machine from its own measurements, written as a topology file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustersim.cli.common import json_option, print_json, stdout, working
from clustersim.errors import ClusterSimError

if TYPE_CHECKING:
    from clustersim.calibration.fit.of_capture import Calibrated


@click.command(short_help="Fit a machine's constants to its measurements.")
@click.argument("data", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--topology", required=True, help="What the machine is built like: a shipped topology, or a file.")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The topology file to write.")
@json_option
def calibrate(data: tuple[Path, ...], topology: str, out: Path, as_json: bool) -> None:
    """Fit the constants of the time models to DATA, folders that clustersim capture wrote on one machine, and write a
    topology file that carries them."""
    from datetime import UTC, datetime

    from clustersim.calibration.fit.of_capture import calibrate_captures, topology_text
    from clustersim.paths import fresh

    if out.suffix != ".toml":
        raise ClusterSimError(f"-o {out}: a topology file ends with .toml")
    with working(f"fitting {', '.join(map(str, data))}"):
        found = calibrate_captures(data, topology, datetime.now(UTC).date().isoformat())
    base = os.path.relpath(topology, out.parent) if Path(topology).is_file() else topology
    try:
        with fresh(out) as file:
            file.write_text(topology_text(found, out.stem, base), encoding="utf-8")
    except OSError as error:
        raise ClusterSimError(f"{out}: cannot be written: {error.strerror}") from None
    if as_json:
        print_json(_plain(found))
    else:
        _print(found)
        click.echo(str(out))


def _plain(found: Calibrated) -> dict[str, Any]:
    import numpy as np

    constants = [
        {"part": fit.part, "name": c.knob.name, "value": c.value, "low": c.low, "high": c.high,
         "default": c.knob.default, "refused": c.refused}
        for fit in found.fits for c in fit.constants
    ]  # fmt: skip
    held_out = float(np.median(found.held_out)) if len(found.held_out) else None
    errors = {fit.part: {"rows": len(fit.measured), **_errors(fit)} for fit in found.fits}
    return {"constants": constants, "errors": errors, "gloo_held_out": held_out, "noise": found.noise}


def _errors(fit: Any) -> dict[str, float]:
    import numpy as np

    told = {"before": fit.before, "after": fit.after}
    return {name: float(np.median(np.abs(times / fit.measured - 1.0))) for name, times in told.items()}


def _print(found: Calibrated) -> None:
    from rich.markup import escape
    from rich.table import Table

    said = _plain(found)
    table = Table(title="constants", title_justify="left")
    for heading in ("part", "constant", "default", "fitted", "95 % interval", "kept, because"):
        table.add_column(heading, justify="right" if heading in {"default", "fitted", "95 % interval"} else "left")
    for one in said["constants"]:
        table.add_row(*map(escape, _cells(one)))
    stdout().print(table)
    for line in _lines(said):
        click.echo(line)


def _cells(one: dict[str, Any]) -> Iterator[str]:
    from clustersim.calibrated import unit_of
    from clustersim.units import format_bandwidth, format_bytes, format_time

    formats: dict[str, Callable[[float], str]] = {"s": format_time, "B/s": format_bandwidth, "B": format_bytes}
    show = formats.get(unit_of(one["part"], one["name"]), "{:.3g}".format)
    yield from (one["part"], one["name"], show(one["default"]))
    if one["refused"]:
        yield from ("", "", one["refused"])
    else:
        yield from (show(one["value"]), f"{show(one['low'])} to {show(one['high'])}", "")


def _lines(said: dict[str, Any]) -> Iterator[str]:
    for part, error in said["errors"].items():
        before, after = error["before"], error["after"]
        yield f"{part}: {error['rows']} rows, median |error| {before:.1%} before and {after:.1%} after"
    if said["gloo_held_out"] is not None:
        noise = said["noise"]
        beside = f"; repeats of a row differ by {noise:.1%}" if noise == noise else ""
        held_out = f"median |error| {said['gloo_held_out']:.1%}{beside}"
        yield f"gloo, half of the sizes fitted and the rest predicted: {held_out}"
