"""Ranges around predictions: how they are made, that they hold of machines left out, and that every row carries one."""

from __future__ import annotations

import math
import pathlib
import tomllib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import ranges as command
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET
from ranges import held, of_each

from clustersim.calibrate.score import SkippedRow, covered, predicted, scored, with_ranges
from clustersim.calibrate.validate_nccl import validate_nccl
from clustersim.cluster import files as fabrics
from clustersim.core import ranges
from clustersim.core.device import UNSEEN, unseen_width
from clustersim.core.texts import data_table
from clustersim.scenario import load
from clustersim.scenario.result.trust import THIN, THIN_KINDS, block_flops, kind_in, trust
from clustersim.scenario.run.parts import model_of
from clustersim.training.strategies import STRATEGIES
from tests.evidence.evidence import coverage, distances, quantile, widening
from tests.evidence.unseen_steps import first_errors
from tests.evidence.validate_steps import of_memory
from tests.tables import table_rows

GROUPS = st.lists(st.lists(st.floats(0, 10), min_size=1, max_size=20).map(np.array), min_size=1, max_size=6)


def test_a_distance_is_relative_to_the_prediction():
    rows = [scored({"group": "a"}, 2.0, 1.0), scored({"group": "a"}, 2.0, 2.5), SkippedRow({"group": "b"}, "why")]
    ((name, found),) = distances(rows, lambda row: row.cells["group"]).items()
    assert (name, found.tolist()) == ("a", pytest.approx([1.0, 0.2]))  # measured: twice, and 0.8 of the prediction


@given(GROUPS, st.floats(0, 1))
def test_a_quantile_lies_within_its_groups_and_grows_with_the_share(groups, share):
    low = min(map(np.min, groups))
    high = max(map(np.max, groups))
    assert low <= quantile(groups, share) <= quantile(groups, 1.0) <= high


def test_a_group_weighs_the_same_however_many_rows_it_has():
    few = np.array([1.0, 1.0])
    many = np.full(1000, 3.0)
    assert quantile([few, many], 0.35) == pytest.approx(1.0, abs=0.01)
    assert quantile([few, many], 0.55) == pytest.approx(3.0, abs=0.01)


def test_coverage_is_that_of_the_group_left_out():
    # Whoever of two is left out, the other's range holds all of it, or must be nine times as wide to hold any.
    groups = {"small": np.array([1.0, 1.0]), "large": np.array([9.0, 9.0])}
    assert (widening(groups, 0.25), widening(groups, 0.9)) == pytest.approx((1.0, 9.0))
    assert coverage(groups) == pytest.approx((0.5, 1.0))
    assert held(groups).p90 == 9.0  # and no wider than the worst of them needs
    assert all(math.isnan(share) for share in coverage({"alone": np.ones(3)}))
    assert of_each({"few": np.ones(2), "many": np.ones(9)}, 3).keys() == {"many"}


def test_steps_that_nothing_was_fitted_to_widen_ranges_and_never_narrow_them():
    """Publishers whose steps are off by three ranges in one kind, and by half of one in another: the first is widened,
    drawn to what both show, the second is not narrowed, and a third of which nobody saw any has what both show."""
    fitted = {name: replace(held({"a": np.ones(9)}), p50=0.1, p90=0.4) for name in ("seen", "near", "alone")}
    far = {str(publisher): np.full(8, 1.2) for publisher in range(6)}
    near = {str(publisher): np.full(8, 0.05) for publisher in range(6)}
    (seen, _), (half, ninth), alone = command.beyond(fitted, {"seen": far, "near": near, "alone": {}}).values()
    usual = (12.0 * 0.5) ** 0.5
    assert seen == pytest.approx(12.0**0.75 * usual**0.25)
    assert (half, ninth) == (pytest.approx(max(1.0, 0.5**0.75 * usual**0.25)), 1.0)
    assert alone == (pytest.approx(usual), 1.0)
    assert command.beyond(fitted, {name: {} for name in fitted}) == dict.fromkeys(fitted, (1.0, 1.0))


@given(GROUPS)
def test_groups_left_out_only_ever_widen_a_range(groups):
    named = {str(i): one for i, one in enumerate(groups)}
    found = held(named)
    assert found.p50 >= quantile(groups, 0.5)
    assert found.p90 >= quantile(groups, 0.9)


@given(st.integers(2, 30), st.integers(0, 2**16))
def test_ranges_of_groups_that_are_alike_hold_what_they_say(n, seed):
    draws = np.random.default_rng(seed).exponential(size=(n, 400))
    found = held({str(i): row for i, row in enumerate(draws)})
    assert (found.held_p50, found.held_p90) == pytest.approx((0.5, 0.9), abs=0.06)
    assert found.p50 == pytest.approx(math.log(2), rel=0.25)


def test_rows_carry_their_range_and_the_share_within_is_counted():
    rows = [scored({"case_id": "x"}, 1.0, 1.0 + d) for d in (0.0, 0.1, 0.3)]
    why = SkippedRow({"case_id": "x"}, "why")
    *ranged, last = with_ranges([*rows, why], lambda row: ranges.PredictionRange(0.05, 0.15, 9, 3, "similar"))
    assert covered(predicted(ranged)) == pytest.approx((1 / 3, 2 / 3))
    assert covered(rows) == (UNSET, UNSET)
    assert last is why


@pytest.mark.parametrize("kind", [*STRATEGIES, "split", "experts", *THIN_KINDS.values(), "never heard of"])
def test_every_kind_of_strategy_has_a_range(kind):
    for one in (ranges.of_step(kind), ranges.of_step(kind, "mosaic"), of_memory()):
        assert 0 < one.p50 < one.p90
    assert ranges.of_step(kind).known == "similar"


@pytest.mark.parametrize("source", ["", "lambda"])
def test_a_generation_without_published_steps_widens_whatever_range_there_is(source):
    known, unseen = ranges.of_step("single", source, "sm80"), ranges.of_step("single", source, "sm121")
    assert known.known != unseen.known == "new"
    assert unseen.p90 == pytest.approx((known.p90**2 + UNSEEN**2) ** 0.5)
    assert unseen.p50 > known.p50


@pytest.mark.parametrize("nbytes", [8.0, 2.0**20, 2.0**30])
def test_a_range_goes_by_what_is_known_of_the_machine(nbytes):
    published = fabrics.load("hgx-h100", nodes=4)
    node = published.node_types[0]
    similar = replace(published, name="mine")
    new = replace(similar, node_types=(replace(node, net="opa"),) * 4)
    found = [ranges.of_collective(one, nbytes) for one in (published, similar, new)]
    assert [one.known for one in found] == ["published", "similar", "new"]
    assert found[0].p50 <= found[1].p50 <= found[2].p50
    assert found[0].p90 <= found[1].p90 <= found[2].p90
    alone = [ranges.of_collective(one, nbytes, nodes=1) for one in (published, similar, new)]
    assert [one.known for one in alone] == ["published", "similar", "similar"]  # no transport takes part inside a node


def test_nodes_that_share_nvswitches_have_the_range_of_what_nobody_published():
    """Over 72 GPUs "half of published times of this machine within 3%": all rows were of one tray, or two; published
    times were 1.24 to 1.6 times those predicted."""
    rack = fabrics.load("gb200-nvl72", nodes=18)
    over = ranges.of_collective(rack, 2.0**33, 18, "all_reduce", 72)
    tray = ranges.of_collective(rack, 2.0**33, 1, "all_reduce", 4)
    assert (tray.known, over.known) == ("published", "new")
    assert over.p90 > 1 / 4 > 2 * tray.p90
    words = ranges.collective_words(over, 2.0**33, "all_reduce", 18)
    assert "of any transport, none of this one among them, within" in words


def test_ranges_of_collectives_hold_of_operators_left_out_in_every_class():
    """A class is a size, a place, a place in a size, or a family of kinds that four operators and more measured.

    A third of all operators is left out at a time, and each counts the same, as where ranges are made. Small messages
    over transports of few operators had the factor of large ones, and ranges 3 times the prediction that held 98 %.
    """
    rows = predicted(validate_nccl(*(command.TABLES / name for name in command.COLLECTIVES)).rows)
    assert all(row.p50 < row.p90 for row in rows)
    operators = sorted({command.operator(row) for row in rows})
    within: dict[str, dict[str, list[tuple[bool, ...]]]] = {}
    for part in range(3):
        out = set(operators[part::3])
        made = command.collectives([row for row in rows if command.operator(row) not in out], ["ib"])
        for row in (row for row in rows if command.operator(row) in out):
            size = ranges.size_class(float(row.cells["size_bytes"]))
            traits = command.traits_of(row, ["ib"])
            far = abs(row.measured / row.predicted - 1.0)
            holds = tuple(far <= width for width in command.widths_of(made, size, traits))
            for name in (size, *traits, f"{traits[0]} in {size}"):
                within.setdefault(name, {}).setdefault(command.operator(row), []).append(holds)
    shares = {
        name: np.mean([np.mean(holds, axis=0) for holds in by_operator.values()], axis=0)
        for name, by_operator in within.items()
        if len(by_operator) >= 4
    }
    places = {name: share for name, share in shares.items() if " in " in name}
    assert len(places) == 9
    for name, (half, most) in shares.items():
        assert 0.44 <= half <= 0.6, name
        assert 0.82 <= most <= (0.955 if len(within[name]) > 5 else 0.965), name  # of five, a hundredth is a few rows
    assert 0.88 <= np.mean([most for _, most in places.values()]) <= 0.92


def test_how_far_logs_are_off_is_what_the_table_of_the_readme_says():
    table = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    for size, far in data_table("ranges")["collectives"]["logs"].items():
        cells = next(line for line in table.splitlines() if line.startswith(f"| collectives, {size} |")).split("|")
        p50, p90 = [float(text.strip(" ()")) for text in cells[4].split("%")]
        assert int(cells[3]) == far["logs"]
        assert p50 == pytest.approx(100 * far["p50"], abs=0.06)
        assert p90 == pytest.approx(100 * far["p90"], abs=0.6)
        assert ranges.log_words(size).endswith(f"nine in ten within {far['p90']:.0%}")


def test_a_generation_on_which_no_published_step_ran_has_a_wider_range_and_says_so():
    seen = ranges.of_step("split", arch="sm90")
    unseen = ranges.of_step("split", arch="sm103")
    assert seen == ranges.of_step("split")
    assert unseen.p50 == pytest.approx(np.hypot(seen.p50, ranges.HALF_OF_NINE * UNSEEN))
    assert unseen.p90 > seen.p90
    assert (seen.known, unseen.known) == ("similar", "new")
    narrow = ranges.of_step("split", arch="sm103", dtype="fp8")
    assert narrow.p90 == pytest.approx(np.hypot(seen.p90, unseen_width("fp8")))
    assert narrow.p50 > unseen.p50
    assert ranges.of_step("split", arch="sm90", dtype="fp8") == seen
    told = {
        name: trust(load("ddp_gpt2_xl_2x8_a100", {"cluster.topology": name}).prepare())
        for name in ("hgx-b300", "hgx-h100")
    }
    assert "B300" in str(told["hgx-b300"])
    assert told["hgx-b300"].p50 > told["hgx-h100"].p50
    assert not told["hgx-h100"].unseen
    assert "15% of kernels that none of them ran" in str(told["hgx-b300"])
    in_8_bits = {"cluster.topology": "hgx-b300", "model.dtype": "fp8"}
    assert "25% of kernels that none of them ran" in str(trust(load("fsdp_llama3_8b_64x8_h100", in_8_bits).prepare()))


def test_a_range_is_wider_on_an_old_generation_but_volta():
    volta, turing, pascal = (ranges.of_step("single", arch=arch) for arch in ("sm70", "sm75", "sm61"))
    assert volta == ranges.of_step("single")
    assert turing.p90 == pytest.approx(np.hypot(volta.p90, ranges.AGED_WIDTH))
    assert (turing.known, pascal.known) == ("similar", "new")
    assert pascal.p90 > turing.p90 > volta.p90
    assert pascal.p50 > turing.p50 > volta.p50
    told = trust(load("ddp_gpt2_xl_2x8_a100", {"cluster.topology": "pcie-rtx2080ti"}).prepare())
    assert told.aged == ranges.AGED_WIDTH
    assert "wider by 50% for libraries as old as the GPU" in str(told)


def test_generations_with_steps_are_those_with_eight_in_the_tables_or_of_strangers_near_enough():
    data = pathlib.Path(__file__).parent / "data"
    played = {row["case_id"] for row in table_rows(data / "predictions.csv.gz") if row["table"] == "training_steps"}
    measured = [row for row in table_rows(data / "measurements" / "training_steps.csv.gz") if row["case_id"] in played]
    names = [row["topology"] for row in measured if row["topology"]]
    fitted = Counter(fabrics.load(name, nodes=1).node_types[0].gpu.arch for name in names)
    others = {"experts", *THIN_KINDS.values()}
    strangers = [(arch, error) for arch, kind, error in first_errors() if kind not in others]
    known = command.known_generations(fitted, strangers)
    assert min(fitted.values()) < command.FEWEST <= max(fitted.values())
    for arch in {*fitted, *(arch for arch, _ in strangers), "sm103", "sm121"}:
        assert ranges.has_steps(arch) == (arch in known), arch


def test_a_generation_whose_strangers_are_far_off_is_not_known():
    far = [("sm100", 0.2)] * 5 + [("sm100", -0.2)] * 5
    near = [("sm120", 0.1)] * 8 + [("sm89", None)] * 9 + [("sm103", 0.1)] * 7
    assert command.known_generations(Counter(sm90=8, sm61=7), [*far, *near]) == ["sm120", "sm89", "sm90"]


def test_a_split_model_beside_zero_is_known_no_better_than_zero():
    """tp 2 beside ZeRO-3 and an optimizer on the host was +-4 %, of split models that train otherwise, where ZeRO-3
    alone is +-10 %: so a plan took it for the surer one."""
    scenario = load("zero3_llama3_8b_2x8_a100")
    split = scenario.changed({"parallel": {"tp": 2}})
    whole, cut = trust(scenario.prepare()), trust(split.prepare())
    assert whole.kind == cut.kind == "zero"
    assert (cut.p50, cut.p90) == (whole.p50, whole.p90)
    assert cut.p50 > ranges.of_step("split").p50


def test_steps_that_a_host_paces_have_a_range_of_their_own():
    """A layer's work at the peak tells them, whatever publishes them; a graph of the whole step has no host."""
    scenario = load("tp8_pp4_llama3_70b_32x8_h100")
    model = model_of(scenario)
    peak = scenario.config.micro_batch_size * block_flops(model) / (8 * THIN)  # of a GPU on which a layer just is thin
    assert kind_in(scenario, model, 0.9 * peak, split=True) == "split"
    assert kind_in(scenario, model, 1.1 * peak, split=True) == "thin split"
    graphed = scenario.changed({"run.cuda_graph": ["full_iteration"]})
    assert kind_in(graphed, model, 1.1 * peak, split=True) == "split"
    assert kind_in(scenario, model, 1.1 * peak, split=False) == scenario.strategy.name
    for kind, thin in THIN_KINDS.items():
        usual, paced = ranges.of_step(kind), ranges.of_step(thin)
        assert usual.p50 <= paced.p50
        assert usual.p90 <= paced.p90


def test_every_range_is_written_as_a_table_that_can_be_read():
    kinds = [*THIN_KINDS, *THIN_KINDS.values()]
    rows = [
        scored({"case_id": f"{name}-{i}", "step_kind": kind, "notes": "", "source": ""}, 1.0, 1.0 + i / 10)
        for kind in kinds
        for name in ("a", "b")
        for i in range(1, 10)
    ]
    found = tomllib.loads("\n".join(command.written(command.steps(rows, ()))))["steps"]
    assert {*kinds, "all", command.ADAPTERS, "offload"} == found["similar"].keys()
    assert {f"{kind}/{name}" for kind in kinds for name in "ab"} == found["published"].keys()


def test_no_kind_of_steps_is_called_by_its_key_alone():
    """A plan's page warned of "thin split" steps."""
    assert "(split models whose hosts pace them)" in ranges.off_by("thin split")
    for kind in data_table("ranges")["steps"]["similar"]:
        assert "thin" not in ranges.off_by(kind)
