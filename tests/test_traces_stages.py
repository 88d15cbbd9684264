"""Profiles of PyTorch's pipelines: stages and actions by its own annotations, messages by both of their ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

from clustersim.core.timeline import Timeline
from clustersim.explain import pipeline
from clustersim.explain.explain import explain
from clustersim.files import traces
from clustersim.files.traces.digest import of_run
from clustersim.files.traces.profiled import AnnotatedSchedule
from clustersim.studies.replay.trace_replay import replay

RECORDED = ROOT / "notebooks" / "traces"
MS = 1000.0


def note(name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    """An annotation, times in ms."""
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": name,
        "tid": 1,
        "ts": start * MS,
        "dur": (end - start) * MS,
        "args": args,
    }


def message(kind: str, start: float, end: float) -> dict[str, Any]:
    return note(f"gloo:{kind}", start, end, **{"Input Dims": [[1, 256]], "Input type": ["float"]})


def operator(start: float, end: float) -> dict[str, Any]:
    return {**note("aten::mm", start, end), "cat": "cpu_op"}


def save(folder: Path, *ranks: list[dict[str, Any]]) -> Timeline:
    for rank, events in enumerate(ranks):
        said = {"schemaVersion": 1, "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": len(ranks)}}
        step = [note("ProfilerStep#1", 0.0, 100.0)]
        (folder / f"{rank}.json").write_text(json.dumps(said | {"hostName": "a", "traceEvents": step + events}))
    return traces.read(folder)


FIRST = [
    note("PP:0F0", 0, 11),
    operator(1, 4),
    operator(5, 10),
    note("PP:0SEND_F0", 11, 12),
    message("send", 11.5, 95),  # Gloo's ends when somebody waits for it
    note("PP:0RECV_B0", 12, 13),
    message("recv", 12.5, 60.5),
    note("PP:0B0", 13, 81),
    operator(60.5, 80),
]
LAST = [
    note("PP:1RECV_F0", 0, 1),
    message("recv", 0.5, 12),
    note("PP:1F0", 1, 33),
    operator(12, 30),  # waits inside its annotation
    note("PP:1B0", 33, 60),
    operator(33, 58),
    note("PP:1SEND_B0", 59, 60),
    message("send", 60, 61),
]


def test_an_action_lasts_from_its_first_to_its_last_operator(tmp_path):
    done = pipeline.actions(save(tmp_path, FIRST, LAST))[1]
    found = {(a.stage, a.action, a.microbatch): (1e3 * a.start + 0.5, 1e3 * a.end + 0.5) for a in done}
    assert found == {
        (0, "F", 0): pytest.approx((1, 10)),
        (1, "F", 0): pytest.approx((12, 30)),
        (1, "B", 0): pytest.approx((33, 58)),
        (0, "B", 0): pytest.approx((60.5, 80)),
    }


def test_a_message_is_on_its_way_from_its_later_end_to_the_end_of_its_receive(tmp_path):
    run = save(tmp_path, FIRST, LAST)
    spans = run.spans()
    rows = {
        (run.ops[op].kind, run.ops[op].label.action): 1e3 * np.array([ready, start, end]) + 0.5
        for op, ready, start, end in zip(*(spans[c] for c in ("op", "ready", "start", "end")), strict=True)
        if run.ops[op].kind != "compute"
    }
    np.testing.assert_allclose(rows["recv", "F"], [0.5, 11.5, 12])
    np.testing.assert_allclose(rows["send", "F"], [11.5, 11.5, 12])
    np.testing.assert_allclose(rows["recv", "B"], [12.5, 60, 60.5])  # posted early, and nothing to do meanwhile
    assert [row.transfer_s for row in of_run(run).collectives] == pytest.approx([0.5e-3, 0.5e-3])


def test_how_long_a_message_took_is_not_told_where_its_receiver_was_busy(tmp_path):
    busy = [event if event["name"] != "aten::mm" else operator(1, 30) for event in LAST[:3]]
    busy[1] = message("recv", 0.5, 30.5)
    run = save(tmp_path, FIRST, [*busy, operator(1, 30), note("PP:1B0", 33, 60), operator(33, 58)])
    (received,) = (op for op in run.ops if op.kind == "recv" and op.label.action == "F")
    assert "transfer_s" not in received.detail


def test_stages_of_one_rank_are_its_chunks_in_a_loop_and_in_a_v():
    for stages in ((1, 3), (1, 2)):
        schedule = AnnotatedSchedule((f"PP:{stage}F0", 10.0 * i, 10.0 * i + 9) for i, stage in enumerate(stages))
        found = [schedule.at(10.0 * i + 1) for i in range(2)]
        assert [(doing.stage, doing.label.chunk) for doing in found] == [(1, 0), (1, 1)]
        assert schedule.at(9.5) is None


@pytest.mark.parametrize("word", ["PP:0UNSHARD", "PP:0REDUCE_GRAD", "PP:(0F1;0B0)OVERLAP_F_B", "PP:", "PP:-1F0"])
def test_other_words_of_a_schedule_are_no_action(word):
    assert AnnotatedSchedule([(word, 0.0, 1.0)]).at(0.5) is None


@pytest.mark.parametrize("folder", ["pipeline_4_4", "pipeline_6_2"])
def test_a_recorded_pipeline_replayed_with_free_messages_takes_as_long_as_it_did(folder):
    found = replay(traces.read(RECORDED / folder))
    measured, simulated = found.steps.medians()
    assert abs(simulated / measured - 1) < 0.02
    assert all(abs(stage.simulated - stage.measured) < 0.02 for stage in found.stages)


def test_one_rank_of_a_pipeline_is_read_and_replayed_alone():
    run = traces.read(RECORDED / "pipeline_4_4" / "rank0.json.gz")
    whole = traces.read(RECORDED / "pipeline_4_4")
    measured, simulated = replay(run).steps.medians()
    assert abs(simulated / measured - 1) < 0.02
    assert run.makespan == pytest.approx(whole.makespan, rel=0.01)
    assert explain(run).verdict
