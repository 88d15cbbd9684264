"""Steps of split models: pipelines with toy layers against the published op orders' own arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipelines import Nothing, play

from clustersim.training.schedules import beside, check, schedule
from clustersim.training.schedules.notation import parse
from clustersim.training.strategies.base import OpList
from clustersim.training.strategies.walk import WHOLE, RankWalk
from tests.tables import table_rows

DATA = Path(__file__).parent / "data"

# Makespan of p = 4 stages, F 1, B 2, with transfers that take 0, 0.1 and 0.25: executed send, receive and wait order of
# Megatron-LM@d98e8a64 megatron/core/pipeline_parallel/schedules.py, and the pure data flow.
TRANSFERS = {
    ("1f1b", 1, 8, "blocking"): (33.0, 34.9, 37.75),
    ("1f1b", 1, 16, "blocking"): (57.0, 60.5, 65.75),
    ("1f1b", 1, 8, "overlapped"): (33.0, 34.6, 37.0),
    ("1f1b", 1, 16, "overlapped"): (57.0, 59.8, 64.0),
    ("interleaved_1f1b", 2, 8, "batched"): (57.0, 59.5, 63.25),
    ("interleaved_1f1b", 2, 16, "batched"): (105.0, 109.1, 115.25),
    ("interleaved_1f1b", 2, 8, "steady"): (57.0, 58.4, 60.5),
    ("interleaved_1f1b", 2, 16, "steady"): (105.0, 106.4, 108.5),
    ("interleaved_1f1b", 2, 8, "overlapped"): (57.0, 58.4, 60.5),
    ("interleaved_1f1b", 2, 16, "overlapped"): (105.0, 106.4, 108.5),
}


@pytest.mark.parametrize(("name", "chunks", "microbatches", "mode"), TRANSFERS)
def test_a_transfer_costs_what_the_frameworks_order_of_calls_makes_it_cost(name, chunks, microbatches, mode):
    orders = schedule(name).order(4, chunks, microbatches)
    spent = [play(orders, mode=mode, transfer=transfer).makespan for transfer in (0.0, 0.1, 0.25)]
    assert spent == pytest.approx(TRANSFERS[name, chunks, microbatches, mode], rel=1e-12)


def _cases():
    """Every executed op order: rows of one case, by rank."""
    cases = {}
    for row in table_rows(DATA / "pipeline_examples.csv"):
        cases.setdefault(row["case"], []).append(row)
    return cases


@pytest.mark.parametrize("case", _cases().values(), ids=_cases())
def test_the_engine_plays_every_executed_order_in_its_makespan(case):
    rows = sorted(case, key=lambda row: int(row["rank"]))
    placement = {"loop": "loop", "v": "v"}.get(rows[0]["placement"], "both")
    timeline = play(tuple(parse(row["ops"]) for row in rows), placement)
    pairs = any("|" in row["ops"] for row in rows)
    # What a pair makes is sent when both are through.
    wanted = float(rows[0]["makespan_pair_atomic" if pairs else "makespan"])
    assert timeline.makespan == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("p", "v"), [(4, 2), (8, 3)])
def test_as_many_micro_batches_as_ranks_are_all_warm_up_and_no_call_pairs_them(p, v):
    """Megatron-LM's ``all_warmup_microbatches``: paired, a rank would wait for a gradient it has not asked for yet."""
    orders = schedule("interleaved_1f1b").order(p, v, p)
    spent = {mode: play(orders, mode=mode).makespan for mode in ("batched", "steady", "overlapped")}
    assert spent == pytest.approx(dict.fromkeys(spent, spent["overlapped"]))


@pytest.mark.parametrize(("p", "v", "m"), [(1, 1, 6), (2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 2, 16)])
def test_forwards_run_beside_backwards_of_other_micro_batches_without_a_deadlock(p, v, m):
    options = {"overlap_moe_expert_parallel_comm": True} if v > 1 else {}
    orders = tuple(
        beside(order) for order in schedule("interleaved_1f1b" if v > 1 else "1f1b").order(p, v, m, **options)
    )
    check(orders, "loop", m, v)
    pairs = [slot for order in orders for slot in order if len(slot) == 2]
    assert len(pairs) >= p * (m * v - 2 * p * v)
    assert all(one[1:] != other[1:] for one, other in pairs)
    assert play(orders).makespan >= 3.0 * m * v


@pytest.mark.parametrize("turns", [{"F": 4, "B": 4}, {"F": 4, "B": 8}, {"F": 2, "B": 6}])
def test_of_a_pair_each_has_the_same_share_of_its_exchanges_behind_it(turns):
    """The one that has more of them is laid more often, so that neither has a rest that nothing hides; backward's
    gradients go first, beside forward's attention."""
    laid = []

    def lay(place, action, part):
        for i in range(turns[action.kind]):
            laid.append((action.kind, i + 1))
            yield

    order = parse("F0 (F1|B0) B1")
    walk = RankWalk(OpList(), order, (1,), lay, Nothing(), turns=lambda place, action: turns[action.kind])
    walk.step()
    pair = laid[turns["F"] : -turns["B"]]
    assert len(pair) == sum(turns.values())
    assert pair[:2] == [("B", 1), ("F", 1)]
    done = {"F": 0, "B": 0}
    for kind, count in pair:
        done[kind] = count
        assert abs(done["F"] / turns["F"] - done["B"] / turns["B"]) <= 1.0 / turns["F"] + 1e-12


@pytest.mark.parametrize(("name", "chunks", "microbatches", "mode"), [key for key in TRANSFERS if key[3] == "blocking"])
def test_shapes_sent_first_double_what_short_messages_take(name, chunks, microbatches, mode):
    """A transfer that takes x whatever its size takes 2 x with its shape; the host's own time is another matter."""
    orders = schedule(name).order(4, chunks, microbatches)
    spent = [play(orders, mode=mode, transfer=transfer, shapes=True).makespan for transfer in (0.0, 0.05, 0.125)]
    assert spent == pytest.approx(TRANSFERS[name, chunks, microbatches, mode], rel=1e-12)


@pytest.mark.parametrize("limit", [0, 1, 4, 8, 99])
@pytest.mark.parametrize("p", [2, 4])
def test_deferred_weight_gradients_of_the_head_fill_the_drain(p, limit):
    """The last stage has a layer (F I W) and the head (F I W), so that it is the slowest: 6 a micro-batch.

    Its end is 1 (p-1) of the first forward, and 6 m; the others then drain for 2 (p-1). Each deferred W lets them begin
    to drain 1 earlier, and the last stage itself ends when all its work is done.
    """
    m = 8
    played = play(schedule("1f1b").order(p, 1, m), head=True, deferral=limit)
    deferred = min(limit, m)
    assert played.makespan == pytest.approx(max(p - 1 + 6 * m, p - 1 + 6 * m - deferred + 2 * (p - 1)))


def test_a_deferred_weight_gradient_completes_its_layers_gradients():
    complete = []

    class Told(Nothing):
        def around(self, place, action, *, last):
            yield WHOLE
            if last:
                complete.append((place, action.kind))

    walk = RankWalk(OpList(), parse("F0 B0 F1 B1"), (2,), lambda *_: (), Told(), deferred=frozenset({(0, 1)}), limit=1)
    walk.step()
    backward = [(place, kind) for place, kind in complete if kind != "F"]
    assert backward == [((0, 0), "B"), ((0, 1), "W")]
