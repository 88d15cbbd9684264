"""A rank that is alone in its role is played with numbers: the same bits as with columns of one, in less work."""

from __future__ import annotations

import numpy as np
import pytest

from clustersim import scenario
from clustersim.core.blocks import RankSets
from clustersim.core.program import seconds
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
