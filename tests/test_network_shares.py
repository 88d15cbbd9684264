"""Rates mended where something changed are those of a full solve, whatever comes and goes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import star

from clustersim.engine.flows import classes, joining
from clustersim.engine.flows import network as flows_network
from clustersim.engine.flows.classes import ClassFlows
from clustersim.engine.flows.clock import Clock
from clustersim.engine.flows.fairshare import max_min
from clustersim.engine.flows.loads import Loads
from clustersim.engine.flows.network import FlowNetwork


def drawn(seed, n_flows, n_gpus, *, ties):
    """Random flows over random links of a star: (begin, links, weights, bytes, ceiling)."""
    rng = np.random.default_rng(seed)
    flows = []
    for _ in range(n_flows):
        links = rng.choice(2 * n_gpus, rng.integers(1, min(6, 2 * n_gpus) + 1), replace=False)
        weights = np.ones(len(links)) if ties else rng.uniform(0.2, 3.0, len(links))
        begin = float(rng.integers(0, 6)) if ties else float(rng.uniform(0, 6))
        nbytes = float(rng.integers(1, 9)) * 5 if ties else float(rng.uniform(1, 40))
        ceiling = float(rng.choice([np.inf, np.inf, 2.0, 4.0]))
        flows.append((begin, links, weights, nbytes, ceiling))
    return flows


def capacities(seed, topology, *, ties):
    if not ties:
        topology.link_bandwidth[:] = np.random.default_rng(seed + 1).uniform(5, 15, topology.n_links)
    return topology


def run(topology, flows, watch=None):
    """When each flow ends, and the network."""
    clock = Clock()
    loads = Loads(topology)
    ended = {}

    def on_end(transfers, now):
        ended.update(dict.fromkeys(transfers.tolist(), now))

    network = FlowNetwork(clock, loads, on_end)
    for i, (begin, links, weights, nbytes, ceiling) in enumerate(flows):
        clock.call(begin, network.begin, [(i, loads.add(links, weights), nbytes, ceiling)])
    while clock.peek() < np.inf:
        clock.step()
        if watch:
            watch(network, clock)
    return np.array([ended[i] for i in range(len(flows))]), network


def plainly(topology, flows):
    """When each flow ends, by a full solve at every change."""
    left = np.array([nbytes for *_, nbytes, _ in flows])
    begin = np.array([flow[0] for flow in flows])
    ends = np.full(len(flows), np.inf)
    now = 0.0
    while np.isinf(ends).any():
        there = np.flatnonzero((begin <= now) & np.isinf(ends))
        ptr = np.cumsum([0, *(len(flows[i][1]) for i in there)])
        links = np.concatenate([np.zeros(0, dtype=np.int64), *(flows[i][1] for i in there)])
        weights = np.concatenate([np.zeros(0), *(flows[i][2] for i in there)])
        rates = max_min(ptr, links, weights, topology.link_bandwidth, np.array([flows[i][4] for i in there]))
        after = np.min(np.concatenate([now + left[there] / rates, begin[begin > now]]))
        left[there] -= rates * (after - now)
        now = after
        ends[there[left[there] <= 1e-9]] = now
    return ends


@pytest.mark.parametrize("many", [0, 3, 16])
@given(seed=st.integers(0, 10_000), n_flows=st.integers(1, 30), n_gpus=st.integers(1, 8), ties=st.booleans())
def test_every_flow_ends_when_a_full_solve_at_each_change_says(many, seed, n_flows, n_gpus, ties):
    flows = drawn(seed, n_flows, n_gpus, ties=ties)
    topology = capacities(seed, star(n_gpus), ties=ties)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flows_network, "MANY", many)
        ended, _ = run(topology, flows)
    assert ended == pytest.approx(plainly(topology, flows), rel=1e-9)


@pytest.mark.parametrize("many", [0, 3, 16])
@given(seed=st.integers(0, 10_000), n_flows=st.integers(2, 30), n_gpus=st.integers(2, 8), ties=st.booleans())
def test_at_every_moment_the_rates_are_max_min_fair(many, seed, n_flows, n_gpus, ties):
    flows = drawn(seed, n_flows, n_gpus, ties=ties)
    topology = capacities(seed, star(n_gpus), ties=ties)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flows_network, "MANY", many)
        _, network = run(topology, flows)
    transfer, start, end, rate = network.segments.columns()
    for moment in np.unique(start).tolist():
        at = np.flatnonzero((start <= moment) & (end > moment))
        mine = [flows[i] for i in transfer[at].tolist()]
        ptr = np.cumsum([0, *(len(flow[1]) for flow in mine)])
        links, weights = (np.concatenate([flow[k] for flow in mine]) for k in (1, 2))
        rates = max_min(ptr, links, weights, topology.link_bandwidth, np.array([flow[4] for flow in mine]))
        assert rate[at] == pytest.approx(rates, rel=1e-9)


@pytest.mark.parametrize("many", [0, 3])
@given(seed=st.integers(0, 10_000), n_flows=st.integers(2, 30), n_gpus=st.integers(2, 8), ties=st.booleans())
def test_classes_looked_at_together_have_the_rates_that_they_have_one_by_one(many, seed, n_flows, n_gpus, ties):
    flows = drawn(seed, n_flows, n_gpus, ties=ties)
    topology = capacities(seed, star(n_gpus), ties=ties)
    ended = []
    for columns_from in (1, np.inf):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flows_network, "MANY", many)
            patch.setattr(joining, "AS_COLUMNS_FROM", columns_from)
            ended.append(run(topology, flows)[0])
    assert ended[0] == pytest.approx(ended[1], rel=1e-12)


@given(seed=st.integers(0, 10_000), n_flows=st.integers(1, 30), most=st.sampled_from([10, 2_000_000]))
def test_stretches_move_every_byte_once_and_no_link_carries_more_than_it_can(seed, n_flows, most):
    flows = drawn(seed, n_flows, 4, ties=False)
    topology = capacities(seed, star(4), ties=False)
    ended, network = run(topology, flows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classes, "MOST", most)
        transfer, start, end, rate = network.segments.columns()
    moved = np.bincount(transfer, weights=rate * (end - start), minlength=n_flows)
    assert moved == pytest.approx([flow[3] for flow in flows], rel=1e-9)
    first = np.full(n_flows, np.inf)
    last = np.zeros(n_flows)
    np.minimum.at(first, transfer, start)
    np.maximum.at(last, transfer, end)
    assert first == pytest.approx([flow[0] for flow in flows], abs=1e-12)
    assert last == pytest.approx(ended, rel=1e-12)
    if most > 1000:
        for moment in np.unique(start).tolist():
            at = (start <= moment) & (end > moment)
            used = np.zeros(topology.n_links)
            for i, r in zip(transfer[at].tolist(), rate[at].tolist(), strict=True):
                used[flows[i][1]] += flows[i][2] * r
            assert np.all(used <= topology.link_bandwidth * (1 + 1e-9))


def test_equal_flows_of_one_bottleneck_share_it_all_the_time():
    # 40 senders to one receiver, which is full all the time: only its down link ever counts.
    n = 40
    topology = star(n + 1, bandwidth=10.0)
    flows = [(0.01 * i, np.array([i, 2 * n + 1]), np.ones(2), 5.0 + 0.1 * i, np.inf) for i in range(n)]
    ended, _ = run(topology, flows)
    assert ended.max() == pytest.approx(sum(flow[3] for flow in flows) / 10.0)


def test_who_crosses_a_slot_is_looked_up_and_not_looked_for_among_all(monkeypatch):
    moved = []
    looks = []
    leave, watch = ClassFlows.leave, FlowNetwork._watch

    def counted(self, fresh, changed, now):
        flows = [flow for flow_class in self._active if not flow_class.many for flow in flow_class.flows]
        crossing = {share for *_, share in flows if not fresh.isdisjoint(share.slot_list)}
        looks.append((sum(len(self._crossing.get(slot, ())) for slot in fresh), len(flows)))
        moved.clear()
        watch(self, fresh, changed, now)
        assert set(moved) == crossing
        assert len(moved) == len(crossing)

    monkeypatch.setattr(
        ClassFlows, "leave", lambda self, share, *rest: moved.append(share) or leave(self, share, *rest)
    )
    monkeypatch.setattr(FlowNetwork, "_watch", counted)
    topology = star(150)
    run(topology, drawn(0, 300, 150, ties=False))
    looked, under_way = np.sum(looks, axis=0)
    assert len(looks) > 100
    assert 20 * looked < under_way
