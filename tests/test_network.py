"""Flows in simulated time, driven without a Program."""

from __future__ import annotations

import numpy as np
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from clustersim.core.errors import ProgramError, TopologyError
from clustersim.engine.flows.clock import Clock
from clustersim.engine.flows.loads import Loads, reduced
from clustersim.engine.flows.network import FlowNetwork


class Play:
    """Start flows ``(time, links {link: weight}, nbytes, ceiling)`` and note when each ends."""

    def __init__(self, topology, flows):
        self.clock, self.loads, self.ends = Clock(), Loads(topology), {}
        self.network = FlowNetwork(self.clock, self.loads, self._ended)
        for i, (time, links, nbytes, ceiling) in enumerate(flows):
            load = self.loads.add(np.array(list(links), dtype=np.int64), np.array(list(links.values()), dtype=float))
            self.clock.call(time, self._begin, i, load, nbytes, ceiling)
        while self.clock.peek() < INF:
            self.clock.step()
        self.segments = self.network.segments.columns()

    def _begin(self, i, load, nbytes, ceiling):
        self.network.begin([(i, load, float(nbytes), float(ceiling))])

    def _ended(self, transfers, now):
        for transfer in transfers.tolist():
            assert transfer not in self.ends
            self.ends[transfer] = now


INF = np.inf


def test_a_flow_alone_takes_bytes_over_the_narrowest_link_and_needs_no_solver():
    play = Play(toy.star(2), [(1.0, {0: 1, 3: 2}, 20, INF)])
    assert play.ends == {0: 1 + 20 * 2 / 10}
    assert play.network.n_solves == 0


def test_a_second_flow_halves_the_first_and_leaves_it_the_link_again():
    # 30 bytes alone until 1 (10 moved), half each until the second's 10 are gone at 3 (10 moved), then alone for 1.
    play = Play(toy.star(2), [(0.0, {0: 1}, 30, INF), (1.0, {0: 1}, 10, INF)])
    assert play.ends == {1: 3.0, 0: 4.0}
    transfer, start, end, rate = play.segments
    assert transfer.tolist() == [0, 0, 0, 1]
    assert start.tolist() == [0, 1, 3, 1]
    assert end.tolist() == [1, 3, 4, 3]
    assert rate.tolist() == [10, 5, 10, 5]


def test_flows_on_disjoint_links_do_not_slow_each_other_and_need_no_solver():
    play = Play(toy.star(2), [(0.0, {0: 1}, 30, INF), (1.0, {1: 1}, 10, INF), (1.5, {2: 1}, 10, INF)])
    assert play.ends == {1: 2.0, 2: 2.5, 0: 3.0}
    assert play.network.n_solves == 0


def test_only_flows_that_share_directly_or_through_others_change_their_rate():
    flows = [(0.0, {0: 1}, 100, INF), (0.0, {1: 1}, 100, INF), (0.0, {2: 1}, 100, INF), (5.0, {0: 1, 1: 1}, 10, INF)]
    play = Play(toy.star(2), flows)
    segments_of = np.bincount(play.segments[0], minlength=4)
    assert segments_of.tolist() == [3, 3, 1, 1]


def test_changes_of_one_instant_are_one_solve():
    play = Play(toy.star(2), [(1.0, {0: 1}, 10, INF)] * 8)
    assert play.network.n_solves == 1
    assert set(play.ends.values()) == {9.0}
    assert len(play.segments[0]) == 8


def test_flows_that_end_together_are_one_event():
    play = Play(toy.star(2), [(0.0, {0: 1}, 10, INF)] * 500)
    assert set(play.ends.values()) == {500.0}
    assert play.clock.n_events == 500 + 1  # their beginnings, and one end


def test_a_ceiling_holds_an_uncontended_flow():
    assert Play(toy.star(2), [(0.0, {0: 1}, 10, 4)]).ends == {0: 2.5}


def test_a_flow_over_no_link_runs_at_its_ceiling_and_without_one_ends_at_once():
    play = Play(toy.star(2), [(0.0, {}, 10, 5), (0.0, {0: 1}, 10, INF), (0.5, {}, 10, INF)])
    assert play.ends == {2: 0.5, 1: 1.0, 0: 2.0}


def test_ends_are_exact_far_from_zero():
    # At t = 1e6 s a double counts in steps of 1e-10 s: the flow must end, and at the nearest double.
    play = Play(toy.star(2, bandwidth=1e9), [(1e6, {0: 1}, 1.0, INF), (1e6, {0: 1}, 3.0, INF)])
    assert play.ends[1] == pytest.approx(1e6, rel=1e-12)


def test_a_link_without_bandwidth_is_named():
    topology = toy.star(2)
    topology.link_bandwidth[1] = 0.0
    with pytest.raises(TopologyError, match="node0/gpu1 -> switch, which has no bandwidth"):
        Loads(topology).add(np.array([0, 1]), np.ones(2))


def test_a_load_that_names_a_link_twice_is_refused():
    with pytest.raises(ProgramError, match="names a link twice"):
        Loads(toy.star(2)).add(np.array([0, 0]), np.ones(2))


flows = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0, 1.0000001, 2.0]) | st.floats(0, 10),
        st.dictionaries(st.integers(0, 5), st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=3),
        st.floats(1e-3, 100),
        st.sampled_from([INF, 0.7, 5.0]),
    ),
    min_size=1,
    max_size=14,
)


@given(flows)
def test_bytes_are_conserved_and_no_link_is_ever_overfull(flows):
    play = Play(toy.star(3), flows)
    transfer, start, end, rate = play.segments
    assert sorted(play.ends) == list(range(len(flows)))
    moved = np.bincount(transfer, weights=rate * (end - start), minlength=len(flows))
    np.testing.assert_allclose(moved, [flow[2] for flow in flows], rtol=1e-9)
    for time in np.unique(np.concatenate([start, end]))[:-1]:
        use = np.zeros(6)
        for i, r in zip(*(column[(start <= time) & (time < end)] for column in (transfer, rate)), strict=True):
            assert r <= flows[i][3] * (1 + 1e-9)
            for link, weight in flows[i][1].items():
                use[link] += r * weight
        assert np.all(use <= 10 * (1 + 1e-9))


@given(flows)
def test_a_flow_is_active_from_its_beginning_to_its_end_without_gaps(flows):
    play = Play(toy.star(3), flows)
    transfer, start, end, _ = play.segments
    for i, flow in enumerate(flows):
        mine = transfer == i
        assert start[mine][0] == flow[0]
        assert end[mine][-1] == play.ends[i]
        assert np.array_equal(start[mine][1:], end[mine][:-1])


def test_a_link_given_back_is_free_again():
    play = Play(toy.star(2), [(0.0, {0: 1}, 10, INF), (0.0, {1: 1}, 50, INF), (2.0, {0: 1}, 10, INF)])
    assert play.ends == {0: 1.0, 2: 3.0, 1: 5.0}
    assert play.network.n_solves == 0


def test_ends_that_differ_by_rounding_alone_are_one_instant():
    assert 0.1 * 3 != 0.3
    play = Play(toy.star(2), [(0.0, {0: 1}, 0.1 * 3, INF), (0.0, {1: 1}, 0.3, INF)])
    assert play.ends[0] == play.ends[1]


def test_next_to_no_bytes_on_a_link_are_a_proportion_like_any_other():
    """A share so small that seconds a byte round to none, beside a whole one, on links of two more flows."""
    few = np.array([1e-310, 1.0])
    all_ = np.ones(2)
    slots = reduced([(np.array([0, 1]), few), (np.array([0, 1]), all_)], np.full(2, 1e11))
    assert slots.n >= 1
    assert np.isfinite(slots.weight).all()
    assert (slots.weight > 0).all()
