"""``clustersim compare-strategies``: one table of every strategy on a scenario's machine and model."""

from __future__ import annotations

from typing import Any

import click

from clustersim.cli.common import json_option, label_of, print_json, set_option, stdout, working


@click.command("compare-strategies", short_help="Run every strategy on a scenario's machine and model.")
@click.argument("scenario")
@set_option
@json_option
def compare_strategies(scenario: str, changes: tuple[str, ...], as_json: bool) -> None:
    """Run every strategy on the machine and model of SCENARIO, a .toml file or the name of a shipped one.

    Batch, accumulation and parameter type are the scenario's own; everything else is each strategy's default. A model
    that [parallel] splits is split in other ways instead: other schedules, other degrees, the same samples in a step.
    """
    from clustersim import scenario as scenarios
    from clustersim.scenario.comparison import compare

    with working(f"comparing strategies on {scenario}") as progress:
        rows = compare(scenario, scenarios.parse_overrides(changes), progress)
    if as_json:
        print_json({"scenario": scenario, "rows": rows})
    else:
        _print(scenario, rows, split=len({row["strategy"] for row in rows}) == 1)


def _print(scenario: str, rows: list[dict[str, Any]], *, split: bool) -> None:
    from rich.markup import escape
    from rich.table import Table

    from clustersim.units import format_bytes, format_time

    table = Table(title=f"{'ways to split' if split else 'strategies on'} {escape(scenario)}", title_justify="left")
    table.add_column("split" if split else "strategy", style="bold")
    for name in (
        "step time",
        "samples/s",
        "exposed transfer",
        "waiting",
        "peak memory",
        "sent per GPU and step",
        "fits",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        label = escape(label_of(row, split=split))
        if row["step_time_s"] is None:
            table.add_row(label, *[""] * 6, "-")
            continue
        table.add_row(
            label,
            format_time(row["step_time_s"]),
            f"{row['samples_per_s']:,.1f}",
            format_time(row["exposed_transfer_s"]),
            format_time(row["waiting_for_peer_s"]),
            format_bytes(row["peak_memory_bytes"]),
            format_bytes(row["bytes_sent_per_gpu"]),
            "yes" if row["fits"] else "no",
        )
    console = stdout()
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.print(f"- {escape(label_of(row, split=split))}: {escape(row['reason'])}", soft_wrap=True)
