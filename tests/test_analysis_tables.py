"""Hotspots, bounds and the comparison of two runs."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st
from player import link_use
from toy import all_reduce

import clustersim as package
from clustersim import engine
from clustersim.core.facts import RunFacts
from clustersim.core.program import Compute
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.core.units import format_time
from clustersim.explain.bounds import bounds, warnings
from clustersim.explain.compare import compare, sentences
from clustersim.explain.hotspots import hotspots, parts
from clustersim.explain.metrics import hottest_links, steady_window


def run(program, planner=toy.up_links, **options):
    topology = toy.star(program.world_size)
    return engine.simulate(program, topology, toy.mesh(topology), planner=planner, **options)


def with_links(segments):
    """A timeline of two ops with these segments on three links; see :func:`player.link_use`."""
    infos = tuple(OpInfo(f"all_reduce {i}", "all_reduce", f"comm{i}", "communication") for i in range(2))
    end = np.array([max(s[2] for s in segments)] * 2, dtype=float)
    zero = np.zeros(2)
    return Timeline(
        2,
        infos,
        (np.array([0, 1]),),
        np.array([0, 1]),
        np.zeros(2, dtype=np.int64),
        zero,
        zero,
        end,
        links=link_use(segments),
    )


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(1, 9), st.integers(1, 9)), min_size=1))
def test_heat_and_totals_are_the_bytes_that_crossed(drawn):
    segments = [(t, a, a + length, rate) for t, a, length, rate in drawn]
    timeline = with_links(segments)
    table = hotspots(timeline)
    use, (ids, window) = (
        timeline.links,
        ([timeline.links.link_names.index(n) for n in table["name"]], timeline.makespan),
    )
    carried = table["utilisation"] * table["bandwidth"] * window
    assert carried == pytest.approx(use.bytes_per_link()[ids])
    assert table["heat"].mean(axis=1) * window * table["bandwidth"] == pytest.approx(carried)
    for row, link in enumerate(ids):
        assert table["peak"][row] * table["bandwidth"][row] == pytest.approx(use.series(link)[1].max())
    assert np.all(np.diff(table["utilisation"]) <= 1e-12)


def test_users_of_a_link_and_links_nobody_uses():
    timeline = with_links([(0, 0, 1, 8), (1, 0, 2, 2)])
    table = hotspots(timeline)
    assert table["name"].tolist() == ["a -> b", "b -> c"]
    assert table["users"][0].tolist() == ["all_reduce #", "", ""]
    assert table["all_utilisation"].tolist() == pytest.approx([0.4, 0.4, 0.0])
    of = parts(link_use([(0, 0, 1, 8)])).of.tolist()
    assert sorted(of[:2]) == [0, 1]
    assert of[2] == -1


def test_links_of_other_rates_are_not_alike():
    result = package.load(
        "why_tiny_buckets",
        {"cluster.nodes": 2, "cluster.changes": [{"match": "node1/nic2", "factor": 0.4}], "run.steps": 2},
    ).run()
    table = hotspots(result.timeline, top=200)
    slow = table["name"].tolist().index("node1/nic2 -> leaf0") if "node1/nic2 -> leaf0" in table["name"] else 0
    assert "nic2" in table["name"][slow]
    assert table["alike"][slow] == 2  # one way and the other
    assert not any("links like it" in text and "nic2" in text for text in warnings(result.timeline))
    # each other rate has a row of its own: behind a slow NIC the table once had no NIC at all, only links of NVLink
    use = result.timeline.links
    rates = {float(use.link_bandwidth[i]) for i in np.flatnonzero(table["all_utilisation"] > 0)}
    assert set(table["bandwidth"].tolist()) == rates
    assert sum(table["alike"].tolist()) == int((table["all_utilisation"] > 0).sum())


@pytest.mark.parametrize("name", ["why_oversubscribed_spine", "ddp_llama3_8b_128x8_h100"])
def test_on_shipped_scenarios_it_agrees_with_the_summary(name):
    result = package.load(name).run()
    table = hotspots(result.timeline, top=5)
    window = steady_window(result.timeline)
    said = {name: used for name, used, _ in hottest_links(result.timeline.links, window.begin, window.end, 10**6)}
    assert table["utilisation"] == pytest.approx([said[name] for name in table["name"]])
    assert table["utilisation"][0] == pytest.approx(max(said.values()))
    assert (table["peak"] <= 1 + 1e-6).all()


def test_a_run_without_links_has_no_hotspot():
    assert hotspots(run(toy.program([Compute("a", 1.0)], ranks=1))) == {}


def bounded(seconds, bound):
    detail = {"lower_bound": bound, "groups": np.array([[0, 1]])}
    info = OpInfo("all_reduce", "all_reduce", "comm", "communication", nbytes=8.0, detail=detail)
    one = np.zeros(1)
    return Timeline(
        2,
        (info,),
        (np.array([0, 1]),),
        np.zeros(1, dtype=np.int64),
        np.zeros(1, dtype=np.int64),
        one,
        one,
        one + seconds,
    )


def test_every_collective_and_step_stands_beside_its_bound():
    table = bounds(bounded(4.0, 1.0))
    assert table["collectives"]["reached"].tolist() == [0.25]
    assert table["steps"]["communication_bound"].tolist() == [1.0]
    assert table["steps"]["reached"].tolist() == [0.25]


def test_flops_over_peak_bound_a_step():
    table = bounds(run(toy.program([Compute("a", 2.0, flops=10.0)], ranks=1)), peak_flops=10.0)
    assert table["steps"]["bound"].tolist() == table["steps"]["compute_bound"].tolist() == [1.0]
    assert table["steps"]["reached"].tolist() == [0.5]


def test_a_result_that_beats_its_bound_is_a_bug_and_is_said_to_be_one():
    found = warnings(bounded(0.5, 1.0))
    assert len(found) == 2
    assert "took 500 ms, less than the 1 s its bytes need at the narrowest cut: a bug" in found[0]
    assert warnings(bounded(1.0, 1.0)) == []


@pytest.mark.parametrize("name", ["why_slow_gpu", "why_tiny_buckets", "why_oversubscribed_spine", "why_launch_bound"])
def test_no_shipped_scenario_beats_a_bound(name):
    result = package.load(name).run()
    peak = result.summary["peak_flops"]
    assert not [text for text in warnings(result.timeline, RunFacts(peak_flops=peak)) if "a bug" in text]
    table = bounds(result.timeline, peak_flops=peak)
    assert (table["collectives"]["reached"] <= 1 + 1e-6).all()
    assert table["collectives"]["reached"].max() > 0


def test_a_full_link_is_a_warning_with_its_users_and_its_likes():
    timeline = run(toy.program([all_reduce("grads 1", 40.0, [0, 1])]))
    (found,) = warnings(timeline)
    assert found == (
        "node0/gpu0 -> switch is more than 95% full for 100% of the time, by 'grads #'; so is 1 link like it"
    )


def test_links_of_one_sort_with_the_same_users_are_one_warning():
    """Three lines said of NICs of a rail each that they were full for 15, 12 and 10 % of the time."""
    ops = [all_reduce("grads 1", 40.0, [[0, 1]]), all_reduce("grads 2", 20.0, [[2, 3]])]
    timeline = run(toy.program(ops, ranks=4))
    busy = warnings(timeline)
    assert [text.partition(" is more")[0] for text in busy] == ["node0/gpu0 -> switch"]
    assert "for 100% of the time" in busy[0]
    assert busy[0].endswith("; so are 3 links like it, for 50% at the least")


def test_a_run_compared_with_itself_has_no_difference():
    timeline = package.load("why_slow_gpu").run().timeline
    found = compare(timeline, timeline)
    assert not found.ops["difference_s"].any()
    assert found.ops["name_a"].tolist() == found.ops["name_b"].tolist()
    assert found.text == ["both take 237.3 ms a step"]
    assert sentences(found) == []


def test_differences_add_up_and_come_worst_first():
    slow, usual = (package.load(name).run().timeline for name in ("why_slow_gpu", "ddp_resnet50_1x8_v100"))
    found = compare(usual, slow)
    assert np.all(np.diff(np.abs(found.ops["difference_s"])) <= 1e-15)
    assert found.states["difference_s"].sum() == pytest.approx(found.step_b - found.step_a)
    back = compare(slow, usual)
    assert back.ops["difference_s"].sum() == pytest.approx(-found.ops["difference_s"].sum())
    assert found.text[0] == "a step takes 196.9 ms in A and 237.3 ms in B, 20.5% longer"
    assert "waiting for peers +" in sentences(found)[0]
    # "+485 ms (93.95 ms to 129 ms)" of a collective: the change is of its waiting, too, and so are both ends.
    row = int(np.argmax(np.abs(found.ops["wait_b"] - found.ops["wait_a"])))
    alone = msgspec.structs.replace(found, ops={name: column[row : row + 1] for name, column in found.ops.items()})
    ends = [format_time(float((found.ops[f"seconds_{side}"] + found.ops[f"wait_{side}"])[row])) for side in "ab"]
    assert f"({ends[0]} to {ends[1]})" in sentences(alone)[0]


def test_a_collective_of_a_profile_meets_the_simulated_one_of_its_kind_and_place():
    ops = [
        Compute("fwd", 1.0),
        all_reduce("all_reduce bucket 0", 10.0, [0, 1]),
        all_reduce("all_reduce bucket 1", 20.0, [0, 1]),
    ]
    simulated = run(toy.program(ops))
    infos = tuple(
        msgspec.structs.replace(op, name="all_reduce ncclKernel" if op.kind != "compute" else "gemm_kernel", detail={})
        for op in simulated.ops
    )
    measured = Timeline(
        2,
        infos,
        simulated.rank_sets,
        simulated.row_op,
        simulated.row_set,
        simulated.row_ready,
        simulated.row_start,
        simulated.row_end * 2,
        source="measured",
    )
    table = compare(simulated, measured).ops
    pairs = dict(zip(table["name_a"].tolist(), table["name_b"].tolist(), strict=True))
    assert pairs["all_reduce bucket 1"] == pairs["all_reduce bucket 0"] == "all_reduce ncclKernel"
    assert pairs["fwd"] == ""
    row = table["name_a"].tolist().index("all_reduce bucket 0")
    assert (table["nbytes_a"][row], table["nbytes_b"][row]) == (10.0, 10.0)


def test_the_command_compares_a_scenario_with_a_saved_run(clustersim, tmp_path):
    assert clustersim("run", "ddp_resnet50_1x8_v100", "--out", tmp_path).returncode == 0
    done = clustersim("compare", tmp_path, "why_slow_gpu", "--top", "2")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["A: ddp_resnet50_1x8_v100", "B: why_slow_gpu"]
    assert lines[2].endswith("20.5% longer")
    assert lines[-1].startswith(" 2. ")
    told = json.loads(clustersim("compare", tmp_path, tmp_path, "--json").stdout)
    assert told["text"] == ["both take 196.9 ms a step"]


def test_runs_whose_steps_have_different_work_are_told_apart_by_samples_per_second(clustersim, tmp_path):
    """A step of 1,024 samples was "187.6% longer" than one of 64, and nothing else was said."""
    path = tmp_path / "accumulating.toml"
    path.write_text(
        """
        cluster = {topology = "dgx-1v", nodes = 1, gpus_per_node = 2}
        model = {name = "alexnet"}
        run = {steps = 2}
        strategy = {kind = "ddp", micro_batch_size = 8, gradient_accumulation_steps = 2}
        """
    )
    once = tmp_path / "once.toml"
    once.write_text(path.read_text().replace("gradient_accumulation_steps = 2", "gradient_accumulation_steps = 1"))
    lines = clustersim("compare", path, once).stdout.splitlines()
    assert lines[2].startswith("a step has 32 samples on 2 GPUs in A and 16 on 2 GPUs in B")
    assert "samples per second" in lines[2]
    assert "samples on" not in clustersim("compare", once, once).stdout
