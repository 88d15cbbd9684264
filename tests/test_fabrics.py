"""Topology files and builders: every shipped file is a sound machine, and every mistake has one clear error."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim import collectives
from clustersim.cluster import files as fabrics
from clustersim.cluster import routes as routing
from clustersim.cluster.files import Change, reading, schema
from clustersim.collectives.base import Group, Request
from clustersim.core.errors import TopologyError
from clustersim.core.paths import data_path, shipped
from clustersim.core.topology import Topology
from clustersim.scenario import from_table as scenario_from_table
from tests.tables import table_rows

NAMES = shipped("topologies")
FACTS = Path(__file__).parents[1].parent / "shared" / "facts"
MEASUREMENTS = Path(__file__).parents[1].parent / "shared" / "measurements"

LINK_RATES = {  # bytes/s per direction of one NVLink (or xGMI) of a generation of GPUs, by NVIDIA's and AMD's sheets
    "gfx908": 46e9,
    "gfx90a": 50e9,
    "sm60": 20e9,
    "sm70": 25e9,
    "sm75": 25e9,
    "sm80": 25e9,
    "sm86": 14.0625e9,
    "sm90": 25e9,
    "sm100": 50e9,
    "sm103": 50e9,
    "gfx942": 64e9,
    "gfx950": 76.8e9,
}
ON_A_BOARD = re.compile("SXM|GH200|GB200|GB300|MI3")
"""GPUs that are never without their links; others have them where a bridge joins two cards."""
PARTLY_WIRED = {"hgx-v100-4gpu-10g"}  # half of a DGX-1V board: links to the other half end nowhere


# ---- every shipped file -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_a_shipped_topology_loads_with_any_number_of_nodes(name: str, nodes: int) -> None:
    topology = fabrics.load(name, nodes)
    assert topology.n_nodes == nodes
    assert topology.name == name
    assert len(topology.gpus) == nodes * topology.node_types[0].n_gpus
    assert len(topology.nics) == nodes * topology.node_types[0].n_nics
    assert np.all(topology.link_bandwidth > 0)
    assert np.all(topology.link_latency > 0)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_a_shipped_file_has_a_source(name: str) -> None:
    spec = reading.read(data_path("topologies") / f"{name}.toml")
    entries = [*(spec.node.links if spec.node else []), *(spec.domain.links if spec.domain else [])]
    entries += [vertex for vertex in (spec.node.vertices if spec.node else []) if vertex.bandwidth is not None]
    assert all(len(entry.source) > 5 for entry in entries)
    assert spec.fabric is None or isinstance(spec.fabric, schema.NoFabric) or spec.fabric.source
    assert fabrics.load(name).node_types[0].sources["device"]
    assert spec.title


@pytest.mark.parametrize("name", NAMES)
def test_gpus_of_a_shipped_topology_all_reach_each_other_and_nothing_looks_wrong(name: str) -> None:
    for nodes in (1, 2):
        report = fabrics.check(fabrics.load(name, nodes))
        joined = nodes == 1 or "nic" in report.vertices
        assert (report.n_unreachable == 0) is joined
        assert (report.warnings == ()) is joined
        alone = report.vertices.get("gpu", report.vertices["cpu"]) == 1
        assert np.all(report.injection_bandwidth > 0) or alone
        assert report.bisection_bandwidth > 0 or not joined or alone


@pytest.mark.parametrize("name", NAMES)
def test_nvlinks_of_a_gpu_sum_to_its_data_sheet(name: str) -> None:
    topology = fabrics.load(name)
    rates = {routing.router(topology).nvlink_egress(gpu) for gpu in topology.gpus.tolist()}
    gpu = topology.node_types[0].gpu
    known = gpu.nvlink_links * LINK_RATES[gpu.arch] if gpu.nvlink_links else 0.0
    if rates == {0.0} and not ON_A_BOARD.search(gpu.name):
        return
    if name in PARTLY_WIRED:
        assert max(rates) < known
    else:
        assert [pytest.approx(known, rel=1e-6)] * len(rates) == sorted(rates)


@pytest.mark.parametrize("name", NAMES)
def test_loading_twice_gives_the_same_arrays(name: str) -> None:
    one = fabrics.load(name, 3)
    two = fabrics.load(name, 3)
    assert one.vertex_names == two.vertex_names
    assert np.array_equal(one.link_src, two.link_src)
    assert np.array_equal(one.link_bandwidth, two.link_bandwidth)


def test_geforces_reach_each_other_through_the_host_whoever_names_them(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "mine"\nextends = "pcie-a6000"\n[node]\ndevice = "RTX-3080"\n')
    assert fabrics.load("pcie-a6000").node_types[0].p2p
    assert not fabrics.load(str(mine)).node_types[0].p2p
    assert not fabrics.load("pcie-a6000", device="RTX-4090").node_types[0].p2p
    assert fabrics.load("pcie-rtx4090", device="RTX-A6000").node_types[0].p2p
    mine.write_text(mine.read_text() + "p2p = true\n")  # a patched driver
    assert fabrics.load(str(mine)).node_types[0].p2p


@pytest.mark.skipif(not FACTS.is_dir(), reason="needs ../shared")
def test_every_platform_of_the_table_is_shipped() -> None:
    text = (FACTS / "PLATFORMS.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")][2:]
    words = {word for row in rows for word in re.findall(r"[a-z][a-z0-9]+(?:-[a-z0-9]+)+", row)}
    expected = {
        w for w in words if w.split("-")[0] in {"hgx", "dgx", "aws", "pcie", "nvlink", "alps", "polaris", "gb200"}
    }
    expected |= {"pcie-rtx3090", "pcie-a6000", "pcie-rtx6000ada", "pcie-rtx8000", "pcie-a10", "pcie-l4"}
    expected |= {"gcp-a3-ultra", "gcp-a4", "gcp-a3-mega", "gcp-a3-high", "hgx-v100-4gpu-4x100g", "dgx-1v-2x100g"}
    assert len(expected) > 35
    assert expected <= set(NAMES)


@pytest.mark.skipif(not MEASUREMENTS.is_dir(), reason="needs ../shared")
@pytest.mark.parametrize("table", ["nccl_tests.csv", "training_steps.csv"])
def test_every_topology_a_measurement_names_is_shipped(table: str) -> None:
    named = {row["topology"] for row in table_rows(MEASUREMENTS / table)} - {""}
    assert named <= set(NAMES)


# ---- loading -------------------------------------------------------------------------------------------------------


def test_an_alias_is_the_same_machine_under_another_name() -> None:
    alias = fabrics.load("dgx-a100", 2)
    base = fabrics.load("hgx-a100", 2)
    assert alias.vertex_names == base.vertex_names
    assert np.array_equal(alias.link_bandwidth, base.link_bandwidth)
    assert alias.node_types[0].name == "dgx-a100"


def test_another_gpu_in_the_same_sockets() -> None:
    topology = fabrics.load("hgx-a100", 2, device="A100-SXM4-40GB")
    assert {t.device for t in topology.node_types} == {"A100-SXM4-40GB"}


def test_a_mesh_takes_the_first_gpus_of_the_first_nodes() -> None:
    topology = fabrics.load("hgx-h100", 3)
    mesh = fabrics.mesh(topology, nodes=2, nproc_per_node=4)
    names = [topology.vertex_names[v] for v in mesh.gpus]
    assert names == [f"node{n}/gpu{g}" for n in range(2) for g in range(4)]
    assert fabrics.mesh(topology).world_size == 24
    with pytest.raises(TopologyError, match="4 nodes asked for; the cluster has 3"):
        fabrics.mesh(topology, nodes=4)
    with pytest.raises(TopologyError, match=r"9 GPUs a node asked for; node 0 \(hgx-h100\) has 8"):
        fabrics.mesh(topology, nproc_per_node=9)


def test_large_clusters_build() -> None:
    assert len(fabrics.load("hgx-h100", 128).gpus) == 1024
    assert len(fabrics.load("hgx-h100", 2048).gpus) == 16384


# ---- builders ------------------------------------------------------------------------------------------------------


def degree(topology: Topology, prefix: str) -> set[int]:
    out = np.bincount(topology.link_src, minlength=len(topology.vertex_names))
    return {int(out[i]) for i, name in enumerate(topology.vertex_names) if name.startswith(prefix)}


def up(topology: Topology, leaf: str, prefix: str) -> float:
    return float(
        sum(
            topology.link_bandwidth[i]
            for i in np.flatnonzero(topology.link_src == topology.vertex(leaf))
            if topology.vertex_names[topology.link_dst[i]].startswith(prefix)
        )
    )


def test_one_switch_joins_every_nic() -> None:
    topology = fabrics.one_switch([fabrics.node("hgx-h100")] * 3)
    assert degree(topology, "switch") == {24}


def test_rail_optimised_puts_nic_i_of_a_unit_on_its_leaf_i() -> None:
    topology = fabrics.rail_optimised([fabrics.node("hgx-h100")] * 6, nodes_per_unit=4)
    leaf = {
        topology.vertex_names[a]: topology.vertex_names[b]
        for a, b in zip(topology.link_src, topology.link_dst, strict=True)
        if topology.vertex_names[b].startswith("leaf")
    }
    assert leaf["node0/nic3"] == leaf["node3/nic3"] != leaf["node4/nic3"] == leaf["node5/nic3"]
    assert len({leaf[f"node0/nic{i}"] for i in range(8)}) == 8
    assert up(topology, "leaf0", "spine") == pytest.approx(4 * 50e9)


def test_rail_optimised_grows_a_third_tier() -> None:
    topology = fabrics.rail_optimised([fabrics.node("hgx-h100")] * 40, radix=8)
    assert any(name.startswith("core") for name in topology.vertex_names)
    assert routing.unreachable_pairs(topology)[0] == 0
    routes = routing.router(topology)
    same_rail = routes.route(topology.vertex("node0/gpu0"), topology.vertex("node4/gpu0"))
    assert not any("core" in topology.link_name(link) for link in same_rail)


@pytest.mark.parametrize("ratio", [1.0, 2.0, 3.0])
def test_an_oversubscribed_leaf_sends_up_that_much_less(ratio: float) -> None:
    topology = fabrics.fat_tree([fabrics.node("hgx-h100")] * 12, radix=16, oversubscription=ratio)
    down = round(16 * ratio / (1 + ratio))
    assert up(topology, "leaf0", "spine") == pytest.approx(down * 50e9 / ratio)


def test_a_three_tier_fat_tree_keeps_full_bisection() -> None:
    topology = fabrics.fat_tree([fabrics.node("hgx-h100")] * 16, radix=8, levels=3)
    assert {name[:4] for name in topology.vertex_names} >= {"leaf", "core"}
    assert routing.bisection_bandwidth(topology) == pytest.approx(8 * 8 * 50e9)


def test_a_fat_tree_that_is_too_small_says_what_it_holds() -> None:
    with pytest.raises(TopologyError, match="a 2-tier fat tree of radix 4 holds 8 NICs, not 16"):
        fabrics.fat_tree([fabrics.node("hgx-h100")] * 2, radix=4, levels=2)


SHAPE = {"switches_per_group": 4, "nics_per_switch": 4, "global_links_per_switch": 4}


@pytest.mark.parametrize("way", ["adaptive", "destination"])
def test_a_dragonfly_joins_all_switches_of_a_group_and_all_groups(way: str) -> None:
    topology = fabrics.dragonfly([fabrics.node("alps-gh200")] * 12, routing=way, **SHAPE)
    groups = {name.split("/")[0] for name in topology.vertex_names if name.startswith("group")}
    assert groups == {"group0", "group1", "group2"}
    routes = routing.router(topology)
    longest = max(len(routes.route(topology.gpus[0], gpu)) for gpu in topology.gpus[4:].tolist())
    assert longest <= 2 + 2 + 3 + 2  # to the NIC, onto a switch, three switch hops, back


def test_links_of_a_dragonfly_are_pooled_by_adaptive_routing() -> None:
    nodes = [fabrics.node("alps-gh200")] * 12
    minimal, adaptive = (fabrics.dragonfly(nodes, routing=way, **SHAPE) for way in ("destination", "adaptive"))
    assert up(minimal, "group0/switch0", "group1") == pytest.approx(25e9 * 4 / 2)
    assert up(adaptive, "group0/local", "group1") == pytest.approx(4 * 25e9 * 4 / 2)
    assert up(minimal, "group0/switch0", "group0/switch1") == pytest.approx(25e9)
    assert up(adaptive, "group0/switch0", "group0/local") == pytest.approx(25e9 * 4 / 2)


def test_adaptive_routing_keeps_what_a_leaf_of_a_tree_sends_up() -> None:
    nodes = [fabrics.node("hgx-h100")] * 16
    for build, knobs in ((fabrics.fat_tree, {"radix": 8, "levels": 3}), (fabrics.rail_optimised, {"radix": 8})):
        static, adaptive = (build(nodes, routing=way, **knobs) for way in ("destination", "adaptive"))
        assert up(adaptive, "leaf0", "") == pytest.approx(up(static, "leaf0", ""))
        assert routing.bisection_bandwidth(adaptive) == pytest.approx(routing.bisection_bandwidth(static))


@pytest.mark.parametrize("platform", ["alps-gh200", "polaris-a100"])
def test_a_ring_over_slingshot_switches_is_as_fast_as_under_one(platform: str) -> None:
    """Measured on Alps (n4, n8 of 1 GiB): 22.1 and 22.7 ms. One cable between two switches would make it four times."""
    times = [time_of(fabrics.load(platform, nodes)) for nodes in (4, 16)]
    assert times[1] < 1.2 * times[0]


def time_of(machine: Topology) -> float:
    """Seconds of a large all_reduce over all GPUs."""
    group = Group(machine, machine.gpus)
    plan = collectives.plan(Request("all_reduce", 2.0**30), group, backend="nccl")
    return plan.time(machine.link_bandwidth)


@pytest.mark.parametrize("knob", [{"oversubscription": 0}, {"radix": 1}])
def test_senseless_knobs_are_refused(knob: dict[str, Any]) -> None:
    with pytest.raises(TopologyError, match="must be above zero"):
        fabrics.fat_tree([fabrics.node("hgx-h100")], **knob)


# ---- changes -------------------------------------------------------------------------------------------------------


def test_a_degraded_nic_is_slower_in_all_its_links_and_injects_less() -> None:
    topology = fabrics.load("hgx-h100", 2)
    slow = fabrics.change(topology, Change("node1/nic0", factor=0.5))
    assert routing.router(slow).nic_bandwidth(slow.vertex("node1/nic0")) == 25e9
    injection = routing.injection_bandwidth(slow)
    assert injection[8] == 25e9
    assert np.all(np.delete(injection, 8) == 50e9)


def test_a_leaf_that_is_down_takes_its_rail_and_traffic_goes_by_others() -> None:
    topology = fabrics.load("hgx-h100", 2)
    down = fabrics.change(topology, Change("leaf0", remove=True))
    routes = routing.router(down)
    assert len(routes.nics_of_node(0)) == 7
    assert routing.unreachable_pairs(down)[0] == 0
    src = down.vertex("node0/gpu0")
    dst = down.vertex("node1/gpu0")
    assert not any("nic0" in down.link_name(link) for link in routes.route(src, dst, rail=0))


def test_a_missing_nic_leaves_the_other_rails_where_they_were() -> None:
    topology = fabrics.change(fabrics.load("hgx-h100", 2), Change("node0/nic0", remove=True))
    routes = routing.router(topology)
    assert (topology.node_types[0].n_nics, topology.node_types[1].n_nics) == (7, 8)
    src = topology.vertex("node0/gpu3")
    dst = topology.vertex("node1/gpu3")
    for rail in range(1, 8):
        visited = " ".join(topology.link_name(link) for link in routes.route(src, dst, rail=rail))
        assert f"node0/nic{rail}" in visited
        assert f"node1/nic{rail}" in visited
        assert "spine" not in visited
    assert "spine" in " ".join(topology.link_name(link) for link in routes.route(src, dst, rail=0))


def test_globs_and_links_can_be_changed() -> None:
    topology = fabrics.load("hgx-h100", 1)
    changed = fabrics.change(
        topology,
        Change("node0/gpu0 -> node0/nvswitch*", factor=0.5),
        Change("node0/pcie? <-> node0/cpu*", bandwidth=1e9),
    )
    assert routing.router(changed).nvlink_egress(changed.vertex("node0/gpu0")) == pytest.approx(225e9)
    assert routing.router(changed).nvlink_egress(changed.vertex("node0/gpu1")) == pytest.approx(450e9)
    assert (changed.link_bandwidth == 1e9).sum() == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Change("node0/nic9", factor=0.5), "no vertex matches 'node0/nic9'; there are node0/nic0, node0/nic1"),
        (Change("leaf99", remove=True), "no vertex matches 'leaf99'; did you mean 'leaf"),
        (Change("node0/gpu0 -> node1/gpu0", factor=0.5), "no link matches"),
        (Change("node0/gpu3 - node0/nvswitch0", remove=True), "a link is written 'node0/gpu3 -> node0/nvswitch0'"),
        (Change("node0/nic0", factor=0.0), "must be above zero; use remove"),
        (Change("node0/nic0"), "needs one of factor, bandwidth or remove"),
    ],
)
def test_a_change_that_meets_nothing_is_an_error(change: Change, message: str) -> None:
    with pytest.raises(TopologyError, match=re.escape(message)):
        fabrics.change(fabrics.load("hgx-h100", 2), change)


# ---- files of one's own --------------------------------------------------------------------------------------------

OWN = """
name = "mine"
[node]
device = "H100-SXM5-80GB"
[[node.vertices]]
names = "gpu[0-1]"
kind = "gpu"
[[node.vertices]]
names = "nic0"
kind = "nic"
bandwidth = "400 Gb/s"
source = "here"
[[node.links]]
a = "gpu[0-1]"
b = "nic0"
kind = "pcie"
bandwidth = "63 GB/s"
latency = "150 ns"
source = "here"
[fabric]
kind = "one_switch"
source = "here"
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_of_ones_own_loads_by_path(tmp_path: Path) -> None:
    topology = fabrics.load(write(tmp_path, OWN), 4)
    assert len(topology.gpus) == 8
    assert topology.link_latency.min() == pytest.approx(150e-9)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('device = "H', 'devise = "H', "unknown field 'devise' at $.node; did you mean 'device'?"),
        ('bandwidth = "63 GB/s"', "bandwidth = 63", "63 is a bare number where a bandwidth is needed"),
        ('bandwidth = "63 GB/s"', "bandwidth = 63", "$.node.links[0].bandwidth"),
        ('bandwidth = "63 GB/s"', 'bandwidth = "63 Gigs"', "cannot read '63 Gigs' as a bandwidth"),
        ('latency = "150 ns"', 'latency = "150 GB/s"', "cannot read '150 GB/s' as a time"),
        ('kind = "pcie"', 'kind = "pci"', "'pci' is no kind at $.node.links[0].kind; did you mean 'pcie'?"),
        (
            'kind = "one_switch"',
            'kind = "one_swich"',
            "'one_swich' is no kind at $.fabric.kind; did you mean 'one_switch'?",
        ),
        (
            'kind = "one_switch"',
            'kind = "fat_tree"\nradx = 3',
            "unknown field 'radx' at $.fabric; did you mean 'radix'?",
        ),
        ('b = "nic0"', 'b = "nik0"', "$.node.links[0].b: no vertex 'nik0'; did you mean 'nic0'?"),
        ('a = "gpu[0-1]"', 'a = "gpu[1-0]"', "$.node.links[0].a: cannot read the names 'gpu[1-0]'"),
        ('names = "gpu[0-1]"', 'names = "gpu[0-1"', "$.node.vertices[0].names: cannot read the names 'gpu[0-1'"),
        ('bandwidth = "400 Gb/s"\n', "", "NIC 'nic0' in $.node.vertices has no bandwidth"),
        ('source = "here"\n[fabric]', "[fabric]", "missing field 'source' at $.node.links[0]; a table here holds"),
        ('name = "mine"\n', "", "missing field 'name' at $; a table here holds "),
        (
            "[node]\n",
            '[node]\ncpu_vendor = "intle"\n',
            "'intle' is no cpu_vendor at $.node.cpu_vendor; did you mean 'intel'?",
        ),
        ('device = "H100-SXM5-80GB"', "", "$.node.device is missing"),
        ("name = ", "name ", "not TOML"),
    ],
)
def test_a_mistake_in_a_file_is_one_clear_error(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in OWN
    with pytest.raises(TopologyError) as error:
        fabrics.load(write(tmp_path, OWN.replace(old, new, 1)))
    assert message in str(error.value)
    assert "mine.toml" in str(error.value)


def test_an_unknown_name_or_path_says_what_is_near() -> None:
    with pytest.raises(TopologyError, match="unknown topology 'hgx-h10'; did you mean 'hgx-h100'"):
        fabrics.load("hgx-h10")
    with pytest.raises(TopologyError, match=r"no topology file 'nowhere/x\.toml'"):
        fabrics.load("nowhere/x.toml")
    for nodes in (2.5, "2"):
        with pytest.raises(TopologyError, match=f"at least one node, not {nodes!r}"):
            fabrics.load("hgx-a100", nodes=nodes)
    with pytest.raises(TopologyError, match="at least one node, not 0"):
        fabrics.load("hgx-h100", 0)


def test_a_variant_extends_a_shipped_file_and_removes_and_replaces_parts(tmp_path: Path) -> None:
    text = """
name = "mine"
extends = "hgx-h100"
[node]
remove = ["nic[4-7]"]
[[node.vertices]]
names = "nic[0-3]"
kind = "nic"
bandwidth = "200 Gb/s"
source = "here"
[[changes]]
match = "node1/nic0"
factor = 0.5
[[changes]]
remove = "node0/nic3"
"""
    topology = fabrics.load(write(tmp_path, text), 2)
    routes = routing.router(topology)
    assert [routes.nic_bandwidth(v) for v in topology.nics.tolist()] == [25e9, 25e9, 25e9, 12.5e9, 25e9, 25e9, 25e9]
    with pytest.raises(TopologyError, match=r"\$.node.remove: no vertex 'nik\[0-1\]'"):
        fabrics.load(write(tmp_path, text.replace("nic[4-7]", "nik[0-1]")), 2)


def test_a_file_that_extends_itself_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="leads back to this file"):
        fabrics.load(write(tmp_path, 'name = "mine"\nextends = "mine"'))


def test_node_types_can_be_mixed(tmp_path: Path) -> None:
    text = """
name = "mine"
[[nodes]]
type = "hgx-a100"
count = 2
[[nodes]]
type = "hgx-h100"
count = 1
[fabric]
kind = "one_switch"
source = "here"
"""
    topology = fabrics.load(write(tmp_path, text))
    assert [t.name for t in topology.node_types] == ["hgx-a100", "hgx-a100", "hgx-h100"]
    assert routing.unreachable_pairs(topology)[0] == 0
    assert {routing.router(topology).nic_bandwidth(v) for v in topology.nics.tolist()} == {25e9, 50e9}
    with pytest.raises(TopologyError, match="lists 3 nodes of its own; 4 asked for"):
        fabrics.load(write(tmp_path, text), 4)


def test_a_whole_cluster_can_be_listed_without_nics(tmp_path: Path) -> None:
    text = """
name = "mine"
[node]
device = "A100-SXM4-40GB"
[[vertices]]
names = "node[0-3]/gpu0"
kind = "gpu"
[[vertices]]
names = "switch0"
kind = "switch"
[[links]]
a = "node[0-3]/gpu0"
b = "switch0"
kind = "net"
bandwidth = "100 Gb/s"
latency = "1 us"
source = "here"
"""
    topology = fabrics.load(write(tmp_path, text))
    assert topology.n_nodes == 4
    routes = routing.router(topology)
    assert len(routes.route(topology.gpus[0], topology.gpus[3])) == 2
    links, weights = routes.loads(topology.gpus, np.roll(topology.gpus, 1), 2.0)
    assert len(links) == 8
    assert set(weights.tolist()) == {2.0}
    assert fabrics.check(topology).warnings == ()


# ---- what looks wrong ------------------------------------------------------------------------------------------------


def test_a_gpu_that_nobody_describes_looks_wrong(tmp_path):
    text = 'name = "m"\nextends = "pcie-h100"\n[node]\ndevice = "H100-NLV"\n[node.sources]\ndevice = "here"\n'
    (warning,) = fabrics.check(fabrics.load(write(tmp_path, text))).warnings
    assert "unknown device 'H100-NLV'" in warning
    assert "a model's step cannot" in warning
    known = text.replace("H100-NLV", "H100-NVL")
    assert fabrics.check(fabrics.load(write(tmp_path, known))).warnings == ()


def test_bits_written_as_bytes_are_noticed(tmp_path: Path) -> None:
    text = OWN.replace("400 Gb/s", "400 GB/s")
    (warning,) = fabrics.check(fabrics.load(write(tmp_path, text), 2)).warnings
    assert "was Gb/s written as GB/s?" in warning
    text = OWN.replace("400 Gb/s", "12.5 Gb/s")
    (warning,) = fabrics.check(fabrics.load(write(tmp_path, text), 2)).warnings
    assert "are bits and bytes mixed up?" in warning


def test_a_port_above_its_slot_is_noticed(tmp_path: Path) -> None:
    text = OWN.replace("400 Gb/s", "800 Gb/s").replace("63 GB/s", "31.5 GB/s")
    (warning,) = fabrics.check(fabrics.load(write(tmp_path, text), 2)).warnings
    assert "the port's 100 GB/s is above the PCIe slot's 63 GB/s" in warning


def test_gpus_without_a_nic_odd_links_and_lonely_vertices_are_noticed() -> None:
    topology = fabrics.load("hgx-h100", 2)
    lone = fabrics.change(topology, Change("node1/nic*", remove=True))
    warnings = fabrics.check(lone).warnings
    assert any("no NIC that is connected" in w for w in warnings)
    assert fabrics.check(lone).n_unreachable == 2 * 8 * 8
    hidden = fabrics.change(topology, Change("node0/nic0 -> leaf0", factor=0.5))
    (warning,) = fabrics.check(hidden).warnings
    assert warning == "node0/nic0 -> leaf0: 0.5 of the rate they say is delivered (factor), which NCCL does not see"
    odd = fabrics.change(topology, Change("node0/nic0 -> leaf0", bandwidth=25e9))
    # A port at half its rate one way is an odd NIC among its node's, and an odd link: both may be what is wrong.
    assert sorted(fabrics.check(odd).warnings) == [
        "node0/nic0 -> leaf0 differs by direction (2 such links)",
        "node0/nic0: 25 GB/s beside 7 NICs of 50 GB/s on one node; is it of another network?",
    ]
    oneway = fabrics.change(topology, Change("node0/nic0 -> leaf0", remove=True))
    assert any("leaf0 -> node0/nic0 has no way back" in w for w in fabrics.check(oneway).warnings)
    bare = fabrics.change(topology, Change("node0/gpu0 <-> *", remove=True))
    assert any("node0/gpu0 (gpu): no link" in w for w in fabrics.check(bare).warnings)


def test_nics_that_gpus_cannot_share_evenly_are_noticed() -> None:
    """7 NICs for 8 GPUs once passed without a word."""
    for removed, told in (("node0/nic3", "node0: 7 NICs for 8 GPUs:"), ("node*/nic3", "(and on 1 more nodes)")):
        topology = fabrics.change(fabrics.load("hgx-h100", 2), Change(removed, remove=True))
        (warning,) = fabrics.check(topology).warnings
        assert told in warning
    half = fabrics.change(fabrics.load("hgx-h100", 2), Change("node*/nic[0-3]", remove=True))
    assert not any("NICs for" in warning for warning in fabrics.check(half).warnings)


def test_a_node_that_straddles_two_leaves_has_no_rails() -> None:
    """A fat tree once was called "2 rails"."""
    node = fabrics.node("hgx-h100")
    assert fabrics.check(fabrics.fat_tree([node] * 3, radix=24)).rails == 1
    assert fabrics.check(fabrics.fat_tree([node] * 3, radix=8)).rails == 1  # two leaves of its own for each node
    assert fabrics.check(fabrics.rail_optimised([node] * 3)).rails == 8
    short = fabrics.change(fabrics.rail_optimised([node] * 3), Change("node0/nic3", remove=True))
    assert fabrics.check(short).rails == 8


def test_a_nic_that_is_odd_on_every_node_is_named_by_its_position() -> None:
    topology = fabrics.load("hgx-h100", 4)
    all_odd = fabrics.change(topology, Change("node*/nic3", bandwidth=25e9))
    (warning,) = fabrics.check(all_odd).warnings
    beside = "25 GB/s beside 7 NICs of 50 GB/s"
    assert warning == f"nic3 on every node: {beside}, on all 4 nodes; is it of another network?"
    two = fabrics.change(topology, Change("node[01]/nic3", bandwidth=25e9))
    (warning,) = fabrics.check(two).warnings
    assert warning.startswith(f"node0/nic3: {beside} on one node")
    assert warning.endswith("(and on 1 more of 4 nodes)")


def test_shipped_files_are_valid_toml_named_after_themselves() -> None:
    for path in data_path("topologies").glob("*.toml"):
        assert tomllib.loads(path.read_text(encoding="utf-8"))["name"] == path.stem


def test_a_change_of_a_node_that_a_cluster_does_not_have_is_told_and_one_of_no_part_is_refused(tmp_path: Path) -> None:
    """A calibrated file with a slow NIC in its second node was of no use for one node."""
    text = 'name = "m"\nextends = "hgx-h100"\n[[changes]]\nmatch = "node1/nic0 -> leaf0"\nfactor = 0.5\n'
    alone = fabrics.load(write(tmp_path, text))
    assert alone.hidden_factor is None
    told = "node1/nic0 -> leaf0: this cluster has 1 node, the first is node0; nothing is changed there"
    assert alone.assumed == (told,)
    assert f"assumed: {told}" in fabrics.check(alone).warnings
    two = fabrics.load(write(tmp_path, text), 2)
    assert not two.assumed
    (slow,) = np.flatnonzero(two.hidden_factor != 1.0).tolist()
    assert two.rate_words(slow) == "what it delivers, 0.5 of its line rate"
    assert two.rate_words(slow - 1) == "its line rate"
    for wrong in ("node1/nik0", "node1/nic0 -> leef0"):
        with pytest.raises(TopologyError, match="no vertex matches"):
            fabrics.load(write(tmp_path, text.replace("node1/nic0 -> leaf0", wrong)))
    mixed = 'name = "m"\nnodes = [{type = "hgx-h100", count = 2}]\n[fabric]\nkind = "none"\n'
    with pytest.raises(TopologyError, match="no vertex matches 'node2/nic0'"):
        fabrics.load(write(tmp_path, mixed + '[[changes]]\nmatch = "node2/nic0"\nfactor = 0.5\n'))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"routing": "magic"}, "unknown routing 'magic'"),
        ({"port_latency": "3 us"}, "port_latency is a number of seconds, such as 3e-7, not '3 us'"),
        ({"switch_latency": -1.0}, "switch_latency is a number of seconds"),
    ],
)
def test_a_network_made_in_python_is_checked_as_one_of_a_file(knobs: dict[str, object], message: str) -> None:
    """An unknown routing was played as another one, without a word."""
    node = fabrics.node("hgx-a100")
    with pytest.raises(TopologyError, match=message):
        fabrics.rail_optimised([node] * 2, **knobs)
    with pytest.raises(TopologyError, match="at least one node"):
        fabrics.rail_optimised([])
    with pytest.raises(TopologyError, match=r"what fabrics.node\(name\) gives, not 'hgx-a100'"):
        fabrics.fat_tree(["hgx-a100"] * 2)  # type: ignore[list-item]


@pytest.mark.parametrize("bandwidth", [0.0, -5.0, math.nan, "200 Gb/s"])
def test_a_line_rate_that_is_none_is_refused_in_python_as_in_a_file(bandwidth: float) -> None:
    """0 changed nothing, and -5 made a link of -5 bytes/s."""
    with pytest.raises(TopologyError, match="must be a number of bytes/s above zero"):
        fabrics.change(fabrics.load("hgx-a100"), Change("node0/nic0", bandwidth=bandwidth))


def test_what_a_part_delivers_is_not_taken_for_a_port_s_rate(tmp_path: Path) -> None:
    change = '\n[[changes]]\nmatch = "node1/nic0"\nfactor = 0.5\nsource = "planted"\n'
    text = 'name = "m"\nextends = "hgx-h100"\n' + change
    report = fabrics.check(fabrics.load(write(tmp_path, text), 2))
    (warning,) = report.warnings
    assert "0.5 of the rate they say is delivered (factor)" in warning
    assert report.ports == {50e9: 16}


def test_oversubscription_of_a_fat_tree_whose_nics_are_all_on_one_leaf_is_told_to_change_nothing(tmp_path):
    """Eight machines "4:1 oversubscribed" ran at the full rate, and nothing said so."""
    text = """
    name = "thin"
    extends = "hgx-h100"
    fabric = {kind = "fat_tree", oversubscription = 4.0, source = "ours"}
    """
    path = write(tmp_path, text)
    (warning,) = fabrics.check(fabrics.load(path, 4)).warnings
    assert "oversubscription = 4 of [fabric]: all 32 NICs are on leaf0" in warning
    assert not any("oversubscription" in text for text in fabrics.check(fabrics.load(path, 16)).warnings)
    strategy = {"kind": "ddp"}
    tables = {"cluster": {"topology": str(path), "nodes": 2}, "model": {"name": "alexnet"}, "strategy": strategy}
    notes = scenario_from_table(tables, tmp_path / "s.toml").prepare().notes
    assert any(note.endswith("changes nothing at this size") for note in notes)


def test_check_says_which_node_straddles_leaves_and_how_many_stay_on_one() -> None:
    """Five nodes of 8 NICs on leaves of 20 ports: the third has 4 NICs on either leaf."""
    node = fabrics.node("hgx-h100")
    report = fabrics.check(fabrics.fat_tree([node] * 5, radix=40))
    (warning,) = report.warnings
    assert warning.startswith("node2, of 5 nodes, straddles leaf switches: 4 on leaf0, 4 on leaf1 of its 8 NICs")
    assert report.spread == (2, 2, 1)
    whole = fabrics.check(fabrics.fat_tree([node] * 5, radix=32))
    assert (whole.warnings, whole.spread) == ((), (2, 2, 1))
    halves = fabrics.check(fabrics.fat_tree([node] * 3, radix=8))  # no leaf has room for a node
    assert (halves.warnings, halves.spread) == ((), (1, 1, 1))
    rails = fabrics.check(fabrics.rail_optimised([node] * 40))
    assert (rails.warnings, rails.spread) == ((), (32, 8))
