"""Without GPUDirect RDMA every byte of the network passes hosts' memory: bounds of hardware, and a published log."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clustersim import collectives
from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group, Request, bus_factor
from clustersim.collectives.costs import costs_of
from clustersim.collectives.nccl_backend import choice, seconds
from clustersim.core.memory_rates import host_bandwidth
from clustersim.core.topology import CPU, Topology

LARGE = 2.0**32
SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n * 8,  # S is a rank's, and eight of a node send to the others
}
"""Bytes that a node of eight GPUs sends at least, and gets as many, per byte of S; n : nodes."""


def without_gpudirect(name: str, nodes: int, staged: int | None = None) -> Group:
    """The first ``staged`` nodes, None all."""
    machine = fabrics.load(name, nodes=nodes)
    count = nodes if staged is None else staged
    types = [replace(kind, net="ib_host") if i < count else kind for i, kind in enumerate(machine.node_types)]
    machine = replace(machine, node_types=tuple(types))
    return Group(machine, fabrics.mesh(machine).gpus)


def way_to_cpus(machine: Topology) -> float:
    """Bytes/s that enter the CPUs of the first node over PCIe."""
    kinds = machine.vertex_kinds
    ends = zip(machine.link_src.tolist(), machine.link_dst.tolist(), machine.link_bandwidth.tolist(), strict=True)
    return sum(
        rate for src, dst, rate in ends if kinds[dst] == CPU and kinds[src] != CPU and machine.vertex_node[dst] == 0
    )


@pytest.mark.parametrize("kind", SENT)
@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("name", ["hgx-a100", "hgx-a100-800g", "hgx-h100", "hgx-h200", "hgx-b200"])
def test_staged_bytes_are_no_faster_than_pcie_and_host_memory_carry_them(name, nodes, kind):
    """Two H100 nodes had 448 GB/s of busbw: 955 GB/s of memory traffic a node, whose 16 channels of DDR5-4800 have
    614 GB/s by their data sheet."""
    group = without_gpudirect(name, nodes)
    machine = group.topology
    taken = seconds(choice(Request(kind, LARGE), group), costs_of(group))
    both_ways = 2.0 * SENT[kind](nodes) * LARGE  # sent and received
    sockets = int(np.sum(machine.vertex_node[machine.cpus] == 0))
    assert taken >= 2.0 * both_ways / (sockets * host_bandwidth(machine.node_types[0]))
    assert taken >= both_ways / way_to_cpus(machine)
    assert taken <= 4.0 * both_ways / way_to_cpus(machine)  # NCCL leaves two of four switches idle


@pytest.mark.parametrize(("name", "staged"), [("hgx-a100-800g", 1), ("hgx-a100-800g", 2), ("hgx-a100", 2)])
def test_channels_enter_by_nics_of_different_switches(name, staged):
    """Eight A100 with four 200 Gb/s NICs, one of two nodes without nv_peer_mem, had 30 GB/s over two channels of the
    search (NVIDIA/nccl-tests issue 152); eight NICs on the same four switches have no more ways to the CPU. Their two
    channels were laid on the two NICs of one switch: 15.1 GB/s."""
    group = without_gpudirect(name, 2, staged)
    chosen = choice(Request("all_reduce", LARGE), group)
    assert chosen.n_channels == 2
    busbw = LARGE / seconds(chosen, costs_of(group)) * bus_factor("all_reduce", 16)
    assert busbw == pytest.approx(30e9, rel=0.05)


def test_gpudirect_is_never_slower():
    for name in ("hgx-a100", "hgx-h100"):
        for nodes in (2, 4):
            direct, staged = (without_gpudirect(name, nodes, count) for count in (0, None))
            for size in (2.0**12, 2.0**20, 2.0**26, LARGE):
                fast, slow = (
                    seconds(choice(Request("all_reduce", size), group), costs_of(group)) for group in (direct, staged)
                )
                assert fast <= slow * 1.001, (name, nodes, size)


def test_a_plan_carries_the_bound_of_host_memory():
    """Where the engine plays it, too."""
    group = without_gpudirect("hgx-h100", 2)
    request = Request("all_reduce", LARGE)
    plan = collectives.plan(request, group, backend="nccl")
    taken = seconds(choice(request, group), costs_of(group))
    assert plan.time(group.topology.link_bandwidth) == pytest.approx(taken, rel=1e-6)
    assert plan.ceiling < 130e9
