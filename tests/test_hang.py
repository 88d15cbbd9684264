"""A hang is a result: what ended, who waits for whom, when a watchdog speaks. Held against a play that never ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from clustersim import scenario as scenarios
from clustersim.app.cli import cli
from clustersim.core.errors import ProgramError, ScenarioError
from clustersim.engine.hang import Hang
from clustersim.engine.standstill import HealthyRun, Stuck
from clustersim.scenario.file.incident_table import KINDS

DDP = "ddp_gpt2_medium_2x4_v100"
SMALL = {"run.steps": 3, "run.jitter": 0.0}
FOREVER = 1e6


def hang(kind: str, base: str = DDP, at: str = "0.42 s", rank: int | None = 5, **more: Any) -> Hang:
    incident = {"kind": kind, "at": at} | ({} if rank is None else {"rank": rank})
    incident |= {key: more.pop(key) for key in ("link",) if key in more}
    answer = scenarios.load(base, {**SMALL, **more, "incident": [incident]}).hang()
    assert answer is not None
    return answer


@pytest.mark.parametrize(
    ("base", "more"),
    [
        (DDP, {}),
        (DDP, {"strategy.kind": "fsdp"}),
        ("1f1b_gpt2_xl_1x8_a100", {"parallel.microbatches": 8, "run.steps": 2}),
        ("zero3_llama3_8b_2x8_a100", {"model.options": {"layers": 2}, "run.steps": 2}),
    ],
)
@pytest.mark.parametrize("rank", [0, 5])
def test_what_ends_is_what_ends_beside_a_kernel_that_takes_eleven_days(base, more, rank):
    """The engine itself plays the stuck kernel as one that is very long: what it ends before that is what we say."""
    prepared = scenarios.load(base, {**SMALL, **more}).prepare()
    timeline = prepared.play()
    healthy = HealthyRun(prepared.program, timeline)
    kernel = healthy.first_kernel(rank, 0.6 * timeline.makespan)
    assert kernel is not None
    blocked = healthy.blocked(Stuck(stuck=frozenset({(rank, kernel)})))
    spans = replace(prepared, program=_stuck_for_long(prepared.program, rank, kernel)).play().spans()
    places = zip(spans["rank"].tolist(), spans["op"].tolist(), strict=True)
    never = {place for place, end in zip(places, spans["end"].tolist(), strict=True) if end > FOREVER / 2}
    assert never == blocked
    assert 10 < len(blocked) < len(spans["end"])


def _stuck_for_long(program, rank: int, kernel: int):
    offset, roles = 0, []
    for role in program.roles:
        if offset <= kernel < offset + len(role.ops):
            op = role.ops[kernel - offset]
            duration = np.broadcast_to(np.asarray(op.duration, float), role.ranks.shape).copy()
            duration[role.ranks == rank] = FOREVER
            ops = list(role.ops)
            ops[kernel - offset] = msgspec.structs.replace(op, duration=duration)
            roles.append(replace(role, ops=tuple(ops)))
        else:
            roles.append(role)
        offset += len(role.ops)
    return replace(program, roles=tuple(roles))


PIPELINE = {"cluster.nodes": 2, "parallel.pp": 4, "parallel.microbatches": 4}
OF_GROUPS = [name for name, kind in KINDS.items() if kind.hangs and kind.where == "rank" and name != "stuck_message"]


@pytest.mark.parametrize("kind", OF_GROUPS)
def test_every_kind_names_its_rank_and_the_others_wait(kind):
    answer = hang(kind, at="0.3 s" if kind == "uneven_batches" else "0.42 s")
    assert (answer.kind, answer.ranks, answer.steps) == (kind, (5,), 2)
    waiting = {wait.rank for wait in answer.waits}
    assert waiting >= set(range(8)) - {5} - set(answer.silent)
    if not kind.startswith("other_"):
        assert {rank for wait in answer.waits if wait.rank != 5 for rank in wait.waits_for} == {5}
    assert answer.lost is not None
    assert answer.lost > 0
    assert answer.lines()[0] == f"the run hangs at {'300' if kind == 'uneven_batches' else '420'} ms: {kind} of rank 5"


def test_a_stuck_kernel_leaves_its_rank_calling_and_not_starting():
    answer = hang("stuck_kernel")
    states = {rank: {call.seq: call.state for call in calls} for rank, calls in answer.calls.items()}
    first = next(seq for seq, state in states[0].items() if state != "completed")
    assert states[0][first] == "started"
    assert states[5][first] == "scheduled"
    assert len(states[5]) == len(states[0])  # its host goes on to the end of the step


def test_who_does_not_call_stops_one_short_of_what_others_wait_in():
    answer = hang("missing_call")
    waits_in = answer.waits[0].call.seq
    assert [call.seq for call in answer.calls[5]][-1] == waits_in - 1
    assert all(call.ended is not None for call in answer.calls[5])


@pytest.mark.parametrize(("kind", "field"), [("other_size", "nbytes"), ("other_type", "dtype"), ("other_kind", "kind")])
def test_one_call_of_one_rank_differs_in_one_thing(kind, field):
    answer = hang(kind)
    pairs = zip(answer.calls[0], answer.calls[5], strict=True)
    apart = [(ours, theirs) for ours, theirs in pairs if getattr(ours, field) != getattr(theirs, field)]
    assert len(apart) == 1
    assert apart[0][0].state == "started"


def test_a_rank_with_a_batch_less_waits_in_a_barrier_where_others_begin_a_step():
    answer = hang("uneven_batches", at="0.2 s")
    barrier = answer.calls[5][-1]
    first = answer.waits[0].call
    assert (barrier.kind, barrier.seq, barrier.state) == ("barrier", first.seq, "started")
    before = [call for call in answer.calls[0] if call.step < first.step]
    assert first.seq == len(before) + 1


def test_a_rank_that_calls_another_group_waits_for_the_others_of_its_machine():
    answer = hang("other_group")
    own = answer.waits[-1]
    assert (own.rank, own.call.group, own.waits_for) == (5, (4, 5, 6, 7), (4, 6, 7))
    assert all(5 in wait.waits_for for wait in answer.waits[:-1])
    with pytest.raises(ScenarioError, match="are no other group than that of"):
        hang("other_group", "ddp_resnet50_1x8_v100", at="0.01 s")


def test_a_message_that_never_ends_is_waited_in_at_both_ends():
    answer = hang("stuck_message", "1f1b_gpt2_xl_1x8_a100", at="0.3 s", **PIPELINE)
    both = [wait for wait in answer.waits if not wait.waits_for and wait.call.started is not None]
    assert {wait.call.kind for wait in both} == {"send", "recv"}
    assert {wait.rank for wait in both} == {5, both[0].call.peer if both[0].rank == 5 else both[0].rank}
    assert set(answer.calls) == set(range(16))


def test_two_calls_change_places():
    answer = hang("other_order")
    pairs = list(zip(answer.calls[0], answer.calls[5], strict=True))
    apart = [i for i, (ours, theirs) in enumerate(pairs) if ours.nbytes != theirs.nbytes]
    assert len(apart) == 2
    assert pairs[apart[0]][0].nbytes == pairs[apart[1]][1].nbytes


def test_a_dead_link_stops_all_who_cross_it_and_nobody_is_missing():
    answer = hang("dead_link", rank=None, link="node0/nic0")
    assert {wait.rank for wait in answer.waits} == set(range(8))
    assert all(wait.waits_for == () for wait in answer.waits)
    assert answer.detected == pytest.approx(0.42 + 7 * 4.096e-6 * 2**20)


@pytest.mark.parametrize("timeout", [30.0, 600.0, 1800.0])
def test_the_first_alarm_is_the_timeout_after_the_first_call_that_never_ended(timeout):
    answer = hang("missing_call", **{"watchdog.c10d_timeout": f"{timeout:g} s"})
    called = min(call.created for calls in answer.calls.values() for call in calls if call.ended is None)
    assert answer.detected == called + timeout


def test_a_launcher_sees_a_dead_process_long_before_any_timeout():
    answer = hang("dead_rank")
    assert answer.silent == (4, 5, 6, 7)  # torchrun ends the others of its machine
    assert answer.detected == pytest.approx(0.42 + 0.1)
    assert hang("stopped_rank").silent == (5,)


def test_a_run_that_hangs_has_no_step_time_and_says_who_tells_more():
    incident = [{"kind": "dead_rank", "rank": 1, "at": "0.1 s"}]
    loaded = scenarios.load(DDP, {**SMALL, "incident": incident})
    with pytest.raises(ScenarioError, match="dead_rank of rank 1 hangs this run, which has no step time"):
        loaded.run()
    assert scenarios.load(DDP, SMALL).hang() is None


@pytest.mark.parametrize(
    ("kind", "more", "wrong"),
    [
        ("dead_rank", {"at": "9 s"}, "9 s is outside the run, which is over after"),
        ("dead_link", {"link": "node0/nic0", "rank": None, "at": "0.51 s"}, "no transfer crosses node0/nic0 after"),
        ("missing_call", {"at": "0.502 s"}, "calls no collective with others after"),
        ("stuck_message", {}, "rank 5 sends no message after 420 ms"),
        ("uneven_batches", {"at": "0.48 s"}, "calls no collective with others after"),
    ],
)
def test_what_cannot_hang_is_one_error(kind, more, wrong):
    with pytest.raises(ScenarioError, match=wrong):
        hang(kind, **more)


def test_servers_whose_order_the_run_decides_are_refused():
    with pytest.raises((ProgramError, ScenarioError), match="servers decide theirs in the run"):
        hang("stuck_kernel", "ps_sync_cpu_1x8", at="0.1 s", rank=2)


def test_the_command_prints_a_hang_and_leaves_with_0():
    words = ["run", DDP, "--set", "incident=[{kind='missing_call', rank=5, at='0.3 s'}]"]
    answer = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert answer.exit_code == 0
    assert answer.output.startswith("the run hangs at 300 ms: missing_call of rank 5")
    assert "for rank(s) 5" in answer.output
    document = msgspec.json.decode(CliRunner().invoke(cli, [*words, "--json"]).output)
    assert document["hang"]["ranks"] == [5]
