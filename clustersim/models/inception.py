"""Inception-v3 (Szegedy et al., arXiv:1512.00567) as torchvision builds it: branches of named convolutions."""

from __future__ import annotations

from clustersim.model import Layer
from clustersim.models.conv_layers import (
    FUSED_RELU,
    RELU,
    Feature,
    Pair,
    Window,
    concatenation,
    conv_unit,
    dense,
    global_pool,
    pool,
)

# A convolution of a branch: torchvision's attribute, channels, window, stride; a window of 1 is not padded, others
# are padded to keep their size unless they stride.
Conv = tuple[str, int, int | Pair, int]
Branch = tuple[Conv, ...]


def _grid_a(pooled: int) -> list[Branch]:
    return [
        (("branch1x1", 64, 1, 1),),
        (("branch5x5_1", 48, 1, 1), ("branch5x5_2", 64, 5, 1)),
        (("branch3x3dbl_1", 64, 1, 1), ("branch3x3dbl_2", 96, 3, 1), ("branch3x3dbl_3", 96, 3, 1)),
        (("branch_pool", pooled, 1, 1),),
    ]


def _reduce_b() -> list[Branch]:
    return [
        (("branch3x3", 384, 3, 2),),
        (("branch3x3dbl_1", 64, 1, 1), ("branch3x3dbl_2", 96, 3, 1), ("branch3x3dbl_3", 96, 3, 2)),
    ]


def _grid_c(c: int) -> list[Branch]:
    double = (("1", c, 1), ("2", c, (7, 1)), ("3", c, (1, 7)), ("4", c, (7, 1)), ("5", 192, (1, 7)))
    return [
        (("branch1x1", 192, 1, 1),),
        (("branch7x7_1", c, 1, 1), ("branch7x7_2", c, (1, 7), 1), ("branch7x7_3", 192, (7, 1), 1)),
        tuple((f"branch7x7dbl_{i}", channels, window, 1) for i, channels, window in double),
        (("branch_pool", 192, 1, 1),),
    ]


def _reduce_d() -> list[Branch]:
    return [
        (("branch3x3_1", 192, 1, 1), ("branch3x3_2", 320, 3, 2)),
        (
            ("branch7x7x3_1", 192, 1, 1),
            ("branch7x7x3_2", 192, (1, 7), 1),
            ("branch7x7x3_3", 192, (7, 1), 1),
            ("branch7x7x3_4", 192, 3, 2),
        ),
    ]


def _branch(x: Feature, prefix: str, branch: Branch, fused: bool) -> tuple[list[Layer], Feature]:
    layers = []
    if branch[0][0] == "branch_pool":
        layer, x = pool(x, 3, 1, padding=1, maximum=False, name=f"{prefix}.pool")
        layers.append(layer)
    for name, channels, kernel, stride in branch:
        high, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        window = Window((high, wide), stride, (0, 0) if stride > 1 else (high // 2, wide // 2))
        layer, x = _unit(x, f"{prefix}.{name}", channels, window, fused)
        layers.append(layer)
    return layers, x


def _unit(x: Feature, name: str, channels: int, window: Window, fused: bool) -> tuple[Layer, Feature]:
    relu = FUSED_RELU if fused else RELU
    return conv_unit(x, channels, window, name=f"{name}.conv", norm=f"{name}.bn", relu=relu)


def _mixed(
    x: Feature, prefix: str, branches: list[Branch], fused: bool, pooled: bool = False
) -> tuple[list[Layer], Feature]:
    """Branches on one input, side by side in the output; ``pooled`` adds the max-pool branch of a reduction."""
    layers: list[Layer] = []
    outputs: list[Feature] = []
    for branch in branches:
        made, y = _branch(x, prefix, branch, fused)
        layers += made
        outputs.append(y)
    if pooled:
        layer, y = pool(x, 3, 2, name=f"{prefix}.pool")
        layers.append(layer)
        outputs.append(y)
    merged = Feature(sum(y.channels for y in outputs), outputs[0].height, outputs[0].width)
    return [*layers, concatenation(merged, f"{prefix}.cat")], merged


def _grid_e(x: Feature, prefix: str, fused: bool) -> tuple[list[Layer], Feature]:
    """The widest module: two of its branches end in a fork of 1x3 and 3x1."""
    plan = [
        ((("branch1x1", 320, 1, 1),), ()),
        ((("branch3x3_1", 384, 1, 1),), ("branch3x3_2a", "branch3x3_2b")),
        ((("branch3x3dbl_1", 448, 1, 1), ("branch3x3dbl_2", 384, 3, 1)), ("branch3x3dbl_3a", "branch3x3dbl_3b")),
        ((("branch_pool", 192, 1, 1),), ()),
    ]
    layers: list[Layer] = []
    channels = 0
    for trunk, forks in plan:
        made, y = _branch(x, prefix, trunk, fused)
        layers += made
        for name, kernel in zip(forks, ((1, 3), (3, 1)), strict=False):
            window = Window(kernel, padding=(kernel[0] // 2, kernel[1] // 2))
            layer, _ = _unit(y, f"{prefix}.{name}", 384, window, fused)
            layers.append(layer)
        channels += y.channels * max(1, len(forks))
    merged = Feature(channels, x.height, x.width)
    return [*layers, concatenation(merged, f"{prefix}.cat")], merged


def _auxiliary(x: Feature, classes: int, fused: bool) -> list[Layer]:
    first, y = pool(x, 5, 3, maximum=False, name="AuxLogits.pool")
    second, y = _unit(y, "AuxLogits.conv0", 128, Window(1), fused)
    third, y = _unit(y, "AuxLogits.conv1", 768, Window(5), fused)
    fourth, y = global_pool(y, "AuxLogits.avgpool")
    return [first, second, third, fourth, dense(y.channels, classes, "AuxLogits.fc")]


def inception_v3(x: Feature, classes: int, *, auxiliary: bool, fused: bool) -> list[Layer]:
    """Layers of Inception-v3 in forward order; the auxiliary classifier runs after ``Mixed_6e`` in training."""
    layers: list[Layer] = []
    stem = [("1a_3x3", 32, 3, 2, 0), ("2a_3x3", 32, 3, 1, 0), ("2b_3x3", 64, 3, 1, 1), ("pool1", 0, 3, 2, 0)]
    stem += [("3b_1x1", 80, 1, 1, 0), ("4a_3x3", 192, 3, 1, 0), ("pool2", 0, 3, 2, 0)]
    for name, channels, window, stride, padding in stem:
        if channels:
            layer, x = _unit(x, f"Conv2d_{name}", channels, Window(window, stride, padding), fused)
        else:
            layer, x = pool(x, window, stride, name=f"max{name}")
        layers.append(layer)
    modules = [("5b", _grid_a(32)), ("5c", _grid_a(64)), ("5d", _grid_a(64)), ("6a", _reduce_b())]
    modules += [("6b", _grid_c(128)), ("6c", _grid_c(160)), ("6d", _grid_c(160)), ("6e", _grid_c(192))]
    for name, branches in modules:
        made, x = _mixed(x, f"Mixed_{name}", branches, fused, pooled=name == "6a")
        layers += made
    if auxiliary:
        layers += _auxiliary(x, classes, fused)
    made, x = _mixed(x, "Mixed_7a", _reduce_d(), fused, pooled=True)
    layers += made
    for name in ("Mixed_7b", "Mixed_7c"):
        made, x = _grid_e(x, name, fused)
        layers += made
    layer, x = global_pool(x, "avgpool")
    return [*layers, layer, dense(x.channels, classes, "fc", dropout=True)]
