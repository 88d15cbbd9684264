"""``clustersim campaign``: a whole training of many steps, with everything that goes wrong on the way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import OUT_FOLDER, json_option, page_option, set_option, working
from clustersim.app.cli.study import needs_out, say_study, written_study
from clustersim.app.cli.tables import rich_table, stdout

if TYPE_CHECKING:
    from clustersim.studies.campaign import CampaignAnswer


@click.command(short_help="Simulate a whole training: weeks, failures, checkpoints.")
@click.argument("scenario")
@set_option
@click.option(
    "--replicas", type=click.IntRange(1, 1_000_000), default=1000, help="How often the training is simulated."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of what is drawn at random.")
@click.option("--what-if", "what_if", is_flag=True, help="Say also what other choices would give.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, help="How many processes work at once.")
@click.option("--out", type=OUT_FOLDER, help="Folder for campaign.json and pictures.")
@page_option
@json_option
def campaign(
    scenario: str,
    changes: tuple[str, ...],
    replicas: int,
    seed: int,
    what_if: bool,
    jobs: int,
    out: Path | None,
    page: Path | None,
    as_json: bool,
) -> None:
    """Simulate the whole training that a scenario's [campaign] table describes, many times.

    SCENARIO is a .toml file or the name of a shipped one. A step is simulated once for each state that the machine can
    be in; then nodes fail at random times, the training saves, stops and restarts, and its steps add up. The answer is
    days, goodput by each published definition, and a ledger whose parts add up to the elapsed time. With --out every
    replica (one training) is kept, and the same command goes on after an interruption.
    """
    from clustersim import scenario as scenarios
    from clustersim.studies import campaign as campaigns

    needs_out(page, out)
    loaded = scenarios.load(scenario, scenarios.parse_overrides(changes))
    settings = campaigns.CampaignOptions(replicas, seed, jobs, what_if)
    folder = None if out is None else campaigns.folder_for(loaded, out, settings)
    with working(f"playing {loaded.name}") as progress:
        result = campaigns.answer(loaded, settings, folder, progress)
    wrote = []
    if folder is not None:
        from clustersim.app.report.campaign import pictures

        wrote = written_study(folder, campaigns.FILE, result, pictures(result))
    say_study(result, out, page, as_json, lambda pages: _print(result, wrote + pages))


def _print(result: CampaignAnswer, wrote: list[str]) -> None:
    from clustersim.app.report.campaign import LABELS, campaign_words

    console = stdout()
    page = campaign_words(result)
    console.say(page.verdict, *(f"{label:24s} {text}" for label, text in page.figures))
    for section in page.sections:
        if section.grid is not None:
            console.print(rich_table(section.heading, section.grid.head, section.grid.rows))
        console.say(*(f"{LABELS[section.id]}: {label}: {text}" for label, text in section.items))
    if wrote:
        console.say(f"wrote {', '.join(wrote)}")
