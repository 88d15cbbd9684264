"""Bytes and seconds of a checkpoint."""

from __future__ import annotations


def checkpoint_bytes(parameters: float, per_parameter: float = 14.0) -> float:
    """[bytes] of a whole checkpoint.

    ``per_parameter`` : 2 of weights alone; 14 of bf16 weights, an fp32 copy and Adam's two moments; 12 without the bf16
    weights; 16 with fp32 gradients. Sharding changes who writes, not how much.
    """
    return parameters * per_parameter


def write_time(nbytes: float, bandwidth: float) -> float:
    """[s] to write a checkpoint; ``bandwidth`` [bytes/s] of all writers together."""
    return nbytes / bandwidth


def copy_to_host(nbytes: float, gpus: int, bandwidth: float) -> float:
    """[s] until a checkpoint, shared out evenly, is in host memory; ``bandwidth`` [bytes/s] of one GPU's PCIe."""
    return nbytes / (gpus * bandwidth)
