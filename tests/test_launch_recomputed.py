"""Which of PyTorch's checkpoints computes layers again, as each framework on transformers says it or has it."""

from __future__ import annotations

import dataclasses

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document
from clustersim.files.launch.trainer_args import _OF_TRANSFORMERS_4

TRAINER = "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path Qwen/Qwen2.5-7B --max_seq_length 2048 "
FACTORY = "llamafactory-cli train --stage sft --do_train --template qwen --finetuning_type full "
FACTORY += "--model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1 "
OPENRLHF = "deepspeed --module openrlhf.cli.train_sft --pretrain Qwen/Qwen2.5-7B --micro_train_batch_size 1 "
FSDP = (
    "distributed_type: FSDP\nfsdp_config: {{fsdp_version: {version}, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}}\n"
)
FSDP += "num_machines: 1\nnum_processes: 8\n"


def stops_early(words: str, *files: tuple[str, str]) -> bool | None:
    given = [document(words, "run.sh"), *(document(text, name) for text, name in files)]
    made = exchange.read(given, {"topology": "hgx-h100", "nodes": 1})
    early = exchange.canonical(made.scenario)["model.early_stop"]
    assert early is None or isinstance(early, bool)
    return early


@pytest.mark.parametrize(
    ("words", "early"),
    [
        ("--gradient_checkpointing true", True),
        ("--activation_checkpointing", True),
        ("--gradient_checkpointing true --evaluation_strategy no", False),
        ("--gradient_checkpointing true --overwrite_output_dir", False),
        ("""--gradient_checkpointing true --gradient_checkpointing_kwargs '{"use_reentrant": true}'""", False),
        ("""--gradient_checkpointing true --gradient_checkpointing_kwargs '{"use_reentrant": false}'""", True),
        ("""--activation_checkpointing --activation_checkpointing_kwargs '{"use_reentrant": true}'""", False),
    ],
)
def test_the_trainer_computes_again_as_its_release_does_where_nobody_says(words: str, early: bool) -> None:
    assert stops_early(TRAINER + words) is early


def test_words_that_tell_transformers_4_are_no_arguments_of_5() -> None:
    pytest.importorskip("torch", reason="TrainingArguments need it")
    from hf_fields import without_torchvision

    without_torchvision()
    transformers = pytest.importorskip("transformers", reason="its arguments are looked up")
    assert int(transformers.__version__.partition(".")[0]) >= 5
    assert not {field.name for field in dataclasses.fields(transformers.TrainingArguments)} & set(_OF_TRANSFORMERS_4)


@pytest.mark.parametrize(
    ("words", "version", "early"),
    [("", None, False), ("--use_reentrant_gc false", None, True), ("", 1, False), ("--use_reentrant_gc true", 2, True)],
)
def test_llama_factory_is_reentrant_but_for_fsdp2(words: str, version: int | None, early: bool) -> None:
    if version is None:
        assert stops_early(FACTORY + words) is early
        return
    launcher = "accelerate launch --config_file fsdp.yaml src/train.py " + FACTORY.partition("train ")[2]
    assert stops_early(launcher + words, (FSDP.format(version=version), "fsdp.yaml")) is early


@pytest.mark.parametrize(("words", "early"), [("", True), ("--gradient_checkpointing_use_reentrant", False)])
def test_openrlhf_is_reentrant_where_it_is_told(words: str, early: bool) -> None:
    assert stops_early(f"{OPENRLHF} --gradient_checkpointing {words}") is early


def test_arguments_of_a_checkpoint_that_are_no_json_are_refused() -> None:
    with pytest.raises(ScenarioError, match="use_reentrant=False' is no JSON"):
        stops_early(f"{TRAINER} --gradient_checkpointing --gradient_checkpointing_kwargs use_reentrant=False")


@pytest.mark.parametrize(("word", "kernel"), [("true", "fa2"), ("false", None)])
def test_alignment_handbooks_switch_of_flash_attention_is_read(word: str, kernel: str | None) -> None:
    text = "model_name_or_path: Qwen/Qwen2.5-7B\nper_device_train_batch_size: 1\nmax_seq_length: 2048\n"
    made = exchange.read(
        [document(f"{text}use_flash_attention_2: {word}\n", "a.yaml")], {"topology": "hgx-h100", "nodes": 1}
    )
    assert exchange.canonical(made.scenario)["model.attention"] == kernel
    assert "use_flash_attention_2" not in made.unknown
