"""What holds at every moment of a play, as numbered in :mod:`clustersim.engine`: one test each."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import random_programs
import toy

from clustersim import scenario
from clustersim.core.errors import ProgramError, TopologyError
from clustersim.core.program import Compute
from clustersim.engine import run, simulate
from clustersim.engine.bills import Bills
from clustersim.engine.flows.network import FlowNetwork
from clustersim.engine.guess import SharingGuess, firsts
from clustersim.engine.play import Play

KINDS = [kind for kind in random_programs.KINDS if kind != "real machine"]

HYBRID = {"cluster.nodes": 2, "model.name": "llama3-8b", "run.steps": 1, "run.jitter": 0.02}
"""Of the hybrid sharding scenario: small, with kernels, bills, free and clocked transfers."""


def played(case):
    """A random Program's Timeline; None where it cannot be played."""
    try:
        return simulate(case.program, case.topology, case.mesh, **case.options)
    except (ProgramError, TopologyError):
        return None


def hybrid():
    return scenario.load("hsdp_llama3_70b_32x8_h100", HYBRID).run().timeline


@pytest.fixture
def watched(monkeypatch):
    """Lets a test look on: ``watched(owner, name, before)`` calls ``before`` with what a method is called with."""

    def look(owner, name, before):
        real = getattr(owner, name)

        def watching(self, *args, **named):
            before(self, *args, **named)
            return real(self, *args, **named)

        monkeypatch.setattr(owner, name, watching)

    return look


def times_of(column, who, n):
    return np.broadcast_to(np.asarray(column, dtype=float), n)[slice(None) if who is None else who]


def test_1_nothing_unknown_happens_before_what_is_played(watched):
    # Whoever has run a kernel began it before the end, only now known, of a collective that the kernel would pay for.
    seen = []

    def known(self, task, who):
        for kernel in self._kernels[task.key[0]]:
            if task.above < kernel.place <= task.below and kernel.left < kernel.n:
                ran = np.isfinite(times_of(kernel.end, who, task.n)) if kernel.left else True
                start = times_of(kernel.start, who, task.n)
                end = times_of(task.end, who, task.n)
                assert np.all((start <= end * (1 + 1e-9)) | ~np.asarray(ran))
                seen.append(kernel.key)

    watched(Bills, "ended", known)
    hybrid()
    assert seen


def test_2_a_column_once_made_is_never_written_to(watched):
    sealed = []

    def seal(self, task, who, start, end):
        for column in (start, end) if who is None else ():
            if isinstance(column, np.ndarray):
                column.flags.writeable = False  # numpy raises where somebody writes to it
                sealed.append(column)

    watched(Play, "_end", seal)
    hybrid()
    assert sealed


@pytest.mark.parametrize("number", range(18))
def test_3_the_end_of_a_free_transfer_depends_on_its_start_alone(number):
    def look(sites, clocked, begin, end, network):
        for site in sites:
            mine = slice(site.first, site.first + len(site.ranks))
            if site.first not in clocked:
                assert np.all(end[mine] == begin[mine] + site.plans.moving)
        return real(sites, clocked, begin, end, network)

    real = run._note
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_note", look)
        played(random_programs.case(Random(number), KINDS[number % len(KINDS)]))


def test_4_every_flow_has_a_holder_a_full_slot_where_nobody_is_faster_or_its_ceiling(watched):
    seen = []

    def certified(self):
        flows = [(one, way) for one in self._active for *_, way in one.flows]
        used = np.zeros(self._slots.n)
        fastest = np.zeros(self._slots.n)
        for one, way in flows:  # of all slots it crosses, also those that nobody watches
            used[way.slots] += way.weights * one.rate
            np.maximum.at(fastest, way.slots, one.rate)
        assert np.all(used <= 1 + 1e-9)
        for one, way in flows:
            full = (used[way.slots] >= 1 - 1e-8) & (one.rate >= fastest[way.slots] * (1 - 1e-8))
            assert full.any() or one.rate >= way.ceiling * (1 - 1e-9)
        seen.append((len(flows), len(self._active)))

    watched(FlowNetwork, "_sleep", certified)
    scenario.load("ps_async_32x8_v100", {"cluster.nodes": 4, "run.steps": 2}).run()
    assert max(flows for flows, _ in seen) > 12
    assert any(flows > classes for flows, classes in seen)  # workers that share a port are of one class


@pytest.mark.parametrize("number", range(36))
def test_5_and_7_a_guess_changes_neither_the_times_nor_the_ids_of_transfers(number):
    case = random_programs.case(Random(number), KINDS[number % len(KINDS)])

    def everything(self, program, sites, loads):
        real(self, program, sites, loads)
        self.clocked = firsts(sites)

    real = SharingGuess.__init__
    one = played(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharingGuess, "__init__", everything)
        other = played(case)
    if one is None or other is None:
        assert one is other
        return
    assert one.makespan == pytest.approx(other.makespan, rel=1e-9)
    assert np.all(np.diff(one.links.transfer_op) >= 0)  # by role and op, then by meeting
    assert one.links.transfer_op.tolist() == other.links.transfer_op.tolist()
    assert one.links.transfer_load.tolist() == other.links.transfer_load.tolist()


@pytest.mark.parametrize("shared", [False, True])
def test_6_all_ends_of_an_instant_are_known_before_a_kernel_of_it_starts(shared):
    # Both transfers end when the first kernel does, and the second pays for both: half of 4 s, twice.
    groups = ([[0, 1]], [[0, 1]]) if shared else ([[0, 1]], [[1, 0]])
    nbytes = (20.0, 20.0) if shared else (40.0, 40.0)
    planner = toy.up_links if shared else lambda request, group: toy.plan(request, group.gpus[:1])
    ops = [
        toy.all_reduce("one", nbytes[0], groups[0], stream="a"),
        toy.all_reduce("other", nbytes[1], groups[1], stream="b"),
        Compute("first", 4.0),
        Compute("second", 1.0),
    ]
    topology = toy.star(2)
    timeline = simulate(toy.program(ops, slowdown=0.5), topology, toy.mesh(topology), planner=planner)
    assert timeline.makespan == pytest.approx(4.0 + 1.0 + 2 * 0.5 * 4.0)
    assert (timeline.stats["events"] > 0) == shared
