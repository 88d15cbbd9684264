"""Playing in unison gives what the executor gives, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from clustersim import scenario
from clustersim.engine import run, simulate
from clustersim.program import Compute

N = 4
STREAMS = ("compute", "comm", "reduce")


def apart(play):
    """The same, by the executor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "in_unison", lambda program, sites: False)
        return play()


def must_agree(one, other):
    spans, others = one.spans(), other.spans()
    assert {name: column.tolist() for name, column in spans.items()} == {
        name: column.tolist() for name, column in others.items()
    }
    for name in ("segment_transfer", "segment_start", "segment_end", "segment_rate", "transfer_op", "transfer_load"):
        assert getattr(one.links, name).tolist() == getattr(other.links, name).tolist()
    assert one.ops[0] == other.ops[0]
    assert {**one.stats, "events": 0, "solves": 0} == {**other.stats, "events": 0, "solves": 0}


def planner(request, group):
    """All up links, or the first ones only; some sizes are slow to start and some are held by a ceiling."""
    links = group.gpus if int(request.nbytes) % 2 else group.gpus[:2]
    latency = 0.25 * (int(request.nbytes) % 3)
    plan = toy.plan(request, links, latency=latency, ceiling=8.0 if request.nbytes > 5 else np.inf)
    return type(plan)(**{**vars(plan), "weights": 1.0 + np.arange(len(links)) % 2})


@st.composite
def programs(draw):
    ops = []
    for i in range(draw(st.integers(1, 14))):
        after = tuple(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else ()
        stream = draw(st.sampled_from(STREAMS))
        if draw(st.booleans()):
            # Few distinct times, so that much happens at one instant.
            times = draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 1.5]), min_size=N, max_size=N))
            duration = times[0] if draw(st.booleans()) else np.array(times)
            ops.append(Compute(f"c{i}", duration, stream, after))
        else:
            nbytes = draw(st.sampled_from([0.0, 1.0, 2.0, 5.0, 6.0, 9.0]))
            ops.append(toy.all_reduce(f"r{i}", nbytes, np.arange(N), stream=stream, after=after))
    return toy.program(ops, ranks=N, slowdown=draw(st.sampled_from([0.0, 0.5])))


@given(programs())
def test_random_programs_of_one_group_are_played_alike(program):
    topology = toy.star(N)

    def play():
        return simulate(program, topology, toy.mesh(topology), planner=planner)

    must_agree(play(), apart(play))


def test_what_is_not_of_one_group_is_left_to_the_executor():
    topology = toy.star(N)
    op = toy.all_reduce("r", 5.0, [[0, 1], [2, 3]])
    program = toy.program([op], ranks=N)
    assert simulate(program, topology, toy.mesh(topology), planner=toy.up_links).stats["events"] == 3


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ddp_gpt2_xl_2x8_a100", {"model.name": "gpt2", "run.jitter": 0.05}),
        ("ddp_gpt2_xl_2x8_a100", {"model.name": "gpt2", "cluster.nodes": 8, "strategy.comm_hook": "fp16_compress"}),
        ("fsdp_mpt_7b_16x8_a100", {"cluster.nodes": 8, "run.steps": 2, "run.jitter": 0.02}),
        ("zero3_llama3_8b_2x8_a100", {"run.steps": 1, "run.jitter": 0.02}),
        ("why_slow_gpu", {}),
    ],
)
def test_strategies_are_played_alike(name, changes):
    def play():
        return scenario.load(name, changes).run().timeline

    together, separately = play(), apart(play)
    assert together.stats["events"] < separately.stats["events"]
    must_agree(together, separately)
