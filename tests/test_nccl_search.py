"""NCCL's topology search: its own results come out, and what it lays down fits the node."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct
from nccl_systems import ALGORITHMS, DGX1, VIEWS, pair_matrix, system, table

from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group
from clustersim.collectives.nccl import search as searching
from clustersim.collectives.nccl.derive import system_of
from clustersim.collectives.nccl.graph import TREE, ChannelGraph
from clustersim.collectives.nccl.search import _search_view, exec_channels, search
from clustersim.collectives.nccl.uneven import uneven_nodes
from clustersim.collectives.nccl.view import NodeView, PcieSlot, System
from clustersim.collectives.nccl.walk import ChannelWalk
from clustersim.collectives.nccl.wiring import wiring
from clustersim.core.errors import TopologyError
from clustersim.core.topology import PATH_CLASSES

GRAPHS = table("graphs")


@pytest.mark.parametrize("row", GRAPHS, ids=lambda row: f"{row['system']}-{row['nodes']}-{row['algo']}")
def test_search_finds_what_nccl_finds(row: dict[str, str]) -> None:
    described = system(row["system"], int(row["nodes"]))
    graphs = search(described)
    found = graphs[ALGORITHMS[row["algo"]]]
    assert {
        "pattern": found.pattern,
        "crossNic": found.cross_nic,
        "search_channels": found.n_channels,
        "bwIntra": found.bw_intra,
        "bwInter": found.bw_inter,
        "typeIntra": PATH_CLASSES[found.type_intra],
        "typeInter": PATH_CLASSES[found.type_inter],
        "sameChannels": int(found.same_channels),
        "comm_channels": exec_channels(described, graphs),
    } == {key: type_of(row[key]) for key in list(row)[6:]} | {"pattern": int(row["pattern"])}


@pytest.mark.parametrize("name", sorted(VIEWS))
@pytest.mark.parametrize("nodes", [1, 4])
def test_what_found_nothing_is_not_walked_again_and_the_answer_is_the_same(
    name: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = system(name, nodes)
    found = _search_view.__wrapped__(described.views[0], described.sharp)
    monkeypatch.setattr(ChannelWalk, "_state", lambda self: (object(),))  # no state is known
    assert _search_view.__wrapped__(described.views[0], described.sharp) == found


def test_a_tree_that_leaves_where_it_came_in_is_not_walked_again_for_other_nics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attempt of MI300X's eight trees spends its whole budget, and alternating NICs changes none of its steps."""
    topology = fabrics.load("hgx-mi300x", 2)
    view = system_of(Group(topology, topology.gpus)).views[0]
    monkeypatch.setattr(searching, "_BUDGET", 1 << 7)
    walked = []

    class Walk(ChannelWalk):
        def run(self):
            before = self.best
            outcome = super().run()
            walked.append((self.ask, before, self.most, outcome))
            return outcome

    monkeypatch.setattr(searching, "ChannelWalk", Walk)
    _search_view.__wrapped__(view, False)
    vain = [row for row in walked if row[0].pattern == TREE and not row[3][0].n_channels]
    assert len(vain) > 4
    assert {ask.cross_nic for ask, *_ in vain} == {0}
    for ask, before, most, outcome in vain[:4]:
        other = ChannelWalk(wiring(view), replace_struct(ask, cross_nic=2), before, 1 << 7, most).run()
        assert other == outcome


def type_of(text: str) -> float | str:
    """A number if it is one."""
    try:
        return float(text)
    except ValueError:
        return text


def charged(view: NodeView, graph: ChannelGraph, closed: bool) -> dict[int, float]:
    """GB/s on each link of the channels' chains (rings if closed) inside the node."""
    wires = wiring(view)
    load: dict[int, float] = defaultdict(float)
    for order in graph.orders:
        after = (*order[1:], order[0]) if closed else order[1:]
        for a, b in zip(order, after, strict=False):
            for link in wires.between(("gpu", a), ("gpu", b)).links:
                load[link] += graph.bw_intra
    return load


@pytest.mark.parametrize("name", sorted(VIEWS))
@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_channels_visit_every_gpu_once_and_fit_the_links(name: str, algorithm: str) -> None:
    described = system(name, 1)
    view = described.views[0]
    graph = search(described)[algorithm]
    assert len(graph.orders) == graph.n_channels
    assert all(sorted(order) == list(range(len(view.gpus))) for order in graph.orders)
    bandwidth = wiring(view).bandwidth
    load = charged(view, graph, closed=algorithm == "ring")
    assert all(amount <= bandwidth[link] * (1 + 1e-6) for link, amount in load.items())


@given(st.sets(st.integers(0, 7), min_size=2, max_size=8))
@settings(max_examples=12, deadline=None)
def test_any_part_of_a_hybrid_cube_mesh_gets_rings_that_fit(chosen: set[int]) -> None:
    gpus = sorted(chosen)
    whole = VIEWS["dgx1v"]
    view = replace(
        whole,
        gpus=tuple(whole.gpus[g] for g in gpus),
        dev=tuple(gpus),
        nics=(),
        nvlinks=pair_matrix(DGX1, gpus),
    )
    graph = search(System(1, len(gpus), (view,)))["ring"]
    assert graph.n_channels >= 1
    bandwidth = wiring(view).bandwidth
    assert all(amount <= bandwidth[link] * (1 + 1e-6) for link, amount in charged(view, graph, True).items())


@pytest.mark.parametrize(("links", "sm", "total"), [(4, 80, 240.0), (6, 90, 360.0)])
def test_four_gpus_joined_all_to_all_fill_their_nvlinks_with_rings(links: int, sm: int, total: float) -> None:
    view = NodeView(
        sm=sm,
        gpus=tuple(PcieSlot(-1, 24.0) for _ in range(4)),
        nvlinks=tuple(tuple(links * (a != b) for b in range(4)) for a in range(4)),
        dev=(0, 1, 2, 3),
    )
    ring = search(System(1, 4, (view,)))["ring"]
    assert ring.n_channels * ring.bw_intra == total
    assert len(set(ring.orders)) > 1  # a clique needs different rings


@pytest.mark.parametrize("nics", [1, 2, 4])
def test_rings_over_nodes_use_all_nics_of_a_dgx1(nics: int) -> None:
    view = replace(VIEWS["dgx1v"], nics=VIEWS["dgx1v"].nics[:nics])
    ring = search(System(2, 16, (view,)))["ring"]
    assert (ring.n_channels, ring.bw_inter) == (nics, 12)
    assert {net for pair in ring.nets for net in pair} == set(range(nics))


def test_nodes_that_differ_get_what_the_weakest_can() -> None:
    strong = VIEWS["dgxh100"]
    weak = VIEWS["h100_200g"]
    alone = search(System(2, 16, (weak,)))["ring"]
    both = search(System(2, 16, (strong, weak)))["ring"]
    assert both.n_channels * both.bw_inter == alone.n_channels * alone.bw_inter
    assert both.bw_inter <= search(System(2, 16, (strong,)))["ring"].bw_inter


# ------------------------------------------------------------------------------------------------------ topologies


def members(name: str, nodes: int, each: int, version: tuple[int, int] = (2, 28)) -> Group:
    topology = fabrics.load(name, nodes=nodes)
    gpus = np.concatenate([topology.node_gpus(node)[:each] for node in range(nodes)])
    return Group(topology, gpus, nccl_version=version)


@pytest.mark.parametrize(
    ("topology", "described", "nodes"),
    [
        ("dgx-1v", "dgx1v", 1),
        ("dgx-1v", "dgx1v", 2),
        ("dgx-2", "dgx2", 1),
        ("dgx-2", "dgx2", 2),
        ("hgx-a100", "dgxa100", 1),
        ("hgx-a100", "dgxa100", 2),
        ("aws-p4d", "p4d", 2),
        ("hgx-h100", "dgxh100", 1),
        ("hgx-h100", "dgxh100", 2),
        ("hgx-h800", "h800", 2),
        ("hgx-b200", "dgxb200", 2),
    ],
)
def test_topology_files_lead_to_the_golden_search_results(topology: str, described: str, nodes: int) -> None:
    view = VIEWS[described]
    found = search(system_of(members(topology, nodes, len(view.gpus))))
    wanted = search(system(described, nodes))
    for algorithm in ("ring", "tree", "nvls"):
        a = found[algorithm]
        b = wanted[algorithm]
        assert (a.n_channels, a.bw_intra, a.bw_inter) == (b.n_channels, b.bw_intra, b.bw_inter), algorithm


@pytest.mark.parametrize("name", ["hgx-a100", "hgx-h100", "alps-gh200", "pcie-a100", "pcie-rtx4090", "dgx-1p"])
@pytest.mark.parametrize("each", [1, 2, 3, 4])
def test_any_number_of_gpus_a_node_is_described(name: str, each: int) -> None:
    described = system_of(members(name, 2, each))
    assert (described.n_nodes, described.n_ranks, len(described.views)) == (2, 2 * each, 1)
    graphs = search(described)
    assert graphs["ring"].n_channels * graphs["ring"].bw_inter > 0
    assert exec_channels(described, graphs) >= 2


def test_trays_of_one_nvlink_domain_are_one_node() -> None:
    joined = system_of(members("gb200-nvl72", 2, 4))
    assert (joined.n_nodes, joined.n_ranks, joined.views[0].hosts) == (1, 8, 2)
    apart = system_of(members("gb200-nvl72", 2, 4, version=(2, 20)))
    assert apart.n_nodes == 2


def test_only_efa_reports_a_latency_and_bundles_its_nics() -> None:
    p5 = system_of(members("aws-p5", 2, 8))
    assert p5.net_latency == 75e-6
    assert [nic.bandwidth for nic in p5.views[0].nics] == [50.0] * 8
    assert system_of(members("hgx-h100", 2, 8)).net_latency == 0.0
    assert system_of(members("aws-p5", 1, 8)).net_latency == 0.0


def test_mixed_groups_list_each_build_and_share_of_gpus() -> None:
    topology = fabrics.load("hgx-h100", nodes=2)
    gpus = np.concatenate([topology.node_gpus(0), topology.node_gpus(1)[:4]])
    described = system_of(Group(topology, gpus))
    assert (described.n_nodes, described.n_ranks) == (2, 12)
    assert sorted(len(view.gpus) for view in described.views) == [4, 8]
    assert described.ranks_per_node == 6


def test_nodes_without_nics_cannot_form_a_group() -> None:
    with pytest.raises(TopologyError, match="NIC"):
        system_of(members("pcie-p100-2gpu", 2, 2))


@pytest.mark.parametrize(("name", "rate"), [("hgx-a100", "100 Gb/s"), ("hgx-h100", "200 Gb/s")])
def test_a_slower_nic_of_one_node_halves_rings_and_what_is_said_of_leaving_it_out_is_so(tmp_path, name, rate):
    """Fields are compared one by one (nccl src/init.cc): the least count of one node, the least speed of another."""
    file = tmp_path / "m.toml"
    head = f'name = "m"\nextends = "{name}"\n[[changes]]\nsource = "planted"\nmatch = "node1/nic0"\n'

    def rings(change: str) -> tuple[ChannelGraph, str]:
        file.write_text(head + change)
        topology = fabrics.load(str(file), nodes=2)
        system = system_of(Group(topology, topology.gpus))
        return search(system)["ring"], uneven_nodes(system)

    slow, sentence = rings(f'bandwidth = "{rate}"\n')
    without, _ = rings("remove = true\n")
    alike, nothing = rings("factor = 0.5\n")
    assert slow.n_channels * slow.bw_inter == 0.5 * alike.n_channels * alike.bw_inter
    assert without.n_channels * without.bw_inter == 7 / 8 * alike.n_channels * alike.bw_inter
    assert f"together {slow.n_channels} x {slow.bw_inter:g} GB/s" in sentence
    assert sentence.endswith(f"{without.n_channels} x {without.bw_inter:g} GB/s")
    assert nothing == ""
