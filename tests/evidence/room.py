"""Whether published runs are told to fit: they ran, or ran out of memory, on cards whose memory is known.

What ran is every row of the unseen steps and of the tables of split models, each scenario once. Rows of runs that ran
out are in ``tests/data/ran_out.csv``; a publisher who says neither sizes nor batch is not there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec

from clustersim import load
from clustersim.calibrate.score import read_table
from clustersim.core.errors import ClusterSimError
from clustersim.core.memory_states import UNLIKELY
from clustersim.core.texts import Table
from clustersim.scenario.run.held import held
from tests.evidence.hybrid_rows import scenario_table
from tests.evidence.step_rows import publisher
from tests.evidence.unseen_steps import TABLE, publisher_of
from tests.tables import table_rows

DATA = TABLE.parent
SPLIT = (DATA / "measurements" / "training_steps_hybrid.csv.gz", DATA / "measurements" / "thin_steps.csv.gz")
RAN_OUT = DATA / "ran_out.csv"


class ToldRoom(msgspec.Struct, frozen=True):
    """A published run and what is told of it: bytes ``allocated`` and in the GPU's ``room``; how likely it runs out."""

    name: str
    publisher: str
    allocated: float
    room: float
    runs_out: float

    @property
    def feared(self) -> bool:
        """Whether it is told to run out more likely than what fits."""
        return self.runs_out >= UNLIKELY


def ran() -> Iterator[ToldRoom]:
    """Of every published run that can be read, once a scenario."""
    seen: set[str] = set()
    for name, source, table in (*_unseen(TABLE), *_split()):
        text = json.dumps(table, sort_keys=True)
        if text not in seen:
            seen.add(text)
            yield from _told(name, source, table)


def ran_out() -> Iterator[ToldRoom]:
    """Of every published run that failed for lack of memory."""
    for name, source, table in _unseen(RAN_OUT):
        yield from _told(name, source, table)


def _unseen(path: Path) -> Iterator[tuple[str, str, Table]]:
    for row in table_rows(path):
        table = json.loads(row["scenario"])
        table["run"].setdefault("steps", 2)
        yield row["id"], publisher_of(row["source"]), table


def _split() -> Iterator[tuple[str, str, Table]]:
    for path in SPLIT:
        for row in read_table(path, ("case_id",)):
            try:
                yield row["case_id"], publisher(row), scenario_table(row)
            except (ValueError, ClusterSimError):
                continue


def _told(name: str, source: str, table: Table) -> Iterator[ToldRoom]:
    try:
        verdict = held(load(table)).verdict
    except ClusterSimError:
        return
    yield ToldRoom(name, source, verdict.use.allocated, verdict.room, verdict.device_runs_out)
