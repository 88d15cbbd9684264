"""Flows that begin together are one bundle: the same comes of it as of each by itself."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import clustersim
from clustersim.engine.flows import bundles
from clustersim.engine.flows.classes import ClassFlows
from clustersim.engine.flows.network import FlowNetwork

STEADY = {"run.jitter": 0.0}


@pytest.mark.parametrize(
    ("scenario", "taken_apart"),
    [("hsdp_llama3_70b_32x8_h100", 200), ("ep8_mixtral_8x7b_8x8_h100", 1)],
)
def test_a_run_is_the_same_with_bundles_and_without(monkeypatch, scenario, taken_apart):
    counts = Counter()

    def counted(name):
        method = getattr(FlowNetwork, name)

        def call(self, *arguments):
            counts[name] += 1
            return method(self, *arguments)

        monkeypatch.setattr(FlowNetwork, name, call)

    counted("begin_together")
    counted("_take_apart")
    bundled = clustersim.load(scenario, STEADY).run().timeline
    assert counts["begin_together"] > counts["_take_apart"] >= taken_apart
    monkeypatch.setattr(bundles, "BUNDLED_FROM", 10**9)
    counts.clear()
    alone = clustersim.load(scenario, STEADY).run().timeline
    assert not counts
    assert bundled.stats == alone.stats
    np.testing.assert_allclose(bundled.row_end, alone.row_end, rtol=1e-13)
    np.testing.assert_allclose(bundled.row_start, alone.row_start, rtol=1e-13)
    np.testing.assert_allclose(bundled.links.bytes_per_link(), alone.links.bytes_per_link(), rtol=1e-9)


def test_flows_in_a_class_of_their_own_need_not_leave_it_for_the_same(monkeypatch):
    answers = Counter()
    is_new_for = ClassFlows.is_new_for

    def counted(self, share):
        answers[is_new_for(self, share)] += 1
        return is_new_for(self, share)

    monkeypatch.setattr(ClassFlows, "is_new_for", counted)
    stay = clustersim.load("hsdp_llama3_70b_32x8_h100", STEADY).run().timeline
    assert answers[True] > 1000
    monkeypatch.setattr(ClassFlows, "is_new_for", lambda self, share: False)
    leave = clustersim.load("hsdp_llama3_70b_32x8_h100", STEADY).run().timeline
    assert stay.stats == leave.stats
    for column in ("row_start", "row_end"):
        np.testing.assert_array_equal(getattr(stay, column), getattr(leave, column))
    np.testing.assert_array_equal(stay.links.bytes_per_link(), leave.links.bytes_per_link())
