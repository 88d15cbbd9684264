"""An incident does to a run what it says, from when to when, and nothing before; a file without one is as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clustersim import scenario as scenarios
from clustersim.core.errors import ScenarioError
from clustersim.core.timeline import step_ends
from clustersim.explain.explain import explain
from clustersim.explain.metrics import steady_window
from clustersim.explain.stalls import causes, stalls
from clustersim.explain.where import where
from clustersim.scenario.file.incident_table import KINDS
from clustersim.scenario.run.misplaced import leaf_of
from clustersim.studies.what_if.otherwise import each_change
from clustersim.studies.what_if.rerun import rerun_step, step_time

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
        {"kind": "congestion", "link": "leaf0 -> node1/nic*", "left": 0.2},
        {"kind": "hot_gpu", "rank": 3, "slowdown": 1.6, "lasts": "0.2 s"},
        {"kind": "ecc_stall", "rank": 5, "pause": "40 ms"},
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
        ([{"kind": "ecc_stall", "rank": 9, "pause": "1 ms"}], "no rank 9: the run has ranks 0..7"),
        ([{"kind": "garbage_collection", "rank": 1, "pause": "1 ms"}], "says how much: interval"),
        ([{"kind": "hot_gpu", "rank": 1, "slowdown": 2, "lasts": "1 s", "at": "9 min"}], "540 s is outside the run"),
        (
            [{"kind": "blocking_checkpoint", "pause": "1 ms", "interval": 2, "rank": 1}],
            "has no rank; it has interval, pause",
        ),
        ([{"kind": "lost_nic", "link": "node0/nic9"}], "no vertex matches 'node0/nic9'"),
        ([{"kind": "lost_nic", "link": "node0/gpu0"}], "'node0/gpu0' is no NIC; write one such as"),
        ([{"kind": "gdr_off", "node": 2}], "no node 2: the run has nodes 0..1 (at $.incident[0].node)"),
        ([{"kind": "gdr_off", "node": 1, "at": "1 s"}], "is there from the start of the run; leave out at"),
        ([{"kind": "other_rack", "node": 1}], "no switch is above leaf0: all machines of this network are in one rack"),
        ([{"kind": "wrong_rail", "link": "node0/nic0", "other": "node0/nic1"}], "are both on leaf0"),
        ([{"kind": "wrong_rail", "link": "node0/nic0", "other": "node1/nic1"}], "are not two NICs of one machine"),
        (
            [{"kind": "lost_nic", "link": "node0/nic0"}, {"kind": "slow_link", "link": "node0/nic0", "left": 0.5}],
            "change one link",
        ),
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


def lost(*incidents: dict[str, Any], healthy: Any) -> np.ndarray:
    """By how much longer each step takes than without the incidents [s]."""
    ends, before = (step_ends(r.timeline).max(axis=1) for r in (run(*incidents), healthy))
    return np.diff(ends - before, prepend=0.0)


def test_a_stall_costs_its_pause_once(healthy):
    costs = lost({"kind": "ecc_stall", "rank": 5, "pause": "40 ms", "at": "0.45 s"}, healthy=healthy)
    assert costs.sum() == pytest.approx(0.04, rel=1e-6)
    assert (np.abs(costs) > 1e-9).sum() == 1


@pytest.mark.parametrize(
    "incident", [{"kind": "garbage_collection", "rank": 2}, {"kind": "blocking_checkpoint"}], ids=lambda i: i["kind"]
)
@pytest.mark.parametrize("at", [{}, {"at": "0.2 s"}], ids=["from the start", "later"])
def test_a_host_that_stands_still_costs_its_pause_every_so_many_steps(healthy, incident, at):
    costs = lost({**incident, "pause": "30 ms", "interval": 2, **at}, healthy=healthy)
    first = 2 if at else 0  # 0.2 s is in the second step
    assert np.round(costs, 6).tolist() == [0.03 if i >= first and (i - first) % 2 == 0 else 0 for i in range(5)]


def test_a_gpu_that_gets_hot_is_slower_step_by_step_and_stays_so(healthy):
    costs = lost({"kind": "hot_gpu", "rank": 3, "slowdown": 1.5, "lasts": "0.5 s", "at": "0.15 s"}, healthy=healthy)
    assert np.all(np.diff(costs) >= -1e-9)
    constant = lost({"kind": "slow_gpu", "rank": 3, "slowdown": 1.5}, healthy=healthy)
    assert costs[-1] == pytest.approx(constant[-1], rel=1e-6)
    assert costs[1] < 0.5 * costs[-1]


RAILS = "fsdp_mpt_7b_16x8_a100"


@pytest.mark.parametrize(
    "incident",
    [
        {"kind": "lost_nic", "link": "node1/nic2"},
        {"kind": "far_nic", "link": "node1/nic2"},
        {"kind": "gdr_off", "node": 1},
        {"kind": "wrong_rail", "link": "node1/nic2", "other": "node1/nic5"},
        {"kind": "other_rack", "node": 1},
    ],
    ids=lambda incident: incident["kind"],
)
def test_what_is_set_up_wrongly_costs_something_in_every_step(incident):
    """On a network whose spine carries a sixteenth of what its leaves do."""
    small = {
        "cluster.nodes": 2,
        "model.options": {"layers": 2},
        "cluster.fabric.oversubscription": 16,
        "run.jitter": 0.0,
    }
    well, ill = (
        step_ends(scenarios.load(RAILS, small | more).run().timeline).max(axis=1)
        for more in ({}, {"incident": [incident]})
    )
    costs = np.diff(ill - well, prepend=0.0)
    assert np.all(costs > 1e-4)


def test_cables_in_each_others_switches_and_a_rack_with_switches_of_its_own():
    def leaves(*incident: dict[str, Any]) -> list[str]:
        small = {"cluster.nodes": 2, "model.options": {"layers": 2}, "incident": list(incident)}
        topology = scenarios.load(RAILS, small).prepare().topology
        names = topology.vertex_names
        return [names[leaf_of(topology, names.index(f"node1/nic{i}"))] for i in range(3)]

    assert leaves() == ["leaf0", "leaf1", "leaf2"]
    swapped = leaves({"kind": "wrong_rail", "link": "node1/nic0", "other": "node1/nic2"})
    assert swapped == ["leaf2", "leaf1", "leaf0"]
    assert leaves({"kind": "other_rack", "node": 1}) == ["rack1/leaf0", "rack1/leaf1", "rack1/leaf2"]


def test_every_kind_says_where_and_what_it_is():
    assert {kind.where for kind in KINDS.values()} == {"rank", "node", "link", ""}
    assert all(kind.words for kind in KINDS.values())


def test_a_slow_link_is_named_its_incident_matters_and_no_what_if_forgets_it():
    incident = [{"kind": "slow_link", "link": "node0/nic1", "left": 0.1}]
    scenario = scenarios.load("ddp_gpt2_xl_2x8_a100", {"run.steps": 3, "incident": incident})
    prepared = scenario.prepare()
    timeline = prepared.play()
    (worst, *_) = explain(timeline).causes
    assert "node0/nic1" in worst
    assert "is slower for a while" in worst
    did, idle = each_change(scenario, timeline)
    assert not [line for line in idle if line.startswith("incident")]
    assert [line for line in did if line.startswith("without incident")]
    slow = step_time(timeline)
    assert rerun_step(prepared, "latency", 1.0) == pytest.approx(slow, rel=1e-6)


@pytest.mark.parametrize("name", ["ddp_gpt2_xl_2x8_a100", "zero3_llama3_8b_2x8_a100"])
def test_a_rank_whose_loader_is_slow_is_named_with_what_its_peers_wait(name):
    """Peers wait beside their own kernels and pay behind backward: all of it was charged to jitter and to links."""
    slow = [{"kind": "slow_data", "rank": 3, "pause": "200 ms"}]
    base, late = (scenarios.load(name, changes).run() for changes in ({}, {"incident": slow}))
    table = stalls(causes(late.timeline))
    added = steady_window(late.timeline).step_time - steady_window(base.timeline).step_time
    assert (table["cause"][0], table["subject"][0]) == ("host", "input")
    assert added > 0.1
    assert table["cost_s"][0] == pytest.approx(added, rel=0.25)
    assert "on rank 3, where the median rank takes 1 ms; the others wait for it" in table["text"][0]


SERVED: dict[str, Any] = {"run.jitter": 0.0, "run.steps": 6}
OTHERS: dict[str, tuple[str, dict[str, Any], int]] = {
    "server": ("ps_sync_cpu_1x8", {}, 3),
    "small batches": ("ps_sync_cpu_1x8", {"strategy.micro_batch_size": 4}, 0),
    "two servers": ("ps_sync_cpu_1x8", {"strategy.servers": 2}, 5),
    "bounded staleness": ("ps_async_1x8", SERVED | {"strategy.staleness": 1}, 3),
    "1F1B, first stage": ("1f1b_gpt2_xl_1x8_a100", {}, 0),
    "1F1B, middle": ("1f1b_gpt2_xl_1x8_a100", {}, 3),
    "interleaved": ("interleaved_gpt2_xl_1x8_a100", {}, 0),
    "replicas": ("1f1b_gpt2_xl_1x8_a100", {"parallel.pp": 4, "model.name": "gpt2-medium"}, 3),
    "TP": ("1f1b_gpt2_xl_1x8_a100", {"parallel.pp": 4, "parallel.tp": 2, "model.name": "gpt2-medium"}, 3),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_slow_loader_is_named_beside_a_server_and_in_a_pipeline(case):
    """It was the parameter server's fault, or the pipeline's bubble: 25 of 200 ms were charged to the loader."""
    name, changes, rank = OTHERS[case]
    slow = [{"kind": "slow_data", "rank": rank, "pause": "200 ms"}]
    base, late = (scenarios.load(name, changes | more).run().timeline for more in ({}, {"incident": slow}))
    table = stalls(causes(late))
    added = steady_window(late).step_time - steady_window(base).step_time
    loader = np.flatnonzero((table["cause"] == "host") & (table["subject"] == "input")).tolist()
    assert loader, table["cause"]
    assert added > 0.1
    assert table["cost_s"][loader[0]] == pytest.approx(added, rel=0.35)
    assert f"on rank {rank}" in table["text"][loader[0]]
    assert "the others wait for it" in table["text"][loader[0]]
    assert "parameter server" not in table["cause"][:1]
    if "stage" not in case and case not in {"1F1B, middle", "interleaved", "replicas"}:  # those have a heavy head, too
        assert loader == [0]


@pytest.mark.parametrize(("mode", "place"), [("sync", "cpu"), ("sync", "worker"), ("async", "cpu")])
def test_a_slow_gpu_beside_a_server_is_no_fault_of_the_server(mode, place):
    """Of a worker at half its pace it was said that the parameter server holds seven others."""
    changes: dict[str, Any] = {
        "strategy.mode": mode,
        "strategy.server": place,
        "cluster.slow": [{"ranks": [3], "speed": 0.5}],
    }
    changes |= {"strategy.staleness": 1} if mode == "async" else {}
    table = stalls(causes(scenarios.load("ps_sync_cpu_1x8", changes).run().timeline))
    assert (table["cause"][0], table["subject"][0]) == ("slow rank", "rank 3")


def test_what_a_pipeline_waits_for_a_late_host_is_a_part_of_its_bubble():
    """It was told as the tail of the step, and as gradients that are waited for."""
    slow = [{"kind": "slow_data", "rank": 0, "pause": "200 ms"}]
    base, late = (where(scenarios.load("1f1b_gpt2_xl_1x8_a100", c).run().timeline) for c in ({}, {"incident": slow}))
    assert "host" not in base[0].bubble
    assert late[0].bubble["host"] == pytest.approx(7 / 8 * 0.2, rel=0.02)  # seven stages wait for the first one
    assert late[0].bubble["tail"] == pytest.approx(base[0].bubble["tail"], abs=0.005)
