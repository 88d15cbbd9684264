"""An incident does to a run what it says, from when to when, and nothing before; a file without one is as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clustersim import scenario as scenarios
from clustersim.core.errors import ScenarioError
from clustersim.core.timeline import step_ends
from clustersim.scenario.incident_table import KINDS

BASE = "ddp_gpt2_medium_2x4_v100"
SMALL = {"run.steps": 5, "run.jitter": 0.0}


def run(*incidents: dict[str, Any], **more: Any):
    return scenarios.load(BASE, {**SMALL, **more, "incident": list(incidents)}).run()


@pytest.fixture(scope="module")
def healthy():
    return scenarios.load(BASE, SMALL).run()


def test_a_scenario_without_incidents_has_no_such_input(healthy):
    assert "incident" not in healthy.scenario.inputs()
    assert not any("incident" in note for note in healthy.notes)


def test_a_slow_gpu_for_the_whole_run_is_cluster_slow(healthy):
    ours = run({"kind": "slow_gpu", "rank": 3, "slowdown": 1.25})
    theirs = scenarios.load(BASE, {**SMALL, "cluster.slow": [{"ranks": [3], "speed": 0.8}]}).run()
    assert np.array_equal(step_ends(ours.timeline), step_ends(theirs.timeline))


def test_a_slow_link_is_a_change_that_nccl_does_not_see():
    ours = run({"kind": "slow_link", "link": "node0/nic0", "left": 0.25, "at": "0.5 s"})
    change = {"match": "node0/nic0", "factor": 0.25, "from": "0.5 s"}
    theirs = scenarios.load(BASE, {**SMALL, "cluster.changes": [change]}).run()
    assert np.array_equal(step_ends(ours.timeline), step_ends(theirs.timeline))


@pytest.mark.parametrize(
    "incident",
    [
        {"kind": "slow_gpu", "rank": 3, "slowdown": 1.5},
        {"kind": "slow_host", "node": 1, "slowdown": 1.5},
        {"kind": "slow_data", "rank": 6, "pause": "40 ms"},
        {"kind": "slow_link", "link": "node0/nic0", "left": 0.2},
        {"kind": "flapping_link", "link": "node0/nic0", "lasts": "30 ms", "every": "150 ms"},
    ],
    ids=lambda incident: incident["kind"],
)
def test_nothing_before_its_moment_changes_and_something_after_it_does(healthy, incident):
    at = 0.45
    before = healthy.timeline.spans()
    after = run(incident | {"at": f"{at} s"}).timeline.spans()
    done = before["end"] < at
    assert done.sum() > 100
    assert np.array_equal(before["end"][done], after["end"][done])
    assert after["end"].max() > before["end"].max() + 0.02


def test_an_incident_that_ends_costs_as_much_as_it_lasts(healthy):
    """Kernels that start within 0.2 s take half as long again: 0.1 s at most, and most of it."""
    short = run({"kind": "slow_gpu", "rank": 3, "slowdown": 1.5, "at": "0.4 s", "lasts": "0.2 s"})
    lost = step_ends(short.timeline).max() - step_ends(healthy.timeline).max()
    assert 0.03 < lost < 0.1


def test_a_batch_that_comes_late_makes_every_later_step_so_much_longer(healthy):
    late = run({"kind": "slow_data", "rank": 0, "pause": "100 ms"})
    lost = step_ends(late.timeline).max(axis=1) - step_ends(healthy.timeline).max(axis=1)
    assert lost[-1] == pytest.approx(0.1 * len(lost), rel=0.05)


@pytest.mark.parametrize(
    ("incidents", "wrong"),
    [
        ([{"kind": "slow_gpu", "rank": 8, "slowdown": 2}], "no rank 8: the run has ranks 0..7 (at $.incident[0].rank)"),
        ([{"kind": "slow_host", "node": 2, "slowdown": 2}], "no node 2: the run has nodes 0..1"),
        ([{"kind": "slow_link", "link": "node9/nic0", "left": 0.5}], "no vertex matches 'node9/nic0'"),
        ([{"kind": "slow_gpu", "rank": 1, "slowdown": 2, "at": "9 min"}], "540 s is outside the run"),
        ([{"kind": "slow_gpu", "rank": 1}], "says how much: slowdown"),
        ([{"kind": "slow_gpu", "slowdown": 2}], "says where: rank"),
        ([{"kind": "slow_gpu", "rank": 1, "slowdown": 2, "left": 0.5}], "has no left; it has lasts, rank, slowdown"),
        ([{"kind": "dead_rank", "rank": 1}], "says when: at"),
        ([{"kind": "dead_rank", "rank": 1, "at": "1 s", "lasts": "1 s"}], "has no lasts"),
        ([{"kind": "slow_gp", "rank": 1}], "did you mean 'slow_gpu'?"),
        ([{"kind": "slow_gpu", "rank": 1, "slowdown": 0.5}], "does not fit"),
        ([{"kind": "dead_rank", "rank": r, "at": "0.1 s"} for r in (1, 2)], "both hang the run"),
        ([{"kind": "slow_gpu", "rank": 1, "slowdown": s} for s in (2, 3)], "exclude each other"),
        (
            [
                {"kind": "dead_rank", "rank": 1, "at": "0.1 s"},
                {"kind": "slow_gpu", "rank": 2, "slowdown": 2, "at": "0.2 s"},
            ],
            "one begins when the other has hung the run already",
        ),
        (
            [
                {"kind": "slow_link", "link": "node0/nic0", "left": 0.5},
                {"kind": "flapping_link", "link": "node0/nic0", "lasts": "1 ms", "every": "9 ms"},
            ],
            "change one link",
        ),
    ],
)
def test_bad_input_is_one_error_that_names_the_field(incidents, wrong):
    with pytest.raises(ScenarioError) as caught:
        scenarios.load(BASE, {**SMALL, "incident": incidents}).run()
    assert wrong in str(caught.value)
    assert "$.incident" in str(caught.value)


def test_two_incidents_of_one_rank_may_follow_each_other(healthy):
    both = run(
        {"kind": "slow_gpu", "rank": 1, "slowdown": 1.5, "at": "0.2 s", "lasts": "0.1 s"},
        {"kind": "slow_gpu", "rank": 1, "slowdown": 1.5, "at": "0.4 s", "lasts": "0.1 s"},
    )
    assert step_ends(both.timeline).max() > step_ends(healthy.timeline).max()


def test_every_kind_says_where_and_what_it_is():
    assert {kind.where for kind in KINDS.values()} == {"rank", "node", "link"}
    assert all(kind.words for kind in KINDS.values())
