"""Encoders of sound from a config.json against transformers' own classes: parameters by name, FLOPs of a forward."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
from hf_fields import without_torchvision

from clustersim.core.errors import ModelError
from clustersim.model import from_hf
from clustersim.model.speech import SPEECH

torch = pytest.importorskip("torch", reason="the classes are built on torch's meta device")
without_torchvision()
transformers = pytest.importorskip("transformers", reason="the classes are transformers'")

CASES = 6


def random_config(kind: str, rng: random.Random) -> dict[str, Any]:
    """A small config of a type."""
    heads = rng.choice([2, 4])
    convs = rng.choice([2, 3])
    sizes = {"hidden_size": 16 * heads, "num_attention_heads": heads, "num_hidden_layers": 2, "vocab_size": 40}
    sizes |= {"intermediate_size": rng.choice([48, 96]), "num_conv_pos_embedding_groups": rng.choice([2, 4])}
    lists = {"conv_dim": [24] * convs, "conv_stride": [5, 2, 2][:convs], "conv_kernel": [10, 3, 2][:convs]}
    flags = {name: rng.random() < 0.5 for name in ("conv_bias", "do_stable_layer_norm")}
    flags |= {"feat_proj_layer_norm": rng.random() < 0.5} if kind == "hubert" else {}
    rates = {"mask_time_prob": rng.choice([0.0, 0.05]), "num_conv_pos_embeddings": rng.choice([7, 16])}
    norm = {"feat_extract_norm": rng.choice(["group", "layer"]), "model_type": kind}
    return sizes | lists | flags | rates | norm


def class_of(config: dict[str, Any], device: str) -> Any:
    """The class's model of a config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = {name: value for name, value in config.items() if name != "model_type"}
    made = CONFIG_MAPPING[config["model_type"]](**fields)
    with torch.device(device):
        return transformers.AutoModelForCTC.from_config(made, attn_implementation="eager").eval()


@pytest.mark.parametrize("kind", SPEECH)
def test_tensors_are_those_that_transformers_registers(kind: str) -> None:
    rng = random.Random(zlib.crc32(kind.encode()))
    for _ in range(CASES):
        config = random_config(kind, rng)
        made = from_hf(config, seq_len=800)
        ours = {tensor.name: tensor.numel for layer in made.layers for tensor in layer.tensors}
        assert ours == {name: tensor.numel() for name, tensor in class_of(config, "meta").named_parameters()}, config


@pytest.mark.parametrize("kind", SPEECH)
def test_flops_are_those_that_torch_counts(kind: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    rng = random.Random(zlib.crc32(kind.encode()) + 1)
    for _ in range(3):
        config = random_config(kind, rng)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            class_of(config, "cpu")(torch.zeros(1, 800))
        made = from_hf(config, seq_len=800, attention="eager")
        assert sum(k.flops for layer in made.layers for k in layer.kernels) == counter.get_total_flops(), config


def test_published_sizes_are_those_of_their_checkpoints() -> None:
    """wav2vec 2.0 base with a head of 32 characters (94.4 M), and large with a norm behind each convolution (315.5)."""
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072}
    base = from_hf({"model_type": "wav2vec2", "vocab_size": 32} | sizes, seq_len=160_000)
    assert base.parameters == 94_396_320
    assert base.notes[0] == "clips of 160000 samples, 499 frames"
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24, "intermediate_size": 4096}
    norms = {"feat_extract_norm": "layer", "conv_bias": True, "do_stable_layer_norm": True}
    large = from_hf({"model_type": "wav2vec2", "vocab_size": 32} | sizes | norms, seq_len=160_000)
    assert large.parameters == 315_471_520


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {}, "says how long a clip is; give seq_len"),
        ({}, {"seq_len": 9}, "9 samples are fewer than the convolutions"),
        ({}, {"seq_len": 0}, "seq_len = 0 must be a whole number of samples"),
        ({}, {"seq_len": 800, "layers": 3}, "takes no option 'layers'"),
        ({"add_adapter": True}, {"seq_len": 800}, "'add_adapter' = True is not described"),
        ({"feat_extract_norm": "batch"}, {"seq_len": 800}, "must be 'group' or 'layer'"),
        ({"conv_dim": [24]}, {"seq_len": 800}, "must be lists of one length"),
        ({"conv_stride": [5, 0]}, {"seq_len": 800}, "must be a list of whole numbers above zero"),
        ({"hidden_act": "relu"}, {"seq_len": 800}, "'hidden_act' = 'relu' is not described"),
        ({"hidden_size": 33}, {"seq_len": 800}, "do not divide a width of 33 evenly"),
    ],
)
def test_what_is_not_described_is_refused(change: Any, options: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_hf(random_config("wav2vec2", random.Random(3)) | change, **options)
