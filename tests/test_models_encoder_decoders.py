"""Encoder-decoders from a config.json against transformers' own classes: parameters by name, and FLOPs of a forward."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hf_fields import without_torchvision

import clustersim
from clustersim.core.errors import ClusterSimError, ModelError
from clustersim.core.model import Model
from clustersim.model import from_hf
from clustersim.model.encoder_decoders import STYLES

torch = pytest.importorskip("torch", reason="the classes are built on torch's meta device")
without_torchvision()
transformers = pytest.importorskip("transformers", reason="the classes are transformers'")

CASES = 6
SECOND = {"whisper": "AutoModelForSpeechSeq2Seq"}
"""Types whose class is another's than text to text's."""


def random_config(kind: str, rng: random.Random) -> dict[str, Any]:
    """A small config of a type, whose encoder and decoder differ."""
    heads = rng.choice([2, 4])
    common = {"model_type": kind, "d_model": 16 * heads, "vocab_size": rng.choice([96, 160]), "pad_token_id": 1}
    common |= {"decoder_start_token_id": 2, "bos_token_id": 0, "eos_token_id": 2}
    common["tie_word_embeddings"] = rng.random() < 0.5 or not (STYLES[kind].relative or STYLES[kind].sound)
    if STYLES[kind].relative:
        words = rng.choice(["relu", "gated-gelu", "gated-relu"])
        sizes = {"d_kv": rng.choice([8, 24]), "d_ff": rng.choice([48, 96]), "num_heads": heads, "num_layers": 2}
        buckets = {"relative_attention_num_buckets": rng.choice([8, 32]), "feed_forward_proj": words}
        return common | sizes | buckets | rng.choice([{}, {"num_decoder_layers": 3}])
    each = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in {
            "layers": rng.choice([1, 3]),
            "attention_heads": heads,
            "ffn_dim": rng.choice([48, 96]),
        }.items()
    }
    if kind == "marian":
        common["decoder_vocab_size"] = common["vocab_size"]
    if kind == "whisper":
        sizes = {"num_mel_bins": rng.choice([16, 24]), "max_source_positions": 40, "max_target_positions": 64}
        return common | each | sizes
    return common | each | {"max_position_embeddings": 64, "activation_function": rng.choice(["gelu", "relu"])}


def class_of(config: dict[str, Any], device: str, **how: str) -> Any:
    """The class's model of a config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config["model_type"]
    made = CONFIG_MAPPING[kind](**{name: value for name, value in config.items() if name != "model_type"})
    auto = getattr(transformers, SECOND.get(kind, "AutoModelForSeq2SeqLM"))
    with torch.device(device), mock.patch.object(torch.nn.Linear, "reset_parameters", return_value=None):
        return auto.from_config(made, **how)


def listed(model: Model) -> dict[str, int]:
    """Parameters by name, without those that are another's."""
    return {tensor.name: tensor.numel for layer in model.layers for tensor in layer.tensors if not tensor.tied_to}


@pytest.mark.parametrize("kind", sorted(STYLES))
def test_tensors_are_those_that_transformers_registers(kind: str) -> None:
    rng = random.Random(zlib.crc32(kind.encode()))
    for _ in range(CASES):
        config = random_config(kind, rng)
        theirs = {name: tensor.numel() for name, tensor in class_of(config, "meta").named_parameters()}
        if STYLES[kind].relative and not config["tie_word_embeddings"]:
            # The class ties what it makes anew; published checkpoints have both tables.
            theirs["lm_head.weight"] = theirs["shared.weight"]
        made = from_hf(config)
        assert listed(made) == theirs, config
        trained = {name for name, tensor in class_of(config, "meta").named_parameters() if tensor.requires_grad}
        ours = [tensor for layer in made.layers for tensor in layer.tensors if not tensor.tied_to and not tensor.frozen]
        assert {tensor.name for tensor in ours} - {"lm_head.weight"} == trained, config


@pytest.mark.parametrize("kind", sorted(STYLES))
def test_flops_are_those_that_torch_counts(kind: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    rng = random.Random(zlib.crc32(kind.encode()) + 1)
    for _ in range(2):
        config = random_config(kind, rng)
        whole = class_of(config, "cpu", attn_implementation="eager").eval()
        target = torch.ones(1, 24, dtype=torch.long)
        source = {"input_ids": torch.ones(1, 40, dtype=torch.long)}
        options = {} if kind == "whisper" else {"source_len": 40}
        if kind == "whisper":
            source = {"input_features": torch.zeros(1, config["num_mel_bins"], 80)}
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            whole(**source, decoder_input_ids=target, use_cache=False)
        made = from_hf(config, seq_len=24, attention="eager", **options)
        assert sum(k.flops for layer in made.layers for k in layer.kernels) == counter.get_total_flops()


def test_published_sizes_are_those_that_their_pages_say() -> None:
    """Whisper large-v3 (1,543 M), FLAN-T5 base (248 M), BART large (406 M), NLLB 600M (615 M)."""
    sides = ("encoder", "decoder")

    def plain(kind: str, width: int, layers: int, **fields: Any) -> int:
        each = {f"{side}_{name}": n for side in sides for name, n in (("layers", layers), ("ffn_dim", 4 * width))}
        each |= {f"{side}_attention_heads": width // 64 for side in sides}
        return from_hf({"model_type": kind, "d_model": width} | each | fields).parameters

    assert plain("whisper", 1280, 32, num_mel_bins=128, vocab_size=51_866) == 1_543_490_560
    assert plain("bart", 1024, 12, vocab_size=50_265) == 406_291_456
    nllb = {"vocab_size": 256_206, "activation_function": "relu", "scale_embedding": True}
    assert plain("m2m_100", 1024, 12, **nllb) == 615_073_792
    flan = {"d_model": 768, "d_ff": 2048, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12}
    words = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "vocab_size": 32_128}
    assert from_hf({"model_type": "t5"} | flan | words).parameters == 247_577_856


def test_a_source_may_be_longer_than_its_target() -> None:
    config = random_config("bart", random.Random(3))
    made = from_hf(config, seq_len=16, source_len=48)
    across = next(layer for layer in made.layers if layer.name == "decoder.0").kernels
    assert made.notes[0] == "48 tokens to 16"
    assert [k.flops for k in across if k.name == "attention"] == [2.0 * 16**2 * 32, 4.0 * 16 * 48 * 32]


@pytest.mark.parametrize(
    ("kind", "change", "options", "message"),
    [
        ("bart", {"tie_word_embeddings": False}, {}, "'tie_word_embeddings' = false is not described"),
        ("bart", {}, {"seq_len": 65}, "65 tokens are more than 'max_position_embeddings' = 64"),
        ("bart", {}, {"layers": 2}, "bart takes no option 'layers'"),
        ("bart", {"activation_function": "tanh"}, {}, "'activation_function' = 'tanh' is not described"),
        ("bart", {"d_model": 33}, {}, "do not divide a width of 33 evenly"),
        ("whisper", {}, {"source_len": 30}, "source_len is no option of whisper"),
        ("whisper", {"use_weighted_layer_sum": True}, {}, "'use_weighted_layer_sum' = true is not described"),
        ("marian", {"share_encoder_decoder_embeddings": False}, {}, "a decoder with words of its own is not described"),
        ("t5", {"feed_forward_proj": "gated-silu"}, {}, "'feed_forward_proj' = 'gated-silu' must be"),
        ("t5", {"num_experts": 8}, {}, "'num_experts' = 8 changes a model's tensors"),
        ("t5", {}, {"seq_len": 0}, "source_len = 0 must be a whole number"),
    ],
)
def test_what_is_not_described_is_refused(kind: str, change: Any, options: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_hf(random_config(kind, random.Random(3)) | change, **options)


SCENARIO = """
[cluster]
topology = "hgx-h100"
nodes = 1

[model]
hf_config = "config.json"
seq_len = 32
dtype = "bf16"

[strategy]
kind = "{kind}"
micro_batch_size = 2

[run]
steps = 2
optimizer = "adamw"
"""


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_scenario_trains_one_and_refuses_to_split_it(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(random_config("t5", random.Random(3))))
    file = tmp_path / "mine.toml"
    file.write_text(SCENARIO.format(kind=kind))
    assert clustersim.load(file).run().summary["step_time_s"] > 0
    with pytest.raises(ClusterSimError, match=r"tp = 2: .* is more than a stack of equal blocks"):
        clustersim.load(file, {"parallel.tp": 2}).run()
