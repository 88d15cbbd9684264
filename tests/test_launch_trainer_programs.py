"""Programs that take the Trainer's arguments and do otherwise than the Trainer."""

from __future__ import annotations

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import Table
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document

WORDS = "--model_name_or_path gpt2 --per_device_train_batch_size 2 --max_seq_length 512"
TULU = (
    "accelerate launch --num_processes 8 --mixed_precision bf16 open_instruct/finetune.py --use_slow_tokenizer "
    "--model_name_or_path meta-llama/Llama-3.1-8B --max_seq_length 2048 --per_device_train_batch_size 1 "
)
LINEARS = ("q_proj", "o_proj", "v_proj", "k_proj", "gate_proj", "up_proj", "down_proj")


def read(words: str) -> exchange.LaunchImport:
    return exchange.read([document(words, "run.sh")], {"topology": "hgx-h100", "nodes": 1})


def fields(words: str) -> Table:
    return exchange.canonical(read(words).scenario)


@pytest.mark.parametrize(
    ("program", "words", "kind"),
    [
        ("run_clm.py", "", "fused"),
        ("run_clm_no_trainer.py", "", "foreach"),
        ("examples/run_glue_no_trainer.py", "", "foreach"),
        ("run_clm_no_trainer.py", "--optim adamw_torch_fused", "fused"),
    ],
)
def test_an_example_without_a_trainer_has_an_optimizer_that_nobody_fused(program: str, words: str, kind: str) -> None:
    assert fields(f"torchrun --nproc_per_node 8 {program} {WORDS} {words}")["run.optimizer_impl"] == kind


def test_an_example_without_a_trainer_clips_no_gradients() -> None:
    shards = "--fsdp full_shard --fsdp_config '{\"fsdp_version\": 2}'"
    norms = {
        program: fields(f"torchrun --nproc_per_node 8 {program} {WORDS} {shards}")["strategy.clip_grad_norm"]
        for program in ("run_clm.py", "run_clm_no_trainer.py")
    }
    assert norms == {"run_clm.py": True, "run_clm_no_trainer.py": False}


def test_adapters_of_open_instruct_are_beside_every_linear_and_no_layer_is_computed_again() -> None:
    had = fields(f"{TULU} --use_lora --lora_rank 16 --gradient_checkpointing")
    assert (had["model.adapter.rank"], had["model.adapter.target_modules"]) == (16, LINEARS)
    assert (had["model.adapter.dropout"], had["model.activation_checkpointing"]) == (0.1, "none")
    quantized = fields(f"{TULU} --use_lora --use_qlora --lora_dropout 0 --gradient_checkpointing")
    assert (quantized["model.adapter.rank"], quantized["model.adapter.load_in_4bit"]) == (64, True)
    assert (quantized["model.adapter.dropout"], quantized["model.activation_checkpointing"]) == (0.0, "full")


def test_another_finetune_with_words_of_its_own_is_asked_for_pefts() -> None:
    with pytest.raises(ScenarioError, match="a script's own words"):
        read(TULU.replace("--use_slow_tokenizer", "") + " --use_lora --lora_rank 16")


def test_lengths_of_a_source_and_a_target_are_told_and_not_unknown() -> None:
    made = read(f"torchrun --nproc_per_node 8 run.py {WORDS} --max_source_length 256 --max_target_length 64")
    assert {"--max_source_length", "--max_target_length"} <= set(made.unplayed)
    assert not made.unknown


@pytest.mark.parametrize(
    ("text", "name", "title"),
    [
        (
            "torchrun --nproc_per_node 4 -m RL2.trainer.sft data.max_length=4096 actor.model_name=Qwen/Qwen3-4B",
            "r.sh",
            "RL2",
        ),
        (
            "training_type: sft\nmodel_name: LFM2-1.2B\ntraining_config: {extends: DEFAULT_SFT}\n",
            "l.yaml",
            "leap-finetune",
        ),
    ],
)
def test_frameworks_that_are_not_read_are_refused_by_name(text: str, name: str, title: str) -> None:
    with pytest.raises(ScenarioError, match=f"is of {title}, whose files are not read"):
        exchange.read([document(text, name)], {"topology": "hgx-h100", "nodes": 1})


def test_training_in_nvfp4_is_no_training_in_16_bits() -> None:
    text = "base_model: Qwen/Qwen3.5-9B\nsequence_len: 2048\nbf16: true\nnvfp4_training: {{enabled: {}}}\n"
    cluster = {"topology": "hgx-h100", "nodes": 1}
    assert exchange.read([document(text.format("false"), "a.yaml")], cluster).tables["model"]["name"] == "qwen3.5-9b"
    with pytest.raises(ScenarioError, match="trains in NVFP4"):
        exchange.read([document(text.format("true"), "a.yaml")], cluster)
