"""Convolutional networks: torchvision's parameter counts and order, published multiply-adds, bytes and errors."""

from __future__ import annotations

import pytest

from clustersim import load
from clustersim.core.errors import ModelError, ScenarioError
from clustersim.core.model import Model
from clustersim.model import CONVNETS, convnet
from clustersim.model.names import described

# torchvision's documentation of each weight: num_params, GFLOPS (multiply-adds).
TORCHVISION = {
    "resnet18": (11_689_512, 1.814),
    "resnet34": (21_797_672, 3.664),
    "resnet50": (25_557_032, 4.089),
    "resnet101": (44_549_160, 7.801),
    "resnet152": (60_192_808, 11.514),
    "resnext50_32x4d": (25_028_904, 4.230),
    "resnext101_32x8d": (88_791_336, 16.414),
    "resnext101_64x4d": (83_455_272, 15.46),
    "wide_resnet50_2": (68_883_240, 11.398),
    "wide_resnet101_2": (126_886_696, 22.753),
    "vgg11": (132_863_336, 7.609),
    "vgg13": (133_047_848, 11.308),
    "vgg16": (138_357_544, 15.470),
    "vgg19": (143_667_240, 19.632),
    "alexnet": (61_100_840, 0.714),
    "inception_v3": (27_161_264, 5.713),
}


def multiply_adds(model: Model) -> float:
    return sum(k.flops for layer in model.layers for k in layer.kernels) / 2


@pytest.mark.parametrize("name", TORCHVISION)
def test_parameters_and_multiply_adds_are_torchvisions(name: str) -> None:
    parameters, giga = TORCHVISION[name]
    model = convnet(name)
    assert model.parameters == parameters
    assert multiply_adds(model) / 1e9 == pytest.approx(giga, rel=2e-3)


def test_squeeze_and_excitation_has_the_published_parameters() -> None:
    assert convnet("se_resnext101_32x4d").parameters == 48_955_416


def test_the_auxiliary_classifier_of_inception_costs_its_parameters_only_when_asked_for() -> None:
    with_aux = convnet("inception_v3")
    without = convnet("inception_v3_no_aux")
    conv0 = 768 * 128 + 2 * 128
    conv1 = 128 * 768 * 25 + 2 * 768
    fc = 768 * 1000 + 1000
    assert with_aux.parameters - without.parameters == conv0 + conv1 + fc


def test_stride_in_the_first_1x1_saves_flops_and_no_parameters() -> None:
    early = convnet("resnet50_v1")
    late = convnet("resnet50")
    assert early.parameters == late.parameters
    assert multiply_adds(early) / 1e9 == pytest.approx(3.858, rel=1e-3)


def test_resnet_registers_the_shortcut_last_in_its_block() -> None:
    names = [t.name for layer in convnet("resnet50").layers for t in layer.tensors]
    assert names[:3] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    block = [n.removeprefix("layer1.0.") for n in names if n.startswith("layer1.0.")]
    assert block[-6:] == [
        "conv3.weight",
        "bn3.weight",
        "bn3.bias",
        "downsample.0.weight",
        "downsample.1.weight",
        "downsample.1.bias",
    ]
    assert names[-2:] == ["fc.weight", "fc.bias"]


def test_resnet50_has_161_parameter_tensors_and_53_batch_norms() -> None:
    model = convnet("resnet50")
    assert sum(len(layer.tensors) for layer in model.layers) == 161
    assert sum(k.name == "batch_norm" for layer in model.layers for k in layer.kernels) == 53
    assert sum(layer.buffers for layer in model.layers) == 53_120


@pytest.mark.parametrize("name", CONVNETS)
def test_a_convolution_is_its_implicit_gemm(name: str) -> None:
    for layer in convnet(name).layers:
        for kernel in layer.kernels:
            if kernel.kind == "conv":
                assert kernel.flops == 2.0 * kernel.m * kernel.n * kernel.k * kernel.groups
                weights = layer.tensors[0].numel
                assert weights == kernel.n * kernel.k * kernel.groups


def test_only_the_first_convolution_has_no_input_gradient() -> None:
    convs = [k for layer in convnet("vgg16").layers for k in layer.kernels if k.kind == "conv"]
    assert [k.backward_flops / k.flops for k in convs] == [1.0] + [2.0] * 12


def test_pixels_scale_convolutions_and_not_parameters() -> None:
    small = convnet("resnet50", 224)
    large = convnet("resnet50", 448)
    assert small.parameters == large.parameters
    conv = [sum(k.flops for layer in m.layers for k in layer.kernels if k.kind == "conv") for m in (small, large)]
    assert conv[1] == 4 * conv[0]


def test_fused_moves_fewer_bytes_and_the_same_flops() -> None:
    eager = convnet("resnet50")
    fused = convnet("resnet50", implementation="fused")
    moved = [sum(k.nbytes + k.backward_nbytes for layer in m.layers for k in layer.kernels) for m in (eager, fused)]
    assert moved[1] < 0.9 * moved[0]
    assert eager.flops_per_sample() == fused.flops_per_sample()


def test_bad_arguments_are_one_clear_error() -> None:
    with pytest.raises(ModelError, match="unknown convolutional network 'resnet51'; did you mean 'resnet5"):
        convnet("resnet51")
    with pytest.raises(ModelError, match="smaller than its window"):
        convnet("inception_v3", 32)
    with pytest.raises(ModelError, match="image_size = 0 must be a whole number of pixels"):
        convnet("resnet50", 0)
    with pytest.raises(ModelError, match="unknown implementation 'fusd'; did you mean 'fused'"):
        convnet("resnet50", implementation="fusd")


def test_a_network_that_is_not_described_can_be_traced():
    assert "trace-model" in described("convnext_base")
    assert "config.json" not in described("convnext_base")


def test_channels_last_spares_transposes_around_convolutions() -> None:
    """ResNet-50 of batch 128 under autocast with channels last takes 110.93 ms on a V100 (sandeepkumar-skb/
    pytorch_experiments, torchvision_exp)."""

    def step(**model: object) -> float:
        run = load(
            {
                "cluster": {"topology": "dgx-1v", "nodes": 1, "gpus_per_node": 1, "device": "V100-SXM2-32GB"},
                "model": {"name": "resnet50", "dtype": "fp16"} | model,
                "strategy": {"kind": "single", "micro_batch_size": 128},
                "run": {"optimizer": "sgd", "steps": 3},
            }
        ).run()
        return float(run.summary["step_time_s"])

    last = step(channels_last=True)
    assert last == pytest.approx(0.11093, rel=0.05)
    assert step() > 1.3 * last
    fused = step(implementation="fused")
    assert step(implementation="fused", channels_last=True) == fused < last
    with pytest.raises(ScenarioError, match="gpt2 has no convolutions"):
        step(name="gpt2", channels_last=True)


def test_matrix_units_of_an_mi250x_multiply_fp32() -> None:
    """ResNet-50 of micro-batch 32 in fp32: 503.67 images/s of one die on LUMI (mvsjober/ml-benchmarks)."""
    run = load(
        {
            "cluster": {"topology": "frontier-mi250x", "nodes": 1, "gpus_per_node": 1},
            "model": {"name": "resnet50", "dtype": "fp32"},
            "strategy": {"kind": "single", "micro_batch_size": 32},
            "run": {"optimizer": "sgd", "steps": 3},
        }
    ).run()
    assert run.summary["step_time_s"] == pytest.approx(32 / 503.67, rel=0.15)
