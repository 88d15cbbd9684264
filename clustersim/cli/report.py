"""``clustersim report`` and ``clustersim export``: a saved run as one HTML page, and as what other programs read."""

from __future__ import annotations

from pathlib import Path

import click

from clustersim.cli.common import rank_list, rank_words, ranks_option, stdout, working


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


@click.command(short_help="Write a saved run for Perfetto or as CSV, a sweep as CSV or Parquet.")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
@ranks_option
def export(run_dir: Path, file: Path, ranks: tuple[str, ...]) -> None:
    """Write the spans of a saved run to FILE, in the format its name ends with.

    Without --ranks it is all of them, or the leading nodes that a viewer opens at ease, and the answer says which.
    .json and .json.gz (Chrome's, for ui.perfetto.dev), .pftrace (Perfetto's own), .csv and .csv.gz. Where RUN_DIR is of
    `clustersim sweep`, its table: .csv or .parquet.
    """
    from clustersim import sweeps, traces
    from clustersim.traces.saved import load_run

    if sweeps.is_sweep(run_dir):
        with working(f"writing {file}"):
            table = sweeps.read(run_dir)
            sweeps.write(table, file)
        stdout().print(f"wrote {file}: {len(table.get('key', ())):,} rows", markup=False, soft_wrap=True)
        return
    chosen = rank_list(ranks)
    run = load_run(run_dir)
    with working(f"writing {file}"):
        written = traces.write(run.timeline, file, chosen, run.memory)
    stdout().print(f"wrote {file}: {rank_words(written, run.timeline.world_size)}", markup=False, soft_wrap=True)
