"""``clustersim explain``: why a run took as long as it did, in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustersim.cli.common import json_option, print_json, set_option, working

if TYPE_CHECKING:
    from clustersim.analysis.explain import Explanation, Facts
    from clustersim.analysis.waterfall import Waterfall
    from clustersim.scenario.running import Prepared
    from clustersim.scenario.turned import Turned
    from clustersim.timeline import Timeline


@dataclass(frozen=True, eq=False)
class Loaded:
    """A run by name: its Timeline, what else is known of it, its title; and its parts where it was simulated now."""

    timeline: Timeline
    facts: Facts
    title: str
    prepared: Prepared | None = None


@click.command(short_help="Say why a run took as long as it did.")
@click.argument("run")
@set_option
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="How many causes to print.")
@click.option("--rerun", is_flag=True, help="Run again with each knob changed, however long that takes.")
@json_option
def explain(run: str, changes: tuple[str, ...], top: int, rerun: bool, as_json: bool) -> None:
    """Say why a run took as long as it did.

    RUN is a folder that `clustersim run --out` wrote, a scenario (a .toml file or the name of a shipped one), which is
    simulated first, or a profiler's trace (a file, or a folder with one per rank).
    """
    from clustersim.analysis.explain import explain as explained

    loaded = load(run, changes)
    if rerun and loaded.prepared is None:
        raise click.UsageError("--rerun needs a scenario: this run is over")
    with working(f"explaining {loaded.title}"):
        found = explained(loaded.timeline, loaded.facts, top=top)
    again = _again(loaded, found, rerun)
    otherwise = _otherwise(loaded, rerun)
    idle = _idle_knobs(loaded)
    if as_json:
        print_json(
            {
                "run": loaded.title,
                **found.to_dict(),
                "rerun": again,
                "choices": [one.to_dict() for one in otherwise],
                "idle_knobs": idle,
            }
        )
    else:
        _print(loaded.title, found, [*(one.text for one in otherwise), *_bounds(found, again)], idle)


def load(run: str, changes: tuple[str, ...] = ()) -> Loaded:
    """A run by name; simulates a scenario. Raises :class:`ClusterSimError` for one that cannot be found or read."""
    from clustersim import scenario as scenarios
    from clustersim.analysis.explain import Facts
    from clustersim.errors import TraceError

    path = Path(run)
    if path.is_dir() or (path.is_file() and path.suffix != ".toml"):
        if changes:
            raise TraceError(f"{run}: --set changes a scenario, and this is a run that is over")
        return _over(path)
    loaded = scenarios.load(run, scenarios.parse_overrides(changes))
    with working(f"simulating {loaded.name}") as progress:
        result = loaded.run(progress)
    return Loaded(result.timeline, Facts.of(result.to_dict()), result.scenario.title, result.prepared)


def _over(path: Path) -> Loaded:
    """A run that was saved or measured."""
    from clustersim import traces
    from clustersim.analysis.explain import Facts
    from clustersim.errors import TraceError
    from clustersim.traces.saved import NAME, load_run

    if path.suffix == ".npz" or (path / NAME).is_file():
        run = load_run(path)
        return Loaded(run.timeline, Facts.of(run.facts), str(run.facts.get("title") or path.name))
    read = traces.read(path)
    if isinstance(read, traces.Samples):
        raise TraceError(f"{path}: a benchmark's table has no run to explain; `clustersim trace` tells what it holds")
    return Loaded(read, Facts(), path.name)


def _again(loaded: Loaded, found: Explanation, asked: bool) -> dict[str, float]:
    """Per knob that may matter, the share of the step it saves when the scenario is really run again: where that is
    short, or asked for; then of every knob."""
    from clustersim.scenario.rerun import rerun_saving, step_time
    from clustersim.scenario.turned import short

    table = found.tables["whatif"]
    saved: dict[str, float] = {}
    if loaded.prepared is None or not (asked or short(loaded.timeline)):
        return saved
    now, told = step_time(loaded.timeline), set(found.bounds)
    for knob, factor, text in zip(*(table[name].tolist() for name in ("knob", "factor", "text")), strict=True):
        if text not in told and not asked:
            continue
        with working(f"running again: {knob}"):
            saving = rerun_saving(loaded.prepared, knob, factor, now)
        if saving is not None:
            saved[knob] = saving
    return saved


def _otherwise(loaded: Loaded, asked: bool) -> list[Turned]:
    """Choices of a split model made otherwise: run again where that is short, or asked for."""
    from clustersim.scenario.turned import short, turned

    if loaded.prepared is None or not (asked or short(loaded.timeline)):
        return []
    with working("running again with other choices"):
        return turned(loaded.prepared, loaded.timeline)


def _idle_knobs(loaded: Loaded) -> list[str]:
    """What was changed and made no difference, and why."""
    from clustersim.scenario.idle import idle_knobs

    if loaded.prepared is None or not loaded.prepared.scenario.changes:
        return []
    with working("running without each change"):
        return idle_knobs(loaded.prepared.scenario, loaded.timeline)


def _print(title: str, found: Explanation, whatif: list[str], idle: list[str]) -> None:
    """Sentences on stdout, one a line however long: they are for reading and for searching."""
    click.echo(f"{title}: {found.verdict}")
    click.echo(f"where the time goes: {found.shares}")
    for line in _falls(found.waterfall):
        click.echo(line)
    click.echo(f"ranks: {found.ranks}")
    for i, text in enumerate(found.causes, 1):
        click.echo(f"{i:2d}. {text}")
    for text in found.path:
        click.echo(f"critical path: {text}")
    for text in whatif:
        click.echo(f"what if: {text}")
    for text in found.warnings + idle:
        click.echo(f"warning: {text}")


def _falls(rows: Sequence[Waterfall]) -> Iterator[str]:
    """The waterfall as lines of a table."""
    from clustersim.analysis.waterfall import table

    heads, lines = table(rows)
    if heads:
        yield f"from peak to MFU, % of time  {'':2}" + "".join(f"{head:>7}" for head in heads)
    for word, cells in lines:
        yield f"   {word:28}" + "".join(f"{cell:>7}" for cell in cells)


def _bounds(found: Explanation, again: dict[str, float]) -> list[str]:
    """What each knob saves, where it was run again, the most first, or would save at most; those that save nothing in
    one sentence."""
    table: dict[str, Any] = found.tables["whatif"]
    row_of = {text: i for i, text in enumerate(table["text"].tolist())}
    said: list[tuple[float, str]] = []
    idle: dict[bool, list[str]] = {True: [], False: []}
    for text in found.bounds:
        knob, most = str(table["knob"][row_of[text]]), float(table["saving"][row_of[text]])
        name, saved = text.partition(" would save ")[0], again.get(knob, most)
        if abs(saved) < (NOTHING if knob in again else SMALL):
            idle[knob in again].append(name)
        else:
            said.append((saved, _run_again(text, saved) if knob in again else text))
    lines = [text for _, text in sorted(said, key=lambda pair: -pair[0])]
    for rerun, names in idle.items():
        if names:
            lines.append(f"{', '.join(names)}: nothing{' (run again)' if rerun else ''}")
    return lines


NOTHING = 5e-4
"""Of a run that was really made, what prints as 0.0 %."""
SMALL = 0.005
"""Bounds below this share of the step are called nothing."""


def _run_again(text: str, saved: float) -> str:
    """What a knob does, in place of what it could do at most.

    >>> _run_again("NIC bandwidth x2 would save at most 4.5% of the step", -0.012)
    'NIC bandwidth x2 costs 1.2% of the step (run again)'
    """
    knob = text.partition(" would save ")[0]
    per = "time per sample" if text.endswith("per sample") else "step"
    return f"{knob} {'saves' if saved > 0 else 'costs'} {abs(saved):.1%} of the {per} (run again)"
