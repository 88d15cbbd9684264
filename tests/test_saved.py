"""A saved run comes back whole, and is read without running anything in it."""

from __future__ import annotations

from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest
from player import link_use, play, toy_cost, toy_model

import clustersim
from clustersim.core.errors import TraceError
from clustersim.core.facts import MemoryMoments, RunFacts
from clustersim.core.mesh import Mesh
from clustersim.files import traces
from clustersim.files.traces import packing
from clustersim.files.traces.saved import load_run, save_run
from clustersim.training.strategies.ddp import DDPConfig, build


def same(one, other):
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple) and one and isinstance(one[0], np.ndarray | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


@pytest.fixture(scope="module")
def result():
    return clustersim.load("ddp_gpt2_xl_2x8_a100", {"run.steps": 2}).run()


def test_everything_comes_back_as_it_was(result, tmp_path):
    result.save(tmp_path / "run.npz")
    run = load_run(tmp_path)
    before = result.timeline
    after = run.timeline
    for name in (
        "world_size",
        "row_op",
        "row_set",
        "row_ready",
        "row_start",
        "row_end",
        "rank_node",
        "source",
        "stats",
    ):
        assert same(getattr(before, name), getattr(after, name)), name
    assert all(same(a, b) for a, b in zip(before.rank_sets, after.rank_sets, strict=True))
    for field in fields(before.links):
        if field.name not in {"link_names", "link_kinds"}:
            assert same(getattr(before.links, field.name), getattr(after.links, field.name)), field.name
    assert list(before.links.link_names) == list(after.links.link_names)
    for field in fields(result.prepared.topology):
        assert same(getattr(result.prepared.topology, field.name), getattr(run.topology, field.name)), field.name


def test_ops_keep_their_details_infinities_and_arrays_included(tmp_path):
    program = build(
        toy_model([[2**20]] * 2), toy_cost(toy_model([[2**20]] * 2)), Mesh(np.arange(4), 4), DDPConfig(), 2, 0
    )
    timeline = play(program, lambda op: 1e-3)
    detail = {"ceiling": float("inf"), "groups": np.arange(4).reshape(2, 2), "meets": (1, 2), "algorithm": "ring"}
    ops = tuple(msgspec.structs.replace(op, detail=detail) for op in timeline.ops)
    said = {"mfu": np.float64(0.5), "memory_course": {"moments": ["a", "b"], "parts": {"gradients": np.arange(2)}}}
    save_run(replace(timeline, ops=ops), tmp_path / "r.npz", facts=RunFacts.of(said | {"of no field": 1}))
    run = load_run(tmp_path / "r.npz")
    assert run.facts == RunFacts(
        mfu=0.5, memory_course=MemoryMoments(["a", "b"], {"gradients": [0.0, 1.0]}), figures={"mfu": 0.5}
    )
    assert run.topology is None
    for one, other in zip(ops, run.timeline.ops, strict=True):
        assert np.array_equal(one.detail["groups"], other.detail.pop("groups"))
        assert other.detail == {"ceiling": float("inf"), "meets": (1, 2), "algorithm": "ring"}
        assert msgspec.structs.replace(one, detail={}) == msgspec.structs.replace(other, detail={})


def test_links_of_a_run_without_a_machine_keep_their_names(tmp_path):
    program = build(toy_model([[8]]), toy_cost(toy_model([[8]])), Mesh(np.arange(2), 2), DDPConfig(), 1, 0)
    timeline = replace(play(program, lambda op: 1e-3), links=link_use([(0, 0.0, 4.0, 5.0), (1, 3.0, 5.0, 4.0)]))
    save_run(timeline, tmp_path / "r.npz")
    links = load_run(tmp_path / "r.npz").timeline.links
    assert list(links.link_names) == ["a -> b", "b -> c", "c -> d"]
    assert links.bytes_per_link().tolist() == timeline.links.bytes_per_link().tolist()


def test_the_same_run_gives_the_same_bytes(result, tmp_path):
    for name in ("a.npz", "b.npz"):
        result.save(tmp_path / name)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_memory_by_op_is_the_course_summed_over_its_parts(result, tmp_path):
    result.save(tmp_path / "run.npz")
    held = load_run(tmp_path).memory
    course = result.memory.course
    assert held[course.moments[course.peak]] == pytest.approx(float(course.total.max()))
    assert set(held) == set(course.moments)


def test_a_saved_run_is_read_as_any_trace_is(result, tmp_path):
    result.save(tmp_path / "run.npz")
    assert traces.sniff(tmp_path / "run.npz").name == "run"
    assert traces.read(tmp_path / "run.npz").makespan == result.timeline.makespan


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 nor this"])
def test_what_is_no_saved_run_is_one_clear_error(tmp_path, content):
    (tmp_path / "run.npz").write_bytes(content)
    with pytest.raises(TraceError, match=r"run\.npz: not a run that clustersim saved"):
        load_run(tmp_path)


def test_pickles_in_a_file_are_not_opened(tmp_path):
    np.savez(tmp_path / "run.npz", words=np.array([{"a": 1}], dtype=object))
    with pytest.raises(TraceError, match="not a run that clustersim saved"):
        load_run(tmp_path)


def test_another_layout_says_to_run_again(tmp_path):
    np.savez(tmp_path / "run.npz", words=np.frombuffer(b'{"version": 99}', dtype=np.uint8))
    with pytest.raises(TraceError, match="another version"):
        load_run(tmp_path)


@pytest.mark.parametrize("at_once", [1, 37, 2**20])
def test_columns_come_back_to_the_bit_however_many_are_followed_together(monkeypatch, at_once):
    blocks = clustersim.load("zero3_llama3_8b_2x8_a100", {"run.steps": 2, "run.jitter": 0.02}).run().timeline.blocks
    arrays = packing.packed_blocks(blocks)
    mixed = arrays["block_mix_items"] >= 0
    assert mixed.any()
    assert not mixed.all()
    monkeypatch.setattr(packing, "AT_ONCE", at_once)
    again = packing.unpacked_blocks(arrays)
    assert len(again) == len(blocks) > 100
    for block, other in zip(blocks, again, strict=True):
        assert block.op == other.op
        assert block.ranks.tolist() == other.ranks.tolist()
        for times, others in zip(block.times, other.times, strict=True):
            assert times.tobytes() == others.tobytes()


def test_a_column_that_names_one_that_names_another_is_followed_to_the_end(monkeypatch):
    times = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    ptr = np.array([0, 2, 4, 6, 7, 9])  # own 1 2; 1 and own 3; 1 by way of it, 3; own 4, of all; 4, own 5
    mixes = np.array([-1, -1, 0, -1, 1, 1, -1, 3, -1])
    for at_once in (1, 3, 100):
        monkeypatch.setattr(packing, "AT_ONCE", at_once)
        followed = packing._followed_back(times, ptr, mixes)
        assert followed.tolist() == [1.0, 2.0, 1.0, 3.0, 1.0, 3.0, 4.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tp8_pp4_llama3_70b_32x8_h100", {"cluster.nodes": 8, "parallel.global_batch_size": 16, "run.steps": 2}),
        ("zero3_llama3_8b_2x8_a100", {"run.steps": 2, "run.jitter": 0.02}),
    ],
)
def test_columns_come_back_as_they_are_kept_and_shared(name, changes):
    blocks = clustersim.load(name, changes).run().timeline.blocks
    again = packing.unpacked_blocks(packing.packed_blocks(blocks))
    assert len(again) == len(blocks) > 0
    twin: dict[int, object] = {}
    for block, other in zip(blocks, again, strict=True):
        for column, read in zip(block.columns, other.columns, strict=True):
            assert twin.setdefault(id(column), read) is read
            while column is not None:
                assert (column.low, column.high, column.mean) == (read.low, read.high, read.mean)
                assert column.values.tobytes() == read.values.tobytes()
                assert (column.of is None) == (read.of is None)
                assert column.of is None or column.of.tolist() == read.of.tolist()
                column, read = column.since, read.since
            assert read is None


def test_values_counted_from_others_are_not_written_out():
    blocks = clustersim.load("tp8_pp4_llama3_70b_32x8_h100", {"parallel.global_batch_size": 64}).run().timeline.blocks
    columns = {id(column): column for block in blocks for column in block.columns}.values()
    assert any(column.since is not None for column in columns)
    kept = len(packing.packed_blocks(blocks)["block_mix_items"])
    assert kept < 0.5 * sum(len(column.all) for column in columns)


def test_a_column_that_is_counted_from_itself_is_no_saved_run():
    blocks = clustersim.load("ddp_gpt2_xl_2x8_a100", {"run.steps": 2}).run().timeline.blocks
    arrays = packing.packed_blocks(blocks)
    arrays["column_since"] = np.arange(len(arrays["column_since"]))
    with pytest.raises(ValueError, match="counted from itself"):
        packing.unpacked_blocks(arrays)
