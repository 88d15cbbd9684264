"""Convolutional networks by name, with torchvision's tensors in torchvision's registration order.

He et al. (arXiv:1512.03385, stride in the 3x3 as torchvision and "v1.5"), Xie et al. (1611.05431), Hu et al.
(1709.01507), Simonyan and Zisserman (1409.1556), Krizhevsky (1404.5997), Szegedy et al. (1512.00567, in
:mod:`clustersim.model.inception`), Liu et al. (1512.02325, SSD with ResNet-50 as NVIDIA DeepLearningExamples has it).
A new network is one row of :data:`CONVNETS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from clustersim.core.errors import ModelError, nearest
from clustersim.core.model import Layer, Model
from clustersim.model.conv_layers import ConvWindow, Feature, Trunk, dense, loss, squeeze_excitation
from clustersim.model.inception import inception_v3
from clustersim.model.kernels import Passes, memory

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


Build = Callable[[Trunk], None]
"""Lays a network's layers on the image."""


def residual_network(net: Residual, classes: int = CLASSES) -> Build:
    """A residual network with its classifier."""

    def build(trunk: Trunk) -> None:
        """Four stages of blocks, the average, and the classifier."""
        _stages(trunk, net, (1, 2, 2, 2))
        trunk.average("avgpool")
        trunk.layers.append(dense(trunk.x.channels, classes, "fc"))

    return build


def _stages(trunk: Trunk, net: Residual, strides: tuple[int, ...]) -> None:
    """The stem and as many stages as there are strides."""
    trunk.conv(64, ConvWindow(7, 2, 3), "conv1", "bn1")
    trunk.pool(3, 2, "maxpool", padding=1)
    for stage, (depth, stride) in enumerate(zip(net.depths, strides, strict=False)):
        for i in range(depth):
            _block(trunk, net, 64 * 2**stage, 1 if i else stride, f"layer{stage + 1}.{i}")


def _block(trunk: Trunk, net: Residual, planes: int, stride: int, prefix: str) -> None:
    """One residual block; torchvision registers and runs the shortcut's convolution last."""
    width = planes * net.group_width // 64 * net.groups
    first, second = (stride, 1) if net.early_stride or not net.bottleneck else (1, stride)
    if net.bottleneck:
        plan = [(width, 1, first, 1), (width, 3, second, net.groups), (planes * 4, 1, 1, 1)]
    else:
        plan = [(planes, 3, first, 1), (planes, 3, second, 1)]
    x = trunk.x
    for j, (channels, kernel, step, groups) in enumerate(plan, start=1):
        window = ConvWindow(kernel, step, kernel // 2, groups)
        trunk.conv(channels, window, f"{prefix}.conv{j}", f"{prefix}.bn{j}", relu=j < len(plan))
    y = trunk.x
    if net.squeeze:
        trunk.layers.append(squeeze_excitation(y, f"{prefix}.se", y.channels // net.squeeze))
    if (x.channels, x.height) != (y.channels, y.height):
        name = f"{prefix}.downsample"
        trunk.fork(x).conv(y.channels, ConvWindow(1, stride), f"{name}.0", f"{name}.1", relu=False)
    trunk.residual_sum(f"{prefix}.add")


def _vgg(*depths: int) -> Build:
    def build(trunk: Trunk) -> None:
        """Five stages of convolutions, each with a pool behind it, and three linears."""
        index = 0
        for depth, channels in zip(depths, (64, 128, 256, 512, 512), strict=True):
            for _ in range(depth):
                trunk.conv(channels, ConvWindow(3, padding=1), f"features.{index}")
                index += 2  # a ReLU follows each convolution in the Sequential
            trunk.pool(2, 2, f"features.{index}")
            index += 1
        trunk.average("avgpool", side=7)
        trunk.layers += [
            dense(trunk.x.size, 4096, "classifier.0", relu=True),
            dense(4096, 4096, "classifier.3", relu=True, dropout=True),
            dense(4096, CLASSES, "classifier.6", dropout=True),
        ]

    return build


def _alexnet(trunk: Trunk) -> None:
    plan = [(0, 64, 11, 4, 2, True), (3, 192, 5, 1, 2, True), (6, 384, 3, 1, 1, False)]
    plan += [(8, 256, 3, 1, 1, False), (10, 256, 3, 1, 1, True)]
    for index, channels, kernel, stride, padding, pooled in plan:
        trunk.conv(channels, ConvWindow(kernel, stride, padding), f"features.{index}")
        if pooled:
            trunk.pool(3, 2, f"features.{index + 2}")
    trunk.average("avgpool", side=6)
    trunk.layers += [
        dense(trunk.x.size, 4096, "classifier.1", relu=True, dropout=True),
        dense(4096, 4096, "classifier.4", relu=True, dropout=True),
        dense(4096, CLASSES, "classifier.6"),
    ]


_SSD_MAPS = ((512, 256, 2), (512, 256, 2), (256, 128, 2), (256, 128, 1), (256, 128, 1))
_SSD_BOXES = (4, 6, 6, 6, 4, 4)
_COCO = 81


def _ssd(trunk: Trunk) -> None:
    """SSD300: ResNet-50 up to its third stage, which keeps its size; five smaller maps; boxes and classes of each."""
    _stages(trunk, _RESNET50, (1, 2, 1))
    maps = [trunk.x]
    for i, (channels, narrow, stride) in enumerate(_SSD_MAPS):
        p = f"additional_blocks.{i}"
        trunk.conv(narrow, ConvWindow(1), f"{p}.0", f"{p}.1")
        trunk.conv(channels, ConvWindow(3, stride, stride - 1), f"{p}.3", f"{p}.4")
        maps.append(trunk.x)
    for head_name, outputs in (("loc", 4), ("conf", _COCO)):
        for i, (feature_map, boxes) in enumerate(zip(maps, _SSD_BOXES, strict=True)):
            trunk.fork(feature_map).conv(boxes * outputs, ConvWindow(3, padding=1), f"{head_name}.{i}", relu=False)
    boxes = sum(m.height * m.width * boxes for m, boxes in zip(maps, _SSD_BOXES, strict=True))
    trunk.layers.append(_multibox(boxes))


def _multibox(boxes: int) -> Layer:
    """Cross-entropy of every default box, and hard negative mining by two sorts of some ten radix passes each."""
    kernels = (
        memory("cat", float(boxes * (_COCO + 4)), Passes(2, 2, 4, 14)),
        memory("cross_entropy", float(boxes * _COCO), Passes(4, 5, 3, 3)),
        memory("mining", float(boxes), Passes(60, 4, 40, 20)),
    )
    saved = 3.0 * boxes * _COCO
    return Layer("loss", "loss", (), kernels, activation_bytes=saved, boundary_bytes=float(boxes * (_COCO + 4)))


_RESNET50, _RESNET101, _RESNET152 = (Residual(d) for d in ((3, 4, 6, 3), (3, 4, 23, 3), (3, 8, 36, 3)))
CONVNETS: dict[str, Build] = {
    "resnet18": residual_network(Residual((2, 2, 2, 2), bottleneck=False)),
    "resnet34": residual_network(Residual((3, 4, 6, 3), bottleneck=False)),
    "resnet50": residual_network(_RESNET50),
    "resnet101": residual_network(_RESNET101),
    "resnet152": residual_network(_RESNET152),
    "resnet50_v1": residual_network(replace(_RESNET50, early_stride=True)),
    "resnet101_v1": residual_network(replace(_RESNET101, early_stride=True)),
    "resnet152_v1": residual_network(replace(_RESNET152, early_stride=True)),
    "resnext50_32x4d": residual_network(replace(_RESNET50, groups=32, group_width=4)),
    "resnext101_32x4d": residual_network(replace(_RESNET101, groups=32, group_width=4)),
    "resnext101_32x8d": residual_network(replace(_RESNET101, groups=32, group_width=8)),
    "resnext101_64x4d": residual_network(replace(_RESNET101, groups=64, group_width=4)),
    "se_resnext101_32x4d": residual_network(replace(_RESNET101, groups=32, group_width=4, squeeze=16)),
    "wide_resnet50_2": residual_network(replace(_RESNET50, group_width=128)),
    "wide_resnet101_2": residual_network(replace(_RESNET101, group_width=128)),
    "vgg11": _vgg(1, 1, 2, 2, 2),
    "vgg13": _vgg(2, 2, 2, 2, 2),
    "vgg16": _vgg(2, 2, 3, 3, 3),
    "vgg19": _vgg(2, 2, 4, 4, 4),
    "alexnet": _alexnet,
    "inception_v3": partial(inception_v3, classes=CLASSES, auxiliary=True),
    "inception_v3_no_aux": partial(inception_v3, classes=CLASSES, auxiliary=False),
    "ssd300_resnet50": _ssd,
}
_SIDES = {"inception_v3": 299, "inception_v3_no_aux": 299, "ssd300_resnet50": 300}
"""Usual pixels of a side, where they are not 224."""


def convnet(name: str, image_size: int | None = None, *, implementation: str = "eager") -> Model:
    """A convolutional network of torchvision's name, for ImageNet's 1,000 classes.

    Parameters
    ----------
    name : a key of :data:`CONVNETS`. image_size : pixels of a side; 224, and 299 for Inception-v3, by default.
    implementation : ``"eager"`` launches every op; ``"fused"`` merges ReLU and residual sum into BatchNorm.

    Raises :class:`ModelError` for an unknown name (with the nearest one), or an image too small for the network.

    >>> convnet("resnet50").parameters
    25557032
    """
    if name not in CONVNETS:
        raise ModelError(f"unknown convolutional network {name!r}; {nearest(name, CONVNETS)}")
    if implementation not in {"eager", "flash", "fused"}:
        raise ModelError(
            f"{name}: unknown implementation {implementation!r}; {nearest(implementation, ['eager', 'fused'])}"
        )
    side = _SIDES.get(name, 224) if image_size is None else image_size
    if not isinstance(side, int) or side < 1:
        raise ModelError(f"{name}: image_size = {side!r} must be a whole number of pixels above zero")
    return _built(name, side, implementation == "fused")


@lru_cache(maxsize=32)
def _built(name: str, side: int, fused: bool) -> Model:
    trunk = Trunk(Feature(3, side, side, image=True), fused)
    CONVNETS[name](trunk)
    if trunk.layers[-1].kind != "loss":  # SSD has its own
        trunk.layers.append(loss(CLASSES))
    return Model(name, "convnet", tuple(trunk.layers), sample="image", notes=(f"{side}x{side} images",))
