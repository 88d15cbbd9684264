"""Models that are rows of ``data/models.toml``: counted as transformers has them and as their pages say; and names."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from clustersim import model as models
from clustersim.core.errors import ModelError
from clustersim.model import published

ROWS = published.parameters()
CLASSES: dict[str, str] = {}
"""The smallest model of each type, whose classes transformers builds; all rows of a type are of one class."""
for row in sorted(ROWS, key=lambda name: ROWS[name]):
    CLASSES.setdefault(published.config(row)["model_type"], row)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_as_many_parameters_as_its_page_says(name: str) -> None:
    assert float(f"{models.model(name).parameters / 1e9:.3g}") == float(f"{ROWS[name]:.3g}")


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_all_that_matters_and_nothing_else(name: str) -> None:
    """So that no default of transformers, which another release may have otherwise, is taken for the model's own."""
    notes = models.model(name).notes
    assert not [note for note in notes if note.startswith(("not in the config", "fields that change nothing"))]


def test_of_each_row_one_source_is_named_that_it_was_compared_with() -> None:
    from clustersim.core.texts import data_table

    named = [row for rows in data_table("models")["checked"].values() for row in rows]
    assert sorted(named) == sorted(ROWS)


AS_ANOTHER = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Types that transformers has no class for, and whose fields they have."""
UNCOUNTED = {
    "dbrx": "transformers 5.24 makes no DBRX: its attention's table lacks a field that it reads",
    "minimax_m3": "transformers has the class with images alone",
}
BIASED = {"deepseek_v3", "kimi_k2", "kimi_k25"}
"""Types whose router's bias is a buffer of transformers 5 and a parameter of 4: one for each expert of a layer."""


@pytest.mark.parametrize("name", [name for kind, name in CLASSES.items() if kind not in UNCOUNTED])
def test_transformers_own_class_of_a_row_has_as_many(name: str) -> None:
    config = published.config(name)
    kind = config["model_type"]
    further = 0
    if kind in BIASED:
        decoder = config.get("text_config", config)
        further = decoder["n_routed_experts"] * (decoder["num_hidden_layers"] - decoder["first_k_dense_replace"])
    if kind in {"t5", "mt5"} and not config["tie_word_embeddings"]:
        further = config["vocab_size"] * config["d_model"]  # transformers 5 ties what it makes; checkpoints do not
    assert models.model(name).parameters == counted(config | {"model_type": AS_ANOTHER.get(kind, kind)}) + further


HEADS = {
    **dict.fromkeys(("bert", "xlm-roberta", "distilbert", "modernbert", "electra", "mpnet"), "AutoModel"),
    **dict.fromkeys(("nomic_bert", "gte", "eurobert", "dinov2"), "AutoModel"),
    **dict.fromkeys(("t5", "mt5", "bart", "m2m_100"), "AutoModelForSeq2SeqLM"),
    "whisper": "AutoModelForSpeechSeq2Seq",
    "vit": "AutoModelForImageClassification",
}
"""Which of transformers' classes trains a type, where it is neither a decoder nor one that reads images."""


def counted(config: dict[str, Any]) -> int:
    """Parameters of transformers' class on the meta device."""
    torch = pytest.importorskip("torch", reason="the classes are built on torch's meta device")
    from hf_fields import without_torchvision

    without_torchvision()
    transformers = pytest.importorskip("transformers", reason="the classes are transformers'")
    kind = config.pop("model_type")
    made = transformers.AutoConfig.for_model(kind, **config)
    usual = "AutoModelForImageTextToText" if "vision_config" in config else "AutoModelForCausalLM"
    with torch.device("meta"):
        built = getattr(transformers, HEADS.get(kind, usual)).from_config(made)
        built.tie_weights()
    return sum(parameter.numel() for parameter in built.parameters())


# ---- names -----------------------------------------------------------------------------------------------------------

SAME = {
    "Qwen/Qwen2.5-7B": "qwen2-7b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2-7b",
    "unsloth/Meta-Llama-3.1-8B-Instruct": "llama3.1-8b",
    "/models/Qwen2.5-32B-Instruct/": "qwen2.5-32b",
    "~/.cache/modelscope/hub/qwen/Qwen2___5-14B-Instruct": "qwen2.5-14b",
    "/data/hub/models--google--gemma-3-12b-it/snapshots/96b6f1eccf38110c56df3a15bffe176da04bfd80": "gemma3-12b",
    "Qwen/Qwen3-4B-Instruct-2507": "qwen3-4b",
    "Qwen/Qwen3-30B-A3B-Thinking-2507": "qwen3-30b-a3b",
    "NousResearch/Llama-2-7b-chat-hf": "llama2-7b",
    "meta-llama/Llama-3.3-70B-Instruct": "llama3.1-70b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "mistralai/Mistral-7B-Instruct-v0.2": "mistral-7b-v0.2",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "mistral-small-3.1-24b",
    "mistralai/Mistral-Nemo-Instruct-2407": "mistral-nemo-12b",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "deepseek-r1-distill-qwen-1.5b",
    "zai-org/GLM-4-9B-0414": "glm4-9b-0414",
    "EleutherAI/pythia-6.9b-deduped": "pythia-6.9b",
    "google-bert/bert-base-cased": "bert-base-cased",
    "distilbert/distilbert-base-uncased": "distilbert-base-uncased",
    "google/electra-base-discriminator": "electra-base",
    "google/gemma-4-26B-A4B-it": "gemma4-26b-a4b",
    "Qwen/Qwen3.5-4B-Base": "qwen3.5-4b",
    "Qwen/Qwen3.6-27B": "qwen3.5-27b",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3-nano-30b-a3b",
    "unsloth/gpt-oss-20b-BF16": "gpt-oss-20b",
    "google/flan-t5-xxl": "t5-v1.1-xxl",
    "google-t5/t5-base": "t5-base",
    "bigscience/mt0-large": "mt5-large",
    "openai/whisper-large-v2": "whisper-large",
    "openai/whisper-large-v3-turbo": "whisper-large-v3-turbo",
    "BAAI/bge-base-en-v1.5": "bert-base-uncased",
    "ibm-granite/granite-4.0-h-tiny-base": "granite4.0-h-tiny",
    "ibm-granite/granite-3.0-8b-instruct": "granite3.0-8b",
    "allenai/OLMo-2-0425-1B-SFT": "olmo2-1b",
    "allenai/Olmo-3-7B-Think": "olmo3-7b",
    "tiiuae/Falcon-H1-7B-Instruct": "falcon-h1-7b",
    "TinyLlama/TinyLlama-1.1B-intermediate-step-955k-token-2T": "tinyllama-1.1b",
    "microsoft/Phi-4-mini-reasoning": "phi4-mini",
    "mistralai/Ministral-3-8B-Reasoning-2512": "ministral3-8b",
    "OpenGVLab/InternVL3-8B-hf": "internvl3-8b",
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": "kimi-linear-48b-a3b",
    "deepseek-ai/DeepSeek-V4-Flash": "deepseek-v4-flash",
}
"""Names in launch files, and whose sizes they have."""

OTHERS = [
    "Qwen/Qwen-7B",
    "Qwen/Qwen2.5-7B-Instruct-AWQ",
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4",
    "Qwen/Qwen3-8B-FP8",
    "somebody/BF16",
    "Qwen/Qwen2.5-7B-mine",
    "Qwen/Qwen2.5-Omni-7B",
    "Qwen/Qwen3-Embedding-8B",
    "qwen-27b",
    "llama-27b",
    "bert-uncased",
    "t5",
    "google/t5-base-lm-adapt",
    "google/vit-base-patch16-224-in21k",
    "openai/whisper-tiny.en",
    "microsoft/Phi-4-mini-flash-reasoning",
    "tiiuae/Falcon-H1-1.5B-Deep-Instruct",
    "ibm-granite/granite-4.0-h-350m",
    "LiquidAI/LFM2.5-VL-450M",
    "internlm/internlm2-chat-7b",
    "01-ai/Yi-34B-200K",
    "gradientai/Llama-3-8B-Instruct-262k",
    "mistralai/Mistral-7B-v0.4",
    "2507",
    "/",
    "",
]
"""Names that are nearly those of shipped models, and of none."""


@pytest.mark.parametrize(("name", "config"), SAME.items())
def test_a_name_of_a_launch_file_is_read_with_its_endings(name: str, config: str) -> None:
    assert published.known_as(name) == config


@pytest.mark.parametrize("name", OTHERS)
def test_a_neighbour_is_none(name: str) -> None:
    assert published.known_as(name) is None


@pytest.mark.parametrize("name", published.configs())
def test_every_config_is_known_by_its_own_name(name: str) -> None:
    assert published.known_as(name) == name
    assert published.known_as(f"somebody/{name.upper()}") == name


def test_other_names_are_of_configs_that_are_there_and_of_one_each() -> None:
    from clustersim.model.names import names

    said = [other for others in names()["hub"].values() for other in others]
    assert set(names()["hub"]) <= set(published.configs())
    assert len(said) == len({other.lower() for other in said})
    assert all(published.known_as(other) == name for name, others in names()["hub"].items() for other in others)


def test_a_model_is_made_by_the_name_that_it_has_on_the_hub() -> None:
    assert models.model("Qwen/Qwen2.5-7B-Instruct", seq_len=64) == models.model("qwen2-7b", seq_len=64)
    with pytest.raises(ModelError, match=r"unknown model .Qwen/Qwen2\.5-8B"):
        models.model("Qwen/Qwen2.5-8B")


def test_names_of_public_scripts_are_known_as_what_they_are_or_not_at_all() -> None:
    """``hub_names.csv``: written down from public launch files before it was looked up which of them are known."""
    from clustersim.files.launch.adapters import NAMED

    rows = list(csv.DictReader((Path(__file__).parent / "data" / "hub_names.csv").open()))
    assert {row["name"]: published.known_as(NAMED.sub("", row["name"])) or "" for row in rows} == {
        row["name"]: row["config"] for row in rows
    }
    assert sum(bool(row["config"]) for row in rows) / len(rows) > 0.78
