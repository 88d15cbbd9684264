"""FastPitch 1.1 (Lancucki, arXiv:2006.06873), as NVIDIA DeepLearningExamples trains it on LJSpeech.

Two stacks of six blocks, one over a clip's characters and one over its mel frames, in which convolutions over three
places follow the attention; between them predictors of duration, pitch and energy, and an aligner that learns which
frames belong to which character (Badlani et al., arXiv:2108.10447). Lengths are Tacotron 2's, of the same clips.
"""

from __future__ import annotations

from clustersim.core.model import Kernel, Layer, Model, Tensor
from clustersim.model import kernels as K
from clustersim.model.conv_layers import ADD, BIAS, RELU, Feature, convolution
from clustersim.model.recurrent import CHARACTERS, FRAMES, LONGEST, SYMBOLS
from clustersim.model.tensor_parts import affine

WIDTH = 384
HEAD = 64
FILTERS = 1536
PREDICTED = 256
MELS = 80
"""Of the blocks, their one head, the convolutions inside them, the predictors, and of a mel frame."""

_NORM = K.NORM["layernorm", False]
_MASK = K.Passes(2, 2)
"""Padding is set to nothing after attention and after the convolutions."""


def fastpitch(frames: int = FRAMES, longest: int = LONGEST) -> Model:
    """FastPitch 1.1 with energy; a sample is a clip of ``frames`` mel frames, padded to the ``longest`` of its batch.

    The aligner's best path, which the script looks for on the CPU, is not counted.

    >>> fastpitch().parameters
    46266420
    """
    gather = (K.memory("gather", float(CHARACTERS * WIDTH), K.Passes(2 + 3, 4 + 2, 3, 4)),)
    layers = [
        Layer(
            "encoder.word_emb", "embedding", (Tensor("encoder.word_emb.weight", SYMBOLS * WIDTH, width=WIDTH),), gather
        )
    ]
    layers += [_block(f"encoder.layers.{i}", CHARACTERS) for i in range(6)]
    layers += [_predictor(name) for name in ("duration_predictor", "pitch_predictor", "energy_predictor")]
    layers += [_embedding("pitch_emb"), _embedding("energy_emb"), _aligner(longest)]
    layers += [_block(f"decoder.layers.{i}", longest) for i in range(6)]
    out = (K.linear("proj", longest, WIDTH, MELS), K.memory("mse", float(longest * MELS), K.Passes(4, 4, 4, 4)))
    layers.append(
        Layer("proj", "head", affine("proj", WIDTH, MELS), out, 0, 2.0 * longest * MELS, float(longest * WIDTH))
    )
    notes = (f"clips of {frames} frames padded to {longest}",)
    return Model("fastpitch", "fastpitch", tuple(layers), seq_len=frames, sample="clip", notes=notes)


def _conv(name: str, steps: int, n_in: int, n_out: int, window: int) -> tuple[tuple[Kernel, ...], tuple[Tensor, ...]]:
    x = Feature(n_in, 1, steps)
    y = Feature(n_out, 1, steps)
    kernels = (convolution(x, y, (1, window), 1), K.memory("bias", float(y.size), BIAS))
    return kernels, affine(name, n_in * window, n_out)


def _block(name: str, steps: int) -> Layer:
    """Attention of one head, then two convolutions, each with its residual, LayerNorm and mask."""
    elements = float(steps * WIDTH)
    square = float(steps * steps)
    end = (
        K.memory("dropout", elements, K.DROPOUT),
        K.memory("residual", elements, ADD),
        K.memory("norm", elements, _NORM),
        K.memory("mask", elements, _MASK),
    )
    attention = (
        K.linear("qkv", steps, WIDTH, 3 * HEAD),
        K.memory("copies", 4.0 * steps * HEAD, K.Passes(2, 2, 4, 4)),
        K.batched("scores", 1, steps, steps, HEAD),
        *(K.memory(op, square, passes) for op, passes in K.SCORES["bert"].items()),
        K.memory("dropout_scores", square, K.DROPOUT),
        K.batched("context", 1, steps, HEAD, steps),
        K.linear("out", steps, HEAD, WIDTH),
    )
    first, wide = _conv(f"{name}.pos_ff.CoreNet.0", steps, WIDTH, FILTERS, 3)
    second, narrow = _conv(f"{name}.pos_ff.CoreNet.2", steps, FILTERS, WIDTH, 3)
    moved = K.memory("transpose", 2 * elements, K.Passes(2, 2))
    relu = K.memory("relu", float(steps * FILTERS), RELU)
    p = f"{name}.dec_attn"
    tensors = (
        *affine(f"{p}.qkv_net", WIDTH, 3 * HEAD),
        *affine(f"{p}.o_net", HEAD, WIDTH, bias=False),
        *affine(f"{p}.layer_norm", 1, WIDTH),
        *wide,
        *narrow,
        *affine(f"{name}.pos_ff.layer_norm", 1, WIDTH),
    )
    saved = 8.0 * elements + 2.0 * steps * FILTERS + 2.5 * square
    kernels = (*attention, *end, moved, *first, relu, *second, *end)
    return Layer(name, "block", tensors, kernels, activation_bytes=saved, boundary_bytes=elements)


def _predictor(name: str) -> Layer:
    """Two convolutions over the characters with ReLU, LayerNorm and dropout, and a number for each."""
    kernels: list[Kernel] = []
    tensors: list[Tensor] = []
    size = float(CHARACTERS * PREDICTED)
    for i, n_in in enumerate((WIDTH, PREDICTED)):
        conv, weights = _conv(f"{name}.layers.{i}.conv", CHARACTERS, n_in, PREDICTED, 3)
        after = (("relu", RELU), ("norm", _NORM), ("dropout", K.DROPOUT))
        kernels += [*conv, *(K.memory(op, size, passes) for op, passes in after)]
        tensors += [*weights, *affine(f"{name}.layers.{i}.norm", 1, PREDICTED)]
    kernels += [K.linear("fc", CHARACTERS, PREDICTED, 1), K.memory("mse", float(CHARACTERS), K.Passes(4, 4, 6, 6))]
    tensors += affine(f"{name}.fc", PREDICTED, 1)
    return Layer(name, "conv", tuple(tensors), tuple(kernels), 0, 6.5 * size, float(CHARACTERS * WIDTH))


def _embedding(name: str) -> Layer:
    """A pitch or an energy for each character, as a vector that is added to the character's."""
    kernels, tensors = _conv(name, CHARACTERS, 1, WIDTH, 3)
    added = K.memory("add", float(CHARACTERS * WIDTH), ADD)
    return Layer(name, "embedding", tensors, (*kernels, added), activation_bytes=2.0 * CHARACTERS * WIDTH)


def _aligner(steps: int) -> Layer:
    """Distances between every frame and every character, and the loss of all ways from one to the next (CTC)."""
    kernels: list[Kernel] = []
    tensors = [*affine("attention.attn_proj", MELS, 1)]
    sizes = {
        "key": (CHARACTERS, ((WIDTH, 2 * WIDTH, 3), (2 * WIDTH, MELS, 1))),
        "query": (steps, ((MELS, 2 * MELS, 3), (2 * MELS, MELS, 1), (MELS, MELS, 1))),
    }
    for name, (length, convs) in sizes.items():
        for i, (n_in, n_out, window) in enumerate(convs):
            conv, weights = _conv(f"attention.{name}_proj.{2 * i}.conv", length, n_in, n_out, window)
            kernels += [*conv, *((K.memory("relu", float(length * n_out), RELU),) if i < len(convs) - 1 else ())]
            tensors += weights
    square = float(steps * CHARACTERS)
    # Differences of all pairs in 80 channels are written out, squared and added up.
    kernels.append(K.memory("distances", square * MELS, K.Passes(1 + 2 + 1, 1 + 3 + 2, 3, 4)))
    kernels.append(K.memory("soft", square, K.Passes(3 + 3 + 2 + 3, 3 + 3 + 2, 6, 6)))
    kernels.append(K.memory("ctc", square, K.Passes(6, 6, 6, 6)))
    kernels.append(K.memory("regulate", float(steps * WIDTH), K.Passes(2, 2)))
    return Layer("attention", "attention", tuple(tensors), tuple(kernels), 0, square * (2 * MELS + 4))
