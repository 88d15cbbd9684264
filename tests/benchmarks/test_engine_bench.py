"""What the engine costs. ``pytest tests/benchmarks/test_engine_bench.py --benchmark-enable`` prints times and counts.

Assertions are on counts (events, solves), which do not depend on the machine; each run's are kept in ``extra_info``.
"""

from __future__ import annotations

import numpy as np
import pytest
import toy

from clustersim.core.program import Compute
from clustersim.engine import simulate
from clustersim.engine.flows.fairshare import max_min


def step(n, n_ops, groups, durations=1.0, slowdown=0.0):
    """Half compute, half all-reduces that overlap it, then an op that waits for all."""
    ops = []
    for k in range(n_ops // 2):
        ops += [Compute(f"c{k}", durations), toy.all_reduce(f"r{k}", 5.0, groups, after=(2 * k,))]
    ops.append(Compute("step", 1.0, after=(len(ops) - 1,)))
    return toy.program(ops, ranks=n, slowdown=slowdown)


def measure(benchmark, program, n):
    topology = toy.star(n, per_node=8)
    mesh = toy.mesh(topology)
    timeline = benchmark(lambda: simulate(program, topology, mesh, planner=toy.up_links))
    benchmark.extra_info.update(timeline.stats, rows=len(timeline.row_op))
    return timeline


@pytest.mark.parametrize(("n", "n_ops"), [(8, 300), (1024, 300), (16384, 2000)])
def test_ranks_that_meet_all_together_cost_no_event(benchmark, n, n_ops):
    timeline = measure(benchmark, step(n, n_ops, np.arange(n)[None]), n)
    assert timeline.stats["events"] == 0
    assert timeline.stats["solves"] == 0
    assert len(timeline.row_op) == n_ops + 1


def test_groups_that_share_no_link_cost_no_event(benchmark):
    timeline = measure(benchmark, step(1024, 300, np.arange(1024).reshape(-1, 8)), 1024)
    assert timeline.stats["events"] == 0
    assert timeline.stats["flows"] == 150 * 128


def test_jitter_costs_columns_and_no_events(benchmark):
    durations = np.random.default_rng(0).normal(1.0, 0.01, 1024)
    timeline = measure(benchmark, step(1024, 300, np.arange(1024)[None], durations), 1024)
    assert timeline.stats["events"] == 0


def test_paying_for_overlap_costs_no_events(benchmark):
    durations = np.random.default_rng(0).normal(1.0, 0.01, 1024)
    timeline = measure(benchmark, step(1024, 300, np.arange(1024)[None], durations, slowdown=0.1), 1024)
    assert timeline.stats["events"] == 0


def test_groups_that_jitter_apart_cost_three_events_each_at_most(benchmark):
    durations = np.random.default_rng(0).normal(1.0, 0.01, 256)
    timeline = measure(benchmark, step(256, 100, np.arange(256).reshape(-1, 8), durations), 256)
    assert timeline.stats["events"] <= 3 * 50 * 32


@pytest.mark.parametrize("n_flows", [64, 2000])
def test_max_min_of_random_flows(benchmark, n_flows):
    rng = np.random.default_rng(0)
    ptr = np.arange(n_flows + 1) * 6
    n_links = 3 * n_flows // 4
    links = np.concatenate([rng.choice(n_links, 6, replace=False) for _ in range(n_flows)])
    arguments = ptr, links, np.ones(len(links)), rng.uniform(1, 10, n_links), np.full(n_flows, np.inf)
    rates = benchmark(lambda: max_min(*arguments))
    assert np.all(rates > 0)
