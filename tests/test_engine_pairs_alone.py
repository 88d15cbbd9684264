"""Servers whose every op is one rank's: what is saved there changes no answer."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from clustersim import scenario
from clustersim.engine import op_facts, run
from clustersim.engine.flows import classes
from clustersim.engine.guess import SharingGuess
from clustersim.engine.order import LookAhead

EVERY_WORKER_SERVES = {
    "run.steps": 2,
    "strategy.server": "worker",
    "strategy.servers": 8,
    "strategy.sharding": "even",
    "run.jitter": 0.02,
}


def played(changes=EVERY_WORKER_SERVES):
    """The Timeline of eight workers that are servers, each a role of its own."""
    return scenario.load("why_parameter_server", changes).run().timeline


@cache
def fast():
    """As every run is played."""
    return played()


def same(first, second):
    """Whether two runs are one, to the last bit."""
    columns = [
        (each.row_op, each.row_ready, each.row_start, each.row_end, *link_columns(each)) for each in (first, second)
    ]
    assert all(np.array_equal(a, b) for a, b in zip(*columns, strict=True))
    assert [told(op) for op in first.ops] == [told(op) for op in second.ops]
    assert first.stats == second.stats


def link_columns(timeline):
    """What the run did to links."""
    use = timeline.links
    return use.segment_transfer, use.segment_start, use.segment_end, use.segment_rate, use.transfer_op


def told(op):
    """All that is known of an op, arrays as lists."""
    detail = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in op.detail.items()}
    return op.name, op.kind, op.stream, op.after, list(detail.items())


SLOW_WAYS = {
    "spells of a course laid out as columns": (classes, "FEW", 0),
    "every list asked of what another told": (SharingGuess, "asks_once", False),
    "who meets whom gathered op by op": (op_facts, "_is_pair", lambda site: False),
    "looked ahead though nobody asks": (run, "_asks_ahead", lambda program, bills: True),
}


@pytest.mark.parametrize("way", SLOW_WAYS)
def test_servers_are_the_same_the_slow_way(monkeypatch, way):
    links = fast().links
    assert len(links.segment_transfer) > len(links.transfer_op)  # rates changed on the way
    monkeypatch.setattr(*SLOW_WAYS[way])
    same(fast(), played())


def test_nobody_looks_ahead_where_every_role_is_one_rank(monkeypatch):
    looked = []
    monkeypatch.setattr(LookAhead, "clock", lambda self, clocked: looked.append(clocked))
    timeline = played()
    assert timeline.stats["solves"] > 100
    assert not looked


def test_a_list_tells_only_of_what_no_other_told(monkeypatch):
    asked = []
    plain = SharingGuess._beside
    monkeypatch.setattr(SharingGuess, "_beside", lambda self, *what: asked.append(what) or plain(self, *what))
    played()
    told_apart = len(asked)
    asked.clear()
    monkeypatch.setattr(SharingGuess, "asks_once", False)
    played()
    assert told_apart < 0.9 * len(asked)
