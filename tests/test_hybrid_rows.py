"""Measured hybrid-parallel steps: a row becomes a scenario."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim import scenario
from clustersim.calibrate.score import predicted, scored, statistics
from clustersim.core.errors import ClusterSimError
from clustersim.scenario.run.parts import model_of, placed
from clustersim.studies.what_if.folded import folded
from clustersim.training.parallel.layout import stages_of
from clustersim.training.schedules import schedule
from tests.evidence.hybrid_rows import is_hybrid, measured, played_as, scenario_table
from tests.evidence.order import OrderSummary, by_source, orders, spearman
from tests.evidence.software import PublishedRecipe, software, stack_of
from tests.evidence.validate_steps import validate_steps
from tests.tables import table_rows

TINY = Path(__file__).parent / "data" / "hybrid_steps.csv"
TABLE = Path(__file__).parents[1].parent / "shared" / "measurements" / "training_steps_hybrid.csv"
shared = pytest.mark.skipif(not TABLE.exists(), reason="../shared/measurements is not there")


def rows(path: Path = TINY) -> list[dict[str, str]]:
    return table_rows(path)


def row(**columns: str) -> dict[str, str]:
    """A made-up GPT of 4 layers on two machines, TP 2 and PP 2."""
    return {**rows()[0], **columns}


# What a row says


def test_a_row_says_the_whole_scenario() -> None:
    table = scenario_table(row())
    assert table["cluster"] == {
        "topology": "hgx-a100",
        "nodes": 1,
        "gpus_per_node": 8,
        "device": "A100-SXM4-80GB",
    }
    split = table["parallel"]
    assert (split["tp"], split["pp"], split["cp"], split["ep"], split["microbatches"]) == (2, 2, 1, 1, 8)
    assert table["strategy"]["micro_batch_size"] == 2
    assert table["model"]["activation_checkpointing"] == "full"
    assert scenario.from_table(table).file.parallel is not None


@pytest.mark.parametrize("stack", software().stack, ids=lambda stack: stack.name)
def test_every_stacks_defaults_make_a_scenario(stack: Any) -> None:
    example = {
        "Megatron-LM, zero-bubble fork": ("Megatron-LM (zero-bubble fork)", "2023-11", ""),
        "Megatron-DeepSpeed since 2023": ("Megatron-DeepSpeed", "2023", ""),
        "Megatron-DeepSpeed": ("Megatron-DeepSpeed", "2022-02", ""),
        "NeMo of early 2024": ("NeMo / Megatron-Core", "2024-05", ""),
        "library recipes of Megatron-Bridge": ("Megatron-Bridge 0.4.2", "2026-02", ""),
        "performance recipes of Megatron-Bridge": ("Megatron-Bridge", "2026-02", ""),
        "performance recipes of NeMo with Megatron-Core before 0.10": ("NeMo", "24.12 2025-02", ""),
        "performance recipes of NeMo": ("NeMo", "2025-02", ""),
        "nanotron": ("nanotron", "2025-02", ""),
        "Megatron-LM's functional tests": ("Megatron-Core (Megatron-LM functional tests)", "2026-08", ""),
        "benchmarks of Megatron-Core's mixtures": ("Megatron-Core", "2026-03", ""),
        "Megatron-Core with Transformer Engine": ("Megatron-LM 0.14", "2026-03", ""),
        "Megatron-LM of SC21": ("Megatron-LM", "2021-04", ""),
        "Megatron-LM of 2021": ("Megatron-LM", "2021-05", ""),
        "Megatron-LM of 2022": ("Megatron-LM", "2022-06", ""),
        "OneFlow": ("LiBai", "2022-07", ""),
        "torchtitan, compiled": ("torchtitan", "2025-06", "torch.compile"),
        "torchtitan": ("torchtitan", "2024-08", ""),
    }[stack.name]
    ran = row(framework=example[0], date=example[1], other=example[2], zero_stage="1")
    assert stack_of(ran) is stack
    assert scenario.from_table(scenario_table(ran)).prepare().split is not None


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"framework": "Alpa"}, "framework 'Alpa' is not known"),
        ({"micro_batch_per_gpu": ""}, "micro-batch"),
        ({"grad_accum": "", "global_batch": "9"}, "global batch 9 is no multiple"),
        ({"seq_len": ""}, "does not say seq_len"),
        ({"topology": "", "case_id": "elsewhere-1"}, "which topology"),
        ({"precision": "int4", "precision_recipe": ""}, "precision 'int4'"),
        ({"experts": "3", "model": "Unheard-3B"}, "no shipped mixture of experts"),
        ({"gpus": "9", "nodes": "2"}, "9 GPUs do not divide"),
        ({"source": "tests/functional_tests/test_cases/gpt/{gpt3_1node}/golden_values.json"}, "GPUs wait for samples"),
    ],
)
def test_a_row_that_says_too_little_is_refused_with_the_reason(columns: dict[str, str], words: str) -> None:
    with pytest.raises((ValueError, ClusterSimError), match=words):
        scenario_table(row(**columns))


def test_a_gpt_named_by_its_size_alone_is_played_and_splits() -> None:
    sizes = {
        "model": "GPT-2 style 24B",
        "params": "24B",
        "layers": "",
        "d_model": "",
        "heads": "",
        "ffn": "",
        "kv_heads": "",
        "head_dim": "",
        "tp": "4",
    }
    table = scenario_table(row(**sizes))
    assert table["model"]["options"]["d_model"] % (8 * 128) == 0
    assert scenario.from_table(table).prepare().model.parameters == pytest.approx(24e9, rel=0.02)


def test_a_row_without_a_step_time_is_refused() -> None:
    with pytest.raises(ValueError, match="no step time"):
        measured(row(step_time_s=""), scenario_table(row()))


def test_model_flops_give_a_step_time() -> None:
    table = scenario_table(row())
    flops = model_of(scenario.from_table(table)).flops_per_sample()
    ran = row(step_time_s="", metric="model_tflops_per_gpu", value="10")
    assert measured(ran, table) == pytest.approx(32 * flops / (10e12 * 8))


def test_schedules_of_the_table_are_known_here() -> None:
    for name in ("1f1b", "interleaved-1f1b", "zb1p", "zb2p"):
        played = scenario_table(row(schedule=name, vpp="2" if "inter" in name else "1"))["parallel"]["schedule"]
        assert schedule(played).name == played


def test_layers_that_do_not_divide_are_laid_out_and_none_is_lost() -> None:
    for layers, pp, vpp in (("22", "8", "1"), ("22", "8", "3"), ("126", "8", "8"), ("61", "8", "4"), ("7", "2", "1")):
        split = scenario_table(row(layers=layers, pp=pp, vpp=vpp, tp="1", dp="1"))["parallel"]
        assert sum(split["layout"]) == int(layers)
        assert len(split["layout"]) == int(pp) * int(vpp)


# Scored


def test_rows_of_one_configuration_count_once() -> None:
    ran = [scored({"case_id": f"x-{i}", "config_group": "a"}, 1.0, 1.0 + 0.1 * i) for i in range(3)]
    found = statistics([*ran, scored({"case_id": "x-9", "config_group": "b"}, 1.0, 1.5)])
    assert (found.n_cases, found.median_abs_rel_error) == (2, pytest.approx(0.3))


def test_a_hybrid_table_is_validated_with_every_column_kept() -> None:
    result = validate_steps(TINY)
    assert result.overall.n_rows == len(rows())
    done = predicted(result.rows)
    assert done
    assert all(set(rows()[0]) <= set(one.cells) and one.predicted > 0 for one in done)
    assert set(result.by["kind"]) == {"tp+pp+dp", "tp+dp"}


def test_hybrid_rows_have_no_anchor() -> None:
    with pytest.raises(ClusterSimError, match="--anchor"):
        validate_steps(TINY, anchor="single")


def test_only_tables_with_degrees_are_hybrid() -> None:
    assert is_hybrid(row())
    assert not is_hybrid({"case_id": "x", "model": "y"})


# Order


def test_ranks_agree_with_their_definition() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(np.sqrt(3) / 2)
    assert spearman([1, 2], [5, 5]) == 0


def test_only_rows_that_differ_in_degrees_or_schedule_are_ordered() -> None:
    same = {"model": "m", "gpus": "8", "global_batch": "16"}
    ran = [
        scored({**same, "case_id": "a-1", "tp": "1"}, 1.0, 1.2),
        scored({**same, "case_id": "a-2", "tp": "2"}, 2.0, 1.1),
        scored({**same, "case_id": "a-3", "tp": "4"}, 3.0, 3.0),
        scored({**same, "case_id": "a-4", "gpus": "16"}, 0.1, 9.0),
        scored({**same, "case_id": "b-1"}, 0.1, 9.0),
    ]
    (found,) = orders(ran)
    assert (found.n, found.best, found.lost, found.spearman) == (3, False, pytest.approx(1.0), pytest.approx(0.5))
    lost = {"lost": 1.0, "lost_p50": 1.0, "lost_p90": 1.0}
    assert by_source([found])["a"] == OrderSummary(n_sets=1, n_rows=3, best_found=0, spearman=0.5, **lost)


def test_a_configuration_measured_again_is_ordered_once() -> None:
    same = {"model": "m", "gpus": "8", "global_batch": "16"}
    again = [scored({**same, "case_id": f"a-{i}"}, 1.0 + 0.1 * i, 1.2) for i in range(3)]
    assert orders(again) == []
    other = scored({**same, "case_id": "a-9", "tp": "2"}, 1.05, 1.1)
    (found,) = orders([*again, other])
    assert (found.n, found.best, found.lost) == (2, True, 0.0)


# The shared table

REACHED = {
    "zb-0025": 0.08,
    "zb-0013": 0.1,
    "libai-0002": 0.06,
    "libai-0010": 0.08,
    "libai-0013": 0.08,
    "libai-0018": 0.06,
    "libai-0034": 0.06,
    "dlperf-0001": 0.06,
    "dlperf-0009": 0.06,
    "dlperf-0017": 0.08,
    "sc21-0001": 0.06,
    "sc21-0003": 0.06,
    "vtrain-0001": 0.08,
    "vtrain-0003": 0.06,
    "bigsci-0001": 0.1,
    "nemo-0044": 0.1,
    "titan-0025": 0.08,
    "titan-0026": 0.06,
    "titan-0019": 0.12,
    "zb-0010": 0.05,
    "dlperf-0010": 0.05,
}
"""What is reached on rows that take seconds, as bounds."""


@shared
@pytest.mark.shared
@pytest.mark.parametrize(("case", "bound"), REACHED.items())
def test_a_sample_of_the_shared_table_stays_within_what_is_reached(case: str, bound: float) -> None:
    ran = next(one for one in rows(TABLE) if one["case_id"] == case)
    table = scenario_table(ran)
    assert folded(scenario.from_table(table)).step_time_s == pytest.approx(measured(ran, table), rel=bound)


@shared
@pytest.mark.shared
def test_few_rows_of_the_shared_table_are_refused() -> None:
    refused = 0
    for one in rows(TABLE):
        try:
            table = scenario_table(one)
            measured(one, table)
            placed(scenario.from_table(table))
        except (ValueError, ClusterSimError):
            refused += 1
    assert refused <= 0.05 * len(rows(TABLE))


# Recipes


DEEPSEEK = {
    "model": "DeepSeek-V3",
    "framework": "Megatron-Bridge",
    "version": "25.09",
    "gpu": "H100-80GB-SXM",
    "layers": "61",
    "experts": "256",
    "topology": "hgx-h100",
    "tp": "2",
    "pp": "8",
    "vpp": "4",
    "ep": "8",
    "gpus": "128",
    "nodes": "16",
    "dp": "8",
    "vocab": "129280",
    "schedule": "interleaved-1f1b",
}


@pytest.mark.parametrize("recipe", software().recipe, ids=lambda recipe: recipe.words)
def test_every_layout_of_a_recipe_has_its_chunks_and_its_layers(recipe: PublishedRecipe) -> None:
    assert recipe.source
    for chunks, layout in recipe.layouts.items():
        stages = stages_of(layout)
        assert len(stages) == chunks
        assert sum(str(stage).count("t") for stage in stages) == recipe.layers
        assert sum(str(stage).count("m") for stage in stages) == recipe.mtp


def test_a_recipe_says_what_its_row_does_not() -> None:
    table = scenario_table(row(**DEEPSEEK))
    assert table["parallel"]["layout"] == "Et|(tt|)*30mL"
    assert table["parallel"]["dispatcher"] == "flex"
    assert table["parallel"]["recompute_modules"] == ["mla_up_proj", "mlp"]
    assert table["model"]["options"]["mtp"] == 1
    said = scenario_table(row(**DEEPSEEK, a2a_dispatcher="alltoall", recompute="selective", recompute_detail="mlp"))
    assert (said["parallel"]["dispatcher"], said["parallel"]["recompute_modules"]) == ("alltoall", ["mlp"])


def test_a_layout_in_letters_goes_before_the_recipes() -> None:
    said = mixed(pp_layout="Et|t*2L", pp="2", gpus="16", nodes="2", layers="3", framework="Megatron-Bridge")
    assert scenario_table(said)["parallel"]["layout"] == "Et|t*2L"
    assert scenario_table({**said, "pp_layout": ""})["parallel"].get("layout") != "Et|t*2L"


def test_a_recipe_lays_out_no_other_depth() -> None:
    assert isinstance(scenario_table(row(**DEEPSEEK | {"layers": "30"}))["parallel"]["layout"], list)


# Experts

EXPERT_WORDS = {
    "alltoall": ("alltoall", None),
    "allgather": ("allgather", None),
    "deepep": ("flex", "deepep"),
    "hybridep": ("flex", "hybridep"),
}


def mixed(**columns: str) -> dict[str, str]:
    """A mixture of experts on eight GPUs, whose model nobody ships."""
    sizes = {"experts": "8", "topk": "2", "moe_ffn": "512", "shared_experts": "0", "dense_layers": "0", "gated": "1"}
    degrees = {"tp": "1", "pp": "1", "dp": "8", "ep": "8", "etp": "1", "framework": "Megatron-Core", "date": "2026"}
    names = {"model": "Unheard-3B", "a2a_dispatcher": "", "ep_overlap": ""}
    return row(**(names | sizes | degrees | columns))


@pytest.mark.parametrize("word", EXPERT_WORDS)
def test_dispatchers_are_read_by_the_word_of_their_library(word: str) -> None:
    split = scenario_table(mixed(a2a_dispatcher=word))["parallel"]
    assert (split["dispatcher"], split.get("flex_backend")) == EXPERT_WORDS[word]


def test_flex_has_the_backend_that_the_remarks_name_before_the_recipes() -> None:
    bridge = {"model": "Qwen3-30B-A3B", "framework": "Megatron-Bridge", "version": "26.06", "moe_ffn": "768"}
    ran = mixed(**bridge, a2a_dispatcher="flex", experts="128", topk="8", notes="deepep over NVSHMEM on EFA")
    assert scenario_table(ran)["parallel"]["flex_backend"] == "deepep"
    recipes = scenario_table({**ran, "notes": ""})["parallel"]
    assert recipes["flex_backend"] == "hybridep"
    assert "flex_backend" not in scenario_table({**ran, "a2a_dispatcher": "alltoall"})["parallel"]


def test_experts_that_drop_tokens_are_padded_and_exchange_by_all_to_all() -> None:
    split = scenario_table(mixed(other="token drop: capacity factor 1.5, padded"))["parallel"]
    assert (split["capacity_factor"], split["pad_to_capacity"], split["dispatcher"]) == (1.5, True, "alltoall")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"a2a_dispatcher": "pigeon"}, "a2a_dispatcher 'pigeon' is not known; known: allgather"),
        ({"ep_overlap": "some"}, "ep_overlap 'some' is neither 0 nor 1"),
        ({"tp_overlap": "some"}, "tp_overlap 'some' is not known; known: 0, 1"),
        ({"dp_overlap": "yes"}, "dp_overlap 'yes' is not known"),
        ({"recompute": "half"}, "recompute 'half' is not known; known: none, full, selective"),
        ({"grad_reduce_dtype": "fp9"}, "grad_reduce_dtype 'fp9' is not known"),
        ({"precision_recipe": "fp8-by-the-moon"}, "precision_recipe 'fp8-by-the-moon' is not known; known: fp16"),
        ({"offload": "disk"}, "offload 'disk' is not known; known: none, cpu"),
        ({"offload": "cpu"}, "offload 'cpu' is played with ZeRO-2 and ZeRO-3 alone"),
        ({"pp_layout": "longest last"}, "pp_layout 'longest last' is neither layers a stage nor"),
        ({"topk": ""}, "nor does the row say its topk"),
        ({"attention": "hybrid: 23 Mamba-2"}, "no shipped mixture of experts has this name; attention hybrid"),
    ],
)
def test_a_word_of_experts_that_is_not_known_is_refused(columns: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        scenario_table(mixed(**columns))


@pytest.mark.parametrize("word", ["0", "1"])
def test_overlap_of_data_parallel_ranks_is_played_as_the_row_says_whatever_its_stack_does(word: str) -> None:
    ran = mixed(dp_overlap=word, zero_stage="1", framework="Megatron-Core (Megatron-LM functional tests)")
    assert scenario_table(ran)["parallel"]["overlap_grad_reduce"] is (word == "1")


def test_overlap_of_experts_is_played_with_what_the_stack_has_beside_it() -> None:
    bridge = scenario_table(mixed(ep_overlap="1", framework="Megatron-Bridge"))["parallel"]
    assert (bridge["ep_overlap"], bridge["delay_wgrad_compute"]) == (True, True)
    assert "delay_wgrad_compute" not in scenario_table(mixed(ep_overlap="1"))["parallel"]


def test_a_mixture_that_is_not_shipped_has_the_rows_sizes_and_says_so() -> None:
    ran = mixed(shared_experts="1")
    shape = scenario.from_table(scenario_table(ran)).prepare().model
    router = next(k for layer in shape.layers for k in layer.kernels if k.name == "router")
    assert router.n == 8
    assert "Unheard-3B is played as qwen2-57b-a14b's blocks in the row's sizes" in played_as(ran)


@pytest.mark.parametrize(("recipe", "word"), [("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("fp8-blockwise", "blockwise")])
def test_recipes_with_scales_of_blocks_are_played_as_they_are(recipe: str, word: str) -> None:
    ran = mixed(precision_recipe=recipe, gpu="B200-SXM-180GB", topology="hgx-b200")
    played = scenario_table(ran)["model"]
    assert (played["dtype"], played["float8_recipe"]) == ("fp8", word)
    assert "float8_recipe" not in scenario_table(mixed(precision_recipe="fp8-delayed"))["model"]


def test_scopes_of_graphs_are_read() -> None:
    ran = mixed(cuda_graph="transformer_engine attn mamba moe_router")
    assert scenario_table(ran)["run"]["cuda_graph"] == ["attn", "mamba", "moe_router"]
    # Experts that drop no token are not captured, whatever the scope.
    dropless = ["attn", "mlp", "moe_router", "moe_preprocess"]
    assert scenario_table(mixed(cuda_graph="local"))["run"]["cuda_graph"] == dropless
    dropping = mixed(cuda_graph="local", a2a_dispatcher="alltoall", notes="token drop")
    assert scenario_table(dropping)["run"]["cuda_graph"] == ["attn", "mlp", "moe"]
    assert "cuda_graph" not in scenario_table(mixed(cuda_graph="0"))["run"]
    with pytest.raises(ValueError, match="cuda_graph 'moe_rooter' is not known"):
        scenario_table(mixed(cuda_graph="moe_rooter"))


def test_without_a_distributed_optimizer_no_parameters_are_gathered() -> None:
    split = scenario_table(mixed(zero_stage="0"))["parallel"]
    assert split["overlap_param_gather"] is False
    assert scenario.from_table(scenario_table(mixed(zero_stage="0"))).prepare()


@shared
@pytest.mark.shared
def test_each_word_of_the_shared_experts_is_read_or_refused_with_a_reason() -> None:
    tried = [one for one in rows(TABLE) if one["experts"]]
    words = {one["a2a_dispatcher"] for one in tried} | {one["ep_overlap"] for one in tried}
    assert words >= {"allgather", "alltoall", "flex", "deepep", "hybridep", "0", "1"}
    refused = {}
    for one in tried:
        try:
            placed(scenario.from_table(scenario_table(one)))
        except (ValueError, ClusterSimError) as error:
            refused[one["case_id"]] = str(error)
    assert "does not fit into 256 ranks" in refused.pop("mbridge-0273")
    muon = {one["case_id"] for one in tried if "muon" in one["notes"]}
    starved = {one["case_id"] for one in tried if "_1node" in one["source"]}
    assert refused.keys() == muon | starved
    assert all("muon is not played" in refused[case] for case in muon)
    assert all("wait for samples" in refused[case] for case in starved)


def test_megatrons_deepseek_like_test_is_read_with_latent_attention_of_its_own_heads():
    from tests.evidence.hybrid_models import _sized_experts
    from tests.evidence.software import recipe_of

    row = {"model": "GPT MoE 16x1024", "framework": "Megatron-Core (Megatron-LM functional tests)", "gated": "1"}
    row |= {"layers": "16", "d_model": "1024", "heads": "32", "kv_heads": "32", "head_dim": "32", "vocab": "50304"}
    row |= {"experts": "32", "topk": "4", "moe_ffn": "1024", "ffn": "4096", "attention": "MHA"}
    recipe = recipe_of(row)
    name, options = _sized_experts({**row, **recipe.columns})
    assert (name, recipe.mtp, options["heads"], options["kv_heads"]) == ("deepseek-v3", 1, 32, 32)
    assert (options["experts"]["shared"], options["experts"]["dense_first"]) == (1024, 1)


@pytest.mark.parametrize(
    ("gpu", "graphs"), [("GB300", ("attn", "mamba", "moe_router", "moe_preprocess")), ("H100", ())]
)
def test_a_row_of_nemotron_on_blackwell_that_says_nothing_of_graphs_has_its_recipes(
    gpu: str, graphs: tuple[str, ...]
) -> None:
    from tests.evidence.software import recipe_of

    row = {"model": "Nemotron-3-Nano", "framework": "Megatron-Bridge", "version": "26.08", "gpu": gpu}
    recipe = recipe_of({**row, "precision_recipe": "mxfp8"})
    assert recipe.graphs == graphs
    assert recipe.parallel["flex_backend"] == ("hybridep" if graphs else "deepep")


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "backend", "graphs", "overlap"),
    [
        ("GPT-OSS-120B", "GB300", "mxfp8", "hybridep", ("full_iteration",), True),
        ("GPT-OSS-120B", "B300", "mxfp8", "hybridep", ("attn", "moe_router", "moe_preprocess"), True),
        ("GPT-OSS-120B", "B200", "bf16", None, (), False),
        ("Kimi-K2", "GB300", "mxfp8", "hybridep", ("full_iteration",), True),
        ("Kimi-K2", "B300", "bf16", None, (), False),
    ],
)
def test_rows_of_blackwell_that_say_no_setting_have_their_recipes(
    model: str, gpu: str, precision: str, backend: str | None, graphs: tuple[str, ...], overlap: bool
) -> None:
    from tests.evidence.software import recipe_of

    row = {"model": model, "framework": "Megatron-Bridge", "version": "26.06", "gpu": gpu}
    recipe = recipe_of({**row, "precision_recipe": precision})
    assert (recipe.parallel.get("flex_backend"), recipe.graphs, recipe.ep_overlap) == (backend, graphs, overlap)
