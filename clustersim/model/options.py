"""What a scenario says of a model's sizes beside its config: each option changes the model, or is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from clustersim.core.errors import ModelError, nearest
from clustersim.core.model import Model
from clustersim.core.texts import Table
from clustersim.model.base import TransformerShape
from clustersim.model.families import families
from clustersim.model.sizes import Experts
from clustersim.model.transformer_model import build

_SETTLED: tuple[str, ...] = ("latent", "patches", "delta", "space", "indexer", "tower", "mixers", "mlps", "widths")
_SETTLED += ("heads_of", "value_size", "kv_from", "inputs", "output_gate", "q_rank")
_SETTLED += ("compressor", "low_output", "rotated", "sinkhorn", "streams_rank", "ngrams", "norm_gate")
_SETTLED += ("norm_places", "post_norm", "wide_norms", "wide_rotation", "rotates", "buckets")
"""What the config or the family's row settles: parts whose sizes follow from each other, kinds of blocks."""
_FIELDS = ("attention", "implementation", "seq_len", "name")
"""Fields of ``[model]`` itself, which every transformer has."""
_NO_TENSOR: tuple[str, ...] = (
    "experts_implementation",
    "fused_loss",
    "fused_norms",
    "activation",
    "norm",
    "positions",
    "causal",
    "window",
    "full_every",
)
_NO_TENSOR += ("attn_dropout", "hidden_dropout", "head_positions", "images")
_NO_TENSOR += ("experts.per_token", "experts.groups", "experts.group_limit")
"""Options that may change kernels alone; every other one is about parameters, so it must change some."""
_NEEDS = {"embed_dim": "project_in", "experts.bias": "experts_joined", "experts.latent": "latent_in"}
"""Parts of the family's row that an option needs, where it would change other tensors without them."""
_HEADS = {"lm": "logits", "mlm": "masked_logits", "pretraining": "next_sentence", "pooler": "pooler", "qa": "answers"}
"""The part of the family's row that each head needs."""


class RefusedOption(ModelError):
    """A model option that the family does not have."""


def with_options(shape: TransformerShape, options: Table) -> TransformerShape:
    """The shape with its fields changed; ``experts`` is a table of the sizes that change.

    Raises :class:`ModelError` for an option that is unknown or no size, and :class:`RefusedOption` for one that this
    family does not have: it would change nothing, or kernels without the parameters that they multiply by.
    """
    known = {field.name for field in dataclasses.fields(TransformerShape)}
    for key, value in options.items():
        if key not in known:
            raise ModelError(f"{shape.name}: unknown model option {key!r}; {nearest(key, known)}")
        if key in _SETTLED and value != getattr(shape, key):
            raise ModelError(f"{shape.name}: {key} = {value!r} is no option; change the config{_at(key)}")
    changes = _with_experts(shape, options)
    changed = replace(shape, **changes)
    built = BuiltShapes()
    for dimension, alone, without in _asked(shape, changes):
        if not _lists(shape, changed, dimension) or not any(
            _differ(before, after, built, whole=whole)
            for before, after, whole in _compared(shape, changed, dimension, alone, without)
        ):
            raise RefusedOption(_refusal(shape, changed, dimension))
    return changed


class BuiltShapes:
    """Models of shapes, each of which is built once: the same ones are compared for every option."""

    def __init__(self) -> None:
        self._models: list[tuple[TransformerShape, Model]] = []

    def model(self, shape: TransformerShape) -> Model:
        """Raises :class:`ModelError` as building does."""
        for known_shape, model in self._models:
            if known_shape == shape:
                return model
        self._models.append((shape, build(shape)))
        return self._models[-1][1]


def _asked(shape: TransformerShape, changes: Table) -> Iterator[tuple[str, Table, Table]]:
    """Every dimension that is said anew, the change of it alone, and all changes but this one."""
    for key, value in changes.items():
        if key in _FIELDS or value == getattr(shape, key):
            continue
        rest = {name: other for name, other in changes.items() if name != key}
        if not isinstance(value, Experts) or shape.experts is None:
            yield key, {key: value}, rest
            continue
        for info in msgspec.structs.fields(Experts):
            size = getattr(value, info.name)
            before = getattr(shape.experts, info.name)
            if size != before:
                alone = msgspec.structs.replace(shape.experts, **{info.name: size})
                without = msgspec.structs.replace(value, **{info.name: before})
                yield f"experts.{info.name}", {key: alone}, {**rest, key: without}


def _lists(shape: TransformerShape, changed: TransformerShape, dimension: str) -> bool:
    """Whether the family's row lists the part that an option needs."""
    part = _HEADS.get(changed.head, "") if dimension == "head" else _NEEDS.get(dimension, "")
    if dimension == "head_dim" and shape.latent:
        return False
    if dimension == "family":
        # Another library's names of the same parameters, such as torchtune's of Phi-3.
        return build(shape).parameters == build(replace(shape, family=changed.family)).parameters
    family = families()[shape.family]
    rows = (*family.embedding, *family.attention, *family.block, *family.head)
    return not part or any(row.split()[0] == part for row in rows)


def _compared(
    shape: TransformerShape, changed: TransformerShape, dimension: str, alone: Table, without: Table
) -> Iterator[tuple[TransformerShape, TransformerShape, bool]]:
    """Pairs of shapes, one of which an option changes if it does what it says, and whether in their parameters: beside
    the config alone, and beside the other options; a dropout of scores where scores are in memory."""
    whole = dimension not in _NO_TENSOR or (dimension == "activation" and changed.gated != shape.gated)
    eager: Table = {"attention": "eager", "implementation": "eager"}
    base = replace(shape, **without)
    yield shape, replace(shape, **alone), whole
    yield base, changed, whole
    yield replace(base, **eager), replace(changed, **eager), whole


def _differ(before: TransformerShape, after: TransformerShape, built: BuiltShapes, *, whole: bool) -> bool:
    """Whether two shapes differ in their parameters (``whole``), or in anything. Those that cannot be built differ:
    what is wrong with them is said where the model is built."""
    if before.layers != after.layers:
        return True
    blocks = max(map(_period, (before, after)))
    try:
        first, second = (built.model(replace(shape, layers=blocks)).layers for shape in (before, after))
    except ModelError:
        return True
    return any(
        layer.tensors != same.tensors or (not whole and layer.kernels != same.kernels)
        for layer, same in zip(first, second, strict=False)
    ) or len(first) != len(second)


def _period(shape: TransformerShape) -> int:
    """Blocks after which nothing new comes."""
    experts = shape.experts
    first = experts.dense_first + 2 * experts.every if experts else 1
    listed = (shape.mixers, shape.mlps, shape.widths, shape.heads_of, shape.rotates)
    return 1 + max(first, shape.full_every, *map(len, listed))


def _refusal(shape: TransformerShape, changed: TransformerShape, dimension: str) -> str:
    """Why an option is refused, and what the family has."""
    part, _, size = dimension.rpartition(".")
    value = getattr(changed.experts if part else changed, size)
    family = families()[shape.family]
    named = {name for name, field in family.reads.items() if field} | set(family.sets)
    ahead = f"{part}." if part else ""
    has = sorted(name.removeprefix(ahead) for name in named if name.startswith(ahead) and "." not in name[len(ahead) :])
    what = "its experts have" if part else "it has"
    return (
        f"{shape.name}: {dimension} = {value!r}, but a model of the family {shape.family!r} as this config has it does "
        f"not change by it; {what} {', '.join(has)}{_at(dimension)}"
    )


def _at(dimension: str) -> str:
    return f" (at $.model.options.{dimension})"


def _with_experts(shape: TransformerShape, changes: Table) -> Table:
    """Changes to a shape whose ``experts`` is a table as :class:`~clustersim.model.base.TransformerShape` has them.

    Raises :class:`ModelError` for a dense shape, and for a size that is unknown or no whole number above zero.
    """
    said = changes.get("experts")
    if not isinstance(said, dict):
        return changes
    if shape.experts is None:
        raise ModelError(
            f"{shape.name}: 'experts' are sizes of a mixture of experts; the model has none{_at('experts')}"
        )
    for key in said:
        if key not in shape.experts.__struct_fields__:
            hint = nearest(key, shape.experts.__struct_fields__)
            raise ModelError(f"{shape.name}: unknown size 'experts.{key}'; {hint}")
    sizes = msgspec.structs.asdict(shape.experts) | said
    try:
        experts = msgspec.convert(sizes, type(shape.experts))
    except msgspec.ValidationError as error:
        raise ModelError(f"{shape.name}: experts: {error}") from None
    least = min(experts.count, experts.per_token, experts.width, experts.every)
    if least < 1 or min(experts.shared, experts.dense_first) < 0:
        raise ModelError(f"{shape.name}: experts = {said}: sizes must be above zero")
    return {**changes, "experts": experts}
