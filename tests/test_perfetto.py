"""Trace files against the rules viewers have, and against the spans they were made from."""

from __future__ import annotations

import gzip
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from player import link_use, play, toy_cost, toy_model

from clustersim.core.errors import TraceError
from clustersim.core.mesh import Mesh
from clustersim.files import chrome_trace, slices
from clustersim.files.chrome_trace import write_chrome_trace
from clustersim.files.traces import FORMATS, write
from clustersim.training.strategies.ddp import DDPConfig, build


@pytest.fixture(scope="module")
def timeline():
    model = toy_model([[2**21]] * 5, buffers=8)
    config = DDPConfig(comm_hook="bf16_compress")
    program = build(model, toy_cost(model, jitter=0.05, step_overhead=1e-4), Mesh(np.arange(16), 8), config, 3, 1)
    use = link_use([(0, 0.0, 4e-3, 5.0), (1, 3e-3, 5e-3, 4.0)])
    return replace(play(program, lambda op: 1e-3 / 3), links=use)


def events(path, ph=None):
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return [e for e in document["traceEvents"] if ph in (None, e["ph"])]


def test_slices_of_a_thread_never_overlap_and_come_in_order(timeline, tmp_path):
    write_chrome_trace(timeline, tmp_path / "t.json")
    slices = [e for e in events(tmp_path / "t.json", "X") if e["cat"] != "user_annotation"]
    by_thread = itertools.groupby(slices, key=lambda e: e["tid"])
    seen = set()
    for tid, group in by_thread:
        del tid
        mine = list(group)
        for one, other in itertools.pairwise(mine):
            assert round(one["ts"] * 1e3) + round(one["dur"] * 1e3) <= round(other["ts"] * 1e3)
            assert one["dur"] >= 0
        seen.add(mine[0]["pid"])
    assert seen == {1, 2}
    assert len({(e["pid"], e["tid"]) for e in slices}) == len({e["tid"] for e in slices}) == 16 * 3


def test_the_file_holds_every_span_to_the_nanosecond(timeline, tmp_path):
    write_chrome_trace(timeline, tmp_path / "t.json.gz")
    slices = [e for e in events(tmp_path / "t.json.gz", "X") if not e["name"].startswith("ProfilerStep#")]
    spans = timeline.spans()
    kept = [e for e in slices if e["cat"] != "wait"]
    assert len(kept) == len(spans["rank"])
    got = sorted((e["args"]["rank"], e["ts"], e["ts"] + e["dur"], e["name"]) for e in kept)
    names = [timeline.ops[i].name for i in spans["op"]]
    want = sorted(zip(spans["rank"].tolist(), spans["start"] * 1e6, spans["end"] * 1e6, names, strict=True))
    for (rank, ts, end, _), (rank2, ts2, end2, _) in zip(got, want, strict=True):
        assert rank == rank2
        assert (ts, end) == pytest.approx((ts2, end2), abs=2e-3)
    waited = sum(e["dur"] for e in slices if e["cat"] == "wait")
    assert waited == pytest.approx(float((spans["start"] - spans["ready"]).sum()) * 1e6, rel=1e-4)
    assert all(e["name"].startswith("wait ") for e in slices if e["cat"] == "wait")


def test_steps_have_a_track_of_their_own_and_the_profilers_names(timeline, tmp_path):
    write_chrome_trace(timeline, tmp_path / "t.json")
    steps = [e for e in events(tmp_path / "t.json", "X") if e["name"].startswith("ProfilerStep#")]
    assert [e["name"] for e in steps] == [f"ProfilerStep#{i}" for i in range(len(steps))]
    assert len(steps) == len({op.step for op in timeline.ops})
    assert len({e["tid"] for e in steps}) == 1
    assert all(one["ts"] + one["dur"] == pytest.approx(other["ts"]) for one, other in itertools.pairwise(steps))


def test_collectives_carry_kinetos_arguments(timeline, tmp_path):
    write_chrome_trace(timeline, tmp_path / "t.json", ranks=[3])
    found = next(e for e in events(tmp_path / "t.json", "X") if e["name"] == "all_reduce bucket 0")
    assert found["cat"] == "kernel"
    wanted = {"Collective name": "allreduce", "In msg nelems": 5 * 2**21, "Group size": 16, "dtype": "BFloat16"}
    assert found["args"].items() >= wanted.items()
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["distributedInfo"] == {"backend": "nccl", "rank": 3, "world_size": 16}
    assert document["clustersim"]["ranks"] == [3]


def test_tracks_are_named_for_node_gpu_and_stream(timeline, tmp_path):
    write_chrome_trace(timeline, tmp_path / "t.json", ranks=[0, 9])
    named = {e["args"]["name"] for e in events(tmp_path / "t.json", "M") if e["name"].endswith("_name")}
    assert {"node0", "node1", "gpu0 compute (rank 0)", "gpu1 comm (rank 9)", "busiest links"} <= named
    assert all(e["pid"] > 0 for e in events(tmp_path / "t.json"))


def test_counters_integrate_to_the_bytes_of_the_link(timeline, tmp_path):
    use = replace(timeline.links, segment_rate=timeline.links.segment_rate * 1e9)
    write_chrome_trace(replace(timeline, links=use), tmp_path / "t.json")
    counters = events(tmp_path / "t.json", "C")
    total = {}
    for name, group in itertools.groupby(counters, key=lambda e: e["name"]):
        mine = list(group)
        assert [e["ts"] for e in mine] == sorted(e["ts"] for e in mine)
        assert mine[-1]["args"]["GB/s"] == 0
        total[name] = sum(a["args"]["GB/s"] * (b["ts"] - a["ts"]) * 1e3 for a, b in itertools.pairwise(mine))
    assert total == pytest.approx({"a -> b": 0.02e9, "b -> c": 0.036e9})


def test_one_link_of_each_sort_gets_a_counter_before_a_second_of_the_same():
    use = link_use([(0, 0.0, 4.0, 5.0), (1, 3.0, 5.0, 4.0)])
    named = replace(use, link_names=["n0/gpu0 -> sw", "n0/gpu1 -> sw", "sw -> nic"])
    assert slices.busiest_links(named) == [0, 1]
    other = replace(use, link_names=["n0/gpu0 -> sw", "nic -> sw", "sw -> nic"], link_bandwidth=np.ones(3))
    assert slices.busiest_links(other, 1) == [1]


def test_the_same_run_gives_the_same_bytes(timeline, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_chrome_trace(timeline, tmp_path / name / "t.json.gz")
    assert (tmp_path / "a" / "t.json.gz").read_bytes() == (tmp_path / "b" / "t.json.gz").read_bytes()
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["t.json.gz"]


def test_a_file_of_all_ranks_is_cut_to_whole_nodes_that_a_viewer_can_open(timeline, monkeypatch):
    per_rank = 2 * (len(timeline.spans()["rank"]) // 16)
    assert slices.ranks_to_write(timeline, None) == tuple(range(16))
    monkeypatch.setattr(slices, "MAX_SLICES", 10 * per_rank)
    assert slices.ranks_to_write(timeline, None) == tuple(range(8))
    monkeypatch.setattr(slices, "MAX_SLICES", 3 * per_rank)
    assert slices.ranks_to_write(timeline, None) == (0, 1, 2)


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("t.txt", None, "no trace format has this ending"),
        ("t.json", [16], r"ranks \[16\].*has ranks 0\.\.15"),
        ("t.json", [], "cannot write ranks"),
        ("", [0], "no trace format has this ending"),
    ],
)
def test_what_cannot_be_written_is_one_clear_error(timeline, tmp_path, name, ranks, message):
    with pytest.raises(TraceError, match=message):
        write(timeline, tmp_path / name, ranks)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [name for name, row in FORMATS.items() if row.write])
def test_every_format_writes_the_ranks_asked_for(timeline, tmp_path, name):
    if name == "pftrace":
        pytest.importorskip("perfetto", reason="the perfetto extra is not installed")
    for suffix in FORMATS[name].suffixes:
        path = tmp_path / f"t{suffix}"
        assert write(timeline, path, [1, 9]) == (1, 9)
        assert path.stat().st_size > 1000


def test_a_pftrace_without_its_package_says_what_to_install(timeline, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(TraceError, match=r"pip install 'clustersim\[perfetto\]'"):
        write(timeline, tmp_path / "t.pftrace")


def test_a_pftrace_holds_the_same_slices_as_the_json(timeline, tmp_path):
    pytest.importorskip("perfetto", reason="the perfetto extra is not installed")
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    write(timeline, tmp_path / "t.pftrace")
    write(timeline, tmp_path / "t.json")
    trace = Trace.FromString((tmp_path / "t.pftrace").read_bytes())
    open_slices = {}
    found = []
    for packet in trace.packet:
        event = packet.track_event
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            assert event.track_uuid not in open_slices
            open_slices[event.track_uuid] = (packet.timestamp, event.name)
        elif event.type == TrackEvent.TYPE_SLICE_END:
            begin, what = open_slices.pop(event.track_uuid)
            found.append((event.track_uuid, begin, packet.timestamp, what))
    assert not open_slices
    want = [
        (e["tid"], round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3), e["name"])
        for e in events(tmp_path / "t.json", "X")
    ]
    assert found == want
    tracks = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    assert all(t.parent_uuid in tracks for t in tracks.values() if t.parent_uuid)
    assert tracks[1].thread.thread_name == "gpu0 compute (rank 0)"


def test_words_of_an_op_are_encoded_once_however_many_ranks_are_written(timeline, tmp_path, monkeypatch):
    calls = []
    plain = slices.args_of
    monkeypatch.setattr(slices, "args_of", lambda op, *rest: calls.append(op) or plain(op, *rest))
    for ranks in ([0], range(16)):
        calls.clear()
        write_chrome_trace(timeline, tmp_path / "t.json", ranks)
        assert len(calls) == len(np.unique(timeline.spans(ranks)["op"]))


def test_a_trace_is_written_piece_by_piece(timeline, tmp_path, monkeypatch):
    """A piece holds so many spans, so that a long trace is never in memory as a whole; the bytes are the same."""
    write_chrome_trace(timeline, tmp_path / "whole.json.gz")
    monkeypatch.setattr(chrome_trace, "AT_ONCE", 100)
    sizes = []
    plain = slices.write_pieces

    def counted(path, pieces):
        kept = list(pieces)
        sizes.extend(map(len, kept))
        plain(path, kept)

    monkeypatch.setattr(slices, "write_pieces", counted)
    write_chrome_trace(timeline, tmp_path / "parts.json.gz")
    assert (tmp_path / "parts.json.gz").read_bytes() == (tmp_path / "whole.json.gz").read_bytes()
    assert len(sizes) > len(timeline.spans()["rank"]) / 100
    assert max(sizes) < sum(sizes) / 5
