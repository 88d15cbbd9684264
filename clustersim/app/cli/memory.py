"""``clustersim memory``: who keeps what on a GPU, when it is fullest, and the largest micro-batch that fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from clustersim.app.cli.common import json_option, label_of, option_option, print_json, set_option, working
from clustersim.app.cli.tables import number_table, stdout
from clustersim.core.memory_parts import part_label, stage_columns, variant_columns
from clustersim.core.memory_states import IN_CELLS, in_cell, likelihood, verdict_of, worded
from clustersim.core.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from clustersim.core.host_memory import HostMemory
    from clustersim.studies.what_if.memory_table import MemoryRow, RefusedStrategy


@click.command(short_help="Say what fills a GPU's memory, and what would fit.")
@click.argument("scenario")
@click.option("--all", "every", is_flag=True, help="Compare every strategy, or every way to split the model.")
@set_option
@option_option
@json_option
def memory(scenario: str, every: bool, changes: tuple[str, ...], place: int | None, as_json: bool) -> None:
    """Print the bytes of one GPU by part for SCENARIO, a .toml file, the name of a shipped one, or the folder of a
    plan.

    Bytes are what the framework's allocator holds; the driver's context is a part of its own.
    """
    from clustersim.app.cli.named import named_scenario
    from clustersim.scenario import parse_overrides
    from clustersim.scenario.run.parts import left_out
    from clustersim.studies.what_if.memory_table import MemoryRow, table

    with working(f"adding up the memory of {scenario}"):
        chosen, _ = named_scenario(scenario, parse_overrides(changes), place)
        rows = table(chosen, every=every)
    if as_json:
        print_json({"scenario": scenario, "rows": msgspec.to_builtins(rows)})
    elif isinstance(own := rows[0], MemoryRow) and not every:
        _print_one(scenario, own)
    else:
        _print_all(scenario, rows)
    if not as_json:
        click.echo("".join(f"- {note}\n" for note in left_out(chosen)), nl=False)


def _print_one(scenario: str, row: MemoryRow) -> None:
    console = stdout()
    if len(row.stages) > 1:
        console.print(_by_stage(scenario, row))
        console.print("- optim: states and fp32 masters; F m.c, B m.c: forward, backward of micro-batch m on chunk c")
        console.print(f"- memory: {IN_CELLS}")
    else:
        console.print(_by_part(scenario, row))
    stage_text = f"stage {row.stage}, which holds most, " if len(row.stages) > 1 else ""
    share = likelihood(row.needed_range_bytes, row.needed_bytes, row.device_bytes)
    of_device = verdict_of(row.total_bytes, row.device_bytes, share)
    verdict_text = worded(of_device, row.needed_range_bytes, row.needed_bytes, row.device_bytes)
    texts = [f"{stage_text}{verdict_text} on {row.device} ({format_bytes(row.device_bytes)})", row.host.in_words]
    console.say(*filter(None, texts[::-1] if row.host.lacks_room else texts))
    needed = _about(row.needed_bytes, row.needed_range_bytes)
    reserved = _about(row.reserved_bytes, row.reserved_range_bytes)
    shown = _about(row.shown_bytes, row.shown_range_bytes)
    console.say(f"a step cannot do without about {needed}, fragments and libraries with it")
    console.say(f"the allocator reserves about {reserved}")
    console.say(f"{row.smi} shows about {shown}")
    console.print(f"largest micro-batch that fits: {_largest_text(row)}")
    if row.trained_parameters < row.parameters:
        console.say(f"{row.trained_parameters:,} of {row.parameters:,} parameters are trained")


def _largest_text(row: MemoryRow) -> str:
    """The largest micro-batch that fits, by the rule of the verdict; and where none does, the largest that may."""
    if row.largest_micro_batch or not row.largest_that_may_fit:
        return str(row.largest_micro_batch or "none")
    return f"none surely; {row.largest_that_may_fit} may run out, and may not"


def _largest_cell(row: MemoryRow) -> str:
    """The same in a table."""
    if row.largest_micro_batch or not row.largest_that_may_fit:
        return str(row.largest_micro_batch or "none")
    return f"maybe {row.largest_that_may_fit}"


def _about(middle: float, between: tuple[float, float]) -> str:
    """A size with its range."""
    return f"{format_bytes(middle)} ({format_bytes(between[0])} to {format_bytes(between[1])})"


def _by_part(scenario: str, row: MemoryRow) -> Table:
    """Each part of one GPU, at its own largest and at the one moment when all of them are most."""
    rows = (
        (part_label(name), format_bytes(nbytes), format_bytes(row.at_peak[name]))
        for name, nbytes in row.largest.items()
        if nbytes
    )
    table = number_table(f"memory of one GPU: {scenario}", ("part", "largest", f"at the peak ({row.peak})"), rows)
    table.add_section()
    table.add_row("total", "", format_bytes(row.total_bytes))
    return table


def _by_stage(scenario: str, row: MemoryRow) -> Table:
    """A line for each stage, at its own fullest moment: the parts add up to the total."""
    from rich.markup import escape
    from rich.table import Table

    stages = row.stages
    columns = {
        name: [sum(stage.at_peak[part] for part in parts) for stage in stages]
        for name, parts in stage_columns().items()
    }
    columns = {name: column for name, column in columns.items() if any(column)}
    title = f"memory of one GPU by stage, each at its own peak [GiB]: {escape(scenario)}"
    table = Table(title=title, title_justify="left")
    for name in ("stage", *columns, "total", "peak at", "memory"):
        table.add_column(name, justify="left" if name in {"peak at", "memory"} else "right", no_wrap=True)
    for i, stage in enumerate(stages):
        cells = [f"{column[i] / 2**30:.2f}" for column in columns.values()]
        fits = in_cell(stage.verdict, stage.runs_out)
        style = "bold" if i == row.stage else None
        table.add_row(str(i), *cells, f"{stage.total_bytes / 2**30:.2f}", stage.peak, fits, style=style)
    return table


def _cells(row: MemoryRow | RefusedStrategy, parts: list[str], *, on_the_host: bool) -> list[str]:
    from clustersim.studies.what_if.memory_table import RefusedStrategy

    if isinstance(row, RefusedStrategy):
        return [*[""] * (4 + len(parts) + on_the_host), "-", ""]
    states, *part_cells, total = (
        f"{nbytes / 2**30:.2f}"
        for nbytes in (row.model_states_bytes, *(row.largest[part] for part in parts), row.total_bytes)
    )
    saving = f"{row.saving:.1f}x" if row.saving else ""
    fits = in_cell(row.verdict, row.runs_out)
    state_bytes = f"{row.bytes_per_parameter:.0f}"
    host = [_host_cell(row.host)] if on_the_host else []
    return [state_bytes, states, saving, *part_cells, total, *host, fits, _largest_cell(row)]


def _host_cell(host: HostMemory) -> str:
    """What a node's host is asked for with buffers, of what it has; empty where nothing is on it."""
    if not host.kept_bytes:
        return ""
    room_text = "?" if host.room_bytes is None else f"{host.room_bytes / 2**30:.0f}"
    return f"{host.likely_bytes / 2**30:.0f} of {room_text}"


def _print_all(scenario: str, rows: list[MemoryRow | RefusedStrategy]) -> None:
    from clustersim.studies.what_if.memory_table import MemoryRow

    memory_rows = [row for row in rows if isinstance(row, MemoryRow)]
    split = bool(memory_rows[0].stages)
    whose = "the fullest GPU" if split else "one GPU"
    parts = {name: part for name, part in variant_columns().items() if any(row.largest[part] for row in memory_rows)}
    heads = ("split" if split else "strategy", "B/param", "states", "saving", *parts, "peak")
    on_the_host = any(row.host.kept_bytes for row in memory_rows)
    heads = (*heads, *(("host",) if on_the_host else ()), "memory", "most\nsamples")
    labels = [label_of(row.strategy, row.variant, split=split) for row in rows]
    cells = (
        [label, *_cells(row, list(parts.values()), on_the_host=on_the_host)]
        for label, row in zip(labels, rows, strict=True)
    )
    console = stdout()
    console.print(number_table(f"memory of {whose} [GiB]: {scenario}", heads, cells))
    console.print(
        "- B/param: bytes a parameter of these states, unsplit: rows compare where it is the same\n"
        "- states: parameters, gradients and optimizer states; gather: parameters gathered; bucket: of gradients on "
        f"their way; memory: {IN_CELLS}; most samples: the largest micro-batch that fits"
        + ("; host: asked of the memory of a node, buffers included, of what it has (?: no file says)" * on_the_host)
    )
    console.say(*(f"- {label}: {row.reason}" for label, row in zip(labels, rows, strict=True) if row.reason))
