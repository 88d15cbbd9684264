"""The critical path is the run's length, and a replay with its own durations is the run itself."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st
from toy import all_reduce

import clustersim
from clustersim import engine
from clustersim.app.report import content
from clustersim.core.errors import TraceError
from clustersim.core.label import Label
from clustersim.core.mix import Mix
from clustersim.core.program import Compute, Recv, Send
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.explain import whatif as whatif_module
from clustersim.explain.critical_path import PATH_KINDS, critical_path
from clustersim.explain.explain import explain
from clustersim.explain.graph import graph
from clustersim.explain.knobs import KNOBS
from clustersim.explain.replay import replayed
from clustersim.explain.whatif import whatif


def run(program, planner=toy.up_links, **options):
    topology = toy.star(program.world_size)
    return engine.simulate(program, topology, toy.mesh(topology), planner=planner, **options)


def own(run_graph):
    """The graph replayed with the durations it was read with."""
    lost = run_graph.lost
    compute = {i: s if i not in lost else s + lost[i] for i, s in run_graph.seconds.items()}
    return replayed(
        run_graph,
        compute.__getitem__,
        {n.ops[0]: n.seconds for n in run_graph.nodes if len(n.seconds)}.__getitem__,
    )


def drawn_program(drawn, slowdown):
    ops = []
    for i, (kind, value) in enumerate(drawn):
        after = tuple(sorted({i - 1, kind % i})) if i and kind % 3 else ()
        if kind % 4 == 0:
            groups = [[0, 1, 2, 3]] if kind % 8 else [[0, 1], [2, 3]]
            ops.append(all_reduce(f"r{i}", float(value), groups, after=after))
        elif kind % 4 == 1:
            peer = np.array([1, -1, 3, -1]) if kind % 8 == 1 else np.array([-1, 0, -1, 2])
            ops.append(Send(f"s{i}", float(value), peer, "p2p", after, tag=f"t{i}"))
            ops.append(Recv(f"v{i}", float(value), _sources(peer), "in", (), tag=f"t{i}"))
        else:
            ops.append(Compute(f"c{i}", value / 10 * (1 + np.arange(4) % (1 + kind % 4)), after=after))
    return toy.program(ops, ranks=4, slowdown=slowdown)


def _sources(peer):
    sources = np.full(len(peer), -1)
    sources[peer[peer >= 0]] = np.flatnonzero(peer >= 0)
    return sources


programs = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 50)), min_size=1, max_size=15)


@given(programs, st.sampled_from([0.0, 0.2]))
def test_a_replay_with_its_own_durations_is_the_run(drawn, slowdown):
    timeline = run(drawn_program(drawn, slowdown))
    ends = own(graph(timeline))
    real = timeline.per_op()["end"]
    assert ends == pytest.approx(real, rel=1e-9, abs=1e-12)


@given(programs, st.sampled_from([0.0, 0.2]))
def test_the_critical_path_fills_the_run_without_gap_or_overlap(drawn, slowdown):
    timeline = run(drawn_program(drawn, slowdown))
    path = critical_path(timeline)
    assert path.length_s == pytest.approx(timeline.makespan)
    assert [one.begin for one in path.pieces[1:]] == pytest.approx([one.end for one in path.pieces[:-1]], abs=1e-12)
    assert {one.kind for one in path.pieces} <= set(PATH_KINDS)


@pytest.mark.parametrize("name", ["why_slow_gpu", "why_launch_bound", "zero3_llama3_8b_2x8_a100"])
def test_on_shipped_scenarios_path_and_replay_are_the_run(name):
    timeline = clustersim.load(name).run().timeline
    assert own(graph(timeline)) == pytest.approx(timeline.per_op()["end"], rel=1e-12)
    path = critical_path(timeline)
    length = path.pieces[-1].end - path.pieces[0].begin
    assert path.length_s == pytest.approx(length, rel=1e-9)
    assert sum(path.by_kind.values()) * path.steps == pytest.approx(length, rel=1e-9)
    assert "idle" not in path.by_kind


def test_a_parameter_server_replays_exactly_too():
    timeline = clustersim.load("why_parameter_server", {"run.steps": 2}).run().timeline
    assert own(graph(timeline)) == pytest.approx(timeline.per_op()["end"], rel=1e-12)


def test_stages_that_send_to_each_other_replay_exactly_and_each_in_columns_of_its_own_ranks():
    timeline = clustersim.load("1f1b_gpt2_xl_1x8_a100", {"run.steps": 2}).run().timeline
    run_graph = graph(timeline)
    of_role = {op.role: size for op, size in zip(timeline.ops, run_graph.size, strict=True)}
    assert len(of_role) > 1
    assert sum(of_role.values()) == timeline.world_size
    assert all(len(column) == run_graph.size[i] for i, column in run_graph.seconds.items())
    assert own(run_graph) == pytest.approx(timeline.per_op()["end"], rel=1e-12)


def test_the_path_goes_through_the_last_arriver_and_splits_latency_from_bytes():
    def planner(request, group):
        return toy.plan(request, group.gpus, latency=0.5)

    ops = [Compute("a", np.array([1.0, 3.0])), all_reduce("r", 10.0, [0, 1], after=(0,)), Compute("b", 1.0, after=(1,))]
    timeline = run(toy.program(ops), planner)
    path = critical_path(timeline)
    assert [(timeline.ops[one.op].name, one.kind) for one in path.pieces] == [
        ("a", "compute-bound"),
        ("r", "latency"),
        ("r", "link"),
        ("b", "compute-bound"),
    ]
    assert path.pieces[0].rank == 1
    assert path.by_kind == pytest.approx({"compute-bound": 4.0, "latency": 0.5, "link": 1.0})
    assert path.by_link == pytest.approx({"node0/gpu0 -> switch": 1.0})


def test_a_measured_gap_on_the_path_is_idle():
    info = OpInfo("k", "compute", "compute")
    timeline = Timeline(
        1,
        (info, info),
        (np.array([0]),),
        np.array([0, 1]),
        np.zeros(2, dtype=np.int64),
        np.array([0.0, 4.0]),
        np.array([0.0, 4.0]),
        np.array([1.0, 5.0]),
        source="measured",
    )
    assert critical_path(timeline).by_kind == pytest.approx({"idle": 3.0, "compute-bound": 2.0})


def knob(timeline, name, **options):
    table = whatif(timeline, knobs=(name,), **options)
    return float(table["saving"][0])


def test_bounds_of_a_run_worked_out_by_hand():
    ops = [
        Compute("fwd", 2.0),
        Compute("tiny", 2.0, bound="launch", after=(0,)),
        all_reduce("r", 40.0, [0, 1], after=(1,)),
    ]
    timeline = run(toy.program(ops), lambda q, g: toy.plan(q, g.gpus, latency=2.0))
    assert timeline.makespan == 10.0
    assert knob(timeline, "compute speed") == pytest.approx(0.1)
    assert knob(timeline, "host speed") == pytest.approx(0.1)
    assert knob(timeline, "latency") == pytest.approx(0.1)
    assert knob(timeline, "latency", factor=4.0) == pytest.approx(0.15)
    assert knob(timeline, "NIC") == pytest.approx(0.3)  # 40 bytes in 2 s instead of 4, and half the latency
    assert knob(timeline, "NVLink") == knob(timeline, "fabric") == 0.0
    assert knob(timeline, "batch") == pytest.approx(0.5)  # nothing of it is said to work on samples


def test_kernels_that_work_on_samples_take_as_many_times_as_long():
    ops = [
        Compute("fwd", 2.0, phase="forward", mix=Mix(peak=1.0, launch=1.0)),  # 3 s
        Compute("bwd", 2.0, phase="backward", bound="memory", after=(0,)),  # 4 s
        Compute("step", 2.0, phase="optimizer", after=(1,)),  # 2 s
        Compute("tiny", 2.0, phase="forward", bound="launch", after=(2,)),  # 2 s
    ]
    timeline = run(toy.program(ops, ranks=1))
    assert knob(timeline, "batch") == pytest.approx(1 - 11 / 2 / 8)


def test_transfers_of_activations_grow_with_the_samples_and_those_of_gradients_do_not():
    for dim, seconds in (("tp", 2.0 + 2 * 4.0), ("dp", 2.0 + 4.0)):
        reduce = all_reduce("r", 40.0, [0, 1])
        ops = [msgspec.structs.replace(reduce, label=Label(dim=dim))]
        timeline = run(toy.program(ops), lambda q, g: toy.plan(q, g.gpus, latency=2.0))
        assert timeline.makespan == 6.0
        assert knob(timeline, "batch") == pytest.approx(1 - seconds / 2 / 6)


def test_with_a_known_peak_launch_bound_kernels_of_more_samples_take_their_flops():
    timeline = run(toy.program([Compute("fwd", 1.0, flops=8.0, bound="launch")], ranks=1))
    assert knob(timeline, "batch", peak_flops=10.0) == pytest.approx(1 - 1.6 / 2)


def test_any_bucket_size_may_send_gradients_as_soon_as_there_are_some():
    ops = [
        Compute("bwd 1", 1.0, phase="backward"),
        Compute("bwd 0", 3.0, phase="backward"),
        all_reduce("bucket", 20.0, [0, 1], after=(1,)),
    ]
    timeline = run(toy.program(ops))
    assert knob(timeline, "bucket size") == pytest.approx(2 / 6)


def test_rows_come_largest_saving_first_with_a_sentence_each():
    table = whatif(run(toy.program([Compute("fwd", 2.0)], ranks=2)))
    assert sorted(table["knob"].tolist()) == sorted(KNOBS)
    assert np.all(np.diff(table["saving"]) <= 0)
    assert "compute speed x2 would save at most 50.0% of the step" in table["text"].tolist()


def test_a_measured_run_is_not_replayed():
    info = OpInfo("k", "compute", "compute")
    one = np.zeros(1)
    timeline = Timeline(
        1,
        (info,),
        (np.array([0]),),
        np.zeros(1, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        one,
        one,
        one + 1,
        source="measured",
    )
    with pytest.raises(TraceError, match="does not say what waits for what"):
        graph(timeline)


def test_a_part_of_the_path_that_reads_as_nothing_is_left_out():
    """Reports once said "link 0.06875 ns 0.0%"."""
    timeline = run(toy.program([Compute("a", 1.0), all_reduce("tiny", 1e-8, [[0, 1]], after=(0,))]))
    path = critical_path(timeline)
    assert 0 < min(path.by_kind.values()) < 5e-4
    tables = content._path(timeline, path)
    assert [name for name, *_ in tables["kinds"]] == [max(path.by_kind, key=path.by_kind.__getitem__)]
    assert not tables["links"]
    assert " 0.0%" not in " ".join(explain(timeline).path)


def unchained(timeline):
    """Bounds of a graph that has a node for each op."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whatif_module, "graph", lambda timeline, **_: graph(timeline))
        return whatif(timeline)


def equal_bounds(timeline):
    plain = unchained(timeline)
    chained = whatif(timeline)
    order = [np.argsort(table["knob"], kind="stable") for table in (plain, chained)]
    steps = [table["step_time_s"][place] for table, place in zip((plain, chained), order, strict=True)]
    assert steps[1] == pytest.approx(steps[0], rel=1e-12, abs=1e-15)


@given(programs, st.sampled_from([0.0, 0.2]))
def test_ops_that_are_one_chain_change_no_bound(drawn, slowdown):
    equal_bounds(run(drawn_program(drawn, slowdown)))


SPLIT = {
    "model.name": "gpt2-medium",
    "parallel.microbatches": 4,
    "parallel.tp": 2,
    "parallel.pp": 4,
    "parallel.sequence_parallel": True,
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ddp_resnet50_1x8_v100", {}),
        ("fsdp_mpt_7b_16x8_a100", {}),
        ("zb_gpt2_xl_1x8_a100", {}),
        ("1f1b_gpt2_xl_1x8_a100", SPLIT),
    ],
)
def test_ops_that_are_one_chain_change_no_bound_of_shipped_scenarios(name, changes):
    timeline = clustersim.load(name, {"run.steps": 2} | changes).run().timeline
    made = graph(timeline, apart={})
    assert max(len(node.ops) for node in made.nodes if node.talks is not None) > 2
    equal_bounds(timeline)
