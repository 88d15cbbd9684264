"""``clustersim run``: a scenario's outcome."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustersim.cli.common import json_option, print_json, rank_words, set_option, stdout, to_json, working
from clustersim.paths import fresh, output_folder

if TYPE_CHECKING:
    from rich.console import Console

    from clustersim.scenario.running import Result


@click.command(short_help="Simulate a scenario.")
@click.argument("scenario")
@set_option
@click.option(
    "--out", type=click.Path(path_type=Path), default=None, help="Folder for run.npz, result.json, trace and picture."
)
@click.option(
    "--report", "page", type=click.Path(path_type=Path), default=None, help="HTML page that says why; one file."
)
@json_option
def run(scenario: str, changes: tuple[str, ...], out: Path | None, page: Path | None, as_json: bool) -> None:
    """Simulate a scenario: SCENARIO is a .toml file or the name of a shipped one."""
    from clustersim import scenario as scenarios

    loaded = scenarios.load(scenario, scenarios.parse_overrides(changes))
    with working(f"simulating {loaded.name}") as progress:
        result = loaded.run(progress)
    traced: tuple[int, ...] = ()
    if out is not None:
        with working(f"writing {out}"):
            traced = _write(result, out)
    if page is not None:
        with working(f"writing {page}"):
            _report(result, page)
    if as_json:
        print_json(result.to_dict())
    else:
        _print(result, out, page, traced)


def _write(result: Result, out: Path) -> tuple[int, ...]:
    """Returns the ranks whose spans are in the trace."""
    from clustersim import plots
    from clustersim.traces import perfetto
    from clustersim.traces.saved import SavedRun

    with output_folder(out):
        with fresh(out / "run.npz") as path:
            result.save(path)
        with fresh(out / "result.json") as path:
            path.write_bytes(to_json(result.to_dict()))
        with fresh(out / "trace.json.gz") as path:
            saved = SavedRun(result.timeline, result.prepared.topology, result.facts())
            chosen = plots.worth_a_trace(result.timeline)
            written = perfetto.write_chrome_trace(result.timeline, path, chosen, saved.memory)
        with fresh(out / "gantt.png") as path:
            plots.save(plots.gantt(result.timeline, title=result.scenario.title), path)
    return written


def _report(result: Result, page: Path) -> None:
    from clustersim.report import write_report
    from clustersim.traces.saved import SavedRun

    write_report(SavedRun(result.timeline, result.prepared.topology, result.facts()), page)


ROWS = (
    ("step time", "step_time_s", "time"),
    ("samples per second", "samples_per_s", "number"),
    ("tokens per second and GPU", "tokens_per_s_per_gpu", "number"),
    ("MFU", "mfu", "percent"),
    ("HFU", "hfu", "percent"),
    ("compute", "compute_s", "time"),
    ("communication", "communication_s", "time"),
    ("exposed transfer", "exposed_transfer_s", "time"),
    ("waiting for a peer", "waiting_for_peer_s", "time"),
    ("bubble", "bubble_s", "time"),
    ("sent per GPU and step", "bytes_sent_per_gpu", "bytes"),
    ("peak memory per GPU", "peak_memory_bytes", "bytes"),
)


def _print(result: Result, out: Path | None, page: Path | None, traced: tuple[int, ...]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from clustersim.cli.split_tables import print_dimensions, print_where
    from clustersim.cli.strategy_lines import lines
    from clustersim.scenario.ran import ran, trust_words

    values = result.to_dict()
    table = Table(title=escape(result.scenario.title), show_header=False, title_justify="left", min_width=60)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for label, key, unit in ROWS:
        if values.get(key) is not None:
            table.add_row(label, _text(values[key], unit))
    console = stdout()
    for what, words in ran(result.prepared):
        console.print(f"{what:9s} {escape(words)}", soft_wrap=True)
    console.print(table)
    console.print(f"trust: {trust_words(values['trust'])}", soft_wrap=True)
    print_where(console, result.where)
    if result.where:
        print_dimensions(console, result.where[0], values["volume_by_dimension"])
    _print_volume(console, values["volume"])
    _print_links(console, values.get("hottest_links") or [])
    for line in lines(values["of_strategy"]):
        console.print(escape(line), soft_wrap=True)
    if not values["fits"]:
        text = f"{values['memory']['message']}; timed as if the memory were there"
        console.print(escape(text), style="bold red", soft_wrap=True)
    for note in values["notes"]:
        console.print(f"- {escape(note)}", soft_wrap=True)
    if out is not None:
        trace = f"trace.json.gz ({rank_words(traced, result.timeline.world_size)}; open it at ui.perfetto.dev)"
        files = f"result.json, gantt.png, {trace} and run.npz (`clustersim report`)"
        console.print(f"wrote {out}/{files}", markup=False, soft_wrap=True)
    if page is not None:
        console.print(f"wrote {page}", markup=False, soft_wrap=True)


def _print_volume(console: Console, volume: dict[str, list[Any]]) -> None:
    """A row per sort of op; all GPUs together."""
    from rich.markup import escape
    from rich.table import Table

    if not volume["op"]:
        return
    table = Table(title="moved in a step, all GPUs together", title_justify="left", min_width=60)
    table.add_column("op", style="bold")
    kinds = [name for name in volume if name.startswith("link_")]
    for name in ("count", "sent", "received", *(f"on {kind.removeprefix('link_')} links" for kind in kinds)):
        table.add_column(name, justify="right")
    for i, name in enumerate(volume["op"]):
        moved = (_text(volume[column][i], "bytes") for column in ("sent", "received", *kinds))
        table.add_row(escape(name), f"{volume['count'][i]:,.0f}", *moved)
    console.print(table)


def _print_links(console: Console, links: list[dict[str, Any]]) -> None:
    from rich.markup import escape

    for link in links[:3]:
        used, moved = _text(link["utilisation"], "percent"), _text(link["bytes"], "bytes")
        console.print(f"busy link: {escape(link['link'])}, {used} of its line rate ({moved})")


def _text(value: float, unit: str) -> str:
    from clustersim.units import format_bytes, format_time

    if unit == "time":
        return format_time(value)
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:.1%}" if unit == "percent" else f"{value:,.1f}"
