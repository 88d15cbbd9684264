"""``clustersim memory``: who keeps what on a GPU, when it is fullest, and the largest micro-batch that fits."""

from __future__ import annotations

from typing import Any

import click

from clustersim.cli.common import json_option, print_json, set_option, stdout, working


@click.command(short_help="Say what fills a GPU's memory, and what would fit.")
@click.argument("scenario")
@click.option("--all", "every", is_flag=True, help="Every strategy on the same machine and model, side by side.")
@set_option
@json_option
def memory(scenario: str, every: bool, changes: tuple[str, ...], as_json: bool) -> None:
    """Print the bytes of one GPU by part for SCENARIO, a .toml file or the name of a shipped one.

    Bytes are what the framework's allocator holds; the driver's context is a part of its own.
    """
    from clustersim import scenario as scenarios
    from clustersim.scenario.memory_table import table

    with working(f"adding up the memory of {scenario}"):
        rows = table(scenario, scenarios.parse_overrides(changes), every=every)
    if as_json:
        print_json({"scenario": scenario, "rows": rows})
    elif every:
        _print_all(scenario, rows)
    else:
        _print_one(scenario, rows[0])


def _print_one(scenario: str, row: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from clustersim.units import format_bytes

    table = Table(title=f"memory of one GPU: {escape(scenario)}", title_justify="left")
    for name in ("part", "largest", f"at the peak ({escape(row['peak'])})"):
        table.add_column(name, justify="left" if name == "part" else "right")
    at_peak = row["at_peak"] | {"context": row["total_bytes"] - row["allocated_bytes"]}
    for name, nbytes in row["largest"].items():
        if nbytes:
            table.add_row(name.replace("_", " "), format_bytes(nbytes), format_bytes(at_peak[name]))
    table.add_section()
    table.add_row("total", "", format_bytes(row["total_bytes"]))
    console = stdout()
    console.print(table)
    fits = "fits on" if row["fits"] else "does not fit on"
    console.print(f"{fits} {row['device']} ({format_bytes(row['device_bytes'])})")
    console.print(f"largest micro-batch that fits: {row['largest_micro_batch'] or 'none'}")


def _print_all(scenario: str, rows: list[dict[str, Any]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from clustersim.units import format_bytes

    table = Table(title=f"memory of one GPU: {escape(scenario)}", title_justify="left")
    table.add_column("strategy", style="bold")
    for name in ("model states", "saving", "borrowed", "buffers", "activations", "peak", "fits", "largest micro-batch"):
        table.add_column(name, justify="right")
    for row in rows:
        label = escape(f"{row['strategy']} {row['variant']}".strip())
        if row["reason"]:
            table.add_row(label, *[""] * 6, "-", "")
            continue
        parts = row["largest"]
        table.add_row(
            label,
            format_bytes(row["model_states_bytes"]),
            f"{row['saving']:.1f}x" if row["saving"] else "",
            *(format_bytes(parts[name]) for name in ("gathered", "buckets", "activations")),
            format_bytes(row["total_bytes"]),
            "yes" if row["fits"] else "no",
            str(row["largest_micro_batch"] or "none"),
        )
    stdout().print(table)
