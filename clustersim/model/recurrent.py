"""Recurrent networks: GNMT v2 (translation) and Tacotron 2 (speech), as NVIDIA DeepLearningExamples trains them.

An LSTM layer has one product for the inputs of all its steps and, step after step, one small product for its state,
which waits for the step before. Tacotron 2's decoder is written in Python step by step (its next input needs its
attention), so that every step launches its thirty kernels from the host, and backward five times as many.

Lengths are of the data sets: LJSpeech has 13,100 clips of 6.57 s on average and 10.1 s at most (mel frames of 256
samples at 22,050 Hz), and some 100 characters a clip; sentences of WMT16 have some 28 tokens in either language.
"""

from __future__ import annotations

from clustersim.core.model import Kernel, Layer, Model, Tensor
from clustersim.model import kernels as K
from clustersim.model.conv_layers import ConvWindow, Feature, Trunk
from clustersim.model.tensor_parts import affine

GNMT_VOCAB = 32_320
GNMT_TOKENS = 28
GNMT_PADDED = 36
"""Tokens of a sentence, in either language (NVIDIA's script counts both), and of the longest in its batch: batches are
made of pairs whose longer sentence is in the same bucket of ten tokens. Estimates."""

CHARACTERS = 100
SYMBOLS = 148
FRAMES = 566
LONGEST = 850
"""Mel frames of a clip, and of the longest in a batch of dozens, to which the others are padded."""

STEP_LAUNCHES = 30
STEP_BACKWARD_LAUNCHES = 150
"""Kernels of one decoder step besides its products: concatenations, location convolution, tanh, softmax, dropouts;
backward adds up the gradients of every weight and bias at every step."""

_CELL = K.Passes(4 + 1 + 2, 4 + 4 + 3, 0, 0)
"""Gates and cell state in, both states out; cuDNN and torch fuse it into a kernel a step."""


_SMOOTHED = K.Passes(2 + 3 + 1, 1 + 1 + 3 + 5 + 1, 6, 8)
"""Of a loss with smoothed labels over the logits (GNMT/seq2seq/train/smoothing.py): the bias, log_softmax in fp32 and
its mean; backward of the mean, of the gather, their sum, log_softmax and the bias. fp32 elements: what is 16 bits of it
under mixed precision is outweighed by what stays 32."""


def recurrence(name: str, steps: int, hidden: int) -> Kernel:
    """The products of an LSTM's state, one after the other; a step's rows are the batch."""
    flops = 2.0 * steps * hidden * 4 * hidden
    moved = float(steps) * 5 * hidden
    return Kernel(
        name,
        "recurrent",
        m=1,
        n=4 * hidden,
        k=hidden,
        repeat=steps,
        flops=flops,
        backward_flops=2 * flops,
        nbytes=moved,
        backward_nbytes=2 * moved,
        launches=steps,
        backward_launches=steps + 1,
        cut="whole",
    )


def _lstm_kernels(steps: int, n_in: int, hidden: int, suffix: str = "") -> tuple[Kernel, ...]:
    return (
        K.memory(f"dropout{suffix}", float(steps * n_in), K.DROPOUT),
        K.linear(f"gates{suffix}", steps, n_in, 4 * hidden),
        recurrence(f"state{suffix}", steps, hidden),
        K.memory(f"cell{suffix}", float(steps * hidden), _CELL),
    )


def _lstm_tensors(name: str, n_in: int, hidden: int, suffix: str = "") -> tuple[Tensor, ...]:
    return (
        Tensor(f"{name}.weight_ih{suffix}", 4 * hidden * n_in, width=n_in),
        Tensor(f"{name}.weight_hh{suffix}", 4 * hidden * hidden, width=hidden),
        Tensor(f"{name}.bias_ih{suffix}", 4 * hidden),
        Tensor(f"{name}.bias_hh{suffix}", 4 * hidden),
    )


def lstm(name: str, steps: int, n_in: int, hidden: int, *, both_ways: bool = False, residual: bool = False) -> Layer:
    """One layer of torch.nn.LSTM with the dropout of its input, in one direction or in both."""
    ways = ("_l0", "_l0_reverse") if both_ways else ("_l0",)
    kernels = [kernel for suffix in ways for kernel in _lstm_kernels(steps, n_in, hidden, suffix.removeprefix("_l0"))]
    if residual:
        kernels.append(K.memory("residual", float(steps * hidden), K.Passes(3, 3)))
    tensors = tuple(tensor for suffix in ways for tensor in _lstm_tensors(name, n_in, hidden, suffix))
    saved = float(steps) * (1.25 * n_in + 6.0 * hidden) * len(ways)
    return Layer(name, "recurrent", tensors, tuple(kernels), activation_bytes=saved, boundary_bytes=float(steps * n_in))


def gnmt(tokens: int = GNMT_TOKENS, padded: int = GNMT_PADDED) -> Model:
    """GNMT v2 with four layers of 1,024 (DeepLearningExamples PyTorch/Translation/GNMT); a sample is a sentence pair.

    Parameters
    ----------
    tokens : of a sentence. padded : steps it takes, with what it is padded by.

    >>> gnmt().parameters
    160671297
    """
    h = 1024
    t = padded
    embedding = Layer(
        "embedder",
        "embedding",
        (Tensor("encoder.embedder.weight", GNMT_VOCAB * h, width=h),),
        (K.memory("gather", float(2 * t * h), K.Passes(2, 4, 2, 6)),),
        activation_bytes=0.0,
    )
    encoder = (
        lstm("encoder.rnn_layers.0", t, h, h, both_ways=True),
        lstm("encoder.rnn_layers.1", t, 2 * h, h),
        *(lstm(f"encoder.rnn_layers.{i}", t, h, h, residual=True) for i in (2, 3)),
    )
    decoder = (
        lstm("decoder.att_rnn.rnn", t, h, h),
        _bahdanau(t, h),
        *(lstm(f"decoder.rnn_layers.{i}", t, 2 * h, h, residual=i > 0) for i in range(3)),
    )
    head = Layer(
        "classifier",
        "head",
        affine("decoder.classifier", h, GNMT_VOCAB),
        (K.linear("logits", t, h, GNMT_VOCAB), K.memory("cross_entropy", float(t * GNMT_VOCAB), _SMOOTHED)),
        activation_bytes=float(t) * (h + 2 * GNMT_VOCAB),
        boundary_bytes=float(t * h),
    )
    notes = (f"sentences of {tokens} tokens in either language, padded to {t}",)
    return Model(
        "gnmt", "gnmt", (embedding, *encoder, *decoder, head), seq_len=2 * tokens, vocab=GNMT_VOCAB, notes=notes
    )


def _bahdanau(t: int, h: int) -> Layer:
    """Normalised additive attention; NVIDIA's kernel keeps the (t, t, h) sums on the chip."""
    tensors = (
        Tensor("decoder.att_rnn.attn.linear_q.weight", h * h, width=h),
        Tensor("decoder.att_rnn.attn.linear_k.weight", h * h, width=h),
        Tensor("decoder.att_rnn.attn.linear_att", h),
        Tensor("decoder.att_rnn.attn.normalize_scalar", 1),
        Tensor("decoder.att_rnn.attn.normalize_bias", h),
    )
    kernels = (
        K.linear("query", t, h, h),
        K.linear("key", t, h, h),
        K.memory("scores", float(t * t * h), K.Passes(1, 2)),
        K.memory("softmax", float(t * t), K.Passes(4, 4, 2, 2)),
        K.batched("context", 1, t, h, t),
        K.memory("cat", float(2 * t * h), K.Passes(6, 6, 3, 3)),
    )
    saved = float(t) * (4 * h + 2 * t)
    return Layer("decoder.att_rnn.attn", "attention", tensors, kernels, activation_bytes=saved, boundary_bytes=t * h)


def tacotron2(frames: int = FRAMES, longest: int = LONGEST) -> Model:
    """Tacotron 2 (Shen et al., arXiv:1712.05884; DeepLearningExamples PyTorch/SpeechSynthesis/Tacotron2).

    A sample is a clip of ``frames`` mel frames, padded to the ``longest`` of its batch.

    >>> tacotron2().parameters
    28193153
    """
    width = 512
    text = Feature(512, 1, CHARACTERS)
    gather = (K.memory("gather", float(CHARACTERS * width), K.Passes(2, 4, 1, 3)),)
    layers = [Layer("embedding", "embedding", (Tensor("embedding.weight", SYMBOLS * width, width=width),), gather)]
    layers += _convolutions("encoder.convolutions", text, (width,) * 3)
    layers.append(lstm("encoder.lstm", CHARACTERS, width, width // 2, both_ways=True))
    layers += _decoder(longest)
    mel = Feature(80, 1, longest)
    layers += _convolutions("postnet.convolutions", mel, (512, 512, 512, 512, 80))
    loss = (K.memory("mse", 3.0 * mel.size, K.Passes(4, 4, 6, 6)),)
    layers.append(Layer("loss", "loss", (), loss, activation_bytes=3.0 * mel.size, boundary_bytes=float(mel.size)))
    notes = (f"clips of {frames} frames padded to {longest}",)
    return Model("tacotron2", "tacotron2", tuple(layers), seq_len=frames, sample="clip", notes=notes)


def _convolutions(name: str, x: Feature, channels: tuple[int, ...]) -> list[Layer]:
    """Convolutions over five places with bias, BatchNorm and dropout."""
    layers = []
    trunk = Trunk(x)
    for i, n in enumerate(channels):
        trunk.conv(n, ConvWindow((1, 5), padding=(0, 2)), f"{name}.{i}.0.conv", f"{name}.{i}.1")
        layer = trunk.layers[-1]
        size = trunk.x.size
        tensors = (*layer.tensors, Tensor(f"{name}.{i}.0.conv.bias", n))
        kernels = (*layer.kernels, K.memory("dropout", float(size), K.DROPOUT))
        saved = layer.activation_bytes + 1.25 * size
        layers.append(Layer(layer.name, "conv", tensors, kernels, 2 * n, saved, layer.boundary_bytes))
    return layers


_FILTERS = (32, 31)
"""Of the attention's locations: how many, and their window."""


def _decoder(steps: int) -> list[Layer]:
    """The pre-net over all frames at once, and then the loop: two LSTM cells and location-sensitive attention."""
    p = "decoder"
    memory = 512
    h = 1024
    a = 128
    filters = _FILTERS[0]
    square = float(steps * CHARACTERS)
    kernels = (
        K.linear("prenet_0", steps, 80, 256),
        K.linear("prenet_1", steps, 256, 256),
        K.linear("memory", CHARACTERS, memory, a),
        _stepwise("attention_input", steps, 256 + memory, 4 * h),
        _stepwise("decoder_input", steps, h + memory, 4 * h),
        recurrence("attention_state", steps, h),
        recurrence("decoder_state", steps, h),
        _stepwise("query", steps, h, a),
        _stepwise("projection", steps, h + memory, 80),
        # Sum, tanh and the product with v over (characters, 128) at every step; the location's own features.
        K.memory("energies", square * (2 * a + filters), K.Passes(6, 9, 0, 0)),
        K.memory("context", float(steps) * CHARACTERS * memory, K.Passes(1, 3, 0, 0)),
        K.memory("steps", float(steps) * 8 * h, K.Passes(3, 6, STEP_LAUNCHES * steps, STEP_BACKWARD_LAUNCHES * steps)),
    )
    saved = square * 3 * a + float(steps) * 16 * h
    tensors = _decoder_tensors(p, memory, h, a)
    return [Layer(p, "recurrent", tensors, kernels, activation_bytes=saved, boundary_bytes=float(steps * 80))]


def _decoder_tensors(p: str, memory: int, h: int, a: int) -> tuple[Tensor, ...]:
    """Of the pre-net, the two LSTM cells of width ``h``, attention of width ``a`` over the memory, and both outputs."""
    filters, window = _FILTERS
    return (
        *(Tensor(f"{p}.prenet.layers.{i}.linear_layer.weight", n * 256, width=n) for i, n in enumerate((80, 256))),
        *_lstm_tensors(f"{p}.attention_rnn", 256 + memory, h),
        Tensor(f"{p}.attention_layer.query_layer.linear_layer.weight", h * a),
        Tensor(f"{p}.attention_layer.memory_layer.linear_layer.weight", memory * a),
        Tensor(f"{p}.attention_layer.v.linear_layer.weight", a),
        Tensor(f"{p}.attention_layer.location_layer.location_conv.conv.weight", 2 * filters * window),
        Tensor(f"{p}.attention_layer.location_layer.location_dense.linear_layer.weight", filters * a),
        *_lstm_tensors(f"{p}.decoder_rnn", h + memory, h),
        *affine(f"{p}.linear_projection.linear_layer", h + memory, 80),
        *affine(f"{p}.gate_layer.linear_layer", h + memory, 1),
    )


def _stepwise(name: str, steps: int, n_in: int, n_out: int) -> Kernel:
    """A linear layer inside a loop over steps: as many products, each with the batch for rows."""
    flops = 2.0 * steps * n_in * n_out
    moved = float(steps) * (n_in + n_out)
    return Kernel(
        name,
        "gemm",
        m=1,
        n=n_out,
        k=n_in,
        repeat=steps,
        flops=flops,
        backward_flops=2 * flops,
        nbytes=moved,
        backward_nbytes=2 * moved,
        launches=steps,
        backward_launches=2 * steps,
        saved=float(steps * n_in),
        cut="whole",
    )
