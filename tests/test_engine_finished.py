"""Columns that are let go of while the rest of a run is played: the run stays the same to the bit, in less memory."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import random_programs

from clustersim import scenario
from clustersim.core.errors import ProgramError, TopologyError
from clustersim.engine import finished, simulate

SCENARIOS = {
    "1f1b_gpt2_xl_1x8_a100": {"run.jitter": 0.02},
    "ddp_gpt2_xl_2x8_a100": {"run.jitter": 0.02},
    "zero3_llama3_8b_2x8_a100": {"run.jitter": 0.02},
    "ps_async_1x8": {},
}


@pytest.fixture
def at_once(monkeypatch):
    """What is over is let go of at once: after every few ranks x ops."""

    def turn_on(cells=1):
        monkeypatch.setattr(finished, "LONG", cells)
        monkeypatch.setattr(finished, "KEPT", cells)

    return turn_on


def told(timeline):
    """Every span, and what its transfers moved."""
    spans = [column.tobytes() for column in timeline.spans().values()]
    links = timeline.links
    return spans, links.segment_start.tobytes(), links.segment_end.tobytes(), links.transfer_op.tobytes()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_whose_columns_are_let_go_of_is_the_same_to_the_bit(name, at_once):
    as_it_is = scenario.load(name, SCENARIOS[name]).run()
    at_once(500)
    let_go = scenario.load(name, SCENARIOS[name]).run()
    assert told(let_go.timeline) == told(as_it_is.timeline)
    assert let_go.summary["step_time_s"] == as_it_is.summary["step_time_s"]


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_are_the_same_when_columns_are_let_go_of(seed, at_once):
    def played():
        case = random_programs.case(Random(seed))
        try:
            return told(simulate(case.program, case.topology, case.mesh, **case.options))
        except (ProgramError, TopologyError) as wrong:
            return str(wrong)

    as_it_is = played()
    at_once()
    assert played() == as_it_is


def test_kernels_without_bills_are_kept_as_what_they_took_since_their_start(at_once):
    at_once(500)
    timeline = scenario.load("ddp_gpt2_xl_2x8_a100", {"run.jitter": 0.02}).run().timeline
    ends = [block.columns[2] for block in timeline.blocks if timeline.ops[block.op].kind == "compute"]
    since = [end for end in ends if end.since is not None]
    assert len(since) > len(ends) / 4
    assert len({id(end.values) for end in since}) < len(since) / 2  # they share what they took
    for end in since:
        assert (end.low, end.high) == (end.all.min(), end.all.max())
        assert np.array_equal(end.at(np.array([3, 1])), end.all[[3, 1]])


def test_a_program_that_meets_nobody_is_played():
    assert scenario.load("single_gpt2_1x1_a100").run().summary["step_time_s"] > 0
