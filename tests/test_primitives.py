"""The words of distributed training as ops: who starts them, who waits for whom, and how many bytes they move."""

from __future__ import annotations

import numpy as np
import pytest
from player import toy_cost, toy_model
from toy import mesh, plan, star

from clustersim.core.program import COLLECTIVES, Program, Role
from clustersim.engine import simulate
from clustersim.training.strategies import base
from clustersim.training.strategies import primitives as do
from clustersim.training.strategies.steps_of_sgd import StepsOfSGDConfig, build


def sender_link(request, group):
    """A transfer takes its first member's up link: 10 bytes/s, no latency; requests take no time."""
    return plan(request if request.nbytes > do.REQUEST_BYTES else _empty(request), group.gpus[:1])


def _empty(request):
    from dataclasses import replace

    return replace(request, nbytes=0.0)


def play(*op_lists, planner=sender_link, ranks=None):
    """Times of every op by name: (ready, start, end) of the op's first rank; one role per list."""
    ranks = ranks or [[r] for r in range(len(op_lists))]
    roles = tuple(
        Role(f"r{r}", np.array(mine), tuple(ops.ops)) for r, (mine, ops) in enumerate(zip(ranks, op_lists, strict=True))
    )
    n = sum(map(len, ranks))
    topology = star(n)
    timeline = simulate(Program(n, roles), topology, mesh(topology), planner=planner)
    found = {}
    for row, op in enumerate(timeline.row_op.tolist()):
        key = timeline.ops[op].role, timeline.ops[op].name
        found.setdefault(key, tuple(float(c[row]) for c in (timeline.row_ready, timeline.row_start, timeline.row_end)))
    return found


def link(peer, stream):
    return do.Link(np.array([peer]), stream)


def test_a_push_starts_when_the_sender_is_ready_though_the_receiver_waited_all_along():
    sender = base.OpList()
    receiver = base.OpList()
    work = sender.compute("work", 3.0, "other")
    do.push(sender, "w 0 -> 1", 1000.0, link(1, "push"), (work,))
    do.take(receiver, "w 0 -> 1", 1000.0, link(0, "push"))
    times = play(sender, receiver)
    assert times["r1", "push w 0 -> 1"] == (0.0, 3.0, 103.0)


def test_a_pull_starts_when_the_receiver_asks_though_the_data_were_there_all_along():
    asker = base.OpList()
    owner = base.OpList()
    work = asker.compute("work", 3.0, "other")
    asked = do.request(asker, "w", link(1, "pull"), (work,))
    do.pull(asker, "w 1 -> 0", 1000.0, link(1, "pull"), asked)
    heard = do.requested(owner, "w", link(0, "pull"))
    do.answer(owner, "w 1 -> 0", 1000.0, link(0, "pull"), (heard,))
    times = play(asker, owner)
    assert times["r0", "pull request w"][1] == 3.0
    assert times["r1", "pull w 1 -> 0"] == (3.0, 3.0, 103.0)


def test_one_request_brings_several_pieces_each_when_it_is_ready():
    asker = base.OpList()
    owner = base.OpList()
    asked = do.request(asker, "both", link(1, "pull"))
    for piece in ("a", "b"):
        do.pull(asker, piece, 100.0, link(1, "pull"), asked)
    late = owner.compute("make b", 50.0, "other")
    heard = do.requested(owner, "both", link(0, "pull"))
    do.answer(owner, "a", 100.0, link(0, "pull"), (heard,))
    do.answer(owner, "b", 100.0, link(0, "pull"), (heard, late))
    times = play(asker, owner)
    assert times["r0", "pull a"][1:] == (0.0, 10.0)
    assert times["r0", "pull b"][1:] == (50.0, 60.0)


def test_a_barrier_holds_everybody_until_the_last_has_come_and_a_wait_holds_one_stream():
    ops = base.OpList()
    ops.compute("work", 1.0, "other")
    ops.ops[0] = type(ops.ops[0])("work", np.array([1.0, 4.0]))
    met = do.collective(ops, "barrier", "", 0.0, np.array([[0, 1]]), (0,))
    do.wait(ops, "for the barrier", (met,))
    times = play(ops, ranks=[[0, 1]])
    assert times["r0", "barrier"][1:] == (4.0, 4.0)
    assert times["r0", "wait for the barrier"][1:] == (4.0, 4.0)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_collective_of_torch_distributed_is_an_event_of_its_own_name(kind):
    ops = base.OpList()
    do.collective(ops, kind, "x", 100.0, np.array([[0, 1, 2, 3]]), root=0)
    timeline_of = play(ops, ranks=[[0, 1, 2, 3]])
    assert ("r0", f"{kind} x") in timeline_of


# --- ways to all-reduce -----------------------------------------------------------------------------------------

Z = 4 * 2**20


def all_reduced(n, algorithm, exchange="all_reduce"):
    """Bytes out of each GPU and seconds, of one exchange of Z bytes on one switch at line rate."""
    model = toy_model([[Z // 4]])
    topology = star(n, bandwidth=1e9, per_node=1)
    config = StepsOfSGDConfig(exchange=exchange, algorithm=algorithm)
    cost = toy_cost(model, optimizer=0.0)
    program = build(model, cost, mesh(topology), config, 1, 0)
    timeline = simulate(program, topology, mesh(topology), backend="ideal")
    moved = np.zeros(n)
    seconds = 0.0
    for row, op in enumerate(timeline.row_op.tolist()):
        if timeline.ops[op].name == "all_reduce gradients":
            seconds = max(seconds, float(timeline.row_end[row] - timeline.row_start[row]))
    owner = [timeline.ops[op].name == "all_reduce gradients" for op in timeline.links.transfer_op.tolist()]
    use = timeline.links
    for s, t in enumerate(use.segment_transfer.tolist()):
        if owner[t]:
            links, weights = use.loads[use.transfer_load[t]]
            payload = use.segment_rate[s] * (use.segment_end[s] - use.segment_start[s])
            out = links < n
            np.add.at(moved, links[out], payload * weights[out])
    return moved, seconds


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16, 32, 64])
def test_ring_moves_two_n_minus_one_parts_out_of_every_gpu_and_its_time_is_flat(n):
    moved, seconds = all_reduced(n, "ring")
    assert moved == pytest.approx(np.full(n, 2 * (n - 1) / n * Z))
    assert Z / 1e9 <= seconds <= 2 * Z / 1e9 * (1 + 1e-9)


@pytest.mark.parametrize("n", [2, 4, 16])
def test_an_unsplit_ring_moves_n_minus_one_tensors_out_of_every_gpu(n):
    moved, _ = all_reduced(n, "ring_unsplit")
    assert moved == pytest.approx(np.full(n, (n - 1) * Z))


@pytest.mark.parametrize("n", [2, 4, 16])
def test_everyone_to_everyone_moves_n_times_n_minus_one_tensors_in_all(n):
    moved, _ = all_reduced(n, "direct")
    assert moved.sum() == pytest.approx(n * (n - 1) * Z)


def test_one_device_after_the_other_takes_linear_time():
    times = [all_reduced(n, "sequential")[1] for n in (2, 4, 8)]
    assert np.array(times) / times[0] == pytest.approx(np.array([1, 3, 7]), rel=1e-6)


@pytest.mark.parametrize("algorithm", ["sequential", "direct", "ring_unsplit", "ring", "tree", "hierarchical"])
def test_every_way_to_all_reduce_can_be_chosen_for_a_schedule(algorithm):
    assert all_reduced(4, algorithm)[1] > 0
