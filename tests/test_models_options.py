"""Options of a model: each changes it, or is refused by one error that names the field, in every family."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import lru_cache

import msgspec
import pytest

from clustersim.core.errors import ModelError
from clustersim.model import model, options
from clustersim.model.base import HEADS, NORM_PLACES, NORMS, POSITIONS, TransformerShape
from clustersim.model.named_models import catalog, config_of
from clustersim.model.named_models import shape as shape_of
from clustersim.model.options import with_options
from clustersim.model.transformer_model import build

WORDS = {"norm": NORMS, "positions": POSITIONS, "head": HEADS, "norm_places": NORM_PLACES}
OTHER = {"activation": ("relu", "swiglu"), "qk_norm_of": ("width", "head"), "experts_implementation": ("grouped_mm",)}
SKIPPED = {"name", "seq_len", "attention", "implementation"}
"""Fields of ``[model]`` itself."""
EAGER = {"attention": "eager", "implementation": "eager"}


@lru_cache(maxsize=1)
def shapes() -> dict[str, TransformerShape]:
    """A small shape of every family of which a config is shipped."""
    by_family: dict[str, TransformerShape] = {}
    for name in catalog():
        shape = shape_of(name, {}) if config_of(name) else None
        if shape is not None:
            shape = shape if shape.patches else replace(shape, seq_len=64)
            experts = (
                msgspec.structs.replace(shape.experts, count=max(8, shape.experts.per_token)) if shape.experts else None
            )
            by_family.setdefault(shape.family, replace(shape, layers=min(shape.layers, 6), experts=experts))
    return by_family


def other_values(shape: TransformerShape, name: str) -> list[object]:
    """Values that a field does not have."""
    value = getattr(shape, name)
    if name in WORDS or name in OTHER:
        return [word for word in (WORDS | OTHER)[name] if word != value]
    if name == "experts":
        return [{size: _other(getattr(value, size))} for size in value.__struct_fields__] if value else [{"count": 8}]
    if name in {"mixers", "mlps", "widths", "family"}:
        return [("full",)]
    if name == "kv_heads":
        return [1 if value > 1 else shape.heads]
    return [_other(value)] if isinstance(value, bool | int) else [{"heads": 2}]


def _other(value: bool | int) -> bool | int:
    return not value if isinstance(value, bool) else 2 * value or 16


def differs(shape: TransformerShape, changed: TransformerShape) -> bool:
    """Whether models of two shapes differ, where scores are in memory or where they are not."""
    return any(build(replace(changed, **how)).layers != build(replace(shape, **how)).layers for how in ({}, EAGER))


@pytest.mark.parametrize("family", sorted(shapes()))
def test_every_option_of_a_family_changes_something_or_is_refused(family: str) -> None:
    shape = shapes()[family]
    refused = changed = 0
    for name in sorted({field.name for field in dataclasses.fields(TransformerShape)} - SKIPPED):
        for value in other_values(shape, name):
            try:
                answer = with_options(shape, {name: value})
                assert differs(shape, answer), (name, value)
                changed += 1
            except ModelError:
                refused += 1
    assert min(refused, changed) > 10


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mixtral-8x7b", {"experts": {"shared": 1024}}, r"experts.shared = 1024.*\(at \$.model.options.experts.shared"),
        ("mixtral-8x7b", {"experts": {"shared": 1024}}, "its experts have count, per_token, width"),
        ("deepseek-v3", {"kv_heads": 8}, "kv_heads = 8"),
        ("llama3-8b", {"sinks": True}, r"sinks = True.*\(at \$.model.options.sinks\)"),
        ("llama3-8b", {"token_types": 2}, "token_types = 2"),
        ("llama3-8b", {"head": "mlm"}, "head = 'mlm'"),
        ("llama3-8b", {"latent": {"kv_rank": 4}}, "is no option; change the config"),
        ("gpt2", {"mtp": 1}, "mtp = 1"),
    ],
)
def test_an_option_that_a_family_does_not_have_is_refused(name: str, options: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model(name, **options)


def test_no_shape_is_built_twice_for_the_options_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[TransformerShape] = []
    monkeypatch.setattr(options, "build", lambda shape: built.append(shape) or build(shape))
    shape = shapes()["llama"]
    with_options(shape, {"d_ff": 2048, "heads": 16, "vocab": 1024, "window": 32})
    assert built
    assert all(shape not in built[:i] for i, shape in enumerate(built))
    count = len(built)
    with pytest.raises(ModelError):
        with_options(shape, {"sinks": True})
    assert len(built) == count + 4  # with and without it, and both again with scores in memory


def test_what_an_option_restates_and_what_works_with_another_is_accepted() -> None:
    assert model("mixtral-8x7b", experts={"shared": 0}, layers=32).layers == model("mixtral-8x7b").layers
    with_shared = model("qwen3-30b-a3b", experts={"shared": 512, "shared_gate": True}, layers=2)
    assert with_shared.parameters - model("qwen3-30b-a3b", layers=2).parameters == 2 * (3 * 512 + 1) * 2048
    assert model("bert-large-uncased", head="mlm", head_positions=20).layers
