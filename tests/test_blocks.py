"""A Timeline of blocks is the Timeline of rows it stands for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from clustersim.analysis.metrics import occupancy, occupancy_of_all
from clustersim.engine import rows, simulate
from clustersim.program import Compute, Program, Role
from clustersim.timeline import alike, between, first_ranks, of_ops

N = 8
PARTITIONS = (np.arange(N)[None], np.arange(N).reshape(2, 4), np.arange(N).reshape(2, 4).T.copy())


def planner(request, group):
    return toy.plan(request, group.gpus, latency=0.125, ceiling=8.0)


@st.composite
def programs(draw):
    """Ops of eight ranks with times of their own, on up to four streams."""
    ops = []
    for i in range(draw(st.integers(1, 12))):
        after = tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=2)))) if i else ()
        if draw(st.booleans()):
            seconds = draw(st.sampled_from([0.0, 0.5, 1.0]) | st.lists(st.floats(0, 3), min_size=N, max_size=N))
            stream = draw(st.sampled_from(["compute", "copy"]))
            ops.append(Compute(f"c{i}", np.array(seconds) if isinstance(seconds, list) else seconds, stream, after))
        else:
            groups, nbytes = draw(st.sampled_from(PARTITIONS)), draw(st.sampled_from([1.0, 10.0, 33.0]))
            stream = draw(st.sampled_from(["comm", "comm2", "compute"]))
            ops.append(toy.all_reduce(f"r{i}", nbytes, groups, stream=stream, after=after))
    return Program(N, (Role("worker", np.arange(N), tuple(ops)),), draw(st.sampled_from([0.0, 0.3])))


def play(program, wide):
    topology = toy.star(program.world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "WIDE", wide)
        return simulate(program, topology, toy.mesh(topology), planner=planner)


@given(programs())
def test_blocks_expand_to_the_rows_that_were_kept_one_by_one(program):
    wide, narrow = play(program, 2), play(program, N + 1)
    assert not narrow.blocks
    for name in ("row_op", "row_ready", "row_start", "row_end"):
        assert getattr(wide, name).tolist() == getattr(narrow, name).tolist()
    found = [wide.rank_sets[s].tolist() for s in wide.row_set]
    assert sorted(zip(wide.row_op.tolist(), found, strict=True)) == sorted(
        (op, narrow.rank_sets[s].tolist()) for op, s in zip(narrow.row_op.tolist(), narrow.row_set, strict=True)
    )


@given(programs(), st.sets(st.integers(0, N - 1), min_size=1))
def test_spans_sums_classes_and_parts_do_not_depend_on_how_a_run_is_kept(program, ranks):
    wide, narrow = play(program, 2), play(program, N + 1)
    chosen = np.arange(len(program.roles[0].ops)) % 2 == 0
    changes = (lambda t: t, lambda t: first_ranks(t, 5), lambda t: of_ops(t, chosen), lambda t: between(t, 1.0, 2.5))
    for i, change in enumerate(changes):
        one, other = change(wide), change(narrow)
        assert one.makespan == other.makespan
        wanted = [rank for rank in ranks if rank < one.world_size]
        for asked in (None, wanted):
            mine, theirs = one.spans(asked), other.spans(asked)
            assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
        for name, column in other.per_op().items():
            np.testing.assert_allclose(one.per_op()[name], column, rtol=1e-12)
        if i < 3:  # cut off at one moment, ranks in different rows can have come to be alike, which rows do not see
            assert [column.tolist() for column in alike(one)] == [column.tolist() for column in alike(other)]


@given(programs())
@settings(max_examples=200)
def test_states_by_algebra_are_the_states_of_the_sweep(program):
    run = play(program, 2)
    found, expected = occupancy_of_all(run), occupancy(run, np.arange(N))
    streams = {op.stream for op in run.ops if op.kind == "compute"}
    if found is None:  # only where kernels ran on several streams and none is called compute
        assert len(streams) > 1
        return
    for name, seconds in expected.items():
        np.testing.assert_allclose(found[name], seconds, rtol=1e-9, atol=1e-9)


@given(programs())
def test_a_copy_has_rows_and_no_blocks(program):
    wide = play(program, 2)
    copy = replace(wide, source="copied")
    assert not copy.blocks
    assert copy.row_end.tolist() == wide.row_end.tolist()


def test_ops_that_begin_where_others_end_share_their_columns():
    ops = [Compute(f"c{i}", np.linspace(1, 2, 64)) for i in range(10)]
    run = play(toy.program(ops, ranks=64), 64)
    columns = {id(column) for block in run.blocks for column in block.times}
    assert len(run.blocks) == 10
    assert len(columns) <= 10 + 2  # an end each; the first begins at 0


def test_a_misspelt_name_is_no_attribute():
    run = play(toy.program([Compute("c", np.linspace(1, 2, 64))], ranks=64), 2)
    with pytest.raises(AttributeError, match="row_ends"):
        _ = run.row_ends
