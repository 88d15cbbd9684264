"""Ranks at paces of their own: pieces that wait for more ranks to come change no time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from player import toy_cost, toy_model
from toy import star

from clustersim.core.mesh import Mesh
from clustersim.engine import run, simulate
from clustersim.training.strategies.parameter_server import ParameterServerConfig, build, place


class NoLookAhead:
    """Nobody waits for others: what is ready is played at once, as it is without a clock."""

    def __init__(self, lists, unasked):
        pass

    def clock(self, clocked):
        pass


def played(workers, steps, jitter, cap, staleness, seed):
    """An asynchronous run on one switch."""
    model = toy_model([[3000], [], [20000], [100], [7000]])
    topology = star(workers + 1, bandwidth=1e6, per_node=1)
    config = ParameterServerConfig(server="gpu", mode="async", staleness=staleness, bucket_cap_mb=cap)
    ranks = place(topology, Mesh(topology.gpus, 1), config)
    cost = toy_cost(model, jitter=jitter, grad_copy_bandwidth=1e8, optimizer_traffic=1e5)
    return simulate(build(model, cost, ranks, config, steps, seed), topology, ranks, backend="ideal")


@given(
    workers=st.integers(1, 5),
    steps=st.integers(1, 3),
    jitter=st.sampled_from([0.0, 0.1, 0.5]),
    cap=st.sampled_from([None, 0.02, 0.1, 1.0]),
    staleness=st.sampled_from([None, 0, 1]),
)
def test_ops_of_many_ranks_together_take_the_times_they_take_one_by_one(workers, steps, jitter, cap, staleness):
    args = workers, steps, jitter, cap, staleness, 1
    at_once = played(*args).spans()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "LookAhead", NoLookAhead)
        one_by_one = played(*args).spans()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "unasked", lambda *what: frozenset())
        every_role_asked = played(*args).spans()
    for name, column in at_once.items():
        assert np.array_equal(column, one_by_one[name]), name
        assert np.array_equal(column, every_role_asked[name]), name


def test_nobody_looks_ahead_for_a_server_whose_every_meeting_is_on_the_clock(monkeypatch):
    made = []
    plain = run.LookAhead
    monkeypatch.setattr(run, "LookAhead", lambda *what: made.append(plain(*what)) or made[-1])
    played(5, 3, 0.1, None, None, 1)
    (ahead,) = made
    workers_ops = len(ahead._lists[0])
    assert ahead.settled == workers_ops < sum(map(len, ahead._lists)) / 2
