"""Published collectives that no constant was fitted to, and what a user without measurements predicts of them.

Each row of ``tests/data/unseen_collectives.csv`` has the columns of nccl-tests' tables. Machines that are not shipped
are in ``tests/data/unseen_machines``: a shipped one with what the publisher declares. What a publisher left open was
settled, and is said in ``left_open``, before the row was predicted.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from clustersim.calibrate.score import predicted
from clustersim.calibrate.validate_nccl import validate_rows
from clustersim.core.arrays import Floats
from clustersim.core.texts import Table

DATA = Path(__file__).parents[1] / "data"
TABLE = DATA / "unseen_collectives.csv"


class UnseenCollective(msgspec.Struct, frozen=True):
    """A row with what was predicted of it.

    Parameters
    ----------
    cells : what the table says, by column. publisher, chosen : who measured it, and in which set it was chosen.
    error : predicted over published minus 1. first_error : of the row's first prediction, before anything was mended
        for what its set showed; where nobody wrote that down, ``error``. p50, p90 : half-widths of the ranges that a
        prediction states.
    """

    cells: Table
    publisher: str
    chosen: str
    error: float
    first_error: float
    p50: float
    p90: float


def unseen_rows() -> list[Table]:
    """The table's rows, their machines named so that they load from anywhere."""
    with TABLE.open() as file:
        rows = list(csv.DictReader(file))
    of_file = ((row, DATA / row["topology"]) for row in rows)
    return [row | {"topology": str(path)} if path.suffix else row for row, path in of_file]


@cache
def unseen_collectives() -> tuple[UnseenCollective, ...]:
    """Every row, predicted. Raises ValueError where one cannot be: what was published can be played."""
    rows = unseen_rows()
    played = predicted(validate_rows(rows).rows)
    if len(played) < len(rows):
        raise ValueError(f"{len(rows) - len(played)} rows of {TABLE.name} were not predicted")
    return tuple(
        UnseenCollective(
            row.cells,
            row.cells["publisher"],
            row.cells["set"],
            row.rel_error,
            float(row.cells["first_error"] or row.rel_error),
            float(row.p50 or 0.0),
            float(row.p90 or 0.0),
        )
        for row in played
    )


def unseen_distances(rows: Iterable[UnseenCollective]) -> dict[str, Floats]:
    """Of each publisher, how far its times were from their first predictions, relative to the prediction."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row.publisher, []).append(abs(1.0 / (1.0 + row.first_error) - 1.0))
    return {publisher: np.array(far) for publisher, far in groups.items()}
