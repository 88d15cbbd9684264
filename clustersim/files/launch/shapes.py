"""A model's sizes, as launch files say them <-> ``[model]``: the shipped model that has them, or nearly has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from clustersim.core.errors import ModelError, ScenarioError
from clustersim.core.paths import shipped
from clustersim.core.texts import Table, shown
from clustersim.files.launch.files import OptionValue
from clustersim.files.launch.open_questions import OpenQuestion
from clustersim.files.launch.said_sizes import Leaves, completed, counted, expert_layers, has_norm_bias
from clustersim.model import named_models as models
from clustersim.model.base import TransformerShape
from clustersim.model.options import RefusedOption

SIZES = ("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab", "n_positions")
"""Of a shipped model, what ``model.options`` may change. The rest is what kind of model it is."""
KINDS = ("gated", "norm", "norm_places", "positions", "tied", "mlp_bias", "qkv_bias", "qk_norm", "mla")
EXPERTS = ("count", "per_token", "width", "shared")
BASES = ("llama2-7b", "gpt2", "bloom-176b", "mixtral-8x7b", "qwen3-30b-a3b")
"""Shipped models of plain blocks, from which another kind is described by ``model.options``."""
WHERE_SAID = ("window", "embedding_norm", "norm_weight", "activation")
"""What a model has, or has not, as everybody else only where a file says so."""
SAID_ACTIVATIONS = ("relu2",)
"""Nonlinearities that a model has only where a file says so; the others follow from whether its MLPs are gated."""
WEAK = ("attn_dropout", "hidden_dropout")
"""Kernels that a model has or has not, whatever it is."""


@dataclass(frozen=True)
class ShippedModel:
    """A shipped model, what to change of it, and a sentence that says so.

    dense_ff : width of dense MLPs that files say of a model whose blocks have experts all; 0 where they say none.
    """

    name: str
    options: Leaves
    note: str
    dense_ff: int = 0


def leaves(shape: TransformerShape) -> Leaves:
    """A shape as the tables of options name it."""
    leaf_values: Leaves = {name: getattr(shape, name) for name in (*SIZES, *WEAK)}
    leaf_values |= {name: getattr(shape, name) for name in KINDS if name != "mla"}
    if shape.positions != "learned":
        del leaf_values["n_positions"]  # angles are computed for any length
    leaf_values |= {"mla": shape.latent is not None, "grouped": shape.kv_heads != shape.heads}
    leaf_values |= {"window": shape.window} if _limits(shape) else {}
    leaf_values |= {"window_every": str(every)} if _limits(shape) and (every := _full_every(shape)) else {}
    leaf_values |= {"activation": shape.activation} if shape.activation in SAID_ACTIVATIONS else {}
    leaf_values |= {"embedding_norm": True} if shape.embedding_norm else {}
    leaf_values |= {} if shape.norm_weight else {"norm_weight": False}
    is_biased = shape.norm_bias or shape.norm != "layernorm" or not shape.norm_weight
    leaf_values |= {} if is_biased else {"norm_bias": False}
    if shape.latent is not None:
        leaf_values |= {"latent.q_rank": shape.latent.q_rank, "latent.kv_rank": shape.latent.kv_rank}
    if shape.experts is not None:
        experts = shape.experts
        leaf_values |= {
            "experts.count": experts.count,
            "experts.per_token": experts.per_token,
            "experts.width": experts.width,
        }
        leaf_values |= {"experts.shared": experts.shared} if experts.shared else {}
        first = experts.dense_first
        leaf_values["experts.layers"] = f"([0]*{first}+[1]*{shape.layers - first})" if first else str(experts.every)
    return leaf_values


OTHER_KINDS = (
    "activation",
    "wide_norms",
    "wide_rotation",
    "norm_weight",
    "qk_norm_of",
    "sinks",
    "attn_gate",
    "output_gate",
    "q_rank",
    "value_size",
    "kv_from",
    "mtp",
    "head_bias",
    "mixers",
    "mlps",
    "widths",
    "final_norm",
)
"""What a model is besides, which no option of a table says."""


def unlike(first: TransformerShape | None, second: TransformerShape | None) -> Iterator[tuple[str, Any, Any]]:
    """(field, of the first, of the second): what two transformers differ in of :data:`OTHER_KINDS`."""
    if first is None or second is None:
        return
    for name in OTHER_KINDS:
        values = getattr(first, name), getattr(second, name)
        if name == "mixers" and _windows(first) == _windows(second):
            continue
        if values[0] != values[1]:
            yield name, *values


def _windows(shape: TransformerShape) -> tuple[int, int]:
    """Tokens of a window that leaves some out, and each how many-th block has none."""
    return (shape.window, _full_every(shape)) if _limits(shape) else (0, 0)


def _limits(shape: TransformerShape) -> bool:
    """Whether a window leaves tokens out."""
    return 0 < shape.window < shape.seq_len


def _full_every(shape: TransformerShape) -> int:
    """Each so many-th block attends to all tokens, where the others have a window; 0 where none does."""
    if not shape.window or shape.full_every:
        return shape.full_every
    every = len(shape.mixers)
    return every if every and shape.mixers == ("sliding",) * (every - 1) + ("full",) else 0


@lru_cache(maxsize=2)
def _shipped(causal: bool = True) -> dict[str, Leaves]:
    names = (name for name in shipped("data/models", ".json"))
    shapes = ((name, models.shape(name, {})) for name in names)
    return {
        name: leaves(shape)
        for name, shape in shapes
        if shape is not None and shape.causal == causal and shape.activation != "geglu"  # Gemma's, which none means
    }


def model_for(file: str, stated: Table, *, causal: bool = True, seq_len: int = 0, words: str = "") -> ShippedModel:
    """The shipped model of these sizes, or that of its kind whose sizes differ least, with the differences as options.

    causal : whether it is a decoder; else an encoder, whose tokens see all others. seq_len : tokens of a sample, 0
        where none says; a window of as many or more changes nothing. words : names of files and folders, which tell
        models of the same sizes apart where none says the vocabulary.

    Raises :class:`ScenarioError` naming ``file`` where none is of the kind, or too little is said.
    """
    if "layers" not in stated or "d_model" not in stated or "heads" not in stated:
        raise OpenQuestion(
            file,
            "does not say what model it is (layers, width and heads, or a name); "
            "give --model, such as --model llama3-8b, or a config.json",
        )
    if stated.get("gated") and stated.get("activation"):
        raise ScenarioError(
            f"{file}: says squared ReLUs ({stated['activation']}) and gated MLPs (swiglu), which no model has both; "
            "leave one out"
        )
    wanted = completed(stated) | ({"embedding_norm": bool(stated.get("embedding_norm"))} if causal else {})
    wanted.setdefault("norm_weight", True)
    name = _nearest(wanted, stated, causal, words)
    if name is None:
        return _altered(file, wanted, causal)
    has = _shipped(causal)[name]
    options = {leaf: wanted[leaf] for leaf in (*SIZES, *WEAK) if leaf in wanted and wanted[leaf] != has.get(leaf)}
    options |= _kind_options(file, wanted, has, seq_len)
    dense_ff = options.pop("d_ff", 0) if _has_no_dense(has) else 0
    changed = {leaf: value for leaf, value in options.items() if leaf in (*SIZES, "window", "full_every", "activation")}
    sentence = f"the model has the sizes of {name}"
    if changed:
        sentence = f"the model is of {name}'s kind, with " + ", ".join(f"{k} = {v}" for k, v in changed.items())
    return ShippedModel(name, options, sentence + _vocabulary(wanted, has["vocab"]), dense_ff)


def _nearest(wanted: Leaves, stated: Table, causal: bool, words: str) -> str | None:
    """The shipped model of this kind whose sizes differ least; None where none is of the kind."""
    named = "" if "vocab" in wanted else _letters(words)
    best: tuple[int, bool, bool, str] | None = None
    for name, has in _shipped(causal).items():
        leaves_asked = (*KINDS, *_of(wanted), *_of(has))
        unlike = any(wanted.get(leaf, has.get(leaf)) != has.get(leaf) for leaf in leaves_asked)
        unlike |= wanted.get("activation") is None and "activation" in has
        unlike |= causal and wanted["embedding_norm"] != has.get("embedding_norm", False)
        unlike |= wanted["norm_weight"] != has.get("norm_weight", True)
        unlike |= wanted.get("norm_bias", has.get("norm_bias", True)) != has.get("norm_bias", True)
        if unlike or any((leaf in wanted) != (leaf in has) for leaf in ("experts.count", "latent.kv_rank")):
            continue
        away = sum(wanted.get(size, has.get(size)) != has.get(size) for size in SIZES)
        candidate = (away, _letters(name) not in named, not _is_as_long(name, stated), name)
        best = min(best or candidate, candidate)
    return best and best[-1]


def _letters(words: str) -> str:
    """A name's letters and digits, whatever case and marks it is written with.

    >>> _letters("Meta-Llama-3.1_8B")
    'metallama318b'
    """
    return re.sub(r"[\W_]+", "", words.lower())


def _kind_options(file: str, wanted: Leaves, has: Leaves, seq_len: int) -> Leaves:
    """What a shipped model has otherwise of its activation, and of its window where that leaves out a token."""
    options: Leaves = {}
    if has.get("window") != wanted.get("window"):
        options["window"] = wanted.get("window") or 0  # which nobody has who does not say so
    if "activation" in wanted and has.get("activation") != wanted["activation"]:
        options["activation"] = wanted["activation"]
    if "window" in wanted and has.get("window_every") != wanted.get("window_every"):
        options["full_every"] = _frequency(file, str(wanted.get("window_every", "0")))
    windows = [leaf_values.get("window") or 0 for leaf_values in (wanted, has)]
    if all(not window or 0 < seq_len <= window for window in windows):
        options.pop("window", None)
        options.pop("full_every", None)
    return options


def _is_as_long(name: str, stated: Table) -> bool:
    """Whether a shipped model was made for as many tokens as are said, which tells models of like sizes apart."""
    shape = models.shape(name, {})
    return shape is not None and shape.seq_len == stated.get("n_positions")


def _frequency(file: str, told: str) -> int:
    """Each how many-th block attends to all tokens. Raises :class:`ScenarioError` for a pattern of one's own."""
    if not told.isdigit():
        raise ScenarioError(
            f"{file}: --window-attn-skip-freq {told}: a pattern of blocks is read of a config.json alone: --model PATH"
        )
    return int(told)


CHANGED = (*SIZES, "tied")
"""Sizes that files may change of a model that they name."""
WHOLE = {"shape.layers", "shape.d_model", "shape.heads"}
"""Sizes without which files do not describe a model."""


def altered(fields: Table, by: Mapping[str, OptionValue]) -> list[str]:
    """Put sizes that options say beside a model's name into ``model.options``; returns a note.

    by : who said each field. The size of a head follows from the width, where the named model's does.
    """
    stated = {name: fields[f"shape.{name}"] for name in CHANGED if f"shape.{name}" in by and f"shape.{name}" in fields}
    is_said = any(name.startswith("shape.") for name in by)
    base = models.shape(str(fields["model.name"]), {}) if is_said else None
    if base is None:
        return []
    if base.positions != "learned":
        stated.pop("n_positions", None)  # angles are computed for any length
    if _has_no_dense(leaves(base)):
        stated.pop("d_ff", None)  # which no MLP has
    width, heads = stated.get("d_model", base.d_model), stated.get("heads", base.heads)
    if base.head_dim * base.heads == base.d_model and isinstance(heads, int) and heads > 0:
        stated.setdefault("head_dim", width // heads)
    if base.kv_heads == base.heads:
        stated.setdefault("kv_heads", heads)
    if "d_model" in stated and by["shape.d_model"].name.endswith("n_embd"):
        stated.setdefault("d_ff", 4 * width)  # as GPT2Config has n_inner
    changes = {name: value for name, value in stated.items() if getattr(base, name) != value}
    changes |= _altered_experts(fields, by, base)
    if not changes:
        return []
    fields["model.options"] = {**fields.get("model.options", {}), **changes}
    return [f"the model is {fields['model.name']} with " + ", ".join(f"{k} = {v}" for k, v in changes.items())]


def _altered_experts(fields: Table, by: Mapping[str, OptionValue], base: TransformerShape) -> Leaves:
    """What options say of a named model's experts, and of the blocks that have them, otherwise than it has."""
    experts = base.experts
    if experts is None:
        return {}
    own = {name: fields.get(f"shape.experts.{name}") for name in EXPERTS if f"shape.experts.{name}" in by}
    layers = by.get("shape.experts.layers")
    if layers is not None:
        own |= expert_layers(str(fields["shape.experts.layers"]), layers, "")
    changed = {name: value for name, value in own.items() if value is not None and getattr(experts, name) != value}
    return {"experts": changed} if changed else {}


def is_config_path(model: str) -> bool:
    """Whether a model that is given is the path of its ``config.json``, and not a shipped one's name."""
    return model.endswith(".json") or "/" in model


def refuse_contradiction(model: str, folder: Path, fields: Table, by: Mapping[str, OptionValue]) -> None:
    """Raise :class:`ScenarioError` where a file says other sizes than the ``model`` that is given beside it has.

    model : a shipped name, or the path of a ``config.json`` from ``folder``. by : who said each field.
    """
    stated = [name for name in ("layers", "d_model", "heads", "experts.count") if f"shape.{name}" in by]
    base = models.shape(folder / model if is_config_path(model) else model, {}) if stated else None
    if base is None:
        return
    for name in stated:
        part, _, field = name.rpartition(".")
        own = getattr(getattr(base, part) if part else base, field, 0)
        option, value = by[f"shape.{name}"], fields.get(f"shape.{name}")
        if value is not None and value != own:
            raise ScenarioError(
                f"{option.where}: {option.name} {shown(option.value)}, where --model {model} has {own}; "
                "leave one of them out, or give a config.json of these sizes"
            )


def _has_no_dense(has: Leaves) -> bool:
    """Whether every block has experts, so that nothing is as wide as a dense MLP."""
    return has.get("experts.layers") == "1"


def with_expert_layers(found: ShippedModel, layers: str, by: OptionValue | None, file: str) -> ShippedModel:
    """The model with experts in the layers that Megatron-LM's ``moe_layer_freq`` says: each so many-th, or all behind
    some that are dense. Raises :class:`ScenarioError` for another pattern."""
    shape = models.shape(found.name, found.options)
    if shape is None or shape.experts is None:
        return found
    sizes = expert_layers(layers, by, file)
    dense, every = sizes["dense_first"], sizes["every"]
    changes = {name: size for name, size in sizes.items() if getattr(shape.experts, name) != size}
    if not changes:
        return found
    options = found.options | {"experts": dict(found.options.get("experts", {})) | changes}
    if found.dense_ff and (dense or every > 1):
        options["d_ff"] = found.dense_ff
    words = ", ".join(f"{name} = {size}" for name, size in changes.items())
    return ShippedModel(found.name, options, f"{found.note}; experts with {words}")


def _vocabulary(wanted: Leaves, usual: int) -> str:
    return "" if "vocab" in wanted else f"; its vocabulary, which the files do not say, has {usual:,} tokens"


def _altered(file: str, wanted: Leaves, causal: bool) -> ShippedModel:
    """A shipped model whose kind is changed too, where that has as many parameters as the sizes come to.

    Raises :class:`ScenarioError` naming ``file`` where none has.
    """
    for name in BASES if causal and not wanted.get("mla") else ():
        shape = models.shape(name, {})
        if shape is None or (shape.experts is not None) != bool(wanted.get("experts.count")):
            continue
        changes = {field: value for field, value in _fields(wanted).items() if getattr(shape, field) != value}
        if shape.experts is not None:
            sizes = {leaf: wanted[f"experts.{leaf}"] for leaf in EXPERTS if f"experts.{leaf}" in wanted}
            changes["experts"] = {leaf: size for leaf, size in sizes.items() if getattr(shape.experts, leaf) != size}
        changes = {field: value for field, value in changes.items() if value != {}}
        if wanted.get("positions") == "learned" and not wanted.get("n_positions") and not shape.n_positions:
            raise ScenarioError(
                f"{file}: positions are learned where no option says otherwise, and none says how many; say "
                "max_position_embeddings, or position_embedding_type rope"
            )
        dense_ff = changes.pop("d_ff", 0) if _has_no_dense(leaves(shape)) else 0
        try:
            made = models.model(
                name, **changes, seq_len=min(shape.seq_len, changes.get("n_positions") or shape.seq_len)
            )
        except RefusedOption:
            continue
        except ModelError as wrong:
            raise ScenarioError(f"{file}: {wrong}") from None
        if made.parameters == counted({"vocab": shape.vocab} | wanted):
            words = ", ".join(f"{field} = {value}" for field, value in changes.items())
            sentence = f"no shipped model is of this kind; it is {name} with {words}"
            return ShippedModel(name, changes, sentence + _vocabulary(wanted, shape.vocab), dense_ff)
    kind = ", ".join(f"{leaf} {wanted[leaf]}" for leaf in (*KINDS, *_of(wanted)) if leaf in wanted) or "dense"
    raise ScenarioError(
        f"{file}: no shipped model is of this kind ({kind}); describe it in a config.json: --model PATH"
    )


def _fields(wanted: Leaves) -> Leaves:
    """What is said, as :class:`~clustersim.model.base.TransformerShape` has it."""
    fields = {leaf: wanted[leaf] for leaf in (*SIZES, *WEAK, *KINDS, *WHERE_SAID) if leaf in wanted}
    fields.pop("mla", None)
    if "gated" in fields:
        gated = fields.pop("gated")
        fields.setdefault("activation", "swiglu" if gated else "gelu")
    if "norm" in fields:
        fields["norm_bias"] = has_norm_bias(wanted)
    if "mlp_bias" in fields:
        fields["out_bias"] = wanted.get("out_bias", fields["mlp_bias"])
    return fields


def _of(leaf_values: Leaves) -> list[str]:
    return [leaf for leaf in leaf_values if leaf.startswith(("experts.", "latent."))]
