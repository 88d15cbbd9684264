"""Weighted max-min rates: closed forms, then what defines them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from clustersim.engine.flows.fairshare import max_min


def rates(flows, capacities, ceilings=None):
    """``flows``: per flow a dict link -> weight."""
    ptr = np.cumsum([0, *(len(flow) for flow in flows)])
    links = np.array([link for flow in flows for link in flow], dtype=np.int64)
    weights = np.array([weight for flow in flows for weight in flow.values()], dtype=float)
    ceilings = np.full(len(flows), np.inf) if ceilings is None else np.asarray(ceilings, dtype=float)
    return max_min(ptr, links, weights, np.asarray(capacities, dtype=float), ceilings)


class TestClosedForms:
    def test_two_flows_on_one_link_get_half_each(self):
        assert rates([{0: 1}, {0: 1}], [10]).tolist() == [5, 5]

    def test_shares_are_equal_in_payload_whatever_each_byte_weighs(self):
        assert rates([{0: 1}, {0: 3}], [8]).tolist() == [2, 2]

    def test_a_ceiling_leaves_the_rest_to_others(self):
        assert rates([{0: 1}, {0: 1}, {0: 1}], [12], [1, np.inf, np.inf]).tolist() == [1, 5.5, 5.5]

    def test_a_flow_held_elsewhere_leaves_the_rest_to_others(self):
        # The textbook's line of two links: the long flow is held to 1 on the narrow one.
        assert rates([{0: 1, 1: 1}, {0: 1}, {1: 1}], [2, 10]).tolist() == [1, 1, 9]

    def test_a_chain_of_ever_wider_links_freezes_one_after_another(self):
        flows = [{0: 1}, {0: 1, 1: 1}, {1: 1, 2: 1}, {2: 1}]
        assert rates(flows, [2, 5, 10]).tolist() == [1, 1, 4, 6]

    def test_a_flow_without_links_runs_at_its_ceiling(self):
        assert rates([{}, {0: 2}], [10], [7, np.inf]).tolist() == [7, 5]

    def test_links_nobody_uses_change_nothing(self):
        assert rates([{5: 1}], [1e-9] * 5 + [4]).tolist() == [4]

    def test_no_flows_is_no_rates(self):
        assert rates([], [1.0]).tolist() == []


problems = st.integers(1, 6).flatmap(
    lambda n_links: st.tuples(
        st.lists(st.floats(0.1, 1e3), min_size=n_links, max_size=n_links),
        st.lists(
            st.tuples(
                st.dictionaries(st.integers(0, n_links - 1), st.floats(0.01, 10), min_size=1),
                st.one_of(st.just(np.inf), st.floats(0.01, 1e3)),
            ),
            min_size=1,
            max_size=12,
        ),
    )
)


@given(problems)
def test_no_link_is_overfull_and_every_flow_has_a_bottleneck(problem):
    capacities = np.array(problem[0])
    pairs = problem[1]
    flows = [pair[0] for pair in pairs]
    ceilings = np.array([pair[1] for pair in pairs])
    found = rates(flows, capacities, ceilings)
    use = np.zeros(len(capacities))
    for rate, flow in zip(found, flows, strict=True):
        for link, weight in flow.items():
            use[link] += rate * weight
    assert np.all(use <= capacities * (1 + 1e-9))
    assert np.all(found <= ceilings)
    for i, flow in enumerate(flows):
        # Max-min: at its ceiling, or on a full link where nobody is faster.
        held = any(
            use[link] >= capacities[link] * (1 - 1e-9)
            and all(found[j] <= found[i] * (1 + 1e-9) for j, other in enumerate(flows) if link in other)
            for link in flow
        )
        assert held or found[i] == ceilings[i]


@given(problems, st.floats(1e-3, 1e9))
def test_rates_scale_with_bandwidth(problem, scale):
    flows = [pair[0] for pair in problem[1]]
    ceilings = np.array([pair[1] for pair in problem[1]])
    once = rates(flows, problem[0], ceilings)
    np.testing.assert_allclose(rates(flows, np.array(problem[0]) * scale, ceilings * scale), once * scale, rtol=1e-9)
