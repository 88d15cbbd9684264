"""Sends with a CPU at an end: routes exist, rates are those of copies, and collectives refuse."""

from __future__ import annotations

import numpy as np
import pytest

from clustersim.cluster import files as fabrics
from clustersim.collectives import plan
from clustersim.collectives.base import Group, Request
from clustersim.collectives.host_copies import COPY_SHARE
from clustersim.core.errors import ProgramError


def pair(topology, a, b):
    return Group(topology, np.array([topology.vertex(a), topology.vertex(b)]))


@pytest.mark.parametrize("ends", [("node0/gpu0", "node0/cpu0"), ("node0/cpu0", "node0/gpu0")])
def test_a_copy_to_or_from_host_memory_reaches_the_measured_share_of_pcie(ends):
    topology = fabrics.load("hgx-h100", nodes=1)
    found = plan(Request("send", 1e9), pair(topology, *ends))
    assert found.algorithm == "copy"
    assert 1e9 / found.time(topology.link_bandwidth) == pytest.approx(COPY_SHARE * 63e9, rel=1e-3)


@pytest.mark.parametrize("backend", ["nccl", "ideal", "gloo"])
@pytest.mark.parametrize(
    "ends", [("node0/gpu3", "node1/cpu0"), ("node1/cpu1", "node0/gpu0"), ("node0/cpu0", "node1/cpu0")]
)
def test_a_cpu_of_another_node_is_reached_over_the_network(backend, ends):
    topology = fabrics.load("hgx-a100", nodes=2)
    found = plan(Request("send", 1e8), pair(topology, *ends), backend=backend)
    kinds = {topology.link_kinds[link] for link in found.links.tolist()}
    assert "net" in kinds
    assert found.time(topology.link_bandwidth) >= 1e8 / (8 * 25e9)


def test_two_gpus_behind_one_pcie_switch_share_its_way_to_the_cpu():
    topology = fabrics.load("pcie-k80", nodes=1)
    up = topology.vertex("node0/pcie0"), topology.vertex("node0/cpu0")
    link = int(np.flatnonzero((topology.link_src == up[0]) & (topology.link_dst == up[1]))[0])
    for gpu in ("node0/gpu0", "node0/gpu1"):
        assert link in plan(Request("send", 1e6), pair(topology, gpu, "node0/cpu0")).links


def test_a_cpu_takes_part_in_no_nccl_collective():
    topology = fabrics.load("hgx-a100", nodes=1)
    with pytest.raises(ProgramError, match="all_reduce with a CPU among its members"):
        plan(Request("all_reduce", 1e6), pair(topology, "node0/gpu0", "node0/cpu0"))
