"""Models that were traced from somebody's own module (:mod:`clustersim.model.tracing`): their file, and no torch."""

from __future__ import annotations

from clustersim.model.traced.folding import folded
from clustersim.model.traced.reading import read_model_file, read_traced
from clustersim.model.traced.schema import FORMAT, TYPES, LayerRow, LayerWork, ModelFile, TensorRow

__all__ = [
    "FORMAT",
    "TYPES",
    "LayerRow",
    "LayerWork",
    "ModelFile",
    "TensorRow",
    "folded",
    "read_model_file",
    "read_traced",
]
