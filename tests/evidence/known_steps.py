"""One own measurement known: of each model that somebody ran on several scales, the smallest gives the rest.

What a user asks who has run 8 GPUs and wonders about 512. Rows of one source, software, model, precision and GPU are a
group; the one on the fewest GPUs, and of those the one with the most work per GPU, is known. Of a model that is split
it is a ``[[measured.steps]]`` of its scenario, and both factors that follow hold for the others
(:mod:`clustersim.scenario.run.timed`); else all of a device's work takes as many times as long as makes that row right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from unittest.mock import patch

import numpy as np

from clustersim import scenario
from clustersim.calibrate.score import Row as ScoredRow
from clustersim.calibrate.score import evaluate
from clustersim.core.arrays import Floats
from clustersim.core.errors import ClusterSimError
from clustersim.core.texts import Table
from clustersim.scenario.run import timed
from clustersim.scenario.run.timed import StepFit, informed
from clustersim.studies.what_if.folded import folded
from tests.evidence.hybrid_rows import is_hybrid, measured, scenario_table
from tests.evidence.sharded_rows import is_sharded, read_sharded
from tests.evidence.software import Row, framework
from tests.evidence.step_play import costs_of, scaled, step_time, step_time_as_priced
from tests.evidence.step_rows import StepRun, publisher, read

ROUNDS = 3
"""Plays in which the known row is met: a step is nearly linear in what its kernels take."""
MET = 0.005
"""How near is near enough, relatively."""
FACTORS = (0.2, 5.0)
"""Between which a device's work may be slower than usual."""


def known_rows(table: Iterable[Row], most_gpus: int | None = None) -> list[ScoredRow]:
    """Rows beyond the smallest scale of their group, predicted with that known; ``most_gpus`` leaves larger ones out.

    Rows that cannot be played, or whose known row cannot, say why; those whose source doubts its figure are left out.
    """
    table = [row for row in table if not row.get("suspect", "").strip()]
    anchors = known_of(table)
    beyond = [
        row
        for row in table
        if (key := group_of(row)) in anchors
        and gpus_of(row) > gpus_of(anchors[key])
        and (most_gpus is None or gpus_of(row) <= most_gpus)
    ]
    return evaluate(beyond, lambda row: predict_known(row, anchors[group_of(row)]))


def known_of(table: Iterable[Row]) -> dict[tuple[str, ...], Row]:
    """Of each group the row that is known."""
    anchors: dict[tuple[str, ...], Row] = {}
    for row in table:
        key = group_of(row)
        if key not in anchors or _before(row) < _before(anchors[key]):
            anchors[key] = row
    return anchors


def group_of(row: Row) -> tuple[str, ...]:
    """What a known row and those that it tells of have in common."""
    columns = ("model", "layers", "d_model", "precision", "gpu", "act_ckpt", "offload", "topology")
    software = row.get("framework", "") if is_hybrid(row) else framework(row).name
    return (publisher(row), software, *(row.get(column, "") for column in columns))


def gpus_of(row: Row) -> int:
    """GPUs of a row."""
    return int(row["gpus"] or 1)


def _before(row: Row) -> tuple[int, float]:
    work = float(row["micro_batch_per_gpu"] or 0) * float(row.get("seq_len") or 1)
    return gpus_of(row), -work


def predict_known(row: Row, known: Row) -> tuple[float, float]:
    """Seconds of a row as measured, and as predicted with another row known. Raises ValueError or a clustersim error
    where one of them cannot be played."""
    if is_hybrid(row):
        fit = step_fit(json.dumps(scenario_table(known), sort_keys=True), measured(known, scenario_table(known)))
        table = scenario_table(row)
        return measured(row, table), with_fit(table, fit)
    run = _run(row)
    costs = scaled(costs_of(run), device_factor(_run(known)))
    return run.measured, step_time(run, costs)


def _run(row: Row) -> StepRun:
    return read_sharded(row) if is_sharded(row) else read(row)


@lru_cache(maxsize=256)
def step_fit(table: str, seconds: float) -> StepFit:
    """What a measured step of a scenario says, whose tables are JSON."""
    known = {**json.loads(table), "measured": {"steps": [{"time": f"{seconds!r} s"}]}}
    with patch.object(timed, "_seconds", _folded_seconds):
        fit = informed(scenario.from_table(known, "known.toml")).fit
    if fit is None:
        raise ClusterSimError("the known step says nothing")
    return fit


def _folded_seconds(runs: list[scenario.Scenario], at: Floats) -> Floats:
    """What :mod:`clustersim.scenario.run.timed` asks of every run, folded as the rows are."""
    kernels, host = np.exp(at).tolist()
    fit = StepFit(kernels, host, 1.0, ())
    return np.log([folded(replace(run, fit=fit), roughly=True).step_time_s for run in runs])


def with_fit(table: Table, fit: StepFit) -> float:
    """Seconds of a scenario's step with what a measured one says."""
    return folded(replace(scenario.from_table(table, "row.toml"), fit=fit), roughly=True).step_time_s


@lru_cache(maxsize=1024)
def device_factor(run: StepRun) -> float:
    """How many times as long as usual a device's work takes that makes a run's step as long as it was."""
    costs = costs_of(run)
    plain = step_time_as_priced(replace(run, measured=0.0))
    factors, times = [1.0], [plain]
    for _ in range(ROUNDS):
        if abs(times[-1] / run.measured - 1.0) < MET:
            break
        slope = _slope(factors, times)
        guess = factors[-1] + (run.measured - times[-1]) / slope
        factors.append(float(np.clip(guess, *FACTORS)))
        times.append(step_time(run, scaled(costs, factors[-1])))
    return factors[-1]


def _slope(factors: list[float], times: list[float]) -> float:
    """Seconds a factor: all of the step is compute until a second play says otherwise."""
    if len(factors) < 2 or factors[-1] == factors[-2] or times[-1] == times[-2]:
        return times[-1] / factors[-1]
    return (times[-1] - times[-2]) / (factors[-1] - factors[-2])
