"""``python -m tests.evidence incidents``: how often planted incidents are diagnosed right."""

from __future__ import annotations

from collections.abc import Iterator

import click
import msgspec

from clustersim.app.cli.common import json_option, print_json, working
from clustersim.app.cli.validate import markdown_option, percent
from clustersim.studies.exam import DIFFICULTIES
from tests.evidence.gloo_faults import RealFault
from tests.evidence.incidents import DiagnosedIncident, IncidentShare
from tests.evidence.rows_shown import show_rows

HEAD = ("incidents", "files", "count", "cause and place right", "target", "confident", "confident and wrong", "target")
COMPLETE = ("easy", "all files")
TARGETS = {True: "95%", False: "80%"}
"""Share to be right of complete evidence, and of other: hard incidents have files of half of the ranks. Never more than
:data:`WRONG` are to be confident and wrong."""
WRONG = "2%"
CLOCK = 1e-6
"""Seconds to which a log's clock tells when a watchdog spoke."""


@click.command()
@click.option("--seeds", type=click.IntRange(min=1), default=100, help="How many incidents of each difficulty.")
@click.option("--first", type=click.IntRange(min=0), default=0, help="The first seed.")
@click.option("--difficulty", type=click.Choice([*DIFFICULTIES, "both"]), default="both", help="Which incidents.")
@click.option("--gloo", type=click.IntRange(min=0), default=0, help="Real jobs of each fault over Gloo, beside them.")
@click.option("--kinds", is_flag=True, help="List each kind's share, and what was taken for what.")
@markdown_option
@json_option
def incidents(seeds: int, first: int, difficulty: str, gloo: int, kinds: bool, markdown: bool, as_json: bool) -> None:
    """Planted incidents: how often our diagnosis names the cause and the place, and how often it is sure and wrong."""
    from tests.evidence import incidents as exams

    chosen = list(DIFFICULTIES) if difficulty == "both" else [difficulty]
    rows: dict[str, list[DiagnosedIncident]] = {name: [] for name in chosen}
    with working(f"diagnosing {seeds * len(chosen)} incident(s)") as progress:
        for done, (name, seed) in enumerate((n, s) for n in chosen for s in range(first, first + seeds)):
            progress(done, seeds * len(chosen))
            rows[name] += exams.diagnosed(seed, name)
    tables = {name: exams.shares(own) for name, own in rows.items()}
    if as_json:
        print_json({"shares": msgspec.to_builtins(tables), "incidents": msgspec.to_builtins(rows)})
        return
    cells = [cell for name, table in tables.items() for cell in _cells(name, table)]
    title = f"planted incidents, seeds {first} to {first + seeds - 1}"
    show_rows(title, HEAD, cells, markdown=markdown)
    for line in _others(rows, gloo):
        click.echo(line)
    for name, own in rows.items() if kinds else ():
        for kind, count, shares in exams.kind_shares(own):
            click.echo(f"{name} {kind:20s} {count:4d}  {'  '.join(f'{share:5.0%}' for share in shares)}")
        for files, right, given, count in exams.mistaken(own):
            click.echo(f"{count:4d}  {name}, {files}: {right} taken for {given}")


def _cells(name: str, table: list[IncidentShare]) -> Iterator[list[str]]:
    for row in table:
        shares = (
            percent(row.right),
            TARGETS[(name, row.files) == COMPLETE],
            percent(row.confident),
            percent(row.confident_wrong),
            WRONG,
        )
        yield [name, row.files, f"{row.count:,}", *shares]


def _others(rows: dict[str, list[DiagnosedIncident]], gloo: int) -> Iterator[str]:
    """The targets that are no shares of seeds."""
    from tests.evidence import gloo_faults as real
    from tests.evidence.incidents import unlike_without_incidents

    detected = [row.detected for own in rows.values() for row in own if row.files == "all files"]
    spoken = [apart for apart in detected if apart is not None]
    same = sum(abs(apart) < CLOCK for apart in spoken)
    yield f"watchdogs that speak in the log when they were played to (target: all): {same} of {len(spoken)}"
    unlike, shipped = unlike_without_incidents()
    yield f"shipped scenarios that are as before without an incident (target: all): {shipped - unlike} of {shipped}"
    if gloo:
        jobs = list(real.real_faults(times=gloo))
        right = sum(job.is_right for job in jobs)
        yield f"real jobs over Gloo that are diagnosed right (target: 90%): {right} of {len(jobs)}"


@click.command()
@click.option("--times", type=click.IntRange(min=1), default=1, help="Jobs of each fault, each on another rank.")
@click.option("--fault", "faults", multiple=True, help="Of these faults alone.")
@json_option
def gloo_faults(times: int, faults: tuple[str, ...], as_json: bool) -> None:
    """Real jobs of this machine's torch over Gloo with a planted fault: how often our diagnosis is right."""
    from tests.evidence import gloo_faults as real

    names = faults or tuple(real.REAL_FAULTS)
    rows = []
    with working(f"running {times * len(names)} job(s)") as progress:
        for done, row in enumerate(real.real_faults(names, times), start=1):
            progress(done, times * len(names))
            rows.append(row)
            if not as_json:
                click.echo(_told(row))
    if as_json:
        print_json(msgspec.to_builtins(rows))
        return
    click.echo(f"{sum(row.is_right for row in rows)} of {len(rows)} right")


def _told(row: RealFault) -> str:
    place = next((str(part) for part in row.given.place if part is not None), "no place that a file names")
    word = "right" if row.is_right else f"wrong, it says {row.given.kind} of {place}"
    where = "" if row.right.rank is None else f" of rank {row.right.rank}"
    return f"{row.fault}{where}: {word} ({row.confidence:.0%} sure, {row.files} files)"
