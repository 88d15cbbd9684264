"""Kernels that only follow one another are played at once: the run is the same as if each waited for its turn."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import random_programs

from clustersim import scenario
from clustersim.core.errors import ProgramError, TopologyError
from clustersim.engine import run, simulate
from clustersim.engine.chains import Chain

SCENARIOS = {
    "1f1b_gpt2_xl_1x8_a100": {"run.jitter": 0.02},
    "ddp_gpt2_xl_2x8_a100": {"run.jitter": 0.02},
    "ps_async_1x8": {},
    "ps_sync_cpu_1x8": {"run.jitter": 0.1},
}


@pytest.fixture
def pieces(monkeypatch):
    """How many ranks came to each chain that was not played by all of them at once."""
    seen = []
    real = Chain._piece

    def look(self, who, end):
        seen.append(np.size(end))
        return real(self, who, end)

    monkeypatch.setattr(Chain, "_piece", look)
    return seen


def spans(timeline):
    return [column.tobytes() for column in timeline.spans().values()]


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_is_the_same_to_the_bit_without_chains(name, monkeypatch):
    at_once = scenario.load(name, SCENARIOS[name]).run()
    monkeypatch.setattr(run, "link", lambda lists: None)
    one_by_one = scenario.load(name, SCENARIOS[name]).run()
    assert spans(at_once.timeline) == spans(one_by_one.timeline)


def test_workers_that_come_one_by_one_run_a_pass_at_once(pieces):
    # Forward and backward of a layer each and the loss: far fewer turns than kernels.
    played = scenario.load("ps_async_1x8", {"run.steps": 4}).run().timeline
    kernels = sum(op.kind == "compute" and "worker" in op.role for op in played.ops)
    assert 0 < len(pieces) < kernels


@pytest.mark.parametrize("seed", range(60))
def test_random_programs_are_the_same_without_chains(seed, monkeypatch):
    kind = list(random_programs.KINDS)[seed % len(random_programs.KINDS)]
    found = []
    for links in (run.link, lambda lists: None):
        monkeypatch.setattr(run, "link", links)
        case = random_programs.case(Random(seed), kind)
        try:
            found.append(spans(simulate(case.program, case.topology, case.mesh, **case.options)))
        except (ProgramError, TopologyError) as error:
            found.append(str(error))
    assert found[0] == found[1]


def test_who_waits_for_a_kernel_in_the_middle_ends_its_chain(monkeypatch):
    chains = []
    real = run.link

    def look(lists):
        real(lists)
        chains.extend([t.op.name for t in (task, *task.chain.tasks)] for mine in lists for task in mine if task.chain)

    monkeypatch.setattr(run, "link", look)
    _ = scenario.load("ddp_gpt2_medium_2x4_v100", {"run.steps": 2}).run().timeline
    first, second, *_ = chains
    assert {"fwd layers.0", "bwd layers.0"} <= set(first)  # one bucket, when all gradients are there
    assert first[-1] == second[-1] == "copy bucket 0"  # an all-reduce waits for it, and who comes next may owe for that
    assert "fwd layers.0" in second
    assert "bwd layers.0" not in second
