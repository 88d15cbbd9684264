"""Published collectives that no constant was fitted to, and what a user without measurements predicts of them.

Each row of ``tests/data/unseen_collectives.csv`` has the columns of nccl-tests' tables. Machines that are not shipped
are in ``tests/data/unseen_machines``: a shipped one with what the publisher declares. What a publisher left open was
settled, and is said in ``left_open``, before the row was predicted.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from clustersim.calibrate.score import PredictedRow, predicted
from clustersim.calibrate.validate_nccl import measured, validate_rows
from clustersim.core.ranges import without_numbers
from clustersim.core.texts import Table
from tests.tables import table_rows

DATA = Path(__file__).parents[1] / "data"
TABLE = DATA / "unseen_collectives.csv"


class UnseenCollective(msgspec.Struct, frozen=True):
    """A row with what was predicted of it.

    Parameters
    ----------
    cells : what the table says, by column. publisher, chosen : who measured it, and in which set it was chosen.
    nodes : that it ran over. net, closeness : as :func:`clustersim.core.ranges.without_numbers` has them.
    error : predicted over published minus 1. first_error : of the row's first prediction, before anything was mended
        for what its set showed; where nobody wrote that down, ``error``. p50, p90 : half-widths of the ranges that a
        prediction states.
    """

    cells: Table
    publisher: str
    chosen: str
    nodes: int
    net: str
    closeness: tuple[str, ...]
    error: float
    first_error: float
    p50: float
    p90: float


def unseen_rows() -> list[Table]:
    """The table's rows, their machines named so that they load from anywhere."""
    of_file = ((row, DATA / row["topology"]) for row in table_rows(TABLE))
    return [row | {"topology": str(path)} if path.suffix else row for row, path in of_file]


@cache
def unseen_collectives() -> tuple[UnseenCollective, ...]:
    """Every row, predicted. Raises ValueError where one cannot be: what was published can be played."""
    rows = unseen_rows()
    played = predicted(validate_rows(rows).rows)
    if len(played) < len(rows):
        raise ValueError(f"{len(rows) - len(played)} rows of {TABLE.name} were not predicted")
    return tuple(map(_with_range, played))


def _with_range(row: PredictedRow) -> UnseenCollective:
    group = measured(row.cells)[2]
    net, closeness = without_numbers(group.topology, group.n_nodes)
    return UnseenCollective(
        row.cells,
        row.cells["publisher"],
        row.cells["set"],
        group.n_nodes,
        net,
        closeness,
        row.rel_error,
        float(row.cells["first_error"] or row.rel_error),
        float(row.p50 or 0.0),
        float(row.p90 or 0.0),
    )
