"""A family's shape with a given number of parameters, for models that are named by their size alone ("GPT-2 52B")."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np

from clustersim.core.errors import ModelError
from clustersim.core.paths import data_path
from clustersim.model.base import TransformerShape
from clustersim.model.hf import shape_from_hf
from clustersim.model.transformer_model import build

GPT3_PARAMETERS = (125e6, 350e6, 760e6, 1.3e9, 2.7e9, 6.7e9, 13e9, 175e9, 530e9, 1008e9)
GPT3_WIDTHS = (768, 1024, 1536, 2048, 2560, 4096, 5120, 12288, 20480, 25600)
"""Width of GPT-3's models by size (Brown et al., "Language Models are Few-Shot Learners", table 2.1; the width of 13B
rounded to its heads of 128), which Megatron-LM's, BLOOM's and OPT's follow; the two largest are Megatron-LM's
(Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", table 1)."""

BY_COUNT = "by its parameter count alone"
"""How a model's note says that its width and depth were assumed."""

HEAD = 128
"""Elements of a head of every model of GPT-3 above 1.3B that is not 96 or 80."""


def named_shape(config: str) -> TransformerShape:
    """A shipped config's dimensions, by the name of its file."""
    return shape_from_hf(data_path("data") / "models" / f"{config}.json", name=config)[0]


def of_size(shape: TransformerShape, parameters: float) -> TransformerShape:
    """``shape`` as wide as GPT-3's models of so many parameters, and as deep as that count then asks for.

    A step's work is fixed by the count; between this and any usual aspect ratio only the share of attention and the
    number of kernels move.

    Parameters
    ----------
    shape : of the family: vocabulary, MLP ratio, grouping of heads and biases are kept.
    parameters : above the smallest shape of two layers. Raises ModelError below it.

    >>> large = of_size(named_shape("gpt2-xl"), 52e9)
    >>> large.layers, large.d_model, round(build(large).parameters / 1e9)
    (64, 8192, 52)
    """
    width = math.exp(float(np.interp(math.log(parameters), np.log(GPT3_PARAMETERS), np.log(GPT3_WIDTHS))))
    # Heads come in eights where tensor parallelism may split them.
    step = HEAD * min(8, max(1, 2 ** int(math.log2(width / HEAD / 4))))
    wide = _of_width(shape, max(1, round(width / step)) * step)
    one_layer, two_layers = (build(replace(wide, layers=layers)).parameters for layers in (1, 2))
    layers = round((parameters - one_layer) / (two_layers - one_layer)) + 1
    if layers < 1:
        raise ModelError(f"{parameters:,.0f} parameters are fewer than one layer and the vocabulary have")
    return replace(wide, layers=layers)


def _of_width(shape: TransformerShape, width: int) -> TransformerShape:
    """The family's block at another width: as many queries per key head and as wide an MLP for its width."""
    group = max(1, shape.heads // (shape.kv_heads or shape.heads))
    kv_heads = max(1, width // HEAD // group)
    return replace(
        shape,
        d_model=width,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=HEAD,
        d_ff=round(width * shape.d_ff / shape.d_model),
    )


def size_in(name: str) -> float:
    """Parameters a name ends in, such as ``7B``; 0 for none."""
    match = re.search(r"([\d.]+)\s*([mb])\b", name.lower())
    return float(match.group(1)) * {"m": 1e6, "b": 1e9}[match.group(2)] if match else 0.0
