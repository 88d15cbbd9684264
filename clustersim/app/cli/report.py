"""``clustersim report``: a run, a trace, a sweep or a plan as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from clustersim.app.cli.common import OUT_FILE, format_option, option_option, set_option, working
from clustersim.app.cli.explain import load
from clustersim.app.cli.tables import stdout
from clustersim.core.outputs import check_file


@click.command(short_help="Write a run, a trace, a sweep or a plan as one HTML page.")
@click.argument("run", nargs=-1, required=True)
@set_option
@option_option
@click.option("-o", "--out", type=OUT_FILE, help="The page to write.  [RUN/report.html]")
@click.option("--output", type=OUT_FILE, hidden=True, help="What --out was called before.")
@click.option("--title", help="A title instead of the run's own.")
@format_option
def report(
    run: tuple[str, ...],
    changes: tuple[str, ...],
    place: int | None,
    out: Path | None,
    output: Path | None,
    title: str | None,
    fmt: str | None,
) -> None:
    """Write a report: RUN is the folder that `clustersim run --out RUN` wrote, or `sweep`, `plan` or `sensitivity`; a
    scenario, or with --option an option of a plan, which is simulated first; or profiler traces (one per rank, or a
    folder of them).

    One self-contained page. Of a run: the verdict, where the time went, who did what when, stalls, hotspots, the
    critical path, memory, inputs and assumptions; of a scenario also what it would be with one thing changed, where
    its run is short enough to be made a dozen times more (`explain --rerun` says it of any). Of the others: the answer
    in a sentence, case by case, what is worth having, curves, why and why not, what is too close to call, assumptions,
    and the whole table.
    """
    from clustersim.app.report import write_report
    from clustersim.app.report.study import holds_study, write_study

    first = Path(run[0])
    # In the folder of a run; beside a file; of a shipped scenario in the working folder.
    beside = first / "report.html" if first.is_dir() else first.with_name(f"{first.name.partition('.')[0]}.html")
    page = out or output or beside
    check_file(page)
    if len(run) == 1 and place is None and holds_study(first):
        with working(f"writing {page}"):
            write_study(first, page, title)
    else:
        loaded = load(run[0], changes, *run[1:], fmt=fmt, place=place)
        with working(f"writing {page}"):
            write_report(loaded.run, page, title, loaded.prepared)
    stdout().say(f"wrote {page}")
