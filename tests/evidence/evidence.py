"""How far off predictions are, of everything there is a table of: in sample, of a machine left out, and of one of which
three numbers are known, side by side; of steps, of a GPU that nobody measured, and with one own step known; and how
often the stated ranges hold of somebody they were not made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from clustersim.calibrate.cross_validate import Told, cross_validations
from clustersim.calibrate.score import PredictedRow, Row, grouped, predicted, read_table, statistics
from clustersim.calibrate.validate_nccl import publisher as nccl_publisher
from clustersim.calibrate.validate_nccl import validate_nccl
from clustersim.core.arrays import Floats
from clustersim.core.errors import ClusterSimError
from clustersim.core.ranges import size_class
from clustersim.core.texts import Table
from tests.evidence.forgotten import left_out_rows
from tests.evidence.known_steps import gpus_of, known_rows
from tests.evidence.step_rows import COLUMNS as STEP_COLUMNS
from tests.evidence.step_rows import publisher
from tests.evidence.validate_steps import figure, hardware, kind_of, validate_memory, validate_steps

Error = tuple[float, float]
"""Median and 90th percentile over cases of the relative error."""
ONE_NODE = "nccl_one_node"
"""More of the collectives, in the columns of a database of kernels."""
COLLECTIVES = "nccl_tests"
STEPS = "training_steps"
SPLIT = "training_steps_hybrid"
SIZES = (2.0**16, 2.0**25, 2.0**26)
"""Bytes, one of each class of sizes."""
FEWEST = 3
"""Cases that a part needs for a line of its own."""
MOST_GPUS = 64
"""Of runs that are played again with something forgotten or known: larger ones take long."""


@dataclass(frozen=True)
class EvidenceLine:
    """One part of the evidence.

    Parameters
    ----------
    what : for people. rows, cases : predicted. in_sample : with the constants as shipped. left_out : of a publisher
        that constants were not fitted to. three_numbers : of which three numbers are known besides. held : share of
        measurements within the ranges of 50 and 90 % that are made of the others; NaN where there are no others.
    gpu_left_out : of steps, with what was measured on their GPU forgotten (:mod:`tests.evidence.forgotten`).
    one_step : of steps beyond the smallest scale of their model, with that one known
        (:mod:`tests.evidence.known_steps`). Both of runs on up to :data:`MOST_GPUS`.
    """

    what: str
    rows: int
    cases: int
    in_sample: Error
    left_out: Error | None
    three_numbers: Error | None
    held: tuple[float, ...]
    gpu_left_out: Error | None = None
    one_step: Error | None = None


def evidence(folder: str | Path, tell: Told = lambda done, total: None, *, again: bool = True) -> list[EvidenceLine]:
    """Lines for all tables of a folder, named as the shipped ones are; ``tell`` how many of how many are done.

    ``again`` : steps are played again with their GPU forgotten, and with one own step known, which takes minutes.

    Raises :class:`ClusterSimError` where there is none.
    """
    tables = {name: path for name in (COLLECTIVES, STEPS, SPLIT) if (path := table_of(Path(folder), name))}
    if not tables:
        raise ClusterSimError(f"{folder}: holds none of {COLLECTIVES}.csv, {STEPS}.csv and {SPLIT}.csv (or .csv.gz)")
    lines: list[EvidenceLine] = []
    memory: list[Row] = []
    for i, (name, path) in enumerate(tables.items()):
        tell(i, len(tables))
        if name == COLLECTIVES:
            more = table_of(Path(folder), ONE_NODE)
            lines += _collectives([path, more] if more else [path])
            continue
        part = partial(_part, PARTS[name])
        step_lines = _lines(validate_steps(path).rows, part)
        lines += _played_again(path, step_lines, part) if again else step_lines
        memory += validate_memory(path).rows
    return lines + _lines(memory, lambda row: f"memory, {figure(row.cells)}")


PARTS: dict[str, Callable[[Table], str]] = {
    COLLECTIVES: lambda cells: f"collectives, {size_class(float(cells['size_bytes']))}",
    ONE_NODE: lambda cells: f"collectives, {size_class(float(cells['size_bytes']))}",
    STEPS: lambda cells: f"steps, {kind_of(cells['strategy'])}",
    SPLIT: lambda cells: f"split models, {hardware(cells)}",
}
"""What the rows of a table are told apart by."""


def _part(part_of: Callable[[Table], str], row: PredictedRow) -> str:
    return part_of(row.cells)


def table_of(folder: Path, name: str) -> Path | None:
    """The table of this name in a folder, packed or not; None where there is none."""
    return next((path for end in (".csv", ".csv.gz") if (path := folder / f"{name}{end}").exists()), None)


def _collectives(tables: list[Path]) -> list[EvidenceLine]:
    out = cross_validations(tables, ("publisher", "three-numbers"))
    scores = validate_nccl(*tables), out["publisher"], out["three-numbers"]
    shipped, left_out, three = (
        grouped(predicted(score_part.rows), lambda row: PARTS[COLLECTIVES](row.cells)) for score_part in scores
    )
    parts = [name for size in SIZES if (name := PARTS[COLLECTIVES]({"size_bytes": size})) in shipped]
    return [_line(part, shipped[part], operator, left_out.get(part), three.get(part)) for part in parts]


def operator(row: PredictedRow) -> str:
    """Whose machine a collective was measured on."""
    return f"{nccl_publisher(row.cells)} {row.cells['topology']}"


def _lines(rows: Iterable[Row], part: Callable[[PredictedRow], str]) -> list[EvidenceLine]:
    """A line for each part that has a few cases."""
    lines = [_line(name, part_rows) for name, part_rows in sorted(grouped(predicted(rows), part).items())]
    return [line for line in lines if line.cases >= FEWEST]


def _played_again(path: Path, lines: list[EvidenceLine], part: Callable[[PredictedRow], str]) -> list[EvidenceLine]:
    """Lines of a table of steps, with what their GPU's figures and one own step are worth."""
    small = [row for row in read_table(path, STEP_COLUMNS) if gpus_of(row) <= MOST_GPUS]
    forgotten = grouped(left_out_rows(small), part)
    known = grouped(predicted(known_rows(small)), part)
    return [
        replace(line, gpu_left_out=_few(forgotten.get(line.what)), one_step=_few(known.get(line.what)))
        for line in lines
    ]


def _few(rows: list[PredictedRow] | None) -> Error | None:
    """How far rows are off; None of fewer than :data:`FEWEST` cases."""
    return _error(rows) if rows and statistics(rows).n_cases >= FEWEST else None


def _line(
    part_name: str,
    rows: list[PredictedRow],
    apart_by: Callable[[PredictedRow], str] = lambda row: publisher(row.cells),
    left_out: list[PredictedRow] | None = None,
    three: list[PredictedRow] | None = None,
) -> EvidenceLine:
    """``apart_by`` : what is left out for the ranges."""
    apart = distances(left_out or rows, apart_by)
    cases = statistics(rows).n_cases
    out, three_error = (_error(held_rows) if held_rows else None for held_rows in (left_out, three))
    return EvidenceLine(part_name, len(rows), cases, _error(rows), out, three_error, coverage(apart))


def _error(rows: list[PredictedRow]) -> Error:
    stats = statistics(rows)
    return cast("Error", (stats.median_abs_rel_error, stats.p90_abs_rel_error))  # some row was predicted


# ---- Ranges: rows of one publisher are wrong together, so quantiles are over publishers of equal weight, and both
# width and coverage are those of publishers whose rows the range was not made from.

Groups = Mapping[str, Floats]
SHARES = (0.5, 0.9)
"""Shares of measurements that ``p50`` and ``p90`` are to hold."""
SLACK = 0.03
"""Of coverage, that a handful of publishers cannot tell from chance."""
TINY = 1e-9


def distances(rows: Iterable[Row], group: Callable[[PredictedRow], str]) -> dict[str, Floats]:
    """Of each group, how far its measurements are from their predictions, relative to the prediction."""
    return {
        name: np.array([abs(1.0 / (1.0 + row.rel_error) - 1.0) for row in group_rows])
        for name, group_rows in grouped(predicted(rows), group).items()
    }


def quantile(groups: Iterable[Floats], share: float, full: int = 1) -> float:
    """The distance below which a share of measurements lies, every group weighing the same, but for one of fewer than
    ``full`` measurements, which weighs as much less: three steps of a publisher say less than a hundred."""
    groups = list(groups)
    distance = np.concatenate(groups)
    weight = np.concatenate([np.full(len(group), 1.0 / max(len(group), full)) for group in groups])
    order = np.argsort(distance, kind="stable")
    below = (np.cumsum(weight[order]) - 0.5 * weight[order]) / weight.sum()
    return float(np.interp(share, below, distance[order]))


def _apart(groups: Groups, share: float, full: int = 1) -> list[Floats]:
    """Each group's distances, over the quantile of the others."""
    others = {name: [groups[group] for group in groups if group != name] for name in groups}
    return [
        group_distances / max(quantile(others[name], share, full), TINY) for name, group_distances in groups.items()
    ]


def widening(groups: Groups, share: float, full: int = 1) -> float:
    """What the quantile of others must be multiplied with to hold its share of a group that was left out, but for
    :data:`SLACK`: two groups say little of a third. Whoever is left out counts as one, be it of few measurements.
    Never below 1, and 1 of a single group, which says nothing."""
    return max(1.0, quantile(_apart(groups, share, full), share - SLACK)) if len(groups) > 1 else 1.0


def coverage(groups: Groups, full: int = 1) -> tuple[float, ...]:
    """Of each of :data:`SHARES`, the mean share of a group's measurements that a range made of the others holds, as
    wide as :func:`widening` makes it; NaN where there are no others."""
    if len(groups) < 2:
        return tuple(float("nan") for _ in SHARES)
    apart = [(_apart(groups, share, full), widening(groups, share, full)) for share in SHARES]
    return tuple(
        float(np.mean([np.mean(far <= wide + TINY) for far in distance_group])) for distance_group, wide in apart
    )
