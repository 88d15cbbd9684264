"""What an op belongs to, as fields: planned ops and spans carry the same label, whoever made them."""

from __future__ import annotations

import msgspec

ACTIONS = ("F", "B", "I", "W", "R")
"""What a rank does with one micro-batch and one chunk of layers: forward, full backward, input gradient, weight
gradient; ``R`` repeats a forward inside a backward."""


class Label(msgspec.Struct, frozen=True, gc=False):
    """What an op belongs to, as fields: analysis reads these and never parses a name.

    Parameters
    ----------
    unit : the layer, FSDP unit or bucket, such as ``"layers.3"``.
    action : one of :data:`ACTIONS`, empty outside them (the optimizer, a reduction of gradients).
    microbatch, chunk : which micro-batch, and which of the rank's chunks of layers (virtual stages); -1 for none.
    dim : of a communication, the mesh dimension it runs over, such as ``"tp"`` or ``"dp-cp"``.
    """

    unit: str = ""
    action: str = ""
    microbatch: int = -1
    chunk: int = -1
    dim: str = ""
