"""Serve ops: a server's work in order of arrival, and nothing else about the engine changed by it."""

from __future__ import annotations

import numpy as np
import pytest
from toy import mesh, plan, program, star

from clustersim.core.errors import ProgramError
from clustersim.core.program import Compute, Recv, Send, Serve
from clustersim.engine import simulate


def to(rank: int) -> np.ndarray:
    return np.array([rank])


def served(durations, work=1.0, sizes=None):
    """Clients 1..n compute, then send to rank 0, which serves each: (start, end) of each client's turn."""
    sizes = sizes or [10.0] * len(durations)
    server = [Recv(f"recv {c}", b, to(c), stream=f"from {c}") for c, b in enumerate(sizes, 1)]
    server += [Serve(f"serve {c}", work, "server", after=(c - 1,)) for c in range(1, len(durations) + 1)]
    clients = [[Compute("work", d), Send("push", b, to(0), after=(0,))] for d, b in zip(durations, sizes, strict=True)]
    topology = star(len(durations) + 1)
    made = program(server, *clients, ranks=[[i] for i in range(len(durations) + 1)])
    timeline = simulate(made, topology, mesh(topology), planner=lambda request, group: plan(request, group.gpus[:1]))
    rows = {
        timeline.ops[o].name: (s, e)
        for o, s, e in zip(timeline.row_op, timeline.row_start, timeline.row_end, strict=True)
    }
    return [rows[f"serve {c}"] for c in range(1, len(durations) + 1)]


def test_who_comes_first_is_served_first_whatever_the_list_says():
    # A client's push takes 1 s on its own link: they come at 6, 3 and 3.5 s.
    assert served([5.0, 2.0, 2.5]) == [(6.0, 7.0), (3.0, 4.0), (4.0, 5.0)]


def test_a_late_client_does_not_delay_an_early_one_and_an_idle_server_starts_at_once():
    assert served([0.0, 9.0]) == [(1.0, 2.0), (10.0, 11.0)]
    assert served([9.0, 0.0]) == [(10.0, 11.0), (1.0, 2.0)]


def test_ties_go_by_the_list():
    assert served([1.0, 1.0, 1.0]) == [(2.0, 3.0), (3.0, 4.0), (4.0, 5.0)]


def test_a_queue_is_never_idle_while_somebody_waits_and_serves_one_at_a_time():
    rng = np.random.default_rng(3)
    durations = rng.uniform(0, 20, 12).tolist()
    turns = served(durations, work=1.5)
    arrivals = np.array(durations) + 1.0
    order = np.argsort(arrivals)
    free = 0.0
    for client in order.tolist():
        start, end = turns[client]
        assert start == pytest.approx(max(free, arrivals[client]))
        assert end == pytest.approx(start + 1.5)
        free = end


def test_a_stream_is_a_queue_or_a_list():
    ops = [Serve("a", 1.0, "server"), Compute("b", 1.0, "server")]
    with pytest.raises(ProgramError, match="op 1 'b': stream 'server' is served in order of arrival"):
        program(ops, ranks=1).check()
