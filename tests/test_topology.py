"""The Topology noun: columns, names, the networkx view."""

from __future__ import annotations

import numpy as np
import pytest

from clustersim.cluster import files as fabrics
from clustersim.core.errors import TopologyError
from clustersim.core.topology import route_latency


def test_gpus_are_node_major_and_node_gpus_slices_them() -> None:
    topology = fabrics.load("hgx-h100", nodes=3)
    assert topology.n_nodes == 3
    assert topology.vertex_node[topology.gpus].tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert topology.node_gpus(2).tolist() == topology.gpus[16:].tolist()
    assert [topology.vertex_names[v] for v in topology.node_gpus(1)[:2]] == ["node1/gpu0", "node1/gpu1"]


def test_an_unknown_vertex_names_the_nearest() -> None:
    topology = fabrics.load("hgx-h100")
    with pytest.raises(TopologyError, match="no vertex 'node0/gpu9'; did you mean 'node0/gpu"):
        topology.vertex("node0/gpu9")


def test_the_networkx_view_has_every_vertex_and_link_with_its_numbers() -> None:
    topology = fabrics.load("dgx-1v", nodes=2)
    graph = topology.graph
    assert graph.number_of_nodes() == len(topology.vertex_names)
    assert graph.number_of_edges() == topology.n_links
    edge = graph.edges["node0/gpu0", "node0/gpu3"]
    assert edge["bandwidth"] == 50e9
    assert edge["kind"] == "nvlink"
    assert topology.link_name(edge["link"]) == "node0/gpu0 -> node0/gpu3"


def test_names_are_unique_and_links_join_two_known_vertices() -> None:
    topology = fabrics.load("gb200-nvl72", nodes=20)
    assert len(set(topology.vertex_names)) == len(topology.vertex_names)
    pairs = topology.link_src * len(topology.vertex_names) + topology.link_dst
    assert len(np.unique(pairs)) == topology.n_links
    assert np.all(topology.link_src != topology.link_dst)


def test_route_latency_is_the_sum_over_hops() -> None:
    topology = fabrics.load("hgx-h100", nodes=2)
    assert route_latency(topology, (0, 1)) == pytest.approx(topology.link_latency[0] + topology.link_latency[1])


@pytest.mark.parametrize("nodes", [1, 18, 20, 36, 127, 128, 130])
def test_a_job_of_several_racks_has_as_many_trays_in_each(nodes: int) -> None:
    """127, 128 and 130 trays are 508, 512 and 520 GPUs: racks that are filled in order leave one with 1, 2 and 4."""
    topology = fabrics.load("gb200-nvl72", nodes=nodes)
    switches = np.array([name.endswith("/nvswitch0") for name in topology.vertex_names])
    gpus = np.bincount(topology.link_dst[switches[topology.link_dst]])
    racks = gpus[gpus > 0] // 4
    assert racks.sum() == nodes
    assert len(racks) == -(-nodes // 18)
    assert racks.max() - racks.min() <= 1
