"""A Timeline of blocks is the Timeline of rows it stands for."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import toy
from hypothesis import given, settings
from hypothesis import strategies as st

from clustersim.core.blocks import columns
from clustersim.core.program import Compute, Program, Role
from clustersim.core.timeline import alike, step_ends
from clustersim.engine import rows, simulate
from clustersim.explain.bounds import bounds
from clustersim.explain.breakdown import breakdown
from clustersim.explain.chase import Chase
from clustersim.explain.compare import compare
from clustersim.explain.critical_path import critical_path
from clustersim.explain.graph import graph
from clustersim.explain.occupancy import holds_kernels, is_kernel, occupancy, seconds_of_ops
from clustersim.explain.pace import LEAST, RankClasses, classes, kernel_seconds, pace_ratios, skews
from clustersim.explain.pieces import PieceRule, pieces
from clustersim.explain.replay import replayed
from clustersim.explain.stalls import causes, stalls
from clustersim.explain.whatif import whatif

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
            groups = draw(st.sampled_from(PARTITIONS))
            nbytes = draw(st.sampled_from([1.0, 10.0, 33.0]))
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
    wide = play(program, 2)
    narrow = play(program, N + 1)
    assert not narrow.blocks
    assert wide.row_start.tolist() == narrow.row_start.tolist()
    assert _rows_of(wide) == _rows_of(narrow)


def _rows_of(run):
    """Rows with their ranks, in one order: of rows that begin together any may be first."""
    columns = (run.row_op, run.row_ready, run.row_start, run.row_end)
    ranks = [run.rank_sets[place].tolist() for place in run.row_set]
    return sorted(zip(*(column.tolist() for column in columns), ranks, strict=True))


@given(programs(), st.sets(st.integers(0, N - 1), min_size=1))
def test_spans_sums_and_classes_do_not_depend_on_how_a_run_is_kept(program, ranks):
    one = play(program, 2)
    other = play(program, N + 1)
    assert one.makespan == other.makespan
    for asked in (None, sorted(ranks)):
        mine = one.spans(asked)
        theirs = other.spans(asked)
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
    for name, column in other.per_op().items():
        np.testing.assert_allclose(one.per_op()[name], column, rtol=1e-12)
    assert [column.tolist() for column in alike(one)] == [column.tolist() for column in alike(other)]
    assert one.ranks_per_op(5).tolist() == other.ranks_per_op(5).tolist()
    assert step_ends(one).tolist() == step_ends(other).tolist()


@given(programs(), st.integers(1, 40), st.sampled_from([1, 2, 3]))
def test_sheets_hold_every_span_of_the_ops_asked_for_once_however_many_are_laid_out_at_once(program, at_once, each):
    run = play(program, 2)
    chosen = np.arange(len(run.ops)) % each == 0
    rows = []
    for sheet in run.sheets(np.arange(N), at_once, None if each == 1 else chosen):
        for i, rank in enumerate(sheet.ranks.tolist()):
            columns = (sheet.op, sheet.ready[i], sheet.start[i], sheet.end[i])
            rows += [(rank, *told) for told in zip(*(column.tolist() for column in columns), strict=True)]
    spans = run.spans()
    asked = chosen[spans["op"]]
    assert sorted(rows) == sorted(zip(*(spans[name][asked].tolist() for name in spans), strict=True))


WINDOWS = st.tuples(st.floats(0, 4), st.floats(0, 4)).map(sorted)


@given(programs(), WINDOWS)
@settings(max_examples=200)
def test_time_in_states_and_ops_in_a_window_is_what_spans_cut_off_there_add_up_to(program, window):
    (begin, end), run = window, play(program, 2)
    spans = run.spans()
    ready, start, stop = (np.clip(spans[name], begin, end) for name in ("ready", "start", "end"))
    took = np.bincount(spans["op"], weights=(stop - start) * (spans["rank"] < 5), minlength=len(run.ops))
    np.testing.assert_allclose(seconds_of_ops(run, 5, begin, end), took, rtol=1e-9, atol=1e-9)
    found = occupancy(run, np.arange(N), begin, end)
    computes = is_kernel(run)[spans["op"]]
    talks = np.array([op.kind != "compute" for op in run.ops])[spans["op"]]
    loading = holds_kernels(run)[spans["op"]]
    for rank in range(N):
        mine = spans["rank"] == rank
        edges = np.unique(np.concatenate([ready[mine], start[mine], stop[mine]]))
        middles = (edges[1:] + edges[:-1]) / 2
        compute, transfer, active = (
            opened(begun[mine & kind], stop[mine & kind], middles)
            for begun, kind in ((start, computes), (start, talks), (ready, talks))
        )
        host = opened(start[mine], stop[mine], middles) & ~active & ~compute
        states = (compute, transfer, active & ~transfer, active & ~compute, transfer & ~compute, host)
        states += (opened(start[mine & loading], stop[mine & loading], middles),)
        for name, state in zip(found, states, strict=True):
            assert found[name][rank] == pytest.approx(np.diff(edges)[state].sum(), rel=1e-9, abs=1e-9)


def opened(begin, end, moments):
    """Whether any interval is open at each moment."""
    return ((begin[:, None] < moments) & (moments < end[:, None])).any(axis=0)


def test_equal_columns_are_one_and_those_that_agree_are_short():
    pairs = np.array([0, 2]), np.array([0, 0, 1, 1])  # a rank of each meeting, the meeting of each rank
    low = [3.0, 3.0, 1.0, 1.0]
    times = [np.array(values) for values in (low, low, [2.0] * 4, [2.0], [3.0, 1.0])]
    made = columns(times, [pairs, None, pairs, None, None])
    assert made[0] is made[1]
    assert [column.values.tolist() for column in made] == [[3, 1], [3, 1], [2], [2], [3, 1]]
    assert [column.all.tolist() for column in made] == [low, low, [2], [2], [3, 1]]
    assert [(column.low, column.high, column.mean) for column in made[:3]] == [(1, 3, 2), (1, 3, 2), (2, 2, 2)]
    assert columns([], []) == []


def test_what_members_of_a_meeting_share_is_kept_once_a_meeting():
    groups = np.arange(64).reshape(8, 8)
    ops = [
        Compute("c", np.linspace(1, 2, 64)),
        toy.all_reduce("r", 8.0, groups, after=(0,)),
        Compute("d", 1.0, after=(1,)),
    ]
    run = play(toy.program(ops, ranks=64), 2)
    _, (ready, start, end), (again, begun, _) = (block.columns for block in run.blocks)
    assert len(ready.values) == 64
    assert len(start.values) == len(end.values) == 8
    assert end is again
    assert end is begun
    assert run.blocks[1].start.tolist() == np.linspace(1, 2, 64).reshape(8, 8).max(axis=1).repeat(8).tolist()


def test_sums_over_ranks_are_not_written_to_by_whoever_asks_first():
    run = play(toy.program([Compute(f"c{i}", np.linspace(1, 2, 64)) for i in range(3)], ranks=64), 64)
    first = run.per_op()
    with pytest.raises(ValueError, match="read-only"):
        first["end"] += 1.0
    first.clear()
    assert run.per_op()["end"].tolist() == [2.0, 4.0, 6.0]


@given(programs())
def test_a_copy_has_rows_and_no_blocks(program):
    wide = play(program, 2)
    copy = replace(wide, source="copied")
    assert not copy.blocks
    assert copy.row_end.tolist() == wide.row_end.tolist()


def test_ops_that_begin_where_others_end_share_their_columns():
    ops = [Compute(f"c{i}", np.linspace(1, 2, 64)) for i in range(10)]
    run = play(toy.program(ops, ranks=64), 64)
    distinct = {id(column) for block in run.blocks for column in block.columns}
    assert len(run.blocks) == 10
    assert len(distinct) <= 10 + 2  # an end each; the first begins at 0


def test_a_misspelt_name_is_no_attribute():
    run = play(toy.program([Compute("c", np.linspace(1, 2, 64))], ranks=64), 2)
    with pytest.raises(AttributeError, match="row_ends"):
        _ = run.row_ends


def _path(path):
    """Columns of the pieces, and sums of them."""
    names = ("op", "rank", "begin", "end", "kind", "link")
    columns = {name: np.array([getattr(piece, name) for piece in path.pieces]) for name in names}
    return columns | {"by_kind": path.by_kind, "by_link": path.by_link, "length_s": path.length_s}


def tables(run):
    """Every table that is made of a run, flattened: name -> column."""
    found = {
        "breakdown": msgspec.structs.asdict(breakdown(run)),
        "stalls": stalls(causes(run), top=None),
        "path": _path(critical_path(run)),
        "whatif": whatif(run),
        "collectives": bounds(run, peak_flops=1.0)["collectives"],
        "steps": bounds(run, peak_flops=1.0)["steps"],
        "pace": {"ratio": pace_ratios(run), "seconds": kernel_seconds(run), "skews": skews(run)},
    }
    return {f"{name} {key}": column for name, table in found.items() for key, column in table.items()}


@given(programs())
@settings(max_examples=25)
def test_no_figure_depends_on_how_a_run_is_kept(program):
    wide = play(program, 2)
    narrow = play(program, N + 1)
    expected = tables(narrow)
    for name, column in tables(wide).items():
        if isinstance(column, np.ndarray) and column.dtype.kind == "f":
            np.testing.assert_allclose(column, expected[name], rtol=1e-9, atol=1e-12, err_msg=name)
        elif isinstance(column, np.ndarray):
            assert column.tolist() == expected[name].tolist(), name
        elif isinstance(column, dict):
            assert column == pytest.approx(expected[name]), name
        else:
            assert column == pytest.approx(expected[name]), name
    assert np.abs(compare(wide, narrow).ops["difference_s"]).max(initial=0.0) < 1e-9


def jittering(ranks, steps=3, slow=None):
    """Compute and one collective of all, a step; every rank has its own times, one perhaps half as fast."""
    rng = np.random.default_rng(0)
    ops = []
    for step in range(steps):
        seconds = rng.normal(1.0, 0.02, ranks)
        if slow is not None:
            seconds[slow] *= 2
        ops.append(Compute(f"c{step}", seconds, step=step, phase="backward"))
        ops.append(toy.all_reduce(f"r{step}", 1.0, np.arange(ranks)[None], after=(2 * step,), step=step))
        ops.append(Compute(f"o{step}", 0.1, after=(2 * step + 1,), step=step, phase="optimizer"))
    return play(toy.program(ops, ranks=ranks), 2)


def test_ranks_that_stand_for_others_add_up_to_what_all_are():
    run = jittering(1024)
    exact = classes(run)
    chosen = classes(run, most_spans=0)
    assert not exact.sampled
    assert len(exact.ranks) == 1024
    assert chosen.sampled
    assert len(chosen.ranks) <= LEAST
    assert sorted(np.unique(chosen.class_of).tolist()) == list(range(len(chosen.ranks)))
    whole = breakdown(run, pieces(run, chosen=exact))
    some = breakdown(run, pieces(run, chosen=chosen))
    np.testing.assert_allclose(some.mean, whole.mean, atol=2e-3)
    np.testing.assert_allclose(some.shares.sum(axis=1), 1.0)


def test_the_slowest_rank_is_chosen_and_stands_for_itself():
    run = jittering(1024, slow=700)
    chosen = classes(run, most_spans=0)
    assert 700 in chosen.ranks
    assert (chosen.class_of == chosen.class_of[700]).sum() == 1


def test_ranks_of_one_role_never_stand_for_another():
    n = 512
    seconds = np.random.default_rng(1).normal(1.0, 0.1, n)
    roles = tuple(
        Role(name, np.arange(n)[part], (Compute(f"c {name}", seconds[part]),))
        for name, part in (("a", slice(0, n, 2)), ("b", slice(1, n, 2)))
    )
    chosen = classes(play(Program(n, roles), 2), most_spans=0)
    assert chosen.sampled
    assert (chosen.ranks[chosen.class_of] % 2 == np.arange(n) % 2).all()


@given(programs(), st.sets(st.integers(0, N - 1), min_size=1))
@settings(max_examples=25)
def test_a_replay_of_some_ranks_ends_no_later_than_one_of_all(program, some):
    run = play(program, 2)
    ends = []
    for ranks in (np.array(sorted(some)), np.arange(N)):
        g = graph(run, ranks)
        seconds = {node.ops[0]: node.seconds for node in g.nodes if len(node.seconds)}
        compute = {i: column + g.lost.get(i, 0.0) for i, column in g.seconds.items()}
        ends.append(replayed(g, compute.__getitem__, seconds.__getitem__))
    assert (ends[0] <= ends[1] + 1e-9).all()


def test_a_wait_for_a_rank_that_nobody_chose_is_followed_all_the_same():
    run = jittering(1024, slow=700)
    fast = [rank for rank in range(1024) if rank % 16 == 0]  # nobody who stands for others is the one all wait for
    chosen = RankClasses(np.array(fast), np.arange(1024) // 16, True)
    for cut in (pieces(run), pieces(run, chosen=chosen)):
        held = Chase(run, cut, np.zeros(1024, dtype=bool)).follow(1, 0, 0.9, 1.5)
        assert (held.rank, held.op, held.why) == (700, 0, PieceRule.KERNEL)


def test_the_same_numbers_of_other_groups_are_another_column():
    # Of pairs that began at 1 and at 2: neighbours, then every other rank.
    near = np.array([0, 0, 1, 1])
    far = np.array([0, 1, 0, 1])
    made = columns([np.array([1.0, 2.0])] * 2, [(slice(None), near), (slice(None), far)])
    assert [column.all.tolist() for column in made] == [[1, 1, 2, 2], [1, 2, 1, 2]]
