"""A NIC that says that it is slow, and one that hides it: what NCCL's tuner makes of either, over machines."""

from __future__ import annotations

from functools import lru_cache

import pytest

from clustersim import collectives
from clustersim.cluster import files as fabrics
from clustersim.cluster.files import Change
from clustersim.collectives.base import Group, Request
from clustersim.collectives.nccl.derive import system_of
from clustersim.collectives.nccl.tuner import TunerCandidate, candidates, choose

MACHINES = ("polaris-a100", "hgx-h100", "hgx-a100")
NAMES = {"ring": "Ring", "tree": "Tree", "nvls_tree": "NVLSTree"}
SIZE = 2.0**27


@lru_cache
def group(name: str, *changes: Change) -> Group:
    """Two nodes of a machine."""
    topology = fabrics.change(fabrics.load(name, nodes=2), *changes)
    return Group(topology, topology.gpus)


def declared(name: str, match: str) -> Change:
    rate = {"polaris-a100": 25e9, "hgx-h100": 50e9, "hgx-a100": 25e9}[name]
    return Change(match, bandwidth=rate / 2)


def seconds(members: Group, pair: TunerCandidate) -> float:
    """Of an all_reduce that is pinned to a pair."""
    request = Request("all_reduce", SIZE, algorithm=NAMES[pair.algorithm], protocol=pair.protocol)
    return collectives.plan(request, members, backend="nccl").time(members.topology.link_bandwidth)


def chosen(members: Group) -> TunerCandidate:
    return choose("all_reduce", SIZE, system_of(members))


@pytest.mark.parametrize("match", ["node*/nic0", "node*/nic*"])
@pytest.mark.parametrize("name", MACHINES)
def test_with_the_pair_that_runs_a_declared_slow_nic_makes_nothing_faster(name, match):
    """Where a collective gets faster with a slower NIC, it is NCCL's own tuning that takes another pair then.

    Of two nodes it rates trees by what they carry inside of a node, channel by channel (src/graph/tuning.cc): more and
    slower channels are rated higher.
    """
    whole, slow = group(name), group(name, declared(name, match))
    for pair in candidates("all_reduce", SIZE, system_of(whole)):
        if pair.algorithm in NAMES:
            assert seconds(slow, pair) >= seconds(whole, pair) * (1 - 1e-9)
    before, after = chosen(whole), chosen(slow)
    if seconds(slow, after) < seconds(whole, before) * (1 - 1e-9):
        assert (after.algorithm, after.protocol) != (before.algorithm, before.protocol)


def test_the_tuner_takes_a_tree_on_polaris_where_a_nic_says_that_it_is_slow():
    whole, slow = group("polaris-a100"), group("polaris-a100", declared("polaris-a100", "node*/nic0"))
    assert (chosen(whole).algorithm, chosen(slow).algorithm) == ("ring", "tree")
    trees = [
        pair.time_s
        for members in (whole, slow)
        for pair in candidates("all_reduce", SIZE, system_of(members))
        if (pair.algorithm, pair.protocol) == ("tree", "Simple")
    ]
    assert trees[1] < trees[0]  # as NCCL rates them


@pytest.mark.parametrize("name", MACHINES)
def test_what_a_nic_hides_the_tuner_does_not_see(name):
    whole, hidden = group(name), group(name, Change("node*/nic0", factor=0.5))
    assert chosen(hidden) == chosen(whole)
    assert seconds(hidden, chosen(hidden)) > seconds(whole, chosen(whole))
