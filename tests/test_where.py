"""Where a step went: closed forms of bubbles, exposed transfers and waits; everything adds up to the step."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_runs import gpipe, one_f_one_b, simulated
from pipelines import ToyCost, play

from clustersim.core.label import Label
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.explain.dimensions import DIMENSIONS, dimension
from clustersim.explain.explain import explain
from clustersim.explain.metrics import steady_window
from clustersim.explain.step_words import bubble_sentence, ideal_bubble, losses
from clustersim.explain.where import BUBBLES, WORDS, StageSeconds, told_apart, where
from clustersim.scenario import load
from clustersim.training.schedules import schedule


def step_of(timeline: Timeline) -> float:
    window = steady_window(timeline)
    return (window.end - window.begin) / len(window.steps)


def adds_up(timeline: Timeline) -> list[StageSeconds]:
    """The rows, of which each has been checked to be the step."""
    rows = where(timeline)
    step = step_of(timeline)
    for row in rows:
        assert row.step == pytest.approx(step, rel=1e-9)
        assert sum(seconds for *_, seconds in row.parts()) == pytest.approx(step, rel=1e-9)
        assert set(row.bubble) <= set(BUBBLES)
        assert {*row.exposed, *row.waiting} <= set(DIMENSIONS)
        assert min(seconds for *_, seconds in row.parts()) >= 0
    mean = rows[0].groups
    for key in WORDS:
        stages = [row.groups[key] for row in rows[1:]] or [mean[key]]
        assert mean[key] == pytest.approx(sum(stages) / len(stages), abs=1e-9 * step)
    return rows


@pytest.mark.parametrize("order", [one_f_one_b, gpipe])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 16)])
def test_equal_stages_with_free_messages_have_p_minus_1_over_m_of_their_work_as_fill_and_drain(order, p, m):
    f = 1.0
    b = 2.5
    for row in adds_up(simulated([f] * p, [b] * p, m, order=order)):
        assert row.compute == pytest.approx(m * (f + b), rel=1e-12)
        assert set(row.bubble) <= {"fill", "drain"}
        assert sum(row.bubble.values()) == pytest.approx((p - 1) / m * row.compute, rel=1e-12)
        assert row.groups["waiting"] == row.groups["exposed"] == row.other == 0


@pytest.mark.parametrize("m", [4, 16])
def test_a_slow_last_stage_is_imbalance_of_m_times_what_it_takes_longer_everywhere_else(m):
    _, *stages = adds_up(simulated([1.0, 1.0, 1.0, 1.75], [2.0, 2.0, 2.0, 3.25], m))
    for row in stages:
        assert row.bubble.get("imbalance", 0.0) == pytest.approx(0.0 if row.stage == 3 else m * 2.0, abs=1e-9)


def test_a_message_that_moves_while_nothing_computes_is_an_exposed_transfer_over_pp_and_no_bubble():
    free, slow = (adds_up(simulated([1.0] * 3, [2.0] * 3, 6, transfer=t)) for t in (0.0, 0.25))
    assert free[0].exposed == {}
    assert set(slow[0].exposed) == {"PP"}
    for a, b in zip(free[1:], slow[1:], strict=True):
        assert b.compute == pytest.approx(a.compute)
        assert b.bubble["fill"] == pytest.approx(a.bubble["fill"])
        assert b.exposed["PP"] > 0


def test_what_is_after_the_last_pass_of_all_is_tail():
    rows = adds_up(simulated([1.0] * 2, [2.0] * 2, 4, steps=3, tail=0.5))
    _, first, last = rows
    # Stage 1 ends its last pass one backward earlier, and so its optimizer: the wait for stage 0's is a tail.
    assert last.bubble["tail"] == pytest.approx(0.5)
    assert first.bubble.get("tail", 0.0) == pytest.approx(0.0, abs=1e-12)
    assert last.bubble["drain"] == pytest.approx(2.0 - 0.5)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.floats(0.5, 3.0), min_size=2, max_size=4),
    st.integers(1, 6),
    st.floats(0.0, 1.0),
    st.integers(1, 3),
)
def test_every_pipeline_adds_up_to_its_step(forward, m, transfer, steps):
    adds_up(simulated(forward, [2 * f for f in forward], m, transfer=transfer, steps=steps, tail=0.25))


@pytest.mark.parametrize(
    ("name", "mode"),
    [("1f1b", "blocking"), ("gpipe", "blocking"), ("zb_h1", "overlapped"), ("interleaved_1f1b", "batched")],
)
def test_every_schedule_adds_up(name, mode):
    row = schedule(name)
    chunks = 2 if name == "interleaved_1f1b" else 1
    orders = row.order(4, chunks, 8)
    rows = adds_up(play(orders, row.placement, mode=mode, cost=ToyCost(w=1.5), transfer=0.125, steps=3))
    assert len(rows) == 5
    assert rows[0].exposed["PP"] > 0


def test_waits_of_data_parallel_ranks_are_no_bubble():
    timeline = load("ddp_resnet50_1x8_v100").run().timeline
    (row,) = adds_up(timeline)
    assert row.bubble == {}
    assert set(row.exposed) == {"DP"}
    assert row.waiting["DP"] > 0


def test_tensor_and_data_parallel_transfers_beside_a_pipeline_are_told_apart():
    changes = {"model.name": "gpt2-medium", "parallel.tp": 2, "parallel.pp": 2, "parallel.microbatches": 4}
    rows = adds_up(load("1f1b_gpt2_xl_1x8_a100", changes).run().timeline)
    assert {"TP", "PP", "DP"} <= set(rows[0].exposed)


@pytest.mark.parametrize(
    ("dim", "name"),
    [
        ("tp", "TP"),
        ("cp", "CP"),
        ("cp_p2p", "CP"),
        ("ep", "EP"),
        ("etp-ep", "EP"),
        ("etp", "TP"),
        ("pp", "PP"),
        ("dp-cp", "DP"),
        ("edp", "DP"),
        ("dp_shard-cp", "DP"),
        ("embd", "step end"),
        ("tp-cp-dp-pp", "step end"),
    ],
)
def test_a_dimension_has_one_name(dim, name):
    assert dimension(OpInfo("x", "all_reduce", "s", label=Label(dim=dim))) == name


def told(timeline: Timeline) -> list[str]:
    return [loss.why for loss in losses(timeline, where(timeline)) if loss.share > 0.005]


def test_the_bubble_stands_beside_its_formula():
    (why,) = told(simulated([1.0] * 4, [2.0] * 4, 12))
    assert why == (
        "the schedule has to fill and drain the pipeline: fill 4.5 s, drain 4.5 s in the mean over stages, 25.0% of a "
        "stage's forwards and backwards alone, and (p-1)/m = 3/12 is 25.0%"
    )


def test_the_parts_of_a_bubble_stand_beside_the_whole_of_it():
    run = simulated([1.0] * 4, [2.0] * 3 + [4.0], 12)
    rows = where(run)
    whole = sum(rows[0].bubble.values()) / rows[0].step
    text = bubble_sentence(run, rows)
    assert text.startswith(f"Bubble, {whole:.1%} of a step in the mean over stages: ")
    parts = [float(part) for part in re.findall(r"([0-9.]+)% because", text)]
    assert len(parts) > 1
    assert sum(parts) == pytest.approx(100 * whole, abs=0.5)


def test_messages_between_stages_are_no_part_of_what_the_formula_divides_by():
    (why, *_) = told(simulated([1.0] * 4, [2.0] * 4, 12, transfer=0.25))
    assert why.endswith("25.0% of a stage's forwards and backwards alone, and (p-1)/m = 3/12 is 25.0%")


def test_chunks_divide_the_formula():
    row = schedule("interleaved_1f1b")
    run = play(row.order(4, 2, 8), row.placement, mode="overlapped", cost=ToyCost(i=1.0, w=1.0))
    assert ideal_bubble(run) == (4, 2, 8)
    assert told(run)[0].endswith("18.8% of a stage's forwards and backwards alone, and (p-1)/vm = 3/(2 x 8) is 18.8%")


@pytest.mark.parametrize(
    ("name", "chunks", "formula"),
    [
        ("zb_h1", 1, "3/(3 x 8), 12.5%"),  # (p-1)(F + I - W) of m(F + I + W)
        ("zbv", 2, "3/(3 x 2 x 8), 6.2%"),  # (p-1)F of a chunk
        ("interleaved_zero_bubble", 2, "3/(3 x 2 x 8), 6.2%"),
    ],
)
def test_a_schedule_that_splits_backward_stands_beside_its_papers_formula(name, chunks, formula):
    """It had the time, and no formula."""
    row = schedule(name)
    run = play(row.order(4, chunks, 8), row.placement, mode="overlapped", cost=ToyCost(i=1.0, w=1.0))
    assert ideal_bubble(run) is None
    (why, *_) = told(run)
    share = formula.rpartition(" ")[2]
    assert why.endswith(
        f"{share} of a stage's forwards and backwards alone, where its formula has {formula}, if F, I and W take alike"
    )


def test_an_order_of_ones_own_that_splits_backward_has_no_formula():
    row = schedule("zb_h1")
    orders = row.order(4, 1, 8, max_in_flight=6)
    assert "formula" not in told(play(orders, row.placement, mode="overlapped", cost=ToyCost(i=1.0, w=1.0)))[0]


def test_whoever_is_slow_is_named_with_what_it_has_more():
    slow = told(simulated([1.0, 1.0, 1.5], [2.0, 2.0, 3.0], 12))
    assert slow[0] == "the other stages wait for stage 2, which is busy 1.50 times as long as they are"
    assert told(simulated([1.0, 1.5], [2.0, 3.0], 12))[0].startswith("stage 0 waits for stage 1, which is busy 1.50")


def test_a_head_is_told_in_layers_and_a_stage_of_more_layers_by_their_number():
    even = load("1f1b_gpt2_xl_1x8_a100").run().timeline
    assert told(even)[0] == "the other stages wait for stage 7, whose head costs 5.4 layers"
    layout = {"parallel.pp": 2, "parallel.layout": [20, 28], "model.options": {"vocab": 1024}}
    uneven = load("1f1b_gpt2_xl_1x8_a100", {**layout, "parallel.microbatches": 16}).run().timeline
    assert told(uneven)[0] == "stage 0 waits for stage 1, which has 28 layers where others have 20"


def test_the_verdict_and_the_first_cause_name_the_stage_that_holds_all():
    found = explain(load("1f1b_gpt2_xl_1x8_a100").run().timeline)
    assert "because the other stages wait for stage 7, whose head costs 5.4 layers" in found.verdict
    assert found.causes[0].startswith("Bubble, ")
    assert "(p-1)/m = 7/24 is 29.2%" in found.causes[0]
    assert "bubble " in found.shares
    assert "(fill " in found.shares
    assert not any("0.0%)" in cause for cause in found.causes)


def test_a_run_has_every_figure_apart_and_they_add_up():
    result = load("1f1b_gpt2_xl_1x8_a100").run()
    said = result.to_dict()
    assert said["exposed_communication_s"] == pytest.approx(said["exposed_transfer_s"] + said["waiting_for_peer_s"])
    parts = [said[name] for name in ("compute_s", "exposed_communication_s", "bubble_s", "idle_s")]
    assert sum(parts) == pytest.approx(said["step_time_s"], rel=1e-9)
    assert said["bubble_s"] > 10 * said["exposed_communication_s"]
    assert sum(said["phase_shares"].values()) == pytest.approx(1.0, abs=0.02)
    for row in said["where"]:
        inside = [sum(row[name].values()) for name in ("exposed_transfer_s", "waiting_for_peer_s", "bubble_s")]
        assert row["compute_s"] + row["other_s"] + sum(inside) == pytest.approx(said["step_time_s"], rel=1e-9)
    moved = said["volume_by_dimension"]
    by_op = said["volume"]
    assert moved["dimension"] == ["PP", "step end"]
    assert sum(moved["sent"]) == pytest.approx(sum(by_op["sent"]))
    assert sum(moved["sent_per_gpu"]) == pytest.approx(said["bytes_sent_per_gpu"])
    assert sum(moved["link_nvlink"]) == pytest.approx(sum(by_op["link_nvlink"]))
    # 24 micro-batches of 2 x 1024 x 1600 bf16 over 7 boundaries, both ways.
    assert moved["sent"][0] == 2 * 7 * 24 * 2 * 1024 * 1600 * 2


def test_a_run_of_whole_models_keeps_its_exposed_communication_and_tells_it_apart():
    said = load("ddp_resnet50_1x8_v100").run().to_dict()
    assert said["where"] == []
    assert "bubble_s" not in said
    assert said["exposed_communication_s"] == pytest.approx(said["exposed_transfer_s"] + said["waiting_for_peer_s"])
    assert said["volume_by_dimension"]["dimension"] == ["DP"]


def test_what_is_left_of_a_step_is_nothing_where_it_is_the_rounding_of_sums():
    """ "host, other 3.025e-06 ns" was told of a step of 873 ms, which sums over its spans had left."""
    figures = {"step_time_s": 0.3, "compute_s": 0.1, "phase_shares": {}}
    row = SimpleNamespace(groups={"exposed": 0.2 - 5e-17, "waiting": 0.0, "bubble": 0.0})
    assert told_apart(figures, row)["idle_s"] == 0.0
    row.groups["exposed"] = 0.15
    assert told_apart(figures, row)["idle_s"] == pytest.approx(0.05)
