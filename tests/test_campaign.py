"""A campaign played: both engines against the closed forms and each other, and the ledger against the clock."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from typing import Any

import campaign_laws as laws
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ks_2samp

from clustersim.core.units import quantity
from clustersim.scenario.file.campaign_schema import CampaignTable
from clustersim.studies.campaign import causes, pools, renewal, whatif
from clustersim.studies.campaign.axis import SaveKind, axis
from clustersim.studies.campaign.batches import BATCH, CampaignOptions, played
from clustersim.studies.campaign.job import Campaign, Job, campaign
from clustersim.studies.campaign.ledger import GOODPUTS, PARTS, joined
from clustersim.studies.campaign.many import play
from clustersim.studies.campaign.replica import replica

SECOND = Job(nodes=64, gpus=512, step_s=1.0, replicas=8, copies=8)
PLAIN: dict[str, Any] = {
    "failures": [{"name": "any", "rate": "6 per day"}],
    "recovery": {"policy": "replace", "restart": "10 min"},
    "checkpoints": [{"every": "30 min", "stall": "1 min", "load": "2 min"}],
    "duration": "5 d",
}
NODES = {"spares": 1, "repair": {"mean": "6 h", "law": "exponential"}, "rack": 4, "switch": 16}
LOCAL = {"every": "10 min", "stall": "2 s", "load": "20 s", "tier": "memory"}
RACKS = [PLAIN["failures"][0], {"name": "rack", "rate": "30 per 1000 rack-days", "scope": "rack"}]
RICH: dict[str, dict[str, Any]] = {
    "plain": {},
    "silent and located": {
        "failures": [{"name": "any", "rate": "90 per 1000 node-days", "silent": 0.3}],
        "detection": {"report": "1 min", "timeout": "30 min", "locate": {"mean": "8 min", "median": "4 min"}},
    },
    "few spares": {"nodes": NODES, "failures": RACKS},
    "two tiers": {"nodes": NODES | {"spares": 20}, "failures": RACKS, "checkpoints": [LOCAL, PLAIN["checkpoints"][0]]},
    "asynchronous": {
        "checkpoints": [{"every": "20 min", "stall": "1 s", "write": "15 min", "load": "1 min", "asynchronous": True}]
    },
    "calendar": {
        "calendar": [
            {"name": "perplexity", "kind": "evaluation", "every": "1000 steps", "lasts": "40 s"},
            {"name": "firmware", "kind": "maintenance", "every": "11 h", "lasts": "30 min"},
        ]
    },
    "slow for a while": {
        "degraded": [
            {"name": "link", "rate": "4 per day", "lasts": {"mean": "1 h", "law": "exponential"}, "factor": 1.5}
        ],
    },
    "uneven machines": {"job": replace(SECOND, machines=(1.05, 1.1, 1.3), step_cv=3.0)},
    "dropping": {"recovery": {"policy": "drop_replica", "restart": "20 s", "replace": "5 min"}, "nodes": NODES},
    "shrinking": {"recovery": {"policy": "shrink", "restart": "5 min"}, "nodes": NODES | {"spares": 0}},
    "new machines": {"failures": [{"name": "any", "rate": "20 per 1000 node-days", "shape": 0.6}]},
    "asked for again": {
        "recovery": {"policy": "requeue", "restart": "1 min", "replace": {"mean": "20 min", "median": "10 min"}},
        "failures": [{"name": "software", "rate": "5 per day", "scope": "job"}],
    },
}


def made(job: Job = SECOND, **changes: Any) -> Campaign:
    table = msgspec.convert(PLAIN | changes, CampaignTable, dec_hook=quantity)
    return campaign(table, job)


# ---- the axis --------------------------------------------------------------------------------------------------------


@given(
    st.floats(1.0, 1e5),
    st.floats(0.5, 1e4),
    st.floats(0, 0.4),
    st.floats(0, 0.9),
    st.floats(1.0, 1e4),
    st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_nobody_falls_back_forward_and_the_parts_of_the_axis_are_its_length(
    work, every, stall, write, evaluated, where
):
    laid = axis(work, [SaveKind(every, stall * every, write * every)], [(evaluated, 3.0)])
    # Up to 200,000 saves are added up: their rounding is as many times 1e-16.
    assert laid.work + laid.stalls + laid.evaluation == pytest.approx(laid.end, rel=3e-11)
    places = np.array(where) * laid.end
    back = laid.fall_back(0, places)
    assert (back <= places).all()
    assert (laid.fall_back(0, np.array([0.0])) == 0.0).all()
    if write <= stall:  # the last save counts at the end
        assert laid.fall_back(0, np.array([laid.end]))[0] == laid.end


# ---- against the closed forms ----------------------------------------------------------------------------------------

CASES = {  # M, delta, R, tau, Ts [s], of the facts' cases A to E, shorter where they are long
    "A": (180 * 60, 120, 600, 1620, 16200 * 60),
    "B": (180 * 60, 15, 180, 570, 9500 * 60),
    "C": (6492, 300, 300, 3600, 6000 * 60),
    "D": (474 * 60, 40, 900, 3600, 12000 * 60),
    "E": (2160, 30, 300, 360, 60000),
}


@pytest.mark.parametrize("name", CASES)
def test_mean_spread_and_tail_of_exponential_failures_are_dalys(name):
    mtbf, delta, recovery, tau, work = CASES[name]
    found = play(
        made(
            failures=[{"name": "any", "rate": f"{86400 * 7 / mtbf:.9f} per week"}],
            recovery={"policy": "replace", "restart": f"{recovery} s"},
            checkpoints=[{"every": f"{tau} s", "stall": f"{delta} s", "load": "0 s"}],
            duration=f"{work} s",
        ),
        n := 4000,
        seed=1,
    )
    case = (mtbf, delta, recovery, tau, work)
    mean = renewal.expected_time(*case)
    sd = laws.spread(*case)
    assert found.elapsed.mean() == pytest.approx(mean, abs=4 * sd / math.sqrt(n))
    assert found.elapsed.std() == pytest.approx(sd, rel=0.06)
    # The law of a few hundred segments is not quite normal: its tail is a little longer.
    assert np.percentile(found.elapsed, 95) == pytest.approx(laws.percentile_95(*case), abs=0.15 * sd)


def test_the_closed_form_of_a_campaign_is_its_mean():
    one = made()
    found = play(one, 4000, seed=2)
    assert found.elapsed.mean() == pytest.approx(one.expected(), abs=4 * found.elapsed.std() / math.sqrt(4000))


def test_without_failures_a_campaign_is_its_steps_to_the_bit():
    step = 0.1 + 0.2
    free = [{"every": "100 steps", "stall": "0 s", "load": "0 s"}]
    one = made(Job(8, 64, step), factor=0.0, duration=None, steps=12345, checkpoints=free)
    assert play(one, 3, seed=0).elapsed.tolist() == [12345 * step] * 3
    assert replica(one, seed=0).env.now == 12345 * step
    assert one.expected() == pytest.approx(12345 * step)


def test_failures_are_counted_as_poisson_counts_them():
    one = made(recovery={"policy": "replace"}, checkpoints=[{"every": "1 min", "stall": "0 s", "load": "0 s"}])
    found = play(one, 4000, seed=3)
    mean = found.elapsed.mean() / 86400 * 6
    assert found.failures.mean() == pytest.approx(mean, rel=0.01)
    assert found.failures.var() == pytest.approx(mean, rel=0.1)
    low, high = pools.count_range(mean)
    assert 0.93 < ((found.failures >= low) & (found.failures <= high)).mean() <= 0.99


@pytest.mark.parametrize("shape", [0.5, 0.7, 1.0, 1.5])
def test_the_first_failure_of_new_machines_is_the_first_of_weibull_lives(shape):
    one = made(failures=[{"name": "any", "rate": "1 per 1000 node-days", "shape": shape}])
    first = one.causes[0].lives(20_000, np.random.default_rng(0), 1e8).following(np.arange(20_000))
    want = laws.first_of_weibull(64, shape, 1000 * 86400)
    # The minimum is Weibull itself, about its scale rather than about Gamma(1 + 1/k) of it.
    assert first.mean() == pytest.approx(want, rel=0.03)


@pytest.mark.parametrize("shape", [0.6, 0.8, 1.5, 3.0])
def test_a_repaired_unit_is_new_and_failures_are_those_of_renewals(shape):
    cause = made(failures=[{"name": "any", "rate": "20 per 1000 node-days", "shape": shape}]).causes[0]
    n = 300
    end = 60 * 86400.0
    under_way = cause.lives(n, np.random.default_rng(1), end)
    everybody = np.arange(n)
    count = 0
    last = np.zeros(n)
    while np.isfinite(now := under_way.following(everybody)).any():
        there = np.isfinite(now)
        assert (now[there] > last[there]).all()
        last = now
        count = count + int(there.sum())
    assert count / n == pytest.approx(cause.expected(end), rel=0.02)
    as_old = (end / cause.scale) ** shape  # where units went on as old as the others
    assert abs(as_old / cause.expected(end) - 1) > 0.05


def test_renewals_of_a_constant_hazard_are_poisson_and_of_long_runs_one_in_a_mean_life():
    for x in (0.1, 1.0, 7.0):
        assert causes.renewals(x, 1.0) == pytest.approx(x, rel=1e-4)
    for shape in (0.7, 1.5, 2.5):  # m(t) = t/mu + (cv^2 - 1)/2 + o(1)
        mean = math.gamma(1 + 1 / shape)
        cv2 = math.gamma(1 + 2 / shape) / mean**2 - 1
        assert causes.renewals(12.0, shape) == pytest.approx(12.0 / mean + (cv2 - 1) / 2, rel=0.01)


def test_a_dropped_replica_costs_its_share_of_the_pace_and_nothing_else():
    away = 900.0
    rate = 6 / 86400
    one = made(
        recovery={"policy": "drop_replica", "replace": f"{away} s"},
        checkpoints=[{"every": "5 d", "stall": "0 s", "load": "0 s"}],
    )
    found = play(one, 4000, seed=4)
    working = found.part("productive") / found.elapsed
    assert working.mean() == pytest.approx(laws.working_replicas(8, rate, away), abs=2e-4)
    assert (found.part("lost work") == 0).all()


def test_a_save_counts_when_it_is_written_and_not_before():
    def lost(write: int) -> float:
        save = {"every": "20 min", "stall": "0 s", "write": f"{write} min", "load": "0 s", "asynchronous": True}
        rare = [{"name": "any", "rate": "1 per day"}]  # so rare that one seldom comes before the first save again
        found = play(made(checkpoints=[save], recovery={"policy": "replace"}, failures=rare), 4000, seed=5)
        return float(found.part("lost work").sum() / found.failures.sum())

    assert lost(15) - lost(0) == pytest.approx(15 * 60, rel=0.05)


def test_more_spares_wait_less_and_enough_never():
    def waited(spares: int) -> float:
        return float(play(made(nodes=NODES | {"spares": spares}), 500, seed=6).part("waiting for nodes").mean())

    assert waited(0) > waited(1) > waited(3)
    assert waited(pools.spares_for(64, 6 / 64, 0.25, short=1e-9)) == 0.0


# ---- the engines against each other ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RICH)
def test_both_engines_play_the_same_campaign(name):
    one = made(**RICH[name])
    many = play(one, 1500, seed=7)
    few = joined([replica(one, seed).runs for seed in range(120)])
    assert ks_2samp(many.elapsed, few.elapsed).pvalue > 1e-3
    for i, part in enumerate(PARTS):
        a = many.ledger[:, i]
        b = few.ledger[:, i]
        error = math.hypot(a.std() / math.sqrt(len(a)), b.std() / math.sqrt(len(b)))
        assert a.mean() == pytest.approx(b.mean(), abs=4.5 * error + 1e-6), part
    assert many.finished.all()
    assert few.finished.all()


@pytest.mark.parametrize("name", RICH)
def test_the_parts_of_the_ledger_are_the_elapsed_time(name):
    one = made(**RICH[name])
    for found in (play(one, 200, seed=8), replica(one, seed=8).runs):
        np.testing.assert_allclose(found.ledger.sum(axis=1), found.elapsed, rtol=1e-12)
        assert (found.ledger > -1e-6).all()
        np.testing.assert_allclose(found.part("productive"), one.axis.work, rtol=1e-12)


@pytest.mark.parametrize("name", RICH)
def test_the_spans_of_a_replica_cover_its_time_and_its_ledger(name):
    one = replica(made(**RICH[name]), seed=9)
    assert [span.begin for span in one.spans][1:] == [span.end for span in one.spans][:-1]
    assert (one.spans[0].begin, one.spans[-1].end) == (0.0, one.env.now)
    for part in ("detection", "waiting for nodes", "restart", "loading", "maintenance"):
        assert math.fsum(s.end - s.begin for s in one.spans if s.state == part) == pytest.approx(one.ledger[part])


def test_one_seed_is_one_campaign():
    one = made(**RICH["few spares"])
    again = play(one, 50, seed=1)
    other = play(one, 50, seed=2)
    np.testing.assert_array_equal(play(one, 50, seed=1).ledger, again.ledger)
    assert (again.elapsed != other.elapsed).any()
    assert (play(one, 50, seed=1, batch=1).elapsed != again.elapsed).any()
    assert replica(one, 3).spans == replica(one, 3).spans


def test_memory_is_that_of_a_batch_and_of_the_rows_whatever_the_number_of_replicas():
    peaks = []
    for replicas in (BATCH, 6 * BATCH):
        tracemalloc.start()
        found = played(made(**RICH["few spares"]), CampaignOptions(replicas, seed=1))
        peaks.append(tracemalloc.get_traced_memory()[1] - 2 * found.ledger.nbytes)
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_definitions_of_goodput_are_in_their_order():
    found = play(made(**RICH["few spares"]), 300, seed=10)
    said = {name: found.goodput(name, mfu=0.4) for name in GOODPUTS}
    assert (said["effective_training_time"] <= said["ettr"]).all()
    assert (said["effective_training_time"] <= said["availability"]).all()
    np.testing.assert_allclose(said["scheduling_goodput"] * said["runtime_goodput"], said["effective_training_time"])
    assert (said["productivity_goodput"] <= 0.4).all()


def test_a_campaign_that_cannot_finish_is_known_before_it_is_played():
    assert made(
        failures=[{"name": "any", "rate": "200 per day"}], recovery={"policy": "replace", "restart": "2 h"}
    ).hopeless
    assert not made().hopeless


# ---- what a planner asks ---------------------------------------------------------------------------------------------


def asked(**changes: Any) -> dict[str, Campaign]:
    return dict(whatif.asked(made(**changes)))


def test_every_question_of_a_planner_is_asked_where_it_makes_sense():
    nic = [*RACKS, {"name": "NIC", "rate": "20 per 1000 node-days", "silent": 0.5}]
    found = asked(failures=nic, nodes=NODES, detection={"report": "1 min", "timeout": "30 min"})
    assert set(found) == {
        "save twice as often",
        "save half as often",
        "save for free",
        "a timeout of a third",
        "a timeout three times as long",
        "no spare nodes",
        "twice the spare nodes",
        "find failures at once",
        "restart twice as fast",
        "load twice as fast",
        "save to peers' memory as well",
        "a second replica in another rack",
        "go on without the replica",
        "go on smaller while no spare is free",
        "without failures of any",
        "one more nine of the NIC",
        "half as many failures",
    }
    assert "stop at every failure" in asked(**RICH["shrinking"])
    assert "swap the slowest 0.5 % of hosts" in asked(job=replace(SECOND, machines=(1.1, 1.2), swapped=(1.1, 1.1)))


def test_one_more_nine_of_a_cause_is_a_tenth_of_its_failures_and_no_fewer_of_others():
    one = made(failures=[*RACKS, {"name": "NIC", "rate": "20 per 1000 node-days", "shape": 0.7}], nodes=NODES)
    better = whatif.seldom(one, "NIC", 10.0)
    for before, after in zip(one.causes, better.causes, strict=True):
        share = after.scale**-after.shape / before.scale**-before.shape
        assert share == pytest.approx(0.1 if before.name == "NIC" else 1.0)


def test_memory_of_peers_loses_less_work_and_a_second_domain_saves_it_from_racks():
    one = made(failures=RACKS, nodes=NODES | {"spares": 20})
    lost = {
        name: float(play(which, 400, seed=3).part("lost work").mean())
        for name, which in (
            ("storage", one),
            ("peers", whatif.with_peers(one)),
            ("two racks", whatif.with_second_domain(whatif.with_peers(one))),
        )
    }
    assert lost["storage"] > 2 * lost["peers"] > 2 * lost["two racks"]


def test_a_job_of_another_size_has_as_many_times_the_units_and_the_slowest_of_as_many_machines():
    one = made(job=replace(SECOND, machines=tuple(1.0 + 0.01 * i for i in range(100))), failures=RACKS, nodes=NODES)
    large = whatif.of_size(one, 256)
    small = whatif.of_size(one, 16)
    for before, after, less in zip(one.causes, large.causes, small.causes, strict=True):
        assert after.expected(1e6) == pytest.approx(4 * before.expected(1e6))
        assert less.expected(1e6) == pytest.approx(before.expected(1e6) / 4)
    mean = {c.job.nodes: np.mean(c.job.machines) for c in (one, large, small)}
    # Of a uniform law on [0, 1] the largest of n has mean n/(n + 1).
    assert mean[256] == pytest.approx(1 + 0.99 * 4 / 5, abs=0.02)
    assert mean[64] == pytest.approx(1 + 0.99 / 2, abs=0.02)
    assert mean[16] == pytest.approx(1 + 0.99 / 5, abs=0.02)
