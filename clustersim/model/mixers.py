"""Kernels of blocks that mix tokens without attention: delta rules, lightning attention, state spaces, convolutions.

Each is computed chunk by chunk, as the Triton kernels of flash-linear-attention and mamba_ssm do it: dense products
inside a chunk, and one state per head that is handed from chunk to chunk. Work grows with the sequence, not with its
square. Projections in are cut by heads under tensor parallelism, the projection out by rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import TypeVar

from clustersim.core.errors import ModelError
from clustersim.core.model import Kernel
from clustersim.model import kernels as K
from clustersim.model.base import TransformerShape
from clustersim.model.sizes import Delta, StateSpace

Size = TypeVar("Size")

LIGHTNING_CHUNK = 256
"""Tokens of a chunk of MiniMax's lightning attention (``block_size``)."""
GATE = K.Passes(4, 7, 2, 3)
"""A nonlinearity of one tensor, multiplied with another."""
SCAN = K.Passes(12, 30, 1, 1)
"""Mamba's selective scan over its inner channels, in one kernel each way: five tensors are read or written (values,
steps, gate, output, B and C), and 16 exponentials per channel take about as long as seven more passes on an H100 (16
special functions per multiprocessor and clock); backward computes the states again."""


def _columns(name: str, tokens: int, n_in: int, n_out: int, *, first: bool = False) -> Kernel:
    """A projection cut by columns; ``first`` : it keeps the input that the others share."""
    kernel = replace(K.linear(name, tokens, n_in, n_out), cut="column")
    return kernel if first else K.sharing_input(kernel)


def _rows(name: str, tokens: int, n_in: int, n_out: int) -> Kernel:
    return replace(K.linear(name, tokens, n_in, n_out), cut="row")


def short_convolution(tokens: int, channels: int, width: int) -> Kernel:
    """A causal convolution of each channel with its last ``width`` tokens, and its nonlinearity; it keeps its input."""
    flops = 2.0 * tokens * channels * width
    kernel = K.memory("short_conv", float(tokens) * channels, K.Passes(2, 5, 1, 2), cut="heads", saved=1)
    return replace(kernel, flops=flops, backward_flops=2 * flops)


Sizes = tuple[int, int, int]


def _chunked(name: str, heads: int, chunks: int, sizes: Sizes) -> Kernel:
    """One dense product (m, n, k) per head and chunk."""
    return K.batched(name, heads * chunks, *sizes)


def _flops(count: int, *products: Sizes) -> float:
    """FLOPs of so many of each dense product (m, n, k)."""
    return 2.0 * count * sum(m * n * k for m, n, k in products)


def _scan(kernel: Kernel, flops: float, again: float) -> Kernel:
    """A scan over all chunks: its name, sizes and launches are the kernel's. Backward has two products for each, and
    does ``again`` what it does not keep [FLOPs]."""
    moved = 2.0 * kernel.seq * kernel.heads * (kernel.k / kernel.groups + kernel.n)
    return replace(
        kernel,
        flops=flops,
        backward_flops=2 * flops + again,
        nbytes=moved,
        backward_nbytes=2 * moved,
        cut="heads",
    )


def _output_norm(s: TransformerShape, elements: float) -> Kernel:
    """A norm of the heads' outputs with a gate."""
    return replace(K.norm(s, "output_norm", elements, saved=2), cut="heads")


def delta_kernels(s: TransformerShape) -> K.Kernels:
    """Gated DeltaNet as Qwen3-Next has it, ``chunk_gated_delta_rule`` of flash-linear-attention; its projections may be
    apart."""
    d = _sizes(s, s.delta, "delta")
    t = s.seq_len
    h = s.d_model
    projected: K.Kernels = (
        _columns("linear_in", t, h, 2 * d.key_width + 2 * d.value_width, first=True),
        _columns("linear_gates", t, h, 2 * d.value_heads),
    )
    if d.apart:
        projected = (
            _columns("q", t, h, d.key_width, first=True),
            _columns("k", t, h, d.key_width),
            _columns("v", t, h, d.value_width),
            _columns("forget", t, h, d.value_heads),
            _columns("linear_gates", t, h, d.value_heads),
            _columns("output", t, h, d.value_width),
        )
    return (
        *projected,
        short_convolution(t, 2 * d.key_width + d.value_width, d.conv),
        *delta_rule(s, d, "gated_delta_rule", float(t * d.value_heads)),
        _output_norm(s, float(t) * d.value_width),
        _rows("out", t, d.value_width, h),
    )


def kda_kernels(s: TransformerShape) -> K.Kernels:
    """Kimi Delta Attention (arXiv:2510.26692): a gate for each channel of a key, from a projection of low rank, or in
    Ling 3 from a whole one."""
    d = _sizes(s, s.delta, "delta")
    t = s.seq_len
    h = s.d_model
    forget: K.Kernels = (_columns("forget", t, h, d.key_width),)
    output: K.Kernels = (_columns("output", t, h, d.value_width),)
    if not d.whole_gates:
        forget = (
            K.sharing_input(K.linear("forget_down", t, h, d.value_dim)),
            _columns("forget_up", t, d.value_dim, d.key_width, first=True),
        )
        output = (
            K.sharing_input(K.linear("output_down", t, h, d.value_dim)),
            _columns("output_up", t, d.value_dim, d.value_width, first=True),
        )
    return (
        _columns("q", t, h, d.key_width, first=True),
        _columns("k", t, h, d.key_width),
        _columns("v", t, h, d.value_width),
        short_convolution(t, 2 * d.key_width + d.value_width, d.conv),
        *forget,
        _columns("linear_gates", t, h, d.value_heads),
        *delta_rule(s, d, "kimi_delta_rule", float(t * d.key_width)),
        *output,
        _output_norm(s, float(t) * d.value_width),
        _rows("out", t, d.value_width, h),
    )


def delta_rule(s: TransformerShape, d: Delta, name: str, gates: float) -> K.Kernels:
    """The rule over all chunks; ``gates`` : elements of the forget gates of a sample.

    flash-linear-attention's kernels: sums of gates, products of keys, their inverse, corrected keys and values, states,
    and outputs; backward makes corrected keys and values and states again (``chunk_gated_delta_rule_bwd``).
    """
    t = s.seq_len
    heads = d.value_heads
    c = min(d.chunk, s.seq_len)
    keys = d.key_dim
    values = d.value_dim
    kept = float(t) * (2 * d.key_width + d.value_width + heads * c) + gates
    count = heads * ceil(t / c)
    again = _flops(count, (c, keys, c), (c, values, c), (c, values, keys), (keys, values, c))
    # Beside products of keys, scores and outputs: the inverse of a unit triangular matrix, by doubling blocks, which is
    # a third of a product of its size.
    inverse = (c, c, max(1, c // 3))
    inside = _flops(count, (c, c, keys), inverse, (c, c, keys), (c, values, c), (c, values, keys))
    rule = Kernel(
        name,
        "scan",
        m=c,
        n=values,
        k=keys,
        heads=heads,
        groups=max(1, heads // d.key_heads),
        seq=t,
        launches=6,
        backward_launches=8,
        saved=kept,
    )
    return (
        replace(K.memory("key_norm", 2.0 * t * d.key_width, K.Passes(2, 3)), cut="heads"),
        replace(K.memory("forget_gate", gates, K.Passes(4, 6, 3, 5)), cut="heads"),
        _scan(rule, inside + again, again),
    )


def lightning_kernels(s: TransformerShape) -> K.Kernels:
    """Lightning attention (arXiv:2401.04658) as MiniMax has it: heads decay at fixed rates, the output is gated."""
    t = s.seq_len
    h = s.d_model
    width = s.width
    c = min(LIGHTNING_CHUNK, t)
    chunks = ceil(t / c)
    dim = s.head_dim
    return (
        _columns("qkv", t, h, 3 * width, first=True),
        replace(K.memory("activation", 3.0 * t * width, K.ACTIVATION["silu"]), cut="heads", saved=3.0 * t * width),
        replace(_chunked("chunk_scores", s.heads, chunks, (c, c, dim)), saved=3.0 * t * width),
        _chunked("chunk_context", s.heads, chunks, (c, dim, c)),
        _chunked("state_context", s.heads, chunks, (c, dim, dim)),
        _chunked("state_written", s.heads, chunks, (dim, dim, c)),
        _output_norm(s, float(t) * width),
        _columns("output_gate", t, h, width),
        replace(K.memory("gated", float(t) * width, GATE), cut="heads", saved=float(t) * width),
        _rows("out", t, width, h),
    )


def mamba_kernels(s: TransformerShape) -> K.Kernels:
    """The first Mamba, ``selective_scan_fn`` of mamba_ssm; FLOPs of the scan are that project's ``9 L D N``."""
    p = _sizes(s, s.space, "space")
    t = s.seq_len
    h = s.d_model
    channels = float(t) * p.inner
    scan = K.memory("scan", channels, SCAN, cut="heads", saved=4)
    flops = 9.0 * channels * p.state
    norms = (K.norm(s, "inner_norms", float(t) * (p.rank + 2 * p.state)),) if p.inner_norms else ()
    return (
        _columns("mamba_in", t, h, 2 * p.inner, first=True),
        short_convolution(t, p.inner, p.conv),
        _rows("x", t, p.inner, p.rank + 2 * p.state),
        *norms,
        _columns("step", t, p.rank, p.inner, first=True),
        replace(scan, flops=flops, backward_flops=2 * flops),
        _rows("out", t, p.inner, h),
    )


def mamba2_kernels(s: TransformerShape) -> K.Kernels:
    """Mamba-2, ``mamba_chunk_scan_combined`` of mamba_ssm: five kernels, of which four are products per chunk; backward
    makes scores and states again."""
    p = _sizes(s, s.space, "space")
    t = s.seq_len
    h = s.d_model
    c = min(p.chunk, t)
    chunks = ceil(t / c)
    dim = p.inner // p.heads
    again = _flops(p.groups * chunks, (c, c, p.state)) + _flops(p.heads * chunks, (dim, p.state, c))
    outputs = _flops(p.heads * chunks, (c, dim, c), (c, dim, p.state))
    scan = Kernel(
        "chunk_scan",
        "scan",
        m=c,
        n=dim,
        k=p.state,
        heads=p.heads,
        groups=max(1, p.heads // p.groups),
        seq=t,
        launches=4,
        backward_launches=13,
        saved=float(t) * (p.conv_width + p.heads),
    )
    return (
        _columns("mamba_in", t, h, p.inner + p.conv_width + p.heads, first=True),
        short_convolution(t, p.conv_width, p.conv),
        replace(K.memory("steps", float(t) * p.heads, K.Passes(4, 6)), cut="heads"),
        _scan(scan, again + outputs, again),
        *_mamba_gate(s, p),
        _rows("out", t, p.inner, h),
    )


def _mamba_gate(s: TransformerShape, p: StateSpace) -> K.Kernels:
    elements = float(s.seq_len) * p.inner
    if p.gated_norm:
        return (_output_norm(s, elements),)
    return (replace(K.memory("gated", elements, GATE), cut="heads", saved=2 * elements),)


def conv_kernels(s: TransformerShape) -> K.Kernels:
    """LFM2's short convolution between two gates."""
    p = _sizes(s, s.space, "space")
    t = s.seq_len
    h = s.d_model
    elements = float(t * h)
    return (
        _columns("conv_in", t, h, 3 * h, first=True),
        replace(K.memory("gated", elements, K.Passes(3, 5)), cut="heads", saved=2 * elements),
        short_convolution(t, h, p.conv),
        replace(K.memory("gated_output", elements, K.Passes(3, 5)), cut="heads", saved=elements),
        _rows("out", t, h, h),
    )


def _sizes(s: TransformerShape, size: Size | None, field: str) -> Size:
    if size is None:
        raise ModelError(f"{s.name}: blocks of kind {', '.join(sorted(s.mixing))} need {field}, which is None")
    return size


LINEAR: dict[str, Callable[[TransformerShape], K.Kernels]] = {
    "delta": delta_kernels,
    "kda": kda_kernels,
    "lightning": lightning_kernels,
    "mamba": mamba_kernels,
    "mamba2": mamba2_kernels,
    "conv": conv_kernels,
}
"""Kernels by kind, from the block's normed input to its output."""
