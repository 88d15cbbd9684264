"""Pipeline schedules: every order that the real generators gave, the papers' formulas, and what no order may do."""

from __future__ import annotations

import operator
from itertools import groupby

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from clustersim.core.errors import ScenarioError
from clustersim.testing import check_bubble, check_order, check_play, check_schedule, most_held, takes_size
from clustersim.training.partition.stages import PLACEMENTS
from clustersim.training.schedules import SCHEDULES, Orders, PassCosts, Schedule, rank_and_chunk, schedule, stage_of
from clustersim.training.schedules.base import Action, stage_count
from clustersim.training.schedules.notation import parse, text
from clustersim.training.schedules.play import times
from clustersim.training.schedules.playable import check
from tests.tables import table_rows

EXAMPLES = ROOT / "tests" / "data" / "pipeline_examples.csv"
"""Orders that the generators of PyTorch, Megatron, zero-bubble and DualPipe gave when they were run, for F=I=W=1."""
CASES = {case: list(group) for case, group in groupby(table_rows(EXAMPLES), key=lambda row: row["case"])}
ROWS = [pytest.param(row, id=f"{row['case']}-rank{row['rank']}") for group in CASES.values() for row in group]


def longest_rank_span(played):
    """The longest time from a rank's own first action to its own last: a step's length without a common start."""
    return max(rank[-1][1] - rank[0][0] for rank in played.spans)


def found(row: dict[str, str]) -> Schedule:
    """The schedule of an example; PyTorch's ZBV has its own name there."""
    return schedule("ZBVZeroBubble" if (row["schedule"], row["option"]) == ("ZBV", "torch") else row["schedule"])


def orders_of(row: dict[str, str]) -> Orders:
    """What we generate for an example. PyTorch's rounds are what no group size means, so they are no option."""
    options: dict[str, object] = {}
    if row["option"].startswith("group"):
        options["microbatch_group_size_per_vp_stage"] = int(row["option"].removeprefix("group"))
    elif row["option"].startswith("overlap"):
        options[row["option"]] = True
    else:
        assert row["option"] in ("", "sail", "torch") or row["option"].startswith("torch_rounds")
    return found(row).order(int(row["p"]), int(row["chunks"]), int(row["m"]), **options)


def test_there_are_as_many_examples_as_the_generators_gave():
    assert len(ROWS) == 136
    assert len(CASES) == 38


@pytest.mark.parametrize("row", ROWS)
def test_an_order_is_the_one_of_the_real_generator(row):
    order = orders_of(row)[int(row["rank"])]
    assert text(order) == row["ops"]
    assert parse(row["ops"]) == order


@pytest.mark.parametrize("row", ROWS)
def test_a_rank_holds_as_much_as_in_the_real_order(row):
    order = orders_of(row)[int(row["rank"])]
    assert most_held(order) == int(row["peak_chunks_held_until_W"])
    assert most_held(order, until="I") == int(row["peak_chunks_held_until_dgrad"])


@pytest.mark.parametrize("row", ROWS)
def test_a_play_with_unit_durations_has_the_examples_times(row):
    orders = orders_of(row)
    placement = found(row).placement
    rank = int(row["rank"])
    apart = times(orders, placement)
    whole = times(orders, placement, pair=operator.add)
    assert apart.spans[rank][0][0] == float(row["rank_start"])
    assert apart.spans[rank][-1][1] == float(row["rank_end"])
    assert apart.busy[rank] == whole.busy[rank] == float(row["rank_busy"])
    assert apart.makespan == float(row["makespan"])
    assert longest_rank_span(apart) == float(row["longest_rank_span"])
    assert whole.makespan == float(row["makespan_pair_atomic"])


# ---- contracts over every schedule ----

ROOM = {"interleaved_1f1b": 4, "looped_bfs": 4, "interleaved_zero_bubble": 4}


def sizes(row: Schedule) -> st.SearchStrategy[tuple[int, int, int]]:
    """Stages, chunks and micro-batches that this schedule takes."""
    every = st.tuples(
        st.integers(1, 9),
        st.integers(1, ROOM[row.name]) if row.chunks is None else st.just(row.chunks),
        st.integers(1, 30),
    )

    return every.filter(lambda size: takes_size(row, size[0], size[2]))


NAMES = pytest.mark.parametrize("name", SCHEDULES)


@NAMES
@settings(max_examples=40)
@given(data=st.data())
def test_every_order_can_be_played_and_a_rank_holds_as_much_as_the_formula_says(name, data):
    row = SCHEDULES[name]
    check_order(row, *data.draw(sizes(row)))


def costs() -> st.SearchStrategy[PassCosts]:
    """Durations in quarters, so that sums of them are exact."""
    quarters = st.integers(1, 12).map(lambda number: number / 4)
    return st.tuples(quarters, quarters, quarters).map(lambda parts: PassCosts(*parts))


@NAMES
@settings(max_examples=40)
@given(data=st.data())
def test_the_simulated_bubble_is_the_formulas_where_one_is_stated(name, data):
    row = SCHEDULES[name]
    check_bubble(row, *data.draw(sizes(row)), data.draw(costs()))


@NAMES
def test_bubbles_and_peaks_are_stated_for_a_full_pipeline_of_equal_passes(name):
    row = SCHEDULES[name]
    v = row.chunks or 2
    assert row.peak(1, 4, v, 16, **row.with_defaults({})) is not None
    assert (row.bubble is None) == (name in ("v_half", "v_min"))
    assert row.bubble is None or row.bubble(4, v, 16, PassCosts()) > 0


@pytest.mark.parametrize(
    ("name", "v", "bubble"),
    [
        ("gpipe", 1, 9),
        ("1f1b", 1, 9),
        ("interleaved_1f1b", 2, 9),
        ("zb_h1", 1, 3),
        ("zb_2p", 1, 3),
        ("zbv", 2, 3),
        ("dualpipe", 2, 2),
        ("dualpipev", 2, 6),
    ],
)
def test_the_formulas_give_the_papers_numbers_for_four_ranks(name, v, bubble):
    # In passes of a chunk: an interleaved rank has twice as many of half the length.
    assert schedule(name).bubble(4, v, 16, PassCosts()) == bubble


@NAMES
@settings(max_examples=20)
@given(data=st.data())
def test_a_play_breaks_no_dependency_and_no_rank_does_two_things_at_once(name, data):
    row = SCHEDULES[name]
    p, v, m = data.draw(sizes(row))
    stages = stage_count(row.placement, p, v)
    check_play(row, p, v, m, [data.draw(costs()) for _ in range(stages)])


@NAMES
def test_a_schedule_keeps_the_public_contract(name):
    check_schedule(SCHEDULES[name], [(2, SCHEDULES[name].chunks or 2, 4), (4, SCHEDULES[name].chunks or 2, 8)])


@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from(PLACEMENTS))
def test_a_stage_is_where_its_rank_and_chunk_are(p, chunks, placement):
    chunks = 2 if placement == "both" else chunks
    for rank in range(p):
        for chunk in range(chunks):
            stage = stage_of(placement, rank, chunk, p)
            assert 0 <= stage < stage_count(placement, p, chunks)
            assert rank_and_chunk(placement, stage, p, chunk) == (rank, chunk)


@given(st.integers(1, 20))
def test_gradient_accumulation_is_1f1b_on_one_stage(m):
    assert text(schedule("1f1b").order(1, 1, m)[0]) == " ".join(f"F{k} B{k}" for k in range(m))


def test_beside_each_other_is_never_slower_than_one_after_the_other():
    for name, p in (("dualpipe", 8), ("dualpipev", 4)):
        orders = schedule(name).order(p, 2, 20)
        placement = schedule(name).placement
        best, worst = (times(orders, placement, pair=cost).makespan for cost in (max, operator.add))
        assert best < times(orders, placement).makespan <= worst


@pytest.mark.parametrize(
    ("name", "cost", "blind", "seeing"),
    [
        ("zb_2p", PassCosts(1, 1.5, 1.5), 49.5, 48.5),
        ("zbv", PassCosts(1, 1, 2), 99, 96),
        ("zbv", PassCosts(2, 3, 1), 156, 155),
    ],
)
def test_a_search_that_knows_the_durations_finds_a_shorter_step(name, cost, blind, seeing):
    row = schedule(name)
    equal = row.order(4, row.chunks, 12)
    real = row.order(4, row.chunks, 12, costs=cost)
    assert longest_rank_span(times(equal, row.placement, cost)) == blind
    assert longest_rank_span(times(real, row.placement, cost)) == seeing


@settings(max_examples=40)
@given(st.sampled_from(["zb_h1", "zb_2p", "zbv"]), st.integers(1, 6), st.integers(1, 20), costs(), st.integers(0, 4))
def test_what_is_searched_with_any_durations_can_be_played(name, p, m, cost, transfer):
    row = schedule(name)
    orders = row.order(p, row.chunks, m, costs=cost, transfer=transfer)
    check(orders, row.placement, m)
    assert max(map(most_held, orders)) <= (p if name == "zb_h1" else 2 * p)


@given(st.integers(1, 6), st.integers(6, 20), st.integers(1, 14))
def test_zero_bubble_holds_no_more_than_it_is_allowed(p, m, limit):
    orders = schedule("zb_2p").order(p, 1, m, max_in_flight=limit)
    check(orders, "loop", m)
    assert max(map(most_held, orders)) <= limit


def test_v_half_moves_nothing_when_its_last_forward_comes_before_its_first_gradient():
    # What zbv_greedy.py gives for four ranks and two micro-batches: there is no tail to squeeze.
    orders = schedule("v_half").order(4, 2, 2)
    assert text(orders[0]) == "F0.0 F1.0 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 I0.0 W0.0 I1.0 W1.0"
    assert text(orders[3]) == "F0.0 F0.1 F1.0 F1.1 I0.1 W0.1 I0.0 W0.0 I1.1 W1.1 I1.0 W1.0"


# ---- PipeDream ----


def missed_updates(order: tuple, rank: int, per_update: int, delayed: bool) -> set[int]:
    """By how many updates the weights of each micro-batch's forward were older than those its gradient was applied to.

    ``delayed``: every micro-batch of a step uses the version before the newest that all of its step could use (2BW).
    """
    updates = 0
    version = {}
    backwards = 0
    ages = []
    for ((kind, k, _),) in order:
        if kind == "F":
            version[k] = max(0, k // per_update - 1) if delayed else updates
            assert version[k] <= updates
        else:
            backwards += 1
            ages.append(updates - version[k])
            updates = backwards // per_update
    return set(ages[len(ages) // 2 :])


@given(st.integers(1, 8))
def test_pipedreams_staleness_is_what_a_stage_misses_while_a_microbatch_is_on_its_way(p):
    row = schedule("pipedream")
    orders = row.order(p, 1, 1, steps=4 * p)
    for rank, order in enumerate(orders):
        assert missed_updates(order, rank, 1, delayed=False) == {row.staleness(rank, p)}
        assert most_held(order) == row.versions(rank, p)


@given(st.integers(1, 8), st.integers(0, 3))
def test_2bw_is_late_by_one_update_on_every_stage_and_its_version_always_exists(p, more):
    row = schedule("2BW")
    for rank, order in enumerate(row.order(p, 1, p + more, steps=8)):
        assert missed_updates(order, rank, p + more, delayed=True) == {row.staleness(rank, p)} == {1}
        assert row.versions(rank, p) == 2


def test_pipedream_pays_one_fill_and_drain_for_all_steps():
    one, many = (times(schedule("pipedream").order(4, 1, 8, steps=n), "loop") for n in (1, 5))
    assert one.makespan - one.busy[0] == many.makespan - many.busy[0] == 9
    assert not schedule("pipedream").synchronous
    assert not schedule("pipedream").accumulates


# ---- names and bad input ----


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("1F1B", "1f1b"),
        ("gpipe", "gpipe"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("LoopedBFS", "looped_bfs"),
        ("interleavedzerobubble", "interleaved_zero_bubble"),
        ("ZBVZeroBubble", "zbv_torch"),
        ("ZB-2p", "zb_2p"),
        ("V-Half", "v_half"),
        ("DualPipeV", "dualpipev"),
        ("PipeDream-Flush", "1f1b"),
        ("PipeDream-2BW", "pipedream_2bw"),
    ],
)
def test_other_systems_names_are_known_in_any_case(theirs, ours):
    assert schedule(theirs) is schedule(theirs.upper()) is SCHEDULES[ours]


def refused(name: str, *numbers: int, **options: object) -> str:
    with pytest.raises(ScenarioError) as caught:
        schedule(name).order(*numbers, **options)
    return str(caught.value)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(
        ScenarioError, match=r"no pipeline schedule 'dualpip'; did you mean 'dualpipe'\? \(at \$.parallel"
    ):
        schedule("dualpip")


@pytest.mark.parametrize(
    ("name", "numbers", "options", "field", "right"),
    [
        ("1f1b", (4, 2, 8), {}, "vpp", "use 1"),
        ("zbv", (4, 1, 8), {}, "vpp", "use 2"),
        ("1f1b", (4, 1, 0), {}, "microbatches", "at least 1"),
        ("1f1b", (0, 1, 4), {}, "pp", "at least 1"),
        ("dualpipe", (3, 2, 8), {}, "pp", "use 4"),
        ("dualpipe", (4, 2, 9), {}, "microbatches", "the nearest that works is 10"),
        ("dualpipe", (4, 2, 5), {}, "microbatches", "the nearest that works is 8"),
        ("dualpipev", (4, 2, 6), {}, "microbatches", "the nearest that works is 8"),
        ("interleaved_1f1b", (4, 2, 9), {}, "microbatches", "the nearest that works is 10"),
        ("interleaved_zero_bubble", (4, 2, 13), {}, "microbatches", "the nearest that works is 12"),
        ("interleaved_1f1b", (4, 2, 10), {"microbatch_group_size_per_vp_stage": 4}, "microbatches", "works is 12"),
        ("interleaved_1f1b", (4, 2, 8), {"microbatch_group_size_per_vp_stage": 3}, None, "use 4"),
        ("interleaved_1f1b", (4, 2, 8), {"microbatch_group_size_per_vp_stage": 12}, None, "use 8"),
        ("interleaved_1f1b", (4, 2, 8), {"microbatch_group_size": 8}, None, "did you mean"),
        ("interleaved_1f1b", (4, 2, 8), {"microbatch_group_size_per_vp_stage": 8.5}, None, "of type int"),
        ("pipedream_2bw", (4, 1, 3), {}, "microbatches", "the nearest that works is 4"),
        ("pipedream", (4, 1, 3), {"steps": 0}, "steps", "at least 1"),
        ("zb_h1", (4, 1, 8), {"max_in_flight": 0}, "max_in_flight", "at least 1"),
        ("zbv", (4, 2, 8), {"max_in_flight": 7}, "max_in_flight", "use 8"),
        ("gpipe", (4, 1, 8), {"max_in_flight": 7}, "max_in_flight", "gpipe has no options"),
    ],
)
def test_numbers_that_do_not_work_are_refused_with_the_nearest_that_does(name, numbers, options, field, right):
    message = refused(name, *numbers, **options)
    assert f"(at $.parallel.{field or next(iter(options))})" in message
    assert right in message
    assert len(message.splitlines()) == 1


GOOD = "F0 F1 B0 B1", "F0 B0 F1 B1"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (("F0 F1 B0", GOOD[1]), "pipeline rank 0 never runs B of micro-batch 1, chunk 0"),
        ((GOOD[0], "F0 B0 B1"), "pipeline rank 1 runs B of micro-batch 1, chunk 0 before its F"),
        ((GOOD[0], "F0 I0 F1 B1"), "pipeline rank 1 never runs W of micro-batch 0, chunk 0"),
        ((GOOD[0], "F0 F1 B0 B0 B1"), "pipeline rank 1 runs B of micro-batch 0, chunk 0 a second time"),
        ((GOOD[0], "F0 F1 I0 B0 B1"), "pipeline rank 1 runs B of micro-batch 0, chunk 0 a second time"),
        ((GOOD[0], "F0 W0 I0 F1 B1"), "pipeline rank 1 runs W of micro-batch 0, chunk 0 before its I"),
        ((GOOD[0], "F0 B0 F1 B1 F2 B2"), "pipeline rank 1 runs F of micro-batch 2, chunk 0, which is none of 2"),
        ((GOOD[0], "(F0|F1) B0 B1"), "pipeline rank 1 runs (F0|F1) together"),
        (("F0 B0 F1 B1", "F0 F1 B0 B1"), "pipeline rank 0 never gets to B0, which waits for B of micro-batch 0"),
    ],
)
def test_an_order_that_cannot_be_played_names_its_rank_and_action(lines, problem):
    check(tuple(map(parse, GOOD)), "loop", 2)
    with pytest.raises(ScenarioError) as caught:
        check(tuple(map(parse, lines)), "loop", 2)
    assert problem in str(caught.value)


@given(data=st.data())
def test_an_order_with_one_action_taken_out_is_never_playable(data):
    row = SCHEDULES[data.draw(st.sampled_from(sorted(SCHEDULES)))]
    p, v, m = data.draw(sizes(row))
    orders = list(row.order(p, v, m))
    rank = data.draw(st.integers(0, p - 1))
    place = data.draw(st.integers(0, len(orders[rank]) - 1))
    orders[rank] = orders[rank][:place] + orders[rank][place + 1 :]
    with pytest.raises(ScenarioError, match=f"pipeline rank {rank} "):
        check(tuple(orders), row.placement, m, v)


def test_two_passes_of_one_microbatch_cannot_be_a_pair():
    with pytest.raises(ScenarioError, match=r"never gets to \(F0\|B0\)"):
        check(((tuple(parse("F0 B0")[k][0] for k in (0, 1)),),), "loop", 1)


@pytest.mark.parametrize("word", ["X0", "F", "F0.", "(F0", "F0|B0", "0F1"])
def test_a_word_that_is_no_action_is_named(word):
    with pytest.raises(ScenarioError, match=r"cannot read '.*' as an action"):
        parse(f"F0 {word}")


def test_costs_of_another_number_of_stages_are_refused():
    with pytest.raises(ScenarioError, match="3 durations for 4 stages"):
        times(schedule("1f1b").order(4, 1, 4), "loop", [PassCosts()] * 3)


def test_a_whole_backward_may_cost_other_than_its_parts():
    assert PassCosts(1, 1, 1).of("B") == 2
    assert PassCosts(1, 1, 1, whole_backward=1.75).of("B") == 1.75
    assert Action("F", 1) == ("F", 1, 0)
