"""Closed forms: what traffic comes to on links, what channels look like, and macro-flow against chunk replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import machine

from clustersim.cluster import files as fabrics
from clustersim.cluster.routes import router
from clustersim.collectives import plan
from clustersim.collectives.base import Channel, Group, Request
from clustersim.collectives.bounds import lower_bound
from clustersim.collectives.channels import channels, natural_channels
from clustersim.collectives.gloo import ring_messages
from clustersim.collectives.loads import link_loads
from clustersim.collectives.peer_rails import peer_rails
from clustersim.collectives.registry import ALGORITHMS
from clustersim.collectives.tree import binary_tree, double_tree, levels
from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective, Program, Role
from clustersim.engine import simulate

GIB = 2.0**30


def whole(name: str, nodes: int) -> Group:
    topology = machine(name, nodes)
    return Group(topology, topology.gpus)


def loads_of(algorithm: str, kind: str, members: Group, n_channels: int) -> np.ndarray:
    """(L,) bytes on every link per byte of S."""
    row = ALGORITHMS[algorithm]
    traffic = row.traffic(Request(kind, 1.0), members, channels(members, n_channels, row.layout))
    links, weights = link_loads(traffic, members)
    load = np.zeros(members.topology.n_links)
    load[links] = weights
    return load


def egress(members: Group, load: np.ndarray, kinds: tuple[str, ...]) -> np.ndarray:
    """(G,) what leaves each GPU over links of these kinds."""
    topology = members.topology
    counted = np.where(np.isin(np.array(topology.link_kinds), kinds), load, 0.0)
    return np.bincount(topology.link_src, weights=counted, minlength=len(topology.vertex_kinds))[topology.gpus]


def nic_egress(members: Group, load: np.ndarray) -> np.ndarray:
    """(nodes, NICs) what every NIC sends into the network."""
    topology = members.topology
    net = np.where(np.array(topology.link_kinds) == "net", load, 0.0)
    sent = np.bincount(topology.link_src, weights=net, minlength=len(topology.vertex_kinds))[topology.nics]
    return sent.reshape(topology.n_nodes, -1)


def nic_ingress(members: Group, load: np.ndarray) -> np.ndarray:
    topology = members.topology
    net = np.where(np.array(topology.link_kinds) == "net", load, 0.0)
    got = np.bincount(topology.link_dst, weights=net, minlength=len(topology.vertex_kinds))[topology.nics]
    return got.reshape(topology.n_nodes, -1)


# ---- the laws of bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "law"), [("ring", lambda p: 2 * (p - 1) / p), ("nvls", lambda p: 1 + 1 / p)])
def test_inside_a_node_every_gpu_sends_the_algorithms_bytes_over_nvlink(algorithm, law):
    members = whole("hgx-h100", 1)
    assert egress(members, loads_of(algorithm, "all_reduce", members, 8), ("nvlink",)) == pytest.approx(
        np.full(8, law(8))
    )


@pytest.mark.parametrize(("kind", "law"), [("all_gather", 1 / 8), ("reduce_scatter", 1.0)])
def test_the_switch_multicasts_gathers_and_adds_scatters(kind, law):
    members = whole("hgx-h100", 1)
    assert egress(members, loads_of("nvls", kind, members, 8), ("nvlink",)) == pytest.approx(np.full(8, law))


@pytest.mark.parametrize(("nodes", "g"), [(2, 1.0), (16, 2.0)])
def test_a_tree_sends_s_between_two_nodes_and_twice_s_between_more(nodes, g):
    members = whole("hgx-h100", nodes)
    load = loads_of("tree", "all_reduce", members, 8)
    per_node = nic_egress(members, load).sum(axis=1)
    assert per_node.max() == pytest.approx(g)
    # Two trees over N nodes have 2 (N - 1) edges, each carrying half of S both ways.
    assert per_node.sum() == pytest.approx(2 * (nodes - 1))
    assert egress(members, load, ("nvlink",)) == pytest.approx(np.full(members.size, 2 * 7 / 8))


@pytest.mark.parametrize(("nodes", "g"), [(2, 1.0), (4, 2.0)])
def test_nvls_tree_sends_as_much_between_nodes_as_a_tree(nodes, g):
    members = whole("hgx-h100", nodes)
    load = loads_of("nvls_tree", "all_reduce", members, 8)
    assert nic_egress(members, load).sum(axis=1).max() == pytest.approx(g)
    assert egress(members, load, ("nvlink",)) == pytest.approx(np.full(members.size, 1 + 1 / 8))


@pytest.mark.parametrize("nodes", [2, 4])
def test_all_to_all_sends_each_peer_its_part(nodes):
    members = whole("hgx-h100", nodes)
    load = loads_of("direct", "all_to_all", members, 1)
    n = 8 * nodes
    # PXN: of what is for other nodes seven parts in eight reach the NIC on the receiver's rail through another GPU.
    assert egress(members, load, ("nvlink",)) == pytest.approx(np.full(n, 7 / n + 7 / 8 * (n - 8) / n))
    assert nic_egress(members, load) == pytest.approx(np.full((nodes, 8), (n - 8) / n))
    assert nic_ingress(members, load) == pytest.approx(np.full((nodes, 8), (n - 8) / n))
    names = np.array([members.topology.link_name(i) for i in range(members.topology.n_links)])
    climbs = np.array(["leaf" in name and "spine" in name for name in names])
    assert climbs.any()
    assert not load[climbs].any()


def test_all_to_one_gpu_comes_in_by_that_gpu_s_nic_and_leaves_by_the_same_rail():
    members = whole("hgx-h100", 2)
    load = loads_of("direct", "gather", members, 1)
    found = np.zeros((2, 8))
    found[1, 0] = 8 / 16  # eight far members, each with a sixteenth of S
    assert nic_egress(members, load) == pytest.approx(found)
    assert nic_ingress(members, load) == pytest.approx(found[::-1])


def test_sends_of_a_cube_mesh_pass_through_a_gpu_between_and_never_over_pcie():
    members = whole("dgx-1v", 1)
    kinds = np.array(members.topology.link_kinds)
    load = loads_of("direct", "all_to_all", members, 1)
    assert not load[kinds != "nvlink"].any()
    # Four peers of a GPU have a link to it, three are two links away: (4 + 2 * 3) / 8 of S from each.
    assert load.sum() == pytest.approx(8 * 10 / 8)
    old = loads_of("direct", "all_to_all", replace(members, nccl_version=(2, 10)), 1)
    assert old[kinds == "pcie"].any()


def test_before_pxn_each_gpu_leaves_by_its_own_nic():
    old = replace(whole("hgx-h100", 2), nccl_version=(2, 11))
    load = loads_of("direct", "all_to_all", old, 1)
    assert egress(old, load, ("nvlink",)) == pytest.approx(np.full(16, 7 / 16))
    assert nic_egress(old, load) == pytest.approx(np.full((2, 8), 8 / 16))
    assert (peer_rails(np.array([0, 0]), np.array([8, 1]), whole("hgx-h100", 2)) == [0, -1]).all()


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["hgx-h100", "hgx-a100", "dgx-1v", "aws-p5", "aws-p4d", "polaris-a100", "alps-gh200"])
def test_a_ring_over_all_rails_loads_every_nic_alike_both_ways(name, nodes):
    members = whole(name, nodes)
    load = loads_of("ring", "all_reduce", members, natural_channels(members))
    per_nic = 2 * (members.size - 1) / members.size / len(machine(name, nodes).nics) * nodes
    for side in (nic_egress, nic_ingress):
        found = side(members, load)
        assert found == pytest.approx(np.full(found.shape, per_nic))


@pytest.mark.parametrize(("name", "n_channels"), [("dgx-1v", 6), ("dgx-1v", 12), ("hgx-h100-4gpu-4x200g", 6)])
def test_rings_in_a_mesh_use_every_nvlink_to_its_capacity(name, n_channels):
    members = whole(name, 1)
    topology = members.topology
    load = loads_of("ring", "all_reduce", members, n_channels)
    direct = np.array(topology.link_kinds) == "nvlink"
    pace = load[direct] / topology.link_bandwidth[direct]
    assert pace.min() == pytest.approx(pace.max())


def test_mesh_of_eight_all_to_all_is_used_almost_evenly():
    members = whole("hgx-mi300x", 1)
    load = loads_of("ring", "all_reduce", members, natural_channels(members))
    direct = np.isin(np.array(members.topology.link_kinds), ("xgmi", "nvlink"))
    assert load[direct].max() <= 1.5 * load[direct].mean()


# ---- channels -------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(
        ["hgx-h100", "hgx-a100", "dgx-1v", "aws-p5", "pcie-a100-1gpu-200g", "polaris-a100", "gb200-nvl72"]
    ),
    layout=st.sampled_from(["ring", "tree"]),
    n_channels=st.integers(1, 9),
    data=st.data(),
)
def test_channels_visit_everybody_once_island_by_island_and_keep_their_rail(name, layout, n_channels, data):
    topology = machine(name, 3)
    gpus = data.draw(st.lists(st.sampled_from(topology.gpus.tolist()), min_size=1, max_size=24, unique=True))
    members = Group(topology, np.array(gpus))
    laid = channels(members, n_channels, layout)
    assert sum(channel.share for channel in laid) == pytest.approx(1.0)
    assert {channel.index for channel in laid} == set(range(n_channels))
    islands = router(topology).islands.of[members.gpus]
    for channel in laid:
        assert sorted(channel.order.tolist()) == list(range(members.size))
        walk = islands[channel.order]
        assert np.count_nonzero(walk[1:] != walk[:-1]) == len(np.unique(islands)) - 1
        crossing = islands[channel.order] != islands[np.roll(channel.order, -1)]
        assert np.all(channel.edge_rails[crossing] >= 0)


def test_a_ring_leaves_and_enters_nodes_by_the_gpus_beside_its_nics():
    members = whole("hgx-h100", 4)
    for channel in channels(members, 8):
        at_end = members.nodes[channel.order] != members.nodes[np.roll(channel.order, -1)]
        leaves = channel.order[at_end] % 8
        enters = np.roll(channel.order, -1)[at_end] % 8
        assert np.array_equal(leaves, channel.edge_rails[at_end])
        assert np.array_equal(enters, channel.edge_rails[at_end])


def test_two_gpus_beside_two_nics_keep_one_rail_all_the_way():
    for channel in channels(whole("hgx-a100", 3), 8):
        crossing = channel.edge_rails >= 0
        assert set(channel.edge_rails[crossing].tolist()) == {channel.nic}


def test_one_gpu_per_node_uses_its_own_nic():
    topology = machine("hgx-a100", 4)
    for local in (0, 1, 5):
        members = Group(topology, topology.gpus[local::8])
        assert {channel.nic for channel in channels(members, 1)} == {local}


def test_four_nics_a_gpu_are_four_stripes_of_one_channel():
    laid = channels(whole("aws-p5", 2), 8)
    assert len(laid) == 32
    assert len({channel.nic for channel in laid}) == 32


def test_on_a_node_that_lost_a_nic_rings_leave_by_the_nics_of_the_gpus_they_leave_from():
    topology = fabrics.change(machine("hgx-h100", 4), fabrics.Change("node1/nic0", remove=True))
    members = Group(topology, topology.gpus)
    for channel in channels(members, 7)[3:]:  # GPU 0 has no NIC now, and uses the others' in three stripes
        last = int(np.flatnonzero(members.nodes[channel.order] == 1)[-1])
        name = topology.vertex_names[members.gpus[channel.order[last]]]
        assert name == f"node1/gpu{channel.edge_rails[last]}"


@pytest.mark.parametrize("backend", ["nccl", "ideal"])
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("nic", [0, 3])
def test_a_nic_whose_cable_is_out_is_as_good_as_gone(backend, algorithm, nic):
    times = []
    for match in (f"node1/nic{nic}", f"node1/nic{nic} <-> leaf{nic}"):
        topology = fabrics.change(machine("hgx-h100", 4), fabrics.Change(match, remove=True))
        found = plan(Request("all_reduce", GIB, algorithm=algorithm), Group(topology, topology.gpus), backend)
        times.append(found.time(topology.link_bandwidth))
    assert times[0] == pytest.approx(times[1], rel=1e-12)


def test_two_thousand_nodes_are_laid_out_over_every_rank():
    members = whole("hgx-h100", 2048)
    router(members.topology)
    for channel in channels(members, 8):
        assert np.array_equal(np.sort(channel.order), np.arange(16384))


def test_an_unknown_layout_says_what_is_known():
    with pytest.raises(ProgramError, match="no channel layout 'rings'; did you mean 'ring'"):
        channels(whole("hgx-h100", 1), 1, "rings")


# ---- trees ----------------------------------------------------------------------------------------------------------


@given(st.integers(2, 300))
def test_a_node_is_inner_in_at_most_one_of_the_two_trees(n):
    inner = []
    for parent in double_tree(n):
        assert np.count_nonzero(parent < 0) == 1
        assert levels(parent).max() <= np.ceil(np.log2(n)) + 1
        children = np.bincount(parent[parent >= 0], minlength=n)
        assert children.max() <= 2
        inner.append((children > 0) & (parent >= 0))
    assert not np.any(inner[0] & inner[1])


def test_the_binary_tree_is_nccls():
    # src/graph/trees.cc draws the tree of 14 nodes.
    parent = binary_tree(14)
    assert parent.tolist() == [-1, 2, 4, 2, 8, 6, 4, 6, 0, 10, 12, 10, 8, 12]


# ---- times ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "n_channels", "expected"), [(8, 1, 42.28e-3), (128, 1, 42.91e-3), (8, 8, 5.285e-3), (128, 8, 5.364e-3)]
)
def test_a_ring_at_nic_speed_takes_the_closed_form(nodes, n_channels, expected):
    members = whole("hgx-h100", nodes)
    found = plan(Request("all_reduce", GIB), members, "ideal", n_channels)
    assert found.time(members.topology.link_bandwidth) == pytest.approx(expected, rel=1e-3)
    n = members.size
    exact = 2 * (n - 1) / n * GIB / (50e9 * n_channels)
    assert found.nbytes / found.rate(members.topology.link_bandwidth) == pytest.approx(exact, rel=1e-12)


def test_the_hierarchical_all_reduce_takes_its_closed_form():
    members = whole("hgx-h100", 8)
    found = plan(Request("all_reduce", GIB, algorithm="hierarchical"), members, "ideal")
    closed = 2 * 7 / 8 * GIB / 450e9 + 2 * 7 / 8 * GIB / 8 / 50e9
    assert found.time(members.topology.link_bandwidth) - found.latency == pytest.approx(closed)


def test_a_ring_of_nothing_takes_every_hop_in_turn():
    members = whole("hgx-h100", 1)
    topology = members.topology
    hop = 2 * topology.link_latency[np.array(topology.link_kinds) == "nvlink"].max()
    found = plan(Request("all_reduce", 0.0), members, "ideal", 1)
    assert found.time(topology.link_bandwidth) == pytest.approx(14 * hop)


def test_the_naive_ways_cost_what_the_textbook_says():
    members = whole("hgx-h100", 1)
    bandwidth = members.topology.link_bandwidth

    def seconds(algorithm):
        found = plan(Request("all_reduce", GIB, algorithm=algorithm), members, "ideal", 1)
        return found.time(bandwidth) - found.latency

    one = GIB / 450e9
    assert seconds("sequential") == pytest.approx(14 * one)
    assert seconds("ring_unsplit") == pytest.approx(7 * one)
    assert seconds("direct") == pytest.approx(7 * one)
    assert seconds("ring") == pytest.approx(2 * 7 / 8 * one)


def test_in_switch_reduction_lowers_the_bound_of_an_all_reduce():
    request = Request("all_reduce", GIB)
    with_sharp = lower_bound(request, whole("hgx-h100", 1))
    without = lower_bound(request, whole("hgx-a100", 1))
    assert with_sharp == pytest.approx(GIB / 450e9, rel=1e-3)
    assert without == pytest.approx(2 * 7 / 8 * GIB / 300e9, rel=1e-3)


# ---- macro-flow against chunk replay --------------------------------------------------------------------------------


def makespans(members: Group, kind: str, nbytes: float, algorithm: str, n_channels: int) -> tuple[float, float]:
    n = members.size
    op = Collective("op", kind, nbytes, np.arange(n).reshape(1, -1), algorithm=algorithm)
    program = Program(n, (Role("worker", np.arange(n), (op,)),))

    def planner(request, group):
        return plan(request, group, "ideal", n_channels)

    flow, chunk = (
        simulate(program, members.topology, Mesh(members.gpus, n), planner=planner, fidelity=fidelity).makespan
        for fidelity in ("flow", "chunk")
    )
    return flow, chunk


RINGS = [
    ("hgx-h100", 1, 1),
    ("hgx-h100", 8, 1),
    ("hgx-h100", 3, 8),
    ("hgx-a100", 4, 2),
    ("dgx-1v", 1, 12),
    ("dgx-1v", 2, 4),
    ("pcie-a100", 1, 1),
    ("pcie-a100-1gpu-200g", 5, 1),
]


@pytest.mark.parametrize(("name", "nodes", "n_channels"), RINGS)
def test_a_rings_macro_flow_equals_its_chunk_replay(name, nodes, n_channels):
    flow, chunk = makespans(whole(name, nodes), "all_reduce", GIB, "ring", n_channels)
    assert flow == pytest.approx(chunk, rel=5e-4)


@pytest.mark.parametrize("nbytes", [8.0, 2.0**14, 2.0**20])
@pytest.mark.parametrize(("name", "nodes"), [("hgx-h100", 1), ("hgx-h100", 3), ("pcie-a100-1gpu-200g", 4)])
def test_one_rings_latency_equals_its_chunk_replay_at_every_size(name, nodes, nbytes):
    flow, chunk = makespans(whole(name, nodes), "all_reduce", nbytes, "ring", 1)
    assert flow == pytest.approx(chunk, rel=5e-3)


@pytest.mark.parametrize("counts", [(3, 5), (8, 1), (2, 2, 7)])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "broadcast"])
def test_uneven_rings_agree_too(counts, kind):
    topology = machine("hgx-h100", len(counts))
    members = Group(topology, np.concatenate([topology.node_gpus(i)[:c] for i, c in enumerate(counts)]))
    flow, chunk = makespans(members, kind, GIB, "ring", 1)
    assert flow == pytest.approx(chunk, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "nodes", "per_node"), [("hgx-h100", 1, 8), ("hgx-h100", 2, 4), ("hgx-h100", 5, 2), ("pcie-a100", 1, 8)]
)
def test_a_trees_macro_flow_agrees_with_its_chunk_replay(name, nodes, per_node):
    topology = machine(name, nodes)
    members = Group(topology, np.concatenate([topology.node_gpus(i)[:per_node] for i in range(nodes)]))
    flow, chunk = makespans(members, "all_reduce", GIB, "tree", 1)
    assert flow == pytest.approx(chunk, rel=5e-3)


# ---- Gloo -----------------------------------------------------------------------------------------------------------


def test_gloos_ring_counts_segments_as_gloo_does():
    # 64 MiB over 4 ranks: 64 segments of 1 MiB, 48 messages a half; a small tensor still goes in two segments a rank.
    assert ring_messages(4, 2.0**26) == 48
    assert ring_messages(4, 2.0**10) == 6
    # 10 MiB over 4: ten segments, rounded up to 12, and two of those are empty.
    assert ring_messages(4, 10 * 2.0**20) == round(9 * 10 / 12)
    # One element a segment: of two elements and four segments two are sent.
    assert [ring_messages(2, size) for size in (4.0, 8.0, 12.0, 16.0)] == [1, 1, 2, 2]


@pytest.mark.parametrize("kind", sorted(ALGORITHMS["direct"].kinds))
def test_gloo_plans_every_kind_above_its_bound(kind):
    members = whole("pcie-k80", 2)
    found = plan(Request(kind, 2.0**24), members, "gloo")
    assert found.time(members.topology.link_bandwidth) >= found.lower_bound
    assert found.latency > 0


def test_gloo_uses_one_interface():
    members = whole("hgx-a100-2x100g-tcp", 2)
    found = plan(Request("all_reduce", GIB), members, "gloo")
    load = np.zeros(members.topology.n_links)
    load[found.links] = found.weights
    sent = nic_egress(members, load)
    assert np.all(sent[:, 0] > 0)
    assert np.all(sent[:, 1:] == 0)


def test_gloo_refuses_what_it_does_not_run():
    with pytest.raises(ProgramError, match="Gloo runs 'all_reduce' as 'ring', not 'tree'"):
        plan(Request("all_reduce", 1.0, algorithm="tree"), whole("pcie-k80", 1), "gloo")


def test_edge_rails_default_to_the_channels_nic():
    assert Channel(0, np.arange(3), 1.0, nic=2).edge_rails.tolist() == [2, 2, 2]
