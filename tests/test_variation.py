"""``[run.variation]``: what is drawn against closed forms, what is not drawn to the bit, and steps that vary."""

from __future__ import annotations

import json
from dataclasses import replace

import campaign_laws as laws
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from clustersim import scenario
from clustersim.app.cli import cli
from clustersim.core.errors import ScenarioError
from clustersim.core.program import Compute
from clustersim.core.units import Seconds
from clustersim.core.variation import RankPlaces, Variation, drawn
from clustersim.studies.campaign import maxima
from clustersim.studies.what_if.rerun import step_time
from clustersim.studies.what_if.spread import Distribution, spread

BASE = "ddp_gpt2_xl_2x8_a100"
RANKS = 64
STEPS = 4000
WHERE = RankPlaces(np.repeat(np.arange(8), 8), np.arange(RANKS))
SOURCES = {
    "fresh": {"step_cv": 0.02},
    "for good": {"gpu_cv": 0.013},
    "slow hosts": {"slow_hosts": 0.3, "slow_factor": 1.1},
    "day": {"day_swing": 0.02},
    "drifting": {"drift_cv": 0.01, "drift_steps": 10.0},
    "micro-batches": {"microbatch_cv": 0.2},
    "pauses": {"pause": Seconds(0.2), "pause_every": 20.0},
    "planned pauses": {"pause": Seconds(0.2), "pause_every": 20.0, "pause_together": True},
}


def latest(**fields):
    pace = drawn(Variation(**fields), STEPS, WHERE, seed=1).pace
    return pace.max(axis=1)


@pytest.mark.parametrize(
    ("law", "want"),
    [
        ("normal", 1 + 0.05 * maxima.mean_max_normal(RANKS)),
        ("lognormal", laws.mean_max_lognormal(RANKS, 0.05)),
        ("exponential", 1 + 0.05 * (laws.mean_max_exponential(RANKS) - 1)),
    ],
)
def test_the_latest_of_many_ranks_is_as_late_as_its_law_says(law, want):
    found = latest(step_cv=0.05, step_law=law)
    assert found.mean() == pytest.approx(want, abs=4 * found.std() / np.sqrt(STEPS))


def test_quantiles_of_the_latest_normal_rank_are_exact():
    found = latest(step_cv=0.02, step_law="normal")
    for q in (0.5, 0.95):
        assert np.quantile(found, q) == pytest.approx(1 + 0.02 * laws.quantile_max_normal(RANKS, q), abs=1e-3)


def test_what_is_for_good_and_what_is_fresh_add_as_squares_over_runs_and_only_fresh_moves_in_one():
    v = Variation(gpu_cv=0.02, step_cv=0.005, step_law="normal")
    runs = [drawn(v, 20, WHERE, 0, machine=m).pace.max(axis=1) for m in range(1500)]
    want = laws.step_of_two_levels(RANKS, 0.02, 0.005)
    assert np.mean(runs) == pytest.approx(want, abs=4 * np.std([one.mean() for one in runs]) / np.sqrt(1500))
    assert np.mean([one.std() for one in runs]) < 0.6 * np.std([one.mean() for one in runs])
    assert np.ptp(drawn(Variation(gpu_cv=0.02), 20, WHERE, 0).pace, axis=0).max() == 0


def test_slow_hosts_slow_a_step_as_often_as_one_of_them_is_there():
    v = Variation(slow_hosts=0.05, slow_factor=1.25)
    found = np.array([drawn(v, 1, WHERE, 0, machine=m).pace.max() for m in range(4000)])
    want = laws.step_with_slow_nodes(8, 0.05, 1.25)
    assert found.mean() == pytest.approx(want, abs=4 * found.std() / np.sqrt(4000))


@pytest.mark.parametrize(("together", "share"), [(True, 1 / 20), (False, 1 - (1 - 1 / 20) ** RANKS)])
def test_pauses_that_are_planned_come_seldom_and_others_in_nearly_every_step(together, share):
    v = Variation(pause=Seconds(0.2), pause_every=20.0, pause_together=together)
    struck = (drawn(v, STEPS, WHERE, 0).pauses > 0).any(axis=1).mean()
    assert struck == pytest.approx(share, abs=4 * np.sqrt(share * (1 - share) / STEPS))


def test_a_drift_forgets_where_it_was_after_its_steps():
    walk = drawn(Variation(drift_cv=0.01, drift_steps=10.0), 20_000, WHERE, 0).pace - 1
    assert walk.std() == pytest.approx(0.01, rel=0.02)
    assert np.mean(walk[10:] * walk[:-10]) / walk.var() == pytest.approx(np.exp(-1), abs=0.02)


def test_lengths_of_micro_batches_have_mean_one():
    lengths = drawn(Variation(microbatch_cv=0.3), 200, replace(WHERE, microbatches=4), 0).lengths
    assert lengths.shape == (200, 4, RANKS)
    assert (lengths.mean(), lengths.std()) == (pytest.approx(1.0, abs=0.01), pytest.approx(0.3, rel=0.03))


@given(st.sampled_from(sorted(SOURCES)), st.integers(0, 2**31))
def test_a_source_of_size_0_is_none_and_leaves_the_others_as_they_were(name, seed):
    alone = drawn(Variation(**SOURCES[name]), 3, WHERE, seed)
    zeros = {"step_cv": 0.0, "gpu_cv": 0.0, "slow_hosts": 0.0, "day_swing": 0.0, "drift_cv": 0.0, "microbatch_cv": 0.0}
    beside = drawn(Variation(**zeros | SOURCES[name]), 3, WHERE, seed)
    for field in ("pace", "lengths", "pauses"):
        a = getattr(alone, field)
        b = getattr(beside, field)
        assert (a is None) == (b is None)
        assert a is None or (a == b).all()
    nothing = drawn(Variation(**zeros), 3, WHERE, seed)
    assert (nothing.pace, nothing.lengths, nothing.pauses) == (None, None, None)


@given(st.floats(0.0, 1.0), st.integers(0, 1000))
def test_with_its_slowest_hosts_swapped_no_machine_is_slower(best, machine):
    v = Variation(gpu_cv=0.02, slow_hosts=0.1, slow_factor=1.2)
    now, better = (drawn(v, 1, WHERE, 0, machine=machine, best=share).pace.max() for share in (0.0, best))
    assert better <= now


# ---- in the step simulator -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [BASE, "ps_sync_cpu_1x8", "1f1b_gpt2_xl_1x8_a100", "zero1_llama3_8b_2x8_a100"])
def test_jitter_is_short_for_a_variation_and_none_of_either_is_a_steady_machine_to_the_bit(name):
    loaded = scenario.load(name)

    def step(changes):
        return step_time(loaded.changed({"run.seed": 3, "run.steps": 1, **changes}).run().timeline)

    assert step({"run.jitter": 0.02}) == step({"run.variation": {"step_cv": 0.02, "draws": "usual"}})
    assert step({"run.jitter": 0.0}) == step({"run.variation": {}})
    nothing = {"gpu_cv": 0.0, "slow_hosts": 0.5, "slow_factor": 1.0, "pause": "0 s", "pause_every": 2}
    assert step({"run.jitter": 0.0}) == step({"run.variation": nothing})


@pytest.mark.parametrize("name", ["slow hosts", "micro-batches", "pauses"])
def test_a_step_with_one_barrier_is_later_by_what_its_busiest_rank_computes_more(name):
    written = SOURCES[name] | ({"pause": "200 ms"} if name == "pauses" else {})
    loaded = scenario.load(BASE).changed({"run.variation": written})
    found = spread(loaded, 6, 10, budget=0.5)
    assert found.played < 60
    assert found.slope == pytest.approx(1.0, abs=0.01)
    assert found.error < 0.001
    assert found.times.min() >= found.still * (1 - 1e-9) or name == "micro-batches"


def test_steps_on_the_line_are_distributed_as_those_that_are_played():
    loaded = scenario.load(BASE).changed({"run.variation": {"step_cv": 0.02, "gpu_cv": 0.01}})
    line, whole = (spread(loaded, 5, 12, budget=budget) for budget in (0.3, 1e6))
    assert line.played < whole.played == 60
    np.testing.assert_allclose(line.times, whole.times, rtol=5 * line.error)
    assert Distribution.of(line.times).p95 == pytest.approx(Distribution.of(whole.times).p95, rel=0.005)


def test_what_stays_for_good_varies_over_machines_and_not_over_steps():
    found = spread(scenario.load(BASE).changed({"run.variation": SOURCES["for good"]}), 4, 3)
    assert found.within < 1e-9
    assert found.of_machines.std() > 1e-4 * found.still


def test_micro_batches_of_a_pipeline_are_as_long_on_every_stage():
    loaded = scenario.load("1f1b_gpt2_xl_1x8_a100")
    steady, uneven = (loaded.changed({"run.variation": v}).prepare().program for v in ({}, {"microbatch_cv": 0.3}))
    ratios: dict[tuple[int, int], set[float]] = {}
    for before, after in zip(steady.roles, uneven.roles, strict=True):
        for a, b in zip(before.ops, after.ops, strict=True):
            passes = isinstance(a, Compute) and a.phase in {"forward", "backward"} and np.all(a.duration > 0)
            if passes and a.label is not None and a.label.microbatch >= 0:
                here = np.round(np.asarray(b.duration / a.duration), 9).ravel().tolist()
                ratios.setdefault((a.step, a.label.microbatch), set()).update(here)
    assert len(ratios) > 1
    assert all(len(found) == 1 for found in ratios.values())
    assert len({next(iter(found)) for found in ratios.values()}) == len(ratios)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_percentiles_over_steps_and_machines_and_draws_them(tmp_path):
    change = "run.variation={step_cv=0.01, gpu_cv=0.013, slow_hosts=0.2, slow_factor=1.1}"
    command = ["variation", BASE, "--set", change, "--machines", "3", "--steps", "3", "--out", str(tmp_path / "v.png")]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    assert "all 9 steps were simulated" in done.output
    assert "machines, slowest hosts swapped" in done.output
    assert (tmp_path / "v.png").stat().st_size > 10_000
    said = json.loads(CliRunner().invoke(cli, [*command, "--json"]).output)
    assert said["still_s"] < said["steps"]["p50"] <= said["steps"]["p95"] <= said["steps"]["p99"]
    assert said["steps, slowest hosts swapped"]["mean"] <= said["steps"]["mean"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (("run.variation={step_cv=0.01}", "run.jitter=0.01"), "write one of jitter and variation"),
        (("run.variation={pause='1 s'}",), "write both of pause and pause_every"),
        (("run.variation={step_cv=-1}",), "step_cv"),
        (("run.variation={pause=1, pause_every=3}",), "write it like"),
        ((), "add a table [run.variation]"),
    ],
)
def test_bad_input_is_one_line(changes, told, clustersim):
    done = clustersim("variation", BASE, *(part for one in changes for part in ("--set", one)))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert told in done.stderr


def test_ranks_that_do_not_step_together_have_no_step():
    loaded = scenario.load("ps_async_1x8").changed({"run.variation": {"step_cv": 0.01}})
    with pytest.raises(ScenarioError, match="do not step together"):
        spread(loaded)
