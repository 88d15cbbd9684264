"""Figures that cannot be: latencies below zero, bounds that are beaten, a steady state that is none, HFU above 1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustersim import scenario
from clustersim.cluster import files as fabrics
from clustersim.collectives import plan
from clustersim.collectives.base import Group, Request
from clustersim.collectives.ring import _beyond_slowest, _beyond_stays
from clustersim.core.mesh import Mesh
from clustersim.core.program import Program, Recv, Role, Send
from clustersim.core.timeline import step_ends
from clustersim.engine import simulate
from clustersim.explain.bounds import bounds

positive = st.floats(1e-9, 1e3, allow_subnormal=False)


@settings(deadline=None, max_examples=300)
@given(st.lists(positive, min_size=2, max_size=9), st.integers(1, 40))
def test_hops_of_no_length_never_make_a_latency_below_zero(busy, steps):
    block = np.array(busy) / steps
    assert _beyond_stays(np.zeros(len(busy)), block, steps) >= 0
    assert _beyond_slowest(np.zeros(len(busy)), np.array(busy), steps) >= 0


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 16), st.floats(1.0, 1e9), st.sampled_from(["all_reduce", "all_gather", "broadcast", "reduce"]))
def test_the_textbook_on_links_without_latency_has_none_below_zero(ranks, nbytes, kind):
    machine = fabrics.load("hgx-h100", nodes=2)
    machine = replace(machine, link_latency=np.zeros(machine.n_links))
    group = Group(machine, machine.gpus[:ranks])
    for algorithm in ("ring", "tree") if kind != "all_gather" else ("ring",):
        made = plan(Request(kind, nbytes, algorithm=algorithm), group, "ideal")
        assert made.latency >= 0


@pytest.mark.parametrize("backend", ["nccl", "ideal"])
def test_no_pair_of_an_op_is_faster_than_the_ops_bound(backend):
    """One op, two ways: rank 0 sends across nodes, rank 2 inside its own."""
    machine = fabrics.load("hgx-h100", nodes=2)
    sends = (Send("s", 2.0**26, np.array([15, 1]), tag="x"),)
    receives = (Recv("r", 2.0**26, np.array([2, 0]), tag="x"),)
    roles = (Role("a", np.array([0, 2]), sends), Role("b", np.array([1, 15]), receives))
    idle = Role("idle", np.array([r for r in range(16) if r not in (0, 1, 2, 15)]), ())
    program = Program(16, (*roles, idle))
    timeline = simulate(
        program, machine, Mesh(machine.gpus, 8), planner=lambda request, group: plan(request, group, backend)
    )
    table = bounds(timeline)["collectives"]
    assert len(table["reached"])
    assert table["reached"].max() <= 1 + 1e-9
    assert table["reached"].max() > 0.1  # it is a bound, not nothing


def test_asynchronous_figures_that_depend_on_the_number_of_steps_say_so():
    changes = {"model.name": "vgg16", "strategy.staleness": 2}
    few, more = (scenario.load("ps_async_1x8", changes | {"run.steps": n}).run() for n in (3, 10))
    assert any("too few to tell whether the pace is steady" in note for note in few.notes)
    assert any("no steady state is reached" in note for note in more.notes)
    assert few.summary["samples_per_s"] < 0.8 * more.summary["samples_per_s"]
    steady = scenario.load("ps_async_1x8", {"run.steps": 24}).run()
    assert not any("steady" in note for note in steady.notes)


def test_flops_that_winograd_does_not_execute_are_told_and_others_are_not():
    fp32 = scenario.load("ddp_resnet50_1x8_v100", {"run.steps": 2, "model.name": "vgg16"}).run()
    assert any("Winograd" in note for note in fp32.notes)
    half = scenario.load("ddp_resnet50_1x8_v100", {"run.steps": 2, "model.dtype": "fp16"}).run()
    assert not any("Winograd" in note for note in half.notes)


def test_workers_that_end_together_send_together_so_that_a_faster_server_can_lengthen_the_step():
    """The named anomaly: one server's socket 1.5 times faster, the same bytes and kernels, a step some percent longer.

    With unequal servers the workers get their parameters, and so end their steps, at different times; their gradients
    then reach the servers one after another and are added up while others still compute. With equal servers all
    workers end at once, all gradients come at once, and the servers' pauses are empty.
    """
    changes = {
        "strategy": {"kind": "parameter_server", "servers": 2, "server": "cpu", "micro_batch_size": 8},
        "cluster.nodes": 2,
        "model.name": "resnet18",
        "run.steps": 3,
        "run.jitter": 0.0,
    }
    uneven = scenario.load("ddp_resnet50_1x8_v100", changes)
    even = uneven.changed({"cluster.changes": [{"match": "node0/cpu0", "factor": 1.5}]})
    slow = uneven.run()
    fast = even.run()
    assert fast.summary["bytes_sent_per_gpu"] == pytest.approx(slow.summary["bytes_sent_per_gpu"])
    assert fast.summary["compute_s"] == pytest.approx(slow.summary["compute_s"])

    def spread(run):
        """Between the first and the last worker's end of a step."""
        ends = step_ends(run.timeline)[-1, : run.prepared.mesh.workers]
        return float(ends.max() - ends.min())

    assert spread(fast) < spread(slow)
    assert fast.summary["exposed_transfer_s"] < slow.summary["exposed_transfer_s"]
    assert 1.0 < fast.summary["step_time_s"] / slow.summary["step_time_s"] < 1.06
    assert any("can make a step some percent longer" in note for note in fast.notes)
