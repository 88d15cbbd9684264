"""``clustersim compare-strategies``: one table of every strategy on a scenario's machine and model."""

from __future__ import annotations

from typing import Any

import click

from clustersim.cli.common import json_option, label_of, number_table, print_json, set_option, stdout, working


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
    heads = ("split" if split else "strategy", "step time", "samples/s", "exposed transfer", "waiting", "peak memory",
             "sent per GPU and step", "fits")  # fmt: skip
    console = stdout()
    title = f"{'ways to split' if split else 'strategies on'} {scenario}"
    console.print(number_table(title, heads, ([label_of(row, split=split), *_cells(row)] for row in rows)))
    console.say(*(f"- {label_of(row, split=split)}: {row['reason']}" for row in rows if row["reason"]))


def _cells(row: dict[str, Any]) -> list[str]:
    from clustersim.units import format_bytes, format_time

    if row["step_time_s"] is None:
        return [*[""] * 6, "-"]
    step, exposed, waiting = (
        format_time(row[name]) for name in ("step_time_s", "exposed_transfer_s", "waiting_for_peer_s")
    )
    memory, sent = (format_bytes(row[name]) for name in ("peak_memory_bytes", "bytes_sent_per_gpu"))
    return [step, f"{row['samples_per_s']:,.1f}", exposed, waiting, memory, sent, "yes" if row["fits"] else "no"]
