"""Bubbles of pipelines: the parts of a stage's idle time add up, and are what the formulas say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_runs import gpipe, one_f_one_b, simulated

import clustersim
from clustersim.core.errors import ProgramError
from clustersim.core.timeline import Timeline
from clustersim.explain import pipeline
from clustersim.explain.pipeline import sentences, slowest
from clustersim.explain.step_words import bubble_sentence
from clustersim.files import traces


def parts(row: pipeline.StageTime) -> list[float]:
    return [getattr(row, name) for name in pipeline.PARTS]


@pytest.mark.parametrize("order", [one_f_one_b, gpipe])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 16), (8, 3)])
def test_equal_stages_idle_p_minus_1_times_forward_and_backward_all_of_it_fill_and_drain(order, p, m):
    f = 1.0
    b = 2.5
    rows = pipeline.stage_times(simulated([f] * p, [b] * p, m, order=order))
    for s, row in enumerate(rows):
        assert row.window == pytest.approx((m + p - 1) * (f + b), rel=1e-12)
        assert row.busy == pytest.approx(m * (f + b), rel=1e-12)
        assert row.idle == pytest.approx((p - 1) * (f + b), rel=1e-12)
        assert parts(row)[2:] == pytest.approx([0, 0, 0, 0], abs=1e-12)
        if order is gpipe or m >= p:
            assert row.fill == pytest.approx(
                s * f + (p - 1 - s) * (f if order is gpipe else 0.0) + (p - 1 - s) * b, rel=1e-12
            )


@pytest.mark.parametrize("m", [4, 16])
def test_a_slow_last_stage_makes_the_others_wait_m_times_what_it_takes_longer(m):
    rows = pipeline.stage_times(simulated([1.0, 1.0, 1.0, 1.75], [2.0, 2.0, 2.0, 3.25], m))
    for row in rows:
        assert row.fill + row.drain == pytest.approx(3 * (1.0 + 2.0), rel=1e-12)
        assert row.imbalance == pytest.approx(0.0 if row.stage == 3 else m * 2.0, abs=1e-9)
        assert row.other == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_stage_is_named_wherever_it_is_and_only_the_others_wait_for_it(slow):
    f = [1.0] * 4
    b = [2.0] * 4
    f[slow], b[slow] = 1.75, 3.25
    rows = pipeline.stage_times(simulated(f, b, 16))
    assert slowest(rows) == (slow, pytest.approx(1.75), pytest.approx(1.625))
    assert sentences(rows)[0].startswith(f"stage {slow} is the slowest: its forward and backward take 1.75 and 1.62")
    for row in rows:
        assert row.fill + row.drain <= 3 * (1.0 + 2.0) + 1e-9
        assert (row.imbalance > 15 * 1.5) == (row.stage != slow)
        assert row.other == pytest.approx(0.0, abs=1e-9)


def test_slow_single_actions_and_transfers_are_neither_fill_nor_imbalance():
    rows = pipeline.stage_times(simulated([1.0] * 3, [2.0] * 3, 6, transfer=0.25))
    assert {round(row.fill + row.drain, 9) for row in rows} == {6.0}
    assert all(row.imbalance == pytest.approx(0.0, abs=1e-9) and row.other > 0.25 for row in rows)


def test_what_follows_the_last_action_is_outside_and_steps_are_told_apart():
    run = simulated([1.0] * 2, [2.0] * 2, 4, steps=3, tail=0.5)
    last = pipeline.stage_times(run, [2])
    assert sum(row.outside for row in last) > 0
    assert list(pipeline.windows(run)) == [0, 1, 2]
    assert max(end for _, end in pipeline.windows(run).values()) == run.makespan


def test_replicas_that_do_the_same_count_once_and_those_that_differ_are_averaged():
    one, four = (pipeline.stage_times(simulated([1.0, 1.0], [2.0, 3.0], 4, replicas=n)) for n in (1, 4))
    assert [parts(row) for row in four] == [pytest.approx(parts(row)) for row in one]
    assert [list(ranks) for ranks in pipeline.stages(simulated([1, 1], [1, 1], 2, replicas=2))] == [[0, 1], [2, 3]]


def test_a_run_without_stages_has_no_pipeline():
    none = np.zeros(0, dtype=np.int64)
    empty = Timeline(1, (), (), none, none, np.zeros(0), np.zeros(0), np.zeros(0))
    assert not pipeline.has_pipeline(empty)
    assert pipeline.stages(empty) == ()
    with pytest.raises(ProgramError, match="no pipeline"):
        pipeline.stage_times(empty)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0.1, 3.0), st.floats(0.1, 3.0)), min_size=2, max_size=5),
    st.integers(1, 7),
    st.sampled_from([one_f_one_b, gpipe]),
    st.sampled_from([0.0, 0.3]),
)
def test_the_parts_of_any_pipeline_are_not_negative_and_add_up_to_the_step(stages, m, order, transfer):
    run = simulated([f for f, _ in stages], [b for _, b in stages], m, order=order, transfer=transfer, tail=0.1)
    for row, (f, b) in zip(pipeline.stage_times(run), stages, strict=True):
        assert min(parts(row)) >= -1e-9
        assert row.window == pytest.approx(run.makespan, rel=1e-9)
        assert row.busy == pytest.approx(m * (f + b), rel=1e-9)


@pytest.mark.parametrize(
    ("name", "idle"),
    [
        ("pipeline_1f1b_pp8", [0.363, 0.371, 0.361, 0.361, 0.361, 0.356, 0.368, 0.305]),
        ("pipeline_1f1b_pp4_dp2_straggler", [0.617, 0.617, 0.614, 0.375]),
    ],
)
def test_published_traces_idle_as_their_authors_tables_say(shared: Path, name, idle):
    run = traces.read(shared / "measurements" / "traces" / name)
    rows = pipeline.stage_times(run)
    assert [row.idle / row.window for row in rows] == pytest.approx(idle, abs=0.01)
    assert all(min(parts(row)) >= -1e-12 for row in rows)


def test_the_straggler_of_the_published_trace_is_its_last_stage(shared: Path):
    run = traces.read(shared / "measurements" / "traces" / "pipeline_1f1b_pp4_dp2_straggler")
    rows = pipeline.stage_times(run)
    stage, forward, backward = slowest(rows)
    assert (stage, forward, backward) == (3, pytest.approx(2.08, abs=0.02), pytest.approx(1.42, abs=0.02))
    assert all(row.imbalance > 0.2 * row.window for row in rows[:3])
    assert rows[3].imbalance < 0.01 * rows[3].window


def test_what_each_op_is_of_is_asked_once_of_a_run_however_often_its_actions_are_looked_up(monkeypatch):
    run = simulated([1.0] * 2, [2.0] * 2, 4, order=one_f_one_b)
    asked = []
    ask = pipeline.of_each
    monkeypatch.setattr(pipeline, "of_each", lambda *facts: (asked.append(facts[1]), ask(*facts))[1])
    first = pipeline.actions(run), pipeline.stages(run), pipeline.windows(run)
    once = len(asked)
    again = pipeline.actions(run), pipeline.stages(run), pipeline.windows(run)
    assert len(asked) == once == 2
    assert first[0] == again[0]
    assert first[2] == again[2]
    assert [ranks.tolist() for ranks in first[1]] == [ranks.tolist() for ranks in again[1]]


@pytest.mark.parametrize("replicas", [1, 4])
def test_what_stages_are_busy_is_what_their_whole_account_says(replicas):
    run = simulated([1.0, 1.25, 1.0], [2.0, 3.0, 2.5], 5, replicas=replicas, transfer=0.25)
    assert pipeline.busy_seconds(run) == [row.busy for row in pipeline.stage_times(run)]


def test_a_bubble_is_said_without_playing_the_schedule_again(monkeypatch):
    run = clustersim.load("1f1b_gpt2_xl_1x8_a100").run()
    busy = [row.busy for row in pipeline.stage_times(run.timeline)]
    monkeypatch.setattr(pipeline, "_of_replica", lambda *_: pytest.fail("played again"))
    assert bubble_sentence(run.timeline, run.where)
    assert pipeline.busy_seconds(run.timeline) == busy
