"""The GPU kernels of a transformer's parts, with the bytes the framework's own op list moves.

Op by op, :func:`moved` says of every operator which tensors it reads and writes, each with its element's type. Where
all are of the products' type, one *pass* reads or writes a tensor once: a LayerNorm forward is two passes over its
input, in bf16 ``4 T h`` bytes over ``T h`` values. Counts follow the ops of Hugging Face's modeling files and PyTorch's
autograd formulas; ``eager`` launches each op, ``fused`` is what torch.compile or Triton kernels leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import msgspec

from clustersim.core.model import ByteSizes, Kernel
from clustersim.model.base import TransformerShape

Kernels = tuple[Kernel, ...]


class Passes(msgspec.Struct, frozen=True):
    """Passes over the op's elements in 16 bits and kernels launched, forward and backward; ``saved`` tensors kept
    between. ``element``, ``backward_element`` : bytes of a pass by type, as a Kernel has them."""

    forward: float
    backward: float
    launches: int = 1
    backward_launches: int = 1
    saved: float = 1.0
    element: ByteSizes | None = None
    backward_element: ByteSizes | None = None


TYPES: Mapping[str, ByteSizes] = {"h": (2.0, 2.0, 4.0), "s": (2.0, 4.0, 4.0), "w": (4.0, 4.0, 4.0)}
"""Bytes of an element in 16 bits, under autocast and in fp32: of what products make (``h``), of the stream between
blocks and what autocast promotes to it (``s``), of what is fp32 in all (``w``)."""
HALVES, STREAM = TYPES["h"], TYPES["s"]


def moved(operators: str) -> ByteSizes:
    """Bytes an element of operators, by type: ``"hh:h"`` reads two tensors of type h and writes one, ``"h~w"`` casts
    and is no operator where both types are one, ``"0.5*h:h"`` is over half of the elements.

    >>> moved("s~w w:w w: w:w w~s s:s"), moved("hh:h 0.5*h:h")
    ((36.0, 28.0, 28.0), (8.0, 8.0, 16.0))
    """
    total = [0.0, 0.0, 0.0]
    for operator in operators.split():
        share, _, tensors = operator.rpartition("*")
        for i in range(3):
            sizes = [TYPES[letter][i] for letter in tensors if letter in TYPES]
            skipped = "~" in tensors and len(set(sizes)) == 1
            total[i] += 0.0 if skipped else float(share or 1) * sum(sizes)
    return total[0], total[1], total[2]


def operators(forward: str, backward: str, launches: int, backward_launches: int, saved: float = 1.0) -> Passes:
    """The passes of operators that are written as :func:`moved` reads them."""
    (ahead, element), (back, backward_element) = map(_passes_of, (moved(forward), moved(backward)))
    return Passes(ahead, back, launches, backward_launches, saved, element, backward_element)


def _passes_of(nbytes: ByteSizes) -> tuple[float, ByteSizes | None]:
    """Passes in 16 bits, and what each is on average in bytes by type."""
    passes = nbytes[0] / 2.0
    return passes, (2.0, nbytes[1] / passes, nbytes[2] / passes) if passes else None


RMS_FORWARD = "s~w w:w w: w:w w~s s:s"
RMS_BACKWARD = "s:s ss:s s: s~w w:w ww:w w: :w w:w w:w ww:w ww:w w~s"
"""RMSNorm written out casts to fp32, squares, averages, scales, casts back and multiplies. Backward has the gradients
of the weight's product with a sum; of the scaling, with a sum; of the mean, spread out; of the square (``pow`` to the
first, doubled, multiplied); and the sum of the two: 36 and 92 bytes a bf16 element (traced)."""
NARROW_FORWARD = "h~w w:w w: w:w w~h h:s"
NARROW_BACKWARD = "s:s s~h sh:s s: h~w w:w ww:w w: :w w:w w:w ww:w ww:w w~h"
"""The same of what a product has just made, under autocast 16 bits, too."""
WIDE_FORWARD = "s~w w:w w: w:w w:w w~s"
WIDE_BACKWARD = "s~w w:w ww:w w: w:w ww:w w: :w w:w w:w ww:w ww:w w~s"
"""RMSNorm that multiplies by its weight in fp32 and casts back behind it: 40 and 104 bytes a bf16 element (traced)."""
WIDE_PASSES = moved(WIDE_FORWARD)[0] / 2.0
# Backward of a LayerNorm reads the output gradient and the input twice (input gradient, then weight gradients).
NORM_OPERATORS = {
    # Norm, in one kernel, of what a product has just made: forward and backward.
    ("layernorm", False, False): ("s:s", "sss:s s"),
    ("layernorm", True, False): ("s:s", "sss:s s"),
    ("rmsnorm", False, False): (RMS_FORWARD, RMS_BACKWARD),
    ("rmsnorm", False, True): (NARROW_FORWARD, NARROW_BACKWARD),
    ("rmsnorm", True, False): ("s:s", "sss"),
    ("rmsnorm", True, True): ("h:h", "hhh"),
}
NORM = {
    ("layernorm", False): operators(*NORM_OPERATORS["layernorm", False, False], 1, 2),
    ("rmsnorm", False): operators(*NORM_OPERATORS["rmsnorm", False, False], 6, 12, saved=3),
    ("layernorm", True): Passes(2, 3, 1, 2),
    ("rmsnorm", True): Passes(2, 3, 1, 2),
}
# Passes over d_ff elements. gelu_new is a Python formula of eight ops; SwiGLU is silu and a product.
ACTIVATION = {
    "gelu": Passes(2, 3, saved=2),
    "relu": Passes(2, 3, saved=1),
    "gelu_new": operators(
        # Autocast takes the power in fp32, and so all behind it; the product that reads it casts back.
        "h~s s:s s:s hs:s s:s s:s s:s h:h hs:s s~h",
        "h~s ss:s s~h sh:s ss:s s:s s~h s:s s:s s:s ss:s s~h h:h hh:h hh:h",
        8,
        11,
        saved=5,
    ),
    "relu2": Passes(4, 6, 2, 3, saved=3),
    "silu": Passes(2, 3, saved=2),
    "quick_gelu": Passes(5, 8, 3, 4, saved=3),
    "xielu": Passes(12, 18, 8, 12, saved=4),
    "swiglu": Passes(5, 9, 2, 3, saved=4),
    "geglu": Passes(5, 9, 2, 3, saved=4),
}
FUSED_GATE = Passes(3, 5, 1, 1, saved=3)
# Over logits: the cast to fp32 and log-softmax; its gradient of a gradient that is spread out, and the cast back. What
# a target reads and writes is nothing beside. Masked language models do not cast. One Triton kernel reads logits once,
# and in backward once more to write their gradient; Liger's reads them twice and writes it in forward. Megatron's
# (core/tensor_parallel/cross_entropy.py) casts 16-bit logits to fp32 and makes five fp32 passes over them, and backward
# two: 19 and 7 passes if each went to memory. Its last stages on V100 (LiBai's tables) take half of that.
CROSS_ENTROPY = {
    "eager": operators("h~w w:w", ":w ww:w w~h", 4, 6),
    "masked": operators("h~s s:s", ":s ss:s s~h", 4, 6),
    "fused": operators("h:", "h:h", 1, 1),
    "megatron": Passes(10, 4, 6, 3),
    "liger": Passes(3, 0, 1, 0, element=HALVES),
}
CROSS_ENTROPY["flash"] = CROSS_ENTROPY["eager"]
# Rotation of queries and keys: two products, the negated half, its join, a sum. Backward puts each half into zeros,
# sums three gradients, and copies what is laid out by heads back to rows. Autocast multiplies by fp32 cosines.
ROTARY = {
    False: operators("h:s 0.5*h:h h:h h:s ss:s s~h", "h~s s:s s~h s:s s~h 0.5*h:h h:h h:h hh:h hh:h h:h", 5, 10),
    True: Passes(2, 2, 1, 1),
}
# By fp32 cosines whatever the type of queries, and a cast back behind the sum (OLMo 2).
WIDE_ROTARY = operators("h:w 0.5*h:h h:h h:w ww:w w~h", "h~w w:w w~h w:w w~h 0.5*h:h h:h h:h hh:h hh:h h:h", 6, 11)


def rotary_join(share: float) -> Passes:
    """The join of a head's rotated share with its other elements, over all of them.

    Backward puts each part into zeros, sums the two, and copies to rows what :data:`ROTARY` does not: 2 and 9 - 2
    ``share`` passes of 16 bits, as torch's dispatcher counts them at shares of a quarter, a half and three quarters.
    """
    rest = 1.0 - share
    backward = f":h {share:g}*h:h :h {rest:g}*h:h hh:h {rest:g}*h:h {rest:g}*h~s"
    return operators(f"s:s {rest:g}*s~h", backward, 1, 5)


# Passes over the attention scores, op by op, as each family's Hugging Face code has them. A select (GPT-2's causal
# mask) has a gradient pass, an added mask has none, and torch.max's gradient (OPT's clamp) is five kernels. Llama's
# softmax runs in fp32 and casts back; GPT-2's does so under autocast alone.
WIDE_SOFTMAX = operators("s~w w:w w~h", "h~w ww:w w~s", 2, 3)
NARROW_SOFTMAX = operators("h~s s:s s~h", "h~s ss:s s~h", 1, 1)
SCORES = {
    "gpt2": {"scale": Passes(2, 2), "mask": Passes(2, 2), "softmax": NARROW_SOFTMAX},
    "opt": {"mask": Passes(2, 0, 1, 0), "clamp": Passes(2, 10, 1, 5), "softmax": NARROW_SOFTMAX},
    "bert": {"scale": Passes(2, 2), "mask": Passes(2, 0, 1, 0), "softmax": NARROW_SOFTMAX},
    "llama": {"scale": Passes(2, 2), "mask": operators("h:s", "s~h", 1, 0), "softmax": WIDE_SOFTMAX},
}
# A dropout mask is one byte per element, a quarter of an fp32 pass, half of a 16-bit element kept for backward.
DROPOUT = Passes(2.25, 2.25)
EAGER_LOSS = 12
FUSED_LOSS = 4
"""Bytes of a 16-bit logit at the most: log-softmax and two gradients in fp32; in one kernel, the logit and its gradient
(pytorch/torchtitan PR 1033; Dao-AILab/quack issue 48)."""
MEGATRON_LOSS = 4
"""Megatron-LM's, whether tensor parallelism divides the vocabulary or not: logits are cast to fp32, and exponentials,
softmax and gradient take their place one after the other (core/tensor_parallel/cross_entropy.py)."""
MASK = 0.5

LINEAR_CUTS = dict.fromkeys(("q", "k", "v", "qkv", "gate", "up"), "column")
LINEAR_CUTS |= {"out": "row", "down": "row", "logits": "vocab"}
"""How tensor parallelism cuts the linears of a transformer, by name; others are whole on every rank."""


def memory(
    name: str, elements: float, passes: Passes, times: int = 1, *, cut: str = "sequence", saved: float = 0.0
) -> Kernel:
    """A bandwidth-bound op over ``elements`` values per sample, launched ``times`` times.

    ``saved`` : tensors of that many elements it keeps for backward.
    """
    return Kernel(
        name,
        "memory",
        nbytes=passes.forward * elements * times,
        backward_nbytes=passes.backward * elements * times,
        launches=passes.launches * times,
        backward_launches=passes.backward_launches * times,
        cut=cut,
        saved=saved * elements,
        element=passes.element,
        backward_element=passes.backward_element,
    )


def kept(kernels: Sequence[Kernel]) -> float:
    """Elements per sample that kernels keep for backward, each its own: ``17 s h`` of a block with dropout (34 bytes in
    16 bits) plus ``2.5 a s^2`` of eager attention (Korthikanti et al., arXiv:2205.05198)."""
    return float(sum(kernel.saved for kernel in kernels))


def saved_by_operator(kernels: Sequence[Kernel]) -> frozenset[int]:
    """Places of the kernels whose output torchtitan's selective checkpointing by operator keeps.

    Fused attention, and every second product. A router is computed again and not counted among them; grouped products
    of experts are not in the list (torchtitan 0.3 distributed/activation_checkpoint.py, ``_op_sac_save_list`` and
    ``per_op_sac_force_recompute_mm_shapes_by_fqns``).
    """
    products = [i for i, kernel in enumerate(kernels) if kernel.kind == "gemm" and kernel.repeat == 1]
    counted = [i for i in products if kernels[i].name != "router"]
    return frozenset(counted[::2]) | {i for i, kernel in enumerate(kernels) if kernel.kind == "attention"}


def linear(name: str, tokens: int, n_in: int, n_out: int, flop_tokens: float | None = None) -> Kernel:
    """A dense layer on ``tokens`` rows per sample; backward is one GEMM each for input and weight gradients.

    It keeps its input, which the weight gradient needs.
    """
    rows = float(tokens if flop_tokens is None else flop_tokens)
    flops = 2.0 * rows * n_in * n_out
    moved = rows * (n_in + n_out)
    return Kernel(
        name,
        "gemm",
        m=tokens,
        n=n_out,
        k=n_in,
        flops=flops,
        backward_flops=2 * flops,
        nbytes=moved,
        backward_nbytes=2 * moved,
        cut=LINEAR_CUTS.get(name, "sequence"),
        saved=rows * n_in,
    )


def sharing_input(kernel: Kernel) -> Kernel:
    """A linear whose input another one keeps for backward already."""
    return replace(kernel, saved=0.0)


def batched(name: str, batch: int, m: int, n: int, k: int) -> Kernel:
    """``batch`` equal GEMMs per sample of two activations, one per head; backward has a GEMM for each operand."""
    flops = 2.0 * batch * m * n * k
    moved = float(batch) * (m * k + k * n + m * n)
    return Kernel(
        name,
        "gemm",
        m=m,
        n=n,
        k=k,
        batch=batch,
        flops=flops,
        backward_flops=2 * flops,
        nbytes=moved,
        backward_nbytes=2 * moved,
        cut="heads",
    )


def norm(
    s: TransformerShape, name: str, elements: float | None = None, saved: float | None = None, *, readers: int = 0
) -> Kernel:
    """LayerNorm or RMSNorm over the sequence (or over ``elements`` values), which keeps what its passes say.

    ``readers`` : products that read it, each of which autocast gives a copy of its own in 16 bits.
    """
    over = float(s.seq_len * s.d_model) if elements is None else elements
    usual = NORM[s.norm, s.fuses_norms]
    passes = usual
    if not s.fuses:
        passes = _read_norm(s.norm, s.fuses_norms, readers, is_narrow_norm(s, name), s.wide_norms)
    return memory(name, over, passes, saved=usual.saved if saved is None else saved)


def norm_gate(s: TransformerShape, number: int) -> Kernels:
    """What a norm gives is scaled by a sigmoid of an MLP of low rank that reads it (A.X K2), in fp32."""
    t = s.seq_len
    elements = float(t * s.d_model)
    scaled = operators("h~w w:w hw:w w~h", "h~w ww:w ww:w ww:w w~h hh:h", 4, 7)
    return (
        linear(f"norm_gate_down_{number}", t, s.d_model, s.norm_gate),
        memory(f"norm_gate_activation_{number}", float(t * s.norm_gate), ACTIVATION["silu"], saved=1),
        linear(f"norm_gate_up_{number}", t, s.norm_gate, s.d_model),
        memory(f"norm_gate_scaled_{number}", elements, scaled, saved=2),
    )


def layer_scale(s: TransformerShape, half: str) -> Kernel:
    """What a half gives, scaled by a learned factor of each element (DINOv2, InternVL)."""
    passes = operators("h:s", "s:s s~h hs:s s:", 1, 4)
    return memory(f"{half}_layer_scale", float(s.seq_len * s.d_model), passes, saved=1)


def is_narrow_norm(s: TransformerShape, name: str) -> bool:
    """Whether a norm is of what a product has just made, and autocast has it in 16 bits: a LayerNorm it has in fp32."""
    return s.norm == "rmsnorm" and (name == "qk_norm" or "latent" in name)


@lru_cache(maxsize=64)
def _read_norm(kind: str, fused: bool, readers: int, narrow: bool, wide: bool) -> Passes:
    """A norm with the casts of those that read it."""
    usual = NORM[kind, fused]
    ahead, back = NORM_OPERATORS[kind, fused, narrow]
    if wide and kind == "rmsnorm" and not fused:
        ahead, back = (text.replace("s", "h") if narrow else text for text in (WIDE_FORWARD, WIDE_BACKWARD))
    casts = (" s~h" * readers, " h~s" * readers)
    return operators(ahead + casts[0], back + casts[1], usual.launches, usual.backward_launches, usual.saved)


def activation_passes(s: TransformerShape) -> Passes:
    """What the MLP's nonlinearity costs; ``gelu_new`` is one op outside Hugging Face's eager code, ``relu2`` where
    Megatron-LM (``jit_fuser`` of core/activations.py) or a compiler fuses its two."""
    if s.fuses_pairs and s.gated:
        return FUSED_GATE
    if s.activation == "gelu_new" and s.implementation != "eager":
        return ACTIVATION["gelu"]
    if s.activation == "relu2" and s.fuses:
        return ACTIVATION["gelu"]
    return ACTIVATION[s.activation]


def mlp_activation(s: TransformerShape, name: str, elements: float) -> Kernel:
    """The nonlinearity between an MLP's products; its output is the next product's input, which that one keeps."""
    passes = activation_passes(s)
    return memory(name, elements, passes, cut="heads", saved=passes.saved - 1)


RESIDUAL = operators("sh:s", "ss:s s~h", 1, 1)
"""The sum of stream and half; in backward that of two gradients, and the half's own in the type of its product."""


def residual(s: TransformerShape, name: str) -> Kernels:
    """The dropout (if any) and the residual sum after a block's half; fused, they ride on the next norm."""
    elements = float(s.seq_len * s.d_model)
    if s.fuses:
        mask = 0.25 if s.hidden_dropout else 0.0
        # Megatron's backward: the dropout's, and the sum of the two gradients that meet here.
        apart = s.implementation == "megatron"
        passes = Passes(3 + mask, 5 + mask, 1, 2) if apart else Passes(2 + mask, 1 + mask, 0, 0)
        return (memory(name, elements, passes, saved=MASK * s.hidden_dropout),)
    drop = (memory(f"{name}_dropout", elements, DROPOUT, saved=MASK),) if s.hidden_dropout else ()
    return (*drop, memory(name, elements, RESIDUAL))


def bias_gradients(s: TransformerShape, widths: list[int], row_widths: list[int]) -> Kernels:
    """Column sums of output gradients, one kernel per biased linear; the forward bias rides on the GEMM.

    ``widths`` are of linears that tensor parallelism cuts by columns and ``row_widths`` of those it cuts by rows, whose
    bias every rank has whole: the kernel's ``n`` and ``k``.
    """
    n = sum(widths)
    k = sum(row_widths)
    if not n + k:
        return ()
    launches = len(widths) + len(row_widths)
    return (
        Kernel(
            "bias_gradients",
            "memory",
            n=n,
            k=k,
            backward_nbytes=float(s.seq_len) * (n + k),
            launches=0,
            backward_launches=launches,
            cut="column",
        ),
    )


def input_gradient_sums(s: TransformerShape, extra: int) -> Kernels:
    """Sums of input gradients where ``extra + 1`` separate linears read one tensor (q, k and v; gate and up)."""
    if extra <= 0 or s.fuses:
        return ()
    nbytes = 3.0 * extra * s.seq_len * s.d_model
    return (
        Kernel(
            "gradient_sums",
            "memory",
            backward_nbytes=nbytes,
            launches=0,
            backward_launches=extra,
            cut="whole",
            backward_element=STREAM,
        ),
    )


def cross_entropy(s: TransformerShape, positions: int) -> Kernel:
    """Softmax cross-entropy over ``positions`` rows of logits per sample."""
    masked = s.head != "lm" and s.implementation in {"eager", "flash"}
    passes = CROSS_ENTROPY["fused" if s.fused_loss else "masked" if masked else s.implementation]
    # Its n: bytes that an element of 16-bit logits holds at the most, op by op or in one kernel.
    op_by_op = MEGATRON_LOSS if s.implementation == "megatron" else EAGER_LOSS
    most = FUSED_LOSS if s.fused_loss or s.implementation == "fused" else op_by_op
    return replace(memory("cross_entropy", float(positions) * s.vocab, passes, cut="vocab", saved=2.0), n=most)
