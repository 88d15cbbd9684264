"""Times on machines that nobody measured: above the wires' bound, never less for more bytes, no cliff of our own."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from conftest import ROOT

from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group, Request
from clustersim.collectives.bounds import lower_bound
from clustersim.collectives.costs import costs_of
from clustersim.collectives.nccl_backend import choice, seconds
from clustersim.collectives.rccl_scripts import SCRIPTED_FROM
from clustersim.core.transports import transport

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "sendrecv", "gather")
SIZES = [2.0**p for p in range(3, 34, 2)]
CLIFF = 1.5
"""Times as long as four times the bytes should take at most, where NCCL takes the same way for both."""
SWITCH = 0.75
"""Of the time of fewer bytes that NCCL's change to another protocol may leave."""
SCRIPT = 0.45
"""The same of RCCL's change to a script: eight MI300X take 22.9 us for 512 bytes and 13.1 for 1 KiB."""
SHIPPED = sorted(path.stem for path in (ROOT / "topologies").glob("*.toml") if path.stem != "cpu-gloo")
MACHINES = random.Random(38).sample(SHIPPED, 7)


def groups(name: str) -> Iterator[Group]:
    """Of all ranks, on one node, on two, and on up to 128 GPUs."""
    node = fabrics.load(name, nodes=1)
    per_node = len(fabrics.mesh(node).gpus)
    joined = node.node_types[0].net != "none"
    for nodes in (1, 2, 128 // per_node) if joined else (1,):
        machine = fabrics.load(name, nodes=nodes)
        if nodes * per_node > 1:
            yield Group(machine, fabrics.mesh(machine).gpus)


@pytest.mark.parametrize("name", MACHINES)
def test_times_keep_the_bound_and_grow_with_the_bytes(name):
    for group in groups(name):
        costs = costs_of(group)
        # Where a message waits for its receiver, larger messages do take less: 16 and 32 MiB on four nodes of Alps.
        waits = group.n_nodes > 1 and transport(group.node_type.net).eager < math.inf
        for kind in KINDS:
            if kind in ("all_to_all", "gather") and group.size > 64:
                continue
            chosen = [choice(Request(kind, nbytes), group) for nbytes in SIZES]
            times = [seconds(one, costs) for one in chosen]
            assert all(time >= lower_bound(one.request, group) for one, time in zip(chosen, times, strict=True))
            for before, after, first, second in zip(chosen, chosen[1:], times, times[1:], strict=False):
                same = (before.algorithm, before.protocol) == (after.algorithm, after.protocol)
                where = f"{kind} of {after.request.nbytes:.0f} B on {group.n_nodes} nodes"
                least = first if same else SWITCH * first
                if group.node_type.gpu.amd and before.request.nbytes < SCRIPTED_FROM <= after.request.nbytes:
                    least = SCRIPT * first
                assert waits or second >= least, where
                assert waits or not same or second < 4.0 * CLIFF * first, where


@pytest.mark.parametrize("name", MACHINES[::3])
def test_a_larger_machine_is_no_faster_at_what_all_of_it_must_hear_of(name):
    """Over a network: within one, all of a node's GPUs may share what only some then do."""
    rings = [group for group in groups(name) if group.n_nodes > 1]
    for small, large in pairwise(rings):
        for nbytes in (8.0, 2.0**30):
            few, many = (seconds(choice(Request("all_reduce", nbytes), on), costs_of(on)) for on in (small, large))
            assert many > 0.95 * few
