"""Strategies that repeat only every so many steps: figures of a step are means over whole periods."""

from __future__ import annotations

import runpy

import msgspec
import numpy as np
import pytest
from conftest import ROOT

from clustersim import scenario
from clustersim.core.errors import ProgramError, ScenarioError
from clustersim.core.program import COMPUTE_STREAM, Compute, seconds
from clustersim.explain.metrics import WARMUP, steady_window, whole_periods
from clustersim.studies.what_if.comparison import compare
from clustersim.studies.what_if.spread import spread
from clustersim.testing import check_period
from clustersim.training.strategies import STRATEGIES
from clustersim.training.strategies.base import Strategy
from clustersim.training.strategies.walk import walked

NAME = "ddp_resnet50_1x8_v100"
EVERY = 4
CHANGES = {"run.jitter": 0.0, "run.backend": "ideal"}


OWN = runpy.run_path(str(ROOT / "tests" / "data" / "own_parts" / "acme_parts.py"))
LocalConfig, LocalSGD = OWN["LocalConfig"], OWN["LocalSGD"]


@pytest.fixture
def local_sgd():
    """The strategy, in the table."""
    row = OWN["LOCAL_SGD"]
    STRATEGIES.register(row)
    yield row
    STRATEGIES.withdraw(row.name)


def result(steps, every=EVERY, **more):
    strategy = {"kind": "local_sgd", "micro_batch_size": 64, "every": every}
    return scenario.load(NAME, {**CHANGES, **more, "run.steps": steps, "strategy": strategy}).run()


@pytest.mark.parametrize("every", [1, EVERY, 7])
def test_a_step_costs_its_kernels_and_its_share_of_an_exchange_however_many_steps_are_asked_for(local_sgd, every):
    figures = []
    for steps in (1, 2, 3, 4, 5, 8, 9, 11, 14):
        ran = result(steps, every)
        if every == 1 and steps == 1:
            continue  # a first step has nothing before it
        program = ran.prepared.program
        timeline = ran.timeline
        (role,) = program.roles
        kernels = sum(
            float(np.max(seconds(role, op)))
            for op in role.ops
            if isinstance(op, Compute) and op.stream == COMPUTE_STREAM and op.step == 1
        )
        ops = timeline.per_op()
        lasts = [ops["end"][i] - ops["start"][i] for i, op in enumerate(timeline.ops) if op.kind == "all_reduce"]
        assert ran.summary["step_time_s"] == pytest.approx(kernels + lasts[0] / every, rel=1e-9)
        window = steady_window(timeline).steps
        assert len(window) % every == 0
        figures.append((ran.summary["step_time_s"], ran.summary["bytes_sent_per_gpu"]))
    sent = 2 * 7 / 8 * ran.prepared.model.parameters * 4 / every
    assert [each for _, each in figures] == pytest.approx([sent] * len(figures), rel=1e-12)
    assert [each for each, _ in figures] == pytest.approx([figures[0][0]] * len(figures), rel=1e-9)


def test_what_follows_the_update_is_not_told_to_start_late(local_sgd):
    causes = result(2 * EVERY, **{"run.backend": "nccl"}).explain().causes
    assert causes
    assert not [text for text in causes if "backward" in text]


def test_that_more_steps_are_played_than_asked_for_is_said(local_sgd):
    more = result(3)
    enough = result(WARMUP + 2 * EVERY)
    assert more.scenario.steps == WARMUP + EVERY
    assert any("6 steps are played, not 3 (run.steps)" in note for note in more.prepared.notes)
    assert not any("steps are played" in note for note in enough.prepared.notes)
    assert more.scenario.file.run.steps == 3  # the file says what it says


def test_compared_strategies_are_played_over_whole_periods(local_sgd, monkeypatch):
    few = {kind: STRATEGIES[kind] for kind in ("ddp", "local_sgd")}
    monkeypatch.setattr("clustersim.studies.what_if.comparison.STRATEGIES", few)
    rows = {
        (row.strategy, row.own): row for row in compare(NAME, CHANGES | {"strategy": {"kind": "local_sgd", "every": 8}})
    }
    plain = scenario.load(NAME, CHANGES | {"strategy.broadcast_buffers": False}).run().summary["bytes_sent_per_gpu"]
    for own, every in ((True, 8), (False, EVERY)):
        assert rows["local_sgd", own].bytes_sent_per_gpu == pytest.approx(plain / every, rel=1e-9)


def test_exchanges_of_an_explained_run_are_those_of_a_mean_step(local_sgd):
    from clustersim.explain.volume import volume

    ran = result(3)
    table = volume(ran.timeline, ran.summary["steady_steps"])
    assert table["count"].tolist() == [1 / EVERY]


def test_steps_that_vary_are_refused_where_ranks_do_not_wait_in_each(local_sgd):
    made = scenario.load(
        NAME,
        {"run.variation": {"step_cv": 0.1}, "strategy": {"kind": "local_sgd", "every": 4}},
    )
    with pytest.raises(ScenarioError, match="only every 4 steps"):
        spread(made, 2, 4)


def test_a_period_is_a_number_or_follows_from_the_knobs():
    fixed = Strategy("three", LocalConfig, walked(LocalSGD), period=3)
    assert fixed.period_of(LocalConfig()) == 3
    with pytest.raises(ProgramError, match="at least 1"):
        Strategy("never", LocalConfig, walked(LocalSGD), period=0).period_of(LocalConfig())


@pytest.mark.parametrize(("period", "refused"), [(1, True), (3, True), (EVERY, False), (2 * EVERY, True)])
def test_a_period_that_is_not_the_program_s_breaks_the_contract(period, refused):
    row = msgspec.structs.replace(OWN["LOCAL_SGD"], period=period)
    if not refused:
        check_period(row)
        return
    with pytest.raises(AssertionError, match=f"repeat after {EVERY}, its period is {period}"):
        check_period(row)


@pytest.mark.parametrize("period", [1, 2, 3, 4, 9])
def test_the_fewest_steps_of_whole_periods_are_played(period):
    for steps in range(1, 40):
        played = whole_periods(steps, period)
        assert played >= steps
        if period == 1:
            assert played == steps
            continue
        assert (played - WARMUP) % period == 0
        assert WARMUP + period <= played < max(steps, WARMUP + 1) + period
