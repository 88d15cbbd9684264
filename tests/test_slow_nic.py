"""A slow NIC: one that says so has fewer channels, one that does not slows the whole ring."""

from __future__ import annotations

import numpy as np
import pytest

from clustersim import collectives, scenario
from clustersim.app.cli import main
from clustersim.cluster import files as fabrics
from clustersim.cluster.files import Change
from clustersim.collectives.base import Group, Request
from clustersim.collectives.channels import channels
from clustersim.collectives.nccl.derive import system_of
from clustersim.collectives.nccl.uneven import of_group
from clustersim.core.errors import TopologyError

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
    for more, words in (({"bandwidth": "200 Gb/s"}, "search counts with"), ({"factor": 0.5}, "of what NCCL reads")):
        made = scenario.load(base, {"cluster.nodes": 2, "cluster.changes": [change | more], "run.steps": 1})
        assert any(words in note for note in made.prepare().notes)


def ways(topology, name):
    """Seconds of an all_reduce at three sizes, by (size, algorithm, protocol)."""
    group = Group(topology, fabrics.mesh(topology).gpus)
    taken = {}
    for size in (2.0**20, 2.0**26, 2.0**32):
        for algorithm, protocol in WAYS[name]:
            made = collectives.plan(Request("all_reduce", size, algorithm=algorithm, protocol=protocol), group)
            taken[size, algorithm, protocol] = made.time(topology.link_bandwidth)
    return taken


PCIE_WAYS = [(algorithm, protocol) for algorithm in ("ring", "tree") for protocol in ("LL", "Simple")]
NVLINK_WAYS = [*PCIE_WAYS, ("ring", "LL128"), ("tree", "LL128")]
WAYS = {
    "hgx-a100": NVLINK_WAYS,
    "hgx-a100-800g": NVLINK_WAYS,
    "polaris-a100": PCIE_WAYS,
    "pcie-a100": PCIE_WAYS,
    "hgx-h100": [*NVLINK_WAYS, ("nvls_tree", "Simple")],
}
LEFT = {"pcie-a100": 0.025}
"""By how much faster, all the same: three heads in turn send by LL what one GPU's slot was full with."""


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("name", WAYS)
def test_a_slower_nic_on_any_nodes_never_makes_an_all_reduce_faster(name, nodes):
    """A NIC at half rate had NCCL lay 15 narrow channels for 8, each with a whole channel's cap: 205.7 of 175.6 GB/s.

    Each algorithm and protocol by itself: the tuner does not know our law, and may turn to what it should have taken.
    """
    healthy = fabrics.load(name, nodes=nodes)
    least = ways(healthy, name)
    rate, odd = (RATE, 0.75 * RATE) if name == "hgx-h100" else (RATE / 2, RATE / 4)
    floor = 1 - LEFT.get(name, 1e-9)
    everywhere = ("node*/nic0", "node1/nic1", "node0/nic*", "node*/nic*")
    for where in everywhere if name != "pcie-a100" else everywhere[:1]:  # NCCL's search of it takes a second a rate
        for change in ({"bandwidth": odd}, {"bandwidth": rate / 4}, {"factor": 0.5}):
            slow = ways(fabrics.change(healthy, Change(where, **change)), name)
            assert [way for way in least if slow[way] < least[way] * floor] == [], (where, change)


def test_a_half_rate_nic_on_all_nodes_is_slower_than_the_healthy_machine_by_nccls_own_choice():
    """What was filed: 199.9 GB/s for 190.8, with one NIC of eight at half of its rate on both nodes."""
    slow = Change("node*/nic0", bandwidth=RATE / 4)
    assert seconds(machine="hgx-a100", algorithm=None) < seconds(slow, machine="hgx-a100", algorithm=None)


@pytest.mark.parametrize(
    ("where", "change", "words"),
    [
        ("node0/nic3", 'bandwidth = "100 Gb/s"', "no ring of NCCL's takes node0/nic3: 12.5 GB/s beside 50 GB/s"),
        ("node*/nic3", 'bandwidth = "100 Gb/s"', "no ring of NCCL's takes node0/nic3, node1/nic3: 12.5 GB/s"),
        ("node0/nic3", "factor = 0.5", "node0/nic3 -> node0/pcie3 and 3 more links: 0.5 of the rate they say"),
    ],
)
def test_a_machine_file_that_slows_a_nic_is_told_by_check_run_and_explain(tmp_path, capsys, where, change, words):
    """Of a change of the machine's own file a run said nothing, and nobody that NCCL leaves the NIC out."""
    file = tmp_path / "mine.toml"
    file.write_text(f'name = "mine"\nextends = "hgx-h100"\n[[changes]]\nmatch = "{where}"\n{change}\n')
    machine = ["--set", f"cluster.topology={file}", "--set", "cluster.nodes=2", "--set", "run.steps=1"]
    base = "fsdp_llama3_8b_64x8_h100"
    for command in (["check", str(file), "--nodes", "2"], ["run", base, *machine], ["explain", base, *machine]):
        with pytest.raises(SystemExit) as done:
            main(command)
        assert not done.value.code
        assert capsys.readouterr().out.count(words) == 1, command


def test_a_nic_that_still_has_a_channel_is_not_called_left_out():
    """Half a per cent less is no slow NIC to the layout of channels."""
    slow = fabrics.change(fabrics.load("hgx-h100", nodes=NODES), Change("node*/nic2", bandwidth=RATE * 0.995))
    assert list(of_group(Group(slow, fabrics.mesh(slow).gpus))) == []


def test_a_part_without_its_node_is_named_with_it():
    with pytest.raises(TopologyError, match=r"did you mean 'node0/nic3', or 'node\*/nic3' of every node"):
        fabrics.change(fabrics.load("hgx-h100", nodes=NODES), Change("nic3", factor=0.5))


@pytest.mark.parametrize(("factor", "told"), [(2, 1), (1, 0), (0.5, 0)])
def test_check_says_which_links_are_faster_than_their_hardware_and_by_how_much(tmp_path, capsys, factor, told):
    """A factor above 1 passed in silence, and what was computed of the machine was of none that exists."""
    file = tmp_path / "mine.toml"
    file.write_text(f'name = "mine"\nextends = "hgx-h100"\n[[changes]]\nmatch = "node*/nic3"\nfactor = {factor}\n')
    with pytest.raises(SystemExit) as done:
        main(["check", str(file), "--nodes", "2"])
    assert not done.value.code
    words = "node0/nic3 -> node0/pcie3 and 7 more links: 2 times the rate of the hardware"
    output = " ".join(capsys.readouterr().out.split())
    assert output.count(words) == output.count("a what-if, not a machine") == told


def test_a_run_notes_a_factor_above_one_in_the_words_of_check():
    changes = {"cluster.changes": [{"match": "*/gpu0 -> *", "factor": 2.0}]}
    prepared = scenario.load("ddp_resnet50_1x8_v100", changes).prepare()
    (note,) = (text for text in prepared.notes if "a what-if, not a machine" in text)
    assert note in prepared.topology.assumed
    plain = scenario.load("ddp_resnet50_1x8_v100").prepare()
    assert not any("what-if" in text for text in plain.notes)
