"""Layers of convolutional networks, laid one behind the other on a :class:`Trunk`.

Kernels are what PyTorch launches one by one (cuDNN convolution, BatchNorm, ReLU, sum, pooling); ``fused`` merges the
ReLU and the residual sum into the BatchNorm kernels.
"""

from __future__ import annotations

import msgspec

from clustersim.core.errors import ModelError
from clustersim.core.model import Kernel, Layer
from clustersim.model.kernels import DROPOUT, Passes, linear, memory
from clustersim.model.tensor_parts import affine

# Training BatchNorm reads its input twice (statistics, then normalise) and counts its batches in a kernel of its own;
# backward reads input and gradient twice.
BATCH_NORM = Passes(3, 5, 2, 1)
RELU = Passes(2, 3)
ADD = Passes(3, 3)
BIAS = Passes(2, 1)
# Fused, ReLU costs its mask in backward, and the sum one more read on either way.
FUSED_RELU = Passes(0, 1, 0, 0)
FUSED_ADD = Passes(1, 1, 0, 0)

Pair = tuple[int, int]


class ConvWindow(msgspec.Struct, frozen=True):
    """What a convolution looks at: (height, width) or one number of ``kernel`` and ``padding``; ``stride``, and in how
    many ``groups`` channels are."""

    kernel: int | Pair
    stride: int = 1
    padding: int | Pair = 0
    groups: int = 1


class Feature(msgspec.Struct, frozen=True):
    """A feature map of one sample: channels, height, width; ``image`` marks the input, which needs no gradient."""

    channels: int
    height: int
    width: int
    image: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return self.channels * self.height * self.width


def _pair(value: int | Pair) -> Pair:
    return value if isinstance(value, tuple) else (value, value)


class Trunk:
    """A feature map ``x`` on its way through a network, and the ``layers`` it has come through.

    ``fused`` : ReLUs and residual sums ride on the kernels of the BatchNorm before them. Methods raise
    :class:`ModelError` where the map is smaller than their window.
    """

    def __init__(self, x: Feature, fused: bool = False, layers: list[Layer] | None = None) -> None:
        self.x = x
        self.fused = fused
        self.layers: list[Layer] = [] if layers is None else layers

    def fork(self, x: Feature) -> Trunk:
        """A branch that begins at ``x``; its layers come behind those that are there."""
        return Trunk(x, self.fused, self.layers)

    def conv(self, channels: int, window: ConvWindow, name: str, norm: str = "", relu: bool = True) -> None:
        """A convolution with its BatchNorm (named ``norm``; a bias instead when empty) and its ReLU, if it has one."""
        x = self.x
        size = _pair(window.kernel)
        groups = window.groups
        y = self.x = _window(x, name, channels, size, window.stride, _pair(window.padding))
        tensors = affine(name, x.channels // groups * size[0] * size[1], channels, bias=not norm)
        tensors += affine(norm, 1, channels) if norm else ()
        after = ("batch_norm", BATCH_NORM) if norm else ("bias", BIAS)
        kernels = [convolution(x, y, size, groups), memory(after[0], float(y.size), after[1])]
        if relu:
            kernels.append(memory("relu", float(y.size), FUSED_RELU if self.fused and norm else RELU))
        # BatchNorm keeps its input; a ReLU's output is kept by itself and by the next convolution, once.
        saved = float(y.size) * (bool(norm) + relu) + (x.size if x.image else 0)
        self.layers.append(
            Layer(
                name.removesuffix(".conv"),
                "conv",
                tensors,
                tuple(kernels),
                buffers=2 * channels if norm else 0,
                activation_bytes=saved,
                boundary_bytes=float(x.size),
            )
        )

    def pool(self, kernel: int, stride: int, name: str, padding: int = 0, maximum: bool = True) -> None:
        """Max or average pooling; a maximum also writes 64-bit indices, twice the bytes of an fp32 output."""
        x = self.x
        y = self.x = _window(x, name, x.channels, (kernel, kernel), stride, (padding, padding))
        index, zeroed = (2.0, 2.0) if maximum else (0.0, 1.0)
        op = Kernel(
            "max_pool" if maximum else "avg_pool",
            "memory",
            nbytes=x.size + (1 + index) * y.size,
            backward_nbytes=zeroed * x.size + (1 + index) * y.size,
            backward_launches=2 if maximum else 1,
        )
        saved = (1 + index) * y.size
        self.layers.append(Layer(name, "pool", (), (op,), activation_bytes=saved, boundary_bytes=float(x.size)))

    def average(self, name: str, side: int = 1) -> None:
        """Adaptive average pooling to ``side`` x ``side``."""
        x = self.x
        y = self.x = Feature(x.channels, side, side)
        op = memory("avg_pool", float(x.size + y.size), Passes(1, 1))
        self.layers.append(Layer(name, "pool", (), (op,), activation_bytes=float(y.size), boundary_bytes=float(x.size)))

    def residual_sum(self, name: str) -> None:
        """The sum with the shortcut and the ReLU after it."""
        size = float(self.x.size)
        add, relu = (FUSED_ADD, FUSED_RELU) if self.fused else (ADD, RELU)
        ops = (memory("add", size, add), memory("relu", size, relu))
        self.layers.append(Layer(name, "residual", (), ops, activation_bytes=size, boundary_bytes=size))

    def side_by_side(self, outputs: list[Feature], name: str) -> None:
        """Outputs of branches copied side by side, and their gradients copied apart."""
        y = self.x = Feature(sum(output.channels for output in outputs), outputs[0].height, outputs[0].width)
        op = memory("cat", float(y.size), Passes(2, 2))
        self.layers.append(Layer(name, "concat", (), (op,), activation_bytes=0.0, boundary_bytes=float(y.size)))


def _window(x: Feature, name: str, channels: int, kernel: Pair, stride: int, padding: Pair) -> Feature:
    height = (x.height + 2 * padding[0] - kernel[0]) // stride + 1
    width = (x.width + 2 * padding[1] - kernel[1]) // stride + 1
    if height < 1 or width < 1:
        raise ModelError(f"{name}: a {x.height}x{x.width} feature map is smaller than its window; use larger images")
    return Feature(channels, height, width)


def convolution(x: Feature, y: Feature, kernel: Pair, groups: int) -> Kernel:
    """The implicit GEMM of a convolution: output pixels by output channels by window, per group."""
    m = y.height * y.width
    n = y.channels // groups
    k = x.channels // groups * kernel[0] * kernel[1]
    flops = 2.0 * m * n * k * groups
    moved = float(x.size + y.size)
    backward = 1 if x.image else 2
    return Kernel(
        "conv",
        "conv",
        m=m,
        n=n,
        k=k,
        flops=flops,
        backward_flops=backward * flops,
        nbytes=moved,
        backward_nbytes=backward * moved,
        groups=groups,
        launches=1,
        backward_launches=backward,
    )


def dense(n_in: int, n_out: int, name: str, *, relu: bool = False, dropout: bool = False) -> Layer:
    """A linear layer on one row per sample, with the dropout before it and the ReLU after it."""
    kernels = [memory("dropout", float(n_in), DROPOUT)] if dropout else []
    kernels.append(linear("linear", 1, n_in, n_out))
    kernels.append(memory("bias_gradient", float(n_out), Passes(0, 1, 0, 1)))
    if relu:
        kernels.append(memory("relu", float(n_out), RELU))
    saved = (1.25 * n_in if dropout else 0.0) + n_out
    return Layer(
        name, "linear", affine(name, n_in, n_out), tuple(kernels), activation_bytes=saved, boundary_bytes=float(n_in)
    )


def squeeze_excitation(y: Feature, name: str, squeezed: int) -> Layer:
    """Channel gates of SE-ResNeXt: global average, two small linears, and a product with the feature map."""
    kernels = (
        memory("avg_pool", float(y.size), Passes(1, 1)),
        linear("squeeze", 1, y.channels, squeezed),
        linear("expand", 1, squeezed, y.channels),
        memory("gates", float(y.channels), Passes(4, 8, 3, 4)),
        memory("scale", float(y.size), Passes(2, 5, 1, 3)),
    )
    tensors = (*affine(f"{name}.squeeze", y.channels, squeezed), *affine(f"{name}.expand", squeezed, y.channels))
    return Layer(name, "linear", tensors, kernels, activation_bytes=float(y.size), boundary_bytes=float(y.size))


def loss(classes: int) -> Layer:
    """Softmax cross-entropy over the classes."""
    op = memory("cross_entropy", float(classes), Passes(4, 4, 3, 3))
    return Layer("loss", "loss", (), (op,), activation_bytes=2.0 * classes, boundary_bytes=float(classes))
