"""A slow NIC: one that says so has fewer channels, one that does not slows the whole ring."""

from __future__ import annotations

import numpy as np
import pytest

from clustersim import collectives, scenario
from clustersim.cluster import files as fabrics
from clustersim.cluster.files import Change
from clustersim.collectives.base import Group, Request
from clustersim.collectives.channels import channels
from clustersim.collectives.nccl.derive import system_of

SIZE = 4 * 2.0**30
NODES = 2
RATE = 50e9  # of a NIC


def seconds(*changes, machine="hgx-h100"):
    topology = fabrics.change(fabrics.load(machine, nodes=NODES), *changes)
    group = Group(topology, fabrics.mesh(topology).gpus)
    return collectives.plan(Request("all_reduce", SIZE, algorithm="ring"), group).time(topology.link_bandwidth)


def rates(*changes):
    topology = fabrics.change(fabrics.load("hgx-h100", nodes=NODES), *changes)
    view = system_of(Group(topology, fabrics.mesh(topology).gpus)).views[0]
    return [nic.bandwidth for nic in view.nics]


@pytest.mark.parametrize("gbps", [200, 100, 25])
@pytest.mark.parametrize("nic", [0, 3, 7])
def test_a_nic_that_says_it_is_slow_takes_what_it_can_or_nothing(gbps, nic):
    """168 of 363 GB/s were played, with the slow NIC in the ring as if it were a fast one."""
    slow = Change(f"node*/nic{nic}", bandwidth=gbps * 0.125e9)
    share = seconds() / seconds(slow)
    assert 0.93 * 7 / 8 < share <= 1.0


@pytest.mark.parametrize("factor", [0.5, 0.25])
def test_a_nic_that_hides_that_it_is_slow_holds_the_whole_ring_up(factor):
    slow = Change("node0/nic0", factor=factor)
    assert seconds() / seconds(slow) == pytest.approx(factor, rel=0.1)


def test_what_nccl_reads_is_the_declared_rate_and_never_the_hidden_one():
    assert rates(Change("node*/nic0", factor=0.5)) == [50.0] * 8
    assert rates(Change("node*/nic0", bandwidth=RATE / 2)) == [25.0, *[50.0] * 7]
    both = Change("node*/nic0", bandwidth=RATE / 2), Change("node*/nic0", factor=0.5)
    assert rates(*both) == [25.0, *[50.0] * 7]
    assert rates(*both[::-1]) == [25.0, *[50.0] * 7]


def test_the_slot_of_a_nic_stays_as_wide_as_it_is():
    topology = fabrics.load("hgx-h100", nodes=NODES)
    slow = fabrics.change(topology, Change("node0/nic0", bandwidth=RATE / 2))
    changed = np.flatnonzero(slow.link_bandwidth != topology.link_bandwidth)
    assert len(changed) == 2
    assert "pcie" not in {slow.link_kinds[i] for i in changed.tolist()}


@pytest.mark.parametrize("count", [3, 7, 8, 15])
def test_channels_take_nics_in_proportion_to_their_rates(count):
    slow = fabrics.change(fabrics.load("hgx-h100", nodes=NODES), Change("node*/nic2", bandwidth=RATE / 2))
    laid = channels(Group(slow, fabrics.mesh(slow).gpus), count)
    used = np.bincount([one.nic for one in laid], minlength=8)
    assert used.sum() == count
    assert used[2] == (count > 8)
    assert max(used) - min(np.delete(used, 2)) <= 1


def test_a_run_says_which_was_meant():
    change = {"match": "node0/nic0"}
    base = "fsdp_llama3_8b_64x8_h100"
    for more, words in (({"bandwidth": "200 Gb/s"}, "plans around"), ({"factor": 0.5}, "of what NCCL reads")):
        made = scenario.load(base, {"cluster.nodes": 2, "cluster.changes": [change | more], "run.steps": 1})
        assert any(words in note for note in made.prepare().notes)
