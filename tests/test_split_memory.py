"""Memory of a split model: by stage, at one moment, and never the whole model's."""

from __future__ import annotations

import json

import pytest

from clustersim import scenario
from clustersim.core.errors import ScenarioError
from clustersim.core.memory_use import CONTEXT_BYTES, FRAGMENTATION
from clustersim.scenario.run.held import held
from clustersim.studies.what_if.memory_table import table

PIPELINE = "1f1b_gpt2_xl_1x8_a100"
FSDP = "fsdp_tp8_llama3_70b_32x8_h100"
PIPED = {"parallel.pp": 4, "parallel.microbatches": 8}


def test_stages_are_those_of_a_run_and_the_row_is_the_fullest_of_them():
    (row,) = table(PIPELINE)
    split = scenario.load(PIPELINE).prepare().split
    assert [stage.total_bytes for stage in row.stages] == [use.total for use in split.memory]
    assert row.total_bytes == max(use.total for use in split.memory) == split.memory[row.stage].total
    assert row.peak == row.stages[row.stage].peak == "B 0.0"


def test_parts_of_every_stage_add_up_to_its_total():
    for name in (PIPELINE, "pipedream_gpt2_xl_1x8_a100", "zb_gpt2_xl_1x8_a100", "fsdp_tp8_llama3_70b_32x8_h100"):
        for stage in table(name)[0].stages:
            assert sum(stage.at_peak.values()) == pytest.approx(stage.total_bytes), name


def test_parameters_of_all_stages_are_the_models_and_one_more_embedding():
    """Embedding and head are tied, so that the last stage has a copy."""
    (row,) = table(PIPELINE)
    model = scenario.load(PIPELINE).prepare().model
    table_of_words = model.vocab * model.hidden
    held = sum(stage.at_peak["parameters"] for stage in row.stages)
    assert held == pytest.approx(2.0 * (model.parameters + table_of_words), rel=1e-3)


@pytest.mark.parametrize(
    ("schedule", "versions"), [("pipedream", range(8, 0, -1)), ("pipedream_2bw", [2] * 8), ("1f1b", [1] * 8)]
)
def test_an_asynchronous_pipeline_holds_as_many_versions_of_its_weights_as_its_paper_says(schedule, versions):
    (row,) = table(PIPELINE, {"parallel.schedule": schedule})
    for stage, count in zip(row.stages, versions, strict=True):
        held = stage.at_peak
        assert held["weight_copies"] == (count - 1) * held["parameters"]


def test_the_largest_micro_batch_of_a_split_model_fits_and_one_more_does_not():
    (row,) = table(PIPELINE)
    for extra, fits in ((0, True), (1, False)):
        changes = {"strategy.micro_batch_size": row.largest_micro_batch + extra}
        assert table(PIPELINE, changes)[0].fits is fits


def test_a_plan_judges_the_fullest_stage_and_not_the_whole_model():
    loaded = scenario.load("tp8_pp16_llama3_405b_2048x8_h100")
    found = held(loaded)
    verdict = found.use.fits(found.card)
    assert verdict.possible
    assert verdict.use.where == "stage 1, rank 8"
    assert verdict.use.total - CONTEXT_BYTES == verdict.use.allocated


def test_every_way_to_split_is_a_row_that_fits_or_says_why_not():
    rows = table("tp8_pp8_gpt3_175b_16x8_a100", every=True)
    named = {row.variant: row for row in rows}
    assert {"as written", "schedule gpipe", "schedule zb_h1", "tp 1 x pp 1 x dp 128", "tp 4 x pp 16 x dp 2"} <= set(
        named
    )
    assert not named["tp 1 x pp 1 x dp 128"].fits
    assert named["schedule gpipe"].total_bytes > named["as written"].total_bytes
    assert all(row.reason or row.total_bytes for row in rows)


@pytest.mark.parametrize("arguments", [["pipedream_gpt2_xl_1x8_a100"], [PIPELINE, "--all"]])
def test_the_command_prints_stages_within_100_columns(clustersim, arguments):
    done = clustersim("memory", *arguments, columns=100)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "…" not in done.stdout
    assert "[GiB]" in done.stdout
    if len(arguments) == 1:
        assert "stage 0, which holds most, fits on A100-SXM4-80GB" in done.stdout
        assert "F m.c, B m.c: forward, backward of micro-batch m" in done.stdout


def test_json_has_the_stages(clustersim):
    (row,) = json.loads(clustersim("memory", PIPELINE, "--json").stdout)["rows"]
    assert len(row["stages"]) == 8


def test_describe_says_what_each_stage_holds_and_not_what_the_whole_model_costs():
    text = scenario.load(PIPELINE).prepare().describe()
    assert "stage   7 264,859,200 parameters a rank: layers.42 to head" in text
    assert "10.32 GiB of 80 GiB, most at B 0.0" in text
    assert "cost      forward" not in text


def test_a_pipeline_of_fsdp_adds_gradients_up_unsharded_in_the_type_of_their_reduction():
    """Four bytes of every parameter on the rank until its last backward, and shards alone at the optimizer."""
    split = scenario.load(FSDP, PIPED).prepare().split
    for stage, use in zip(split.partition.stages, split.memory, strict=True):
        held = use.course.parts["gradients"]
        assert held[:-1] == pytest.approx(4.0 * stage.parameters)
        assert held[-1] == pytest.approx(4.0 * stage.parameters / 8)


def test_states_of_fsdp_are_as_wide_as_its_shards_whether_the_model_is_split_or_not():
    """Split, they were played in fp32 whatever the shards were in."""
    wide = table(FSDP)[0].stages[0].at_peak["optimizer_states"]
    half = table(FSDP, {"strategy.orig_dtype": "bf16"})[0].stages[0].at_peak["optimizer_states"]
    assert half == pytest.approx(wide / 2)


def test_blocks_gathered_in_eight_bits_are_held_in_eight_bits():
    plain, narrow = (
        scenario.load(FSDP, PIPED | {"model.dtype": "fp8", "strategy.float8_all_gather": said}).prepare().split
        for said in (False, True)
    )
    for stage, wide, use in zip(plain.partition.stages, plain.memory, narrow.memory, strict=True):
        blocks = sum(layer.parameters for layer in stage.layers if layer.kind == "block")
        assert wide.gathered == pytest.approx(2.0 * stage.parameters)
        assert wide.gathered - use.gathered == pytest.approx(blocks)


def test_deepspeeds_step_flattens_its_share_of_the_gradients_and_converts_it():
    """2 bytes of a parameter's gradient become the rank's share of them, beside 2 + 4 bytes of the share."""
    deepspeed = {"parallel.framework": "deepspeed", "parallel.grad_reduce_in_fp32": False}
    split = scenario.load("tp8_pp8_gpt3_175b_16x8_a100", deepspeed).prepare().split
    mesh = scenario.load("tp8_pp8_gpt3_175b_16x8_a100").prepare().mesh
    share = 1 / mesh.size("dp")
    for stage, use in zip(split.partition.stages, split.memory, strict=True):
        parts = {name: column[-1] / stage.parameters for name, column in use.course.parts.items()}
        assert parts["gradients"] == pytest.approx(2 * share)
        assert parts["optimizer_workspace"] == pytest.approx(6 * share)
        # What needs a block of its own is reserved beside what the passes had.
        assert use.reserved >= FRAGMENTATION[1] * (use.course.total[:-1].max() + use.flat) - 1


def test_torchtitans_loss_holds_a_log_softmax_and_two_gradients_where_megatrons_keeps_one_copy():
    held = {
        framework: scenario.load(FSDP, PIPED | {"parallel.framework": framework}).prepare().split.memory[-1].logits
        for framework in ("megatron", "torchtitan")
    }
    assert held["torchtitan"] == pytest.approx(3 * held["megatron"], rel=0.01)  # Megatron pads the vocabulary


def test_what_does_not_fit_names_the_stage_a_rank_of_it_and_its_largest_parts():
    changes = {"strategy.micro_batch_size": 64, "parallel.microbatches": 8}
    found = held(scenario.load(PIPELINE, changes))
    verdict = found.use.fits(found.card)
    assert not verdict.ok
    assert "does not fit on A100-SXM4-80GB (stage 0, rank 0): " in str(verdict)
    assert "held by activations " in str(verdict)


@pytest.mark.parametrize(("changes", "of_unit", "of_root"), [(PIPED, 2, 0), ({"parallel.microbatches": 1}, 2 + 4, 2)])
def test_fsdp_holds_the_gradient_of_a_unit_before_it_is_added_up_or_reduced(changes, of_unit, of_root):
    """In the parameters' two bytes; where every pass reduces, four more of the unit before and two of the root."""
    split = scenario.load(FSDP, changes).prepare().split
    for stage, use in zip(split.partition.stages, split.memory, strict=True):
        blocks = [layer.parameters for layer in stage.layers if layer.kind == "block"]
        root = stage.parameters - sum(blocks)
        assert use.buckets == pytest.approx(of_unit * max(blocks) + of_root * root)


def test_backward_of_a_pipeline_holds_gradients_beside_what_forward_kept():
    split = scenario.load(PIPELINE).prepare().split
    for stage, use in zip(split.partition.stages, split.memory, strict=True):
        activations = dict(zip(use.course.moments, use.course.parts["activations"], strict=True))
        first = activations["B 0.0"] - max(size for moment, size in activations.items() if moment.startswith("F"))
        samples = split.scenario.config.micro_batch_size
        assert first == pytest.approx(2 * samples * stage.layers[-1].working)


@pytest.mark.parametrize("model", [{"model.dtype": "bf16"}, {"model.dtype": "fp8", "model.float8_recipe": "rowwise"}])
def test_weights_are_gathered_in_eight_bits_for_products_that_read_them_so_alone(model):
    """Half the bytes of bf16 training's gathers were played, and the note said "gathered in bf16"."""
    with pytest.raises(ScenarioError, match=r"float8_all_gather = true beside dtype = .*at \$\.strategy\.float8_all"):
        scenario.load(FSDP, model | {"strategy.float8_all_gather": True}).prepare()
    eight_bits = {"model.dtype": "fp8", "strategy.float8_all_gather": True, "cluster.nodes": 1}
    said = scenario.load("fsdp_llama3_8b_64x8_h100", eight_bits).prepare().notes
    assert any("gathered in fp8 (all but the root, in bf16)" in note for note in said)
