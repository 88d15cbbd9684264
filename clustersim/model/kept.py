"""What PyTorch's autograd keeps of a transformer's ops, and what their backward holds at once, byte for byte.

Op by op, as Hugging Face's modeling files write them; kernels that a compiler or Megatron-LM fuses keep what
:mod:`clustersim.model.kernels` says. A number is of bytes per element in 16 bits, under autocast and in fp32, which is
not one number times the element: an upcast is kept beside its source, and autocast's fp32 stream is cast again by every
product that reads it. Checked with torch's own MemTracker (tests/test_bytes_torch.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from clustersim.core.model import ByteSizes, Kernel
from clustersim.model import kernels as K
from clustersim.model import streams
from clustersim.model.base import TransformerShape
from clustersim.model.families import families

Kernels = tuple[Kernel, ...]


class _Rule(NamedTuple):
    """Bytes per element: ``kept`` for backward, and ``working``, which backward holds beside what is kept."""

    kept: ByteSizes
    working: ByteSizes = (0.0, 0.0, 0.0)


NOTHING = (0.0, 0.0, 0.0)
ONE = (2.0, 2.0, 4.0)
"""One tensor in the type of the products."""
RMS_NORM = _Rule((6.0, 8.0, 8.0), (12.0, 16.0, 16.0))
"""The fp32 copy of its input and what is scaled by the weight; backward's products in fp32."""
NARROW_RMS_NORM = _Rule((6.0, 6.0, 8.0), (12.0, 12.0, 16.0))
"""The same of what a product has just made, which is 16 bits under autocast, too."""
WIDE_RMS_NORM = _Rule((8.0, 8.0, 8.0), (16.0, 16.0, 16.0))
"""Of one that multiplies by its weight in fp32, what it scales is kept in fp32."""
LAYER_NORM = _Rule((2.0, 4.0, 4.0), (4.0, 8.0, 8.0))
"""Its input, which autocast takes in fp32."""
ACTIVATION = {
    "gelu": _Rule(ONE, (4.0, 4.0, 8.0)),
    "relu": _Rule(NOTHING, (4.0, 4.0, 8.0)),
    "gelu_new": _Rule((8.0, 14.0, 16.0), (6.0, 12.0, 12.0)),
    "swiglu": _Rule((6.0, 6.0, 12.0), (6.0, 6.0, 12.0)),
    "geglu": _Rule((6.0, 6.0, 12.0), (6.0, 6.0, 12.0)),
}
"""Between an MLP's products: the last one keeps the output. ReLU needs nothing but that; ``gelu_new`` is a formula of
eight ops, of which four keep something: three of them in fp32 under autocast, which takes powers in it
(aten/src/ATen/autocast_mode.h, ``AT_FORALL_FP32``)."""
LIGER_GATE = _Rule((4.0, 4.0, 8.0), (4.0, 4.0, 8.0))
"""Gate and what it scales, whose gradients take their place (liger_kernel/ops/swiglu.py)."""
WIDE_SOFTMAX = _Rule((4.0, 4.0, 4.0), (8.0, 8.0, 8.0))
"""Softmax in fp32, cast back for the product behind it (Llama and its kin, OPT, ViT)."""
SOFTMAX = _Rule((2.0, 4.0, 4.0), (4.0, 8.0, 8.0))
"""Softmax in the scores' type, which autocast makes fp32 (GPT-2, BERT, MPT)."""
NARROW = frozenset({"gpt2", "bert"})
"""Ways of writing scores that have it; Hugging Face's ViT writes them as BERT and casts."""
STREAMS = {
    "streams_weights": _Rule((4.0, 4.0, 4.0), (16.0, 16.0, 16.0)),
    "streams_in": _Rule((2.0, 0.0, 0.0), (8.0, 8.0, 8.0)),
    "streams_spread": _Rule(NOTHING),
    "streams_mean": _Rule(NOTHING),
    "streams_gates": _Rule(ONE, (6.0, 6.0, 12.0)),
}
"""Of hyper-connections: streams in fp32, which the weights are made of, beside themselves where they are 16 bits; the
gradients of product and norm, and of the sum, in fp32."""
NORMS = frozenset({"qk_norm", "q_latent_norm", "kv_latent_norm", "embedding_norm", "hidden_norm", "transform_norm"})
ACTIVATIONS = frozenset({"activation", "expert_activation", "shared_activation", "transform_activation"})
MASK = (1.0, 1.0, 1.0)
"""A dropout's mask, a byte an element."""
LOSS = _Rule((4.0, 4.0, 4.0), (8.0, 8.0, 8.0))
"""Log-softmax of fp32 logits; in backward its gradient and that of the logits beside it: 12 bytes."""
MEGATRON_LOSS = _Rule((4.0, 4.0, 4.0), (2.0, 2.0, 0.0))
"""Megatron-LM's: fp32 exponentials in place of the logits, which become the gradient, cast to 16 bits in backward."""
NARROW_LOSS = _Rule((2.0, 4.0, 4.0), (4.0, 8.0, 8.0))
"""The same of logits that nobody casts (masked language models)."""


def with_bytes(s: TransformerShape, kernels: Iterable[Kernel]) -> Kernels:
    """The kernels of a layer with their ``kept`` and ``working`` bytes; their ``saved`` says the same in 16 bits."""
    if s.fuses:
        return tuple(_fused(s, kernel) for kernel in kernels)
    return tuple(_ruled(s, kernel) for kernel in kernels)


def _fused(s: TransformerShape, kernel: Kernel) -> Kernel:
    """A fused norm keeps its input, which is fp32 under autocast; Megatron-LM's loss has a rule of its own."""
    if s.implementation == "megatron" and kernel.name == "cross_entropy":
        return _ruled(s, kernel)
    if not kernel.name.endswith(("norm_1", "norm_2", "norm_3")) or not kernel.saved:
        return kernel
    return replace(kernel, kept=(2.0 * kernel.saved, 4.0 * kernel.saved, 4.0 * kernel.saved))


def _ruled(s: TransformerShape, kernel: Kernel) -> Kernel:
    elements, rule = _rule_of(s, kernel)
    kept = tuple(elements * size for size in rule.kept)
    working = tuple(elements * size for size in rule.working)
    saved = kernel.saved if kernel.cut == "vocab" and kernel.kind == "memory" else kept[0] / 2.0
    return replace(kernel, saved=saved, kept=kept, working=working)  # type: ignore[arg-type]


def _rule_of(s: TransformerShape, kernel: Kernel) -> tuple[float, _Rule]:
    """How many elements a rule is of, and the rule."""
    name = kernel.name
    if kernel.cut == "vocab" and kernel.kind == "memory":
        wide = s.head == "lm" or s.fused_loss
        plain = LOSS if wide else NARROW_LOSS
        return kernel.saved / 2.0, MEGATRON_LOSS if s.implementation == "megatron" else plain
    if kernel.kind == "gemm" and not kernel.batch:
        return _product(kernel)
    own = s.fused_norms or s.implementation == "liger"
    if own and (name in NORMS or name.startswith("norm")) and s.norm == "rmsnorm":
        return kernel.nbytes / K.NORM[s.norm, True].forward, LAYER_NORM
    if name in NORMS or name.startswith("norm"):
        usual = LAYER_NORM if s.norm == "layernorm" else RMS_NORM
        rule = NARROW_RMS_NORM if K.is_narrow_norm(s, name) else usual
        if s.wide_norms and s.norm == "rmsnorm":
            return kernel.nbytes / K.WIDE_PASSES, WIDE_RMS_NORM
        return kernel.nbytes / K.NORM[s.norm, False].forward, rule
    between = ACTIVATION.get(_activation(s, name)) if name in ACTIVATIONS else None
    if between is not None and _of_mlp(s, kernel):
        return kernel.nbytes / _passes(s, name), LIGER_GATE if s.gated and s.implementation == "liger" else between
    if streams.is_of_streams(kernel):
        return streams.elements(s), _of_streams(s, name)
    if name == "softmax":
        return float(s.heads) * s.seq_len * s.keys, SOFTMAX if _is_narrow(s) else WIDE_SOFTMAX
    if name == "context":
        return _context(s, kernel)
    if name == "scores":
        return float(s.seq_len) * s.heads * (2 * s.head_dim + s.value_dim), _Rule(ONE)
    if name.endswith("dropout") and kernel.saved:
        return 2.0 * kernel.saved, _Rule(MASK, ONE)
    return kernel.saved, _Rule(ONE)


def _of_streams(s: TransformerShape, name: str) -> _Rule:
    """Of a kernel of hyper-connections, for each element of all streams. A half's output is kept in fp32, for the
    gradient of its weights; where streams are mixed, as it is, and what the norm scales beside its input, and every
    matrix on the way to the one that mixes them, with its sums."""
    as_it_is = bool(s.sinkhorn or s.streams_rank)
    output = tuple((size if as_it_is else 4.0) / s.streams for size in ONE)
    if s.sinkhorn and name == "streams_weights":
        return _Rule((8.0, 8.0, 8.0), STREAMS[name].working)
    if name == "streams_matrix":
        matrices = 2.0 + (1.0 + 1.0 / s.streams) * streams.divisions(s)
        share = 4.0 * s.streams / s.d_model
        return _Rule((matrices * share,) * 3, (3 * share,) * 3)
    return STREAMS.get(name, _Rule((output[0], output[1], output[2]), (12.0, 8.0, 8.0)))


def _is_narrow(s: TransformerShape) -> bool:
    return families()[s.family].scores in NARROW and s.family != "vit_hf"


def _product(kernel: Kernel) -> tuple[float, _Rule]:
    """A linear keeps its input, of which autocast makes one cast for every product that reads it."""
    rows = kernel.flops / (2.0 * kernel.n * kernel.k)
    grows = (kernel.n + kernel.k) / kernel.k
    return rows * kernel.k, _Rule(ONE if kernel.saved else (0.0, 2.0, 0.0), (2.0 * grows, 2.0 * grows, 4.0 * grows))


def _context(s: TransformerShape, kernel: Kernel) -> tuple[float, _Rule]:
    """The product of scores and values keeps the scores as it reads them: what softmax left, unless they were cast or
    dropped since."""
    square = float(s.heads) * s.seq_len * s.keys
    if s.attn_dropout:
        return square, _Rule((3.0, 3.0, 5.0), (4.0, 4.0, 8.0))
    cast = (0.0, 2.0, 0.0) if _is_narrow(s) else (2.0, 2.0, 0.0)
    return square, _Rule(cast, ONE)


def _activation(s: TransformerShape, name: str) -> str:
    return "gelu" if name == "transform_activation" else s.activation


def _of_mlp(s: TransformerShape, kernel: Kernel) -> bool:
    """Whether it is an MLP's, and not that of what mixes tokens, which may be another."""
    if kernel.name == "transform_activation":
        return True
    passes = K.activation_passes(s)
    return abs(kernel.saved * passes.forward - kernel.nbytes * (passes.saved - 1)) <= 1e-9 * kernel.nbytes


def _passes(s: TransformerShape, name: str) -> float:
    return K.ACTIVATION["gelu"].forward if name == "transform_activation" else K.activation_passes(s).forward
