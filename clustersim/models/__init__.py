"""Models: from Hugging Face configs, by name, or from a table's columns, as layers with kernels and tensors."""

from __future__ import annotations

from clustersim.models.hf import from_hf
from clustersim.models.transformer import transformer

__all__ = ["from_hf", "transformer"]
