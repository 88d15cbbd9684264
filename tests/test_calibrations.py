"""A calibrated file predicts its own log no worse than the shipped one in any class of sizes; sizes left out better."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import SHARED

from clustersim.calibrate.fit.calibrated import halves
from tests.evidence.calibrations import SIZE_CLASSES, CalibratedLog, ClassErrors, calibrated_log, logs, summaries

TABLE = SHARED / "measurements" / "nccl_tests.csv"
CHOSEN = ("dstack gcp-a3-high", "eth-cscs", "OCI")
"""Small logs: one with a slow NIC, one that gains in one class, and one of too few rows."""


@pytest.mark.skipif(not TABLE.exists(), reason="the measured collectives are in ../shared")
def test_no_class_of_a_published_log_is_worse_after_and_sizes_left_out_are_better():
    chosen = {key: rows for key, rows in logs(TABLE).items() if any(name in " ".join(key) for name in CHOSEN)}
    rows = [calibrated_log(key, samples) for key, samples in chosen.items()]
    assert {row.topology for row in rows} == {"gcp-a3-high", "alps-gh200"}
    assert any("slowest NIC" in row.structure for row in rows)
    for line in summaries(rows):
        assert line.worse == 0
        if line.logs:
            assert line.after < line.before
            assert line.held_out_after < line.held_out_before


def test_a_class_that_is_worse_is_counted():
    better = ClassErrors(5, 0.2, 0.1, 0.2, 0.3)
    worse = ClassErrors(5, 0.100, 0.102, float("nan"), float("nan"))
    rows = [CalibratedLog("a", "b", "c", "", 1.0, {SIZE_CLASSES[0]: better, SIZE_CLASSES[2]: worse})]
    small, medium, large = summaries(rows)
    assert (small.worse, small.held_out_worse, medium.logs, large.worse) == (0, 1, 0, 1)
    assert np.isnan(large.held_out_after)


def test_repeats_of_a_size_are_in_one_half():
    assert halves(["a"] * 4 + ["b"], [8, 8, 16, 32, 64]) == ([0, 1, 3, 4], [2])
