"""The engine plays random Programs as the oracle does, and the oracle plays by the rules it states."""

from __future__ import annotations

from dataclasses import replace

import equality
import numpy as np
import oracle
import pytest
import random_programs
import toy
from hypothesis import Phase, given, settings

from clustersim.core.errors import ProgramError, TopologyError
from clustersim.core.program import Compute, Recv, Send, Serve
from clustersim.engine import simulate


def play(program, planner=toy.up_links):
    topology = toy.star(program.world_size)
    return oracle.play(program, topology, toy.mesh(topology), planner)


class TestRules:
    """Closed forms of the oracle itself, on a star of 10 bytes/s."""

    def test_ops_of_a_stream_follow_one_another_and_those_named_in_after(self):
        ops = [Compute("a", 2.0), Compute("b", 3.0, stream="copy"), Compute("c", 1.0, after=(1,))]
        assert play(toy.program(ops, ranks=1)).spans == {(0, 0): (0, 0, 2), (0, 1): (0, 0, 3), (0, 2): (3, 3, 4)}

    def test_a_collective_starts_with_its_last_member_and_shares_its_links(self):
        late = Compute("late", np.array([0.0, 4.0]), stream="comm")
        both = [late, toy.all_reduce("a", 20.0, [0, 1]), toy.all_reduce("b", 20.0, [0, 1], stream="comm2", after=(0,))]
        spans = play(toy.program(both, ranks=2)).spans
        assert spans[0, 1] == (0, 4, 8)
        assert spans[1, 2] == (4, 4, 8)

    def test_a_flow_below_its_share_leaves_the_rest_to_others(self):
        def planner(request, group):
            return toy.plan(request, [0], latency=1.0, ceiling=2.0 if request.nbytes == 20 else np.inf)

        both = [toy.all_reduce("a", 20.0, [0, 1]), toy.all_reduce("b", 40.0, [0, 1], stream="comm2")]
        played = play(toy.program(both, ranks=2), planner)
        assert played.spans[0, 0] == (0, 0, 11)
        assert played.spans[0, 1] == (0, 0, 6)
        assert played.meetings[1].pieces == [(1, 6, 8)]

    def test_the_first_kernel_after_a_hidden_collective_pays_for_the_time_both_ran(self):
        ops = [toy.all_reduce("a", 20.0, [0, 1]), Compute("k", 1.5), Compute("l", 1.0), Compute("m", 1.0)]
        spans = play(toy.program(ops, ranks=2, slowdown=0.5)).spans  # the collective is over at 2
        assert [spans[0, i] for i in (1, 2, 3)] == [(0, 0, 1.5), (1.5, 1.5, 2.5), (2.5, 2.5, 4.5)]

    def test_who_is_ready_first_is_served_first_and_ties_go_by_the_list(self):
        waits = [Compute(f"w{i}", seconds, stream=f"w{i}") for i, seconds in enumerate((2.0, 1.0, 1.0))]
        serves = [Serve(f"s{i}", 3.0, stream="cpu", after=(i,)) for i in range(3)]
        spans = play(toy.program([*waits, *serves], ranks=1)).spans
        assert [spans[0, i][1] for i in (3, 4, 5)] == [7, 1, 4]

    def test_the_kth_send_of_a_tag_meets_the_kth_recv(self):
        sends = [Send("a", 10.0, np.array([1])), Send("b", 20.0, np.array([1]), tag="x")]
        recvs = [Recv("x", 20.0, np.array([0]), tag="x", stream="other"), Recv("a", 10.0, np.array([0]))]
        spans = play(toy.program(sends, recvs, ranks=1)).spans
        assert spans[0, 1] == spans[1, 2] == (1, 1, 3) or spans[1, 2] == (0, 1, 3)

    def test_ranks_that_wait_for_each_other_are_told(self):
        one = toy.all_reduce("a", 1.0, [0, 1])
        two = Recv("r", 1.0, np.array([1]))
        with pytest.raises(ProgramError, match="never ends"):
            play(toy.program([one, two], [Send("s", 1.0, np.array([0])), one], ranks=1))

    def test_a_dead_link_is_told(self):
        topology = toy.star(2)
        topology = replace(topology, link_bandwidth=np.zeros(4))
        program = toy.program([toy.all_reduce("a", 1.0, [0, 1])])
        with pytest.raises(TopologyError, match="without bandwidth"):
            oracle.play(program, topology, toy.mesh(topology), toy.up_links)


@pytest.mark.parametrize("number", range(56))
def test_the_engine_plays_a_numbered_program_as_the_oracle_does(number):
    assert equality.compare(equality.numbered(7, number)).wrong == ""


@given(random_programs.cases())
@settings(
    max_examples=60, phases=(Phase.explicit, Phase.generate)
)  # a failure's seed says enough; shrinking takes minutes
def test_the_engine_plays_any_program_as_the_oracle_does(case):
    assert equality.compare(case).wrong == ""


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ddp_gpt2_xl_2x8_a100", {"model.name": "gpt2", "run.jitter": 0.05}),
        ("fsdp_mpt_7b_16x8_a100", {"cluster.nodes": 2, "run.steps": 1, "run.jitter": 0.02}),
        ("hsdp_llama3_70b_32x8_h100", {"model.name": "llama3-8b", "cluster.nodes": 2, "run.steps": 1}),
        ("zero2_llama3_8b_2x8_a100", {"run.steps": 1}),
        ("ps_async_32x8_v100", {"cluster.nodes": 1, "run.steps": 5}),
        ("sgd_steps_1x8", {}),
        ("dp_torch_1x8", {}),
    ],
)
def test_the_engine_plays_a_shipped_scenario_as_the_oracle_does(name, changes):
    result = equality.compare(random_programs.of_scenario(name, changes))
    assert not result.failed
    assert result.wrong == ""
    assert result.spans > 1000


def test_kinds_of_programs_take_turns():
    assert [equality.numbered(0, n).kind for n in range(len(random_programs.KINDS))] == list(random_programs.KINDS)


def test_a_send_to_nobody_passes_by():
    program = toy.program([Send("s", 1.0, np.array([-1, -1])), Compute("k", 1.0, stream="comm")])
    topology = toy.star(2)
    timeline = simulate(program, topology, toy.mesh(topology))
    assert timeline.makespan == play(program).spans[0, 1][2] == 1.0


@pytest.mark.parametrize("change", ["bandwidth", "price"])
def test_a_difference_is_seen(monkeypatch, change):
    real = equality.simulate

    def other(program, topology, *rest, **options):
        if change == "bandwidth":
            topology = replace(topology, link_bandwidth=topology.link_bandwidth * (1 + 1e-6))
        else:
            program = replace(program, overlap_slowdown=program.overlap_slowdown + 1e-6)
        return real(program, topology, *rest, **options)

    monkeypatch.setattr(equality, "simulate", other)
    wrong = [equality.compare(equality.numbered(0, n)).wrong for n in range(28)]
    assert sum(map(bool, wrong)) > 3
    assert any("oracle (" in text for text in wrong)


def test_first_ranks_of_a_kernel_may_set_off_what_its_last_ranks_pay_for():
    # Rank 0 runs a kernel, then sends; a collective of rank 2 waits for that, and ends before rank 2 runs the kernel.
    result = equality.compare(equality.numbered(21, 422))
    assert result.spans
    assert not result.wrong


@pytest.mark.parametrize(("seed", "number"), [(0, 1641), (1, 990), (2, 115)])
def test_a_play_that_ends_amid_a_chain_of_kernels_leaves_nothing_of_it(seed, number):
    # The guess of who shares links is wrong, which is seen after the first step, while ranks are on their way through.
    result = equality.compare(equality.numbered(seed, number))
    assert result.spans
    assert not result.wrong
