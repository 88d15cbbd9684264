"""DeepSpeed's JSON: every option is judged, and those that change a step are not left out without a word."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from test_launch_judged import judged

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import Table
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document
from clustersim.files.launch.options import _judged_below
from clustersim.files.launch.table import load
from clustersim.training.strategies.zero_config import Offload, ZeroOptimization

DATA = Path(__file__).parent / "data"
BLOCK = "zero_optimization."
MEGATRON = (
    "deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py --deepspeed --deepspeed_config ds.json --num-layers 24 "
    "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50304 "
    "--micro-batch-size 1 --bf16 --zero-stage {stage} --no-pipeline-parallel"
)
TRAINER = (
    "torchrun --nnodes 2 --nproc_per_node 8 run_clm.py --model_name_or_path Qwen/Qwen2-1.5B --deepspeed ds.json --bf16 "
    "--per_device_train_batch_size 1 --max_seq_length 2048 --gradient_accumulation_steps 1"
)


def listed(framework: str) -> list[str]:
    lines = (DATA / f"{framework}_options.txt").read_text("utf-8").splitlines()
    return [line.partition(":")[0] for line in lines if not line.startswith("#")]


def read(words: str = MEGATRON, stage: int = 3, **blocks: Any) -> exchange.LaunchImport:
    """A run of ZeRO, whose file has further blocks; ``zero_optimization`` adds to that of the stage."""
    block = {"stage": stage, **blocks.pop("zero_optimization", {})}
    given = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, BLOCK[:-1]: block, **blocks}
    files = [document(words.format(stage=stage), "run.sh"), document(json.dumps(given), "ds.json")]
    return exchange.read(files, {"topology": "hgx-h100", "nodes": 2})


def had(made: exchange.LaunchImport) -> Table:
    return exchange.canonical(made.scenario)


def test_no_option_of_deepspeeds_file_is_unjudged() -> None:
    names = listed("deepspeed")
    assert len(names) > 350
    assert [name for name in names if not judged(name, "deepspeed")] == []
    assert not judged("option_of_nobody", "deepspeed")


def test_every_field_of_deepspeeds_block_is_the_scenarios_or_is_told() -> None:
    """The row of the whole block takes any name, of which the scenario's own reader refuses what it does not know."""
    table = load("deepspeed")
    known = {BLOCK + name for name in ZeroOptimization.__struct_fields__}
    known |= {
        f"{BLOCK}{part}.{name}" for part in ("offload_param", "offload_optimizer") for name in Offload.__struct_fields__
    }
    known |= {row.option for row in table.rows}
    globs = [*_judged_below(table, BLOCK), *(glob.partition("=")[0] for glob in table.refused)]
    fields = [table.aliases.get(name, name) for name in listed("deepspeed") if name.startswith(BLOCK)]
    assert len(fields) >= 80
    assert [name for name in fields if name not in known and not any(fnmatchcase(name, glob) for glob in globs)] == []


@pytest.mark.parametrize("words", [MEGATRON, TRAINER])
@pytest.mark.parametrize(
    ("blocks", "name"),
    [
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown"),
        ({"memory_breakdown": True}, "memory_breakdown"),
        ({"comms_logger": {"enabled": True}}, "comms_logger.enabled"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency.enabled"),
        ({"zero_force_ds_cpu_optimizer": False}, "zero_force_ds_cpu_optimizer"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention.mode"),
        ({"progressive_layer_drop": {"enabled": True}}, "progressive_layer_drop.enabled"),
        (
            {"zero_optimization": {"module_granularity_threshold": 1000}},
            "zero_optimization.module_granularity_threshold",
        ),
        ({"zero_optimization": {"leaf_module": {"names": ["mlp"]}}}, "zero_optimization.leaf_module.names"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "zero_optimization.round_robin_gradients"),
        (
            {"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
            "zero_optimization.zero_quantized_nontrainable_weights",
        ),
    ],
)
def test_what_changes_a_step_of_deepspeed_and_is_not_played_is_told(words: str, blocks: Table, name: str) -> None:
    made = read(words, **blocks)
    assert name in made.unplayed
    assert made.unknown == ()
    assert had(made) == had(read(words))


@pytest.mark.parametrize("words", [MEGATRON, TRAINER])
def test_what_leaves_a_step_of_deepspeed_as_it_is_says_nothing(words: str) -> None:
    off = {
        "wall_clock_breakdown": False,
        "zero_force_ds_cpu_optimizer": True,
        "comms_logger": {"enabled": False},
        "elasticity": {"enabled": False},
        "comet": {"enabled": True, "project": "own"},
        "disable_python_gc": True,
        "zero_optimization": {
            "compute_grad_norm": True,
            "stage3_module_granularity_threshold": 0,
            "enable_sanity_checks": False,
        },
    }
    made, plain = read(words, **off), read(words)
    assert (dict(made.unplayed), made.unknown) == (dict(plain.unplayed), plain.unknown)
    assert had(made) == had(plain)


@pytest.mark.parametrize("words", [MEGATRON, TRAINER])
@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "is apex's mixed precision"),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            "computes and sends in 16 bits what is kept in fp32",
        ),
        (
            {"elasticity": {"enabled": True, "micro_batch_sizes": [2, 4]}},
            "takes the batch from how many GPUs there are",
        ),
        ({"autotuning": {"enabled": True}}, "tries configurations one after the other"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 4}}, "spreads experts over ranks by AutoEP"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "is ZenFlow"),
        ({"zero_optimization": {"legacy_stage1": True}}, "is the stage 1 of DeepSpeed before 0.5.9"),
    ],
)
def test_runs_of_deepspeed_that_are_not_played_are_refused(words: str, blocks: Table, why: str) -> None:
    with pytest.raises(ScenarioError, match=why):
        read(words, **blocks)


@pytest.mark.parametrize("words", [MEGATRON, TRAINER])
def test_torchs_own_adam_of_deepspeeds_file_has_torchs_kernels(words: str) -> None:
    adam = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    assert had(read(words, **adam))["run.optimizer_impl"] == "foreach"
    assert had(read(words))["run.optimizer_impl"] != "foreach"


def test_parameters_on_the_host_have_two_names_in_deepspeeds_file() -> None:
    for name in ("cpu_offload_param", "cpu_offload_params"):
        assert had(read(zero_optimization={name: True}))["strategy.zero_optimization.offload_param.device"] == "cpu"


def test_a_name_counts_against_the_family_that_changes_nothing() -> None:
    """``data_*`` of Megatron-LM's own arguments had ``data_efficiency`` of DeepSpeed's file left out without a word."""
    told = read(data_efficiency={"data_routing": {"enabled": True}}).unplayed
    assert "data_efficiency.data_routing.enabled" in told
