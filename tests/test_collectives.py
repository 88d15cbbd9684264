"""The contract every algorithm keeps, over kinds, sizes and nodes: the data comes out right, and so do the bytes."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import machine

from clustersim.collectives import plan
from clustersim.collectives.algorithm_contract import check_data, check_edges, check_sends, takes
from clustersim.collectives.base import Group, Request
from clustersim.collectives.channels import channels
from clustersim.collectives.registry import ALGORITHMS
from clustersim.collectives.volume import per_member
from clustersim.core.errors import ProgramError, TopologyError

OPERATIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
PAIRS = [(name, kind) for name, row in ALGORITHMS.items() for kind in sorted(row.kinds)]
PLACES = [(n, nodes) for n in (2, 3, 4, 5, 8, 16) for nodes in (1, 2, 3) if nodes <= n <= 8 * nodes]


@cache
def group(n: int, nodes: int, name: str = "hgx-h100") -> Group:
    """``n`` members on ``nodes`` nodes, as even as it goes, the first nodes holding more."""
    topology = machine(name, nodes)
    counts = [n // nodes + (node < n % nodes) for node in range(nodes)]
    return Group(topology, np.concatenate([topology.node_gpus(i)[:c] for i, c in enumerate(counts)]))


def laid(name: str, members: Group, n_channels: int = 2):
    return channels(members, n_channels, ALGORITHMS[name].layout)


TAKES = {
    "hierarchical": lambda n, nodes: n % nodes == 0,
    "nvls": lambda n, nodes: nodes == 1,
    "nvls_tree": lambda n, nodes: nodes > 1,
    "collnet_direct": lambda n, nodes: False,
    "collnet_chain": lambda n, nodes: False,
}
"""Which groups an algorithm takes that does not take all: NVLS one node, its tree several, hierarchies as many on each
node, CollNet only switches that add, which the machine has not."""
TAKEN = {
    (name, kind, n, nodes): takes(ALGORITHMS[name], kind, group(n, nodes))
    for name, kind in PAIRS
    for n, nodes in PLACES
}
CASES = [case for case, taken in TAKEN.items() if taken]
SCHEDULED = [case for case in CASES if ALGORITHMS[case[0]].schedule]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_takes_every_group_but_those_that_it_is_said_to_refuse(name):
    said = TAKES.get(name, lambda n, nodes: True)
    wrong = [case for case, taken in TAKEN.items() if case[0] == name and taken != said(*case[2:])]
    assert not wrong, f"{name} takes other groups (kind, members, nodes) than TAKES of this file says: {wrong}"


def request_for(name: str, kind: str, members: Group) -> Request:
    return Request(kind, 2.0**22, root=members.size - 1, algorithm=name)


# ---- executing a schedule -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind", "n", "nodes"), [case for case in SCHEDULED if case[1] != "barrier"])
def test_executing_the_schedule_gives_every_member_the_right_data(name, kind, n, nodes):
    check_data(ALGORITHMS[name], kind, group(n, nodes))


@pytest.mark.parametrize("redop", ["prod", "min", "max"])
@pytest.mark.parametrize("name", ["ring", "tree", "halving_doubling", "direct", "hierarchical", "sequential"])
def test_an_all_reduce_serves_every_reduction(name, redop):
    check_data(ALGORITHMS[name], "all_reduce", group(6, 2), OPERATIONS[redop])


def test_a_barrier_lets_nobody_go_before_everybody_came():
    members = group(11, 2)
    schedule = ALGORITHMS["direct"].schedule(Request("barrier", 0.0), members, ())
    knows = [{m} for m in range(11)]
    carried = []
    arrived = [set() for _ in range(11)]
    for t, (src, dst) in enumerate(zip(schedule.src.tolist(), schedule.dst.tolist(), strict=True)):
        needs = schedule.after[schedule.after_ptr[t] : schedule.after_ptr[t + 1]].tolist()
        carried.append({src}.union(*(carried[need] for need in needs)))
        assert all(schedule.dst[need] == src for need in needs)
        arrived[dst] |= carried[t]
    assert all(own | got == set(range(11)) for own, got in zip(knows, arrived, strict=True))


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind", "n", "nodes"), SCHEDULED)
def test_the_schedule_moves_the_bytes_of_the_traffic_on_every_edge(name, kind, n, nodes):
    check_edges(ALGORITHMS[name], kind, group(n, nodes))


VOLUME = {
    ("ring", "all_reduce"): lambda n: 2 * (n - 1),
    ("ring", "all_gather"): lambda n: n - 1,
    ("ring", "reduce_scatter"): lambda n: n - 1,
    ("ring", "broadcast"): lambda n: n - 1,
    ("ring", "reduce"): lambda n: n - 1,
    ("tree", "all_reduce"): lambda n: 2 * (n - 1),
    ("tree", "broadcast"): lambda n: n - 1,
    ("tree", "reduce"): lambda n: n - 1,
    ("hierarchical", "all_reduce"): lambda n: 2 * (n - 1),
    ("pat", "all_gather"): lambda n: n - 1,
    ("pat", "reduce_scatter"): lambda n: n - 1,
    ("direct", "all_reduce"): lambda n: n * (n - 1),
    ("direct", "all_to_all"): lambda n: n - 1,
    ("direct", "scatter"): lambda n: (n - 1) / n,
    ("direct", "gather"): lambda n: (n - 1) / n,
    ("sequential", "all_reduce"): lambda n: 2 * (n - 1),
    ("ring_unsplit", "all_reduce"): lambda n: n * (n - 1),
}
"""Bytes sent by all members together, per byte of S."""


@pytest.mark.parametrize(("n", "nodes"), [(2, 1), (8, 1), (6, 2), (16, 2), (24, 3)])
@pytest.mark.parametrize(("name", "kind"), sorted(VOLUME))
def test_the_bytes_sent_are_the_algorithms_known_volume(name, kind, n, nodes):
    members = group(n, nodes)
    traffic = ALGORITHMS[name].traffic(Request(kind, 1.0), members, laid(name, members))
    assert traffic.fraction.sum() == pytest.approx(VOLUME[name, kind](n))


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(("kind", "passes"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
def test_halving_doubling_sends_as_little_as_a_ring_at_powers_of_two(n, kind, passes):
    members = group(n, max(1, n // 8))
    traffic = ALGORITHMS["halving_doubling"].traffic(Request(kind, 1.0), members, ())
    sent = np.bincount(traffic.src, weights=traffic.fraction)
    assert sent == pytest.approx(np.full(n, passes * (n - 1) / n))
    assert traffic.steps == passes * np.log2(n)


def test_large_groups_sample_pairs_and_keep_the_bytes_of_every_member():
    topology = machine("hgx-h100", 64)
    members = Group(topology, topology.gpus)
    traffic = ALGORITHMS["direct"].traffic(Request("all_to_all", 1.0), members, ())
    crossing = members.nodes[traffic.src] != members.nodes[traffic.dst]
    n = members.size
    assert len(traffic.src) < n * (n - 1) / 4
    for ends in (traffic.src, traffic.dst):
        outside = np.bincount(ends[crossing], weights=traffic.fraction[crossing], minlength=n)
        inside = np.bincount(ends[~crossing], weights=traffic.fraction[~crossing], minlength=n)
        assert outside == pytest.approx(np.full(n, (n - 8) / n))
        assert inside == pytest.approx(np.full(n, 7 / n))


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind", "n", "nodes"), CASES)
def test_no_plan_beats_the_lower_bound(name, kind, n, nodes):
    members = group(n, nodes)
    request = request_for(name, kind, members)
    found = plan(request, members, "ideal")
    assert found.time(members.topology.link_bandwidth) >= found.lower_bound * (1 - 1e-9)
    assert found.lower_bound > 0


@settings(max_examples=60, deadline=None)
@given(
    pair=st.sampled_from(PAIRS),
    counts=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    n_channels=st.integers(1, 9),
    nbytes=st.floats(0, 1e10),
    data=st.data(),
    name=st.sampled_from(["hgx-h100", "hgx-a100", "dgx-1v", "aws-p5", "pcie-a100", "polaris-a100"]),
)
def test_any_subset_of_gpus_gets_a_plan_above_its_bound_or_one_clear_error(
    pair, counts, n_channels, nbytes, data, name
):
    topology = machine(name, len(counts))
    chosen = [
        data.draw(st.lists(st.sampled_from(topology.node_gpus(i).tolist()), min_size=1, max_size=c, unique=True))
        for i, c in enumerate(counts)
    ]
    members = Group(topology, np.array([gpu for node in chosen for gpu in node]))
    algorithm, kind = pair
    request = Request(kind, nbytes, algorithm=algorithm)
    try:
        found = plan(request, members, "ideal", n_channels)
    except ProgramError:
        # Only these ask something of the machine; the rest take any group that can reach itself.
        if algorithm not in TAKES:
            raise
        return
    except TopologyError:
        if topology.n_nodes == 1 or len(topology.nics):
            raise
        return
    assert found.time(topology.link_bandwidth) >= found.lower_bound * (1 - 1e-9)
    assert np.all(found.weights > 0)


@pytest.mark.parametrize("algorithm", ["ring", "direct", "tree"])
def test_the_shortest_way_between_nodes_may_be_a_rail_that_is_near_one_end_alone(algorithm):
    topology = machine("hgx-h100", 2)
    members = Group(topology, np.array([topology.node_gpus(0)[0], topology.node_gpus(1)[1]]))
    found = plan(Request("broadcast", 0.0, algorithm=algorithm), members, "ideal", 1)
    assert found.time(topology.link_bandwidth) >= found.lower_bound > 0


def test_a_group_of_one_costs_nothing():
    members = group(1, 1)
    found = plan(Request("all_reduce", 2.0**30), members, "ideal")
    assert found.time(members.topology.link_bandwidth) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "ncll"}, r"no collective backend 'ncll'"),
        ({"algorithm": "rign"}, r"no algorithm 'rign'; did you mean 'ring'\?"),
        ({"algorithm": "pat"}, r"algorithm 'pat' does not do 'all_reduce'; it does all_gather, reduce_scatter"),
        ({"root": 8}, r"root 8 is not a position in a group of 8"),
        ({"nbytes": -1.0}, r"a collective of -1.0 bytes"),
        ({"n_channels": 0}, r"at least one channel, not 0"),
    ],
)
def test_a_request_that_cannot_be_planned_says_why(change, message):
    options = {"kind": "all_reduce", "nbytes": 1.0, **change}
    backend = options.pop("backend", "ideal")
    n_channels = options.pop("n_channels", None)
    with pytest.raises(ProgramError, match=message):
        plan(Request(**options), group(8, 1), backend, n_channels)


@pytest.mark.parametrize(("n", "nodes"), [(2, 1), (8, 1), (11, 2), (16, 2), (24, 3)])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_volume_per_member_is_what_the_algorithms_edges_carry(name, n, nodes):
    members = group(n, nodes)
    played = 0
    for kind in sorted(ALGORITHMS[name].kinds - {"send"}):  # a send has its own op on each side
        try:
            check_sends(ALGORITHMS[name], kind, members)
        except ProgramError:  # nvls beyond a node, nvls_tree inside one
            continue
        played += 1
        assert per_member(kind, n, name, n_islands=members.n_nodes) == ALGORITHMS[name].sends(kind, n, members.n_nodes)
    assert played or name in TAKES


def test_bytes_of_an_algorithm_that_nobody_knows_are_an_error_and_not_the_least():
    with pytest.raises(ProgramError, match=r"no algorithm 'rign'; did you mean 'ring'\?"):
        per_member("all_reduce", 8, "rign")
    with pytest.raises(ProgramError, match=r"algorithm 'pat' does not do 'all_reduce'; it does all_gather"):
        per_member("all_reduce", 8, "pat")


def test_an_algorithm_of_open_mpi_that_is_built_of_others_sends_what_they_send():
    """A reduce and a broadcast, n - 1 tensors each; a gather and a broadcast."""
    assert per_member("all_reduce", 8, "nonoverlapping", nbytes=2.0**20) == pytest.approx((2 * 7 / 8, 2 * 7 / 8))
    assert per_member("all_gather", 8, "linear", nbytes=2.0**20)[0] > 7 / 8  # what the root hands out is whole


@pytest.mark.parametrize("backend", ["nccl", "ideal"])
def test_a_misspelt_algorithm_is_told_the_names_that_the_field_takes(backend):
    with pytest.raises(ProgramError, match=r"halving_doubling.*sequential") as error:
        plan(Request("all_reduce", 2.0**20, algorithm="xyzzy"), group(16, 2), backend)
    assert "bruck" not in str(error.value) or backend == "ideal"  # it does not do all_reduce
