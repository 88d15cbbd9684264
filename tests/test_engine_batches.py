"""Sends that begin together are played without a clock: the same times, whether that holds or not."""

from __future__ import annotations

import numpy as np
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st
from test_engine_guess import must_agree

from clustersim import scenario
from clustersim.core.program import Compute, Recv, Send
from clustersim.engine import batches, simulate
from clustersim.engine.guess import SharingGuess

DUALPIPE = {
    "cluster.nodes": 8,
    "parallel.pp": 4,
    "parallel.ep": 8,
    "parallel.microbatches": 12,
    "parallel.layout": [15, 15, 15, 16],
}


def two_messages(extra=()):
    """Rank 0 computes for 1 s and sends 5 bytes twice, at 10 bytes/s, and has other ops besides."""
    sends = [Send(f"out {k}", 5.0, np.array([1]), stream=f"out {k}", after=(0,), tag=f"{k}") for k in range(2)]
    recvs = [Recv(f"in {k}", 5.0, np.array([0]), stream=f"in {k}", after=(0,), tag=f"{k}") for k in range(2)]
    return [Compute("c", 1.0), *sends, *extra], [Compute("c", 0.5), *recvs]


def played(*lists, ranks=None):
    topology = toy.star(len(lists))
    program = toy.program(*lists, ranks=ranks or [[r] for r in range(len(lists))])
    return simulate(program, topology, toy.mesh(topology), planner=toy.up_links)


def one_by_one(play):
    """The same, with no batch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "BATCHED_FROM", 10**9)
        return play()


def test_two_sends_of_one_moment_take_twice_as_long_and_no_event():
    lists = two_messages()
    timeline = played(*lists)
    assert timeline.makespan == pytest.approx(1.0 + 2 * 0.5)
    assert timeline.stats["events"] == 0
    alone = one_by_one(lambda: played(*lists))
    assert alone.stats["events"] > 0
    must_agree(timeline, alone)


def test_a_third_that_comes_meanwhile_shares_with_both():
    stage, peer = two_messages(
        [Compute("d", 0.2, after=(0,)), toy.all_reduce("r", 5.0, [[0, 2]], stream="dp", after=(3,))]
    )
    lists = stage, peer, [toy.all_reduce("r", 5.0, [[0, 2]], stream="dp")]
    timeline = played(*lists)
    assert timeline.makespan == pytest.approx(1.0 + 3 * 0.5)  # one link carries all three
    must_agree(timeline, one_by_one(lambda: played(*lists)))


def test_of_two_that_did_not_begin_together_nothing_is_taken_for_granted(monkeypatch):
    parted = []
    part = batches.SendBatches.part
    monkeypatch.setattr(batches.SendBatches, "part", lambda self, clocked: parted.append(part(self, clocked)))
    stage, peer = two_messages()
    # Its stream is still at work when the other one begins.
    stage.insert(0, Compute("before", 1.25, stream="out 0"))
    stage[2:] = [Send(op.name, op.nbytes, op.peer, stream=op.stream, after=(1,), tag=op.tag) for op in stage[2:]]
    timeline = played(stage, peer)
    assert timeline.makespan == pytest.approx(1.0 + 2 * 0.5)
    assert len(parted) == 2  # a play in vain, and the one that is right
    must_agree(timeline, one_by_one(lambda: played(stage, peer)))


@st.composite
def pipelines(draw):
    """Two stages on two replicas that send each other messages behind the same kernels, and a collective besides."""
    moments = st.sampled_from([0.25, 0.5, 1.0])
    stages = [[], []]
    for k in range(draw(st.integers(1, 4))):
        sizes = draw(st.lists(st.sampled_from([2.0, 5.0]), min_size=1, max_size=4))
        forth = [draw(st.booleans()) for _ in sizes]
        for me, ops in enumerate(stages):
            durations = np.array([draw(moments), draw(moments)]) if draw(st.booleans()) else draw(moments)
            last = len(ops)
            ops.append(Compute(f"c{k}", durations, after=tuple(range(max(last - 4, 0), last))))
            for n, (nbytes, out) in enumerate(zip(sizes, forth, strict=True)):
                sends = out == (me == 0)
                peer = np.array([2, 3] if me == 0 else [0, 1])
                make = Send if sends else Recv
                ops.append(make(f"m{n}", nbytes, peer, stream=f"{n} {out}", after=(last,), tag=f"{k} {n}"))
            if draw(st.booleans()):
                groups = [[0, 1]] if me == 0 else [[2, 3]]
                ops.append(toy.all_reduce(f"r{k}", 3.0, groups, stream="dp", after=(last,)))
    return toy.program(*stages, ranks=2, slowdown=draw(st.sampled_from([0.0, 0.5])))


@given(pipelines())
def test_messages_in_batches_or_one_by_one_take_the_same_times(program):
    topology = toy.star(4)

    def play():
        return simulate(program, topology, toy.mesh(topology), planner=toy.up_links)

    must_agree(play(), one_by_one(play))


def test_a_pipeline_of_both_directions_is_the_same_with_fewer_events(monkeypatch):
    found = []
    batch = SharingGuess._batch
    monkeypatch.setattr(
        SharingGuess, "_batch", lambda self, loads: batch(self, loads) or found.append(len(self.batches.firsts))
    )

    def play():
        return scenario.load("pp16_ep64_deepseek_v3_256x8_h800", DUALPIPE).run().timeline

    together = play()
    assert found[0] > 10
    alone = one_by_one(play)
    must_agree(together, alone)
    assert together.stats["events"] < alone.stats["events"]
