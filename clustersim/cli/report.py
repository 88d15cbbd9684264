"""``clustersim report``: a saved run, a sweep or a plan as one HTML page."""

from __future__ import annotations

from pathlib import Path

import click

from clustersim.cli.common import stdout, working


@click.command(short_help="Write a run, a sweep or a plan as one HTML page.")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=None, help="The page.  [RUN_DIR/report.html]")
@click.option("--title", default=None, help="Instead of the run's own name.")
def report(run_dir: Path, output: Path | None, title: str | None) -> None:
    """Write a report: RUN_DIR is the folder that `clustersim run --out RUN_DIR` wrote, or `sweep`,
    `plan` or `sensitivity`.

    One self-contained page. Of a run: the verdict, where the time went, who did what when, stalls, hotspots, the
    critical path, memory, inputs and assumptions. Of the others: the answer in a sentence, case by case, what is
    worth having, curves, why and why not, what is too close to call, assumptions, and the whole table.
    """
    from clustersim.report import holds_study, write_report, write_study
    from clustersim.traces.saved import load_run

    if holds_study(run_dir):
        page = output or run_dir / "report.html"
        with working(f"writing {page}"):
            write_study(run_dir, page, title)
        stdout().print(f"wrote {page}", markup=False, soft_wrap=True)
        return
    run = load_run(run_dir)
    page = output or (run_dir if run_dir.is_dir() else run_dir.parent) / "report.html"
    with working(f"writing {page}"):
        write_report(run, page, title)
    stdout().print(f"wrote {page}", markup=False, soft_wrap=True)
