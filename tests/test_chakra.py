"""Chakra traces: what is written reads back as the same Program, and others' files play as they say."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import clustersim
from clustersim.app.cli import cli
from clustersim.cluster import files as fabrics
from clustersim.cluster.routes import router
from clustersim.core.byte_matrix import byte_matrix
from clustersim.core.errors import ClusterSimError, TraceError
from clustersim.core.program import Collective, Compute, Program, Recv, Role, Send, Serve
from clustersim.engine import simulate
from clustersim.files.launch import chakra, chakra_reading
from clustersim.files.launch.chakra_schema import VERSION, attribute, framed, messages, sniff, unframed
from clustersim.files.launch.machines import astra, simgrid

pytest.importorskip("google.protobuf")


def written(program: Program, folder: Path) -> list[Path]:
    files = chakra.file_names(program, "p")
    chakra.write(program, "p", files, lambda name: folder / name)
    return [folder / name for name in files]


def small() -> Program:
    """Four ranks in two roles with every kind of op."""
    pairs = np.array([[0, 1], [2, 3]])
    uneven = byte_matrix([[0.5, 0.5], [0.25, 0.75]])
    everybody = np.arange(4).reshape(1, -1)
    first = (
        Compute("fwd", np.array([1e-4, 2.0000001e-4]), flops=1e9, nbytes=1e6, phase="forward"),
        Compute("host", 1e-5, "cpu", bound="host"),
        Collective("a2a", "all_to_all", 1e6 + 0.5, pairs, after=(0,), dtype="bf16", communicator="ep", matrix=uneven),
        Send("act", 1e5, np.array([2, 3]), "p2p", after=(0,), tag="F 0"),
        Collective("sum", "all_reduce", 3e6, everybody, step=1, after=(2,)),
    )
    second = (
        Recv("act", 1e5, np.array([0, 1]), "p2p", tag="F 0"),
        Serve("serve", 2e-4, "queue", after=(0,)),
        Collective("a2a", "all_to_all", 1e6 + 0.5, pairs, dtype="bf16", communicator="ep", matrix=uneven),
        Collective("sum", "all_reduce", 3e6, everybody, step=1, after=(1,)),
    )
    return Program(
        4,
        (Role("a", np.array([0, 1]), first, stage=0), Role("b", np.array([2, 3]), second, stage=1)),
        overlap_slowdown=0.1,
        notes=("a note",),
    )


def same_times(program: Program, other: Program, topology, mesh) -> None:
    ours, theirs = (simulate(one, topology, mesh).spans() for one in (program, other))
    for name in ("rank", "ready", "start", "end"):
        np.testing.assert_allclose(theirs[name], ours[name], rtol=0, atol=1e-9)


def test_every_kind_of_op_reads_back_and_plays_the_same(tmp_path: Path):
    program = small()
    again = chakra_reading.read(written(program, tmp_path))
    assert [(role.name, role.stage) for role in again.roles] == [("a", 0), ("b", 1)]
    assert (again.overlap_slowdown, again.notes) == (0.1, ("a note",))
    for mine, theirs in zip(program.roles, again.roles, strict=True):
        assert [(type(op), op.name, op.stream, op.after, op.step, op.label) for op in theirs.ops] == [
            (type(op), op.name, op.stream, op.after, op.step, op.label) for op in mine.ops
        ]
    assert again.roles[0].ops[2].matrix is program.roles[0].ops[2].matrix
    topology = fabrics.load("hgx-h100", nodes=1)
    same_times(program, again, topology, fabrics.mesh(topology, nproc_per_node=4))


@pytest.mark.parametrize("scenario", ["ddp_resnet50_1x8_v100", "why_slow_gpu", "1f1b_gpt2_xl_1x8_a100"])
def test_a_scenario_reads_back_and_plays_the_same(tmp_path: Path, scenario: str):
    prepared = clustersim.load(scenario, {"run.steps": 1}).prepare()
    again = chakra_reading.read(written(prepared.program, tmp_path))
    assert len(again.roles) == len(prepared.program.roles)
    same_times(prepared.program, again, prepared.topology, prepared.mesh)


def test_one_file_stands_for_all_with_its_groups_beside_one_another(tmp_path: Path):
    groups = np.array([[0, 2], [1, 3]])
    ops = (Compute("fwd", 1e-4), Collective("sum", "all_reduce", 1e6, groups, after=(0,)))
    program = Program(4, (Role("worker", np.arange(4), ops),))
    again = chakra_reading.read(written(program, tmp_path)[:1])
    assert again.world_size == 4
    assert sorted(again.roles[0].ops[1].groups.tolist()) == groups.tolist()
    topology = fabrics.load("dgx-a100", nodes=1)
    same_times(program, again, topology, fabrics.mesh(topology, nproc_per_node=4))


def foreign(path: Path, *nodes: dict, version: str = VERSION) -> Path:
    """A file with Chakra's own attributes only."""
    kinds = messages()
    data = framed(kinds["GlobalMetadata"](version=version))
    for number, node in enumerate(nodes):
        attrs = [attribute(name, kind, value) for name, (kind, value) in node.get("attrs", {}).items()]
        rest = {key: value for key, value in node.items() if key != "attrs"}
        data += framed(kinds["Node"](**{"id": number, "attr": attrs, **rest}))
    path.write_bytes(data)
    return path


def test_a_file_of_somebody_else_plays_in_the_order_of_its_dependencies(tmp_path: Path):
    size = ("uint64", 1 << 20)
    summed = ("int64", 0)
    nodes = [
        {"name": "grads", "type": 7, "data_deps": [1], "attrs": {"comm_type": summed, "comm_size": size}},
        {"name": "fwd", "type": 4, "duration_micros": 500, "attrs": {"is_cpu_op": ("bool", False)}},
        {"name": "load", "type": 2, "ctrl_deps": [1], "duration_micros": 7},
        {"name": "step", "type": 4, "data_deps": [0, 2], "duration_micros": 20},
    ]
    program = chakra_reading.read([foreign(tmp_path / f"x.{rank}.et", *nodes) for rank in range(2)])
    ops = program.roles[0].ops
    assert [op.name for op in ops] == ["fwd", "grads", "load", "step"]
    assert ops[3].after == (1, 2)
    assert ops[1].groups.tolist() == [[0, 1]]
    assert program.notes == ("2 nodes of type MEM_LOAD_NODE: as long as their duration",)
    topology = fabrics.load("dgx-a100", nodes=1)
    run = simulate(program, topology, fabrics.mesh(topology, nproc_per_node=2))
    assert run.makespan > 520e-6


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([{"data_deps": [1], "type": 4}, {"data_deps": [0], "type": 4}], "waits for itself"),
        ([{"type": 7, "attrs": {"pg_name": ("string", "9")}}], "process group '9' is not listed"),
        ([{"type": 7, "attrs": {"comm_type": ("int64", 77)}}], "attribute cannot be read"),
        ([{"type": 7, "attrs": {"comm_size": ("int64", -1)}}], "comm_size"),
        ([{"type": 4, "attrs": {"clustersim": ("string", "{")}}], "is damaged"),
        ([{"type": 1, "inputs": {"values": "[[["}}], "process groups cannot be read"),
        ([{"type": 4}, {"type": 4, "id": 0}], "is there twice"),
    ],
)
def test_a_damaged_graph_is_one_clear_error(tmp_path: Path, nodes: list[dict], said: str):
    with pytest.raises(TraceError, match=re.escape(said)):
        chakra_reading.read([foreign(tmp_path / "x.0.et", *nodes)])


def test_files_cut_off_missing_twice_or_of_another_version_are_refused(tmp_path: Path):
    paths = written(small(), tmp_path)
    with pytest.raises(TraceError, match="no file of rank 3"):
        chakra_reading.read(paths[:3])
    (tmp_path / "again.0.et").write_bytes(paths[0].read_bytes())
    with pytest.raises(TraceError, match="rank 0 again"):
        chakra_reading.read([*paths, tmp_path / "again.0.et"])
    paths[0].write_bytes(paths[0].read_bytes()[:-3])
    with pytest.raises(TraceError, match="cut off"):
        chakra_reading.read(paths)
    with pytest.raises(TraceError, match=r"version '1\.4\.0'"):
        chakra_reading.read([foreign(tmp_path / "new.0.et", version="1.4.0")])


def test_the_command_writes_traces_with_astra_sims_files_and_plays_them(tmp_path: Path):
    out = tmp_path / "out"
    done = CliRunner().invoke(cli, ["export", "ddp_resnet50_1x8_v100", "--chakra", str(out)])
    assert done.exit_code == 0, done.output
    assert "--workload-configuration=ddp_resnet50_1x8_v100" in done.output
    assert sorted(path.suffix for path in out.iterdir()) == [".et"] * 8 + [".json"] * 3 + [".yml"]
    nodes = list(unframed((out / "ddp_resnet50_1x8_v100.5.et").read_bytes(), "x"))
    assert nodes[0].version == VERSION
    played = CliRunner().invoke(cli, ["replay", str(out), "--topology", "dgx-1v", "--json"])
    run = clustersim.load("ddp_resnet50_1x8_v100").run()
    assert json.loads(played.stdout)["totals"]["window_s"] == pytest.approx(run.timeline.makespan, rel=1e-9)
    bare = CliRunner().invoke(cli, ["replay", str(out)])
    assert isinstance(bare.exception, ClusterSimError)
    assert "needs a --topology" in str(bare.exception)


@pytest.mark.parametrize(
    ("name", "nodes", "shapes", "rates"),
    [
        ("hgx-h100", 2, ["Switch", "Switch"], [450, 50]),
        ("dgx-1v", 1, ["Ring"], [150]),
        ("pcie-l4", 1, ["Switch"], None),
    ],
)
def test_astra_sims_network_has_the_bandwidth_of_a_gpu(name, nodes, shapes, rates):
    topology = fabrics.load(name, nodes=nodes)
    mesh = fabrics.mesh(topology)
    files = astra(topology, mesh, {3: [0, 1]})
    lines = dict(line.split(":") for line in files["network.yml"].decode().splitlines())
    cells = {key: [cell.strip() for cell in text.split("#")[0].strip(" []").split(",")] for key, text in lines.items()}
    assert cells["topology"] == shapes
    assert np.prod([int(n) for n in cells["npus_count"]]) == mesh.world_size
    assert rates is None or [float(rate) for rate in cells["bandwidth"]] == rates
    system = json.loads(files["system.json"])
    assert len(system["all-reduce-implementation"]) == len(shapes)
    assert json.loads(files["comm_group.json"]) == {"3": [0, 1]}


def test_simgrids_platform_has_the_routes_that_transfers_take_here(tmp_path: Path):
    """By itself SimGrid goes from GPU 0 to GPU 1 over PCIe, and over one NVSwitch of six."""
    topology = fabrics.load("dgx-a100", nodes=2)
    zone = ET.fromstring(simgrid(topology)).find("zone")
    assert zone.get("routing") == "Full"
    hosts = [v for v, kind in enumerate(topology.vertex_kinds) if kind in ("gpu", "cpu")]
    assert [element.get("id") for element in zone.iter("host")] == [topology.vertex_names[v] for v in hosts]
    told = {(route.get("src"), route.get("dst")): [part.get("id") for part in route] for route in zone.iter("route")}
    assert len(told) == len(hosts) * (len(hosts) - 1)
    rates = {link.get("id"): float(link.get("bandwidth").removesuffix("Bps")) for link in zone.iter("link")}
    hops = {link.get("id"): float(link.get("latency").removesuffix("s")) for link in zone.iter("link")}
    ways = router(topology)
    own = topology.link_bandwidth
    every_gpu = dict.fromkeys(rates, 0.0)
    inside = []
    for (src, dst), crossed in told.items():
        a, b = topology.vertex(src), topology.vertex(dst)
        route = list(ways.route(a, b))
        assert sum(hops[link] for link in crossed) == pytest.approx(topology.link_latency[route].sum())
        if topology.vertex_node[a] != topology.vertex_node[b]:  # one of the near NICs, as one flow has it
            assert min(rates[link] for link in crossed) == own[route].min()
            continue
        links, shares = ways.loads(a, b, 1.0)
        assert min(rates[link] for link in crossed) == pytest.approx((own[links] / shares).min())
        if src.startswith("node0/gpu") and dst.startswith("node0/gpu"):
            inside.append((a, b))
            every_gpu |= {link: every_gpu[link] + 1.0 for link in crossed}
    links, loads = ways.loads(*np.array(inside).T, 1.0)
    slowest = max(every_gpu[link] / rates[link] for link in rates)
    assert slowest == pytest.approx((loads / own[links]).max())  # all pairs of a node at once share what they share
    assert sum(rates.values()) == pytest.approx(own.sum())  # each link is in one bundle
    out = tmp_path / "platform.xml"
    done = CliRunner().invoke(cli, ["export", "ddp_resnet50_1x8_v100", str(out)])
    assert done.exit_code == 0, done.output
    assert ET.parse(out).getroot().get("version") == "4.1"


def test_a_changed_scenario_of_the_same_name_is_not_written_over_what_another_wrote(tmp_path):
    told = (Path(__file__).parents[1] / "scenarios" / "ddp_resnet50_1x8_v100.toml").read_text()
    file = tmp_path / "mine.toml"
    out = tmp_path / "out"
    for steps, code in ((4, 0), (4, 0), (7, 2)):
        file.write_text(told.replace("steps = 4", f"steps = {steps}"))
        done = CliRunner().invoke(cli, ["export", str(file), "--chakra", str(out)], standalone_mode=False)
        assert (done.exception is None) == (code == 0), (steps, done.output, done.exception)
    assert "holds another export" in str(done.exception)


# ---- files of converters ---------------------------------------------------------------------------------------------


def metadata(kind: str) -> bytes:
    """GlobalMetadata as releases of Chakra's converter write it."""
    schema = attribute("schema", "string", "1.1.1-chakra.0.0.4")
    clock = attribute("pid", "uint64", 4711)
    if kind == "earlier":
        return framed(messages()["EarlierMetadata"](attr=[schema, clock]))
    said = {
        "version": {"version": VERSION},
        "none": {},
        "attributes": {"attr": [schema, clock]},
        "both": {"version": VERSION, "attr": [clock]},
    }
    return framed(messages()["GlobalMetadata"](**said[kind]))


@pytest.mark.parametrize("kind", ["version", "none", "attributes", "both", "earlier"])
def test_converters_of_every_schema_version_are_read(tmp_path: Path, kind: str):
    node = messages()["Node"]
    nodes = [
        node(id=1, name="fwd", type=4, duration_micros=1000),
        node(id=2, name="bwd", type=4, duration_micros=2000, ctrl_deps=[1]),
    ]
    path = tmp_path / "chakra.0.et"
    path.write_bytes(metadata(kind) + b"".join(map(framed, nodes)))
    done = CliRunner().invoke(cli, ["replay", str(path), "--topology", "dgx-h100", "--json"])
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["totals"]["window_s"] == pytest.approx(3e-3, rel=1e-3)


def test_trace_says_what_plays_a_program(tmp_path: Path):
    path = tmp_path / "chakra.0.et"
    path.write_bytes(metadata("attributes") + framed(messages()["Node"](id=1, name="fwd", type=4, duration_micros=1)))
    done = CliRunner().invoke(cli, ["trace", str(path)])
    assert "`clustersim replay` plays" in str(done.exception)


def test_another_schema_is_refused_by_its_name(tmp_path: Path):
    path = tmp_path / "chakra.0.et"
    schema = attribute("schema", "string", "1.1.1-chakra.1.2.0")
    node = framed(messages()["Node"](id=1, name="fwd", type=4, duration_micros=1))
    path.write_bytes(framed(messages()["GlobalMetadata"](attr=[schema])) + node)
    with pytest.raises(TraceError, match=r"version '1\.2\.0'"):
        chakra_reading.read([path])


@pytest.mark.parametrize(
    "data",
    [
        b"# nThread 1",
        b'{"traceEvents": []}',
        b"\x80\x02}(X",
        b"PK\x03\x04",
        b"\x1f\x8b",
        b"step,rank,op\n1,2,3\n",
        bytes(range(256)) * 4,
        b"\n\nhello there\n",
    ],
)
def test_what_is_no_chakra_trace_is_not_taken_for_one(data: bytes):
    assert not sniff(data)


# ---- layouts of 2022 and 2023 ----------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    data = bytearray()
    while number >= 0x80:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def wire(number: int, value: int | bytes) -> bytes:
    """A field: a whole number, or bytes behind their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def packed(*parts: bytes) -> bytes:
    return b"".join(varint(len(part)) + part for part in parts)


def of_2022() -> bytes:
    """A computation of 3 us and two collectives behind it, by mlcommons/chakra-old's et_def.proto."""
    work = wire(1, 1) + wire(2, b"fwd") + wire(3, 4) + wire(7, 3000) + wire(12, 77)
    reduce = wire(1, 2) + wire(2, b"sum") + wire(3, 7) + wire(4, 1) + wire(13, 1) + wire(14, 1) + wire(18, 4096)
    gather = wire(1, 3) + wire(2, b"gather") + wire(3, 7) + wire(4, 2) + wire(13, 3) + wire(18, 1024)
    return packed(work, reduce, gather)


def of_2023() -> bytes:
    """The same by the first et_def.proto of mlcommons/chakra, whose attributes have types."""

    def told(name: str, value: int) -> bytes:
        return wire(11, wire(1, name.encode()) + wire(2, 3) + wire(7, value))

    work = wire(1, 1) + wire(2, b"fwd") + wire(3, 4) + told("runtime", 3) + told("num_ops", 77)
    reduce = wire(1, 2) + wire(2, b"sum") + wire(3, 7) + wire(4, 1) + told("comm_type", 0) + told("comm_size", 4096)
    gather = wire(1, 3) + wire(2, b"gather") + wire(3, 7) + wire(4, 2) + told("comm_type", 2) + told("comm_size", 1024)
    return packed(wire(1, wire(1, b"schema") + wire(2, 4) + wire(8, b"1.0.1")), work, reduce, gather)


@pytest.mark.parametrize(("data", "year"), [(of_2022(), "2022"), (of_2023(), "2023")])
def test_earlier_layouts_are_the_same_program_and_say_what_was_taken_for_granted(
    tmp_path: Path, data: bytes, year: str
):
    assert sniff(data[:4096])
    path = tmp_path / "p.0.et"
    path.write_bytes(data)
    program = chakra_reading.read([path], world=4)
    work, reduce, gather = program.roles[0].ops
    assert isinstance(work, Compute)
    assert (work.duration, work.flops) == (pytest.approx(3e-6), 77)
    assert [(op.kind, op.nbytes, op.after) for op in (reduce, gather)] == [
        ("all_reduce", 4096, (0,)),
        ("all_gather", 4 * 1024, (1,)),
    ]
    assert any(f"a Chakra file of {year}" in note for note in program.notes)


@pytest.mark.parametrize("data", [of_2022(), of_2023()])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_earlier_layouts_cut_off_or_of_unknown_collectives_are_one_clear_error(
    tmp_path: Path, data: bytes, share: float
):
    path = tmp_path / "p.0.et"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(TraceError):
        chakra_reading.read([path], world=4)
    at = data.rindex(wire(13, 3) if wire(13, 3) in data else wire(7, 2)) + 1
    path.write_bytes(data[:at] + b"\x1f" + data[at + 1 :])
    with pytest.raises(TraceError, match="node 3: an attribute cannot be read"):
        chakra_reading.read([path], world=4)


def test_a_run_time_that_is_an_attribute_is_the_nodes(tmp_path: Path):
    node = messages()["Node"](id=1, name="fwd", type=4, attr=[attribute("runtime", "uint64", 250)])
    path = tmp_path / "p.0.et"
    path.write_bytes(framed(messages()["GlobalMetadata"](version=VERSION)) + framed(node))
    assert chakra_reading.read([path]).roles[0].ops[0].duration == pytest.approx(250e-6)


# ---- what the jsonizer writes, and files of one rank -----------------------------------------------------------------


def four(path: Path) -> Path:
    """A rank of four, as chakra's converter writes it: its groups are listed, its world is not."""
    listed = json.dumps([{"pg_name": "0", "ranks": [0, 1, 2, 3]}])
    nodes = [
        {"type": 1, "inputs": {"values": str([listed])}},
        {"name": "fwd", "type": 4, "duration_micros": 500},
        {
            "name": "grads",
            "type": 7,
            "data_deps": [1],
            "attrs": {
                "comm_type": ("int64", 0),
                "comm_size": ("int64", 1 << 20),
                "pg_name": ("string", "0"),
            },
        },
    ]
    return foreign(path, *nodes)


def jsonized(path: Path, snake: bool = False) -> Path:
    from google.protobuf.json_format import MessageToJson

    parts = unframed(path.read_bytes(), str(path))
    made = path.with_name(path.name.replace(".et", ".json"))
    made.write_text("".join(MessageToJson(part, preserving_proto_field_name=snake) + "\n" for part in parts))
    return made


def test_one_rank_of_others_files_has_the_world_that_its_groups_name(tmp_path: Path):
    program = chakra_reading.read([four(tmp_path / "x.0.et")])
    assert program.world_size == 4
    assert program.roles[0].ops[1].groups.tolist() == [[0, 1, 2, 3]]
    with pytest.raises(TraceError, match=r"no file of rank 2 \(2 of 4 missing\)"):
        chakra_reading.read([four(tmp_path / f"x.{rank}.et") for rank in (0, 1)])


@pytest.mark.parametrize("snake", [False, True])
def test_what_the_jsonizer_writes_is_the_same_program(tmp_path: Path, snake: bool):
    packed_files = [four(tmp_path / f"x.{rank}.et") for rank in range(4)]
    program = chakra_reading.read(packed_files)
    texts = [jsonized(path, snake) for path in packed_files]
    assert sniff(texts[0].read_bytes())
    again = chakra_reading.read(texts)
    assert [op.name for op in again.roles[0].ops] == [op.name for op in program.roles[0].ops]
    topology = fabrics.load("dgx-a100", nodes=1)
    same_times(program, again, topology, fabrics.mesh(topology, nproc_per_node=4))


def test_a_jsonized_file_that_is_cut_off_is_one_clear_error(tmp_path: Path):
    path = jsonized(four(tmp_path / "x.0.et"))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(TraceError, match="cut off, or no JSON"):
        chakra_reading.read([path])
