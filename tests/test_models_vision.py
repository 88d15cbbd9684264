"""Vision transformers: parameters and FLOPs as publishers count them, and ends that tensor parallelism does not cut."""

from __future__ import annotations

from typing import Any

import pytest

from clustersim.core.errors import ModelError, ScenarioError
from clustersim.model import from_hf, model, shape
from clustersim.training.parallel import ParallelConfig
from clustersim.training.partition import Exchange, partition

# torchvision's table of weights: num_params, and _ops (billions of multiply-adds of a forward).
TORCHVISION = {
    ("vit_b_16", 224): (86_567_656, 17.564),
    ("vit_b_32", 224): (88_224_232, 4.409),
    ("vit_l_16", 224): (304_326_632, 61.555),
    ("vit_l_32", 224): (306_535_400, 15.378),
    ("vit_h_14", 224): (632_045_800, 167.295),
    ("vit_b_16", 384): (86_859_496, 55.484),
    ("vit_l_16", 512): (305_174_504, 361.986),
    ("vit_h_14", 518): (633_470_440, 1016.717),
}
# timm's results tables, millions of parameters.
TIMM = {
    "vit_tiny_patch16_224": 5.72,
    "vit_small_patch16_224": 22.05,
    "vit_small_patch32_224": 22.88,
    "vit_base_patch16_224": 86.57,
    "vit_base_patch32_224": 88.22,
    "vit_base_patch16_384": 86.86,
    "vit_large_patch16_224": 304.33,
    "vit_huge_patch14_224": 632.05,
    "vit_giant_patch14_224": 1012.61,
    "vit_gigantic_patch14_224": 1844.44,
}
SPLIT = {"tp": 4, "pp": 2, "sequence_parallel": True}


@pytest.mark.parametrize(("name", "side"), TORCHVISION)
def test_parameters_and_flops_are_those_torchvision_prints(name: str, side: int) -> None:
    whole = model(name, image_size=side)
    parameters, giga = TORCHVISION[name, side]
    assert whole.parameters == parameters
    forward = sum(kernel.flops for layer in whole.layers for kernel in layer.kernels)
    assert forward / 2e9 == pytest.approx(giga, abs=6e-4)
    assert (whole.vocab, whole.sample) == (0, "image")


@pytest.mark.parametrize("name", TIMM)
def test_parameters_are_those_of_timms_tables(name: str) -> None:
    assert round(model(name).parameters / 1e6, 2) == TIMM[name]


def test_a_hugging_face_config_is_read_with_its_classes_and_its_names() -> None:
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    config = {"model_type": "vit", "id2label": {str(i): "" for i in range(1000)}, **sizes}
    whole = from_hf(config)
    assert whole.parameters == TORCHVISION["vit_b_16", 224][0]
    names = [tensor.name for tensor in whole.layers[1].tensors]
    assert names[:2] == [f"vit.encoder.layer.0.attention.attention.query.{what}" for what in ("weight", "bias")]
    assert names[-1] == "vit.encoder.layer.0.layernorm_after.bias"
    assert (
        from_hf({"model_type": "vit", **sizes}).layers[-1].tensors[-1].numel == 2
    )  # transformers' default of num_labels
    with pytest.raises(ModelError, match="an image of 224 pixels has 197 tokens, not 512"):
        from_hf(config, seq_len=512)


def test_torchvision_registers_the_class_token_first_and_positions_behind_the_patches() -> None:
    names = [tensor.name for layer in model("vit_b_16").layers for tensor in layer.tensors]
    assert names[:4] == ["class_token", "conv_proj.weight", "conv_proj.bias", "encoder.pos_embedding"]
    assert names[6] == "encoder.layers.encoder_layer_0.self_attention.in_proj_weight"
    assert names[-2:] == ["heads.head.weight", "heads.head.bias"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image_size": 225}, "patches of 16 pixels do not cut an image of 225; use 224"),
        ({"image_size": 0}, "image = 0 must be a whole number of at least 1"),
        ({"class_tokens": -1}, "tokens = -1 must be a whole number of at least 0"),
        ({"seq_len": 197}, "unknown option 'seq_len'"),
    ],
)
def test_what_cannot_be_an_image_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        model("vit_b_16", **options)


def test_pixels_have_no_gradient_and_the_first_convolution_keeps_them() -> None:
    patches = model("vit_b_16").layers[0].kernels[0]
    assert patches.backward_flops == patches.flops
    assert patches.saved == 3 * 224**2


def test_ends_are_whole_on_every_tensor_parallel_rank_and_blocks_are_cut() -> None:
    whole = model("vit_h_14", class_tokens=8)
    split = partition(whole, ParallelConfig(**SPLIT))
    assert [stage.layers[0].kind for stage in split.stages] == ["embedding", "block"]
    assert split.stages[1].layers[-1].kind == "head"
    ends = [whole.layers[0], whole.layers[-1]]
    assert [split.stages[0].layers[0].parameters, split.stages[1].layers[-1].parameters] == [
        layer.parameters for layer in ends
    ]
    kept = sum(t.numel for layer in whole.layers[1:-1] for t in layer.tensors if t.cut == "sequence")
    blocks = sum(layer.parameters for layer in whole.layers[1:-1])
    held = sum(stage.parameters for stage in split.stages) - sum(layer.parameters for layer in ends)
    assert held == (blocks - kept) // 4 + kept
    assert (split.tied, split.notes) == (0, ())


def test_tokens_are_scattered_behind_the_patches_and_gathered_in_front_of_the_classes() -> None:
    whole = model("vit_h_14", class_tokens=8)
    split = partition(whole, ParallelConfig(**SPLIT))
    first = split.stages[0].layers[0]
    last = split.stages[1].layers[-1]

    def exchanges(items: Any) -> list[tuple[str, float]]:
        return [(item.kind, item.elements) for item in items if isinstance(item, Exchange)]

    tokens = 264 * 1280
    assert (exchanges(first.forward), exchanges(first.backward)) == ([], [("all_gather", tokens)])
    assert (exchanges(last.forward), exchanges(last.backward)) == ([("all_gather", tokens)], [])
    assert split.stages[0].chunks[0].message == tokens / 4
    plain = partition(whole, ParallelConfig(tp=4))
    assert not exchanges(plain.stages[0].layers[0].backward) + exchanges(plain.stages[0].layers[-1].forward)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ScenarioError, match="tp = 5 does not divide"):
        partition(model("vit_b_16"), ParallelConfig(tp=5))


def test_a_name_by_anybodys_spelling_has_the_shape_it_is_built_from() -> None:
    found = shape("google/vit-base-patch16-224", {"image_size": 384})
    assert found is not None
    assert (found.seq_len, found.n_positions, found.causal, found.kv_heads) == (577, 577, False, 12)
    assert model("google/vit-base-patch16-224").name == "vit_base_patch16_224"


def test_every_patch_sees_every_other_without_a_mask() -> None:
    names = {kernel.name for layer in model("vit_b_16", attention="eager").layers for kernel in layer.kernels}
    assert {"scale", "softmax"} <= names
    assert "mask" not in names
    assert "mask" in {k.name for layer in model("bert-base-uncased", attention="eager").layers for k in layer.kernels}
