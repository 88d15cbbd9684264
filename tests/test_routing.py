"""Routes and link loads: NCCL's preferences inside a node, rails outside, and bytes conserved everywhere."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clustersim import collectives
from clustersim.cluster import files as fabrics
from clustersim.cluster import routes as routing
from clustersim.collectives.base import Group, Request
from clustersim.core.errors import TopologyError
from clustersim.core.paths import shipped
from clustersim.core.topology import Topology

NAMES = shipped("topologies")


def names(topology: Topology, route: tuple[int, ...]) -> list[str]:
    """The vertices a route visits."""
    ends = [topology.vertex_names[topology.link_dst[link]] for link in route]
    return [topology.vertex_names[topology.link_src[route[0]]], *ends] if route else []


def contiguous(topology: Topology, route: tuple[int, ...], src: int, dst: int) -> bool:
    tails = topology.link_src[list(route)]
    heads = topology.link_dst[list(route)]
    return bool(tails[0] == src and heads[-1] == dst and np.all(tails[1:] == heads[:-1]))


def pairs_to_try(topology: Topology) -> list[tuple[int, int]]:
    """All pairs of a small node, and a few between nodes."""
    first = topology.node_gpus(0).tolist()[:8]
    inside = list(itertools.permutations(first, 2))
    if topology.n_nodes == 1 or not len(topology.nics):
        return inside
    return inside + list(itertools.product(first[:4], topology.node_gpus(1).tolist()[:4]))


@pytest.mark.parametrize("name", NAMES)
def test_routes_are_contiguous_repeatable_and_as_long_as_the_way_back(name: str) -> None:
    topology = fabrics.load(name, nodes=2)
    routes = routing.Router(topology)
    again = routing.Router(topology)
    for src, dst in pairs_to_try(topology):
        route = routes.route(src, dst)
        assert contiguous(topology, route, src, dst)
        assert route == again.route(src, dst)
        assert len(route) == len(routes.route(dst, src))


@pytest.mark.parametrize("name", NAMES)
def test_no_route_passes_through_a_third_gpu_on_pcie_or_through_a_third_nic(name: str) -> None:
    topology = fabrics.load(name, nodes=2)
    routes = routing.router(topology)
    kinds = topology.vertex_kinds
    for src, dst in pairs_to_try(topology):
        inner = topology.link_dst[list(routes.route(src, dst))[:-1]].tolist()
        same_node = topology.vertex_node[src] == topology.vertex_node[dst]
        assert sum(kinds[v] == "nic" for v in inner) == (0 if same_node or "domain" in names_of(topology, inner) else 2)
        assert not same_node or not any(kinds[v] == "gpu" for v in inner)


def names_of(topology: Topology, vertices: list[int]) -> str:
    return " ".join(topology.vertex_names[v] for v in vertices)


@pytest.mark.parametrize("name", NAMES)
def test_loads_conserve_bytes_on_every_platform(name: str) -> None:
    topology = fabrics.load(name, nodes=2)
    routes = routing.router(topology)
    for src, dst in pairs_to_try(topology):
        links, weights = routes.loads(src, dst, 3.0)
        net = np.zeros(len(topology.vertex_names))
        np.add.at(net, topology.link_dst[links], weights)
        np.subtract.at(net, topology.link_src[links], weights)
        expected = np.zeros_like(net)
        expected[src], expected[dst] = -3.0, 3.0
        assert net == pytest.approx(expected)


@pytest.mark.parametrize("name", NAMES)
def test_loads_of_each_transfer_are_those_it_has_by_itself(name: str) -> None:
    topology = fabrics.load(name, nodes=2)
    router = routing.router(topology)
    pairs = np.array(pairs_to_try(topology), dtype=np.int64).reshape(-1, 2)
    ptr, links, loads = router.loads_of_each(pairs[:, 0], pairs[:, 1])
    for i, (src, dst) in enumerate(pairs.tolist()):
        alone = router.loads([src], [dst], 1.0)
        np.testing.assert_array_equal(links[ptr[i] : ptr[i + 1]], alone[0])
        np.testing.assert_allclose(loads[ptr[i] : ptr[i + 1]], alone[1], rtol=1e-15)


def test_an_nvswitch_pair_is_spread_over_all_switches_by_their_links() -> None:
    topology = fabrics.load("hgx-h100")
    routes = routing.router(topology)
    _, weights = routes.loads(topology.gpus[0], topology.gpus[5], 18.0)
    assert sorted(weights.tolist()) == pytest.approx([4.0] * 4 + [5.0] * 4)
    assert {routes.path_class(topology.gpus[0], g) for g in topology.gpus[1:]} == {"NVL"}
    picked = {routes.route(topology.gpus[0], topology.gpus[5], flow) for flow in range(40)}
    assert len(picked) == 4


def test_dgx1v_pairs_without_nvlink_go_over_pcie_and_the_sockets_unless_relay_is_asked_for() -> None:
    topology = fabrics.load("dgx-1v")
    gpu = topology.gpus
    plain = routing.router(topology)
    relay = routing.router(topology, relay=True)
    assert plain.path_class(gpu[0], gpu[3]) == "NVL"
    assert plain.path_class(gpu[0], gpu[5]) == "SYS"
    assert names(topology, plain.route(gpu[0], gpu[5])) == [
        f"node0/{v}" for v in ("gpu0", "pcie0", "cpu0", "cpu1", "pcie2", "gpu5")
    ]
    assert relay.path_class(gpu[0], gpu[5]) == "NVB"
    assert len(relay.route(gpu[0], gpu[5])) == 2


def test_dgx2_crosses_boards_by_peer_switches() -> None:
    topology = fabrics.load("dgx-2")
    routes = routing.router(topology)
    assert len(routes.route(topology.gpus[0], topology.gpus[1])) == 2
    assert len(routes.route(topology.gpus[0], topology.gpus[8])) == 3
    links, weights = routes.loads(topology.gpus[0], topology.gpus[8], 6.0)
    assert len(links) == 18
    assert np.all(weights == pytest.approx(1.0))


def test_without_peer_to_peer_data_goes_through_host_memory() -> None:
    topology = fabrics.load("pcie-rtx4090")
    routes = routing.router(topology)
    gpu = topology.gpus
    assert names(topology, routes.route(gpu[0], gpu[1])) == ["node0/gpu0", "node0/cpu0", "node0/gpu1"]
    assert routes.path_class(gpu[0], gpu[1]) == "PHB"
    assert routes.path_class(gpu[0], gpu[4]) == "SYS"
    switched = fabrics.load("pcie-a100")
    assert routing.router(switched).path_class(*switched.gpus[:2].tolist()) == "PIX"


def test_without_peer_to_peer_even_neighbours_under_one_switch_go_up_to_the_cpu() -> None:
    from dataclasses import replace

    topology = fabrics.load("pcie-a100")
    shy = replace(topology, node_types=tuple(replace(t, p2p=False) for t in topology.node_types))
    routes = routing.router(shy)
    route = routes.route(shy.gpus[0], shy.gpus[1])
    assert names(shy, route) == [f"node0/{v}" for v in ("gpu0", "pcie0", "cpu0", "pcie0", "gpu1")]
    assert routes.path_class(shy.gpus[0], shy.gpus[1]) == "PHB"


@pytest.mark.parametrize(
    ("name", "gpu", "nic", "path_class"),
    [
        ("hgx-a100", 0, 1, "PIX"),
        ("hgx-a100", 0, 2, "PHB"),
        ("hgx-a100", 0, 7, "SYS"),
        ("hgx-h100", 3, 3, "PIX"),
        ("alps-gh200", 1, 1, "PHB"),
        ("alps-gh200", 1, 2, "SYS"),
        ("polaris-a100", 1, 1, "PHB"),
        ("polaris-a100", 0, 0, "SYS"),
    ],
)
def test_path_classes_to_nics_are_those_nccl_prints(name: str, gpu: int, nic: int, path_class: str) -> None:
    topology = fabrics.load(name, nodes=2)
    routes = routing.router(topology)
    assert routes.path_class(topology.gpus[gpu], topology.nics[nic]) == path_class
    assert routes.path_class(topology.gpus[0], topology.gpus[-1]) == "NET"


def test_nearest_nics_and_their_rates() -> None:
    for name, gpu, expected, rate in [
        ("hgx-h100", 5, ["node0/nic5"], 50e9),
        ("hgx-a100", 3, ["node0/nic2", "node0/nic3"], 25e9),
        ("aws-p5", 2, [f"node0/nic{i}" for i in range(8, 12)], 12.5e9),
        ("dgx-1v-1x100g", 6, ["node0/nic0"], 12.5e9),
    ]:
        topology = fabrics.load(name, nodes=2)
        routes = routing.router(topology)
        near = routes.nearest_nics(int(topology.gpus[gpu]))
        assert [topology.vertex_names[v] for v in near] == expected
        assert {routes.nic_bandwidth(v) for v in near} == {rate}


def test_a_rail_leads_through_the_gpu_beside_its_nic() -> None:
    topology = fabrics.load("hgx-h100", nodes=2)
    routes = routing.router(topology)
    src = topology.vertex("node0/gpu0")
    dst = topology.vertex("node1/gpu0")
    straight = names(topology, routes.route(src, dst, rail=0))
    assert straight[1:4] == ["node0/pcie0", "node0/nic0", "leaf0"]
    visited = names(topology, routes.route(src, dst, rail=3))
    assert [v for v in visited if "nic" in v or "gpu" in v] == [
        "node0/gpu0",
        "node0/gpu3",
        "node0/nic3",
        "node1/nic3",
        "node1/gpu3",
        "node1/gpu0",
    ]


def test_without_gpudirect_a_nics_bytes_pass_the_host_and_its_path_class_stays() -> None:
    topology = fabrics.load("dgx-1v-1x100g", nodes=2)
    routes = routing.router(topology)
    src = topology.vertex("node0/gpu2")
    dst = topology.vertex("node1/gpu2")
    assert names(topology, routes.route(src, dst))[:5] == [
        "node0/gpu2",
        "node0/pcie1",
        "node0/cpu0",
        "node0/pcie1",
        "node0/nic0",
    ]
    assert routes.path_class(src, topology.vertex("node0/nic0")) == "PIX"
    # A ring sends and receives at once, so the switch's port to its CPU has twice the bytes of the NIC's.
    ring = Group(topology, topology.gpus)
    plan = collectives.plan(Request("all_gather", 2.0**30), ring, backend="nccl")
    load = dict(zip(plan.links.tolist(), plan.weights.tolist(), strict=True))
    name = topology.vertex_names
    up, out = (
        max(w for e, w in load.items() if (name[topology.link_src[e]], name[topology.link_dst[e]]) == ends)
        for ends in (("node0/pcie1", "node0/cpu0"), ("node0/pcie1", "node0/nic0"))
    )
    assert up == pytest.approx(2 * out)


def test_a_rail_without_nvlink_goes_over_pcie() -> None:
    topology = fabrics.load("pcie-a100", nodes=2)
    routes = routing.router(topology)
    visited = names(topology, routes.route(topology.gpus[0], topology.gpus[8], rail=1))
    assert [v for v in visited if v.startswith("node0")] == [
        f"node0/{v}" for v in ("gpu0", "pcie0", "cpu0", "cpu1", "pcie1", "nic1")
    ]


def test_a_rail_no_node_has_is_an_error() -> None:
    topology = fabrics.load("hgx-h100", nodes=2)
    with pytest.raises(TopologyError, match="no node has a NIC 8; rails are 0 to 7"):
        routing.router(topology).route(topology.gpus[0], topology.gpus[8], rail=8)


def test_equal_nics_are_taken_in_turn_by_flow_and_spread_in_loads() -> None:
    topology = fabrics.load("aws-p5", nodes=2)
    routes = routing.router(topology)
    used = {names(topology, routes.route(topology.gpus[0], topology.gpus[8], flow))[2] for flow in range(4)}
    assert used == {f"node0/nic{i}" for i in range(4)}
    links, weights = routes.loads(topology.gpus[0], topology.gpus[8], 4.0)
    leaving = [w for e, w in zip(links, weights, strict=True) if topology.vertex_kinds[topology.link_src[e]] == "nic"]
    assert leaving[:4] == pytest.approx([1.0] * 4)


def test_gpus_that_share_nics_start_at_different_ones() -> None:
    topology = fabrics.load("hgx-a100", nodes=2)
    routes = routing.router(topology)
    nics = {names(topology, routes.route(topology.gpus[i], topology.gpus[8 + i]))[2] for i in range(8)}
    assert len(nics) == 8


def test_trays_of_one_rack_meet_in_nvswitches_and_racks_in_the_network() -> None:
    topology = fabrics.load("gb200-nvl72", nodes=36)
    routes = routing.router(topology)
    assert routes.path_class(topology.gpus[0], topology.gpus[71]) == "NVL"
    assert len(routes.route(topology.gpus[0], topology.gpus[71])) == 2
    assert routes.path_class(topology.gpus[0], topology.gpus[72]) == "NET"
    assert len(routes.loads(topology.gpus[0], topology.gpus[71], 1.0)[0]) == 36


def test_the_switch_engine_costs_only_the_gpus_own_links() -> None:
    topology = fabrics.load("hgx-h100", nodes=1)
    routes = routing.router(topology)
    up, sent = routes.loads(topology.gpus, -1, 1.0)
    down, received = routes.loads(-1, topology.gpus, 1.0)
    assert set(topology.link_src[up].tolist()) == set(topology.gpus.tolist())
    assert set(topology.link_dst[down].tolist()) == set(topology.gpus.tolist())
    assert sent.sum() == received.sum() == pytest.approx(8.0)
    other = fabrics.load("dgx-1v")
    with pytest.raises(TopologyError, match="has no NVSwitch"):
        routing.router(other).loads(other.gpus[0], -1, 1.0)


def test_an_unreachable_pair_names_both_ends() -> None:
    topology = fabrics.load("pcie-p100-2gpu", nodes=2)
    with pytest.raises(TopologyError, match="no route from 'node0/gpu0' to 'node1/gpu1'"):
        routing.router(topology).route(topology.gpus[0], topology.gpus[3])
    with pytest.raises(TopologyError, match="no route from 'node0/gpu0' to 'node1/gpu1'"):
        routing.router(topology).loads(topology.gpus[0], topology.gpus[3], 1.0)
    count, examples = routing.unreachable_pairs(topology)
    assert count == 8
    assert examples[0] == ("node0/gpu0", "node1/gpu0")


def test_loads_are_the_sum_of_routes_where_there_is_one_path() -> None:
    topology = fabrics.load("pcie-a100", nodes=3)
    routes = routing.router(topology)
    src = topology.gpus
    dst = np.roll(topology.gpus, 5)
    expected = np.zeros(topology.n_links)
    for a, b, amount in zip(src.tolist(), dst.tolist(), range(1, 25), strict=True):
        for link in routes.route(a, b):
            expected[link] += amount
    links, weights = routes.loads(src, dst, np.arange(1.0, 25.0))
    assert np.all(np.diff(links) > 0)
    assert weights == pytest.approx(expected[links])
    assert weights.sum() == pytest.approx(expected.sum())


def test_neighbour_shifts_do_not_collide_in_a_full_fat_tree() -> None:
    node = fabrics.node("hgx-h100")
    topology = fabrics.fat_tree([node] * 16, radix=16)
    routes = routing.router(topology)
    shift = np.roll(topology.gpus, -8 * 8)
    links, weights = routes.loads(topology.gpus, shift, 1.0)
    busy = weights * 50e9 / topology.link_bandwidth[links]
    net = np.array([topology.link_kinds[e] == "net" for e in links])
    assert busy[net].max() == pytest.approx(1.0)


def test_hash_routing_spreads_flows_and_repeats_itself() -> None:
    node = fabrics.node("hgx-h100")
    topology = fabrics.fat_tree([node] * 32, radix=16, routing="hash")
    routes = routing.router(topology)
    used = {routes.route(topology.gpus[0], topology.gpus[-1], flow) for flow in range(64)}
    assert len(used) > 3
    assert routes.route(topology.gpus[0], topology.gpus[-1], 7) == routing.Router(topology).route(
        topology.gpus[0], topology.gpus[-1], 7
    )


@settings(max_examples=25, deadline=None)
@given(
    radix=st.integers(3, 12),
    count=st.integers(1, 12),
    levels=st.sampled_from([2, 3]),
    oversubscription=st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    hashed=st.booleans(),
    name=st.sampled_from(["hgx-h100", "dgx-1v", "pcie-a100-1gpu-200g", "alps-gh200"]),
    seed=st.integers(0, 99),
)
def test_in_any_fat_tree_all_pairs_route_and_bytes_are_conserved(
    radix: int, count: int, levels: int, oversubscription: float, hashed: bool, name: str, seed: int
) -> None:
    node = fabrics.node(name)
    down = min(max(round(radix * oversubscription / (1 + oversubscription)), 1), radix - 1)
    room = down * radix * (1 if levels == 2 else radix // 2)
    nodes = [node] * max(1, min(count, room // node.type.n_nics))
    assume(len(nodes) * node.type.n_nics <= room)
    topology = fabrics.fat_tree(
        nodes,
        radix=radix,
        levels=levels,
        oversubscription=oversubscription,
        routing="hash" if hashed else "destination",
    )
    routes = routing.router(topology)
    assert routing.unreachable_pairs(topology)[0] == 0
    rng = np.random.default_rng(seed)
    src = topology.gpus
    dst = rng.permutation(topology.gpus)
    amount = rng.uniform(1.0, 2.0, len(src))
    links, weights = routes.loads(src, dst, amount)
    flow = np.zeros(len(topology.vertex_names))
    np.add.at(flow, topology.link_dst[links], weights)
    np.subtract.at(flow, topology.link_src[links], weights)
    expected = np.zeros_like(flow)
    moved = src != dst
    np.add.at(expected, dst[moved], amount[moved])
    np.subtract.at(expected, src[moved], amount[moved])
    assert flow == pytest.approx(expected, abs=1e-9)
    assert weights.max(initial=0.0) <= amount.sum() + 1e-9


def test_injection_and_bisection_match_closed_forms() -> None:
    topology = fabrics.load("hgx-h100", nodes=4)
    assert routing.injection_bandwidth(topology) == pytest.approx(np.full(32, 50e9))
    assert routing.bisection_bandwidth(topology) == pytest.approx(2 * 8 * 50e9)
    one = fabrics.load("hgx-h100", nodes=1)
    assert routing.injection_bandwidth(one) == pytest.approx(np.full(8, 450e9))
    assert routing.bisection_bandwidth(one) >= 4 * 450e9
    halved = fabrics.fat_tree([fabrics.node("hgx-h100")] * 8, radix=48, oversubscription=2)
    assert routing.bisection_bandwidth(halved) == pytest.approx(4 * 8 * 50e9 / 2)


def test_cut_bandwidth_of_one_gpu_is_what_its_links_carry() -> None:
    topology = fabrics.load("dgx-1v")
    gpu = topology.gpus.tolist()
    assert routing.cut_bandwidth(topology, gpu[:1], gpu[1:]) == pytest.approx(150e9 + 15.75e9)
    assert routing.cut_bandwidth(topology, [], gpu) == 0.0


def test_16384_neighbour_edges_are_loaded_without_a_search_per_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing.Router, "route", None)  # worked out by structure, not pair by pair
    topology = fabrics.load("hgx-h100", nodes=2048)
    routes = routing.Router(topology)
    links, _ = routes.loads(topology.gpus, np.roll(topology.gpus, -1), 1.0, rail=0)
    assert len(links) > 16384


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hashed", [False, True])
def test_ways_found_together_are_those_found_one_by_one(name: str, hashed: bool) -> None:
    topology = fabrics.load(name, nodes=5)
    topology = replace(topology, routing="hash") if hashed else topology
    network = routing.router(topology).network
    ports = [port for port in network.into if not network.switch[port] and network.joins(port)]
    rng = np.random.default_rng(1)
    if not ports:
        pytest.skip("one node, no network")
    src = rng.choice(ports, 200)
    dst = rng.choice(ports, 200)
    src, dst = src[src != dst], dst[src != dst]
    flow = rng.integers(0, 9, len(src))
    rows, links = network.paths(src, dst, flow)
    for k, ends in enumerate(zip(src.tolist(), dst.tolist(), flow.tolist(), strict=True)):
        assert links[rows == k].tolist() == network.path(*ends)


@pytest.mark.parametrize("name", ["hgx-h100", "dgx-a100", "dgx-1v", "polaris-a100", "aws-p5"])
def test_islands_that_lost_a_nic_are_not_answered_for_by_whole_ones(name: str) -> None:
    topology = fabrics.change(fabrics.load(name, nodes=4), fabrics.Change("node2/nic1", remove=True))
    routes = routing.Router(topology)
    of = routes.islands.of[topology.gpus]
    assert len(np.unique(routes.builds[of])) > len(np.unique(routing.Router(fabrics.load(name, nodes=4)).builds))
    src, dst = (column.ravel() for column in np.meshgrid(topology.gpus, topology.gpus))
    ptr, links, weights = routes.loads_of_each(src, dst, rail=-1)
    for k in range(0, len(src), 7):  # one by one each island answers for itself
        alone = routing.Router(topology).loads(src[k : k + 1], dst[k : k + 1], 1.0)
        assert links[ptr[k] : ptr[k + 1]].tolist() == alone[0].tolist()
        assert weights[ptr[k] : ptr[k + 1]] == pytest.approx(alone[1])


def test_a_router_is_one_however_it_is_asked_for() -> None:
    topology = fabrics.load("hgx-h100", nodes=2)
    assert routing.router(topology) is routing.router(topology, False)
    assert routing.router(topology) is not routing.router(topology, True)
