"""A saved run's times come back bit for bit, in few bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clustersim
from clustersim.core.blocks import Block, columns
from clustersim.core.timeline import alike
from clustersim.files.traces.packing import packed, packed_blocks, unpacked, unpacked_blocks
from clustersim.files.traces.saved import load_run, save_run

times = st.floats(0, 1e6, allow_nan=False)


@given(st.lists(st.tuples(times, times, times, st.integers(0, 3)), max_size=40))
def test_times_come_back_bit_for_bit(drawn):
    end = np.array([row[0] for row in drawn], dtype=np.float64)
    # Some times repeat an end, or each other; some are -0.0 and 0.0, which are equal but not the same bits.
    ready = np.array([end[k % len(end)] if how == 1 else r for k, (_, r, _, how) in enumerate(drawn)], dtype=np.float64)
    start = np.array([ready[k] if how == 2 else s for k, (_, _, s, how) in enumerate(drawn)], dtype=np.float64)
    if len(start):
        start[0] = -0.0
    for was, now in zip((ready, start, end), unpacked(packed(ready, start, end)), strict=True):
        assert was.tobytes() == now.tobytes()


@pytest.mark.parametrize("name", ["why_slow_gpu", "why_parameter_server"])
def test_a_saved_run_is_the_run(name, tmp_path):
    result = clustersim.load(name, {"run.steps": 2}).run()
    result.save(tmp_path / "run.npz")
    back = load_run(tmp_path / "run.npz").timeline
    for column in ("row_op", "row_set", "row_ready", "row_start", "row_end"):
        assert getattr(back, column).tobytes() == getattr(result.timeline, column).tobytes(), column
    assert [op.name for op in back.ops] == [op.name for op in result.timeline.ops]


def test_a_thousand_jittering_gpus_take_less_than_five_megabytes(tmp_path):
    result = clustersim.load("ddp_llama3_8b_128x8_h100").run()
    assert len(alike(result.timeline)[0]) == 1024
    save_run(result.timeline, tmp_path / "run.npz", result.prepared.topology)
    assert (tmp_path / "run.npz").stat().st_size < 5e6


def jittering_blocks(ops: int, ranks: int) -> tuple[Block, ...]:
    """Ops of which each begins, on some ranks, where the one before ended, and on others where an older one did."""
    draw = np.random.default_rng(ops)
    ends = [draw.random(ranks)]
    blocks = []
    for op in range(ops):
        older = ends[int(draw.integers(len(ends)))]
        start = np.where(draw.random(ranks) < 0.5, ends[-1], older)
        ends.append(draw.random(ranks))
        built = columns([ends[-2], start, ends[-1]], [None] * 3)
        blocks.append(Block(op, np.arange(ranks), (built[0], built[1], built[2])))
    return tuple(blocks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_blocks_come_back_bit_for_bit(ranks):
    blocks = jittering_blocks(40, ranks)
    back = unpacked_blocks(packed_blocks(blocks))
    assert [block.op for block in back] == [block.op for block in blocks]
    for was, now in zip(blocks, back, strict=True):
        for before, after in zip(was.times, now.times, strict=True):
            assert np.broadcast_to(before, ranks).tobytes() == np.broadcast_to(after, ranks).tobytes()


def test_a_time_that_an_earlier_column_has_is_kept_once():
    blocks = jittering_blocks(40, 8)
    kept = packed_blocks(blocks)["block_times_top"].shape[1]
    distinct = len({value for block in blocks for column in block.times for value in column.tolist()})
    assert kept <= 1.01 * distinct


def test_columns_are_looked_up_by_sorts_of_places_not_of_columns(monkeypatch):
    """Twice as many ops take as many sorts: one for each rank's place and one of all, and none for each column."""
    counts = []
    sort = np.argsort
    for ops in (200, 400):
        blocks = jittering_blocks(ops, 8)
        calls = []
        monkeypatch.setattr(np, "argsort", lambda *args, calls=calls, **how: calls.append(1) or sort(*args, **how))
        packed_blocks(blocks)
        counts.append(len(calls))
    assert counts == [9, 9]
