"""What measured steps say of kernels and of the host's calls: the two factors that make them most likely.

A prediction rests on published rates of a device and on a usual host; a real machine's kernels take ``kernels`` times
as long, and its host's calls ``host`` times. Each has a prior, log-normal around 1, whose width is what published steps
showed. With the logarithm of a prediction ``f`` and of its measurement ``y`` both factors follow from the least of

    sum ((f(x) - y) / NOISE)^2 + sum (x / PRIOR)^2        over x = (log kernels, log host)

found by Gauss-Newton steps, each run played as its own scenario. What remains uncertain of the measured steps
themselves, over what was so before, is by how much the range around further predictions narrows.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache

import msgspec
import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.errors import ScenarioError
from clustersim.core.texts import Table
from clustersim.core.units import format_time
from clustersim.scenario import Scenario, from_table
from clustersim.scenario.file.reading import Changes

PRIOR = np.array([0.10, 0.50])
"""Standard deviations of log kernels and log host: half of the published steps of whole models on GPUs that are never
short of work are within 6 %; hosts of one stack differ by a factor 1.6, from CPU to CPU and setting to setting."""
NOISE = 0.02
"""Relative standard deviation of a measured step against the same step of another day."""
ROUNDS = 2
"""Gauss-Newton steps; a step is nearly linear in both factors but where one takes over from the other."""
DIFFERENCE = 0.1
"""Of a derivative, in logarithms."""
FARTHEST = 1.5
"""Most that one round moves a factor's logarithm."""


class TimedStep(msgspec.Struct, frozen=True):
    """One measured step: what it was, and its seconds measured, predicted as usual, and with the factors."""

    title: str
    measured: float
    usual: float
    fitted: float


class StepFit(msgspec.Struct, frozen=True):
    """What measured steps say.

    kernels, host : how many times as long as usual. narrowed : share that is left of a range. steps : what was fitted.
    """

    kernels: float
    host: float
    narrowed: float
    steps: tuple[TimedStep, ...]

    def __str__(self) -> str:
        times = "; ".join(
            f"{step.title} took {format_time(step.measured)}, {step.usual / step.measured - 1:+.0%} as usual, "
            f"{step.fitted / step.measured - 1:+.0%} so"
            for step in self.steps
        )
        kernels = f"kernels take {self.kernels:.2f} and the host's calls {self.host:.2f} times the usual"
        return f"measured steps: {kernels} ({times})"


def informed(scenario: Scenario) -> Scenario:
    """The scenario with what its measured steps say of kernels and host; itself where it has none.

    Raises :class:`ScenarioError` for a step that is faster than the peak rate of its GPUs allows, or cannot be played.
    """
    measured = scenario.file.measured
    if scenario.fit is not None or measured is None or not measured.steps:
        return scenario
    own = {key: value for key, value in scenario.changes.items() if key.split(".")[0] == "measured"}
    key = json.dumps([scenario.table, own], sort_keys=True, default=str)
    return replace(scenario, fit=_fit(key, str(scenario.path), _Told(scenario.table, own)))


class _Told:
    """The tables that a key stands for; equal to all others, so that the key alone tells fits apart."""

    def __init__(self, table: Table, own: Changes) -> None:
        self.table = table
        self.own = own

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Told)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=32)
def _fit(key: str, path: str, tables: _Told) -> StepFit:
    base = from_table(tables.table, path, tables.own)
    measured = base.file.measured
    timed_steps = () if measured is None else measured.steps
    runs = []
    for i, step in enumerate(timed_steps):
        with base.at(f"$.measured.steps[{i}].set"):
            runs.append(from_table(tables.table, path, {**tables.own, **step.set}))
    times = np.array([float(step.time) for step in timed_steps])
    for i, (run, time) in enumerate(zip(runs, times.tolist(), strict=True)):
        _possible(run, time, i)
    return _most_likely(runs, times)


def _most_likely(runs: list[Scenario], times: Floats) -> StepFit:
    logs = np.zeros(2)
    aim = np.log(times)
    usual = predicted = _seconds(runs, logs)
    slopes = np.zeros((len(runs), 2))
    for _ in range(ROUNDS):
        for j in range(2):
            moved = logs + DIFFERENCE * np.eye(2)[j]
            slopes[:, j] = (_seconds(runs, moved) - predicted) / DIFFERENCE
        curve = slopes.T @ slopes / NOISE**2 + np.diag(PRIOR**-2)
        pull = slopes.T @ (aim - predicted) / NOISE**2 - logs / PRIOR**2
        logs = logs + np.clip(np.linalg.solve(curve, pull), -FARTHEST, FARTHEST)
        predicted = _seconds(runs, logs)
    before = np.sqrt(np.mean(np.sum((slopes * PRIOR) ** 2, axis=1)))
    left = np.sqrt(np.mean(np.sum((slopes @ np.linalg.inv(curve)) * slopes, axis=1)) + NOISE**2)
    steps = tuple(
        TimedStep(run.title, time, float(np.exp(first)), float(np.exp(last)))
        for run, time, first, last in zip(runs, times.tolist(), usual, predicted, strict=True)
    )
    kernels, host = np.exp(logs).tolist()
    return StepFit(kernels, host, float(min(1.0, left / before)) if before else 1.0, steps)


def _seconds(runs: list[Scenario], factors: Floats) -> Floats:
    """Logarithms of the predicted seconds of every run with factors ``exp(factors)``."""
    kernels, host = np.exp(factors).tolist()
    fit = StepFit(kernels, host, 1.0, ())
    return np.log([replace(run, fit=fit).run().summary["step_time_s"] for run in runs])


def _possible(run: Scenario, time: float, i: int) -> None:
    """Raise :class:`ScenarioError` where a measured step beats the peak of its GPUs."""
    prepared = replace(run, fit=StepFit(1.0, 1.0, 1.0, ())).prepare()
    config = prepared.scenario.config
    samples = config.rank_samples * prepared.mesh.size("dp")
    least = samples * prepared.model.flops_per_sample() / (prepared.peak_flops * prepared.gpus) if prepared.gpus else 0
    if time < least:
        raise ScenarioError(
            f"{run.path}: a step of {format_time(time)} is faster than {format_time(least)}, which the model's FLOPs "
            f"take on {prepared.gpus} {prepared.devices} at peak (at $.measured.steps[{i}].time)"
        )
