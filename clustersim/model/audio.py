"""Convolutional networks over sound: WaveGlow and Jasper, as NVIDIA DeepLearningExamples trains them.

A feature map has one row; a convolution's window is ``1 x n``.
"""

from __future__ import annotations

from clustersim.core.model import Kernel, Layer, Model, Tensor
from clustersim.model import kernels as K
from clustersim.model.conv_layers import BATCH_NORM, BIAS, RELU, Feature, convolution
from clustersim.model.tensor_parts import affine

SEGMENT = 8000
"""Audio samples of a training segment of WaveGlow (--segment-length)."""

UTTERANCE = 1230
"""Frames of 10 ms in an utterance of LibriSpeech: 961 hours in 281,241 utterances."""


def _conv(x: Feature, channels: int, window: int, length: int = 0) -> tuple[Feature, Kernel]:
    y = Feature(channels, 1, length or x.width)
    return y, convolution(x, y, (1, window), 1)


def waveglow(channels: int = 512, segment: int = SEGMENT) -> Model:
    """WaveGlow (Prenger et al., arXiv:1811.00002): twelve flows over groups of eight samples, of eight layers each.

    Parameters
    ----------
    channels : of the residual layers; DeepLearningExamples trains 512. segment : audio samples of a training sample.

    >>> round(waveglow().parameters / 1e6, 1), round(waveglow(256).parameters / 1e6, 1)
    (268.3, 87.9)
    """
    length = segment // 8
    mels = 80
    up = 2.0 * segment * 4 * mels * mels
    upsample = Kernel(
        "upsample",
        "conv",
        m=segment,
        n=mels,
        k=4 * mels,
        flops=up,
        backward_flops=2 * up,
        nbytes=float(segment * mels),
        backward_nbytes=2.0 * segment * mels,
    )
    tensors = affine("upsample", mels * 1024, mels)
    copies = K.memory("unfold", float(segment * mels), K.Passes(4, 4, 2, 2))
    layers = [Layer("upsample", "flow", tensors, (upsample, copies), activation_bytes=2.0 * segment * mels)]
    left = 8
    for flow in range(12):
        left -= 2 if flow and flow % 4 == 0 else 0
        layers += _flow(flow, left, channels, length, mels * 8)
    done = (K.memory("loss", float(segment), K.Passes(4, 4, 30, 30)),)
    layers.append(Layer("loss", "loss", (), done, activation_bytes=float(segment), boundary_bytes=float(segment)))
    notes = (f"segments of {segment} samples",)
    name = "waveglow" if channels == 512 else f"waveglow-{channels}"
    return Model(name, "waveglow", tuple(layers), seq_len=segment, sample="clip", notes=notes)


def _flow(flow: int, left: int, channels: int, length: int, mels: int) -> list[Layer]:
    """An invertible 1x1 convolution, and the coupling network: a layer for each of its dilations."""
    sound = Feature(left, 1, length)
    spectrum = Feature(mels, 1, length)
    half = left // 2
    mixed, mix = _conv(sound, left, 1)
    # The log determinant is worked out by an LU decomposition of an 8 x 8 matrix.
    both = (mix, K.memory("log_determinant", float(sound.size), K.Passes(1, 1, 12, 20)))
    weights = (Tensor(f"convinv.{flow}.conv.weight", left * left, width=left),)
    p = f"WN.{flow}"
    layers = [Layer(f"convinv.{flow}", "flow", weights, both, activation_bytes=float(mixed.size))]
    x, start = _conv(Feature(half, 1, length), channels, 1)
    layers.append(Layer(f"{p}.start", "flow", _normed(f"{p}.start", half, channels, 1), (start, *_ends(x))))
    for i in range(8):
        doubled, inner = _conv(x, 2 * channels, 3)
        _, condition = _conv(spectrum, 2 * channels, 1)
        outs = 2 * channels if i < 7 else channels
        y, outer = _conv(x, outs, 1)
        gate = K.memory("gate", float(x.size), K.Passes(2 + 2 + 1, 2 + 2 + 1 + 2))
        sums = K.memory("sums", float(x.size), K.Passes(6, 6, 2, 4))
        kernels = (inner, *_ends(doubled), condition, *_ends(doubled), gate, outer, *_ends(y), sums)
        parts = (
            *_normed(f"{p}.in_layers.{i}", channels, 2 * channels, 3),
            *_normed(f"{p}.cond_layers.{i}", mels, 2 * channels, 1),
            *_normed(f"{p}.res_skip_layers.{i}", channels, outs, 1),
        )
        saved = 2.0 * doubled.size + 3.0 * x.size
        layers.append(Layer(f"{p}.{i}", "flow", parts, kernels, activation_bytes=saved, boundary_bytes=float(x.size)))
    out, end = _conv(x, 2 * half, 1)
    final = affine(f"{p}.end", channels, 2 * half)
    coupled = K.memory("coupling", float(out.size), K.Passes(8, 12, 6, 10))
    layers.append(Layer(f"{p}.end", "flow", final, (end, *_ends(out), coupled), activation_bytes=2.0 * out.size))
    return layers


def _normed(name: str, n_in: int, n_out: int, window: int) -> tuple[Tensor, ...]:
    """A convolution whose weight is a length and a direction (weight normalisation)."""
    return (
        Tensor(f"{name}.bias", n_out),
        Tensor(f"{name}.weight_g", n_out),
        Tensor(f"{name}.weight_v", n_in * n_out * window, width=n_in * window),
    )


def _ends(y: Feature) -> tuple[Kernel, ...]:
    """The bias, and the kernels of the weight's norm: of the parameters' size, not of the batch's."""
    return (K.memory("bias", float(y.size), BIAS), K.memory("weight_norm", float(y.channels), K.Passes(2, 3)))


_JASPER = tuple(
    (channels, window) for channels, window in ((256, 11), (384, 13), (512, 17), (640, 21), (768, 25)) for _ in range(2)
)


def jasper(frames: int = UTTERANCE) -> Model:
    """Jasper 10x5 dense residual (Li et al., arXiv:1904.03288): ten blocks of five convolutions.

    Every block adds the outputs of all blocks before it, each through a 1x1 convolution. A sample is an utterance.

    >>> round(jasper().parameters / 1e6, 1)
    332.6
    """
    layer, x = _unit(Feature(64, 1, frames, image=True), 256, 11, "encoder.0", length=-(-frames // 2))
    layers = [layer]
    before = [x]
    for number, (channels, window) in enumerate(_JASPER, start=1):
        for i in range(5):
            layer, x = _unit(x, channels, window, f"encoder.{number}.{i}", ending="relu" if i < 4 else "")
            layers.append(layer)
        for i, earlier in enumerate(before):
            layer, _ = _unit(earlier, channels, 1, f"encoder.{number}.res.{i}", ending="add")
            layers.append(layer)
        ending = (K.memory("relu", float(x.size), RELU), K.memory("dropout", float(x.size), K.DROPOUT))
        layers.append(Layer(f"encoder.{number}.out", "residual", (), ending, activation_bytes=1.25 * x.size))
        before.append(x)
    for name, channels, window in (("encoder.11", 896, 29), ("encoder.12", 1024, 1)):
        layer, x = _unit(x, channels, window, name)
        layers.append(layer)
    y, logits = _conv(x, 29, 1)
    # CTC walks over the frames, forward and back, in a kernel each.
    ctc = K.memory("ctc", float(y.size), K.Passes(6, 6, 3, 3))
    layers.append(Layer("decoder", "head", affine("decoder", 1024, 29), (logits, ctc), activation_bytes=3.0 * y.size))
    notes = (f"utterances of {frames} frames",)
    return Model("jasper", "jasper", tuple(layers), seq_len=frames, sample="clip", notes=notes)


def _unit(
    x: Feature, channels: int, window: int, name: str, *, length: int = 0, ending: str = "relu"
) -> tuple[Layer, Feature]:
    """A convolution with BatchNorm, and ReLU and dropout (``"relu"``) or the sum with what it joins (``"add"``)."""
    y, conv = _conv(x, channels, window, length)
    kernels = [conv, K.memory("batch_norm", float(y.size), BATCH_NORM)]
    if ending == "relu":
        kernels += [K.memory("relu", float(y.size), RELU), K.memory("dropout", float(y.size), K.DROPOUT)]
    if ending == "add":
        kernels.append(K.memory("add", float(y.size), K.Passes(3, 0, 1, 0)))
    weight = affine(f"{name}.conv", x.channels * window, channels, bias=False)
    tensors = (*weight, *affine(f"{name}.bn", 1, channels))
    saved = y.size * (2.25 if ending == "relu" else 1.0)
    return Layer(name, "conv", tensors, tuple(kernels), 2 * channels, saved, float(x.size)), y
