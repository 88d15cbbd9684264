"""A guess of who shares links may cost time, never truth: whatever is on the clock, the run is the same."""

from __future__ import annotations

import numpy as np
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from clustersim import scenario
from clustersim.core.program import Compute, Recv, Send
from clustersim.engine import guess, run, simulate
from clustersim.engine import play as engine_play

N = 4
STREAMS = ("compute", "comm", "reduce")


def all_on_the_clock(play):
    """The same, with every transfer on the clock from the start."""
    make = guess.SharingGuess.__init__

    def clocked(self, program, sites, loads):
        make(self, program, sites, loads)
        self.clocked = guess.firsts(sites)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guess.SharingGuess, "__init__", clocked)
        return play()


def must_agree(one, other):
    spans = one.spans()
    others = other.spans()
    order, orders = (np.lexsort((s["op"], s["rank"])) for s in (spans, others))
    for name in spans:
        np.testing.assert_allclose(spans[name][order], others[name][orders], rtol=1e-12, atol=1e-12)
    moved = [
        np.bincount(
            use.segment_transfer, use.segment_rate * (use.segment_end - use.segment_start), len(use.transfer_op)
        )
        for use in (one.links, other.links)
    ]
    # Four bytes are over in less time than the last bits of when: those of a stretch are added up in another order.
    last_bits = (
        8 * np.spacing(one.makespan) * max(use.segment_rate.max(initial=0.0) for use in (one.links, other.links))
    )
    np.testing.assert_allclose(moved[0], moved[1], rtol=1e-9, atol=last_bits)
    for name in ("transfer_op", "transfer_load"):
        assert getattr(one.links, name).tolist() == getattr(other.links, name).tolist()
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
            groups = draw(st.sampled_from([[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[1, 2], [3, 0]], [[0, 3]]]))
            ops.append(toy.all_reduce(f"r{i}", nbytes, groups, stream=stream, after=after))
    return toy.program(ops, ranks=N, slowdown=draw(st.sampled_from([0.0, 0.5])))


@given(programs())
def test_what_the_clock_plays_takes_the_times_that_columns_take(program):
    topology = toy.star(N)

    def play():
        return simulate(program, topology, toy.mesh(topology), planner=planner)

    must_agree(play(), all_on_the_clock(play))


def test_transfers_that_share_nothing_need_no_clock():
    topology = toy.star(N)
    program = toy.program([toy.all_reduce("r", 5.0, [[0, 1], [2, 3]]), Compute("c", 1.0, after=(0,))], ranks=N)
    timeline = simulate(program, topology, toy.mesh(topology), planner=toy.up_links)
    assert timeline.makespan == 1.5
    assert timeline.stats["events"] == 0


def test_only_what_shares_is_put_on_the_clock():
    topology = toy.star(N)
    ops = [
        toy.all_reduce("alone", 5.0, [[0, 1], [2, 3]]),
        toy.all_reduce("one", 5.0, [[0, 1]], stream="a", after=(0,)),
        toy.all_reduce("other", 5.0, [[1, 2]], stream="b", after=(0,)),
        toy.all_reduce("later", 5.0, [[0, 1, 2, 3]], after=(1, 2)),
    ]
    timeline = simulate(toy.program(ops, ranks=N), topology, toy.mesh(topology), planner=toy.up_links)
    assert timeline.makespan == 2.0
    assert timeline.stats["solves"] == 1
    # Two begins, a solve at each change, and the end they share.
    assert timeline.stats["events"] <= 5


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ddp_gpt2_xl_2x8_a100", {"model.name": "gpt2", "run.jitter": 0.05}),
        ("ddp_gpt2_xl_2x8_a100", {"model.name": "gpt2", "cluster.nodes": 8, "strategy.comm_hook": "fp16_compress"}),
        ("fsdp_mpt_7b_16x8_a100", {"cluster.nodes": 8, "run.steps": 2, "run.jitter": 0.02}),
        ("zero3_llama3_8b_2x8_a100", {"run.steps": 1, "run.jitter": 0.02}),
        ("hsdp_llama3_70b_32x8_h100", {"cluster.nodes": 4, "run.steps": 1, "run.jitter": 0.02}),
        ("why_slow_gpu", {}),
    ],
)
def test_strategies_take_the_same_times_on_the_clock(name, changes):
    def play():
        return scenario.load(name, changes).run().timeline

    together = play()
    separately = all_on_the_clock(play)
    assert together.stats["events"] < separately.stats["events"]
    must_agree(together, separately)


def test_a_send_beside_a_reduction_is_known_before_anything_is_played(monkeypatch):
    checks = []
    check = guess.SharingGuess.wrong

    def counted(self, begin, end):
        checks.append(check(self, begin, end))
        return checks[-1]

    monkeypatch.setattr(guess.SharingGuess, "wrong", counted)
    topology = toy.star(3)
    reduction = toy.all_reduce("r", 5.0, [[0, 2]], stream="dp", after=(2,))
    sends = Send("out", 5.0, np.array([1]), stream="pp", after=(0,))
    stage = [Compute("first", 1.0), sends, Compute("second", 0.125, after=(0,)), reduction]
    next_stage = [Recv("in", 5.0, np.array([0]), stream="pp")]
    replica = [toy.all_reduce("r", 5.0, [[0, 2]], stream="dp")]
    program = toy.program(stage, next_stage, replica, ranks=[[0], [1], [2]])
    timeline = simulate(program, topology, toy.mesh(topology), planner=toy.up_links)
    assert timeline.makespan == pytest.approx(1.0 + 2 * 0.5)  # one link carries both
    assert checks == [set()]


def test_a_guess_that_the_first_step_proves_wrong_is_put_right_for_each_step_at_once(monkeypatch):
    steps = 3
    stage = []
    for step in range(steps):
        first = len(stage)
        stage += [
            Compute("first", 1.0, step=step),
            Send("out", 5.0, np.array([1]), stream="pp", after=(first,), step=step),
            Compute("second", 1.0, stream="side", step=step),  # beside the first, which no list tells
            toy.all_reduce("r", 5.0, [[0, 2]], stream="dp", after=(first + 2,), step=step),
        ]
    next_stage = [Recv("in", 5.0, np.array([0]), stream="pp", step=step) for step in range(steps)]
    replica = [toy.all_reduce("r", 5.0, [[0, 2]], stream="dp", step=step) for step in range(steps)]
    program = toy.program(stage, next_stage, replica, ranks=[[0], [1], [2]])
    topology = toy.star(3)

    def play():
        return simulate(program, topology, toy.mesh(topology), planner=toy.up_links)

    checks = []
    check = guess.SharingGuess.wrong
    monkeypatch.setattr(
        guess.SharingGuess, "wrong", lambda self, *times: checks.append(check(self, *times)) or checks[-1]
    )
    timeline = play()
    assert timeline.makespan == pytest.approx(1.0 + steps * 2 * 0.5)  # one link carries both, in each step
    assert [len(wrong) for wrong in checks] == [2, 0]  # of the first step alone, and then of none
    monkeypatch.setattr(run._EngineRun, "_look_at_first_step", lambda self: None)
    whole = play()
    assert [len(wrong) for wrong in checks[2:]] == [2 * steps, 0]
    assert timeline.spans()["end"].tobytes() == whole.spans()["end"].tobytes()


@given(programs())
def test_a_play_that_is_looked_at_all_the_time_takes_the_same_times(program):
    topology = toy.star(N)

    def play():
        return simulate(program, topology, toy.mesh(topology), planner=planner)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_play, "FIRST_LOOK", 1)
        looked_at = play()
    must_agree(looked_at, play())


def test_a_collective_that_shares_in_one_micro_batch_is_put_on_the_clock_in_all_before_the_step_is_over(monkeypatch):
    passes = 6
    stage = []
    next_stage = []
    other = []
    replica = []
    for _ in range(passes):
        first = len(stage)
        over = (first - 1, first - 3) if first else ()
        stage += [
            # Two that are seen to share: so there is a clock, and a pass is over before the next one is known.
            *[toy.all_reduce(name, 5.0, [[0, 3]], stream=name, after=over) for name in ("a", "b")],
            Compute("first", 1.0, after=(first, first + 1)),
            Send("out", 5.0, np.array([1]), stream="pp", after=(first + 2,)),
            Compute("second", 1.0, stream="side", after=(first, first + 1)),  # beside the first, which no list tells
            toy.all_reduce("r", 5.0, [[0, 2]], stream="dp", after=(first + 4,)),
        ]
        next_stage.append(Recv("in", 5.0, np.array([0]), stream="pp"))
        replica.append(toy.all_reduce("r", 5.0, [[0, 2]], stream="dp"))
        other += [toy.all_reduce(name, 5.0, [[0, 3]], stream=name) for name in ("a", "b")]
    program = toy.program(stage, next_stage, replica, other, ranks=[[0], [1], [2], [3]])
    topology = toy.star(4)
    widened = []
    in_each_pass = guess.SharingGuess.in_each_pass

    def noted(self, some, *what):
        widened.append((set(some), in_each_pass(self, some, *what)))
        return widened[-1][1]

    monkeypatch.setattr(guess.SharingGuess, "in_each_pass", noted)

    def play():
        return simulate(program, topology, toy.mesh(topology), planner=toy.up_links)

    whole = play()
    assert [len(known) for known, _ in widened] == [2 * passes]  # the play was over
    widened.clear()
    monkeypatch.setattr(engine_play, "FIRST_LOOK", 1)
    looked_at = play()
    known, put_right = widened[0]
    assert 0 < len(known) < 2 * passes  # the step was not over
    assert len(put_right - known) >= passes - len(known)
    assert looked_at.spans()["end"].tobytes() == whole.spans()["end"].tobytes()


INTERLEAVED = {"cluster.nodes": 8, "parallel.pp": 4, "parallel.vpp": 16, "parallel.microbatches": 8}


def test_sends_that_share_often_take_their_stream_with_them_and_no_time_changes(monkeypatch):
    plays = []
    plain = run._EngineRun._play
    monkeypatch.setattr(run._EngineRun, "_play", lambda self: plays.append(set(self.clocked)) or plain(self))

    def play():
        plays.clear()
        timeline = scenario.load("tp8_pp16_vpp8_llama3_405b_32x8_h100", INTERLEAVED).run().timeline
        return timeline, [len(clocked) for clocked in plays]

    widened, more = play()
    monkeypatch.setattr(run, "OFTEN", np.inf)
    monkeypatch.setattr(run, "MOST", np.inf)
    alone, fewer = play()
    assert len(more) < len(fewer)
    assert more[-1] > fewer[-1]
    must_agree(widened, alone)


@given(programs())
def test_what_is_put_on_the_clock_beyond_what_shares_changes_no_time(program):
    topology = toy.star(N)

    def play(often, most):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "OFTEN", often)
            patch.setattr(run, "MOST", most)
            return simulate(program, topology, toy.mesh(topology), planner=planner)

    must_agree(play(0.0, 0.0), play(np.inf, np.inf))


def test_a_collective_that_shares_is_put_on_the_clock_at_its_place_in_each_role():
    def stage(r):
        groups = [[2 * r, 2 * r + 1]]
        ops = [
            toy.all_reduce(f"layer {r}.{k}", 5.0, groups, stream="ep", after=(2 * k - 1,) * (k > 0)) for k in range(3)
        ]
        other = [toy.all_reduce(f"other {r}.{k}", 7.0, groups, stream="dp", after=(2 * k,)) for k in range(3)]
        return [op for pair in zip(ops, other, strict=True) for op in pair]

    topology = toy.star(4)
    program = toy.program(stage(0), stage(1), ranks=2)
    played = run._EngineRun(program, topology, toy.mesh(topology), {"planner": toy.up_links})
    assert not played.clocked  # they follow one another
    at = {site.sides[0].key: site.first for site in played.sites}
    shares = at[0, 2]  # the second one of its stream in the first role
    ends = np.full(len(played.sites), np.inf)
    assert played.guess.in_each_pass({shares}, ends, 0.5) == {shares, at[1, 2]}
