"""A planner ranks options. Real grids say whether it ranks them right: measured rows of one model, machine and software
that differ in micro-batch, sequence length or number of GPUs only, as llm-foundry published them (MPT, 125M to 30B)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from tests.evidence.sharded_rows import read_sharded
from tests.evidence.step_play import step_time_as_priced
from tests.tables import table_rows

TABLE = Path(__file__).parents[1].parent / "shared" / "measurements" / "training_steps.csv"
pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not TABLE.exists(), reason="../shared/measurements is not there"),
]

VARIED = {"micro_batch_per_gpu", "seq_len", "gpus"}
FOLLOWS = {"nodes", "dp", "grad_accum", "global_batch"}
"""What an author changes with them: passes that keep the batch, nodes that hold the GPUs."""
SAID = {"case_id", "params", "metric", "value", "unit", "peak_mem_GiB", "notes"}
"""What a row measured, and remarks."""


@dataclass(frozen=True)
class Grid:
    """One group. gpus : (n,). measured, predicted : (n,) tokens/s per GPU."""

    name: str
    gpus: np.ndarray
    measured: np.ndarray
    predicted: np.ndarray

    def agreement(self, *, whole_machine: bool) -> tuple[float, float]:
        """(Spearman's rank correlation, measured rate of the predicted best over the measured best)."""
        times = self.gpus if whole_machine else 1.0
        measured = self.measured * times
        predicted = self.predicted * times
        return float(spearmanr(measured, predicted).statistic), float(measured[predicted.argmax()] / measured.max())


@pytest.fixture(scope="module")
def grids():
    """Every group of four rows or more."""
    groups = defaultdict(list)
    for row in table_rows(TABLE):
        if row["case_id"].startswith("mosaic"):
            key = tuple(value for name, value in row.items() if name not in VARIED | FOLLOWS | SAID)
            groups[key].append(row)
    return [grid(rows) for rows in groups.values() if len(rows) >= 4]


def grid(rows):
    runs = [read_sharded(row) for row in rows]
    tokens = np.array(
        [int(row["micro_batch_per_gpu"]) * int(row["grad_accum"] or 1) * int(row["seq_len"]) for row in rows]
    )
    gpus = np.array([int(row["gpus"]) for row in rows])
    counts = f"{gpus.min()} to {gpus.max()} GPUs"
    lengths = sorted({int(row["seq_len"]) for row in rows})
    name = f"{rows[0]['model']}, {rows[0]['gpu']}, {counts}, {lengths[0]} to {lengths[-1]} tokens"
    measured = tokens / np.array([run.measured for run in runs])
    return Grid(name, gpus, measured, tokens / np.array([step_time_as_priced(run) for run in runs]))


def test_there_are_grids_enough_to_judge_by(grids):
    assert len(grids) >= 15
    assert sum(len(one.gpus) for one in grids) >= 100


def test_tokens_per_second_of_the_machine_rank_as_measured_and_the_best_is_the_best(grids):
    """What a plan compares: every one of 18 groups has a rank correlation of 1.0, and the measured best is chosen."""
    for one in grids:
        rank, best = one.agreement(whole_machine=True)
        assert rank >= 0.9, one.name
        assert best >= 0.97, one.name


def test_tokens_per_second_and_gpu_rank_as_measured_where_measurements_differ(grids):
    """What cost per token follows: harder, since scaling from 16 to 128 GPUs changes it by 1 to 7 % only.

    13 of 18 groups reach 0.9, and in 17 the predicted best is within 3 % of the measured best. The others are of pure
    bf16 on 16 to 128 A100: three whose rows differ by 1 to 4 %, as much as predictions are off; one of 760M by 2.4 %;
    and MPT-1b, whose 32 GPUs were measured 18 % slower than both 16 and 64, for which its source gives no reason.
    """
    reached = [one for one in grids if one.agreement(whole_machine=False)[0] >= 0.9]
    near = [one for one in grids if one.agreement(whole_machine=False)[1] >= 0.97]
    assert len(reached) >= 13
    assert len(near) >= len(grids) - 1
    odd = {one.name for one in grids if one not in near}
    for one in grids:
        differ = one.measured.max() / one.measured.min() - 1
        if differ > 0.05 and one.name not in odd:
            assert one in reached, one.name
