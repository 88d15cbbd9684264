"""How far ahead a play may look is carried on from play to play, and is what it would be from the beginning."""

from __future__ import annotations

import pytest

from clustersim import scenario
from clustersim.engine import run
from clustersim.engine.order import LookAhead

CASES = {
    "a pipeline": ("1f1b_gpt2_xl_1x8_a100", {}),
    "hybrid sharding": (
        "hsdp_llama3_70b_32x8_h100",
        {"cluster.nodes": 2, "model.name": "llama3-8b", "run.jitter": 0.02},
    ),
    "a server": ("ps_sync_cpu_1x8", {}),
}


def looks(lists):
    """What each task may wait, and the meetings through which it is noticed."""
    return [(task.look, id(task.gate)) for role_tasks in lists for task in role_tasks]


def played(monkeypatch, case):
    """The lists and sites of a run that has been played."""
    name, changes = CASES[case]
    kept = []
    plain = run._EngineRun._play
    monkeypatch.setattr(run._EngineRun, "_play", lambda self: kept.append(self) or plain(self))
    monkeypatch.setattr(run, "_let_go", lambda lists: None)  # tasks know whom they wait for, still
    scenario.load(name, {"run.steps": 1} | changes).run()
    return kept[-1].lists, sorted(site.first for site in kept[-1].sites)


@pytest.mark.parametrize("case", CASES)
def test_one_walk_back_finds_what_shortest_ways_find(monkeypatch, case):
    lists, sites = played(monkeypatch, case)
    ahead = LookAhead(lists)
    ahead.clock(set(sites[::5]))
    assert ahead.settled == sum(map(len, lists))  # every task once
    expected = looks(lists)
    monkeypatch.setattr(LookAhead, "_look_once", lambda self: 0)
    LookAhead(lists).clock(set(sites[::5]))
    assert looks(lists) == expected


@pytest.mark.parametrize("case", CASES)
def test_more_on_the_clock_is_as_if_it_had_been_there_from_the_beginning(monkeypatch, case):
    lists, sites = played(monkeypatch, case)
    few = set(sites[::7])
    more = set(sites[::3]) | few
    whole = LookAhead(lists)
    whole.clock(more)
    expected = looks(lists)
    steps = LookAhead(lists)
    steps.clock(few)
    before = steps.settled
    steps.clock(more)
    assert looks(lists) == expected
    assert steps.settled - before < whole.settled
    settled = steps.settled
    steps.clock(more)
    assert steps.settled == settled  # nothing is looked at again where nothing has changed
