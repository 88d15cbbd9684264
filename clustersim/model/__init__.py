"""Models: from Hugging Face configs, by name, or from a table's columns, as layers with kernels and tensors."""

from __future__ import annotations

from clustersim.model.catalog import catalog, file, model, shape
from clustersim.model.convnets import CONVNETS, convnet
from clustersim.model.hf import from_hf
from clustersim.model.transformer import transformer

__all__ = [
    "CONVNETS",
    "catalog",
    "convnet",
    "file",
    "from_hf",
    "model",
    "shape",
    "transformer",
]

_NOUNS = frozenset(("BYTES", "Kernel", "Layer", "Model", "Segment", "StepCost", "Tensor"))
"""Of :mod:`clustersim.core.model`, which was ``clustersim.model``; they answer here for one more release."""


def __getattr__(name: str) -> object:
    if name not in _NOUNS:
        raise AttributeError(f"module 'clustersim.model' has no attribute {name!r}")
    import warnings

    from clustersim.core import model as nouns

    warnings.warn(f"clustersim.model.{name} is now clustersim.core.model.{name}", DeprecationWarning, stacklevel=2)
    return getattr(nouns, name)
