"""Gloo between processes of one host: closed forms of its constants, ranks that share a CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group, Request
from clustersim.collectives.gloo import chain_and_total, plan, reduced_bytes
from clustersim.core.costs import GLOO_COSTS as COSTS
from clustersim.core.topology import CPU
from clustersim.scenario import from_table
from clustersim.scenario.result import Result


def on_one_cpu(n: int) -> Group:
    machine = fabrics.load("dgx-1v", nodes=1)
    cpu = machine.vertex_kinds.index(CPU)
    return Group(machine, np.full(n, cpu, dtype=np.int64))


def one_a_node(n: int) -> Group:
    machine = fabrics.load("dgx-1v", nodes=n)
    cpus = [v for v, kind in enumerate(machine.vertex_kinds) if kind == CPU]
    return Group(machine, np.array(cpus[:: len(cpus) // n], dtype=np.int64))


def seconds(kind: str, size: float, group: Group) -> float:
    return plan(Request(kind, size), group).time(group.topology.link_bandwidth)


@pytest.mark.parametrize(("kind", "copies"), [("broadcast", 1.0), ("sendrecv", 2.0)])
def test_two_ranks_of_one_cpu_take_a_call_a_message_and_the_copies_of_the_busiest_process(kind, copies):
    # broadcast: S out of one process; sendrecv: all of it out and in. The buffers of both ranks fit the cache.
    group = on_one_cpu(2)
    size = 2.0**20
    expected = COSTS.call[kind] + COSTS.message + copies * size / COSTS.stream
    assert seconds(kind, size, group) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("n", "size", "passed", "blocks"),
    [
        (2, 9_600_000, [7_502_848, 8_388_608], [5_242_880, 4_357_120]),
        (3, 9_600_000, [7_502_848, 7_502_848, 9_600_000], [4_194_304, 4_194_304, 1_211_392]),
        (4, 67_108_864, [65_011_712] * 4, [16_777_216] * 4),
        (5, 20_000_000, [17_902_848] * 4 + [18_874_368], [4_194_304] * 4 + [3_222_784]),
    ],
)
def test_a_reduction_to_one_rank_sends_what_gloo_sends(n, size, passed, blocks):
    """Bytes that the kernel counted on the connections of torch 2.13's Gloo (``TCP_INFO``), without 48 a message."""
    told = reduced_bytes(n, float(size))
    assert [part.tolist() for part in told] == [passed, blocks]
    even = size * (n - 1) / n
    assert max(passed) >= even
    on_links = plan(Request("reduce", float(size)), one_a_node(n))
    carried = on_links.weights.max() * size
    assert carried == pytest.approx(sum(blocks[1:]) + passed[1])  # into the root, from the rank above and from all


def test_what_the_cache_does_not_hold_comes_from_memory():
    group = on_one_cpu(2)
    size = 2.0**26
    missed = 1 - COSTS.cache / (2 * size)
    byte = 1 / COSTS.stream + missed / COSTS.memory
    assert seconds("broadcast", size, group) == pytest.approx(COSTS.call["broadcast"] + COSTS.message + size * byte)


def test_temporaries_that_malloc_maps_afresh_are_paid_for():
    group = on_one_cpu(2)
    below = 2.0**25 - 2**12
    at = 2.0**25
    jump = seconds("all_gather", at, group) - seconds("all_gather", below, group)
    assert jump == pytest.approx(at / COSTS.fault, rel=0.01)


@pytest.mark.parametrize("kind", sorted(COSTS.call))
def test_ranks_that_share_cores_take_turns(kind):
    """Four ranks on two cores: everybody's work doubles, and a message waits for the other rank of its core; what one
    root does alone does not double."""
    wide = on_one_cpu(4)
    narrow = Group(replace(wide.topology, node_types=(replace(wide.topology.node_types[0], cores=2),)), wide.gpus)
    symmetric = kind in {"all_reduce", "all_gather", "sendrecv", "all_to_all", "barrier", "reduce_scatter"}
    for size in (0.0,) if kind == "barrier" else (64.0, 2.0**20):
        chain, total = chain_and_total(kind, 4, size)
        alone = seconds(kind, size, wide)
        turns = max(chain, total / 2) * COSTS.turn
        together = seconds(kind, size, narrow) - turns
        assert alone < together <= 2 * alone * (1 + 1e-9)
        if symmetric:
            assert together == pytest.approx(2 * alone)


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_that_share_a_cpu_are_bound_by_no_link(n):
    group = on_one_cpu(n)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "reduce", "scatter", "gather", "barrier"):
        found = plan(Request(kind, 0.0 if kind == "barrier" else 2.0**20), group)
        assert found.lower_bound == 0.0
        assert not len(found.links)
        assert found.time(group.topology.link_bandwidth) > COSTS.call[kind]


# ---- a machine without a GPU ----------------------------------------------------------------------------------------


def test_ranks_without_a_gpu_are_processes_on_cores():
    machine = fabrics.load("cpu-gloo", nodes=2)
    assert fabrics.mesh(machine).world_size == 2 * machine.node_types[0].cores
    crowd = fabrics.mesh(machine, nproc_per_node=20)
    assert (crowd.world_size, crowd.n_nodes) == (40, 2)
    assert {machine.vertex_kinds[vertex] for vertex in crowd.gpus.tolist()} == {CPU}


def run(ranks: int) -> Result:
    table = {
        "cluster": {"topology": "cpu-gloo", "gpus_per_node": ranks},
        "model": {"name": "gpt2", "seq_len": 64, "options": {"layers": 2}},
        "strategy": {"kind": "ddp", "micro_batch_size": 1},
        "run": {"steps": 3, "jitter": 0.0},
    }
    return from_table(table).run()


def test_a_step_on_cpus_uses_gloo_and_the_cores_of_a_rank():
    eight = run(8)
    sixteen = run(16)
    assert eight.prepared.backend == "gloo"
    assert eight.prepared.gpus == 0
    assert eight.memory.context == 0.0, "no GPU driver: nothing but what the framework allocates"
    assert eight.memory.total == eight.memory.allocated > 0
    # Twice the ranks on the same cores: each computes for twice as long.
    assert sixteen.prepared.cost.forward.sum() == pytest.approx(2 * eight.prepared.cost.forward.sum(), rel=1e-6)
    assert sixteen.summary["step_time_s"] > 1.8 * eight.summary["step_time_s"]
