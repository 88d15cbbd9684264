"""Execution traces beside profiles: FLOPs and bytes from shapes, waits from memory, and the Program that Chakra has."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from test_traces_kineto import gemm, kernel, save

from clustersim.app.cli import cli
from clustersim.cluster import files as fabrics
from clustersim.core.device import device
from clustersim.core.errors import TraceError
from clustersim.core.program import Collective, Compute
from clustersim.engine import simulate
from clustersim.files import traces
from clustersim.files.launch import chakra, chakra_reading
from clustersim.files.traces import execution_trace
from clustersim.studies.replay.replay_program import ReplayWriter
from clustersim.studies.replay.replay_scale import AS_MEASURED, Scale
from clustersim.studies.replay.trace_replay import replay

RECORDED = Path(__file__).parent / "data" / "traces" / "gloo_et"
WIDTH = 64
BATCH = 8
LAYERS = 3

Given = list[tuple[int, list[int]]]


def node(number: int, name: str, given: Given, made: Given = (), parent: int = 1, word: str = "c10::Half") -> dict:
    """An operator; tensors are (storage, shape)."""
    sides = {
        side: {
            "values": [[s, s, 0, 1, 2, "cuda:0"] for s, _ in part],
            "shapes": [shape for _, shape in part],
            "types": [f"Tensor({word})"] * len(part),
        }
        for side, part in (("inputs", given), ("outputs", made))
    }
    attrs = [{"name": "rf_id", "type": "uint64", "value": number}]
    return {"id": number, "name": name, "ctrl_deps": parent, **sides, "attrs": attrs}


def execution(path: Path, nodes: list[dict], pid: int = 0, schema: str = "1.1.1-chakra.0.0.4") -> Path:
    path.write_text(json.dumps({"schema": schema, "pid": pid, "nodes": nodes}))
    return path


def call(number: int, name: str, pid: int = 0) -> dict[str, Any]:
    """An operator in a profile, whose kernels carry its number as their External id."""
    args = {"External id": number, "Record function id": number}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": pid, "tid": 1, "ts": 1.0, "dur": 1.0, "args": args}


def launched(ts: float, dur: float, external: int, correlation: int) -> list[dict[str, Any]]:
    events = gemm(ts, dur, ts - 500.0, correlation)
    events[0]["args"]["External id"] = external
    return events


@pytest.mark.parametrize(
    ("name", "given", "made", "flops"),
    [
        ("aten::mm", [[3, 5], [5, 7]], [[3, 7]], 2 * 3 * 5 * 7),
        ("aten::addmm", [[7], [3, 5], [5, 7]], [[3, 7]], 2 * 3 * 5 * 7),
        ("aten::bmm", [[2, 3, 5], [2, 5, 7]], [[2, 3, 7]], 2 * 2 * 3 * 5 * 7),
        ("aten::convolution", [[2, 4, 9, 9], [6, 4, 3, 3]], [[2, 6, 7, 7]], 2 * 2 * 6 * 49 * 4 * 9),
        ("aten::convolution_backward", [[2, 6, 7, 7], [2, 4, 9, 9], [6, 4, 3, 3]], [], 2 * 2 * 2 * 6 * 49 * 4 * 9),
        ("aten::_scaled_dot_product_flash_attention", [[2, 3, 8, 16]] * 3, [], 2 * (2 * 2 * 3 * 8 * 8 * 16)),
        ("aten::add", [[3, 5], [3, 5]], [[3, 5]], 0),
    ],
)
def test_flops_are_those_of_the_shapes_and_bytes_those_of_the_tensors(tmp_path, name, given, made, flops):
    sides = [[(i, shape) for i, shape in enumerate(part)] for part in (given, made)]
    _, found = execution_trace.read(execution(tmp_path / "et.json", [node(2, name, *sides)]))
    assert found[2].flops == flops
    assert found[2].nbytes == 2 * sum(np.prod(shape) for shape in (*given, *made))
    assert found[2].dtype == "fp16"


def test_callers_and_parts_of_a_product_have_its_flops_and_callers_its_memory(tmp_path):
    product = [(1, [3, 5]), (2, [5, 7])]
    nodes = [
        node(2, "aten::linear", product),
        node(3, "aten::mm", product, [(4, [3, 7])], 2),
        node(4, "aten::cuda_part", [], [], 3),
        node(5, "aten::sum", [(4, [3, 7])]),
    ]
    _, found = execution_trace.read(execution(tmp_path / "et.json", nodes))
    assert [found[i].flops for i in (2, 3, 4, 5)] == [210, 210, 210, 0]
    assert found[2].storages == {1, 2, 4}


def test_a_recorded_job_has_the_flops_of_its_model_and_the_collectives_of_its_buckets():
    run = traces.read(RECORDED)
    # Every layer's product, its weight gradient, and its input gradient but for the first layer's.
    assert sum(op.flops for op in run.ops) == 2 * BATCH * WIDTH * WIDTH * (3 * LAYERS - 1)
    reduced = {i: op for i, op in enumerate(run.ops) if op.kind == "all_reduce"}
    assert sum(op.nbytes for op in reduced.values()) == 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    for i in reduced:
        assert any(run.ops[j].name == "aten::mul" for j in run.ops[i].after)  # the gradient's share, into its bucket
        assert any(i in op.after for op in run.ops if op.kind == "compute")  # and out of it again


def test_a_profile_alone_has_neither(tmp_path):
    run = traces.read([RECORDED / "rank0.json.gz", RECORDED / "rank1.json.gz"])
    assert not any(op.flops or op.after for op in run.ops)


def test_the_program_of_a_recorded_job_is_the_same_written_as_chakra_and_read_back(tmp_path):
    program = ReplayWriter(traces.read(RECORDED), AS_MEASURED).program()
    chakra.write(program, "job", chakra.file_names(program, "job"), lambda name: tmp_path / name)
    again = chakra_reading.read([tmp_path])
    topology = fabrics.load("cpu-gloo", nodes=1)
    mesh = fabrics.mesh(topology, nproc_per_node=2)
    assert sum(isinstance(op, Collective) for role in again.roles for op in role.ops) == 2 * len(program.roles)
    ends = [simulate(p, topology, mesh, backend="gloo").makespan for p in (program, again)]
    assert ends[1] == pytest.approx(ends[0], rel=1e-9)
    for one, two in zip(program.roles, again.roles, strict=True):
        assert [(op.name, op.after) for op in one.ops] == [(op.name, op.after) for op in two.ops]
        told = [[(op.flops, op.nbytes) for op in role.ops if isinstance(op, Compute)] for role in (one, two)]
        assert told[0] == told[1]


def test_replay_takes_profiles_and_execution_traces_together():
    done = CliRunner().invoke(cli, ["replay", str(RECORDED), "--topology", "cpu-gloo", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["ranks"] == 2


def overlapped(folder: Path, *, told: bool) -> Any:
    """Two ranks: 1 ms of work, 0.5 ms of an all-reduce hidden behind 1 ms more, and a kernel that reads its result."""
    for rank in (0, 1):
        events = [
            *launched(1000, 1000, 10, 1),
            kernel(2000, 500, 7, rank, **{"External id": 11}),
            *launched(2000, 1000, 12, 3),
            *launched(3010, 100, 13, 4),
        ]
        events += [call(number, "aten::x", 100 + rank) for number in (10, 11, 12, 13)]
        save(folder / f"rank{rank}.json", events, rank)
        shapes = {10: (1, [8, 8]), 11: (1, [500]), 12: (2, [8, 8]), 13: (1, [500])}
        nodes = [node(number, "aten::add", [tensor]) for number, tensor in shapes.items()]
        if told:
            execution(folder / f"et{rank}.json", nodes, 100 + rank)
    return traces.read(folder)


@pytest.mark.parametrize("told", [False, True])
def test_a_wait_that_was_not_felt_is_kept_on_a_slower_network_where_it_is_told(tmp_path, told):
    run = overlapped(tmp_path, told=told)
    topology = fabrics.change(fabrics.load("hgx-h100", nodes=1), fabrics.Change("*", factor=1e-6))
    again = replay(run, topology, fabrics.mesh(topology, nproc_per_node=2))
    reduced = next(c.simulated_s for c in again.collectives)
    assert reduced > 5e-3
    last = max(
        again.simulated.spans()["end"][again.simulated.spans()["op"] == i].max()
        for i, op in enumerate(again.simulated.ops)
        if op.kind == "compute"
    )
    free = 2.11e-3  # 1 + 1 + 0.01 of the host + 0.1
    assert last == pytest.approx(1e-3 + reduced + 1.1e-4 if told else free, abs=2e-5)


def test_products_of_told_shapes_scale_by_what_bounds_them_on_each_gpu(tmp_path):
    square = [(1, [4096, 4096]), (2, [4096, 4096])]
    thin = [(1, [4, 4096]), (2, [4096, 4096])]
    nodes = [node(10, "aten::mm", square, [(3, [4096, 4096])]), node(11, "aten::mm", thin, [(4, [4, 4096])])]
    events = [*launched(1000, 500, 10, 1), *launched(1500, 500, 11, 2), *launched(2000, 100, 11, 3)]
    save(tmp_path / "rank0.json", [*events, call(10, "aten::mm"), call(11, "aten::mm")], world=1)
    execution(tmp_path / "et0.json", nodes)
    was = device("A100-SXM4-40GB")
    gpu = device("H100-SXM5-80GB")
    again = replay(traces.read(tmp_path), scale=Scale(was=was, gpu=gpu))
    took = [op.duration for op in again.program.roles[0].ops]
    assert took[0] == pytest.approx(5e-4 * was.matmul_rate("fp16") / gpu.matmul_rate("fp16"))
    assert took[1] == pytest.approx(5e-4 * was.stream_rate() / gpu.stream_rate())
    assert [op.flops for op in again.program.roles[0].ops] == [2 * 4096**3, 8 * 4096**2, 0]  # the longest kernel's
    assert any("fp16 products of told shapes" in line for line in again.notes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "1.0.1"}, "schema '1.0.1'"),
        ({"nodes": 3}, "nodes"),
        ({"nodes": [{"id": 1, "inputs": {"values": [3], "shapes": [3], "types": ["Tensor(float)"]}}]}, "not PyTorch's"),
        ({"pid": 99}, "none of the Kineto traces"),
    ],
)
def test_an_execution_trace_that_cannot_be_read_is_one_error(tmp_path, change, said):
    table = {"schema": "1.1.1-chakra.0.0.4", "pid": 0, "nodes": [node(2, "aten::mm", [(1, [2, 2]), (2, [2, 2])])]}
    path = tmp_path / "et.json"
    path.write_text(json.dumps(table | change))
    profile = save(tmp_path / "rank0.json", [*launched(0, 1, 2, 1), call(2, "aten::mm")], world=1)
    with pytest.raises(TraceError, match=said):
        traces.read([path, profile])


def test_execution_traces_alone_have_no_times_and_two_of_one_process_are_refused(tmp_path):
    one = RECORDED / "et0.json.gz"
    with pytest.raises(TraceError, match="add the Kineto trace"):
        traces.read(one)
    twin = tmp_path / "et9.json"
    twin.write_bytes(gzip.decompress(one.read_bytes()))
    with pytest.raises(TraceError, match="of process"):
        traces.read([one, twin, RECORDED / "rank0.json.gz"])
