"""Every instant of every rank is in one state, and the closed forms of each state."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st
from toy import all_reduce

import clustersim
from clustersim import engine
from clustersim.core.program import Compute, Recv, Send
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.explain.breakdown import breakdown, steps_between
from clustersim.explain.per_step import per_step
from clustersim.explain.pieces import STATES, pieces, workers


def run(program, n=None, **options):
    topology = toy.star(program.world_size)
    return engine.simulate(program, topology, toy.mesh(topology), planner=toy.up_links, **options)


def shares(timeline, rank=0):
    table = breakdown(timeline)
    return {s: v for s, v in zip(table.states, table.shares[rank].tolist(), strict=True) if v > 0}


def ops_of(draw_bytes, seconds, world):
    ops = []
    phases = ("forward", "backward", "optimizer", "gradient", "input", "memcpy")
    bounds = ("compute", "memory", "launch", "host")
    for i, (kind, value) in enumerate(zip(draw_bytes, seconds, strict=True)):
        after = (i - 1,) if i and kind % 3 else ()
        if kind % 4 == 0:
            groups = [list(range(world))] if kind % 8 else [[r, r + 1] for r in range(0, world, 2)]
            ops.append(all_reduce(f"r{i}", 1.0 + value, groups, after=after))
        else:
            duration = value * (1 + np.arange(world) * (kind % 5) / 10)
            stream = "compute" if kind % 7 else "side"
            ops.append(Compute(f"c{i}", duration, stream, after, phases[kind % 6], bounds[kind % 4]))
    return ops


@given(
    st.lists(st.tuples(st.integers(0, 500), st.floats(0, 5).map(lambda v: round(v, 6))), min_size=1, max_size=25),
    st.sampled_from([2, 4]),
)
def test_shares_of_every_rank_add_up_to_one(drawn, world):
    ops = ops_of([k for k, _ in drawn], [v for _, v in drawn], world)
    timeline = run(toy.program(ops, ranks=world, slowdown=0.1))
    table = breakdown(timeline)
    if timeline.makespan > 0:
        assert table.shares.sum(axis=1) == pytest.approx(np.ones(world), abs=1e-12)
        assert table.seconds.sum(axis=1) * table.steps == pytest.approx(np.full(world, timeline.makespan))
    assert (table.shares >= 0).all()


@given(st.floats(0.0, 0.5), st.floats(0.5, 1.0))
def test_a_window_cut_anywhere_is_a_partition(low, high):
    ops = [Compute("a", 1.0), all_reduce("r", 10.0, [0, 1], after=(0,)), Compute("b", 0.5, after=(1,))]
    timeline = run(toy.program(ops))
    end = timeline.makespan
    cut = pieces(timeline, low * end, high * end)
    for owner in range(len(cut.ranks)):
        mine = cut.owner == owner
        assert cut.seconds[mine].sum() == pytest.approx((high - low) * end, abs=1e-9)
        assert cut.start[mine][1:] == pytest.approx(cut.stop[mine][:-1], abs=1e-9)


def test_each_kind_of_kernel_has_its_state():
    ops = [
        Compute("load", 1.0, phase="input", bound="host"),
        Compute("gemm", 2.0, phase="forward"),
        Compute("norm", 3.0, phase="backward", bound="memory"),
        Compute("tiny", 1.0, phase="backward", bound="launch"),
        Compute("adam", 3.0, phase="optimizer", bound="memory"),
    ]
    found = shares(run(toy.program(ops, ranks=1)))
    assert found == pytest.approx(
        {"host": 0.1, "compute-bound": 0.2, "memory-bound": 0.3, "launch-bound": 0.1, "optimizer": 0.3}
    )


def test_a_transfer_is_exposed_only_where_no_kernel_runs_beside_it():
    # 2 s of transfer behind 1 s of compute, of which a second kernel hides half.
    ops = [Compute("a", 1.0), all_reduce("r", 20.0, [0, 1], after=(0,)), Compute("b", 1.0)]
    timeline = run(toy.program(ops))
    table = breakdown(timeline)
    assert shares(timeline) == pytest.approx({"compute-bound": 2 / 3, "exposed transfer": 1 / 3})
    assert table.hidden_communication_s == pytest.approx([1.0, 1.0])


def test_a_share_of_several_ranks_is_of_the_time_that_all_of_them_took():
    table = breakdown(run(toy.program([Compute("a", 1.0), all_reduce("r", 10.0, [0, 1], after=(0,))])))
    seconds = np.zeros_like(table.seconds)  # as of a trace in which a rank was seen for longer than another
    seconds[:, :2] = [[3.0, 1.0], [1.0, 1.0]]
    table = msgspec.structs.replace(table, seconds=seconds)
    assert table.mean[:2] == pytest.approx([4 / 6, 2 / 6])
    assert table.over(np.array([0]))[:2] == pytest.approx([3 / 4, 1 / 4])


def test_a_wait_for_a_slower_rank_of_the_same_list_is_a_stall():
    ops = [Compute("a", np.array([1.0, 3.0])), all_reduce("r", 10.0, [0, 1], after=(0,))]
    timeline = run(toy.program(ops))
    assert shares(timeline, 0) == pytest.approx(
        {"compute-bound": 0.25, "waiting for a peer": 0.5, "exposed transfer": 0.25}
    )
    assert shares(timeline, 1) == pytest.approx({"compute-bound": 0.75, "exposed transfer": 0.25})


def pipeline(p, m):
    """GPipe's forward on p stages, a second a micro-batch and nothing to send."""
    roles = []
    for s in range(p):
        ops = []
        for k in range(m):
            if s:
                ops.append(Recv(f"recv {k}", 0.0, np.array([s - 1]), "compute", tag=f"{s}"))
            ops.append(Compute(f"work {k}", 1.0))
            if s < p - 1:
                ops.append(Send(f"send {k}", 0.0, np.array([s + 1]), "out", (len(ops) - 1,), tag=f"{s + 1}"))
        roles.append(ops)
    return toy.program(*roles, ranks=1)


@pytest.mark.parametrize(("p", "m"), [(2, 1), (4, 4), (3, 8)])
def test_a_pipelines_bubble_fraction_is_that_of_gpipe(p, m):
    table = breakdown(run(pipeline(p, m)))
    assert table.shares[:, STATES.index("bubble")] == pytest.approx(np.full(p, (p - 1) / (m + p - 1)))


def test_a_copy_to_the_host_that_nothing_hides_is_host_time():
    ops = [Compute("a", 1.0), Compute("copy", 3.0, "d2h", (0,), "memcpy", "memory")]
    assert shares(run(toy.program(ops, ranks=1))) == pytest.approx({"compute-bound": 0.25, "host": 0.75})


def test_a_measured_gap_is_the_hosts_and_time_outside_the_profile_is_nobodys():
    info = OpInfo("k", "compute", "compute")
    timeline = Timeline(
        2,
        (info,),
        (np.array([0]), np.array([1])),
        np.zeros(4, dtype=np.int64),
        np.array([0, 0, 1, 1]),
        np.array([0.0, 4.0, 1.0, 3.0]),
        np.array([0.0, 4.0, 1.0, 3.0]),
        np.array([1.0, 5.0, 2.0, 4.0]),
        source="measured",
    )
    assert shares(timeline, 0) == pytest.approx({"compute-bound": 0.4, "host": 0.6})
    assert shares(timeline, 1) == pytest.approx({"compute-bound": 0.4, "host": 0.2, "not recorded": 0.4})


@pytest.mark.parametrize("name", ["ddp_resnet50_1x8_v100", "why_slow_gpu", "why_launch_bound", "ps_async_1x8"])
def test_it_agrees_with_the_summary(name):
    result = clustersim.load(name).run()
    table = breakdown(result.timeline)
    summary = result.summary
    by_state = per_step(result.timeline)
    rest = sum(by_state[s] for s in ("compute-bound", "memory-bound", "launch-bound", "optimizer", "host"))
    assert table.step_time_s == pytest.approx(summary["step_time_s"])
    assert rest == pytest.approx(summary["compute_s"] + summary["idle_s"], rel=1e-6)
    assert by_state["exposed transfer"] == pytest.approx(summary["exposed_transfer_s"], rel=1e-6)
    assert by_state["waiting for a peer"] == pytest.approx(summary["waiting_for_peer_s"], rel=1e-6)


def test_a_server_is_no_rank_that_trains():
    timeline = clustersim.load("why_parameter_server").run().timeline
    assert workers(timeline).tolist() == list(range(8))
    assert timeline.world_size == 9


def test_steps_that_end_in_a_window_are_counted():
    ops = [Compute("a", 1.0, step=0), Compute("b", 1.0, step=1), Compute("c", 1.0, step=2)]
    timeline = run(toy.program(ops, ranks=1))
    assert [steps_between(timeline, 0.0, t) for t in (1.0, 2.5, 3.0)] == [1, 2, 3]
    none = {name: getattr(timeline, name)[:0] for name in ("row_op", "row_set", "row_ready", "row_start", "row_end")}
    assert steps_between(replace(timeline, **none), 0.0, 1.0) == 1


def test_the_shares_of_a_thousand_ranks_add_up():
    timeline = clustersim.load("ddp_llama3_8b_128x8_h100").run().timeline
    table = breakdown(timeline)
    assert table.shares.sum(axis=1) == pytest.approx(np.ones(1024))


def test_a_gap_behind_a_step_that_is_left_out_is_the_host_s_and_was_recorded():
    """A rank that began late with the first step that counts was not recorded there, though its profile had begun."""
    steps = np.repeat(np.arange(4), 2)
    begins = np.array([0.0, 0.0, 10.0, 12.0, 15.0, 16.0, 20.0, 21.0])
    ends = np.array([10.0, 9.0, 15.0, 15.0, 20.0, 20.0, 25.0, 25.0])
    timeline = Timeline(
        2,
        tuple(OpInfo(f"k{step}", "compute", "compute", step=step) for step in range(4)),
        tuple(np.array([rank]) for rank in (0, 1)),
        steps,
        np.tile([0, 1], 4),
        begins,
        begins,
        ends,
        source="measured",
    )
    table = breakdown(timeline)
    assert (table.begin, table.end, table.steps) == (10.0, 25.0, 3)
    assert shares(timeline, 0) == pytest.approx({"compute-bound": 1.0})
    assert shares(timeline, 1) == pytest.approx({"compute-bound": 11 / 15, "host": 4 / 15})
