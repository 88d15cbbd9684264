"""ELECTRA's pretraining (Clark et al., arXiv:2003.10555): a small generator fills masked tokens in, and a
discriminator of BERT's shape says of every token whether it was replaced.

Sizes are NVIDIA DeepLearningExamples' (TensorFlow2/LanguageModeling/ELECTRA): a generator of a third of the width. Both
look tokens, positions and segments up in one table, whose rows the generator projects to its width.
"""

from __future__ import annotations

from dataclasses import replace

from clustersim.core.model import Layer, Model, Tensor
from clustersim.model import kernels as K
from clustersim.model.base import TransformerShape
from clustersim.model.tensor_parts import affine
from clustersim.model.transformer_model import build

GENERATOR = 3
"""The discriminator's width over the generator's."""

MASKED = 0.15
"""Share of tokens that are masked."""


def electra(discriminator: TransformerShape) -> Model:
    """Both networks, trained together on each sample; the discriminator's shape is BERT's."""
    width = discriminator.d_model // GENERATOR
    heads = max(1, discriminator.heads // GENERATOR)
    small = replace(
        discriminator,
        d_model=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        d_ff=discriminator.d_ff // GENERATOR,
        head="mlm",
        head_positions=round(MASKED * discriminator.seq_len),
    )
    generator = build(small)
    discriminating = build(replace(discriminator, head="none"))
    layers = (*_generator(generator, discriminator, small), *_discriminator(discriminating, discriminator))
    return replace(discriminating, family="electra", layers=layers, notes=(f"generator of width {width}",))


def _generator(generating: Model, wide: TransformerShape, s: TransformerShape) -> tuple[Layer, ...]:
    """Its blocks between a projection from the table's width and one back to it."""
    embedding, *blocks, head = (_renamed(layer, "generator") for layer in generating.layers)
    t = s.seq_len
    h = s.d_model
    w = wide.d_model
    norm = [tensor for tensor in embedding.tensors if "LayerNorm" in tensor.name]
    project = affine("generator.embeddings_project", w, h)
    embedding = replace(
        embedding,
        tensors=(*(replace(tensor, numel=w) for tensor in norm), *project),
        kernels=(K.memory("lookup", float(t * w), K.Passes(9, 8, 4, 8)), K.linear("project", t, w, h)),
    )
    n = s.head_positions
    tensors = (
        *affine("generator_predictions.dense", h, w),
        *affine("generator_predictions.LayerNorm", 1, w),
        Tensor("generator_lm_head.bias", s.vocab),
    )
    kernels = (
        K.linear("transform", n, h, w),
        K.memory("transform_activation", float(n * w), K.ACTIVATION["gelu"]),
        K.norm(wide, "transform_norm", float(n * w)),
        K.linear("logits", n, w, s.vocab),
        K.cross_entropy(s, n),
        # A token is drawn from every row of logits: noise, sum and argmax.
        K.memory("sample", float(n * s.vocab), K.Passes(6, 0, 3, 0)),
    )
    return (embedding, *blocks, replace(head, tensors=tensors, kernels=kernels))


def _discriminator(discriminating: Model, s: TransformerShape) -> tuple[Layer, ...]:
    """BERT's embedding and blocks, and two small products for every token."""
    embedding, *blocks, head = discriminating.layers
    t = s.seq_len
    h = s.d_model
    p = "discriminator_predictions"
    tensors = (*affine(f"{p}.dense", h, h), *affine(f"{p}.dense_prediction", h, 1))
    kernels = (
        K.linear("transform", t, h, h),
        K.memory("transform_activation", float(t * h), K.ACTIVATION["gelu"]),
        K.memory("prediction", float(t * h), K.Passes(1, 3, 1, 2)),
        K.memory("entropy", float(t), K.Passes(4, 4, 4, 4)),
    )
    return (embedding, *blocks, replace(head, tensors=tensors, kernels=kernels, activation_bytes=3.0 * t * h))


def _renamed(layer: Layer, part: str) -> Layer:
    tensors = tuple(replace(tensor, name=f"{part}.{tensor.name}") for tensor in layer.tensors)
    return replace(layer, name=f"{part}.{layer.name}", tensors=tensors)
