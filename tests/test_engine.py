"""The engine on machines worked out by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import toy
from toy import all_reduce

from clustersim.core.collective_kinds import ExchangeKernel
from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.program import COMPUTE_STREAM, Collective, Compute, Recv, Send
from clustersim.engine import simulate
from clustersim.explain.graph import RankSubset, lost_beside


def run(program, n=None, planner=toy.up_links, **options):
    topology = toy.star(n or program.world_size)
    return simulate(program, topology, toy.mesh(topology), planner=planner, **options)


def times(timeline, rank):
    """``name -> (ready, start, end)`` of one rank."""
    spans = timeline.spans([rank])
    columns = zip(*(spans[name].tolist() for name in ("op", "ready", "start", "end")), strict=True)
    return {timeline.ops[op].name: (ready, start, end) for op, ready, start, end in columns}


class TestOrder:
    def test_ops_of_one_stream_follow_each_other_and_streams_run_side_by_side(self):
        ops = [Compute("a", 1.0), Compute("b", 2.0), Compute("c", 5.0, stream="copy")]
        assert times(run(toy.program(ops)), 0) == {"a": (0, 0, 1), "b": (1, 1, 3), "c": (0, 0, 5)}

    def test_after_holds_an_op_of_another_stream(self):
        ops = [Compute("a", 1.0), Compute("b", 2.0), Compute("c", 5.0, stream="copy", after=(0,))]
        assert times(run(toy.program(ops)), 0)["c"] == (1, 1, 6)

    def test_a_collective_starts_with_its_last_member_and_ready_is_each_members_own_arrival(self):
        ops = [Compute("a", np.array([1.0, 3.0])), all_reduce("r", 20.0, [0, 1], after=(0,))]
        timeline = run(toy.program(ops))
        assert times(timeline, 0)["r"] == (1, 3, 5)
        assert times(timeline, 1)["r"] == (3, 3, 5)

    def test_a_straggler_delays_exactly_its_group(self):
        slow = np.array([1.0, 1.0, 1.0, 4.0, 1.0, 1.0])
        ops = [
            Compute("a", slow),
            all_reduce("r", 10.0, [[0, 1], [2, 3], [4, 5]], after=(0,)),
            Compute("b", 1.0, after=(1,)),
        ]
        timeline = run(toy.program(ops, ranks=6))
        assert [times(timeline, rank)["b"][2] for rank in range(6)] == [3, 3, 6, 6, 3, 3]

    def test_bucket_k_overlaps_the_backward_of_bucket_k_plus_1(self):
        ops = []
        for k in range(3):
            ops += [Compute(f"bwd{k}", 1.0), all_reduce(f"r{k}", 15.0, [0, 1], after=(2 * k,))]
        ops.append(Compute("step", 1.0, after=(5,)))
        # Reduces back to back from 1 on, 1.5 s each.
        assert times(run(toy.program(ops)), 1)["step"] == (5.5, 5.5, 6.5)

    def test_a_group_of_one_takes_no_time(self):
        ops = [all_reduce("r", 1e9, [[0], [1]]), Compute("a", 1.0, after=(0,))]
        assert run(toy.program(ops)).makespan == 1.0

    def test_ranks_outside_every_group_pass_through_and_have_no_span(self):
        ops = [Compute("a", 1.0), all_reduce("r", 10.0, [[0, 1]], after=(0,)), Compute("b", 1.0, after=(1,))]
        timeline = run(toy.program(ops, ranks=3))
        assert times(timeline, 2) == {"a": (0, 0, 1), "b": (1, 1, 2)}
        assert times(timeline, 0)["b"] == (2, 2, 3)

    def test_roles_without_ops_or_ranks_do_nothing(self):
        timeline = run(toy.program([], [Compute("a", 1.0)], [Compute("b", 9.0)], ranks=[[0], [1], []], slowdown=0.1))
        assert timeline.makespan == 1.0


class TestLinks:
    def test_concurrent_collectives_on_shared_links_slow_each_other(self):
        ops = [all_reduce("r", 10.0, [0, 1]), all_reduce("q", 10.0, [0, 1], stream="other", communicator="second")]
        timeline = run(toy.program(ops))
        assert times(timeline, 0) == {"r": (0, 0, 2), "q": (0, 0, 2)}
        assert timeline.stats["solves"] == 1

    def test_concurrent_collectives_on_disjoint_links_do_not(self):
        timeline = run(toy.program([all_reduce("r", 10.0, [[0, 1], [2, 3]])], ranks=4))
        assert timeline.makespan == 1.0
        assert timeline.stats == {"events": 0.0, "solves": 0.0, "flows": 2.0, "transfers": 2.0}

    def test_latency_precedes_the_flow_and_takes_no_link(self):
        def planner(request, group):
            return toy.plan(request, group.gpus, latency=1.0 if request.nbytes == 10 else 0.0)

        ops = [all_reduce("r", 10.0, [0, 1]), all_reduce("q", 20.0, [0, 1], stream="other", communicator="second")]
        # q alone for 1 s (10 moved), then half each: both have 10 left.
        assert times(run(toy.program(ops), planner=planner), 0) == {"r": (0, 0, 3), "q": (0, 0, 3)}

    def test_a_ceiling_below_the_links_sets_the_pace(self):
        timeline = run(
            toy.program([all_reduce("r", 10.0, [0, 1])]), planner=lambda r, g: toy.plan(r, g.gpus, ceiling=4.0)
        )
        assert timeline.makespan == 2.5

    def test_a_barrier_moves_nothing_and_takes_its_latency(self):
        barrier = Collective("b", "barrier", 0.0, np.array([[0, 1]]))
        timeline = run(toy.program([barrier]), planner=lambda r, g: toy.plan(r, g.gpus, latency=0.25))
        assert timeline.makespan == 0.25
        assert timeline.links.bytes_per_link().sum() == 0

    def test_bytes_on_links_are_bytes_times_weight(self):
        def planner(request, group):
            twice = toy.plan(request, group.gpus)
            return type(twice)(**{**vars(twice), "weights": np.full(len(group.gpus), 1.5)})

        ops = [all_reduce("r", 10.0, [[0, 1], [2, 3]]), all_reduce("q", 7.0, [[0, 3], [1, 2]], stream="other")]
        used = run(toy.program(ops, ranks=4), planner=planner).links.bytes_per_link()
        np.testing.assert_allclose(used, [25.5] * 4 + [0] * 4, rtol=1e-12)


class TestPairs:
    def test_a_send_waits_for_its_recv_and_both_end_together(self):
        send = [Compute("a", 1.0), Send("s", 10.0, np.array([1]), after=(0,))]
        recv = [Compute("a", 3.0), Recv("s", 10.0, np.array([0]), after=(0,))]
        timeline = run(toy.program(send, recv, ranks=1))
        assert times(timeline, 0)["s"] == (1, 3, 4)
        assert times(timeline, 1)["s"] == (3, 3, 4)
        assert [op.kind for op in timeline.ops] == ["compute", "send", "compute", "recv"]

    def test_the_kth_send_of_a_tag_meets_its_kth_recv(self):
        send = [Send("x", 10.0, np.array([1]), tag="x"), Send("y", 20.0, np.array([1]), "s2", tag="y")]
        recv = [Recv("y", 20.0, np.array([0]), "r1", tag="y"), Recv("x", 10.0, np.array([0]), "r2", tag="x")]
        ends = times(run(toy.program(send, recv, ranks=1)), 1)
        assert ends == {"x": (0, 0, 2), "y": (0, 0, 3)}

    def test_a_ring_shift_within_one_role_is_played_as_one_batch(self):
        n = 64
        right = (np.arange(n) + 1) % n
        left = (np.arange(n) - 1) % n
        timeline = run(
            toy.program([Send("s", 10.0, right, "out"), Recv("r", 10.0, left, "in")], ranks=n),
            planner=lambda request, group: toy.plan(request, group.gpus[:1]),
        )
        assert timeline.makespan == 1.0
        assert timeline.stats["events"] == 0
        assert len(timeline.row_op) == 2

    def test_ranks_without_a_peer_pass_through(self):
        ops = [Send("s", 10.0, np.array([1, -1])), Recv("r", 10.0, np.array([-1, 0]), "in"), Compute("c", 1.0)]
        assert set(times(run(toy.program(ops)), 0)) == {"s", "c"}


class TestRoles:
    def test_a_group_across_roles_starts_with_the_later_role(self):
        fast = [Compute("a", 1.0), all_reduce("r", 10.0, [0, 1, 2, 3], after=(0,))]
        slow = [Compute("a", 2.0), Compute("b", 2.0), all_reduce("r", 10.0, [0, 1, 2, 3], after=(1,))]
        timeline = run(toy.program(fast, slow))
        assert times(timeline, 1)["r"] == (1, 4, 5)
        assert times(timeline, 3)["r"] == (4, 4, 5)
        assert timeline.stats["transfers"] == 1

    def test_the_kth_use_of_a_communicator_meets_the_kth(self):
        one = [all_reduce("x", 10.0, [0, 1]), all_reduce("y", 30.0, [0, 1])]
        other = [all_reduce("p", 10.0, [0, 1]), Compute("c", 9.0), all_reduce("q", 30.0, [0, 1], after=(1,))]
        assert times(run(toy.program(one, other, ranks=1)), 0)["y"] == (1, 9, 12)

    def test_timeline_ops_of_all_roles_follow_each_other_and_after_points_into_them(self):
        ops = [Compute("a", 1.0), Compute("b", 1.0, after=(0,))]
        timeline = run(toy.program(ops, ops))
        assert [op.role for op in timeline.ops] == ["role0", "role0", "role1", "role1"]
        assert [op.after for op in timeline.ops] == [(), (0,), (), (2,)]


class TestOverlap:
    """``overlap_slowdown``: the next compute pays for hidden communication."""

    def overlapped(self, backward, slowdown=0.5, nbytes=10.0):
        """A reduce from 1 to 1 + nbytes / 10, beside ``backward``; then an op that waits for both."""
        ops = [Compute("a", 1.0), all_reduce("r", nbytes, [0, 1], after=(0,))]
        ops += [Compute(f"b{i}", seconds) for i, seconds in enumerate(backward)]
        ops.append(Compute("step", 1.0, after=(1,)))
        return times(run(toy.program(ops, slowdown=slowdown)), 0)

    def test_hidden_time_lengthens_the_next_compute_after_the_collective(self):
        # r [1, 2] is wholly hidden by b0 [1, 4]; b1 is the next to start.
        assert self.overlapped([3.0, 1.0])["b1"] == (4, 4, 5.5)

    def test_exposed_time_is_free(self):
        # r [1, 2], b0 [1, 1.25]: a quarter is hidden.
        assert self.overlapped([0.25])["step"] == (2, 2, 3.125)

    def test_compute_that_started_before_the_end_is_not_touched(self):
        found = self.overlapped([0.5, 0.5, 0.5, 0.5], nbytes=12.0)
        assert [found[f"b{i}"][2] for i in range(3)] == [1.5, 2.0, 2.5]
        assert found["b3"][1:] == pytest.approx((2.5, 3.0 + 0.5 * 1.2))

    def test_compute_that_starts_as_the_collective_ends_pays(self):
        assert self.overlapped([1.0, 1.0])["b1"] == (2, 2, 3.5)

    def test_each_rank_pays_for_its_own_overlap(self):
        ops = [
            Compute("a", np.array([1.0, 2.0])),
            all_reduce("r", 10.0, [0, 1], after=(0,)),  # [2, 3]
            Compute("b", np.array([1.5, 3.0])),  # rank 0: [1, 2.5], rank 1: [2, 5]
            Compute("step", 1.0, after=(1,)),
        ]
        timeline = run(toy.program(ops, slowdown=0.5))
        assert times(timeline, 0)["step"] == (3, 3, 4.25)
        assert times(timeline, 1)["step"] == (5, 5, 6.5)

    def test_jittered_ranks_agree_with_one_event_per_op(self):
        durations = np.random.default_rng(7).uniform(0.5, 1.5, (12, 4))
        groups = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
        ops = []
        for k, row in enumerate(durations):
            ops += [Compute(f"c{k}", row), all_reduce(f"r{k}", 9.0, groups[k % 2], after=(2 * k,))]
        ops.append(Compute("step", 1.0, after=(len(ops) - 1,)))
        timeline = run(toy.program(ops, ranks=4, slowdown=0.3))
        for rank in range(4):
            found = times(timeline, rank)
            for k in range(1, 12):
                # What compute k was lengthened by is what had ended since compute k - 1 started, hidden part only.
                start = found[f"c{k}"][1]
                before = found[f"c{k - 1}"][1]
                ended = [found[f"r{j}"] for j in range(12) if before < found[f"r{j}"][2] <= start]
                hidden = sum(
                    max(min(found[f"c{j}"][2], end) - max(found[f"c{j}"][1], begin), 0.0)
                    for _, begin, end in ended
                    for j in range(k)
                )
                lengthened = found[f"c{k}"][2] - start - durations[k][rank]
                assert lengthened == pytest.approx(0.3 * hidden, abs=1e-12)

    def test_hops_of_one_kernel_are_billed_once(self):
        def step(within):
            kernel = ExchangeKernel("deepep", "dispatch", 1.0, 1.0, 20, within=within)
            near = msgspec.structs.replace(all_reduce("near", 10.0, [0, 1], stream="near"), kernel=kernel)
            far = all_reduce("far", 10.0, [0, 1], stream="far", communicator="second")
            ops = [far, near, Compute("beside", 5.0), Compute("step", 1.0, after=(0, 1))]
            timeline = run(toy.program(ops, slowdown=0.5))
            lost = lost_beside(RankSubset(timeline, np.arange(2)), {2: np.zeros(2), 3: np.zeros(2)})
            return times(timeline, 0)["step"], lost[3].tolist()

        # Both from 0 to 2, half the link each, beside the first kernel.
        assert step(within=False) == ((5, 5, 8), [2.0, 2.0])
        assert step(within=True) == ((5, 5, 7), [1.0, 1.0])

    def test_a_long_collective_is_billed_whole_though_a_short_one_ended_meanwhile(self):
        ops = [
            all_reduce("long", 40.0, [0, 1], stream="other", communicator="second"),
            all_reduce("short", 10.0, [0, 1]),
            *(Compute(f"c{i}", 1.0) for i in range(4)),
            Compute("step", 1.0, after=(0, 1)),
        ]
        # Both from 0; short ends at 2 (half the link each), long moved 10 and ends at 5. All of it is hidden.
        found = times(run(toy.program(ops, slowdown=0.5)), 0)
        assert (found["short"][2], found["long"][2]) == (2, 5)
        assert found["c2"] == (2, 2, 4)  # 0.5 x 2
        assert found["c3"] == (4, 4, 5)
        assert found["step"] == (5, 5, 6 + 0.5 * 5)

    def test_only_the_compute_stream_pays(self):
        ops = [
            Compute("a", 1.0),
            all_reduce("r", 10.0, [0, 1], after=(0,)),
            Compute("b", 3.0),
            Compute("copy", 1.0, stream="copy", after=(1,)),
        ]
        assert COMPUTE_STREAM != "copy"
        assert times(run(toy.program(ops, slowdown=0.5)), 0)["copy"] == (2, 2, 3)


class TestTimeline:
    def test_ranks_with_equal_times_share_a_row(self):
        slow = np.ones(64)
        slow[5] = 2.0
        ops = [Compute("a", slow), all_reduce("r", 10.0, np.arange(64), after=(0,)), Compute("b", 1.0, after=(1,))]
        timeline = run(toy.program(ops, ranks=64))
        assert np.bincount(timeline.row_op).tolist() == [2, 2, 1]
        assert len(timeline.rank_sets) == 3
        assert len(timeline.spans()["rank"]) == 3 * 64

    def test_collectives_carry_what_was_chosen(self):
        detail = run(toy.program([all_reduce("r", 10.0, [0, 1])])).ops[0].detail
        assert (detail["algorithm"], detail["protocol"]) == ("toy", "Simple")
        assert (detail["group_size"], detail["n_channels"], detail["nbytes"]) == (2, 1, 10.0)

    def test_ranks_know_their_node(self):
        topology = toy.star(4, per_node=2)
        timeline = simulate(
            toy.program([Compute("a", 1.0)], ranks=4), topology, toy.mesh(topology), planner=toy.up_links
        )
        assert timeline.rank_node.tolist() == [0, 0, 1, 1]

    def test_link_names_are_those_of_the_topology(self):
        names = run(toy.program([all_reduce("r", 10.0, [0, 1])])).links.link_names
        assert list(names) == [
            "node0/gpu0 -> switch",
            "node0/gpu1 -> switch",
            "switch -> node0/gpu0",
            "switch -> node0/gpu1",
        ]

    def test_progress_counts_every_op_once(self):
        seen = []
        run(toy.program([Compute("a", 1.0), all_reduce("r", 1.0, [0, 1])]), progress=lambda *at: seen.append(at))
        assert seen == [(1, 2), (2, 2)]


class TestPlanning:
    def test_a_planner_is_asked_once_per_request_and_group(self):
        asked = []

        def planner(request, group):
            asked.append((request.nbytes, tuple(group.gpus.tolist())))
            return toy.up_links(request, group)

        groups = np.array([[0, 1], [2, 3]])
        ops = [all_reduce(f"r{i}", float(10 + i % 2), groups.copy()) for i in range(6)]
        run(toy.program(ops, ranks=4), planner=planner)
        assert sorted(asked) == sorted((size, pair) for size in (10.0, 11.0) for pair in ((0, 1), (2, 3)))

    def test_a_plan_that_cannot_be_played_is_refused(self):
        with pytest.raises(ProgramError, match="latency nan s"):
            run(toy.program([all_reduce("r", 1.0, [0, 1])]), planner=lambda r, g: toy.plan(r, g.gpus, latency=np.nan))


def message(*args, **kwargs):
    with pytest.raises(ProgramError) as caught:
        run(*args, **kwargs)
    return str(caught.value)


class TestErrors:
    def test_streams_blocked_in_different_orders_are_a_deadlock_with_ranks_and_ops(self):
        x, y = (all_reduce(name, 1.0, [0, 1], communicator=name) for name in "xy")
        assert message(toy.program([x, y], [y, x], ranks=1)) == (
            "the program never ends, ranks wait for each other forever: "
            "rank 0 waits at op 0 'x' (all_reduce on communicator 'x', stream 'comm') for rank 1; "
            "rank 1 waits at op 0 'y' (all_reduce on communicator 'y', stream 'comm') for rank 0. "
            "All members must issue the ops they share in the same order on each stream"
        )

    def test_a_send_without_recv_is_a_deadlock(self):
        text = message(toy.program([Send("s", 1.0, np.array([1]))], [Compute("a", 1.0)], ranks=1))
        assert "rank 0 waits at op 0 's' (send, stream 'comm') for rank 1 (rank 1 never does)" in text

    def test_a_member_that_never_issues_the_collective_is_a_deadlock(self):
        world = [0, 1, 2, 3]
        text = message(toy.program([all_reduce("r", 1.0, world)], [Compute("a", 1.0)]))
        assert "ranks 0, 1 wait at op 0 'r'" in text
        assert "for ranks 2, 3 (ranks 2, 3 never do)" in text

    def test_two_sends_facing_each_other_on_one_stream_are_a_deadlock(self):
        ops = [Send("s", 1.0, np.array([1, 0])), Recv("r", 1.0, np.array([1, 0]))]
        assert "rank 0 waits at op 0 's' (send, stream 'comm') for rank 1" in message(toy.program(ops))

    def test_only_the_first_of_many_are_named(self):
        n = 20
        groups = np.arange(2 * n).reshape(2, n).T
        text = message(toy.program([all_reduce("r", 1.0, groups)], [Compute("a", 1.0)], ranks=n))
        assert text.count("waits at") == 4
        assert "and 16 more" in text

    def test_collectives_of_one_communicator_in_different_orders_name_both_ranks_and_ops(self):
        x = all_reduce("x", 10.0, [0, 1])
        y = all_reduce("y", 20.0, [0, 1])
        assert message(toy.program([x, y], [y, x], ranks=1)) == (
            "rank 0 (role 'role0', op 0 'x') calls all_reduce of 10 bytes fp32, root 0, on ranks 0, 1 where "
            "rank 1 (role 'role1', op 0 'y') calls all_reduce of 20 bytes fp32, root 0, on ranks 0, 1; "
            "all members of communicator 'world' must issue the same collectives in the same order"
        )

    def test_a_different_kind_is_a_mismatch(self):
        reduce = all_reduce("x", 10.0, [0, 1])
        gather = Collective("y", "all_gather", 10.0, np.array([[0, 1]]))
        assert "calls all_gather of 10 bytes" in message(toy.program([reduce], [gather], ranks=1))

    def test_a_send_and_recv_of_different_size_are_a_mismatch(self):
        text = message(toy.program([Send("s", 1.0, np.array([1]))], [Recv("r", 2.0, np.array([0]))], ranks=1))
        assert "a send and its recv must have one size" in text

    def test_a_peer_outside_the_world_or_oneself_is_refused(self):
        assert "names rank 7 as its peer in a world of 2" in message(toy.program([Send("s", 1.0, np.array([7, -1]))]))
        assert "names rank 0 as its peer" in message(toy.program([Send("s", 1.0, np.array([0, -1]))]))

    def test_a_mesh_of_another_size_is_refused(self):
        topology = toy.star(4)
        with pytest.raises(ProgramError, match="a program for 2 ranks does not fit a mesh of 4"):
            simulate(toy.program([Compute("a", 1.0)]), topology, Mesh(topology.gpus, 4), planner=toy.up_links)

    def test_a_mesh_of_another_topology_is_refused(self):
        """It was an IndexError."""
        ranks = Mesh(toy.star(4).gpus, 4)
        program = toy.program(*([Compute("a", 1.0)] for _ in range(2)), ranks=2)
        with pytest.raises(ProgramError, match="rank 2 of the mesh drives vertex 2, which is a switch"):
            simulate(program, toy.star(2), ranks, planner=toy.up_links)

    @pytest.mark.parametrize("groups", [[[0, 1]], np.array([[0.0, 1.0]])])
    def test_groups_that_are_no_whole_numbers_in_an_array_are_refused(self, groups):
        text = message(toy.program([Collective("x", "all_reduce", 8.0, groups)]))
        assert "groups must be an array of whole numbers (groups x members)" in text

    def test_an_unknown_fidelity_is_told_the_nearest(self):
        assert "did you mean 'flow'?" in message(toy.program([Compute("a", 1.0)]), fidelity="flows")
