"""Scoring: a case counts once, and no row is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustersim.calibrate.score import PredictedRow, SkippedRow, evaluate, number, read_table, score, statistics
from clustersim.core.errors import ProgramError, TraceError


def rows(**cases: list[float]) -> list[dict[str, str]]:
    return [{"case_id": case, "value": str(value)} for case, values in cases.items() for value in values]


def test_a_case_counts_once_however_many_rows_it_has() -> None:
    table = rows(large=[1.1] * 100, small=[1.3], other=[0.8])
    scored = statistics(evaluate(table, lambda row: (1.0, float(row["value"]))))
    assert (scored.n_rows, scored.n_cases, scored.n_skipped) == (102, 3, 0)
    assert scored.median_abs_rel_error == pytest.approx(0.2)
    assert scored.median_rel_error == pytest.approx(0.1)
    assert scored.p90_abs_rel_error == pytest.approx(0.28)


def test_a_row_that_cannot_be_predicted_keeps_its_reason_and_costs_no_other() -> None:
    reasons = [ValueError("no batch"), ProgramError("no such pin"), KeyError("slip"), None]

    def predict(row: dict[str, str]) -> tuple[float, float]:
        reason = reasons[int(row["value"])]
        if reason:
            raise reason
        return 2.0, 3.0

    found = evaluate(rows(a=[0, 1, 2, 3]), lambda row: predict({**row, "value": row["value"][0]}))
    assert [row.skipped if isinstance(row, SkippedRow) else None for row in found] == [
        "no batch",
        "no such pin",
        "internal error: KeyError: 'slip'",
        None,
    ]
    assert isinstance(found[3], PredictedRow)
    assert found[3].rel_error == pytest.approx(0.5)
    result = score(found, {"case": lambda row: row.cells["case_id"]})
    assert result.overall.n_skipped == result.by["case"]["a"].n_skipped == 3
    assert len(result.rows) == 4


def test_nothing_predicted_is_no_error_of_zero() -> None:
    assert statistics([SkippedRow({"case_id": "a"}, "why")]).median_abs_rel_error is None


def test_a_table_without_a_column_or_with_a_short_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("case_id,sise\na,1\n")
    with pytest.raises(TraceError, match="no column 'size' in the header; did you mean 'sise'"):
        read_table(path, ("case_id", "size"))
    path.write_text("case_id,size\na\n")
    with pytest.raises(TraceError, match="line 2: the number of fields differs"):
        read_table(path, ("case_id", "size"))


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "inf", "nan"])
def test_a_number_is_above_zero_or_named_by_its_column(text: str) -> None:
    with pytest.raises(ValueError, match="size is"):
        number({"size": text}, "size")
