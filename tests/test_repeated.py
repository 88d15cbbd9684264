"""Passes that are laid once and repeated: the same ops, the same stretches, and the same run as written out."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from clustersim import scenario
from clustersim.core.op_infos import OpInfo, RepeatedInfos
from clustersim.core.program import Compute, Op, Program
from clustersim.core.repeated import PassRepeat, RepeatedOps, distinct, lasting, written
from clustersim.engine import simulate
from clustersim.engine.stretches import Shortened, Stretch
from clustersim.explain.volume import volume
from clustersim.explain.where import where
from clustersim.files.chrome_trace import write_chrome_trace
from clustersim.files.traces.saved import load_run, save_run
from clustersim.training import builder

SPLIT = "tp8_pp4_llama3_70b_32x8_h100"
SMALL = {"cluster.nodes": 4, "parallel.tp": 4, "parallel.pp": 2, "parallel.global_batch_size": 32, "run.steps": 2}
SCENARIOS: dict[str, tuple[str, dict[str, Any]]] = {
    "1F1B": (SPLIT, {**SMALL, "parallel.vpp": 1}),
    "interleaved": (SPLIT, {**SMALL, "parallel.vpp": 2}),
    "one stage": (SPLIT, {**SMALL, "parallel.vpp": 1, "parallel.pp": 1, "cluster.nodes": 2}),
    "without sequence parallelism": (SPLIT, {**SMALL, "parallel.vpp": 1, "parallel.sequence_parallel": False}),
    "rings": (SPLIT, {**SMALL, "parallel.vpp": 1, "parallel.tp": 2, "parallel.cp": 2}),
    "split backward": ("zb_gpt2_xl_1x8_a100", {}),
    "no flush": ("pipedream_gpt2_xl_1x8_a100", {}),
    "experts": ("ep8_mixtral_8x7b_8x8_h100", {"cluster.nodes": 4, "parallel.global_batch_size": 128}),
}
REPEAT = [Compute("a", 1.0), Compute("b", 2.0, after=(0,)), Compute("c", 3.0, after=(1,))]


def program(name: str, changes: dict[str, Any]) -> Program:
    return scenario.load(name, changes).prepare().program


def written_out(program: Program) -> Program:
    return replace(program, roles=tuple(replace(role, ops=tuple(role.ops)) for role in program.roles))


def fields(op: Op) -> list[object]:
    values = (getattr(op, name) for name in type(op).__struct_fields__)
    return [type(op), *(v.tobytes() if isinstance(v, np.ndarray) else msgspec.to_builtins(v) for v in values)]


@pytest.mark.parametrize(("name", "changes"), SCENARIOS.values(), ids=list(SCENARIOS))
def test_repeated_passes_are_what_would_be_laid(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    repeated = program(name, changes)
    assert any(isinstance(role.ops, RepeatedOps) for role in repeated.roles)
    monkeypatch.setattr(builder, "_repeated", lambda *what: None)
    for role, laid in zip(repeated.roles, program(name, changes).roles, strict=True):
        assert not isinstance(laid.ops, RepeatedOps)
        assert [fields(op) for op in role.ops] == [fields(op) for op in laid.ops]
        assert len([*distinct(role.ops)]) < len(laid.ops)


@pytest.mark.parametrize(("name", "changes"), SCENARIOS.values(), ids=list(SCENARIOS))
def test_stretches_are_those_of_the_ops_written_out(name: str, changes: dict[str, Any]) -> None:
    repeated = program(name, changes)
    short, long = Shortened(repeated, set()), Shortened(written_out(repeated), set())
    assert short.places == long.places
    for role, other in zip(short.program.roles, long.program.roles, strict=True):
        stretches = [[(op.first, op.last) for op in r.ops if isinstance(op, Stretch)] for r in (role, other)]
        assert stretches[0] == stretches[1]
        assert [op.after for op in role.ops] == [op.after for op in other.ops]


@pytest.mark.parametrize("name", ["1F1B", "split backward", "experts"])
def test_a_scenario_can_ask_for_every_op_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario_name, changes = SCENARIOS[name]
    played: list[Program] = []
    shorten = Shortened.__init__

    def noted(self: Shortened, *what: Any, **how: Any) -> None:
        shorten(self, *what, **how)
        played.append(self.program)

    monkeypatch.setattr(Shortened, "__init__", noted)
    once = scenario.load(scenario_name, changes).run()
    assert any(isinstance(op, Stretch) for role in played[-1].roles for op in role.ops) or any(
        isinstance(role.ops, RepeatedOps) for role in played[-1].roles
    )
    each = scenario.load(scenario_name, {**changes, "run.op_by_op": True}).run()
    assert not any(isinstance(op, Stretch) for role in played[-1].roles for op in role.ops)
    assert not any(isinstance(role.ops, RepeatedOps) for role in played[-1].roles)
    one, other = once.timeline.spans(), each.timeline.spans()
    for key, column in one.items():
        np.testing.assert_allclose(column, other[key], rtol=0, atol=1e-12 * each.timeline.makespan, err_msg=key)


@pytest.mark.parametrize("name", ["1F1B", "interleaved", "one stage", "rings", "experts"])
def test_the_run_is_that_of_the_ops_written_out(name: str) -> None:
    prepared = scenario.load(*SCENARIOS[name]).prepare()
    one, other = (
        simulate(p, prepared.topology, prepared.mesh) for p in (prepared.program, written_out(prepared.program))
    )
    spans = other.spans()
    for key, column in one.spans().items():
        assert np.array_equal(column, spans[key]), key
    assert one.links
    assert other.links
    assert np.array_equal(one.links.payload, other.links.payload)
    assert isinstance(one.ops, RepeatedInfos)
    assert not isinstance(other.ops, RepeatedInfos)
    assert [str(one.ops[i]) for i in range(len(one.ops))] == [str(info) for info in other.ops]
    assert where(one) == where(other)
    assert str(volume(one, [1])) == str(volume(other, [1]))
    assert pickle.loads(pickle.dumps(one.ops))[-1].label == other.ops[-1].label


def repeated_list() -> RepeatedOps:
    """Three passes of three ops; the first op of each is its own."""
    more = [[Compute("a", 1.0, after=(3 * k - 1,)), *REPEAT[1:]] for k in (1, 2)]
    passes = [PassRepeat(3 * k, 3 * k + 1, 3 * k + 3, 3 * k, 0, k) for k in range(3)]
    return RepeatedOps([*REPEAT, *more[0], *more[1]], passes)


def test_an_op_is_given_as_if_it_had_been_written_out() -> None:
    ops = repeated_list()
    after = [(), (0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]
    assert [ops[i].after for i in range(9)] == [ops.after(i) for i in range(9)] == after
    assert [op.after for op in ops[-4:]] == after[-4:]
    assert [op.after for op in ops] == after
    assert [i for i, _ in distinct(ops)] == [0, 1, 2, 3, 6]
    assert [op.after for op in pickle.loads(pickle.dumps(ops))] == after


def test_items_that_all_have_been_made_are_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made_each = repeated_list()
    one_by_one = [made_each[place] for place in (0, 4, np.int64(8), -1)], made_each[2:7:2]
    ops = repeated_list()
    everything = tuple(ops)
    monkeypatch.setattr(RepeatedOps, "_at", None)
    assert str(([ops[place] for place in (0, 4, np.int64(8), -1)], ops[2:7:2])) == str(one_by_one)
    assert ops[4] is everything[4]
    with pytest.raises(IndexError):
        ops[9]


@pytest.mark.parametrize(("place", "others"), [(4, {0, 1, 2, 3, 4, 6}), (1, {0, 1, 2, 3, 4, 6}), (3, {0, 1, 2, 3, 6})])
def test_an_op_that_takes_longer_is_its_own(place: int, others: set[int]) -> None:
    ops = repeated_list()
    changed = list(written(ops))
    changed[place] = msgspec.structs.replace(changed[place], duration=9.0)
    longer = lasting(ops, changed)
    assert [op.after for op in longer] == [op.after for op in ops]
    assert [op.duration for op in longer] == [9.0 if i == place else op.duration for i, op in enumerate(ops)]  # type: ignore[union-attr]
    assert {i for i, _ in distinct(longer)} == others
    assert {op.duration for _, op in distinct(longer)} == {1.0, 2.0, 3.0, 9.0}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["1F1B", "experts"])
def test_a_saved_run_keeps_what_repeats_once_and_gives_every_op_back(name: str, tmp_path: Path) -> None:
    timeline = scenario.load(*SCENARIOS[name]).run().timeline
    save_run(timeline, tmp_path / "run.npz")
    loaded = load_run(tmp_path).timeline
    assert isinstance(timeline.ops, RepeatedInfos)
    assert isinstance(loaded.ops, RepeatedInfos)
    assert len(loaded.ops.written) == len(timeline.ops.written) < len(timeline.ops)
    save_run(replace(timeline, ops=tuple(timeline.ops)), tmp_path / "plain.npz")
    plain = load_run(tmp_path / "plain.npz").timeline
    assert not isinstance(plain.ops, RepeatedInfos)
    assert [info_fields(op) for op in loaded.ops] == [info_fields(op) for op in plain.ops]
    assert [info_fields(op) for op in loaded.ops] == [info_fields(op) for op in timeline.ops]


def info_fields(op: OpInfo) -> list[object]:
    detail = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in op.detail.items()}
    return [detail if name == "detail" else getattr(op, name) for name in op.__struct_fields__]


def test_a_run_is_summed_up_saved_traced_and_reported_without_writing_its_ops_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    plain_at = RepeatedInfos._at

    def counting(self: RepeatedInfos, i: int) -> OpInfo:
        nonlocal asked
        asked += 1
        return plain_at(self, i)

    monkeypatch.setattr(RepeatedInfos, "_at", counting)
    result = scenario.load(*SCENARIOS["1F1B"]).run()
    n_ops = len(result.timeline.ops)
    assert result.summary["step_time_s"] > 0
    assert asked < n_ops / 10
    asked = 0
    save_run(result.timeline, tmp_path / "run.npz")
    write_chrome_trace(result.timeline, tmp_path / "trace.json")
    assert asked == 0
    result.report(tmp_path / "page.html")
    assert asked < n_ops / 2
