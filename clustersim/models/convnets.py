"""Convolutional networks by name, with torchvision's tensors in torchvision's registration order.

He et al. (arXiv:1512.03385, stride in the 3x3 as torchvision and "v1.5"), Xie et al. (1611.05431), Hu et al.
(1709.01507), Simonyan and Zisserman (1409.1556), Krizhevsky (1404.5997), Szegedy et al. (1512.00567, in
:mod:`clustersim.models.inception`), Liu et al. (1512.02325, SSD with ResNet-50 as NVIDIA DeepLearningExamples has it).
A new network is one row of :data:`CONVNETS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from clustersim.errors import ModelError, nearest
from clustersim.model import Layer, Model
from clustersim.models.conv_layers import (
    FUSED_RELU,
    RELU,
    Feature,
    Window,
    conv_unit,
    dense,
    global_pool,
    loss,
    pool,
    residual_sum,
    squeeze_excitation,
)
from clustersim.models.inception import inception_v3
from clustersim.models.kernels import Passes, memory

CLASSES = 1000


@dataclass(frozen=True)
class Residual:
    """A residual network: blocks per stage; bottlenecks with ``groups`` of ``group_width`` channels in the first stage.

    ``squeeze`` divides the channels of squeeze-and-excitation gates (0: none). ``early_stride`` puts a stage's stride
    into its first 1x1 convolution, the original "v1", instead of the 3x3.
    """

    depths: tuple[int, int, int, int]
    bottleneck: bool = True
    groups: int = 1
    group_width: int = 64
    squeeze: int = 0
    early_stride: bool = False


class Stack(msgspec.Struct, frozen=True):
    """A plain stack: output channels of 3x3 convolutions, 0 for a max-pool (VGG)."""

    channels: tuple[int, ...]


class Custom(msgspec.Struct, frozen=True):
    """A network with a builder of its own and its usual image size."""

    build: Callable[[Feature, bool], list[Layer]]
    image_size: int = 224


def _vgg(*depths: int) -> Stack:
    stages = zip(depths, (64, 128, 256, 512, 512), strict=True)
    return Stack(tuple(c for depth, channels in stages for c in (*[channels] * depth, 0)))


def _residual(x: Feature, net: Residual, fused: bool) -> list[Layer]:
    layers, x = _residual_body(x, net, fused, (1, 2, 2, 2))
    layer, x = global_pool(x, "avgpool")
    return [*layers, layer, dense(x.channels, CLASSES, "fc"), loss(CLASSES)]


def _residual_body(x: Feature, net: Residual, fused: bool, strides: tuple[int, ...]) -> tuple[list[Layer], Feature]:
    """The stem and as many stages as there are strides, and the map they leave."""
    layers: list[Layer] = []
    layer, x = conv_unit(x, 64, Window(7, 2, 3), name="conv1", norm="bn1", relu=FUSED_RELU if fused else RELU)
    layers.append(layer)
    layer, x = pool(x, 3, 2, padding=1, name="maxpool")
    layers.append(layer)
    for stage, (depth, stride) in enumerate(zip(net.depths, strides, strict=False)):
        for i in range(depth):
            block, x = _block(x, net, 64 * 2**stage, 1 if i else stride, f"layer{stage + 1}.{i}", fused)
            layers += block
    return layers, x


def _block(
    x: Feature, net: Residual, planes: int, stride: int, prefix: str, fused: bool
) -> tuple[list[Layer], Feature]:
    """One residual block; torchvision registers and runs the shortcut's convolution last."""
    width = planes * net.group_width // 64 * net.groups
    first, second = (stride, 1) if net.early_stride or not net.bottleneck else (1, stride)
    if net.bottleneck:
        plan = [(width, 1, first, 1), (width, 3, second, net.groups), (planes * 4, 1, 1, 1)]
    else:
        plan = [(planes, 3, first, 1), (planes, 3, second, 1)]
    layers, y = [], x
    for j, (channels, kernel, step, groups) in enumerate(plan, start=1):
        relu = None if j == len(plan) else FUSED_RELU if fused else RELU
        window = Window(kernel, step, kernel // 2, groups)
        layer, y = conv_unit(y, channels, window, name=f"{prefix}.conv{j}", norm=f"{prefix}.bn{j}", relu=relu)
        layers.append(layer)
    if net.squeeze:
        layers.append(squeeze_excitation(y, f"{prefix}.se", y.channels // net.squeeze))
    if (x.channels, x.height) != (y.channels, y.height):
        name = f"{prefix}.downsample"
        layer, _ = conv_unit(x, y.channels, Window(1, stride), name=f"{name}.0", norm=f"{name}.1", relu=None)
        layers.append(layer)
    return [*layers, residual_sum(y, f"{prefix}.add", fused)], y


def _plain(x: Feature, net: Stack) -> list[Layer]:
    layers, index = [], 0
    for channels in net.channels:
        if channels:
            layer, x = conv_unit(x, channels, Window(3, padding=1), name=f"features.{index}")
            index += 2  # a ReLU follows each convolution in the Sequential
        else:
            layer, x = pool(x, 2, 2, name=f"features.{index}")
            index += 1
        layers.append(layer)
    layer, x = global_pool(x, "avgpool", side=7)
    return [
        *layers,
        layer,
        dense(x.size, 4096, "classifier.0", relu=True),
        dense(4096, 4096, "classifier.3", relu=True, dropout=True),
        dense(4096, CLASSES, "classifier.6", dropout=True),
        loss(CLASSES),
    ]


def _alexnet(x: Feature, fused: bool) -> list[Layer]:
    del fused  # it has no BatchNorm to fuse with
    plan = [(0, 64, 11, 4, 2, True), (3, 192, 5, 1, 2, True), (6, 384, 3, 1, 1, False)]
    plan += [(8, 256, 3, 1, 1, False), (10, 256, 3, 1, 1, True)]
    layers = []
    for index, channels, kernel, stride, padding, pooled in plan:
        layer, x = conv_unit(x, channels, Window(kernel, stride, padding), name=f"features.{index}")
        layers.append(layer)
        if pooled:
            layer, x = pool(x, 3, 2, name=f"features.{index + 2}")
            layers.append(layer)
    layer, x = global_pool(x, "avgpool", side=6)
    return [
        *layers,
        layer,
        dense(x.size, 4096, "classifier.1", relu=True, dropout=True),
        dense(4096, 4096, "classifier.4", relu=True, dropout=True),
        dense(4096, CLASSES, "classifier.6"),
        loss(CLASSES),
    ]


_SSD_MAPS = ((512, 256, 2), (512, 256, 2), (256, 128, 2), (256, 128, 1), (256, 128, 1))
_SSD_BOXES = (4, 6, 6, 6, 4, 4)
_COCO = 81


def _ssd(x: Feature, fused: bool) -> list[Layer]:
    """SSD300: ResNet-50 up to its third stage, which keeps its size; five smaller maps; boxes and classes of each."""
    layers, x = _residual_body(x, _RESNET50, fused, (1, 2, 1))
    maps, relu = [x], FUSED_RELU if fused else RELU
    for i, (channels, narrow, stride) in enumerate(_SSD_MAPS):
        p = f"additional_blocks.{i}"
        layer, x = conv_unit(x, narrow, Window(1), name=f"{p}.0", norm=f"{p}.1", relu=relu)
        window = Window(3, stride, stride - 1)
        wide, x = conv_unit(x, channels, window, name=f"{p}.3", norm=f"{p}.4", relu=relu)
        layers += [layer, wide]
        maps.append(x)
    for what, outputs in (("loc", 4), ("conf", _COCO)):
        for i, (one, boxes) in enumerate(zip(maps, _SSD_BOXES, strict=True)):
            layer, _ = conv_unit(one, boxes * outputs, Window(3, padding=1), name=f"{what}.{i}", relu=None)
            layers.append(layer)
    return [*layers, _multibox(sum(m.height * m.width * boxes for m, boxes in zip(maps, _SSD_BOXES, strict=True)))]


def _multibox(boxes: int) -> Layer:
    """Cross-entropy of every default box, and hard negative mining by two sorts of some ten radix passes each."""
    kernels = (
        memory("cat", float(boxes * (_COCO + 4)), Passes(2, 2, 4, 14)),
        memory("cross_entropy", float(boxes * _COCO), Passes(4, 5, 3, 3)),
        memory("mining", float(boxes), Passes(60, 4, 40, 20)),
    )
    kept = 3.0 * boxes * _COCO
    return Layer("loss", "loss", (), kernels, activation_bytes=kept, boundary_bytes=float(boxes * (_COCO + 4)))


def _inception(x: Feature, fused: bool) -> list[Layer]:
    return [*inception_v3(x, CLASSES, auxiliary=True, fused=fused), loss(CLASSES)]


def _inception_without_aux(x: Feature, fused: bool) -> list[Layer]:
    return [*inception_v3(x, CLASSES, auxiliary=False, fused=fused), loss(CLASSES)]


_RESNET50, _RESNET101, _RESNET152 = (Residual(d) for d in ((3, 4, 6, 3), (3, 4, 23, 3), (3, 8, 36, 3)))
CONVNETS: dict[str, Residual | Stack | Custom] = {
    "resnet18": Residual((2, 2, 2, 2), bottleneck=False),
    "resnet34": Residual((3, 4, 6, 3), bottleneck=False),
    "resnet50": _RESNET50,
    "resnet101": _RESNET101,
    "resnet152": _RESNET152,
    "resnet50_v1": replace(_RESNET50, early_stride=True),
    "resnet101_v1": replace(_RESNET101, early_stride=True),
    "resnet152_v1": replace(_RESNET152, early_stride=True),
    "resnext50_32x4d": replace(_RESNET50, groups=32, group_width=4),
    "resnext101_32x4d": replace(_RESNET101, groups=32, group_width=4),
    "resnext101_32x8d": replace(_RESNET101, groups=32, group_width=8),
    "resnext101_64x4d": replace(_RESNET101, groups=64, group_width=4),
    "se_resnext101_32x4d": replace(_RESNET101, groups=32, group_width=4, squeeze=16),
    "wide_resnet50_2": replace(_RESNET50, group_width=128),
    "wide_resnet101_2": replace(_RESNET101, group_width=128),
    "vgg11": _vgg(1, 1, 2, 2, 2),
    "vgg13": _vgg(2, 2, 2, 2, 2),
    "vgg16": _vgg(2, 2, 3, 3, 3),
    "vgg19": _vgg(2, 2, 4, 4, 4),
    "alexnet": Custom(_alexnet),
    "inception_v3": Custom(_inception, image_size=299),
    "inception_v3_no_aux": Custom(_inception_without_aux, image_size=299),
    "ssd300_resnet50": Custom(_ssd, image_size=300),
}


def convnet(name: str, image_size: int | None = None, *, implementation: str = "eager") -> Model:
    """A convolutional network of torchvision's name, for ImageNet's 1,000 classes.

    Parameters
    ----------
    name : a key of :data:`CONVNETS`. image_size : pixels of a side; 224, and 299 for Inception-v3, by default.
    implementation : ``"eager"`` launches every op; ``"fused"`` merges ReLU and residual sum into BatchNorm.

    Raises
    ------
    ModelError
        For an unknown name (with the nearest one), or an image too small for the network.

    >>> convnet("resnet50").parameters
    25557032
    """
    if name not in CONVNETS:
        raise ModelError(f"unknown convolutional network {name!r}; {nearest(name, CONVNETS)}")
    if implementation not in {"eager", "flash", "fused"}:
        raise ModelError(
            f"{name}: unknown implementation {implementation!r}; {nearest(implementation, ['eager', 'fused'])}"
        )
    net = CONVNETS[name]
    side = image_size if image_size is not None else net.image_size if isinstance(net, Custom) else 224
    if not isinstance(side, int) or side < 1:
        raise ModelError(f"{name}: image_size = {side!r} must be a whole number of pixels above zero")
    return _built(name, side, implementation == "fused")


@lru_cache(maxsize=32)
def _built(name: str, side: int, fused: bool) -> Model:
    net, image = CONVNETS[name], Feature(3, side, side, image=True)
    if isinstance(net, Residual):
        layers = _residual(image, net, fused)
    elif isinstance(net, Stack):
        layers = _plain(image, net)
    else:
        layers = net.build(image, fused)
    return Model(name, "convnet", tuple(layers), sample="image", notes=(f"{side}x{side} images",))
