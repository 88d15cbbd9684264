"""Losses that are added up together come to what they come to one by one, and meetings are told apart as one by one."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

import clustersim
from clustersim.explain import charges
from clustersim.explain.booking import Charge, booked, by_step
from clustersim.explain.breakdown import steady_pieces
from clustersim.explain.chase import RankMeetings
from clustersim.explain.critical_path import critical_path
from clustersim.explain.stalls import causes
from clustersim.explain.whatif import whatif

SMALL = {"cluster.nodes": 4, "parallel.tp": 4, "parallel.pp": 2, "parallel.global_batch_size": 32, "run.steps": 2}
RUNS = {
    "slow": ("why_slow_gpu", {}),
    "pipeline": ("1f1b_gpt2_xl_1x8_a100", {"run.steps": 2}),
    "replicas": ("tp8_pp4_llama3_70b_32x8_h100", SMALL),
    "server": ("why_parameter_server", {}),
    "own paces": ("ps_async_1x8", {}),
}


@pytest.fixture(scope="module", params=RUNS)
def timeline(request):
    name, changes = RUNS[request.param]
    return clustersim.load(name, changes).run().timeline


def one_by_one(lost, blames, blamed, cut, weight):
    """Each loss is charged by itself, in order; a class's ranks are counted for each of its losses."""
    book = {}
    class_ranks = [set(np.flatnonzero(cut.class_of == c).tolist()) for c in range(len(cut.ranks))]
    for place, number in enumerate(blamed.tolist()):
        blame = blames[number]
        charge = book.setdefault(blame.charged, Charge(*blame.charged))
        seconds, owner, op = lost.seconds.item(place), lost.owner.item(place), lost.op.item(place)
        charge.seconds += seconds * weight.item(owner)
        charge.count += 1
        charge.ranks |= class_ranks[owner]
        if (op >= 0) > (charge.op >= 0) or (seconds > charge.worst and (op >= 0 or charge.op < 0)):
            charge.worst_is(lost, place, blame, cut)
    return book


def test_what_is_booked_together_is_what_is_booked_one_by_one(timeline, monkeypatch):
    seen = []

    def both(lost, blames, blamed, cut, weight):
        fast = booked(lost, blames, blamed, cut, weight)
        assert {key: charge for key, charge in fast.items() if charge.count} == one_by_one(
            lost, blames, blamed, cut, weight
        )
        seen.append(len(blamed))
        return fast

    def steps_too(lost, blames, blamed, step, weight):
        fast = by_step(lost, blames, blamed, step, weight)
        slow = defaultdict(lambda: defaultdict(float))
        for place, number in enumerate(blamed.tolist()):
            part = lost.seconds.item(place) * weight.item(lost.owner.item(place))
            slow[step.item(place)][blames[number].charged] += part
        assert fast == slow
        return fast

    monkeypatch.setattr(charges, "booked", both)
    monkeypatch.setattr(charges, "by_step", steps_too)
    told = causes(timeline)
    assert seen
    assert seen[0] > 0
    assert sum(charge.seconds for charge in told.charges) > 0


def test_groups_of_many_ops_are_those_of_each(timeline):
    met = RankMeetings(timeline)
    draw = np.random.default_rng(0)
    ops = draw.integers(len(timeline.ops), size=400)
    ranks = draw.integers(timeline.world_size, size=400)
    alone = [met.group_of(op).item(rank) for op, rank in zip(ops.tolist(), ranks.tolist(), strict=True)]
    assert met.groups_at(ops, ranks).tolist() == alone


def test_spans_that_ended_are_those_of_the_rank_that_ended_then(timeline):
    columns = RankMeetings(timeline).columns
    cut = steady_pieces(timeline)
    middle = 0.5 * (cut.begin + cut.end)
    for rank in (0, timeline.world_size - 1):
        for length in (0.0, 0.01, 0.5):
            begin = middle - length * (cut.end - cut.begin)
            near = columns.of_rank(rank, begin, middle)
            rows = zip(near.op.tolist(), near.at.tolist(), near.start.tolist(), near.end.tolist(), strict=True)
            assert columns.ended(rank, begin, middle) == [row for row in rows if row[3] <= middle]
    assert critical_path(timeline).length_s > 0


def test_knobs_played_together_save_what_each_saves_alone(timeline):
    knobs = ("compute speed", "NIC", "latency", "bucket size")
    together = whatif(timeline, knobs=knobs)
    alone = {knob: whatif(timeline, knobs=(knob,))["step_time_s"][0] for knob in knobs}
    times = dict(zip(together["knob"].tolist(), together["step_time_s"].tolist(), strict=True))
    assert times == pytest.approx(alone, rel=1e-12)
