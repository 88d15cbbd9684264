"""One own measurement known: which row of a group is, and what it says of the others."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import ROOT
from kernel_errors import ClassError, Fitted, Judged

from clustersim.calibrate.score import predicted, read_table, scored
from tests.evidence.gpu_score import KernelTarget, kernel_line, order_line, published_line, step_line
from tests.evidence.known_steps import device_factor, group_of, known_of, known_rows
from tests.evidence.step_play import costs_of, scaled, step_time
from tests.evidence.step_rows import COLUMNS, publisher, read

TABLE = ROOT / "tests" / "data" / "measurements" / "training_steps.csv.gz"


@pytest.fixture(scope="module")
def table() -> list[dict[str, str]]:
    rows = read_table(TABLE, COLUMNS)
    return [row for row in rows if publisher(row) == "ptddp" and int(row["gpus"] or 1) <= 16]


def test_the_smallest_scale_of_a_group_is_known_and_never_scored(table):
    anchors = known_of(table)
    scored = known_rows(table)
    assert len(scored) >= 10
    for row in scored:
        known = anchors[group_of(row.cells)]
        assert int(row.cells["gpus"]) > int(known["gpus"])
        assert known["model"] == row.cells["model"]


def test_the_known_row_is_met_by_its_factor(table):
    known = next(iter(known_of(table).values()))
    run = read(known)
    assert step_time(run, scaled(costs_of(run), device_factor(run))) == pytest.approx(run.measured, rel=0.01)


def test_a_known_row_that_took_twice_as_long_makes_the_others_longer(table):
    few = [row for row in table if group_of(row) == group_of(table[0])]
    known = known_of(few)[group_of(table[0])]
    slower = [{**row, "value": str(2 * float(row["value"]))} if row is known else row for row in few]
    plain, slow = ([row.predicted for row in predicted(known_rows(rows))] for rows in (few, slower))
    ratio = np.array(slow) / np.array(plain)
    assert ratio.size and (ratio > 1.2).all() if "time" in known["metric"] else (ratio < 0.9).all()


def test_lines_say_what_was_played_and_whether_the_target_is_met(table):
    rows = known_rows(table)
    line = step_line("x", rows, 0.05, 0.15)
    assert f"of {len(rows)}" in line.reached
    assert not step_line("x", rows, 0.0).met
    assert order_line([]).met is False


def errors(median: float, high: float) -> dict[str, ClassError]:
    return {"big": ClassError(median, high, {})}


@pytest.mark.parametrize(
    ("left_out", "own", "met"),
    [((0.06, 0.15), 0.05, True), ((0.08, 0.15), 0.05, False), ((0.06, 0.17), 0.05, False), ((0.06, 0.15), 0.07, False)],
)
def test_a_kernel_s_target_is_of_the_median_the_tail_and_ten_own_rows(left_out, own, met):
    judged = Judged(Fitted({}, {}), 100, errors(0.04, 0.1), errors(*left_out), errors(own, 0.1))
    target = KernelTarget("big", 0.07, 0.16, 0.06)
    line = kernel_line("products", judged, target)
    assert line.met is target.met(judged) is met
    assert line.target == "7% (16%) left out, 6% with ten"
    assert "GPU left out" in line.reached


def test_a_published_part_may_be_as_far_off_as_it_was_and_a_little_more():
    rows = [scored({"case_id": str(i)}, 1.0, 1.0 + error) for i, error in enumerate((0.02, 0.049, 0.2))]
    assert published_line("x", rows, 0.047, 0.003).met
    assert not published_line("x", rows, 0.045, 0.003).met
