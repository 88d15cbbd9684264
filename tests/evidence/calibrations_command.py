"""``python -m tests.evidence calibrations``: whether a user's calibrated file is better than the shipped one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from clustersim.app.cli.common import PATH, json_option, print_json, working
from clustersim.app.cli.validate import markdown_option, percent
from tests.evidence.expert_score import SHARED
from tests.evidence.rows_shown import show_rows

if TYPE_CHECKING:
    from tests.evidence.calibrations import ClassSummary

HEAD = ("size", "logs", "worse after", "target", "before", "after", "held out: before", "after", "worse after")


@click.command()
@click.option("--table", type=PATH, default=SHARED / "nccl_tests.csv", help="Logs in the columns of nccl_tests.csv.")
@click.option("--only", default="", help="Of logs whose publisher, machine or collective holds this.")
@click.option("--each", is_flag=True, help="List each log, too.")
@markdown_option
@json_option
def calibrations(table: Path, only: str, each: bool, markdown: bool, as_json: bool) -> None:
    """Each publisher's log of a machine and a collective, calibrated: errors before and after by size."""
    from tests.evidence.calibrations import calibrated_log, logs, summaries

    chosen = {key: samples for key, samples in logs(table).items() if only in " ".join(key)}
    rows = []
    with working(f"calibrating {len(chosen)} logs") as progress:
        for done, (key, samples) in enumerate(chosen.items()):
            rows.append(calibrated_log(key, samples))
            progress(done, len(chosen))
    if as_json:
        print_json({"logs": msgspec.to_builtins(rows), "classes": msgspec.to_builtins(list(summaries(rows)))})
        return
    for log in rows if each else ():
        errors = "; ".join(
            f"{name} {percent(row.before)} {percent(row.after)}, held out {percent(row.held_out_before)} "
            f"{percent(row.held_out_after)}{' WORSE' if row.worse else ''}"
            for name, row in log.classes.items()
        )
        structure = f" ({log.structure})" if log.structure else ""
        click.echo(f"{log.publisher} {log.topology} {log.collective}, {log.share:.0%}{structure}: {errors}")
    cells = [_cells(row) for row in summaries(rows)]
    show_rows(f"{len(rows)} logs, median |error|", HEAD, cells, markdown=markdown)


def _cells(row: ClassSummary) -> list[str]:
    counts = [row.size_class, str(row.logs), str(row.worse), "0"]
    errors = (row.before, row.after, row.held_out_before, row.held_out_after)
    return [*counts, *map(percent, errors), str(row.held_out_worse)]
