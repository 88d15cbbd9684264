"""Gloo between processes of one host: closed forms of its constants, ranks that share a CPU."""

from __future__ import annotations

import numpy as np
import pytest

from clustersim import fabrics
from clustersim.collectives.base import Group, Request
from clustersim.collectives.gloo import plan
from clustersim.costs import GLOO_COSTS as COSTS
from clustersim.topology import CPU


def on_one_cpu(n: int) -> Group:
    machine = fabrics.load("dgx-1v", nodes=1)
    cpu = machine.vertex_kinds.index(CPU)
    return Group(machine, np.full(n, cpu, dtype=np.int64))


@pytest.mark.parametrize("kind", ["broadcast", "all_to_all", "sendrecv"])
def test_two_ranks_of_one_cpu_take_a_call_a_message_and_the_copies_of_the_busiest_process(kind):
    # broadcast: S out of one process; all_to_all: half out and half in; sendrecv: all of it out and in.
    group, size = on_one_cpu(2), 2.0**24
    copies = 2.0 if kind == "sendrecv" else 1.0
    seconds = plan(Request(kind, size), group).time(group.topology.link_bandwidth)
    assert seconds == pytest.approx(COSTS.call + COSTS.message + copies * size / COSTS.stream)


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_that_share_a_cpu_are_bound_by_no_link(n):
    group = on_one_cpu(n)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "reduce", "scatter", "gather", "barrier"):
        found = plan(Request(kind, 0.0 if kind == "barrier" else 2.0**20), group)
        assert found.lower_bound == 0.0
        assert not len(found.links)
        assert found.time(group.topology.link_bandwidth) > COSTS.call
