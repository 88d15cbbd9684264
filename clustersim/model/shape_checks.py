"""Whether the dimensions and choices of a transformer's shape go together."""

from __future__ import annotations

from clustersim.core.errors import ModelError, nearest
from clustersim.model.base import (
    ACTIVATIONS,
    ATTENTION,
    EXPERTS_IMPLEMENTATIONS,
    HEADS,
    IMPLEMENTATIONS,
    NORM_PLACES,
    NORMS,
    OUTPUT_GATES,
    POSITIONS,
    QK_NORMS,
    TransformerShape,
)
from clustersim.model.sizes import KV_FROM


def checked(shape: TransformerShape) -> TransformerShape:
    """The shape itself.

    Raises :class:`ModelError` naming the field and its value, when a dimension is not positive, heads do not divide or
    a choice is unknown.
    """
    for field in ("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab", "seq_len"):
        value = getattr(shape, field)
        if field == "d_ff" and value == 0 and shape.mlps and "dense" not in shape.mlps:
            continue
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{shape.name}: {field} = {value!r} must be a whole number above zero")
    for heads, kv_heads in dict.fromkeys((one.heads, one.kv_heads) for one in shape.attentions):
        if heads % kv_heads:
            raise ModelError(f"{shape.name}: {heads} heads do not share {kv_heads} key-value heads evenly")
    if shape.positions == "learned" and shape.n_positions < shape.seq_len:
        raise ModelError(
            f"{shape.name}: seq_len {shape.seq_len} exceeds the {shape.n_positions} learned positions; "
            f"use seq_len <= {shape.n_positions}"
        )
    if shape.streams and shape.norm_places != "before":
        raise ModelError(f"{shape.name}: streams = {shape.streams} with norms {shape.norm_places!r} are not described")
    if shape.experts and not 0 < shape.experts.per_token <= shape.experts.count:
        raise ModelError(f"{shape.name}: {shape.experts.per_token} of {shape.experts.count} experts per token")
    choices = {"activation": ACTIVATIONS, "norm": NORMS, "positions": POSITIONS, "attention": ATTENTION}
    choices |= {"implementation": IMPLEMENTATIONS, "experts_implementation": EXPERTS_IMPLEMENTATIONS, "head": HEADS}
    choices |= {"norm_places": NORM_PLACES, "qk_norm_of": QK_NORMS, "kv_from": KV_FROM, "output_gate": OUTPUT_GATES}
    for field, choice in choices.items():
        if getattr(shape, field) not in choice:
            raise ModelError(
                f"{shape.name}: unknown {field} {getattr(shape, field)!r}; "
                f"{nearest(str(getattr(shape, field)), choice)}"
            )
    return shape
