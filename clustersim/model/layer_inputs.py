"""Kernels of what each block is told of its token beside what it is handed (Gemma 4's small ones)."""

from __future__ import annotations

from clustersim.model import kernels as K
from clustersim.model.base import TransformerShape


def made_inputs(s: TransformerShape, gather: K.Passes) -> K.Kernels:
    """What all blocks are told: rows of a table, added to a projection of the embedding; ``gather`` : looking them
    up."""
    if not s.inputs:
        return ()
    told = float(s.seq_len * s.layers * s.inputs.width)
    return (
        K.memory("gather", told, gather),
        K.linear("inputs", s.seq_len, s.d_model, s.layers * s.inputs.width),
        K.norm(s, "norm_inputs", told),
        K.memory("sum", told, K.operators("ss:s", "s:", 1, 1)),
    )


def told_kernels(s: TransformerShape) -> K.Kernels:
    """What the block is told of its token gates a projection of its output, which is added to it."""
    if not s.inputs:
        return ()
    t = s.seq_len
    width = s.inputs.width
    gated = K.activation_passes(s)
    return (
        K.linear("input_gate", t, s.d_model, width),
        K.memory("input_activation", float(t * width), gated, saved=gated.saved - 1),
        K.linear("input_projection", t, width, s.d_model),
        K.norm(s, "norm_behind_input"),
        *K.residual(s, "input_residual"),
    )
