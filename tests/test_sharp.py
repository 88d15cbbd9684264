"""Networks that reduce (SHARP), a NIC carrying its share once; racks that are ragged; hosts that are not told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clustersim import collectives, fabrics
from clustersim.collectives.base import Group, Request
from clustersim.collectives.paths import loads_of
from clustersim.collectives.registry import ALGORITHMS
from clustersim.core.errors import ProgramError

SHARP = """
name = "sharp"
extends = "{base}"
[fabric]
kind = "rail_optimised"
sharp = true
source = "a test"
"""


def group(name: str, nodes: int, per_node: int | None = None) -> Group:
    topology = fabrics.load(name, nodes=nodes)
    return Group(topology, fabrics.mesh(topology, nproc_per_node=per_node).gpus)


def sharp(folder: Path, nodes: int, base: str = "hgx-b200") -> Group:
    path = folder / f"{base}-sharp.toml"
    path.write_text(SHARP.format(base=base))
    return group(str(path), nodes)


def seconds(on: Group, nbytes: float, kind: str = "all_reduce", **pins: str) -> float:
    return collectives.plan(Request(kind, nbytes, **pins), on).time(on.topology.link_bandwidth)


@pytest.mark.parametrize("nodes", [4, 16, 32])
def test_switches_that_reduce_carry_large_all_reduces_in_less_time(tmp_path, nodes):
    plain, reducing = group("hgx-b200", nodes), sharp(tmp_path, nodes)
    found = collectives.plan(Request("all_reduce", 2.0**30), reducing)
    assert found.algorithm in {"nvls", "collnet_direct", "collnet_chain"}
    assert 0.45 < seconds(reducing, 2.0**30) / seconds(plain, 2.0**30) < 0.85


def test_time_through_the_switches_does_not_grow_with_the_nodes(tmp_path):
    few, many = (seconds(sharp(tmp_path, nodes), 2.0**30) for nodes in (4, 32))
    assert many == pytest.approx(few, rel=0.1)


@pytest.mark.parametrize("name", ["nvls", "collnet_direct", "collnet_chain"])
def test_a_nic_carries_its_heads_part_once_each_way(tmp_path, name):
    on = sharp(tmp_path, 4)
    loads = loads_of(Request("all_reduce", 1.0), on, name, 8)
    kinds = np.array(on.topology.link_kinds)[loads.links]
    nics = {i for i, kind in enumerate(on.topology.vertex_kinds) if kind == "nic"}
    leaving = np.array([int(on.topology.link_src[link]) in nics for link in loads.links]) & (kinds == "net")
    assert loads.by_class[3][leaving] == pytest.approx(1 / 8)


REDUCED = ("nvls", "collnet_direct", "collnet_chain")


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in REDUCED for kind in sorted(ALGORITHMS[name].kinds)]
)
def test_what_members_send_is_what_the_edges_carry(tmp_path, name, kind):
    on, row = sharp(tmp_path, 4), ALGORITHMS[name]
    traffic = row.traffic(Request(kind, 1.0), on, ())
    carried = [float(traffic.fraction[end >= 0].sum()) / on.size for end in (traffic.src, traffic.dst)]
    assert row.sends(kind, on.size, 4) == pytest.approx(tuple(carried))


@pytest.mark.parametrize("name", ["CollNetDirect", "CollNetChain", "NVLS"])
def test_a_network_that_does_not_reduce_says_so(name):
    with pytest.raises(ProgramError, match="SHARP"):
        seconds(group("hgx-b200", 2), 2.0**20, algorithm=name)


def test_racks_that_hold_different_numbers_keep_the_tree_through_their_switches():
    """NCCL connects as many heads of each rack as the smallest has; only the step to a slower algorithm was ours."""
    even, ragged = group("gb200-nvl72", 36), group("gb200-nvl72", 35)
    plans = [collectives.plan(Request("all_reduce", 2.0**26), on) for on in (even, ragged)]
    assert {found.algorithm for found in plans} == {"nvls_tree"}
    times = [found.time(on.topology.link_bandwidth) for found, on in zip(plans, (even, ragged), strict=True)]
    assert times[1] == pytest.approx(times[0], rel=0.1)


PAIRS_OF_CARDS = """
name = "pairs"

[node]
device = "H100-PCIe-80GB"
cpu_vendor = "intel"
net = "ib"
pcie_gen = 5

[[node.vertices]]
names = "cpu0, cpu1"
kind = "cpu"

[[node.vertices]]
names = "gpu[0-7]"
kind = "gpu"

[[node.vertices]]
names = "nic0"
kind = "nic"
bandwidth = "100 Gb/s"
source = "a test"

[[node.links]]
a = "gpu0, gpu1, gpu2, gpu3, nic0, gpu4, gpu5, gpu6, gpu7"
b = "cpu0, cpu0, cpu0, cpu0, cpu0, cpu1, cpu1, cpu1, cpu1"
pattern = "zip"
kind = "pcie"
bandwidth = "63 GB/s"
source = "a test"

[[node.links]]
a = "gpu0, gpu2, gpu4, gpu6"
b = "gpu1, gpu3, gpu5, gpu7"
pattern = "zip"
kind = "nvlink"
bandwidth = "300 GB/s"
source = "a test"

[[node.links]]
a = "cpu0"
b = "cpu1"
kind = "cpu"
bandwidth = "40 GB/s"
source = "a test"

[fabric]
kind = "one_switch"
source = "a test"
"""


def test_two_nodes_with_slots_of_the_fifth_generation_take_the_tree(tmp_path):
    """Such a host is a Sapphire Rapids at least, whose sockets carry more than one NIC: NCCL's tree then reaches beyond
    the NIC on two nodes (NVIDIA/nccl-tests issue 196), and a ring does not."""
    path = tmp_path / "pairs.toml"
    path.write_text(PAIRS_OF_CARDS)
    topology = fabrics.load(str(path), nodes=2)
    on = Group(topology, fabrics.mesh(topology).gpus, nccl_version=(2, 19))
    found = collectives.plan(Request("all_reduce", 2.0**30), on)
    assert found.algorithm == "tree"
    assert found.nbytes / found.time(topology.link_bandwidth) * found.bus_factor > 12.5e9
