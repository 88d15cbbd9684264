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


def seconds(*changes, machine="hgx-h100", algorithm="ring"):
    topology = fabrics.change(fabrics.load(machine, nodes=NODES), *changes)
    group = Group(topology, fabrics.mesh(topology).gpus)
    return collectives.plan(Request("all_reduce", SIZE, algorithm=algorithm), group).time(topology.link_bandwidth)


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


@pytest.mark.parametrize("algorithm", ["ring", "tree", "nvls_tree"])
@pytest.mark.parametrize("where", ["node1/nic2", "node*/nic2"])
def test_a_nic_that_is_gone_or_says_it_is_slow_takes_its_eighth_alone(where, algorithm):
    """A NIC removed on one node halved the ring, whose rails no longer met, and NVLS tree kept a head on a slow one."""
    gone, slow = Change(where, remove=True), Change(where, bandwidth=RATE / 4)
    for change in (gone, slow):
        share = seconds(algorithm=algorithm) / seconds(change, algorithm=algorithm)
        assert 0.98 * 7 / 8 < share <= 1.0


@pytest.mark.parametrize("machine", ["hgx-a100", "hgx-h100"])
def test_a_machine_without_a_nic_is_no_slower_than_with_one_that_hides_half(machine):
    hidden = seconds(Change("node1/nic2", factor=0.5), machine=machine)
    assert seconds(Change("node1/nic2", remove=True), machine=machine) < hidden


def test_of_equals_the_slow_nic_is_the_busy_one():
    """Half of the rate leaves room for one channel of two: the fast NICs have one each, none of them two."""
    slow = fabrics.change(fabrics.load("hgx-a100", nodes=NODES), Change("node1/nic2", bandwidth=RATE / 4))
    laid = channels(Group(slow, fabrics.mesh(slow).gpus), 8)
    assert np.bincount([one.nic for one in laid], minlength=8).tolist() == [1] * 8


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
    assert used[2] == (count > 7)
    assert max(used) - min(np.delete(used, 2)) <= 1


def test_a_run_says_which_was_meant():
    change = {"match": "node0/nic0"}
    base = "fsdp_llama3_8b_64x8_h100"
    for more, words in (({"bandwidth": "200 Gb/s"}, "plans around"), ({"factor": 0.5}, "of what NCCL reads")):
        made = scenario.load(base, {"cluster.nodes": 2, "cluster.changes": [change | more], "run.steps": 1})
        assert any(words in note for note in made.prepare().notes)
