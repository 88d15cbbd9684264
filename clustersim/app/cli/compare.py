"""``clustersim compare-strategies``: one table of every strategy on a scenario's machine and model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from clustersim.app.cli.common import json_option, label_of, print_json, set_option, working
from clustersim.app.cli.tables import number_table, stdout
from clustersim.core.memory_states import IN_CELLS, in_cell
from clustersim.core.units import format_bytes, format_time

if TYPE_CHECKING:
    from clustersim.studies.what_if.comparison import ComparisonRow


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
    from clustersim.studies.what_if.comparison import compare

    with working(f"comparing strategies on {scenario}") as progress:
        rows = compare(scenario, scenarios.parse_overrides(changes), progress)
    if as_json:
        print_json({"scenario": scenario, "rows": msgspec.to_builtins(rows)})
    else:
        _print(scenario, rows, split=len({row.strategy for row in rows}) == 1)


def _print(scenario: str, rows: list[ComparisonRow], *, split: bool) -> None:
    """Ways to split have a bubble, and their samples a second are said by the step: it has the same samples in all."""
    first, second = ("split", "bubble") if split else ("strategy", "samples/s")
    heads = (
        first,
        "step time",
        second,
        "exposed transfer",
        "waiting",
        "B/param",
        "peak memory",
        "sent per GPU and step",
        "memory",
    )
    console = stdout()
    title = f"{'ways to split' if split else 'strategies on'} {scenario}"
    named = [(label_of(row.strategy, row.variant, split=split), row) for row in rows]
    console.print(number_table(title, heads, ([name, *_cells(row, split=split)] for name, row in named)))
    console.say("- B/param: bytes a parameter of model states, unsplit: rows compare where it is the same")
    console.say(f"- memory: {IN_CELLS}")
    console.say(*_unlike_gradients(named))
    console.say(*_fewer_steps(rows))
    console.say(*(f"- {name}: {row.reason}" for name, row in named if row.reason))


def _unlike_gradients(named: Sequence[tuple[str, ComparisonRow]]) -> Iterator[str]:
    """Which rows send gradients in which dtype, where they differ: DeepSpeed's travel as its parameters are."""
    rows_of: dict[str, list[str]] = {}
    for name, row in named:
        if row.gradients_in is not None and row.bytes_sent_per_gpu:
            rows_of.setdefault(row.gradients_in, []).append(name)
    if len(rows_of) > 1:
        parts = "; ".join(f"{dtype} of {', '.join(names)}" for dtype, names in rows_of.items())
        yield f"- gradients travel in {parts}: half the bytes are no merit of the strategy"


def _fewer_steps(rows: Sequence[ComparisonRow]) -> Iterator[str]:
    """Why the scenario's own row may differ from its run in the last digits: steps differ, and fewer are played."""
    for row in rows:
        if row.own and row.steps and row.steps_asked and row.steps < row.steps_asked:
            yield (
                f"- {row.steps} steps are played of each, where `run` plays the scenario's {row.steps_asked}: "
                "steps differ a little (jitter), so that its own row is not to the digit what `run` says"
            )


def _cells(row: ComparisonRow, *, split: bool) -> list[str]:
    if row.verdict is None:
        return [*[""] * 7, "-"]
    step, bubble, exposed, waiting = (
        format_time(seconds or 0.0)
        for seconds in (row.step_time_s, row.bubble_s, row.exposed_transfer_s, row.waiting_for_peer_s)
    )
    memory, sent = (format_bytes(number or 0.0) for number in (row.peak_memory_bytes, row.bytes_sent_per_gpu))
    second = bubble if split else f"{row.samples_per_s:,.1f}"
    state_bytes = "" if row.bytes_per_parameter is None else f"{row.bytes_per_parameter:.0f}"
    return [step, second, exposed, waiting, state_bytes, memory, sent, in_cell(row.verdict, row.runs_out or 0.0)]
