"""Arrows, counters and CSV: what other programs read of a run."""

from __future__ import annotations

import csv
import gzip
import json

import msgspec
import numpy as np
import pytest

import clustersim
from clustersim.core.timeline import SPAN_LABELS
from clustersim.files import slices, traces
from clustersim.files.chrome_trace import write_chrome_trace


@pytest.fixture(scope="module")
def result():
    return clustersim.load("ps_sync_cpu_1x8", {"run.steps": 2}).run()


@pytest.fixture(scope="module")
def timeline(result):
    return result.timeline


def test_every_receive_has_one_arrow_from_the_send_it_met(timeline):
    arrows = list(slices._sent(timeline, range(timeline.world_size)))
    assert len(arrows) > 100
    spans = timeline.spans()
    times = dict(
        zip(zip(spans["rank"].tolist(), spans["op"].tolist(), strict=True), spans["start"].tolist(), strict=True)
    )
    for (rank, op), (peer, other) in arrows:
        assert (timeline.ops[op].kind, timeline.ops[other].kind) == ("send", "recv")
        assert timeline.ops[op].nbytes == timeline.ops[other].nbytes
        assert rank != peer
        assert times[rank, op] == pytest.approx(times[peer, other])
    receives = {place for place in times if timeline.ops[place[1]].kind == "recv"}
    assert {reached for _, reached in arrows} == receives


def test_every_member_of_a_collective_has_an_arrow_from_the_last_to_arrive():
    timeline = clustersim.load("ddp_resnet50_1x8_v100", {"run.steps": 1}).run().timeline
    leaving, reaching = slices.flows(timeline, range(8))
    spans = timeline.spans()
    ready = dict(
        zip(zip(spans["rank"].tolist(), spans["op"].tolist(), strict=True), spans["ready"].tolist(), strict=True)
    )
    collectives = [i for i, op in enumerate(timeline.ops) if op.kind != "compute"]
    assert len(collectives) >= 2
    for i in collectives:
        (last,) = {rank for rank, op in leaving if op == i}
        assert ready[last, i] == max(ready[rank, i] for rank in range(8))
        assert {rank for rank, op in reaching if op == i} == set(range(8)) - {last}


def test_arrows_need_both_ends_in_the_file(timeline):
    leaving, reaching = slices.flows(timeline, [0])
    assert leaving == reaching == {}


def test_chrome_arrows_lie_inside_their_slices(timeline, tmp_path):
    write_chrome_trace(timeline, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = {}
    for e in events:
        if e["ph"] == "X":
            slices.setdefault(e["tid"], []).append((round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)))
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert starts.keys() == ends.keys()
    for e in (*starts.values(), *ends.values()):
        at = round(e["ts"] * 1e3)
        assert any(a <= at < b or a == b == at for a, b in slices[e["tid"]])
    assert all(starts[i]["ts"] <= ends[i]["ts"] for i in starts)


def test_memory_is_a_counter_of_the_first_rank(tmp_path):
    result = clustersim.load("ddp_resnet50_1x8_v100", {"run.steps": 1}).run()
    course = result.memory.course
    held = dict(zip(course.moments, course.total.tolist(), strict=True))
    write_chrome_trace(result.timeline, tmp_path / "t.json", [3], held)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    levels = [e["args"]["GiB"] for e in events if e["ph"] == "C" and e["name"] == "memory of rank 3"]
    assert max(levels) == pytest.approx(max(held.values()) / 2**30, rel=1e-3)
    assert len(levels) > 20


def test_perfetto_s_own_format_has_the_same_arrows_and_counters(timeline, tmp_path):
    pytest.importorskip("perfetto", reason="the perfetto extra is not installed")
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

    name = next(op.name for op in timeline.ops if op.kind == "compute")
    traces.write(timeline, tmp_path / "t.pftrace", memory={name: 2.0**31})
    trace = Trace()
    trace.ParseFromString((tmp_path / "t.pftrace").read_bytes())
    leaving, _ = slices.flows(timeline, range(timeline.world_size))
    out = [i for p in trace.packet for i in p.track_event.flow_ids]
    into = [i for p in trace.packet for i in p.track_event.terminating_flow_ids]
    assert sorted(out) == sorted(into) == sorted(i for numbers in leaving.values() for i in numbers)
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    streams = [t for t in tracks.values() if t.HasField("thread")]
    assert streams
    assert all(tracks[t.parent_uuid].process.pid == t.thread.pid for t in streams)
    left = {i: p for p in trace.packet for i in p.track_event.flow_ids}
    reached = {i: p for p in trace.packet for i in p.track_event.terminating_flow_ids}
    assert all(left[i].timestamp <= reached[i].timestamp for i in left)
    kinds = {op.name: op.kind for op in timeline.ops}
    assert {(kinds[left[i].track_event.name], kinds[reached[i].track_event.name]) for i in left} == {("send", "recv")}
    counted = [p.track_event.track_uuid for p in trace.packet if p.track_event.type == p.track_event.TYPE_COUNTER]
    assert all(tracks[i].HasField("counter") for i in counted)
    units = {p.track_descriptor.counter.unit_name for p in trace.packet if p.HasField("track_descriptor")}
    assert {"GB/s", "GiB"} <= units


def test_csv_has_a_line_for_each_span_with_its_exact_times(timeline, tmp_path):
    assert traces.write(timeline, tmp_path / "s.csv.gz") == tuple(range(timeline.world_size))
    with gzip.open(tmp_path / "s.csv.gz", "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    spans = timeline.spans()
    assert len(rows) == len(spans["rank"])
    assert [float(r["start_s"]) for r in rows] == spans["start"].tolist()
    assert [float(r["end_s"]) for r in rows] == spans["end"].tolist()
    assert [r["name"] for r in rows] == [timeline.ops[i].name for i in spans["op"]]
    traces.write(timeline, tmp_path / "one.csv", [2])
    assert {line.split(",")[0] for line in (tmp_path / "one.csv").read_text().splitlines()[1:]} == {"2"}


def test_no_name_is_a_formula_to_a_spreadsheet(timeline, tmp_path):
    from dataclasses import replace

    ops = tuple(msgspec.structs.replace(op, name=f"=HYPERLINK({i})") for i, op in enumerate(timeline.ops))
    traces.write(replace(timeline, ops=ops), tmp_path / "s.csv", [0])
    with (tmp_path / "s.csv").open(newline="") as file:
        assert all(row["name"].startswith("'=") for row in csv.DictReader(file))


def test_spans_with_labels_say_what_each_was_and_are_the_same_spans():
    timeline = clustersim.load("1f1b_gpt2_xl_1x8_a100", {"run.steps": 1, "model.options.layers": 8}).run().timeline
    plain = timeline.spans([3])
    labelled = timeline.spans([3], labels=True)
    assert list(labelled) == [*plain, *SPAN_LABELS]
    assert all(np.array_equal(labelled[name], plain[name]) for name in plain)
    for op, name, phase, stage, microbatch in zip(
        *(labelled[key].tolist() for key in ("op", "name", "phase", "stage", "microbatch")), strict=True
    ):
        info = timeline.ops[op]
        assert (name, phase, stage) == (info.name, info.phase, info.stage)
        assert microbatch == (info.label.microbatch if info.label else -1)
    assert set(labelled["action"].tolist()) >= {"F", "B"}
    assert set(labelled["stage"].tolist()) == {3}
