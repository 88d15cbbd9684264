"""Tensors of lightning attention (MiniMax, Ling), as :mod:`.naming` has those of other blocks."""

from __future__ import annotations

from clustersim.model.base import TransformerShape
from clustersim.model.tensor_parts import Part, linear_part, tensor_part


def lightning_parts(s: TransformerShape) -> dict[str, Part]:
    """By the names that rows give them; none where no block mixes so."""
    there = "lightning" in s.mixing
    return {
        "lightning_norm": tensor_part(s.width, "column", there=there),
        "lightning_qkv": linear_part(s.d_model, 3 * s.width, "column", there=there),
        "lightning_out": linear_part(s.width, s.d_model, "row", there=there),
        "lightning_gate": linear_part(s.d_model, s.width, "column", there=there),
    }
