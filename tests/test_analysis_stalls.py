"""Every useless instant has a cause, and planted causes are found: on machines small enough to work out by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import toy
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from toy import all_reduce

import clustersim
from clustersim import engine
from clustersim.core.program import Compute, Serve
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.explain.breakdown import breakdown, steady_pieces
from clustersim.explain.cause_table import CAUSE_NAMED
from clustersim.explain.chase import RankMeetings
from clustersim.explain.late_start import late_starts
from clustersim.explain.pace import pace_ratios, skews, slow_ranks
from clustersim.explain.pieces import STATES, PieceState, by_class
from clustersim.explain.sentences import jitter, narrow_link
from clustersim.explain.stalls import causes, stalls
from clustersim.explain.transfers import sort_of, transfer_facts


def run(program, planner=toy.up_links, topology=None, **options):
    topology = topology or toy.star(program.world_size)
    return engine.simulate(program, topology, toy.mesh(topology), planner=planner, **options)


def first(timeline):
    table = stalls(causes(timeline))
    return {name: column[0] for name, column in table.items()}


def test_a_slow_rank_is_named_with_its_ratio_and_what_it_was_doing():
    ops = [Compute("fwd", np.array([1.0, 1.0, 1.0, 1.5])), all_reduce("grads", 1.0, [0, 1, 2, 3], after=(0,))]
    found = first(run(toy.program(ops, ranks=4)))
    assert (found["cause"], found["subject"], found["holder_rank"]) == ("slow rank", "rank 3", 3)
    assert found["cost_s"] == pytest.approx(3 * 0.5 / 4)
    assert "1.50 times the median" in found["text"]
    assert "3 ranks wait for it" in found["text"]
    assert "'fwd'" in found["text"]


def test_a_wait_for_a_rank_that_waits_is_followed_to_the_end():
    # Rank 3 holds rank 2 in the first collective, and rank 2 holds ranks 0 and 1 in the second.
    ops = [
        Compute("fwd", np.array([1.0, 1.0, 1.0, 4.0])),
        all_reduce("pairs", 1.0, [[0, 1], [2, 3]], after=(0,)),
        all_reduce("all", 1.0, [[0, 1, 2, 3]], after=(1,)),
    ]
    table = stalls(causes(run(toy.program(ops, ranks=4))))
    assert table["subject"][0] == "rank 3"
    assert table["ranks"][0] == 3


def test_paces_that_change_from_step_to_step_are_jitter_not_a_slow_rank():
    ops = []
    for step, slow in enumerate([0, 1, 2, 3, 0, 1, 2, 3]):
        pace = np.where(np.arange(4) == slow, 1.1, 1.0)
        ops.append(Compute(f"fwd {step}", pace, step=step, after=(len(ops) - 1,) if ops else ()))
        ops.append(all_reduce(f"grads {step}", 0.1, [0, 1, 2, 3], after=(len(ops) - 1,), step=step))
    found = first(run(toy.program(ops, ranks=4)))
    assert (found["cause"], found["subject"]) == ("jitter", "ranks")
    assert "none is always slow" in found["text"]


def test_what_is_waited_for_is_no_rank_that_waits_and_none_is_called_never_slow_that_is():
    """Of a profile of two processes "none is always slow" stood above "rank 1 is 10% slower", and rank 0 waited for
    rank 0: a chase had led back to it."""
    ops = [Compute("fwd", np.array([1.0, 1.0, 1.0, 1.06])), all_reduce("grads", 1.0, [0, 1, 2, 3], after=(0,))]
    whole = causes(run(toy.program(ops, ranks=4)))
    charge = replace(next(iter(whole.charges)), cause="jitter", rank=2, holder_rank=2)
    assert slow_ranks(whole.timeline, whole.pace).any()
    text = jitter(whole, charge)
    assert "none is always slow" not in text
    assert "for rank" not in text
    assert jitter(whole, replace(charge, holder_rank=3)).endswith(" for rank 3.")


def test_a_narrow_link_is_named_with_what_the_next_would_allow():
    topology = toy.star(2, bandwidth=10.0)
    topology = replace(topology, link_bandwidth=np.where(np.arange(4) == 1, 2.0, 10.0))
    found = first(run(toy.program([all_reduce("grads", 10.0, [0, 1])]), topology=topology))
    assert found["cause"] == "link"
    assert found["link_name"] == topology.link_name(1)
    assert found["cost_s"] == pytest.approx(5.0)
    assert "of which it carries a part" not in found["text"]


def test_payload_above_a_link_s_rate_is_said_to_cross_it_in_part():
    """A link of 50 GB/s let "96 GB/s of payload through": of what two ranks reduce, half crosses it."""
    topology = toy.star(2, bandwidth=10.0)
    whole = causes(run(toy.program([all_reduce("grads", 10.0, [0, 1])]), topology=topology))
    charge = next(charge for charge in whole.charges if charge.cause == "link")
    facts = {op: msgspec.structs.replace(fact, alone=19.0) for op, fact in whole.facts.items()}
    assert "of payload through, of which it carries a part" in narrow_link(replace(whole, facts=facts), charge)


def test_a_shared_link_is_told_with_whom():
    ops = [all_reduce("mine", 10.0, [0, 1]), all_reduce("other", 10.0, [0, 1], stream="b", communicator="b")]
    found = first(run(toy.program(ops)))
    assert found["cause"] == "shared link"
    assert "shared with 'other'" in found["text"]
    assert "5e-09 GB/s of payload" in found["text"]
    assert "alone it would get 1e-08 GB/s" in found["text"]


def test_small_collectives_are_latency_bound():
    def planner(request, group):
        return toy.plan(request, group.gpus, latency=0.9)

    ops = [all_reduce("a", 1.0, [0, 1]), all_reduce("b", 1.0, [0, 1])]
    found = first(run(toy.program(ops), planner))
    assert found["cause"] == "latency"
    assert "has 2 of them a step, one behind the other on the communicator" in found["text"]
    assert "bandwidth matters above 9 B" in found["text"]


def test_kernels_that_limit_a_transfer_are_not_taken_for_a_link():
    found = first(run(toy.program([all_reduce("a", 10.0, [0, 1])]), lambda q, g: toy.plan(q, g.gpus, ceiling=2.0)))
    assert (found["cause"], found["link"]) == ("kernels", -1)


def test_communication_that_begins_late_is_charged_with_what_could_have_been_hidden():
    backward = [Compute(f"bwd {i}", 1.0, phase="backward") for i in range(4)]
    ops = [*backward, all_reduce("bucket", 50.0, [0, 1], after=(3,))]
    table = stalls(causes(run(toy.program(ops))))
    found = dict(zip(table["cause"].tolist(), table["cost_s"].tolist(), strict=True))
    assert found == pytest.approx({"late start": 3.0, "link": 2.0})


def test_a_server_is_named_for_its_queue():
    worker = [Compute("fwd", 1.0), all_reduce("push", 1.0, [0, 1, 2], after=(0,), communicator="p")]
    worker.append(all_reduce("pull", 1.0, [0, 1, 2], after=(1,), communicator="q"))
    server = [all_reduce("push", 1.0, [0, 1, 2], communicator="p"), Serve("update", 5.0, "cpu", (0,))]
    server.append(all_reduce("pull", 1.0, [0, 1, 2], after=(1,), communicator="q"))
    program = toy.program(worker, server, ranks=[[0, 1], [2]])
    named = tuple(replace(role, name=name) for role, name in zip(program.roles, ("worker", "server"), strict=True))
    table = stalls(causes(run(replace(program, roles=named))))
    assert table["cause"].tolist() == ["parameter server"]
    assert table["cost_s"][0] == pytest.approx(5.0 + 2 * 0.1)
    assert table["ranks"][0] == 2


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 50)), min_size=1, max_size=20))
def test_what_is_charged_is_what_is_not_useful(drawn):
    ops = []
    for i, (kind, value) in enumerate(drawn):
        after = (i - 1,) if i and kind % 3 else ()
        if kind % 2:
            groups = [[0, 1, 2, 3]] if kind % 4 == 1 else [[0, 1], [2, 3]]
            ops.append(all_reduce(f"r{i}", float(value), groups, after=after))
        else:
            bound = ("compute", "launch", "host")[kind % 3]
            ops.append(Compute(f"c{i}", value / 10 * (1 + np.arange(4) % (1 + kind % 4)), after=after, bound=bound))
    timeline = run(toy.program(ops, ranks=4))
    found = causes(timeline)
    table = breakdown(timeline, found.cut)
    useless = [i for i, s in enumerate(STATES) if s not in ("compute-bound", "memory-bound", "optimizer")]
    lost = table.seconds[:, useless].sum() * table.steps
    assert sum(c.seconds for c in found.charges) == pytest.approx(lost, abs=1e-9)
    assert {c.cause for c in found.charges} <= set(CAUSE_NAMED)
    assert all(c.seconds >= -1e-9 for c in found.charges)


@pytest.mark.parametrize("name", ["why_oversubscribed_spine", "why_late_first_bucket", "zero3_llama3_8b_2x8_a100"])
def test_what_is_charged_on_shipped_scenarios_is_what_is_not_useful(name):
    found = causes(clustersim.load(name).run().timeline)
    cut = found.cut
    useless = [i for i, s in enumerate(STATES) if s not in ("compute-bound", "memory-bound", "optimizer")]
    launching = np.array([by_class(op).get(PieceState.LAUNCH, 0.0) for op in found.timeline.ops])
    part = np.where(cut.state == PieceState.LAUNCH, launching[cut.op], 1.0)  # kernels of such passes work meanwhile
    lost = (cut.seconds * part * cut.weight[cut.owner])[np.isin(cut.state, useless)].sum()
    assert sum(c.seconds for c in found.charges) == pytest.approx(lost)


def test_the_last_arriver_is_looked_for_in_the_own_group_only():
    ops = [Compute("a", np.array([1.0, 2.0, 3.0, 4.0])), all_reduce("r", 1.0, [[0, 2], [1, 3]], after=(0,))]
    met = RankMeetings(run(toy.program(ops, ranks=4)))
    assert met.last_arriver(1, 0, 2.0) == (2, 1)
    assert met.last_arriver(1, 1, 3.0) == (3, 1)


def test_facts_of_a_transfer_are_its_rate_alone_and_now():
    ops = [all_reduce("mine", 10.0, [0, 1]), all_reduce("other", 10.0, [0, 1], stream="b", communicator="b")]
    fact = transfer_facts(run(toy.program(ops)))[0]
    assert (fact.rate, fact.alone, fact.latency, fact.limit) == (5.0, 10.0, 0.0, "shared link")


def test_names_are_sorted_by_what_is_left_without_numbers():
    assert sort_of("node12/nic3 -> leaf0") == "node#/nic# -> leaf#"


def test_of_many_jittering_ranks_none_is_slow_until_one_is():
    rng = np.random.default_rng(1)
    draw = 1 + 0.015 * rng.standard_normal(1000)
    ops = [Compute("a", draw)]
    timeline = run(toy.program(ops, ranks=1000))
    assert not slow_ranks(timeline, pace_ratios(timeline)).any()
    draw[17] = 1.2
    timeline = run(toy.program([Compute("a", draw)], ranks=1000))
    assert np.flatnonzero(slow_ranks(timeline, pace_ratios(timeline))).tolist() == [17]


def test_a_measured_rank_that_comes_late_with_an_idle_gpu_was_launched_late():
    infos = (OpInfo("k", "compute", "compute"), OpInfo("all_reduce", "all_reduce", "comm", "communication"))
    sets = (np.array([0]), np.array([1]))
    timeline = Timeline(
        2,
        infos,
        sets,
        np.array([0, 0, 1, 1]),
        np.array([0, 1, 0, 1]),
        np.array([0.0, 0.0, 1.0, 9.0]),
        np.array([0.0, 0.0, 9.0, 9.0]),
        np.array([1.0, 1.0, 10.0, 10.0]),
        source="measured",
    )
    assert skews(timeline)[1] == 8.0
    table = stalls(causes(timeline))
    assert sorted(table["cause"].tolist()[:2]) == ["idle device", "late launch"]
    late = table["text"][table["cause"].tolist().index("late launch")]
    assert "rank 0 waits 8 s" in late
    assert "for rank 1" in late


def test_a_run_without_loss_has_no_stall():
    table = stalls(causes(run(toy.program([Compute("a", 1.0)], ranks=2))))
    assert len(table["cause"]) == len(table["text"]) == 0


def test_micro_batches_that_only_add_up_do_not_make_communication_late():
    def idle(passes: int) -> float:
        changes = {"strategy.gradient_accumulation_steps": passes, "cluster.nodes": 1, "run.steps": 3}
        run = clustersim.load("ddp_gpt2_xl_2x8_a100", changes).run().timeline
        return late_starts(run, steady_pieces(run))[2].idle

    assert idle(4) < 1.5 * idle(1)


def test_every_cause_that_is_charged_has_its_words():
    charging = [(ROOT / "clustersim" / "explain" / f"{name}.py").read_text() for name in ("charges", "transfers")]
    lines = [
        line for text in charging for line in text.splitlines() if re.search(r"(Blame|Charge)\(\W*\"|limit = ", line)
    ]
    charged = {re.findall(r'"([a-z ]+)"', line)[0] for line in lines}
    charged |= {word for line in lines for word in re.findall(r'else "([a-z ]+)"', line)}
    assert {"host copies", "host", "late launch", "late start", "shared link", "kernels", "unknown"} <= charged
    assert charged <= set(CAUSE_NAMED)
