"""``clustersim bench``: what it costs here, beside targets and peers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from msgspec import to_builtins

from clustersim.app.cli.common import json_option, print_json, working
from clustersim.app.cli.tables import stdout
from clustersim.core.errors import ClusterSimError, nearest
from clustersim.core.units import format_bytes

if TYPE_CHECKING:
    from clustersim.app.cli.fitting import Terminal
    from tests.evidence.bench import BenchResult, CostFit


@click.command(short_help="Measure clustersim's own cost on this machine.")
@click.option("--repeats", type=click.IntRange(min=1), default=5, help="How often each task is run; the median counts.")
@click.option("--only", multiple=True, metavar="TASK", help="Run only this task, such as ring-1024; may be repeated.")
@click.option("--fit/--no-fit", "fitted", default=True, help="Fit the cost over ranks x ops, up to 16,384 ranks.")
@json_option
def bench(repeats: int, only: tuple[str, ...], fitted: bool, as_json: bool) -> None:
    """Measure what clustersim itself costs on this machine: CPU seconds and peak memory of a process for each task,
    beside its target and what other simulators take for the same work.

    Targets are in units, so that they hold on any machine: a unit is the CPU time of a million bare SimPy timeouts.
    """
    from tests.evidence import bench as benchmarks

    rows = {row.name: row for row in benchmarks.ROWS}
    for name in only:
        if name not in rows:
            raise ClusterSimError(f"no row {name!r}; {nearest(name, rows)}")
    played = []
    with working("measuring") as progress:
        chosen = [rows[name] for name in only or rows]
        for i, row in enumerate(chosen):
            progress(i, len(chosen))
            played.append(benchmarks.play(row, repeats))
    with working("fitting cost over ranks x ops"):
        line = benchmarks.fit() if fitted else None
    if as_json:
        print_json(to_builtins({"rows": played, "repeats": repeats, "fit": line}))
    else:
        _print(stdout(), played, line, repeats)


def _print(console: Terminal, rows: list[BenchResult], line: CostFit | None, repeats: int) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"whole processes, medians of {repeats}", title_justify="left")
    table.add_column("work")
    for name in ("CPU s", "a unit", "units", "target", "memory", "target"):
        table.add_column(name, justify="right")
    table.add_column("peers")
    for row in rows:
        cells = [_seconds(value) for value in (row.seconds, row.unit, row.units, row.target)]
        cells += [_memory(row.memory), _memory(row.target_memory)]
        cells[2] = f"[red]{cells[2]}[/]" if row.units is None or row.units > row.target else cells[2]
        table.add_row(escape(row.work), *cells, escape(row.peer))
    console.print(table)
    console.print("a unit: CPU seconds of a million bare SimPy timeouts, measured before every run")
    console.say(*(f"{row.name}: {row.error}" for row in rows if row.error), style="red")
    compared = [row for row in rows if row.differs and row.peer != "-"]
    console.say(*dict.fromkeys(f"- {row.peer.split(' ')[0]}: {row.differs}" for row in compared))
    if line is None:
        return
    console.print(f"{'ranks':>8} {'ops':>6} {'CPU s':>8}")
    for ranks, ops, seconds in zip(line.ranks, line.ops, line.seconds, strict=True):
        console.print(f"{ranks:8,} {ops:6,} {seconds:8.3f}")
    console.say(
        f"cost = {line.fixed:.2f} s + {line.per_rank_op * 1e9:.0f} ns x ranks x ops (R2 {line.r2:.3f}); "
        f"grows as (ranks x ops)^{line.exponent:.2f} at the end"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 0.1 else f"{value:.1f}"


def _memory(value: float | None) -> str:
    return "-" if value is None else format_bytes(value)
