"""``clustersim explain``: why a run took as long as it did, in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import format_option, json_option, option_option, print_json, set_option, working
from clustersim.core.errors import TraceError
from clustersim.core.paths import RUN_FILE
from clustersim.core.texts import is_folder

if TYPE_CHECKING:
    from clustersim.core.saved_run import SavedRun
    from clustersim.core.timeline import Timeline
    from clustersim.explain.explain import Explanation
    from clustersim.explain.waterfall import Waterfall
    from clustersim.scenario.run.running import Prepared


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run by name, what it is called; and its parts where it was simulated now."""

    run: SavedRun
    title: str
    prepared: Prepared | None = None

    @property
    def timeline(self) -> Timeline:
        """What happened."""
        return self.run.timeline


@click.command(short_help="Say why a run took as long as it did.")
@click.argument("run", nargs=-1, required=True)
@set_option
@option_option
@click.option("--top", type=click.IntRange(min=1), default=10, help="How many causes to print.")
@click.option("--rerun", is_flag=True, help="Simulate again with each thing changed, however long that takes.")
@format_option
@json_option
def explain(
    run: tuple[str, ...],
    changes: tuple[str, ...],
    place: int | None,
    top: int,
    rerun: bool,
    fmt: str | None,
    as_json: bool,
) -> None:
    """Say why a run took as long as it did.

    RUN is a folder that `clustersim run --out` wrote, a scenario (a .toml file, the name of a shipped one, or a plan's
    folder), which is simulated first, or profiler traces (one per rank, or a folder of them).
    """
    from clustersim.cluster.files.check import UNSEEN
    from clustersim.collectives.nccl.uneven import NO_RING, UNEVEN
    from clustersim.explain.explain import explain as explained
    from clustersim.explain.explain import weighed_again
    from clustersim.studies.what_if.otherwise import at_most, each_change, otherwise

    loaded = load(run[0], changes, *run[1:], fmt=fmt, place=place)
    if rerun and loaded.prepared is None:
        raise click.UsageError("--rerun needs a scenario: this run is over")
    with working(f"explaining {loaded.title}") as progress:
        explanation = explained(loaded.timeline, loaded.run.facts, top=top)
        reruns = otherwise(loaded.prepared, loaded.timeline, explanation, asked=rerun, doing=progress.name)
        explanation = weighed_again(explanation, loaded.run.facts, reruns.again, reruns.remedies)
    did: list[str] = []
    idle: list[str] = []  # what was changed and made no difference, and why
    if loaded.prepared is not None and loaded.prepared.scenario.changes:
        with working("running without each change"):
            did, idle = each_change(loaded.prepared.scenario, loaded.timeline)
    if as_json:
        choices = [choice.to_dict() for choice in reruns.choices]
        more = {"rerun": reruns.again, "choices": choices, "changes": did, "idle_knobs": idle}
        print_json({"run": loaded.title, "figures": loaded.run.facts.figures, **explanation.to_dict(), **more})
    else:
        notes = loaded.run.facts.notes
        uneven = [note for note in notes if note.startswith((UNEVEN, NO_RING)) or note.endswith(UNSEEN)]
        bounds = at_most(explanation) if reruns.again else []
        _print(loaded.title, explanation, did + reruns.text + bounds, idle + uneven)


def load(
    run: str, changes: tuple[str, ...] = (), *more: str, fmt: str | None = None, place: int | None = None
) -> LoadedRun:
    """A run by name; simulates a scenario. ``more`` : the other files of a trace. ``fmt`` : a trace's format.
    ``place`` : of a plan's folder, which option of its front.

    Raises :class:`ClusterSimError` for one that cannot be found or read.
    """
    from clustersim.app.cli.named import named_scenario
    from clustersim.scenario import parse_overrides

    path = Path(run)
    of_plan = place is not None or (is_folder(run) and (path / "plan.json").is_file())
    if not of_plan and (more or path.is_dir() or (path.is_file() and path.suffix != ".toml")):
        if changes:
            raise TraceError(f"{run}: --set changes a scenario, and this is a run that is over")
        return _over(path, *map(Path, more), fmt=fmt)
    loaded, _ = named_scenario(run, parse_overrides(changes), place)
    with working(f"simulating {loaded.name}", f"summing up {loaded.name}") as progress:
        result = loaded.run(progress)
    return LoadedRun(result.saved, result.scenario.title, result.prepared)


def _over(path: Path, *more: Path, fmt: str | None = None) -> LoadedRun:
    """A run that was saved or measured; of a replay's folder, what was simulated."""
    from clustersim.app.cli.replay import SIMULATED, is_replay
    from clustersim.core.facts import RunFacts
    from clustersim.core.saved_run import SavedRun
    from clustersim.files import traces
    from clustersim.files.traces.saved import load_run

    if not more and path.is_dir() and is_replay(path):
        path = path / SIMULATED
    if not more and (path.suffix == ".npz" or (path / RUN_FILE).exists()):
        run = load_run(path)
        return LoadedRun(run, run.facts.title or path.name)
    read = traces.read([path, *more], fmt)
    if isinstance(read, traces.Samples | traces.Told):
        raise TraceError(f"{path}: a table or a log has no run to explain; `clustersim trace` tells what it holds")
    title = f"{path.name}{f' and {len(more)} more' if more else ''}"
    return LoadedRun(SavedRun(read, None, RunFacts(title=title)), title)


def _print(title: str, explanation: Explanation, whatif: list[str], idle: list[str]) -> None:
    """Sentences on stdout, one a line however long: they are for reading and for searching."""
    click.echo(f"{title}: {explanation.verdict}")
    click.echo(f"where the time goes: {explanation.shares}")
    if explanation.mixture is not None:
        click.echo(explanation.mixture.headed)
    for line in _falls(explanation.waterfall):
        click.echo(line)
    click.echo(f"ranks: {explanation.ranks}")
    for i, text in enumerate(explanation.causes, 1):
        click.echo(f"{i:2d}. {text}")
    for text in explanation.path:
        click.echo(f"critical path: {text}")
    for text in whatif:
        click.echo(f"what if: {text}")
    for text in explanation.warnings + idle:
        click.echo(f"warning: {text}")


def _falls(rows: Sequence[Waterfall]) -> Iterator[str]:
    """The waterfall as lines of a table."""
    from clustersim.explain.waterfall import pace_note, table

    heads, lines = table(rows)
    if heads:
        yield f"from peak to MFU, % of time  {'':2}" + "".join(f"{head:>7}" for head in heads)
    for word, cells in lines:
        yield f"   {word:28}" + "".join(f"{cell:>7}" for cell in cells)
    if note := pace_note(lines):
        yield f"   {note}"
