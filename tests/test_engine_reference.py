"""The engine against a simulation too simple to be wrong, and against what must hold of every run."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from clustersim.core.program import Compute, Program, Role
from clustersim.engine import simulate

PARTITIONS = (
    np.array([[0, 1], [2, 3]]),
    np.array([[0, 2], [1, 3]]),
    np.array([[0, 1, 2, 3]]),
    np.array([[3, 2], [0, 1]]),
    np.array([[0], [1], [2], [3]]),
)
LATENCY = 0.125


def planner(request, group):
    """Up links; the first member's counts double, so that groups differ and some flows are held elsewhere."""
    plan = toy.plan(request, group.gpus, latency=LATENCY if request.nbytes > 5 else 0.0, ceiling=8.0)
    return type(plan)(**{**vars(plan), "weights": np.where(np.arange(group.size) == 0, 2.0, 1.0)})


def fill(flows, capacity):
    """Max-min by the definition: raise every flow in tiny closed steps, link by link."""
    rates = {}
    while len(rates) < len(flows):
        rising = [f for f in flows if f not in rates]
        level = {f: flows[f]["ceiling"] for f in rising}
        for link in sorted({k for f in rising for k in flows[f]["links"]}):
            used = sum(rates[f] * flows[f]["links"].get(link, 0.0) for f in rates)
            weight = sum(flows[f]["links"].get(link, 0.0) for f in rising)
            for f in rising:
                if link in flows[f]["links"]:
                    level[f] = min(level[f], (capacity - used) / weight)
        lowest = min(level.values())
        rates.update({f: lowest for f in rising if level[f] <= lowest * (1 + 1e-12)})
    return rates


def reference(program, capacity=10.0):
    """Per rank, per op, one instant after another: ``(rank, op) -> (ready, start, end)``."""
    (role,) = program.roles
    ops = role.ops
    n = program.world_size
    needs = [
        {*op.after, *[max(j for j in range(i) if ops[j].stream == op.stream)]}
        if any(ops[j].stream == op.stream for j in range(i))
        else {*op.after}
        for i, op in enumerate(ops)
    ]
    ready = {}
    start = {}
    end = {}
    begin = {}
    flows = {}
    now = 0.0
    while True:
        again = True
        while again:  # everything that happens now
            again = False
            for r in range(n):
                for i, op in enumerate(ops):
                    if (r, i) in ready or any(end.get((r, j), np.inf) > now for j in needs[i]):
                        continue
                    ready[r, i] = now
                    again = True
                    if isinstance(op, Compute):
                        start[r, i], end[r, i] = now, now + op.duration[r]
            for i, op in enumerate(ops):
                for group in [] if isinstance(op, Compute) else op.groups.tolist():
                    if (group[0], i) in start or any((r, i) not in ready for r in group):
                        continue
                    start.update({(r, i): now for r in group})
                    alone = len(group) == 1
                    begin[i, tuple(group)] = now + (LATENCY if op.nbytes > 5 and not alone else 0.0)
                    again = True
            for (i, group), time in list(begin.items()):
                if time <= now:
                    del begin[i, group]
                    again = True
                    if len(group) == 1:
                        end[group[0], i] = now
                    else:
                        links = {r: 2.0 if r == group[0] else 1.0 for r in group}
                        flows[i, group] = {"left": ops[i].nbytes, "links": links, "ceiling": 8.0}
            for (i, group), flow in list(flows.items()):
                if flow["left"] <= 1e-9:
                    del flows[i, group]
                    end.update({(r, i): now for r in group})
                    again = True
        rates = fill(flows, capacity)
        times = [t for t in [*end.values(), *begin.values()] if t > now]
        times += [now + flow["left"] / rates[f] for f, flow in flows.items()]
        if not times:
            return {key: (ready[key], start[key], end[key]) for key in end}
        for f, flow in flows.items():
            flow["left"] -= rates[f] * (min(times) - now)
        now = min(times)


@st.composite
def programs(draw):
    ops = []
    for i in range(draw(st.integers(1, 9))):
        after = tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=2)))) if i else ()
        if draw(st.booleans()):
            seconds = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 3), min_size=4, max_size=4))
            stream = draw(st.sampled_from(["compute", "copy"]))
            ops.append(Compute(f"c{i}", np.array(seconds), stream, after))
        else:
            partition = draw(st.sampled_from(PARTITIONS))
            nbytes = draw(st.sampled_from([1.0, 4.0, 10.0, 33.0]))
            stream = draw(st.sampled_from(["comm", "comm2", "compute"]))
            ops.append(toy.all_reduce(f"r{i}", nbytes, partition, stream=stream, after=after))
    return Program(4, (Role("worker", np.arange(4), tuple(ops)),))


def play(program, **options):
    topology = toy.star(program.world_size)
    return simulate(program, topology, toy.mesh(topology), planner=planner, **options)


def hsdp(durations):
    """Shard groups {0,1} {2,3} and replicate groups {0,2} {1,3}, as FSDP's HYBRID_SHARD does, on two streams."""
    ops = []
    for k, seconds in enumerate(durations):
        ops.append(toy.all_reduce(f"gather{k}", 10.0, PARTITIONS[0], stream="shard", after=(4 * k - 3,) if k else ()))
        ops.append(Compute(f"bwd{k}", np.array(seconds), after=(4 * k,)))
        ops.append(toy.all_reduce(f"scatter{k}", 10.0, PARTITIONS[0], stream="shard2", after=(4 * k + 1,)))
        ops.append(toy.all_reduce(f"replicate{k}", 4.0, PARTITIONS[1], stream="replicate", after=(4 * k + 2,)))
    return Program(4, (Role("worker", np.arange(4), tuple(ops)),))


def assert_agrees(program):
    expected = reference(program)
    spans = play(program).spans()
    found = {}
    for rank, op, *times in zip(
        *(spans[name].tolist() for name in ("rank", "op", "ready", "start", "end")), strict=True
    ):
        found[rank, op] = tuple(times)
    assert found.keys() == expected.keys()
    for key, times in expected.items():
        assert found[key] == pytest.approx(times, rel=1e-9, abs=1e-9), key


@given(programs())
def test_any_spmd_program_agrees_with_the_reference(program):
    assert_agrees(program)


@pytest.mark.parametrize("seed", range(5))
def test_overlapping_shard_and_replicate_groups_agree_with_the_reference(seed):
    assert_agrees(hsdp(np.random.default_rng(seed).uniform(0.5, 2.0, (4, 4))))


@given(programs())
def test_spans_of_one_stream_never_overlap_and_nothing_starts_before_it_is_ready(program):
    timeline = play(program)
    for rank in range(4):
        spans = timeline.spans([rank])
        assert np.all(spans["ready"] <= spans["start"])
        assert np.all(spans["start"] <= spans["end"])
        end_of = dict(zip(spans["op"].tolist(), spans["end"].tolist(), strict=True))
        last = {}
        for op, ready in sorted(zip(spans["op"].tolist(), spans["ready"].tolist(), strict=True)):
            info = timeline.ops[op]
            assert ready >= last.get(info.stream, 0.0)
            assert all(ready >= end_of[j] for j in info.after)
            last[info.stream] = end_of[op]


@given(programs())
def test_no_run_is_shorter_than_its_longest_chain(program):
    ends = np.zeros((len(program.roles[0].ops), 4))
    last = {}
    for i, op in enumerate(program.roles[0].ops):
        begin = np.max([np.zeros(4), *(ends[j] for j in op.after), last.get(op.stream, np.zeros(4))], axis=0)
        alone = 0.0 if isinstance(op, Compute) or op.groups.shape[1] == 1 else op.nbytes / 5  # the doubled up link
        ends[i] = begin + (op.duration if isinstance(op, Compute) else alone)
        last[op.stream] = ends[i]
    assert play(program).makespan >= ends.max() * (1 - 1e-12)


@given(programs())
def test_link_use_is_bytes_times_weight(program):
    expected = np.zeros(8)
    for op in program.roles[0].ops:
        for group in [] if isinstance(op, Compute) or op.groups.shape[1] == 1 else op.groups.tolist():
            expected[group] += op.nbytes
            expected[group[0]] += op.nbytes
    np.testing.assert_allclose(play(program).links.bytes_per_link(), expected, rtol=1e-9)


def columns(timeline):
    rows = (timeline.row_op, timeline.row_set, timeline.row_ready, timeline.row_start, timeline.row_end)
    links = timeline.links
    use = (links.segment_transfer, links.segment_start, links.segment_end, links.segment_rate, links.transfer_load)
    return [c.tobytes() for c in (*rows, *use, *timeline.rank_sets)], timeline.stats


def in_order_of_ops(spans):
    """The spans by rank and op. They come by start, and two that start together may change places by a rounding."""
    order = np.lexsort((spans["op"], spans["rank"]))
    return {name: column[order] for name, column in spans.items()}


@given(programs())
def test_the_same_program_gives_the_same_bytes(program):
    assert columns(play(program)) == columns(play(program))


@given(programs(), st.permutations([0, 1]))
def test_the_order_of_groups_in_an_op_changes_no_time(program, order):

    ops = tuple(
        op if isinstance(op, Compute) or len(op.groups) != 2 else msgspec.structs.replace(op, groups=op.groups[order])
        for op in program.roles[0].ops
    )
    other = Program(4, (Role("worker", np.arange(4), ops),))
    one = in_order_of_ops(play(program).spans())
    two = in_order_of_ops(play(other).spans())
    for name in ("rank", "op"):
        assert np.array_equal(one[name], two[name])
    for name in ("ready", "start", "end"):
        np.testing.assert_allclose(one[name], two[name], rtol=1e-12, atol=1e-12)


@given(programs(), st.floats(0.0, 2.0))
def test_overlap_never_shortens_a_run_and_costs_nothing_at_zero(program, slowdown):
    from dataclasses import replace

    free = play(program)
    priced = play(replace(program, overlap_slowdown=slowdown))
    if slowdown == 0:
        assert columns(free) == columns(priced)
    # Later arrivals can relieve a shared link, so a run may gain elsewhere; compute itself never gets shorter.
    spans = priced.spans()
    for rank, op, start, end in zip(*(spans[name].tolist() for name in ("rank", "op", "start", "end")), strict=True):
        work = program.roles[0].ops[op]
        if isinstance(work, Compute):
            assert end - start >= work.duration[rank] * (1 - 1e-9) - 1e-12


@given(programs())
def test_a_price_of_almost_nothing_changes_almost_nothing(program):
    # Parks and releases every compute op, yet must give the times of the run that computes them at once.
    from dataclasses import replace

    free = in_order_of_ops(play(program).spans())
    priced = in_order_of_ops(play(replace(program, overlap_slowdown=1e-15)).spans())
    for name in ("rank", "op"):
        assert np.array_equal(free[name], priced[name])
    for name in ("ready", "start", "end"):
        np.testing.assert_allclose(free[name], priced[name], rtol=1e-9, atol=1e-9)
