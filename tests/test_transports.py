"""Transports are rows: a topology names one, and everything the models know of it is in its row."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from clustersim import fabrics
from clustersim.collectives.base import Group, Request
from clustersim.collectives.costs import costs_of
from clustersim.collectives.nccl.pins import pinned_algorithms, pinned_protocols
from clustersim.collectives.nccl_backend import choice
from clustersim.costs import COSTS
from clustersim.errors import ProgramError
from clustersim.fabrics.schema import Net
from clustersim.transports import TRANSPORTS, transport


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
    assert 0 < row.ll <= 1
    assert (COSTS.net_extra[net], COSTS.net_share[net], COSTS.net_ll[net]) == (row.hop, row.share, row.ll)


@pytest.mark.parametrize("net", TRANSPORTS)
@pytest.mark.parametrize("nbytes", [8.0, 2.0**20, 2.0**30])
def test_only_protocols_that_the_transport_supports_are_chosen_between_nodes(net, nbytes):
    assert choice(Request("all_reduce", nbytes), over(net)).protocol in transport(net).protocols


def test_streams_of_a_known_rate_fill_a_slow_nic_and_not_a_fast_one():
    slow, fast = (over("tcp", nic=name) for name in ("hgx-v100-4gpu-10g", "hgx-a100-2x100g-tcp"))
    assert costs_of(slow).net_share["tcp"] == TRANSPORTS["tcp"].share
    assert costs_of(fast).net_share["tcp"] == pytest.approx(5.0e9 / 12.5e9)


def test_lists_and_lists_by_collective_are_read_as_nccl_reads_them():
    assert pinned_algorithms("Ring,Tree") == ("tree", "ring")
    assert "tree" not in (pinned_algorithms("^Tree") or ())
    assert pinned_algorithms("ring;allreduce:tree", "all_reduce") == ("tree",)
    assert pinned_algorithms("ring;allreduce:tree", "broadcast") == ("ring",)
    assert pinned_algorithms("allreduce:tree", "broadcast") is None
    assert pinned_protocols("allgather:^LL128,Simple", "all_gather") == ("LL",)
    with pytest.raises(ProgramError, match="allreduce"):
        pinned_algorithms("alreduce:tree")
