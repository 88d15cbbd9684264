"""``clustersim variation``: how long steps take where ranks and machines vary."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import OUT_PICTURE, json_option, print_json, set_option, working
from clustersim.app.cli.pictures import write_picture
from clustersim.app.cli.tables import number_table, stdout
from clustersim.core.units import format_time

if TYPE_CHECKING:
    from clustersim.studies.what_if.spread import StepSpread

HEAD = ("step", "mean", "p50", "p95", "p99", "over a step that does not vary")


@click.command(short_help="Say how much steps vary: p50, p95 and p99 over steps and machines.")
@click.argument("scenario")
@set_option
@click.option("--machines", type=click.IntRange(1, 10_000), default=20, help="How many machines are drawn at random.")
@click.option("--steps", type=click.IntRange(1, 10_000), default=50, help="How many steps on each machine.")
@click.option(
    "--swap",
    type=click.FloatRange(0.0, 1.0),
    default=0.005,
    help="Share of hosts (rounded up), the slowest, that the second answer replaces.",
)
@click.option("--budget", type=click.FloatRange(0.0), default=20.0, help="CPU seconds to simulate for.")
@click.option("--out", type=OUT_PICTURE, help="Draw the distributions (.png, .svg, .pdf).")
@json_option
def variation(
    scenario: str,
    changes: tuple[str, ...],
    machines: int,
    steps: int,
    swap: float,
    budget: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Say how much the steps of a scenario vary, by its [run.variation]: over steps, and over machines like its own.

    The answer is p50, p95 and p99 of all steps on all machines, and of the machines' mean steps; then the same with the
    slowest hosts of each machine replaced.
    """
    from clustersim import scenario as scenarios
    from clustersim.studies.what_if import spread as spreads

    loaded = scenarios.load(scenario, scenarios.parse_overrides(changes))
    with working(f"drawing steps of {loaded.name}") as progress:
        now = spreads.spread(loaded, machines, steps, budget=budget, tell=progress)
        better = spreads.spread(loaded, machines, steps, best=swap, budget=budget, tell=progress)
    spread_of = {
        "steps": spreads.Distribution.of(now.times),
        "machines": spreads.Distribution.of(now.of_machines),
        "steps, slowest hosts swapped": spreads.Distribution.of(better.times),
        "machines, slowest hosts swapped": spreads.Distribution.of(better.of_machines),
    }
    wrote = None
    if out is not None:
        from clustersim.app.plots.variation import distributions

        wrote = write_picture(distributions(spread_of, now.still, loaded.name), out)
    if as_json:
        print_json(
            {
                "still_s": now.still,
                "played": now.played,
                "slope": now.slope,
                "error": now.error,
                "within": now.within,
                **{name: asdict(spread) for name, spread in spread_of.items()},
            }
        )
        return
    console = stdout()
    times = {
        name: map(format_time, (spread.mean, spread.p50, spread.p95, spread.p99)) for name, spread in spread_of.items()
    }
    rows = ([name, *times[name], f"{spread.mean / now.still - 1:+.2%}"] for name, spread in spread_of.items())
    console.print(number_table(loaded.title, HEAD, rows))
    console.say(_words(now, machines * steps))
    if wrote is not None:
        console.say(wrote)


def _words(now: StepSpread, drawn: int) -> str:
    if now.played == drawn:
        return f"all {drawn:,} steps were simulated; on one machine steps vary by {now.within:.2%}"
    return (
        f"{now.played:,} of {drawn:,} steps were simulated, the others lie on a line ({now.slope:.3g} s for a second "
        f"more of the busiest rank) that misses those by {now.error:.2%}; on one machine steps vary by {now.within:.2%}"
    )
