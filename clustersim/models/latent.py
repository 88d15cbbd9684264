"""Kernels of multi-head latent attention before its scores: projections of low rank, their norms, rotation.

DeepSeek-V2, arXiv:2405.04434, section 2.1, as ``modeling_deepseek.py`` and Megatron-LM's ``multi_latent_attention.py``
train it: keys and values are projected up for every head, and attention runs on whole heads (nothing is absorbed).
"""

from __future__ import annotations

from dataclasses import replace

from clustersim.model import Kernel
from clustersim.models import kernels as K
from clustersim.models.base import Latent, Shape


def latent_projections(s: Shape, a: Latent) -> tuple[Kernel, ...]:
    """From the block's normed input to whole queries, keys and values.

    Down projections and their norms are whole on every tensor-parallel rank, on its own tokens under sequence
    parallelism; up projections are cut by heads (Megatron-LM's ``linear_q_down_proj`` is duplicated).
    """
    t, h = s.seq_len, s.d_model
    if a.q_rank:
        queries = [
            K.linear("q_down", t, h, a.q_rank),
            _norm(s, "q_latent_norm", a.q_rank),
            replace(K.linear("q_up", t, a.q_rank, s.width), cut="column"),
        ]
    else:
        queries = [replace(K.linear("q", t, h, s.width), cut="column")]
    rotated = float(t * (s.heads + 1) * a.rope)
    copied = float(t * s.width) * (1 if s.implementation == "fused" else 2)  # keys, op by op also queries, are joined
    return (
        *queries,
        K.sharing_input(K.linear("kv_down", t, h, a.kv_rank + a.rope)),
        _norm(s, "kv_latent_norm", a.kv_rank),
        replace(K.linear("kv_up", t, a.kv_rank, s.heads * (a.nope + a.value)), cut="column"),
        # Its n is the width of the rotated keys that all heads share, its k the tokens.
        replace(K.memory("rotary", rotated, K.ROTARY[s.implementation == "fused"]), cut="heads", n=a.rope, k=t),
        replace(K.memory("join_heads", copied, K.Passes(2, 2)), cut="heads"),
    )


def _norm(s: Shape, name: str, width: int) -> Kernel:
    """A norm of the latent vector, whose scaling counts as a product (as Megatron-LM counts it among its FLOPs)."""
    flops = 2.0 * s.seq_len * width
    return replace(K.norm(s, name, float(s.seq_len * width)), flops=flops, backward_flops=2 * flops)
