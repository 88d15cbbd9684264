"""Models: from Hugging Face configs, by name, or from a table's columns, as layers with kernels and tensors.

Names are looked up when first used: what a kernel takes (:mod:`clustersim.model.seconds`) needs no model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clustersim.core.lookup import looked_up

if TYPE_CHECKING:
    from clustersim.model.convnets import CONVNETS, convnet
    from clustersim.model.hf import from_hf
    from clustersim.model.named_models import catalog, config_of, file, model, shape
    from clustersim.model.transformer_model import transformer

__all__ = [
    "CONVNETS",
    "catalog",
    "config_of",
    "convnet",
    "file",
    "from_hf",
    "model",
    "shape",
    "transformer",
]

_NOUNS = frozenset(("BYTES", "Kernel", "Layer", "Model", "Segment", "StepCost", "Tensor"))
"""Of :mod:`clustersim.core.model`, which was ``clustersim.model``; they answer here for one more release."""

_look_up = looked_up(
    __name__,
    {
        "convnets": "CONVNETS convnet",
        "hf": "from_hf",
        "named_models": "catalog config_of file model shape",
        "transformer_model": "transformer",
    },
)


def __getattr__(name: str) -> object:
    if name not in _NOUNS:
        return _look_up(name)
    import warnings

    from clustersim.core import model as nouns

    warnings.warn(f"clustersim.model.{name} is now clustersim.core.model.{name}", DeprecationWarning, stacklevel=2)
    return getattr(nouns, name)
