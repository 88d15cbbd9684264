"""Transports are rows: a topology names one, and everything the models know of it is in its row."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from clustersim.calibrate.validate_nccl import measured
from clustersim.cluster import files as fabrics
from clustersim.cluster.files.schema import Net
from clustersim.collectives.base import Group, Request
from clustersim.collectives.costs import costs_of
from clustersim.collectives.grouped_sends import p2p_device
from clustersim.collectives.nccl.p2p_parts import LL_THRESHOLD
from clustersim.collectives.nccl.pins import pinned_algorithms, pinned_protocols
from clustersim.collectives.nccl_backend import NcclChoice, choice, seconds
from clustersim.collectives.nccl_terms import host_floor
from clustersim.core.costs import COSTS, overlaid
from clustersim.core.errors import ProgramError
from clustersim.core.transports import TRANSPORTS, transport


def over(net: str, nodes: int = 2, nic: str = "hgx-a100") -> Group:
    machine = fabrics.load(nic, nodes=nodes)
    machine = replace(machine, node_types=tuple(replace(kind, net=net) for kind in machine.node_types))
    return Group(machine, fabrics.mesh(machine).gpus)


def test_a_topology_file_may_name_every_transport_and_no_other():
    assert set(get_args(Net)) == {*TRANSPORTS, "none"}


@pytest.mark.parametrize("net", TRANSPORTS)
def test_every_transport_has_a_source_and_its_constants(net):
    row = transport(net)
    assert row.source
    assert 0 < row.share <= 1
    assert (COSTS.net_extra[net], COSTS.net_share[net], COSTS.rendezvous[net]) == (row.hop, row.share, row.rendezvous)


@pytest.mark.parametrize("net", TRANSPORTS)
@pytest.mark.parametrize("nbytes", [8.0, 2.0**20, 2.0**30])
def test_only_protocols_that_the_transport_supports_are_chosen_between_nodes(net, nbytes):
    assert choice(Request("all_reduce", nbytes), over(net)).protocol in transport(net).protocols


def test_streams_of_a_known_rate_fill_a_slow_nic_and_not_a_fast_one():
    slow, fast = (over("tcp", nic=name) for name in ("hgx-v100-4gpu-10g", "hgx-a100-2x100g-tcp"))
    assert costs_of(slow).net_share["tcp"] == TRANSPORTS["tcp"].share
    assert costs_of(fast).net_share["tcp"] == pytest.approx(5.0e9 / 12.5e9)


def test_a_slow_network_slows_no_link_inside_a_node():
    # 4 GB over the 32 GPUs of 4 nodes took 1.53 s, 5.1 GB/s: topologies/jeanzay-a100.toml. Without GPUDirect each byte
    # crosses the switch's up-link twice, which is no slower for what the NIC is.
    machine = fabrics.load("jeanzay-a100", nodes=4)
    everyone = Group(machine, fabrics.mesh(machine).gpus)
    chosen = choice(Request("all_reduce", 4e9), everyone)
    assert seconds(chosen, costs_of(everyone)) == pytest.approx(1.53, rel=0.05)


def test_lists_and_lists_by_collective_are_read_as_nccl_reads_them():
    assert pinned_algorithms("Ring,Tree") == ("tree", "ring")
    assert "tree" not in (pinned_algorithms("^Tree") or ())
    assert pinned_algorithms("ring;allreduce:tree", "all_reduce") == ("tree",)
    assert pinned_algorithms("ring;allreduce:tree", "broadcast") == ("ring",)
    assert pinned_algorithms("allreduce:tree", "broadcast") is None
    assert pinned_protocols("allgather:^LL128,Simple", "all_gather") == ("LL",)
    with pytest.raises(ProgramError, match="allreduce"):
        pinned_algorithms("alreduce:tree")


def test_a_rack_scale_nvlink_domain_may_be_cut_unevenly():
    machine = fabrics.load("gb200-nvl72", nodes=27)  # 14 trays in one rack, 13 in the next
    group = Group(machine, fabrics.mesh(machine).gpus)
    chosen = choice(Request("all_reduce", 2.0**28), group)
    assert chosen.algorithm == "nvls_tree"
    assert seconds(chosen, costs_of(group)) > 0


def row(**changes: str) -> dict[str, str]:
    usual = {"case_id": "a", "topology": "hgx-h100", "nodes": "1", "ranks": "8", "collective": "all_reduce"}
    return {**usual, "size_bytes": "1024", "time_us": "20", **changes}


def test_a_row_that_ran_is_predicted_however_its_ranks_and_pins_are_told():
    _, request, _ = measured(row(env="NCCL_ALGO=CollnetDirect"))  # needs SHARP, so NCCL fell back
    assert request.algorithm is None
    assert measured(row(env="NCCL_ALGO=Ring,Tree"))[1].algorithm == "Ring,Tree"
    assert measured(row(topology="gb200-nvl72", ranks="72"))[2].n_nodes == 18  # one rack
    counts = np.bincount(measured(row(nodes="2", ranks="9"))[2].nodes)
    assert counts.tolist() == [5, 4]
    for wrong in (row(ranks="16"), row(nodes="4", ranks="3")):
        with pytest.raises(ValueError, match="ranks"):
            measured(wrong)


def test_a_log_that_does_not_say_is_taken_as_most_of_its_days():
    box = {"topology": "pcie-rtx3090", "ranks": "4"}
    group = measured(row(**box))[2]
    assert (group.launch, group.nccl_version) == ("single_process", (2, 14))
    assert measured(row(**box, notes="mpirun, one process per GPU"))[2].launch == "process_per_gpu"
    assert measured(row(nccl_version="2.26.2"))[2].nccl_version == (2, 26)


def of_all_gather(group: Group, nbytes: float, protocol: str, algorithm: str = "ring") -> NcclChoice:
    kind = "all_reduce" if algorithm == "tree" else "all_gather"
    return choice(Request(kind, nbytes, algorithm=algorithm, protocol=protocol), group)


@pytest.mark.parametrize("nodes", [2, 8])
def test_a_trees_messages_above_the_eager_limit_wait_for_their_receivers_at_every_hop(nodes):
    """On two nodes of Polaris 2 KiB take 30 us and 4 KiB 39 us, on eight 83 and 104: LL's flags double the message."""
    group = over("slingshot", nodes)
    without = overlaid(COSTS, {"rendezvous.slingshot": 0.0})
    eager = TRANSPORTS["slingshot"].eager
    hops = 2 * COSTS.tree_levels * np.log2(nodes)
    for nbytes in (2.0**11, 2.0**12, 2.0**16, 2.0**18, 2.0**20):
        chosen = of_all_gather(group, nbytes, "LL", "tree")
        message = 2 * nbytes / chosen.blocks
        waits = hops * COSTS.rendezvous["slingshot"] * min(message, 2.0**15) / eager if message >= eager else 0.0
        assert seconds(chosen, COSTS) - seconds(chosen, without) == pytest.approx(waits, rel=0.02)


@pytest.mark.parametrize(("protocol", "times"), [("LL", 1.0), ("LL128", 1.0), ("Simple", 2.0)])
def test_a_rings_messages_are_handled_one_after_the_other(protocol, times):
    """Twice the blocks take twice as long (Polaris, 128 nodes: 3.9, 7.7 and 14.8 ms for 1, 2 and 4)."""
    group = over("slingshot", 8)
    chosen = of_all_gather(group, 2.0**19 * group.size, protocol)
    messages = (group.size - 1) * chosen.blocks
    assert seconds(chosen, COSTS) >= 0.99 * times * messages * COSTS.rendezvous["slingshot"]
    twice = overlaid(COSTS, {"rendezvous.slingshot": 1e-4})
    more = overlaid(COSTS, {"rendezvous.slingshot": 2e-4})
    assert seconds(chosen, more) == pytest.approx(2 * seconds(chosen, twice), rel=1e-3)


def test_a_large_ring_waits_for_small_messages_too_and_for_none_that_keeps_its_nic_busy():
    """Small all_gathers on Polaris: 60 us on 8 nodes (32 ranks), 3.9 ms on 128 (512) and 8.0 ms on 256 (1,024)."""
    on = {nodes: Group(m := fabrics.load("polaris-a100", nodes=nodes), fabrics.mesh(m).gpus) for nodes in (8, 128, 256)}
    times = {nodes: seconds(of_all_gather(group, 2.0**14, "LL"), costs_of(group)) for nodes, group in on.items()}
    assert times[8] == pytest.approx(66e-6, rel=0.3)
    assert times[128] == pytest.approx(3.84e-3, rel=0.45)
    assert times[256] == pytest.approx(8.1e-3, rel=0.45)
    large = of_all_gather(on[8], 2.0**33, "Simple")
    assert seconds(large, COSTS) == seconds(large, overlaid(COSTS, {"rendezvous.slingshot": 0.0}))


def test_verbs_handle_messages_as_they_come():
    chosen = of_all_gather(over("ib", 32), 2.0**20, "LL")
    assert seconds(chosen, COSTS) == seconds(chosen, overlaid(COSTS, {"rendezvous.ib": 1.0, "net_extra.ib": 0.0}))


@pytest.mark.parametrize(("version", "where"), [((2, 21), "queue"), ((2, 22), "arguments")])
def test_whoever_drives_a_gpu_writes_down_its_kernels_blocks_before_the_launch(version, where):
    machine = fabrics.load("hgx-a100", nodes=1)
    modes = ("single_process", "process_per_gpu", "threads")
    groups = [Group(machine, fabrics.mesh(machine).gpus, mode, version) for mode in modes]
    more = [host_floor("all_reduce", of, COSTS, 24) - host_floor("all_reduce", of, COSTS, 0) for of in groups]
    assert more == pytest.approx([8 * 24 * COSTS.host_block[where], *2 * [24 * COSTS.host_block[where]]])


def test_a_batch_of_eight_peers_waits_for_the_one_before_it_over_a_network():
    def beyond_the_bytes(nodes: int, per_peer: float) -> float:
        machine = fabrics.load("hgx-a100", nodes=nodes)
        group = Group(machine, fabrics.mesh(machine).gpus)
        return p2p_device(Request("all_to_all", per_peer * group.size), group, COSTS)(0.0)

    for per_peer in (LL_THRESHOLD, LL_THRESHOLD + 1):  # of neither size by LL, whose buffers a network's sends have not
        more = beyond_the_bytes(4, per_peer) - beyond_the_bytes(2, per_peer)  # 32 peers are 4 batches, 16 are 2
        assert more == pytest.approx(2 * COSTS.hop["net/Simple"] * COSTS.ring_net["Simple"], rel=1e-9)
