"""Chunk replay by hand, and the macro-flow against it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import toy

from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group, Request
from clustersim.collectives.channels import channels
from clustersim.collectives.registry import ALGORITHMS
from clustersim.core import limits
from clustersim.core.errors import ProgramError
from clustersim.core.program import Collective, Compute, Recv, Send
from clustersim.engine import chunk, need, simulate
from clustersim.engine.planning import Communicators, PlanBook

MIB = 2.0**20


@pytest.fixture(scope="module")
def node():
    """Eight GPUs on NVSwitches: any pair at the GPU's full rate."""
    return fabrics.load("hgx-h100", nodes=1)


@pytest.fixture(scope="module")
def pair():
    return fabrics.load("hgx-h100", nodes=2)


@pytest.fixture(scope="module")
def four():
    return fabrics.load("hgx-h100", nodes=4)


def up_rate(topology):
    """Bytes/s out of one GPU into its NVSwitches."""
    inside = np.array([kind == "nvlink" for kind in topology.link_kinds])
    return float(topology.link_bandwidth[inside & (topology.link_src == topology.gpus[0])].sum())


def hop(topology):
    """Seconds from a GPU over an NVSwitch to another."""
    nvlink = np.array([kind == "nvlink" for kind in topology.link_kinds])
    return 2 * float(topology.link_latency[nvlink][0])


def collective(topology, kind, nbytes, algorithm, fidelity="chunk", n=None, root=0):
    mesh = fabrics.mesh(topology)
    n = n or mesh.world_size
    op = Collective("c", kind, nbytes, np.arange(n)[None], algorithm=algorithm, root=root)
    return simulate(toy.program([op], ranks=mesh.world_size), topology, mesh, backend="ideal", fidelity=fidelity)


class TestClosedForms:
    def test_ring_all_reduce_is_2_n_minus_1_steps_of_a_block_and_a_hop(self, node):
        expected = 2 * 7 * (256 * MIB / 8 / up_rate(node) + hop(node))
        timeline = collective(node, "all_reduce", 256 * MIB, "ring")
        assert timeline.makespan == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
    def test_half_an_all_reduce_is_n_minus_1_steps(self, node, kind):
        expected = 7 * (256 * MIB / 8 / up_rate(node) + hop(node))
        assert collective(node, kind, 256 * MIB, "ring").makespan == pytest.approx(expected, rel=1e-9)

    def test_a_ring_over_part_of_the_ranks_leaves_the_rest_alone(self, node):
        expected = 2 * 3 * (64 * MIB / 4 / up_rate(node) + hop(node))
        assert collective(node, "all_reduce", 64 * MIB, "ring", n=4).makespan == pytest.approx(expected, rel=1e-9)

    def test_direct_all_to_all_is_all_bytes_out_and_one_hop(self, node):
        expected = 7 / 8 * 64 * MIB / up_rate(node) + hop(node)
        assert collective(node, "all_to_all", 64 * MIB, "direct").makespan == pytest.approx(expected, rel=1e-9)

    def test_a_pipelined_broadcast_fills_once_and_then_streams(self, node):
        # 256 pieces of 128 KiB through seven hops
        k = 256
        hops = 7
        expected = (k + hops - 1) * 32 * MIB / k / up_rate(node) + hops * hop(node)
        assert collective(node, "broadcast", 32 * MIB, "ring").makespan == pytest.approx(expected, rel=1e-9)

    def test_a_send_is_its_bytes_over_the_route_and_the_routes_latency(self, node):
        ends = [
            [Send("s", 64 * MIB, np.array([1]))],
            [Recv("r", 64 * MIB, np.array([0]))],
            [],
        ]
        program = toy.program(*ends, ranks=[[0], [1], list(range(2, 8))])
        timeline = simulate(program, node, fabrics.mesh(node), backend="ideal", fidelity="chunk")
        assert timeline.makespan == pytest.approx(64 * MIB / up_rate(node) + hop(node), rel=1e-9)

    def test_nothing_to_move_still_takes_every_hop(self, node):
        assert collective(node, "all_reduce", 0.0, "ring").makespan == pytest.approx(14 * hop(node), rel=1e-9)


def test_bytes_on_links_are_those_of_the_macro_flow(pair):
    chunk, flow = (collective(pair, "all_reduce", 64 * MIB, "ring", fidelity) for fidelity in ("chunk", "flow"))
    np.testing.assert_allclose(chunk.links.bytes_per_link(), flow.links.bytes_per_link(), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "algorithm"), [("all_reduce", "ring"), ("all_gather", "ring"), ("all_to_all", "direct")]
)
def test_the_macro_flow_agrees_with_the_replay_within_half_a_percent(pair, kind, algorithm):
    chunk, flow = (collective(pair, kind, 256 * MIB, algorithm, fidelity).makespan for fidelity in ("chunk", "flow"))
    assert flow == pytest.approx(chunk, rel=5e-3)


def test_two_replays_on_shared_links_take_twice_as_long(node):
    mesh = fabrics.mesh(node)
    world = np.arange(8)[None]
    both = [
        Collective("a", "all_gather", 64 * MIB, world, algorithm="ring"),
        Collective("b", "all_gather", 64 * MIB, world, "other", algorithm="ring", communicator="second"),
    ]
    timeline = simulate(toy.program(both, ranks=8), node, mesh, backend="ideal", fidelity="chunk")
    expected = 7 * (2 * 64 * MIB / 8 / up_rate(node) + hop(node))
    assert timeline.makespan == pytest.approx(expected, rel=1e-9)
    assert timeline.stats["transfers"] == 2 * 7 * 8


def test_an_algorithm_inside_the_switch_cannot_be_replayed(node):
    with pytest.raises(ProgramError, match=r"'nvls' has no schedule to replay .* one of: .*ring"):
        collective(node, "all_reduce", MIB, "nvls")


def test_a_replay_that_does_not_fit_is_refused_with_its_bytes(node, monkeypatch):
    monkeypatch.setattr(limits, "SMALL", 0)
    monkeypatch.setattr(limits, "free_memory", lambda: 2e7)
    monkeypatch.setattr(need, "flow", lambda program, topology: 0.0)
    collective(node, "all_to_all", MIB, "direct")
    monkeypatch.setattr(limits, "free_memory", lambda: 1e4)
    with pytest.raises(ProgramError, match=r"needs about .* KiB at chunk fidelity, for 56 .* are free; use fidelity"):
        collective(node, "all_to_all", MIB, "direct")


def test_a_ring_alone_keeps_none_of_its_transfers_until_they_are_asked_for(node, monkeypatch):
    monkeypatch.setattr(limits, "SMALL", 0)
    monkeypatch.setattr(limits, "free_memory", lambda: 1e4)
    monkeypatch.setattr(need, "flow", lambda program, topology: 0.0)
    timeline = collective(node, "all_reduce", MIB, "ring")
    assert timeline.stats["transfers"] == timeline.stats["flows"] == 112
    with pytest.raises(ProgramError, match=r"KiB to list 112 transfers one by one, .* are free"):
        timeline.links.bytes_per_link()
    monkeypatch.undo()
    assert len(timeline.links.segment_start) == len(timeline.links.transfer_op) == 112


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [(k, a) for a in ("ring", "hierarchical") for k in ("all_reduce", "all_gather", "reduce_scatter")],
)
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_waves_are_the_schedule_told_without_listing_it(kind, algorithm, nodes):
    """Every transfer once, on its lane in its order, waiting for what the schedule names, and for nothing later."""
    group = Group(topology := fabrics.load("hgx-h100", nodes=nodes), topology.gpus)
    row = ALGORITHMS[algorithm]
    request = Request(kind, MIB)
    laid = channels(group, 2 if algorithm == "ring" else 1, row.layout)
    listed = row.schedule(request, group, laid)
    told = row.waves(request, group, laid)
    fills: dict[int, list[int]] = {}
    seen: dict[int, int] = {}
    lanes = np.arange(len(told.src))
    for wave in told.each():
        waits = [list(fills.get(slot, [])) for slot in wave.takes.tolist()]
        for t, lane, after, slot in zip(
            wave.transfer.tolist(), lanes[wave.lane].tolist(), waits, wave.puts.tolist(), strict=True
        ):
            assert after == listed.after[listed.after_ptr[t] : listed.after_ptr[t + 1]].tolist()
            assert (told.src[lane], told.dst[lane], told.rail[lane]) == (listed.src[t], listed.dst[t], listed.rail[t])
            assert told.fraction[lane] == listed.chunk_fraction[listed.chunk[t]]
            assert seen.get(lane, -1) < t
            seen[lane] = t
            fills[slot] = [*(fills.get(slot, []) if wave.adds else []), t]
    assert told.n_transfers == len(listed.src)


def test_the_bytes_are_of_the_whole_run(node, monkeypatch):
    monkeypatch.setattr(limits, "SMALL", 0)
    monkeypatch.setattr(limits, "free_memory", lambda: 1.5 * need.replay(112))
    monkeypatch.setattr(need, "flow", lambda program, topology: 0.0)
    op = Collective("c", "all_reduce", MIB, np.arange(8)[None], algorithm="ring")
    with pytest.raises(ProgramError, match="for 224 transfers"):
        simulate(toy.program([op, op], ranks=8), node, fabrics.mesh(node), backend="ideal", fidelity="chunk")


def test_hidden_communication_costs_compute_as_long_as_the_replay_takes(node):
    from clustersim.collectives import plan

    seconds = 7 * (64 * MIB / 8 / up_rate(node) + hop(node))
    op = Collective("c", "all_gather", 64 * MIB, np.arange(8)[None], algorithm="ring")
    ops = [op, Compute("a", 2 * seconds), Compute("b", seconds)]

    def ring(request, group):
        return plan(request, group, "ideal", 1)

    program = toy.program(ops, ranks=8, slowdown=0.5)
    timeline = simulate(program, node, fabrics.mesh(node), planner=ring, fidelity="chunk")
    assert timeline.makespan == pytest.approx((2 + 1 + 0.5) * seconds, rel=1e-9)


class TestCongruence:
    """Groups at the same places of nodes wired alike share a plan; it must be the plan they would have got."""

    def books(self, topology):
        from clustersim.collectives import plan
        from clustersim.engine.flows.loads import Loads

        asked = []

        def planner(request, group):
            asked.append(group.gpus.tolist())
            return plan(request, group, backend="ideal")

        mesh = fabrics.mesh(topology)
        one, each = (
            PlanBook(planner, Communicators(topology, mesh), Loads(topology), congruent=shared)
            for shared in (True, False)
        )
        return one, each, asked

    def test_one_call_serves_all_nodes_and_gives_the_same_loads(self, four):
        from clustersim.collectives.base import Request

        together, apart, asked = self.books(four)
        request = Request("all_reduce", MIB)
        groups = np.arange(32).reshape(4, 8)
        found = together.plans(request, groups)
        assert len(asked) == 1
        expected = apart.plans(request, groups)
        assert len(asked) == 1 + 4
        assert found.latency.tolist() == expected.latency.tolist()
        for mine, theirs in zip(found.load.tolist(), expected.load.tolist(), strict=True):
            for column, other in zip(together.loads.pairs[mine], apart.loads.pairs[theirs], strict=True):
                np.testing.assert_array_equal(column, other)

    def test_other_places_and_groups_over_several_nodes_are_asked_for(self, four):
        from clustersim.collectives.base import Request

        together, _, asked = self.books(four)
        together.plans(Request("all_reduce", MIB), np.array([[0, 1], [2, 3], [8, 9], [24, 25]]))
        together.plans(Request("all_reduce", MIB), np.array([[0, 8], [1, 9]]))
        assert len(asked) == 2 + 2

    def test_a_node_with_a_slower_link_is_asked_for_itself(self, four):
        from clustersim.collectives.base import Request

        bandwidth = four.link_bandwidth.copy()
        inside = four.vertex_node[four.link_src] == 2
        bandwidth[np.flatnonzero(inside & (four.link_src == four.gpus[16]))] /= 2
        together, _, asked = self.books(replace(four, link_bandwidth=bandwidth))
        together.plans(Request("all_reduce", MIB), np.arange(32).reshape(4, 8))
        assert len(asked) == 2


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        ("all_reduce", "ring"),
        ("all_gather", "ring"),
        ("reduce_scatter", "ring"),
        ("broadcast", "ring"),
        ("reduce", "ring"),
        ("all_reduce", "halving_doubling"),
        ("all_reduce", "tree"),
        ("all_reduce", "hierarchical"),
    ],
)
@pytest.mark.parametrize("nbytes", [0.0, 3e5, 64 * MIB])
def test_a_replay_alone_leaps_to_the_times_of_the_event_loop(pair, monkeypatch, kind, algorithm, nbytes):
    from clustersim.collectives import plan

    def play():
        op = Collective("c", kind, nbytes, np.arange(16)[None], algorithm=algorithm)
        start = Compute("late", np.linspace(1, 2, 16), stream="comm")  # the meeting does not begin at 0
        program = toy.program([start, op], ranks=16)
        one_channel = lambda request, group: plan(request, group, "ideal", 1)  # noqa: E731
        return simulate(program, pair, fabrics.mesh(pair), planner=one_channel, fidelity="chunk")

    quick = play()
    monkeypatch.setattr(chunk, "apart", lambda lanes, loads: False)
    slow = play()
    assert quick.makespan == pytest.approx(slow.makespan, rel=1e-9)
    np.testing.assert_allclose(quick.links.bytes_per_link(), slow.links.bytes_per_link(), rtol=1e-9, atol=1e-6)
    assert {name: quick.stats[name] for name in ("flows", "transfers")} == {
        name: slow.stats[name] for name in ("flows", "transfers")
    }
    for side in (quick.links, slow.links):
        assert np.all(np.diff(side.segment_transfer) >= 0)
    if slow.stats["solves"] == 0:  # nobody ever shared: the same stretches, transfer by transfer
        for name in ("segment_transfer", "segment_start", "segment_end", "segment_rate"):
            np.testing.assert_allclose(getattr(quick.links, name), getattr(slow.links, name), rtol=1e-9)


def test_a_ring_of_one_channel_leaps_and_rings_that_share_links_do_not(pair):
    def events(channels):
        from clustersim.collectives import plan

        op = Collective("c", "all_reduce", 64 * MIB, np.arange(16)[None], algorithm="ring")
        planner = lambda request, group: plan(request, group, "ideal", channels)  # noqa: E731
        program = toy.program([op], ranks=16)
        return simulate(program, pair, fabrics.mesh(pair), planner=planner, fidelity="chunk").stats["events"]

    assert events(1) == 2
    assert events(8) > 2 * 15


def test_two_replays_that_may_meet_do_not_leap(node):
    # Alone each would leap; together they share every link and must slow each other down.
    world = np.arange(8)[None]
    mesh = fabrics.mesh(node)
    both = [
        Collective("a", "all_gather", 64 * MIB, world, algorithm="ring"),
        Collective("b", "all_gather", 64 * MIB, world, "other", algorithm="ring", communicator="second"),
    ]
    timeline = simulate(toy.program(both, ranks=8), node, mesh, backend="ideal", fidelity="chunk")
    assert timeline.makespan > 7 * 2 * 64 * MIB / 8 / up_rate(node)


@pytest.mark.parametrize("name", ["dgx-1p", "dgx-1v", "hgx-a100", "hgx-h100"])
def test_a_replay_goes_round_the_rings_that_the_plan_was_made_of(name):
    topology = fabrics.load(name, nodes=1)
    n = len(topology.gpus)
    op = Collective("c", "all_reduce", 256 * MIB, np.arange(n)[None], algorithm="ring")
    program = toy.program([op], ranks=n)
    mesh = fabrics.mesh(topology)
    flow, chunk = (simulate(program, topology, mesh, fidelity=fidelity) for fidelity in ("flow", "chunk"))
    moved = flow.links.bytes_per_link()
    sent = chunk.links.bytes_per_link()
    np.testing.assert_array_equal(moved > 0, sent > 0)
    share = sent[sent > 0] / moved[sent > 0]  # what NCCL reaches of the line rate, the same on every link
    np.testing.assert_allclose(share, share[0], rtol=1e-9)
    assert chunk.makespan == pytest.approx(share[0] * flow.makespan, rel=0.15)
