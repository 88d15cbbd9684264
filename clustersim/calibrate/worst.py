"""The cases a prediction misses most, with what their own rows say of the likely reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clustersim.calibrate.score import PredictedRow, Row, grouped, predicted
from clustersim.core.texts import Table

SAME_FACTOR = 0.15
"""Rows whose signed errors differ by no more than this (quartile to quartile) miss by one common factor."""


@dataclass(frozen=True)
class MissedCase:
    """One published table that is missed.

    Parameters
    ----------
    case : its id. n_rows : predicted. error : median of |relative error|. signed : median of the signed one.
    reason : what its rows say, in words. spread : how far tables of the same measurement differ from each other where
        there are several (median over cases of the same identity, of how far each is from their mean), else nan.
    """

    case: str
    n_rows: int
    error: float
    signed: float
    reason: str
    spread: float = float("nan")


def worst(
    rows: Sequence[Row],
    n: int,
    part_of: Callable[[PredictedRow], str],
    identity: Callable[[Table], tuple[object, ...]] | None = None,
) -> list[MissedCase]:
    """The ``n`` cases with the largest error, worst first.

    Parameters
    ----------
    rows : of a validation (:func:`clustersim.calibrate.score.evaluate`).
    part_of : the range of physics a row is in, such as its size class; the reason is looked for by it.
    identity : what two rows have in common that measure the same thing; shows what of the error is the data's own.
    """
    cases = grouped(predicted(rows), lambda row: str(row.cells["case_id"]))
    noise = spreads(rows, identity) if identity else {}
    missed_cases = [
        MissedCase(
            case,
            len(case_rows),
            float(np.median([abs(row.rel_error) for row in case_rows])),
            float(np.median([row.rel_error for row in case_rows])),
            _reason(case_rows, part_of),
            noise.get(case, float("nan")),
        )
        for case, case_rows in cases.items()
    ]
    return sorted(missed_cases, key=lambda case: (-case.error, case.case))[:n]


def spreads(rows: Iterable[Row], identity: Callable[[Table], tuple[object, ...]]) -> dict[str, float]:
    """Per case that measures what another case measures too: the median over their common rows of how far the case is
    from the geometric mean of all, as a share. No model can be nearer to all of them than that."""
    apart: dict[str, list[float]] = {}
    for same in grouped(predicted(rows), lambda row: identity(row.cells)).values():
        of_case = grouped(same, lambda row: str(row.cells["case_id"]))
        if len(of_case) < 2:
            continue
        logs = {
            case: float(np.log(np.median([row.measured for row in case_rows]))) for case, case_rows in of_case.items()
        }
        mean = float(np.mean(list(logs.values())))
        for case, value in logs.items():
            apart.setdefault(case, []).append(abs(float(np.expm1(value - mean))))
    return {case: float(np.median(values)) for case, values in apart.items()}


def _reason(rows: Sequence[PredictedRow], part_of: Callable[[PredictedRow], str]) -> str:
    """Which part misses, which way, and whether by one factor."""
    parts = {part: [row.rel_error for row in part_rows] for part, part_rows in grouped(rows, part_of).items()}
    middle: Mapping[str, float] = {name: float(np.median(values)) for name, values in parts.items()}
    name = max(middle, key=lambda part: abs(middle[part]))
    errors = np.array(parts[name])
    direction = "too short" if middle[name] < 0 else "too long"
    quartiles = np.percentile(np.log1p(errors), [25, 75])
    if len(errors) >= 3 and quartiles[1] - quartiles[0] <= SAME_FACTOR:
        how = f"by one factor, {1 / (1 + middle[name]):.2f}: {_CONSTANTS.get(name, UNTOLD)}"
    elif len(errors) >= 3:
        how = "by factors that vary: another choice of algorithm or protocol, or noise"
    else:
        how = f"by {abs(middle[name]):.0%}"
    rest = [
        other_part for other_part in middle if other_part != name and abs(middle[other_part]) > 0.5 * abs(middle[name])
    ]
    also = f" (and {', '.join(rest)})" if rest else ""
    return f"{name}{also}: predicted {direction} {how}"


_CONSTANTS = {
    "<=64 KiB": "a launch mode or host that the table does not tell",
    "64 KiB - 32 MiB": "hops or a protocol's share of the line rate",
    ">32 MiB": "the share of the line rate this machine's links reach",
}
UNTOLD = "something all its rows share and the table does not tell"
