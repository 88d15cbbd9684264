"""A saved run's times come back bit for bit, in few bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clustersim
from clustersim.core.timeline import alike
from clustersim.files.traces.packing import packed, unpacked
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
