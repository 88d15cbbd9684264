"""ResNets from transformers' config.json against its class: parameters and FLOPs."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hf_fields import without_torchvision

from clustersim.core.errors import ModelError
from clustersim.model import from_hf, model

torch = pytest.importorskip("torch", reason="the classes are built on torch's meta device")
without_torchvision()
transformers = pytest.importorskip("transformers", reason="the classes are transformers'")


def random_config(rng: random.Random) -> dict[str, Any]:
    """A config of few blocks."""
    kind = rng.choice(["bottleneck", "basic"])
    widths = [64 * 2**stage * (4 if kind == "bottleneck" else 1) for stage in range(4)]
    depths = [rng.choice([1, 2]) for _ in range(4)]
    sizes = {"model_type": "resnet", "depths": depths, "hidden_sizes": widths, "layer_type": kind}
    return sizes | {"downsample_in_bottleneck": rng.random() < 0.5, "num_labels": rng.choice([3, 10])}


def test_tensors_and_flops_are_those_of_transformers_class() -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    rng = random.Random(5)
    for _ in range(6):
        config = random_config(rng)
        made = from_hf(config, image_size=64)
        fields = {name: value for name, value in config.items() if name != "model_type"}
        with torch.device("meta"):
            whole = transformers.AutoModelForImageClassification.from_config(CONFIG_MAPPING["resnet"](**fields))
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                whole.eval()(torch.zeros(1, 3, 64, 64))
        theirs = sorted(tensor.numel() for tensor in whole.parameters())
        assert sorted(tensor.numel for layer in made.layers for tensor in layer.tensors) == theirs, config
        assert sum(k.flops for layer in made.layers for k in layer.kernels) == counter.get_total_flops(), config


def test_a_config_of_torchvisions_resnet_is_that_network() -> None:
    config = {"model_type": "resnet", "depths": [3, 4, 6, 3], "num_labels": 1000}
    config |= {"hidden_sizes": [256, 512, 1024, 2048], "layer_type": "bottleneck"}
    assert from_hf(config).layers == model("resnet50").layers
    assert from_hf(config | {"downsample_in_bottleneck": True}).layers == model("resnet50_v1").layers


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"hidden_sizes": [128, 256, 512, 1024]}, {}, "'hidden_sizes' = .* is not described"),
        ({"depths": [3, 4]}, {}, "'depths' = .* must be the blocks of four stages"),
        ({"layer_type": "wide"}, {}, "must be 'bottleneck' or 'basic'"),
        ({"downsample_in_first_stage": True}, {}, "'downsample_in_first_stage' = True is not described"),
        ({}, {"seq_len": 128}, "resnet takes no option 'seq_len'"),
        ({}, {"image_size": 0}, "image_size = 0 must be a whole number of pixels"),
        ({}, {"implementation": "liger"}, "unknown implementation 'liger'"),
    ],
)
def test_what_is_not_described_is_refused(change: Any, options: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_hf(random_config(random.Random(3)) | change, **options)
