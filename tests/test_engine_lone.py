"""A rank that is alone in its role is played with numbers: the same bits as with columns of one, in less work."""

from __future__ import annotations

import numpy as np
import pytest

from clustersim import scenario
from clustersim.core.blocks import RankSets
from clustersim.core.program import seconds
from clustersim.engine import sites
from clustersim.engine.order import OpTask


def columns_of_one(task):
    """What an op takes, of a lone rank as of many: a column, where its role has one [s]."""
    spent = seconds(task.role, task.op)
    return spent if isinstance(spent, np.ndarray) and spent.ndim else float(spent)


@pytest.mark.parametrize("name", ["1f1b_gpt2_xl_1x8_a100", "zb_gpt2_xl_1x8_a100", "gpipe_gpt2_xl_1x8_a100"])
def test_a_lone_rank_is_played_with_numbers_and_to_the_same_bits(name, monkeypatch):
    plan = scenario.load(name)
    rows = RankSets.rows
    turned = []
    monkeypatch.setattr(RankSets, "rows", lambda self, block: turned.append(block) or rows(self, block))
    timeline = plan.run().timeline
    assert not turned  # no op needs to be made a column, and a row of that
    monkeypatch.setattr(OpTask, "seconds", property(columns_of_one))
    other = plan.run().timeline
    spans = timeline.spans()
    assert len(spans["op"]) > 1000
    for column, times in other.spans().items():
        assert spans[column].tobytes() == times.tobytes()
    assert {**timeline.stats} == {**other.stats}


SERVER_EACH = {
    "strategy": {
        "kind": "parameter_server",
        "micro_batch_size": 1,
        "servers": 8,
        "server": "worker",
        "sharding": "even",
    },
    "cluster.nodes": 1,
    "model.name": "gpt2",
    "run.steps": 1,
}
"""A server in every worker, with a share of each tensor: each push and pull is a send of one rank to one, and all share
ports."""


def test_a_send_of_one_to_one_on_the_clock_counts_nobody_and_is_played_to_the_same_bits(monkeypatch):
    plan = scenario.load("ddp_gpt2_xl_2x8_a100", SERVER_EACH)
    split = sites.SitePlay.split
    counted = []
    monkeypatch.setattr(sites.SitePlay, "split", lambda self: counted.append(self.missing is None) or split(self))
    timeline = plan.run().timeline
    assert timeline.stats["transfers"] > 500
    assert timeline.stats["events"] > 500
    assert not any(counted)
    monkeypatch.setattr(sites, "UNCOUNTED", 0)
    other = plan.run().timeline
    assert sum(counted) > 500
    spans = timeline.spans()
    for column, times in other.spans().items():
        assert spans[column].tobytes() == times.tobytes()
    assert {**timeline.stats} == {**other.stats}
