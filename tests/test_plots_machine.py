"""The loaded machine: everything has a place of its own, and colours say what the links carried."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from clustersim.app.plots import alt_text, link_loads, loaded_topology
from clustersim.app.plots import layout as lay
from clustersim.app.plots.machine import SCALES, cables, spacing
from clustersim.cluster import files as fabrics
from clustersim.core.errors import TopologyError
from clustersim.core.paths import shipped
from clustersim.core.timeline import LinkUse
from clustersim.core.topology import GPU, NIC, NVSWITCH, PCIE_SWITCH


def carried(topology, link, nbytes, seconds=1.0):
    """One transfer over one link."""
    one = np.ones(1)
    zero = np.zeros(1, dtype=np.int64)
    names = [topology.link_name(i) for i in range(topology.n_links)]
    loads = ((np.array([link]), one),)
    return LinkUse(
        zero, 0 * one, seconds * one, nbytes / seconds * one, zero, zero, loads, names, topology.link_bandwidth
    )


@pytest.mark.parametrize("name", shipped("topologies"))
def test_no_two_parts_of_a_node_overlap(name):
    places = lay.place_node(fabrics.load(name, nodes=1), 0)
    for (x, y), (x2, y2) in combinations(places.values(), 2):
        assert abs(y - y2) > 0.4 or abs(x - x2) > 0.2
    room = spacing(places)
    assert all(0.84 * room[y] < abs(x - x2) for (x, y), (x2, y2) in combinations(places.values(), 2) if y == y2)


@pytest.mark.parametrize("name", ["hgx-a100", "dgx-1v", "hgx-h100", "pcie-l40s", "alps-gh200"])
def test_rows_stand_as_the_machine_is_built(name):
    topology = fabrics.load(name, nodes=1)
    places = lay.place_node(topology, 0)
    height = {topology.vertex_kinds[v]: y for v, (_, y) in places.items()}
    order = [height[kind] for kind in (NVSWITCH, GPU, PCIE_SWITCH, NIC) if kind in height]
    assert order == sorted(order)
    x = [places[g][0] for g in topology.gpus.tolist()]
    assert sorted(x) == list(range(len(x)))


def test_what_shares_a_pcie_switch_stands_together():
    topology = fabrics.load("hgx-a100", nodes=1)
    places = lay.place_node(topology, 0)
    near = lay.neighbours(topology, range(len(topology.vertex_names)))
    for switch in (v for v, kind in enumerate(topology.vertex_kinds) if kind == PCIE_SWITCH and v in places):
        x = [places[g][0] for g in near[switch] if topology.vertex_kinds[g] == GPU]
        assert places[switch][0] == pytest.approx(np.mean(x), abs=0.3)


def test_tiers_climb_from_the_nics():
    topology = fabrics.load("hgx-h100", nodes=64)
    names = [{topology.vertex_names[v].rstrip("0123456789") for v in tier} for tier in lay.tiers(topology)]
    assert names == [{"leaf"}, {"spine"}]


def test_a_load_is_bytes_over_line_rate_and_time():
    topology = fabrics.load("hgx-a100", nodes=2)
    use = carried(topology, 5, 0.25 * topology.link_bandwidth[5])
    loads = link_loads(topology, use, (0.0, 1.0))
    assert loads[5] == pytest.approx(0.25)
    assert loads.sum() == pytest.approx(0.25)
    assert link_loads(topology, use, (0.0, 2.0))[5] == pytest.approx(0.125)
    assert link_loads(topology, use, (0.5, 1.0))[5] == pytest.approx(0.25)


def test_links_of_another_machine_are_refused():
    topology = fabrics.load("hgx-a100", nodes=2)
    other = fabrics.load("hgx-a100", nodes=1)
    with pytest.raises(TopologyError, match="links, the run"):
        link_loads(topology, carried(other, 0, 1.0))


def test_a_cable_shows_its_busier_direction():
    topology = fabrics.load("dgx-1v", nodes=1)
    loads = np.zeros(topology.n_links)
    loads[3] = 0.4
    places = lay.place_node(topology, 0)
    ends, shown, _ = cables(topology, loads, places)
    pair = tuple(sorted((int(topology.link_src[3]), int(topology.link_dst[3]))))
    assert shown[ends.index(pair)] == 0.4
    assert shown.sum() == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("name", "nodes"), [("hgx-a100", 2), ("gb200-nvl72", 18), ("hgx-h100", 128), ("alps-gh200", 80)]
)
def test_small_machines_are_drawn_whole_and_large_ones_summarised(name, nodes):
    topology = fabrics.load(name, nodes=nodes)
    loads = np.linspace(0, 0.2, topology.n_links)
    figure = loaded_topology(topology, loads, title="$t$")
    lines = sum(len(c.get_segments()) for a in figure.axes for c in a.collections if hasattr(c, "get_segments"))
    boxes = sum(len(a.patches) for a in figure.axes)
    if nodes == 2:
        assert lines >= topology.n_links // 2
        assert boxes == len(topology.vertex_names) + nodes
    else:
        assert lines < 2600
        assert boxes < 1000
    assert topology.link_name(int(np.argmax(loads))) in alt_text(figure)


def test_the_scale_ends_just_above_the_busiest_link():
    topology = fabrics.load("hgx-a100", nodes=1)
    for load in (0.03, 0.2, 0.5, 0.97):
        loads = np.full(topology.n_links, load)
        figure = loaded_topology(topology, loads)
        end = next(a for a in figure.axes if a.get_xlabel().startswith("share")).get_xlim()[1]
        assert end == pytest.approx(min(s for s in SCALES if s >= load))


def test_an_idle_machine_says_so():
    topology = replace(fabrics.load("hgx-a100", nodes=1), name="idle $x$")
    assert "No link carries anything" in alt_text(loaded_topology(topology, np.zeros(topology.n_links)))
