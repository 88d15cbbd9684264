"""How much is looked at to explain a run, in counts; and that the short way gives the long way's bits."""

from __future__ import annotations

import numpy as np
import pytest

import clustersim
from clustersim.core.blocks import Column
from clustersim.core.sheets import BlockColumns
from clustersim.core.timeline import step_ends
from clustersim.explain import columns, hotspots
from clustersim.explain.breakdown import steady_pieces
from clustersim.explain.columns import OpColumns, RankSubset
from clustersim.explain.critical_path import critical_path
from clustersim.explain.intervals import BusyTime
from clustersim.explain.late_start import late_starts
from clustersim.explain.pace import skews


@pytest.fixture(scope="module", params=["1f1b_gpt2_xl_1x8_a100", "ddp_resnet50_1x8_v100", "why_parameter_server"])
def timeline(request):
    return clustersim.load(request.param, {"run.steps": 2, "run.jitter": 0.02}).run().timeline


def test_spans_in_a_table_of_a_rank_are_those_found_op_by_op(timeline):
    spans = OpColumns(timeline)
    draw = np.random.default_rng(0)
    met = 0
    for rank in range(timeline.world_size):
        for begin in (draw.random(20) * timeline.makespan).tolist():
            window = begin, begin + draw.random() * timeline.makespan / 20
            among = spans._among_ops(rank, *window)
            in_table = spans._in_table(rank, *window)
            for name in ("op", "at", "ready", "start", "end"):
                assert getattr(in_table, name).tolist() == getattr(among, name).tolist()
            met += len(among.op)
    assert met > 1000


def test_a_critical_path_is_the_same_without_tables(timeline, monkeypatch):
    path = critical_path(timeline)
    monkeypatch.setattr(columns, "OFTEN", 10**9)
    fresh = clustersim.load("why_slow_gpu", {"run.steps": 2}).run().timeline
    slow = critical_path(fresh)
    monkeypatch.setattr(columns, "OFTEN", 0)
    columns.columns_of(fresh)._asked.clear()
    assert critical_path(fresh) == slow
    assert len(path.pieces) > 10


def test_a_rank_that_is_walked_along_is_laid_out_once(monkeypatch):
    timeline = clustersim.load("1f1b_gpt2_xl_1x8_a100", {"run.steps": 2}).run().timeline
    laid = []
    plain = columns._rank_table
    monkeypatch.setattr(columns, "_rank_table", lambda run, rank: laid.append(rank) or plain(run, rank))
    looked = []
    op_by_op = OpColumns._among_ops
    monkeypatch.setattr(OpColumns, "_among_ops", lambda self, *window: looked.append(0) or op_by_op(self, *window))
    critical_path(timeline)
    assert laid
    assert len(laid) == len(set(laid))
    assert len(looked) <= columns.OFTEN * timeline.world_size


def test_a_column_that_ops_share_is_looked_at_once(monkeypatch):
    timeline = clustersim.load("ddp_gpt2_xl_2x8_a100", {"run.steps": 2}).run().timeline
    shared = {id(column) for block in timeline.blocks for column in block.columns}
    assert len(shared) < 2 * len(timeline.blocks)
    asked = []
    plain = BlockColumns.stacked

    def noted(self, numbers, places):
        asked.extend(self.columns[number] for number in numbers)
        return plain(self, numbers, places)

    monkeypatch.setattr(BlockColumns, "stacked", noted)
    spans = timeline.spans([3])
    assert len(spans["op"]) >= len(timeline.blocks)
    assert all(isinstance(column, Column) for column in asked)
    assert {id(column) for column in asked} == shared
    assert len(asked) == len(shared)


def test_histories_of_links_are_worked_out_once_for_a_report(monkeypatch):
    timeline = clustersim.load("ddp_resnet50_1x8_v100", {"run.steps": 2}).run().timeline
    worked = []
    plain = hotspots._history
    monkeypatch.setattr(hotspots, "_history", lambda *part: worked.append(part) or plain(*part))
    few = hotspots.hotspots(timeline)
    n = len(worked)
    many = hotspots.hotspots(timeline, top=200)
    assert n > 0
    assert len(worked) == n
    assert few["heat"].tobytes() == many["heat"][: len(few["heat"])].tobytes()


def test_each_column_of_blocks_is_written_out_once_for_the_spans_of_all_ops(monkeypatch):
    timeline = clustersim.load("ddp_gpt2_xl_2x8_a100", {"run.steps": 2, "run.jitter": 0.02}).run().timeline
    written = []
    plain = Column.counted

    def noted(self, places):
        written.append(id(self))
        return plain(self, places)

    monkeypatch.setattr(Column, "counted", noted)
    spans = OpColumns(timeline)
    for op in range(len(timeline.ops)):
        spans.of(op)
    monkeypatch.undo()
    whole = [column for block in timeline.blocks for column in block.columns]
    distinct = {id(column) for column in whole} | {id(c.since) for c in whole if c.since is not None}
    assert len(written) == len(set(written))
    assert set(written) >= {id(column) for column in whole}
    assert len(distinct) < 2 * len(timeline.blocks)  # of three columns a block: before, each of them was


def test_spans_of_an_op_are_its_block_s_own_times_to_the_last_bit():
    timeline = clustersim.load("ddp_gpt2_xl_2x8_a100", {"run.steps": 2, "run.jitter": 0.02}).run().timeline
    spans = OpColumns(timeline)
    ops = [block.op for block in timeline.blocks]
    met = 0
    for block in timeline.blocks:
        if ops.count(block.op) > 1:
            continue
        of_op = spans.of(block.op)
        assert of_op.ranks.tolist() == block.ranks.tolist()
        for name in ("ready", "start", "end"):
            told = np.broadcast_to(getattr(block, name), len(block.ranks))
            assert getattr(of_op, name).tolist() == told.tolist()
        met += 1
    assert met > 100


def test_skews_are_those_of_the_columns_written_out():
    timeline = clustersim.load("ddp_gpt2_xl_2x8_a100", {"run.steps": 2, "run.jitter": 0.02}).run().timeline
    skew = skews(timeline)
    met = 0
    for block in timeline.blocks:
        if timeline.ops[block.op].kind != "compute":
            assert skew[block.op] == block.ready.max() - block.ready.min()
            met += 1
    assert met > 10


def test_numbers_of_ranks_are_looked_up_once_for_each_array_of_them(monkeypatch):
    timeline = clustersim.load("1f1b_gpt2_xl_1x8_a100", {"run.steps": 2, "run.jitter": 0.02}).run().timeline
    asked = []
    plain = RankSubset._places_of
    monkeypatch.setattr(RankSubset, "_places_of", lambda self, ranks: asked.append(id(ranks)) or plain(self, ranks))
    subset = RankSubset(timeline, np.arange(timeline.world_size))
    some = RankSubset(timeline, np.array([1, 2, 6]))
    columns_of_all = [subset.column(op, "start") for op in range(len(timeline.ops))]
    arrays = {id(subset.columns.of(op).ranks) for op in range(len(timeline.ops))}
    assert len(asked) == len(arrays) < len(timeline.ops) / 4
    for op, column in enumerate(columns_of_all):
        np.testing.assert_array_equal(some.column(op, "start"), column[[1, 2, 6]])


def test_the_end_of_a_step_is_read_off_its_last_ops(monkeypatch):
    run = clustersim.load("ddp_resnet50_1x8_v100", {"run.steps": 4, "run.jitter": 0.02}).run().timeline
    looked = []
    plain = Column.all.fget
    monkeypatch.setattr(Column, "all", property(lambda column: looked.append(0) or plain(column)))
    ends = step_ends(run)
    assert 4 <= len(looked) <= 40 < len(run.blocks) / 10
    spans = run.spans()
    step = np.array([op.step for op in run.ops])[spans["op"]]
    for s in range(4):
        own = step == s
        assert [spans["end"][own & (spans["rank"] == rank)].max() for rank in range(8)] == ends[s].tolist()


def test_time_in_which_something_is_sent_is_asked_of_what_is_near(monkeypatch):
    draw = np.random.default_rng(0)
    start = draw.random(300)
    end = start + draw.random(300) / 50
    busy = BusyTime(start, end)
    for begin, stop in np.sort(draw.random((50, 2)), axis=1).tolist():
        moments = np.unique(np.clip([*start, *end, begin, stop], begin, stop))
        middles = (moments[1:] + moments[:-1]) / 2
        open_then = ((start[:, None] < middles) & (middles < end[:, None])).any(axis=0)
        assert busy.within(begin, stop) == pytest.approx(np.diff(moments)[open_then].sum(), rel=1e-12)
    looked = []
    plain = BusyTime._near
    monkeypatch.setattr(BusyTime, "_near", lambda *window: looked.append(plain(*window)) or looked[-1])
    run = clustersim.load("ddp_gpt2_xl_2x8_a100", {"run.steps": 8, "run.jitter": 0.02}).run().timeline
    starts = late_starts(run, steady_pieces(run))
    reduced = sum(op.kind == "all_reduce" for op in run.ops)
    assert len(looked) == len(starts) >= 6
    assert sum(near.stop - near.start for near in looked) <= reduced / 10 + len(starts)
