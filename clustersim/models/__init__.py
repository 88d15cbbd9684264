"""Models: from Hugging Face configs, by name, or from a table's columns, as layers with kernels and tensors."""

from __future__ import annotations

from clustersim.models.catalog import catalog, file, model, shape
from clustersim.models.convnets import CONVNETS, convnet
from clustersim.models.generic import from_row
from clustersim.models.hf import from_hf
from clustersim.models.transformer import transformer

__all__ = [
    "CONVNETS",
    "catalog",
    "convnet",
    "file",
    "from_hf",
    "from_row",
    "model",
    "shape",
    "transformer",
]
