"""A config's fields and its family's row -> :class:`~clustersim.model.base.TransformerShape`: the one reader of all
rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from clustersim.core.errors import ModelError
from clustersim.core.limits import MOST_LAYERS, counted
from clustersim.model.base import LIMITED, TransformerShape
from clustersim.model.config import Config
from clustersim.model.families import Family
from clustersim.model.hybrid_rules import Values
from clustersim.model.kinds import blocks_of
from clustersim.model.rules import RULES
from clustersim.model.shape_checks import checked
from clustersim.model.sizes import (
    Compressor,
    Delta,
    Experts,
    Indexer,
    Latent,
    LayerInputs,
    LowRankOutput,
    Ngrams,
    Patches,
    StateSpace,
)
from clustersim.model.vision import seeing

LONGEST = 8192
"""Tokens of a sample unless somebody says another number: Llama 3.1 allows 131,072 positions, but nobody means that
when they do not say a sequence length."""

NEEDED = ("layers", "d_model", "heads", "d_ff", "vocab", "experts.count", "experts.width")
"""Dimensions that a config must say: nobody means a default of these."""

PURPOSE = {
    "layers": "the number of blocks",
    "d_model": "the width of the model",
    "heads": "the number of attention heads",
    "kv_heads": "key-value heads",
    "head_dim": "the size of a head",
    "d_ff": "the width of the MLP",
    "vocab": "the number of tokens",
    "seq_len": "the longest sequence",
    "n_positions": "the rows of the position table",
    "embed_dim": "the width of the embedding",
    "token_types": "the number of segments",
    "window": "the tokens of a window",
    "streams": "the streams of the residual",
    "experts.count": "the number of experts",
    "experts.per_token": "the experts each token visits",
    "experts.width": "the width of an expert",
    "experts.shared": "the width of the shared expert",
    "experts.shared_of": "the number of shared experts",
    "experts.dense_first": "the number of leading dense blocks",
    "experts.every": "blocks from one with experts to the next",
    "experts.groups": "the number of groups of experts",
    "experts.group_limit": "the groups each token's experts are in",
    "experts.latent": "the width that tokens have on their way to the experts",
    "latent.q_rank": "the rank of the queries",
    "latent.kv_rank": "the rank of keys and values",
    "latent.nope": "elements of a head that are not rotated",
    "latent.rope": "elements of a head that are rotated",
    "latent.value": "elements of a head's value",
    "patches.image": "pixels of a side",
    "patches.side": "pixels of a patch's side",
    "patches.channels": "colours of a pixel",
}
"""What a dimension is, for messages."""

ROTATED_SHARE = "partial_rotary_factor"
"""The share of a head's elements that are rotated, in a config or its ``rope_parameters``; older files have
``rotary_pct`` (GPT-NeoX) or ``rope_pct`` (StableLM)."""

_NONE: tuple[str, ...] = ("experts.shared", "experts.shared_of", "experts.dense_first", "experts.groups")
_NONE += ("experts.group_limit", "experts.zero", "latent.rope", "token_types")
"""Dimensions that may be zero."""
_EMPTY = dict.fromkeys(
    ("window", "latent.q_rank", "embed_dim", "experts.groups", "experts.group_limit", "experts.latent"), 0
)
"""What null means for a dimension: that there is none."""
_QUIET = ("activation", "window", "experts.groups", "experts.group_limit", "experts.latent")
"""Dimensions whose default nobody needs to be told."""
_SIDES = ("patches.image", "patches.side")
"""Dimensions that may be written for both sides."""
_RATES = ("attn_dropout", "hidden_dropout")
_STRUCTS: dict[str, type[msgspec.Struct]] = {
    "experts": Experts,
    "latent": Latent,
    "delta": Delta,
    "space": StateSpace,
    "indexer": Indexer,
    "compressor": Compressor,
    "low_output": LowRankOutput,
    "ngrams": Ngrams,
    "inputs": LayerInputs,
    "patches": Patches,
}
_ROUTED = frozenset(("experts.count", "experts.width", "experts.per_token"))
_GATED_NAMES = {"silu": "swiglu", "swish": "swiglu", "swiglu": "swiglu", "geglu": "geglu"}
_GELUS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python", "gelu_10", "relu", "quick_gelu")
_PLAIN_NAMES = {
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu_new",
    "gelu_python": "gelu",
    "gelu_10": "gelu",
    "swish": "silu",
}


def shape_of(c: Config, row: str, family: Family) -> TransformerShape:
    """The shape that a config describes. Raises :class:`ModelError` naming file, field and value."""
    fixed = dict(family.sets)
    gated = bool(fixed.pop("gated", False))
    values: Values = {"name": c.where, "family": row} | fixed | _dimensions(c, family)
    if "activation" in values:
        values["activation"] = _activation(values["activation"], gated)
    for rule in family.rules:
        RULES[rule](c, values)
    _complete(c, values)
    _refuse_no_mlp(c, family, values)
    if family.kinds:
        values |= blocks_of(c, family.kinds, values)
    if values.pop("rotated_windows", False) and values.get("mixers"):
        values.setdefault("rotates", tuple(mixer in LIMITED for mixer in values["mixers"]))
    window = _first(c, family.reads.get("window") or "sliding_window")
    if values.get("window") and not c.spelled(window) and c.default(window) == values["window"]:
        c.defaults[window] = values["window"]  # rules know whether the class's own counts
    _refuse_missing(c, family, values)
    c.refuse_unread()
    shape = _assembled(values)
    if shape.patches is None and c.defaults:
        try:
            checked(shape)
        except ModelError as error:
            named = ", ".join(f"{name} {value}" for name, value in c.defaults.items())
            raise ModelError(f"{error}; not in the config, so by default of {c.kind}: {named}") from None
    return shape


def _dimensions(c: Config, family: Family) -> Values:
    """Dimensions as the config's fields have them."""
    needed = {*NEEDED, *family.needs} - set(family.optional)
    values: Values = {}
    for dimension, keys in family.reads.items():
        if keys:
            key = _first(c, keys)
            none = c.has(key) and "experts.count" in family.optional and c.value(key) == 0
            if dimension == "experts.count" and ((c.spelled(key) and not c.has(key)) or none):
                # Null says that there are none; so does zero in a family that may have none.
                needed -= _ROUTED
                if none:
                    continue
            if dimension in _ROUTED - needed and "experts.count" not in values and c.has(key) and c.value(key) == 0:
                continue  # Granite 4 without experts says of each token that it visits none
            values[dimension] = _field(c, dimension, key, dimension in needed)
            if dimension == "layers":
                counted(values["layers"], MOST_LAYERS, f"{c.where}: '{key}'", ModelError)
            if dimension == "kv_heads" and not values[dimension] and not c.spelled(key):
                c.defaults[key] = values["heads"]
    return values


def _first(c: Config, keys: str) -> str:
    """The field that is there, of several that a row names; where none is, the first that the class has."""
    names = keys.split("|")
    there = [name for name in names if c.has(name)] or [name for name in names if c.default(name) is not None]
    return there[0] if there else names[0]


def _field(c: Config, dimension: str, key: str, needed: bool) -> Any:
    """One dimension as the config says it, or as the class has it by default; None where that says nothing."""
    what = PURPOSE.get(dimension, f"{dimension} of the model")
    kind = _type_of(dimension)
    if needed:
        return c.need(key, what)
    if dimension in _RATES:
        return c.rate(key, 0.0)
    if kind == "bool":
        return c.flag(key, False)
    if kind == "str":
        return c.text(key, "")
    value = c.value(key)
    if value is None:
        value = _EMPTY.get(dimension)
        if value is None and c.spelled(key) and dimension != "experts.count":
            value = c.default(key)
        return value[0] if dimension in _SIDES and isinstance(value, list) else value
    if value == 0 and not isinstance(value, bool) and (dimension in _NONE or dimension in _EMPTY):
        number = 0
    else:
        number = (c.side if dimension in _SIDES else c.number)(key, 0, what)
    if dimension in _QUIET:
        c.defaults.pop(key, None)
    elif not c.has(key):
        c.defaults[key] = number
    return number


def _type_of(dimension: str) -> str:
    """``int``, ``bool`` or ``str``."""
    part, _, field = dimension.rpartition(".")
    if part:
        kinds = {info.name: info.type for info in msgspec.structs.fields(_STRUCTS[part])}
        return getattr(kinds.get(field, int), "__name__", "int")
    kinds = {info.name: info.type for info in dataclasses.fields(TransformerShape)}
    return str(kinds.get(dimension, "int"))


def _activation(name: str, gated: bool) -> str:
    """An MLP's activation as clustersim writes it; of a gated MLP the kind of its gate."""
    if not gated:
        return _PLAIN_NAMES.get(name, name)
    return "geglu" if name in _GELUS else _GATED_NAMES.get(name, name)


def _complete(c: Config, values: Values) -> None:
    """What follows from other dimensions."""
    heads = values["heads"]
    width = values["d_model"]
    if not values.get("kv_heads"):
        values["kv_heads"] = heads
    if "latent.kv_rank" in values:
        values["head_dim"] = values["latent.nope"] + values["latent.rope"]
    elif not values.get("head_dim"):
        if width % heads:
            raise ModelError(f"{c.where}: {heads} attention heads do not divide a width of {width} evenly")
        values["head_dim"] = width // heads
        is_read = "head_dim" in c.fields.fields or "head_dim" in c.read
        if is_read and not c.spelled("head_dim"):
            c.defaults["head_dim"] = width // heads
    _rotated_part(c, values)
    if values.get("d_ff") is None:
        values["d_ff"] = 4 * width
    longest = values.get("seq_len") or 4096
    learned = values.get("positions", "learned") == "learned"
    any_length = values.pop("any_length", False)
    values["seq_len"] = longest if learned or any_length else min(longest, LONGEST)
    if learned and not values.get("n_positions") and "patches.side" not in values:
        values["n_positions"] = longest
    shared = values.pop("experts.shared_of", None)
    if shared is not None:
        values["experts.shared"] = shared * (values.get("experts.width") or 0)
    if not values.get("experts.count"):
        for name in [name for name in values if name.startswith("experts.")]:
            del values[name]


def _rotated_part(c: Config, values: Values) -> None:
    """How many elements of a head are rotated, of a class that may rotate a share of them.

    Raises :class:`ModelError` for a share that is none.
    """
    usual = c.default(ROTATED_SHARE)
    if usual is None or values.get("positions") != "rotary" or "latent.kv_rank" in values:
        return
    rotation = c.data.get("rope_parameters")
    inner = rotation.get(ROTATED_SHARE) if isinstance(rotation, Mapping) else None
    stated = [inner, *(c.data.get(name) for name in (ROTATED_SHARE, "rotary_pct", "rope_pct"))]
    share = next((value for value in stated if value is not None), None)
    if share is None:
        share = c.defaults[ROTATED_SHARE] = usual
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
        raise ModelError(f"{c.where}: '{ROTATED_SHARE}' = {share!r} must be a number above zero, at most 1")
    elements = int(values["head_dim"] * share)
    if 0 < elements < values["head_dim"]:
        values.setdefault("rotated", elements)


def _refuse_no_mlp(c: Config, family: Family, values: Values) -> None:
    """Raises :class:`ModelError` where a class whose MLPs are all experts is said to have none."""
    key = family.reads.get("experts.count")
    has_mlp = any(line.split()[0] in {"dense", "up", "gate_up"} for line in family.block)
    if key and not has_mlp and "experts.count" not in family.optional and not values.get("experts.count"):
        raise ModelError(
            f"{c.where}: '{_first(c, key)}' = null, but {c.kind} has no other MLP; write the number of experts"
        )


def _refuse_missing(c: Config, family: Family, values: Values) -> None:
    """Raises :class:`ModelError` for a part of which a dimension has neither a value nor a default."""
    for part, kind in _STRUCTS.items():
        if not any(name.startswith(f"{part}.") and value is not None for name, value in values.items()):
            continue
        for info in msgspec.structs.fields(kind):
            dimension = f"{part}.{info.name}"
            if info.required and values.get(dimension) is None:
                key = _first(c, family.reads.get(dimension) or dimension)
                what = PURPOSE.get(dimension, f"{dimension} of the model")
                raise ModelError(f"{c.where}: missing '{key}', {what}")


def _assembled(values: Values) -> TransformerShape:
    """The shape, with parts made of the dimensions that are named by them."""
    whole: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    for part, kind in _STRUCTS.items():
        own = {
            name.partition(".")[2]: value
            for name, value in values.items()
            if name.startswith(f"{part}.") and value is not None
        }
        if own:
            whole[part] = kind(**own)
    patches = whole.pop("patches", None)
    shape = TransformerShape(**{name: value for name, value in whole.items() if value is not None})
    if not patches:
        return shape
    shape = replace(shape, patches=patches)
    return seeing(shape, patches) if shape.head == "classes" else shape
