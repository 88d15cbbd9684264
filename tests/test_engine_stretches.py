"""Stretches are played as one, and the run is the one in which each op is played by itself."""

from __future__ import annotations

from random import Random
from typing import Any

import equality
import numpy as np
import oracle
import pytest
import random_programs
import toy

from clustersim import engine, scenario
from clustersim.collectives.base import Group, Plan, Request
from clustersim.core.errors import ProgramError
from clustersim.core.program import Collective, Compute, Program, Recv, Role, Send
from clustersim.core.timeline import Timeline
from clustersim.engine import meetings, simulate
from clustersim.engine import stretches as stretch_module
from clustersim.engine.beside import around
from clustersim.engine.inside import StretchPlans
from clustersim.engine.play import Play
from clustersim.engine.stretches import Shortened, Stretch, StretchTemplate


@pytest.fixture(autouse=True)
def _one_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stretch that is like no other is one, too, so that programs of a few ops have some."""
    monkeypatch.setattr(stretch_module, "ALIKE", 1)


SPLIT = "tp8_pp4_llama3_70b_32x8_h100"
SMALL = {"cluster.nodes": 4, "parallel.tp": 4, "parallel.pp": 2, "parallel.global_batch_size": 16, "run.steps": 2}
HOST_BOUND = {
    "cluster.topology": "alps-gh200",
    "cluster.gpus_per_node": 4,
    "cluster.nodes": 2,
    "model.name": "llama3-8b",
    "model.seq_len": 2048,
    "parallel.tp": 2,
    "parallel.pp": 2,
    "parallel.vpp": 1,
    "parallel.global_batch_size": 16,
    "run.steps": 2,
}
SCENARIOS: dict[str, tuple[str, dict[str, Any]]] = {
    "1F1B, each rank at its pace": (SPLIT, {**SMALL, "parallel.vpp": 1, "run.jitter": 0.02}),
    "1F1B, all alike": (SPLIT, {**SMALL, "parallel.vpp": 1, "run.jitter": 0.0}),
    "interleaved": (SPLIT, {**SMALL, "parallel.vpp": 2}),
    "without sequence parallelism": (SPLIT, {**SMALL, "parallel.vpp": 1, "parallel.sequence_parallel": False}),
    "a straggler": (
        SPLIT,
        {**SMALL, "parallel.vpp": 1, "incident": [{"kind": "slow_gpu", "rank": 5, "slowdown": 1.5}]},
    ),
    "stages on one node": (SPLIT, {**SMALL, "parallel.vpp": 1, "cluster.nodes": 2, "parallel.tp": 2, "parallel.pp": 4}),
    "shards of the optimizer": ("zero2_llama3_8b_2x8_a100", {"run.jitter": 0.02}),
    "buckets one after another": ("why_tiny_buckets", {}),
    "experts": ("ep8_mixtral_8x7b_8x8_h100", {"cluster.nodes": 4}),
    "the host binds": (SPLIT, {**HOST_BOUND, "run.jitter": 0.02}),
    "the host binds, all alike": (SPLIT, {**HOST_BOUND, "parallel.pp": 1, "run.jitter": 0.0}),
    "the host binds, interleaved": (SPLIT, {**HOST_BOUND, "parallel.vpp": 2}),
    "a straggler whose host binds": (
        SPLIT,
        {**HOST_BOUND, "incident": [{"kind": "slow_gpu", "rank": 5, "slowdown": 1.5}]},
    ),
    "tensor groups over two nodes": (SPLIT, {**SMALL, "parallel.vpp": 1, "parallel.tp": 16}),
}


def stretches(short: Shortened) -> list[Stretch]:
    return [op for role in short.program.roles for op in role.ops if isinstance(op, Stretch)]


def both(name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Timeline, Timeline]:
    """A scenario's run with stretches, and op by op."""
    prepared = scenario.load(name, changes).prepare()
    as_one = prepared.run().timeline
    monkeypatch.setattr(engine, "simulate", lambda *what, **how: simulate(*what, **how, op_by_op=True))
    return as_one, prepared.run().timeline


def same(one: Timeline, other: Timeline) -> None:
    """Every span to 1e-12 of the run, what ops were, and what each transfer moved and when."""
    mine, theirs = one.spans(), other.spans()
    orders = [np.lexsort((c["rank"], c["op"])) for c in (mine, theirs)]
    for name, column in mine.items():
        a, b = column[orders[0]], theirs[name][orders[1]]
        if np.issubdtype(a.dtype, np.floating):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * other.makespan, err_msg=name)
        else:
            assert np.array_equal(a, b), name
    assert [(op.name, op.kind, op.after, str(op.detail)) for op in one.ops] == [
        (op.name, op.kind, op.after, str(op.detail)) for op in other.ops
    ]
    assert one.links
    assert other.links
    assert np.array_equal(one.links.transfer_op, other.links.transfer_op)
    assert np.array_equal(one.links.transfer_load, other.links.transfer_load)
    # Four bytes are over in less time than the last bits of when.
    last_bits = 8 * np.spacing(one.makespan) * other.links.segment_rate.max()
    np.testing.assert_allclose(one.links.payload, other.links.payload, rtol=1e-9, atol=last_bits)
    for t in (one, other):
        assert np.array_equal(np.unique(t.links.segment_transfer), np.flatnonzero(t.links.payload > 0))  # type: ignore[union-attr]
    for find, column in ((np.minimum, "segment_start"), (np.maximum, "segment_end")):
        times = []
        for t in (one, other):
            first = np.flatnonzero(np.diff(t.links.segment_transfer, prepend=-1))  # type: ignore[union-attr]
            times.append(find.reduceat(getattr(t.links, column), first))
        np.testing.assert_allclose(*times, rtol=0, atol=1e-12 * other.makespan)


@pytest.mark.parametrize("case", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_a_run_is_the_same_op_by_op(case: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    same(*both(*case, monkeypatch))


def test_micro_batches_cost_a_few_ops_each_and_not_one_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    handled = 0
    real = Play._go

    def handle(self: Play, *piece: Any) -> None:
        nonlocal handled
        handled += 1
        real(self, *piece)

    monkeypatch.setattr(Play, "_go", handle)
    costs, sizes = [], []
    for sequences in (64, 128):
        changes = {**SMALL, "parallel.vpp": 1, "run.steps": 1, "parallel.global_batch_size": sequences}
        prepared = scenario.load(SPLIT, changes).prepare()
        handled = 0
        prepared.run()
        costs.append(handled)
        sizes.append(sum(len(role.ops) for role in prepared.program.roles))
    assert (costs[1] - costs[0]) * 20 < sizes[1] - sizes[0]


def test_stretches_that_ask_for_the_same_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worked_out: list[object] = []
    real = meetings.stretch_plans

    def noted(template: StretchTemplate, *how: Any) -> StretchPlans:
        ops = template.ops
        groups = ops[0].groups.tobytes()  # type: ignore[union-attr]
        takes = [None if spent is None else np.asarray(spent).tobytes() for spent in template.spent]
        asked = [(op.kind, op.nbytes) if isinstance(op, Collective) else None for op in ops]
        worked_out.append((groups, ops[0].step, template.needs, tuple(takes), tuple(asked)))
        return real(template, *how)

    monkeypatch.setattr(meetings, "stretch_plans", noted)
    scenario.load(SPLIT, SMALL).run()
    assert len(worked_out) > 2
    assert len(set(worked_out)) == len(worked_out)


def forked(rng: Random) -> tuple[Program, list[Collective]]:
    """Stages of tensor groups: micro-batches of kernels and collectives, of which some are beside one another."""
    width, n_groups, stages = rng.choice([2, 3]), rng.randint(1, 3), rng.randint(1, 2)
    ranks = [list(range(s * width * n_groups, (s + 1) * width * n_groups)) for s in range(stages)]
    inner = [
        (rng.choice([0.5, 1.0, 2.0]), rng.choice([5.0, 10.0, 30.0]), rng.random()) for _ in range(rng.randint(4, 14))
    ]
    batches = rng.randint(1, 4)
    beside: list[Collective] = []
    roles = []
    for s, mine in enumerate(ranks):
        groups = np.array(mine).reshape(n_groups, width)
        across = groups.T.copy()
        durations = [
            np.array([base * rng.uniform(1, 1.2) for _ in mine]) if rng.random() < 0.5 else base for base, *_ in inner
        ]
        ops: list[Any] = []
        for m in range(batches):
            after: tuple[int, ...] = ()
            if s:
                ops.append(Recv("recv", 20.0, np.array(ranks[s - 1]), "in", after, f"m{m}"))
                after = (len(ops) - 1,)
            first = len(ops)
            for (_, nbytes, kind), duration in zip(inner, durations, strict=True):
                # Mostly the last; or one before it, so that both are beside one another.
                back = 1 if kind < 0.7 else 2
                needs = (len(ops) - back,) if len(ops) - back >= first else after
                if kind < 0.45 or kind > 0.9:
                    ops.append(Compute("k", duration, after=needs))
                else:
                    ops.append(Collective("tp", "all_reduce", nbytes, groups, "tp", needs, communicator="tp"))
            if m == batches - 1 and rng.random() < 0.6:
                place = rng.randrange(first, len(ops))
                op = Collective("dp", "all_reduce", 40.0, across, "dp", (place,), communicator="dp")
                beside.append(op)
                ops.append(op)
            if s < stages - 1:
                ops.append(Send("send", 20.0, np.array(ranks[s + 1]), "out", (len(ops) - 1,), f"m{m}"))
        last = {op.stream: i for i, op in enumerate(ops)}
        ops.append(Compute("update", 1.0, after=tuple(sorted(last.values()))))
        pace = np.array([[rng.uniform(1, 1.1) for _ in mine]]) if rng.random() < 0.5 else None
        roles.append(Role(f"stage{s}", np.array(mine), tuple(ops), pace))
    return Program(sum(map(len, ranks)), tuple(roles), rng.choice([0.0, 0.3])), beside


def planner_of(rng: Random, n: int) -> Any:
    """Whose collectives between tensor groups, and sends, are on links of their own, or on those of the groups."""
    shared = rng.random() < 0.4

    def planner(request: Request, group: Group) -> Plan:
        away = 0 if shared or request.nbytes not in (20.0, 40.0) else n
        return toy.plan(request, np.asarray(group.gpus) + away, latency=0.01)

    return planner


def is_as_the_oracle_plays_it(kind: str, program: Program, rng: Random) -> None:
    """Hold a program, on a star with a planner that ``rng`` draws, to what the oracle plays."""
    topology = toy.star(program.world_size)
    planner = planner_of(rng, program.world_size)
    case = random_programs.Case(kind, program, topology, toy.mesh(topology), planner, {"planner": planner})
    result = equality.compare(case)
    assert not result.failed
    assert not result.wrong


@pytest.mark.parametrize("seed", range(150))
def test_random_stages_are_as_the_oracle_plays_them(seed: int) -> None:
    rng = Random(seed)
    program, _ = forked(rng)
    is_as_the_oracle_plays_it("stretches", program, rng)


def test_many_of_the_random_stages_have_stretches() -> None:
    found = [len(stretches(Shortened(forked(Random(seed))[0], set()))) for seed in range(150)]
    assert sum(n > 0 for n in found) > 50


def called(rng: Random) -> Program:
    """Stages of tensor groups whose hosts call each kernel, or some: passes of kernels and collectives, some of which
    are beside kernels, with the host's calls ahead of them. A pass begins when the one before is over."""
    width, n_groups, stages = rng.choice([2, 3]), rng.randint(1, 3), rng.randint(1, 2)
    ranks = [list(range(s * width * n_groups, (s + 1) * width * n_groups)) for s in range(stages)]
    kinds = [(rng.random(), rng.choice([0.5, 1.0, 2.0]), rng.choice([5.0, 10.0])) for _ in range(rng.randint(5, 16))]
    batches = rng.randint(2, 5)
    roles = []
    for s, mine in enumerate(ranks):
        groups = np.array(mine).reshape(n_groups, width)
        uneven = rng.random() < 0.6
        durations = [np.array([base * rng.uniform(1, 1.2) for _ in mine]) if uneven else base for _, base, _ in kinds]
        ops: list[Any] = [Compute("input", 0.25)]
        for m in range(batches):
            over = [i for i, op in enumerate(ops) if op.stream == "compute"][-1:]
            if s:
                ops.append(Recv("recv", 20.0, np.array(ranks[s - 1]), "in", (), f"m{m}"))
                over.append(len(ops) - 1)
            ops.append(Compute("call", rng.choice([0.1, 3.0]), "host", tuple(over), paced=False))
            ops.append(Compute("k", 0.5, after=(len(ops) - 1, *over)))
            for (kind, base, nbytes), duration in zip(kinds, durations, strict=True):
                last = {op.stream: i for i, op in enumerate(ops)}
                if kind < 0.3:
                    ops.append(Compute("call", base * 1.1, "host", paced=False))
                    ops.append(Compute("k", duration, after=(len(ops) - 1, last.get("tp", last["compute"]))))
                elif kind < 0.6:
                    needs = (last.get("tp", last["compute"]),) if kind < 0.5 else ()
                    ops.append(Compute("k", duration, after=needs))
                else:
                    ops.append(
                        Collective("tp", "all_reduce", nbytes, groups, "tp", (last["compute"],), communicator="tp")
                    )
            last = {op.stream: i for i, op in enumerate(ops)}
            ops.append(Compute("last", 0.5, after=tuple(sorted({last["host"], last.get("tp", 0)}))))
            if rng.random() < 0.2:
                place = rng.randrange(last["host"], len(ops))
                ops.append(Collective("dp", "all_reduce", 40.0, groups.T.copy(), "dp", (place,), communicator="dp"))
            if s < stages - 1:
                k = max(i for i, op in enumerate(ops) if op.stream == "compute")
                ops.append(Send("send", 20.0, np.array(ranks[s + 1]), "out", (k,), f"m{m}"))
        pace = np.array([[rng.uniform(1, 1.1) for _ in mine]]) if uneven else None
        roles.append(Role(f"stage{s}", np.array(mine), tuple(ops), pace))
    return Program(sum(map(len, ranks)), tuple(roles), rng.choice([0.0, 0.3]))


@pytest.mark.parametrize("seed", range(120))
def test_random_stages_that_hosts_call_are_as_the_oracle_plays_them(seed: int) -> None:
    rng = Random(seed)
    is_as_the_oracle_plays_it("calls", called(rng), rng)


def test_many_of_the_stages_that_hosts_call_have_stretches_that_ranks_begin_one_by_one() -> None:
    shorts = [Shortened(called(Random(seed)), set()) for seed in range(120)]
    apart = [sum(one.template is not None and one.template.apart for one in stretches(short)) for short in shorts]
    assert sum(n > 1 for n in apart) > 40


def line(extra: tuple[Any, ...] = (), slowdown: float = 0.0) -> Program:
    """Collectives and kernels in turn on two ranks, and what else."""
    group = [0, 1]
    ops: list[Any] = [Compute("k", 1.0)]
    for i in range(4):
        ops.append(toy.all_reduce(f"c{i}", 20.0, group, stream="tp", after=(len(ops) - 1,)))
        ops.append(Compute(f"k{i}", np.array([1.0, 1.5]), after=(len(ops) - 1,)))
    return toy.program([*ops, *extra], ranks=2, slowdown=slowdown)


def test_collectives_in_turn_with_kernels_are_one_op() -> None:
    (one,) = stretches(Shortened(line(), set()))
    assert [op.name for op in one.inner] == ["c0", "k0", "c1", "k1", "c2", "k2", "c3", "k3"]


def test_what_another_waits_for_ends_a_stretch() -> None:
    other = toy.all_reduce("dp", 20.0, [0, 1], stream="dp", after=(4,))  # k1
    names = [[op.name for op in one.inner] for one in stretches(Shortened(line((other,)), set()))]
    assert names == [["c0", "k0", "c1", "k1"], ["c2", "k2", "c3", "k3"]]


def test_what_may_be_billed_is_played_by_itself() -> None:
    other = toy.all_reduce("dp", 20.0, [0, 1], stream="dp", after=(4,))
    short = Shortened(line((other,), slowdown=0.5), set())
    assert [[op.name for op in one.inner] for one in stretches(short)] == [["c0", "k0", "c1", "k1"]]
    whole = Shortened(line((other,), slowdown=0.5), set(), op_by_op=True)
    assert not stretches(whole)


def test_what_shares_a_link_is_opened_and_played_again() -> None:
    program = line((toy.all_reduce("dp", 100.0, [0, 1], stream="dp"),))
    topology = toy.star(2)
    played = simulate(program, topology, toy.mesh(topology), planner=toy.up_links)
    spans = oracle.play(program, topology, toy.mesh(topology), toy.up_links).spans
    columns = played.spans()
    found = dict(
        zip(zip(columns["rank"].tolist(), columns["op"].tolist(), strict=True), columns["end"].tolist(), strict=True)
    )
    assert found == pytest.approx({key: end for key, (_, _, end) in spans.items()})


def test_who_waits_forever_is_told_of_the_ops_as_they_are_written() -> None:
    lonely = Recv("never", 1.0, np.array([1, 0]), "in", (9,), "nobody sends")
    program = line((Compute("last", 1.0), lonely))
    topology = toy.star(2)
    with pytest.raises(ProgramError) as told:
        simulate(program, topology, toy.mesh(topology), planner=toy.up_links)
    with pytest.raises(ProgramError) as plain:
        simulate(program, topology, toy.mesh(topology), planner=toy.up_links, op_by_op=True)
    assert str(told.value) == str(plain.value)


@pytest.mark.parametrize("seed", range(20))
def test_what_an_op_is_between_is_told_by_all_that_is_before_and_behind_it(seed: int) -> None:
    draw = Random(seed)
    needs = [draw.sample(range(i), min(i, draw.randrange(3))) for i in range(30)]
    kernels = sorted(draw.sample(range(30), 12))
    place = [kernels.index(i) if i in kernels else -1 for i in range(30)]
    before: list[set[int]] = []
    for needed in needs:
        before.append(set(needed).union(*(before[need] for need in needed)))
    behind = [{k for k in range(30) if i in before[k]} for i in range(30)]
    above, below = around(needs, place)
    assert above == [max((place[k] for k in ks), default=-1) for ks in before]
    assert below == [min((place[k] for k in ks if place[k] >= 0), default=12) for ks in behind]
