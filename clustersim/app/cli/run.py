"""``clustersim run``: a scenario's outcome."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import (
    OUT_FILE,
    OUT_FOLDER,
    json_option,
    option_option,
    print_json,
    rank_list,
    rank_words,
    set_option,
    working,
)
from clustersim.app.cli.tables import number_table, stdout
from clustersim.core.errors import ClusterSimError
from clustersim.core.outputs import Folder
from clustersim.core.paths import RUN_FILE, json_text
from clustersim.core.units import format_bytes, format_time

if TYPE_CHECKING:
    from clustersim.app.cli.fitting import Terminal
    from clustersim.core.arrays import Columns
    from clustersim.core.outputs import Folder
    from clustersim.core.topology import Topology
    from clustersim.explain.where import StageSeconds
    from clustersim.scenario import Scenario
    from clustersim.scenario.result import Result

FILES = (RUN_FILE, "result.json", "trace.json.gz", "gantt.png", "waterfall.png")
"""What a run leaves in its folder."""
ALL = "all"
"""What --trace-ranks calls every rank."""
LEAST = 5e-4
"""Shares of a step below this are no column of where it goes."""


@click.command(short_help="Simulate a scenario.")
@click.argument("scenario")
@set_option
@option_option
@click.option("--gpu", help="Another GPU in the same sockets: a shipped one, or a file (clustersim new device).")
@click.option("--out", type=OUT_FOLDER, help="Folder for run.npz, result.json, trace and picture.")
@click.option("--report", "page", type=OUT_FILE, help="Write an HTML page, one file, that says why.")
@click.option(
    "--trace-ranks",
    "wanted",
    metavar="all|0-7,12",
    help="Ranks in the trace of --out.  [as many as a viewer opens at ease]",
)
@json_option
def run(
    scenario: str,
    changes: tuple[str, ...],
    place: int | None,
    gpu: str | None,
    out: Path | None,
    page: Path | None,
    wanted: str | None,
    as_json: bool,
) -> None:
    """Simulate a scenario: SCENARIO is a .toml file, the name of a shipped one, or the folder of a plan."""
    from clustersim import scenario as scenarios
    from clustersim.app.cli.named import named_scenario
    from clustersim.scenario.file.reading import OptionKey

    if wanted is not None and out is None:
        raise click.UsageError("--trace-ranks says what the trace of --out holds: name a folder with --out")
    ranks = rank_list((wanted,), "--trace-ranks") if wanted not in {None, ALL} else None
    overrides = scenarios.parse_overrides(changes) | ({} if gpu is None else {OptionKey("cluster.device"): gpu})
    loaded, _ = named_scenario(scenario, overrides, place)
    if any(incident.hangs for incident in loaded.file.incident):
        _say_hang(loaded, as_json, out, page)
        return
    folder = None if out is None else _folder(loaded, out)
    with working(f"simulating {loaded.name}", f"summing up {loaded.name}") as progress:
        result = loaded.run(progress)
        document = {"verdict": result.in_words, **result.to_dict()}
    traced: tuple[int, ...] = ()
    if folder is not None:
        with working(f"writing {out}") as progress:
            chosen = range(result.timeline.world_size) if wanted == ALL else ranks
            traced = _write(result, json_text(document), folder, chosen, progress.name)
    if page is not None:
        with working(f"writing {page}"):
            result.report(page)
    if as_json:
        print_json(document)
    else:
        _print(result, out, page, traced)


def _say_hang(scenario: Scenario, as_json: bool, out: Path | None, page: Path | None) -> None:
    """Who waits for whom. Raises :class:`ClusterSimError` where files of a whole run are asked for."""
    import msgspec

    if out is not None or page is not None:
        raise ClusterSimError("an incident hangs this run, which has no step to write; leave --out and --report away")
    with working(f"simulating {scenario.name}"):
        hang = scenario.hang()
    if hang is None:
        return
    if as_json:
        print_json({"hang": msgspec.to_builtins(hang) | {"detected": hang.detected, "lost": hang.lost}})
    else:
        stdout().say(*hang.lines())


def _folder(scenario: Scenario, out: Path) -> Folder:
    """Where the run goes: checked before it begins. Raises :class:`ClusterSimError`."""
    from clustersim.scenario.run.identity import Fingerprints

    fingerprint = Fingerprints()(scenario)
    folder = Folder(out, "run", scenario.title, FILES, (fingerprint.inputs, fingerprint.files))
    folder.check()
    return folder


def _write(
    result: Result, document: bytes, folder: Folder, ranks: Sequence[int] | None, doing: Callable[[str], None]
) -> tuple[int, ...]:
    """Returns the ranks whose spans are in the trace: these, or for None those worth a look. ``doing`` : told which
    file is being written."""
    from clustersim.files import chrome_trace
    from clustersim.files.slices import worth_a_trace

    with folder.files() as path_of:
        doing(f"writing {folder.path / RUN_FILE}")
        result.save(path_of(RUN_FILE))
        path_of("result.json").write_bytes(document)
        doing(f"writing {folder.path / 'trace.json.gz'}")
        chosen = worth_a_trace(result.timeline) if ranks is None else ranks
        written = chrome_trace.write_chrome_trace(
            result.timeline, path_of("trace.json.gz"), chosen, result.saved.memory
        )
        for kind in ("gantt", "waterfall"):
            doing(f"drawing {folder.path / kind}.png")
            result.draw(kind, path_of(f"{kind}.png"))
    return written


def _print(result: Result, out: Path | None, page: Path | None, traced: tuple[int, ...]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from clustersim.core.figures import in_words
    from clustersim.explain.mixture import mixture
    from clustersim.scenario.result.trust import trust
    from clustersim.scenario.run.head import head_lines

    table = Table(title=escape(result.scenario.title), show_header=False, title_justify="left", min_width=60)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for row in in_words(result.figures, "run"):
        table.add_row(*row)
    console = stdout()
    console.say(*(f"{label:9s} {text}" for label, text in (*head_lines(result.prepared), ("verdict", result.in_words))))
    console.print(table)
    if not result.verdict.possible:
        console.say(f"{result.verdict}; timed as if the memory were there", style="bold red")
    elif result.verdict.uncertain:
        console.say(f"{result.verdict}", style="yellow")
    elif result.prepared.host.kept_bytes:
        console.say(result.prepared.host.in_words)
    console.say(f"trust: {trust(result.prepared)}")
    _print_where(console, result.where)
    if result.where:
        _print_dimensions(console, result.where[0], result.volume_by_dimension)
    if (experts := mixture(result.timeline, result.facts())) is not None:
        console.say(experts.headed)
    _print_volume(console, result.volume)
    _print_links(console, result.summary["hottest_links"], result.prepared.topology)
    console.say(*(result.of_strategy.lines() if result.of_strategy else ()), *(f"- {note}" for note in result.notes))
    if out is not None:
        trace = f"trace.json.gz ({rank_words(traced, result.timeline.world_size)}; open it at ui.perfetto.dev)"
        files = f"result.json, gantt.png, waterfall.png, {trace} and run.npz (`clustersim report`)"
        console.say(f"wrote {out}/{files}")
    if page is not None:
        console.say(f"wrote {page}")


def _print_volume(console: Terminal, volume: Columns) -> None:
    """A row per sort of op; all GPUs together."""
    from clustersim.core.figures import value_text

    if not len(volume["op"]):
        return
    kinds = [name for name in volume if name.startswith("link_")]
    heads = ("op", "calls a rank", "sent", "received", *(f"on {kind.removeprefix('link_')} links" for kind in kinds))
    rows = []
    for i, name in enumerate(volume["op"].tolist()):
        moved = (value_text(volume[column][i], "bytes") for column in ("sent", "received", *kinds))
        rows.append([name, _calls(float(volume["count"][i])), *moved])
    console.print(number_table("moved in a step, all GPUs together", heads, rows, min_width=60))


def _calls(count: float) -> str:
    """How often a rank calls it, in the mean over ranks that differ.

    >>> _calls(1888.0), _calls(0.25), _calls(112.5)
    ('1,888', '0.25', '112.5')
    """
    return f"{count:,.0f}" if abs(count - round(count)) < 1e-9 else f"{count:,.4g}" if count < 1000 else f"{count:,.1f}"


def _print_links(console: Terminal, links: list[tuple[str, float, float]], topology: Topology) -> None:
    """``links`` : (name, utilisation, bytes a step), busiest first."""
    from rich.markup import escape

    from clustersim.core.figures import value_text

    like: dict[tuple[frozenset[str], str], list[tuple[str, float]]] = {}
    for name, used, moved in links:  # both directions of a cable, and links that differ by a number, are told once
        ends = frozenset(re.sub(r"\d+", "#", name).split(" -> "))
        share_text = f"{value_text(used, 'percent')} of {topology.rate_words_named(name)}"
        like.setdefault((ends, share_text), []).append((name, moved))
    for (_, share), alike in list(like.items())[:3]:
        (name, moved), alike_text = alike[0], " and others like it" if len(alike) > 1 else ""
        console.print(f"busy link: {escape(name)}{alike_text}, {share} ({value_text(moved, 'bytes')} a step)")


def _print_where(console: Terminal, rows: Sequence[StageSeconds]) -> None:
    """A row per stage, shares of the step; groups first, then the bubble's parts that are there at all."""
    from clustersim.explain.where import BUBBLES, WORDS

    if len(rows) < 2:
        return
    groups = [key for key in WORDS if max(row.groups[key] for row in rows) >= LEAST * rows[0].step]
    parts = [name for name in BUBBLES if max(row.bubble.get(name, 0.0) for row in rows) >= LEAST * rows[0].step]
    cells = []
    for row in (*rows[1:], rows[0]):
        values = *(row.groups[key] for key in groups), *(row.bubble.get(name, 0.0) for name in parts)
        cells.append(["all" if row.stage < 0 else str(row.stage), *(f"{100 * v / row.step:.1f}" for v in values)])
    title = "where a step goes, % of it; the bubble's parts to the right"
    console.print(number_table(title, ("stage", *(WORDS[key] for key in groups), *parts), cells))


def _print_dimensions(console: Terminal, row: StageSeconds, moved: Columns) -> None:
    """A row per dimension: what its transfers cost, and what they move."""
    names = [str(name) for name in moved["dimension"]]
    if not names:
        return
    kinds = [name for name in moved if name.startswith("link_")]
    heads = ("over", "exposed transfer", "waiting for a peer", "sent")
    links = (f"on {kind.removeprefix('link_')} links" for kind in kinds)
    cells = []
    for i, name in enumerate(names):
        times = (format_time(seconds.get(name, 0.0)) for seconds in (row.exposed, row.waiting))
        cells.append([name, *times, *(format_bytes(moved[column][i]) for column in ("sent_per_gpu", *kinds))])
    title = "by dimension of the mesh, per GPU and step; links: all of a kind"
    console.print(number_table(title, (*heads, *links), cells))
