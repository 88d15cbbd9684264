"""What ``clustersim replay`` prints: what was measured beside what was simulated, and of which size each is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.tables import number_table, stdout
from clustersim.core.units import format_bytes, format_time

if TYPE_CHECKING:
    from rich.table import Table

    from clustersim.studies.replay.trace_replay import Collectives, ReplayedTrace

STEPS = 8
"""Steps to print one by one."""


def print_replay(result: ReplayedTrace, backend: str, own: ReplayedTrace | str | None) -> None:
    """Tables and notes of a replay.

    own : of a replay that differs from the trace, the trace as it was, played on the same sort of machine, or why it
        cannot be played; None where nothing differs.
    """
    console = stdout()
    if own is None:
        console.print(_as_measured(result, backend))
    else:
        console.print(_changed(result, backend, own))
        for line in _off_by(result, own):
            console.say(line)
    if result.slowdown is not None:
        click.echo(f"stragglers: a step takes {result.slowdown:.2f} x as long as with all passes of a kind alike")
    if result.collectives:
        console.print(_collectives(result) if own is None else _collectives_changed(result, own))
    if any(row.waiting_included for row in result.collectives):
        console.print("<=: waiting for peers included; the trace does not hold every rank of the group")
    console.say(*(f"- {note}" for note in result.notes))


def _where(result: ReplayedTrace, backend: str) -> str:
    return result.where if result.free else f"{result.machines} x {result.where}, {backend}"


def _as_measured(result: ReplayedTrace, backend: str) -> Table:
    """Measured beside simulated, of the same ranks."""
    heads = ("mean over ranks", "measured", "simulated", "difference")
    title = f"replay: {result.program.world_size} ranks on {_where(result, backend)}"
    rows, steps = _seconds(result)
    table = number_table(title, heads, ((word, *_pair(*pair)) for word, pair in rows))
    table.add_section()
    for word, pair in steps:
        table.add_row(word, *_pair(*pair))
    for stage in result.stages:
        table.add_row(
            f"stage {stage.stage} idle, share of a step",
            f"{stage.measured:.1%}",
            f"{stage.simulated:.1%}",
            f"{100 * (stage.simulated - stage.measured):+.1f} points",
        )
    return table


Seconds = list[tuple[str, tuple[float, float]]]
"""Words, and what was measured and simulated [s]."""


def _seconds(result: ReplayedTrace) -> tuple[Seconds, Seconds]:
    """The totals, and the steps."""
    from clustersim.studies.replay.trace_replay import TOTALS

    totals = [(word, result.totals[key]) for key, word in TOTALS.items()]
    steps: Seconds = []
    several = len(result.steps.steps) > 1
    if several:
        rows = zip(result.steps.steps, result.steps.measured, result.steps.simulated, strict=True)
        steps = [(f"step {step}", (seen, played)) for step, seen, played in list(rows)[:STEPS]]
    if several or any(op.step for op in result.measured.ops):  # else it is the whole trace once more
        steps.append((f"step time, median of {len(result.steps.steps)}", result.steps.medians()))
    return totals, steps


def _changed(result: ReplayedTrace, backend: str, own: ReplayedTrace | str) -> Table:
    """Measured and simulated of the trace's own size, then what was asked for, beside the simulated one."""
    was = result.measured.world_size
    now = result.program.world_size
    title = f"replay: {now} ranks on {_where(result, backend)}, from a trace of {was}"
    heads = (
        "mean over measured ranks",
        f"measured, {was} ranks",
        f"simulated, {was} ranks",
        "off by",
        f"simulated, {now} ranks{' and changed' if now == was else ''}",
        "change, both simulated",
    )
    groups = _seconds(result)
    plain = (None, None) if isinstance(own, str) else _seconds(own)
    table = number_table(title, heads, ())
    for rows, own_rows in zip(groups, plain, strict=True):
        table.add_section()
        for i, (word, (seen, played)) in enumerate(rows):
            before = None if own_rows is None else own_rows[i][1][1]
            table.add_row(word, *_five(seen, before, played))
    for i, stage in enumerate(result.stages):
        at_own = None if isinstance(own, str) else own.stages[i].simulated
        off, change = (
            "-" if at_own is None else f"{100 * (a - b):+.1f} points"
            for a, b in ((at_own or 0.0, stage.measured), (stage.simulated, at_own or 0.0))
        )
        before_text = "-" if at_own is None else f"{at_own:.1%}"
        table.add_row(
            f"stage {stage.stage} idle, share of a step",
            f"{stage.measured:.1%}",
            before_text,
            off,
            f"{stage.simulated:.1%}",
            change,
        )
    return table


def _five(seen: float, before: float | None, played: float) -> tuple[str, ...]:
    """Cells: measured, simulated at its size, how far that is off, simulated as asked, and its change [s]."""
    if before is None:
        return format_time(seen), "-", "-", format_time(played), "-"
    _, before_text, off = _pair(seen, before)
    return format_time(seen), before_text, off, *_pair(before, played)[1:]


FAR = 0.1
"""Share by which a step may be off at its own size without a word on what that does to the answer."""


def _off_by(result: ReplayedTrace, own: ReplayedTrace | str) -> Iterator[str]:
    """How far the model is off where it can be checked, and what was asked for with that in mind."""
    was = result.measured.world_size
    if isinstance(own, str):
        yield f"how far the model is off is not known: the trace's own {was} ranks were not played here ({own})"
        return
    seen, before = own.steps.medians()
    played = result.steps.medians()[1]
    if not (seen > 0 and before > 0):
        return
    now = result.program.world_size
    size_words = f"{now} ranks" if now != was else "the changed run"
    yield (
        f"at the trace's own size ({was} ranks) {format_time(before)} are simulated where {format_time(seen)} were "
        f"measured: {before / seen:.2f} x; {size_words}: {played / before:.2f} x of that, both simulated"
    )
    if abs(before / seen - 1) > FAR:
        yield (
            f"warning: off by {before / seen - 1:+.0%} where it can be checked, so {format_time(played)} is no time to "
            "plan with: compare simulated with simulated, and fit the network to your own (clustersim calibrate)"
        )


CollectiveKey = tuple[str, float, str, int]


def _key(row: Collectives) -> CollectiveKey:
    return row.kind, row.nbytes, row.dtype, row.group_size


def _collectives(result: ReplayedTrace) -> Table:
    heads = ("collective", "size", "type", "ranks", "count", "measured", "simulated", "difference")
    rows = []
    for row in result.collectives:
        seen, played, difference = _pair(row.measured_s, row.simulated_s)
        facts = row.kind, format_bytes(row.nbytes), row.dtype or "-", str(row.group_size), str(row.count)
        rows.append((*facts, f"<={seen}" if row.waiting_included else seen, played, difference))
    return number_table("collectives, median transfer time", heads, rows)


def _collectives_changed(result: ReplayedTrace, own: ReplayedTrace | str) -> Table:
    """Each kind among the ranks that were measured, and among those that it has in what was asked for."""
    heads = ("collective", "size", "type", "count", "ranks", "measured", "simulated", "ranks", "simulated")
    before = {} if isinstance(own, str) else {_key(row): row.simulated_s for row in own.collectives}
    rows = []
    for row in result.collectives:
        seen = f"{'<=' if row.waiting_included else ''}{format_time(row.measured_s)}"
        plain = before.get(_key(row))
        rows.append(
            (
                row.kind,
                format_bytes(row.nbytes),
                row.dtype or "-",
                str(row.count),
                str(row.group_size),
                seen,
                "-" if plain is None else format_time(plain),
                str(row.ranks_played),
                format_time(row.simulated_s),
            )
        )
    title = "collectives, median transfer time: of the trace's ranks, then of those asked for"
    return number_table(title, heads, rows)


def _pair(measured: float, simulated: float) -> tuple[str, str, str]:
    difference = f"{simulated / measured - 1:+.1%}" if measured > 0 else "-"
    return format_time(measured), format_time(simulated), difference
