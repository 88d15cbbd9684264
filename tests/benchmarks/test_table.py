"""Every row of ``clustersim bench``, small: counts do not depend on the machine, so they are what is asserted.

``pytest tests/benchmarks --benchmark-enable`` prints times; events, solves, flows, transfers, rows and blocks are in
``extra_info``. The full sizes are ``clustersim bench``.
"""

from __future__ import annotations

import growth
import numpy as np
import pytest
import toy

from clustersim import scenario
from clustersim.cluster import files as fabrics
from clustersim.cluster.routes import router
from clustersim.collectives import plan
from clustersim.core.program import Collective
from clustersim.engine import simulate
from tests.evidence import bench

FSDP = "fsdp_llama3_405b_2048x8_h100"
JITTER = {"run.jitter": 0.02, "run.steps": 1, "model.name": "llama3-8b"}


def counted(benchmark, timeline):
    rows = sum(len(block.ranks) for block in timeline.blocks)
    benchmark.extra_info.update(timeline.stats, blocks=len(timeline.blocks), rows=len(timeline._rows()[1]) + rows)
    return timeline


def ring(topology, fidelity, n_channels=None):
    mesh = fabrics.mesh(topology)
    op = Collective("ring", "all_reduce", 2.0**30, np.arange(mesh.world_size)[None], algorithm="ring")
    program = toy.program([op], ranks=mesh.world_size)
    planner = lambda request, group: plan(request, group, "nccl", n_channels)  # noqa: E731
    return simulate(program, topology, mesh, planner=planner, fidelity=fidelity)


@pytest.mark.parametrize("nodes", [1, 16, 128])
def test_a_ring_is_one_flow_and_no_event_whatever_its_ranks(benchmark, nodes):
    topology = fabrics.load("hgx-h100", nodes=nodes)
    timeline = counted(benchmark, benchmark(lambda: ring(topology, "flow")))
    assert timeline.stats == {"events": 0, "solves": 0, "flows": 1, "transfers": 1}
    assert len(timeline.row_op) == 1


@pytest.mark.parametrize("nodes", [1, 4, 16])
def test_every_chunk_of_a_ring_is_a_transfer_and_none_an_event(benchmark, nodes):
    topology = fabrics.load("hgx-h100", nodes=nodes)
    n = 8 * nodes
    timeline = counted(benchmark, benchmark(lambda: ring(topology, "chunk", 1)))
    assert timeline.stats["transfers"] == 2 * (n - 1) * n
    assert timeline.stats["events"] == 2


@pytest.mark.parametrize("nodes", [1, 16])
def test_a_ddp_step_is_a_flow_a_bucket_and_no_event_whatever_its_ranks(benchmark, nodes):
    prepared = scenario.load("ddp_llama3_8b_128x8_h100", {"cluster.nodes": nodes, "run.jitter": 0.0}).prepare()
    timeline = counted(benchmark, benchmark(lambda: prepared.run().timeline))
    collectives = sum(op.kind != "compute" for op in timeline.ops)
    assert timeline.stats["flows"] == collectives
    assert timeline.stats["events"] == 0
    assert len(timeline.row_op) == len(timeline.ops)


@pytest.mark.parametrize("nodes", [4, 32])
def test_ranks_at_their_own_pace_cost_columns_and_no_event_each(benchmark, nodes):
    prepared = scenario.load(FSDP, {**JITTER, "cluster.nodes": nodes}).prepare()
    timeline = counted(benchmark, benchmark(lambda: prepared.run().timeline))
    columns = {id(column): column.values.nbytes for block in timeline.blocks for column in block.columns}
    # Two columns of 8 bytes an op and rank at most, where rows would be five.
    assert sum(columns.values()) <= 2 * 8 * len(timeline.blocks) * 8 * nodes
    assert timeline.stats["events"] == 0


def test_events_of_hybrid_shards_grow_with_groups_and_not_with_ranks(benchmark):
    changes = {"strategy.data_parallel_shard_degree": 32, "strategy.data_parallel_replicate_degree": 4}
    prepared = scenario.load(FSDP, {**JITTER, **changes, "cluster.nodes": 16}).prepare()
    timeline = counted(benchmark, benchmark(lambda: prepared.run().timeline))
    assert timeline.stats["events"] <= 3 * timeline.stats["transfers"]


def test_an_asynchronous_server_is_a_transfer_for_every_push_and_pull(benchmark):
    prepared = scenario.load("ps_async_1x8", {"run.steps": 2}).prepare()
    timeline = counted(benchmark, benchmark.pedantic(lambda: prepared.run().timeline, rounds=1))
    assert timeline.stats["flows"] == timeline.stats["transfers"]
    assert timeline.stats["events"] <= 3 * timeline.stats["transfers"]


def test_an_asynchronous_server_of_many_workers_is_three_events_a_message_at_most(benchmark):
    prepared = scenario.load("ps_async_32x8_v100", {"cluster.nodes": 8, "run.steps": 3}).prepare()
    timeline = counted(benchmark, benchmark.pedantic(lambda: prepared.run().timeline, rounds=1))
    # A request, a pull and a push of every worker and step.
    assert timeline.stats["transfers"] == 3 * 64 * 3
    # It begins, it ends, and one of the three is served: none for an end that moved.
    assert timeline.stats["events"] <= 3 * timeline.stats["transfers"]


@pytest.mark.parametrize("row", bench.ROWS, ids=lambda row: row.name)
def test_a_row_as_a_whole_process(benchmark, row):
    if benchmark.disabled:
        pytest.skip("seconds to minutes each: --benchmark-enable")
    cost = benchmark.pedantic(lambda: bench.measure(bench.command(row)), rounds=1)
    benchmark.extra_info.update(cpu_seconds=cost.seconds, peak_rss=cost.memory)
    assert not cost.error
    assert row.memory is None or cost.memory < row.memory


def test_scenarios_one_after_another_through_the_python_api(benchmark):
    sizes = iter(range(1, 1000))

    def another():
        changes = {"cluster.nodes": 8, "strategy.bucket_cap_mb": 5 + next(sizes)}
        return scenario.load("ddp_gpt2_xl_2x8_a100", changes).run()

    counted(benchmark, benchmark.pedantic(another, rounds=3).timeline)


def test_routes_of_a_graph_are_by_structure(benchmark):
    topology = benchmark(lambda: fabrics.load("hgx-h100", nodes=64))
    gpus = topology.gpus.tolist()
    hops = {len(router(topology).route(gpus[0], gpu, 0, -1)) for gpu in gpus[8::8]}
    assert len(hops) <= 2  # under one leaf, or over a spine
    benchmark.extra_info.update(links=topology.n_links, vertices=len(topology.vertex_names))


def test_the_table_has_a_target_for_every_row():
    assert all(row.target > 0 and row.what for row in bench.ROWS)


@pytest.mark.parametrize("way", growth.WAYS)
def test_cost_grows_no_faster_than_ranks_times_ops_from_32_to_16384_ranks(benchmark, way, capsys):
    nodes = (4, 16) if benchmark.disabled else (4, 16, 64, 256, 1024, 2048)
    counts = benchmark.pedantic(lambda: [growth.counted(way, n) for n in nodes], rounds=1)
    sizes, costs = np.log(np.array(counts, dtype=float).T)
    slope = float(np.polyfit(sizes, costs, 1)[0])
    with capsys.disabled():
        print(f"\n{way}: (ranks x ops, handled) {counts}; cost ~ size ** {slope:.2f}")
    benchmark.extra_info.update(slope=slope, counts=counts)
    assert slope <= 1
