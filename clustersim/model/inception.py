"""Inception-v3 (Szegedy et al., arXiv:1512.00567) as torchvision builds it: branches of named convolutions."""

from __future__ import annotations

from clustersim.model.conv_layers import ConvWindow, Feature, Pair, Trunk, dense

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


_REDUCE_B: list[Branch] = [
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


_REDUCE_D: list[Branch] = [
    (("branch3x3_1", 192, 1, 1), ("branch3x3_2", 320, 3, 2)),
    (
        ("branch7x7x3_1", 192, 1, 1),
        ("branch7x7x3_2", 192, (1, 7), 1),
        ("branch7x7x3_3", 192, (7, 1), 1),
        ("branch7x7x3_4", 192, 3, 2),
    ),
]


def _unit(trunk: Trunk, name: str, channels: int, window: ConvWindow) -> None:
    trunk.conv(channels, window, f"{name}.conv", f"{name}.bn")


def _branch(trunk: Trunk, prefix: str, branch: Branch) -> Feature:
    """A branch that begins at the trunk's map; what it makes of it."""
    own = trunk.fork(trunk.x)
    if branch[0][0] == "branch_pool":
        own.pool(3, 1, f"{prefix}.pool", padding=1, maximum=False)
    for name, channels, kernel, stride in branch:
        high, wide = kernel if isinstance(kernel, tuple) else (kernel, kernel)
        window = ConvWindow((high, wide), stride, (0, 0) if stride > 1 else (high // 2, wide // 2))
        _unit(own, f"{prefix}.{name}", channels, window)
    return own.x


def _mixed(trunk: Trunk, prefix: str, branches: list[Branch], pooled: bool = False) -> None:
    """Branches on one input, side by side in the output; ``pooled`` adds the max-pool branch of a reduction."""
    outputs = [_branch(trunk, prefix, branch) for branch in branches]
    if pooled:
        own = trunk.fork(trunk.x)
        own.pool(3, 2, f"{prefix}.pool")
        outputs.append(own.x)
    trunk.side_by_side(outputs, f"{prefix}.cat")


def _grid_e(trunk: Trunk, prefix: str) -> None:
    """The widest module: two of its branches end in a fork of 1x3 and 3x1."""
    plan = [
        ((("branch1x1", 320, 1, 1),), ()),
        ((("branch3x3_1", 384, 1, 1),), ("branch3x3_2a", "branch3x3_2b")),
        ((("branch3x3dbl_1", 448, 1, 1), ("branch3x3dbl_2", 384, 3, 1)), ("branch3x3dbl_3a", "branch3x3dbl_3b")),
        ((("branch_pool", 192, 1, 1),), ()),
    ]
    outputs: list[Feature] = []
    for branch, forks in plan:
        y = _branch(trunk, prefix, branch)
        for name, kernel in zip(forks, ((1, 3), (3, 1)), strict=False):
            _unit(trunk.fork(y), f"{prefix}.{name}", 384, ConvWindow(kernel, padding=(kernel[0] // 2, kernel[1] // 2)))
        outputs += [y] * max(1, len(forks))
    trunk.side_by_side(outputs, f"{prefix}.cat")


def _auxiliary(trunk: Trunk, classes: int) -> None:
    trunk.pool(5, 3, "AuxLogits.pool", maximum=False)
    _unit(trunk, "AuxLogits.conv0", 128, ConvWindow(1))
    _unit(trunk, "AuxLogits.conv1", 768, ConvWindow(5))
    trunk.average("AuxLogits.avgpool")
    trunk.layers.append(dense(trunk.x.channels, classes, "AuxLogits.fc"))


def inception_v3(trunk: Trunk, *, classes: int, auxiliary: bool) -> None:
    """Lay Inception-v3's layers in forward order; the auxiliary classifier runs after ``Mixed_6e`` in training."""
    stem = [("1a_3x3", 32, 3, 2, 0), ("2a_3x3", 32, 3, 1, 0), ("2b_3x3", 64, 3, 1, 1), ("pool1", 0, 3, 2, 0)]
    stem += [("3b_1x1", 80, 1, 1, 0), ("4a_3x3", 192, 3, 1, 0), ("pool2", 0, 3, 2, 0)]
    for name, channels, window, stride, padding in stem:
        if channels:
            _unit(trunk, f"Conv2d_{name}", channels, ConvWindow(window, stride, padding))
        else:
            trunk.pool(window, stride, f"max{name}")
    modules = [("5b", _grid_a(32)), ("5c", _grid_a(64)), ("5d", _grid_a(64)), ("6a", _REDUCE_B)]
    modules += [("6b", _grid_c(128)), ("6c", _grid_c(160)), ("6d", _grid_c(160)), ("6e", _grid_c(192))]
    for name, branches in modules:
        _mixed(trunk, f"Mixed_{name}", branches, pooled=name == "6a")
    if auxiliary:
        _auxiliary(trunk.fork(trunk.x), classes)
    _mixed(trunk, "Mixed_7a", _REDUCE_D, pooled=True)
    for name in ("Mixed_7b", "Mixed_7c"):
        _grid_e(trunk, name)
    trunk.average("avgpool")
    trunk.layers.append(dense(trunk.x.channels, classes, "fc", dropout=True))
