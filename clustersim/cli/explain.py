"""``clustersim explain``: why a run took as long as it did, in plain sentences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustersim.cli.common import json_option, print_json, set_option, working

if TYPE_CHECKING:
    from clustersim.analysis.explain import Explanation, Facts
    from clustersim.timeline import Timeline


@click.command(short_help="Say why a run took as long as it did.")
@click.argument("run")
@set_option
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="How many causes to print.")
@json_option
def explain(run: str, changes: tuple[str, ...], top: int, as_json: bool) -> None:
    """Say why a run took as long as it did.

    RUN is a folder that `clustersim run --out` wrote, a scenario (a .toml file or the name of a shipped one), which is
    simulated first, or the file of a saved or measured run.
    """
    from clustersim.analysis.explain import explain as explained

    timeline, facts, title = load(run, changes)
    with working(f"explaining {title}"):
        found = explained(timeline, facts, top=top)
    if as_json:
        print_json({"run": title, **found.to_dict()})
    else:
        _print(title, found)


def load(run: str, changes: tuple[str, ...] = ()) -> tuple[Timeline, Facts, str]:
    """A run by name: (its Timeline, what else is known of it, its title). Simulates a scenario.

    Raises :class:`ClusterSimError` for a run that cannot be found or read.
    """
    from clustersim import scenario as scenarios
    from clustersim.analysis.explain import Facts
    from clustersim.errors import TraceError

    path = Path(run)
    if path.is_dir() or path.suffix == ".npz":
        if changes:
            raise TraceError(f"{run}: --set changes a scenario, and this is a run that is over")
        return _saved(path)
    loaded = scenarios.load(run, scenarios.parse_overrides(changes))
    with working(f"simulating {loaded.name}") as progress:
        result = loaded.run(progress)
    return result.timeline, Facts.of(result.to_dict()), result.scenario.title


def _saved(path: Path) -> tuple[Timeline, Facts, str]:
    from clustersim.analysis.explain import Facts
    from clustersim.traces.saved import load_run

    run = load_run(path)
    return run.timeline, Facts.of(run.facts), str(run.facts.get("title") or path.name)


def _print(title: str, found: Explanation) -> None:
    """Sentences on stdout, one a line however long: they are for reading and for searching."""
    click.echo(f"{title}: {found.verdict}")
    click.echo(f"where the time goes: {found.shares}")
    for i, text in enumerate(found.causes, 1):
        click.echo(f"{i:2d}. {text}")
    for text in found.path:
        click.echo(f"critical path: {text}")
    for text in found.bounds:
        click.echo(f"what if: {text}")
    for text in found.warnings:
        click.echo(f"warning: {text}")
