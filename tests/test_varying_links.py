"""Links that slow down, recover or flap while a run goes on."""

import re
from dataclasses import replace

import numpy as np
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

import clustersim
from clustersim import engine
from clustersim.core.errors import ClusterSimError, ProgramError
from clustersim.core.program import Compute, Recv, Send
from clustersim.core.units import parse_time
from clustersim.engine.flows.loads import VaryingLinks

BASE = "ddp_gpt2_medium_2x4_v100"


def run(ops, varying=(), ranks=2, topology=None, **options):
    topology = topology or toy.star(ranks, bandwidth=10.0)
    program = toy.program(ops, ranks=ranks)
    return engine.simulate(program, topology, toy.mesh(topology), planner=toy.up_links, varying=varying, **options)


ONE = [Compute("a", 1.0), toy.all_reduce("r", 20.0, [0, 1], after=(0,))]
"""A second of compute, then 20 bytes at 10 bytes/s."""


@pytest.mark.parametrize(
    ("varying", "end"),
    [
        (VaryingLinks((0,), 0.5, 2.0, np.inf), 4.0),  # 10 bytes in the first second, 10 more at half the rate
        (VaryingLinks((0,), 0.5, 1.0, 2.0), 3.5),  # 5 bytes in the slow second
        (
            VaryingLinks((0,), 0.1, 1.0, 1.1, 0.2),
            4.71,
        ),  # 1.1 bytes in each 0.2 s: 18 of them, 0.1 in a slow one, and 0.1
        (VaryingLinks((0,), 0.5, 0.0, 1.0), 3.0),  # over before anything is sent
        (VaryingLinks((0,), 0.5, 3.0, np.inf), 3.0),  # begins when all has come
    ],
)
def test_a_transfer_takes_as_long_as_the_rates_it_met(varying, end):
    assert run(ONE, (varying,)).makespan == pytest.approx(end, rel=1e-9)


def test_links_may_vary_while_nobody_sends_anything():
    changes = (VaryingLinks((0,), 0.5, 0.0, np.inf),)
    assert run(ONE[:1], changes).makespan == 1.0
    assert run([ONE[0], toy.all_reduce("r", 0.0, [0, 1], after=(0,))], changes).makespan == 1.0


def test_factors_of_changes_that_overlap_multiply():
    both = VaryingLinks((0,), 0.5, 1.0, 3.0), VaryingLinks((0,), 0.5, 2.0, 3.0)
    assert run(ONE, both).makespan == pytest.approx(3.0 + (20 - 5 - 2.5) / 10)


@given(
    st.lists(st.tuples(st.integers(0, 19), st.integers(1, 19), st.floats(0.5, 40.0)), min_size=1, max_size=60),
    st.floats(0.05, 1.0),
    st.sets(st.integers(0, 39), min_size=1, max_size=5),
)
def test_a_change_that_always_holds_is_a_machine_built_so(drawn, factor, links):
    world = 20
    ops = []
    for i, (one, step, nbytes) in enumerate(drawn):
        other = (one + step) % world
        ops.append(Compute(f"c{i}", np.arange(world) / 7 + 0.1, f"s{i % 5}"))
        to = np.full(world, -1)
        of = np.full(world, -1)
        to[one], of[other] = other, one
        ops.append(Send(f"m{i}", nbytes, to, f"out{i}", (len(ops) - 1,), tag=str(i)))
        ops.append(Recv(f"m{i}", nbytes, of, f"in{i}", (), tag=str(i)))
    topology = toy.star(world, bandwidth=10.0)
    rate = topology.link_bandwidth.copy()
    rate[sorted(links)] *= factor
    built = run(ops, ranks=world, topology=replace(topology, link_bandwidth=rate))
    varied = run(ops, (VaryingLinks(tuple(sorted(links)), factor, 0.0, np.inf),), ranks=world, topology=topology)
    assert varied.per_op()["end"] == pytest.approx(built.per_op()["end"], rel=1e-9)


def test_steps_of_the_chunk_fidelity_refuse_it():
    with pytest.raises(ProgramError, match="need the fidelity 'flow'"):
        run(ONE, (VaryingLinks((0,), 0.5, 0.0, 1.0),), fidelity="chunk")


def step(change, **more):
    changes = {"cluster.changes": [{"match": "node0/nic0", **change}], "run.jitter": 0.0, "run.steps": 6, **more}
    return clustersim.load(BASE, changes).run()


def test_a_flapping_nic_costs_between_nothing_and_what_a_slow_one_costs():
    plain = clustersim.load(BASE, {"run.jitter": 0.0, "run.steps": 6}).run().summary["step_time_s"]
    slow = step({"factor": 0.2}).summary["step_time_s"]
    flaps = step({"factor": 0.2, "from": "0 s", "until": "50 ms", "every": "100 ms"}).summary["step_time_s"]
    assert plain * 1.02 < flaps < slow * 0.98


def test_the_slow_nic_is_what_an_explanation_names():
    said = step({"factor": 0.1, "from": "0 s"}).explain()
    assert "node0/nic0" in said.causes[0]


def test_a_transfer_that_met_a_slow_link_alone_shared_it_with_nobody():
    # Of flaps that backward hides nothing is to be said: these meet the last buckets of some steps.
    flap = {"match": "node0/nic0", "factor": 0.001, "from": "0 s", "until": "0.1 s", "every": "0.76 s"}
    said = clustersim.load("ddp_gpt2_xl_2x8_a100", {"cluster.changes": [flap], "run.steps": 20}).run().explain()
    slow = [text for text in said.causes if "node0/nic0" in text]
    assert any("is slower for a while" in text for text in slow)
    assert not any("shared" in text for text in slow)


def test_a_change_that_no_counted_step_sees_is_told():
    late = [note for note in step({"factor": 0.5, "from": "60 s"}).notes if "changes outside of the steps" in note]
    assert len(late) == 1


@pytest.mark.parametrize("now", [0.0, 1.0, 5.0, 1e3, 1e5])
def test_a_flap_has_a_next_edge_however_late_it_is(now):
    flap = VaryingLinks((0,), 0.5, begin=0.0, end=1e-6, every=3e-6)
    seen = []
    for _ in range(6):
        now = flap.edge(now)
        seen.append((now, flap.at(now)))
    assert [factor for _, factor in seen] in ([0.5, 1.0] * 3, [1.0, 0.5] * 3)
    assert seen[-1][0] - seen[0][0] == pytest.approx(2.5 * 3e-6, abs=1.1e-6)


def test_a_link_that_flaps_without_end_is_one_line_and_no_hang():
    with pytest.raises(ClusterSimError, match=r"links changed 30,000 times by .*; use a longer every"):
        step({"factor": 0.5, "from": "0 s", "until": "1 us", "every": "2 us"})


def test_a_link_that_flaps_between_the_counted_steps_is_told_too():
    never = step({"factor": 0.001, "from": "0 s", "until": "1 us", "every": "60 s"})
    assert any("changes outside of the steps" in note for note in never.notes)


def test_figures_of_a_flapping_link_say_how_much_of_it_they_saw():
    result = step({"factor": 0.2, "from": "0 s", "until": "20 ms", "every": "100 ms"})
    (note,) = (note for note in result.notes if note.startswith("node0/nic0 is changed for"))
    steady = result.summary["step_time_s"] * len(result.summary["steady_steps"])
    seen = parse_time(re.search(r"changed for (\S+ \S+) of", note)[1])
    assert seen == pytest.approx(0.2 * steady, abs=0.02)


def test_a_link_changed_all_the_time_needs_no_note():
    assert not [note for note in step({"factor": 0.2, "from": "0 s"}).notes if "node0/nic0" in note]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"remove": True, "from": "1 s"}, "need a factor of at most 1"),
        ({"factor": 2.0, "from": "1 s"}, "need a factor of at most 1"),
        ({"factor": 0.5, "from": "2 s", "until": "1 s"}, "until must be later than from"),
        ({"factor": 0.5, "from": "1 s", "until": "2 s", "every": "1 s"}, "every needs an until, and to be longer"),
        ({"factor": 0.5, "until": "1 ns", "every": "10 ns"}, "every must be at least 1 us"),
        ({"factor": 0.5, "from": "soon"}, "cannot read 'soon' as a time"),
        ({"factor": 0.5, "match": "node9/nic0", "from": "1 s"}, "no vertex matches 'node9/nic0'"),
    ],
)
def test_what_cannot_be_is_one_clear_error(change, said):
    with pytest.raises(ClusterSimError, match=said) as wrong:
        step(change)
    assert "cluster.changes" in str(wrong.value)
