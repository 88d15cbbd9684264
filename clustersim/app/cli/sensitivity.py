"""``clustersim sensitivity``: what a scenario depends on, and how it scales."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import OUT_FOLDER, json_option, option_option, page_option, set_option, working
from clustersim.app.cli.study import needs_out, say_study, written_study
from clustersim.app.cli.tables import rich_table, stdout
from clustersim.core.errors import ClusterSimError

if TYPE_CHECKING:
    from clustersim.studies.sensitivity import Study


@click.command(short_help="Say what a scenario's step depends on, and how it scales.")
@click.argument("scenario")
@set_option
@click.option("--out", type=OUT_FOLDER, help="Folder for sensitivity.json and pictures.")
@option_option
@click.option("--nodes", metavar="8,16,32", help="Numbers of nodes.  [an eighth to twice the scenario's]")
@click.option(
    "--swing", type=click.FloatRange(0.01, 0.9), default=0.2, help="By how much each number is better and worse."
)
@click.option(
    "--growth", type=click.FloatRange(0.001), default=0.05, help="How much longer a slower network may make the step."
)
@click.option(
    "--gain",
    type=click.FloatRange(0.0, 1.0),
    default=0.5,
    help="Throughput that doubling the nodes must add to pay, 0.5 for half more.",
)
@page_option
@json_option
def sensitivity(
    scenario: str,
    changes: tuple[str, ...],
    out: Path | None,
    place: int | None,
    nodes: str | None,
    swing: float,
    growth: float,
    gain: float,
    page: Path | None,
    as_json: bool,
) -> None:
    """Say what a scenario's step depends on, and how it scales. SCENARIO is a .toml file, the name of a shipped one, or
    the folder of a plan.

    It is simulated again with one thing changed: each hardware number better and worse (which of them matters?), the
    network slower and faster (how slow may it be?), and other numbers of nodes with the same batch (strong scaling) or
    the same work per GPU (weak scaling: how efficient is it, what is lost to what, when does doubling stop paying?).
    """
    from clustersim.app.cli.named import named_scenario
    from clustersim.scenario import parse_overrides
    from clustersim.studies.sensitivity import FILE, StudyRequest, folder_for, study

    needs_out(page, out)
    chosen, title = named_scenario(scenario, parse_overrides(changes), place)
    request = StudyRequest(_nodes(nodes), swing, growth, gain)
    folder = None if out is None else folder_for(chosen, out, request)
    with working(f"studying {title}") as progress:
        result = study(chosen, request, title=title, tell=lambda _: progress(progress.done + 1, progress.total))
    wrote = []
    if folder is not None:
        from clustersim.app.report.sensitivity import pictures

        wrote = written_study(folder, FILE, result, pictures(result))
    say_study(result, out, page, as_json, lambda pages: _print(result, wrote + pages))


def _nodes(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ClusterSimError(f"cannot read {text!r} as numbers of nodes; write them like '8,16,32' (at --nodes)")
    return [int(part) for part in parts]


def _print(result: Study, wrote: list[str]) -> None:
    from clustersim.app.report.sensitivity import TABLES

    console = stdout()
    console.say(result.verdict)
    for title, grid in TABLES.items():
        shown = grid(result)
        console.print(rich_table(title.format(swing=result.swing), shown.head, shown.rows))
    if wrote:
        console.say(f"wrote {', '.join(wrote)}")
