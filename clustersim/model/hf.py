"""Hugging Face ``config.json`` -> Model, by the row of its family (:mod:`clustersim.model.families`).

A new ``model_type`` is a row in ``data/families``; what is missing in a config has the default of transformers' own
configuration class, and a note of the model says so.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from os.path import normpath
from pathlib import Path
from typing import Any

from clustersim.core.errors import ModelError, few, nearest
from clustersim.core.model import Model
from clustersim.core.paths import data_path
from clustersim.core.texts import Table, is_folder, json_table, text_of
from clustersim.model.base import TransformerShape
from clustersim.model.config import Config, config_of
from clustersim.model.encoder_decoders import STYLES, encoder_decoder
from clustersim.model.families import Family, by_type, families
from clustersim.model.names import described, same_family
from clustersim.model.options import with_options
from clustersim.model.resnet_configs import RESNETS, resnet_config
from clustersim.model.shapes import LONGEST, shape_of
from clustersim.model.speech import SPEECH, speech_encoder
from clustersim.model.towers import counted_images, image_note, resized, sized, with_tower
from clustersim.model.transformer_model import build, execution

_TOLD = 8
"""Fields that one note lists."""
FURTHER_TOKENS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
"""Fields of a config that count blocks which predict further tokens."""
MISSING = "not in the config"
"""How a note on fields that a config leaves out begins."""
LEFT_OUT = "blocks that predict further tokens are left out"
SLIP = 0.85
"""How alike a misspelt type and the one that is meant are: lama and llama 0.89, nemotron-nas and nemotron 0.8."""


def from_hf(
    config: Table | str | Path,
    *,
    seq_len: int | None = None,
    attention: str | None = None,
    implementation: str | None = None,
    name: str = "",
    **overrides: Any,
) -> Model:
    """A Model from an unchanged Hugging Face config.json.

    Parameters
    ----------
    config : the parsed file, or a path to it (or to its folder).
    seq_len : tokens per sample; the config's longest sequence, at most 8,192, by default.
    attention, implementation : how kernels run, see :class:`~clustersim.model.base.TransformerShape`.
    name : what to call it; ``_name_or_path``, the file's folder or its ``model_type`` by default.
    overrides : any other field of Shape, such as ``head="pretraining"`` for BERT (``"pooler"`` by default, the bare
        BertModel) or ``layers=2``; ``experts`` is a table of the sizes that change, ``{"count": 8, "per_token": 2}``.

    Raises :class:`ModelError` naming the file, the key and what it is for when one is missing or no number; an unknown
    ``model_type`` gives the nearest known one. So does an override that the family does not have
    (:func:`~clustersim.model.options.with_options`).
    """
    if has_no_shape(config):
        said = {"seq_len": seq_len, "attention": attention, "implementation": implementation}
        return _of_network(config, name, {key: value for key, value in said.items() if value is not None} | overrides)
    shape, notes = shape_from_hf(config, seq_len=seq_len, name=name)
    if "image_size" in overrides and shape.tower:
        shape = resized(shape, overrides.pop("image_size"))
    if shape.tower and overrides.get("images"):
        shape = replace(shape, images=counted_images(shape.name, overrides.pop("images")))
    attention, implementation = execution(attention, implementation)
    changes = {"attention": attention, "implementation": implementation} | overrides
    changed = with_options(shape, changes)
    if shape.tower:
        notes = tuple(image_note(shape) if " pixels a sample" in note else note for note in notes)
    if changed.mtp:
        notes = tuple(note for note in notes if not note.startswith(LEFT_OUT))
    return build(changed, notes)


UNSHAPED: dict[str, Callable[[str, Table, Table], tuple[Model, Config]]] = {
    **dict.fromkeys(STYLES, encoder_decoder),
    **dict.fromkeys(SPEECH, speech_encoder),
    **dict.fromkeys(RESNETS, resnet_config),
}
"""What reads a config of each ``model_type`` that is no stack of equal blocks alone."""


def has_no_shape(config: Table | str | Path) -> bool:
    """Whether a config is of an encoder and a decoder, which have no shape in common, of blocks behind
    convolutions, or of convolutions alone."""
    data = config if isinstance(config, dict) else config_file(Path(config))[1]
    kind = data.get("model_type")
    return isinstance(kind, str) and kind in UNSHAPED


def _of_network(config: Table | str | Path, name: str, options: Table) -> Model:
    """A model of :data:`UNSHAPED`, with notes of what was assumed."""
    where, data = (name or "config", config) if isinstance(config, dict) else config_file(Path(config))
    made, fields = UNSHAPED[str(data["model_type"])](where, data, options)
    return replace(made, name=_label(where, data, name), notes=(*made.notes, *_assumed(fields)))


def _label(where: str, data: Table, name: str) -> str:
    """What to call a model."""
    written = str(data.get("_name_or_path") or "")
    return name or written or (normpath(where) if where != "config" else str(data["model_type"]))


def shape_from_hf(
    config: Table | str | Path, *, seq_len: int | None = None, name: str = ""
) -> tuple[TransformerShape, tuple[str, ...]]:
    """The shape a config describes, and notes of what was assumed; raises as :func:`from_hf`."""
    where, data = (name or "config", config) if isinstance(config, dict) else config_file(Path(config))
    kind = data.get("model_type")
    if not isinstance(kind, str):
        hint = nearest("", by_type())
        raise ModelError(f"{where}: missing 'model_type', which says whose tensors these are; {hint}")
    if kind not in by_type():
        raise ModelError(_unknown(where, kind) + _read_inside(data))
    row = by_type()[kind]
    family = families()[row]
    fields = config_of(where, data, kind)
    notes: list[str] = []
    if family.vision:
        shape, parts, seen = with_tower(fields, family)
        notes.append(seen)
    else:
        shape = shape_of(fields, row, family)
        parts = []
        if shape.patches and shape.head == "none":
            shape = sized(shape, shape.patches.image)
    if shape.patches:
        if seq_len not in {None, shape.seq_len}:
            raise ModelError(
                f"{where}: an image of {shape.patches.image} pixels has {shape.seq_len} tokens, "
                f"not {seq_len}: give that seq_len, or change 'image_size' in the config"
            )
    elif seq_len is not None:
        if shape.positions == "learned" and shape.family == "mpt" and seq_len > shape.n_positions:
            raise ModelError(f"{where}: seq_len {seq_len} exceeds max_seq_len {shape.n_positions}")
        shape = replace(shape, seq_len=seq_len)
    else:
        notes.append(f"seq_len {shape.seq_len}: the config's longest, at most {LONGEST}")
    if not _is_shipped(config):
        for part in (fields, *parts):
            notes += _assumed(part)
    if family.note:
        notes.append(family.note)
    notes += _further_tokens(data, family)
    if shape.inputs:
        notes.append(
            "what blocks are told of their tokens is made with the embedding; pipeline stages do not send it on"
        )
    return replace(shape, name=_label(where, data, name)), tuple(notes)


def _further_tokens(data: Table, family: Family) -> list[str]:
    """The note that blocks which predict further tokens are left out, of a config that has some."""
    decoder = data.get("text_config", data)
    counts = {field: decoder.get(field) for field in FURTHER_TOKENS}
    field, count = next((pair for pair in counts.items() if pair[1]), ("", 0))
    ways = f"; mtp = {count} in model.options plays them" if family.mtp else ""
    return [f"{LEFT_OUT} ({field} {count}), as transformers' classes leave them out{ways}"] if count else []


def _is_shipped(config: Table | str | Path) -> bool:
    """Whether it is a publisher's own file that comes with the package: what it leaves out is meant so."""
    return not isinstance(config, dict) and Path(config).parent == data_path("data") / "models"


def _assumed(fields: Config) -> list[str]:
    """Notes of what the config does not say, and of what it says that changes nothing here."""
    notes = []
    if fields.defaults:
        values = ", ".join(f"{name} {json.dumps(value)}" for name, value in fields.defaults.items())
        notes.append(f"{MISSING}, so as transformers' {fields.kind} has it by default: {values}")
    unread = [f"{name} {fields.data[name]!r}" if _short(fields.data[name]) else name for name in fields.unread()]
    if unread:
        notes.append(f"fields that change nothing here: {few(unread, _TOLD)}")
    return notes


def _short(value: object) -> bool:
    return not isinstance(value, list | dict) and len(repr(value)) <= 20


_TRACED = "`clustersim trace-model` describes it where transformers has its module"


def _unknown(where: str, kind: str) -> str:
    """Why a ``model_type`` is not read, and what to do."""
    why = described(kind, model_type=True)
    if why:
        return f"{where}: model_type {kind!r} is {why}; {_TRACED}"
    hint = same_family(kind, (known for known in (*by_type(), *UNSHAPED) if _may_be_meant(kind, known)))
    if not hint.startswith("did you mean"):
        hint = (
            f"{len(by_type()) + len(UNSHAPED)} types are read, among them {few(sorted(by_type()), _TOLD)}; {_TRACED}, "
            "one of the same blocks may be written in its place, or a row added to data/families (clustersim/README.md)"
        )
    return f"{where}: unknown model_type {kind!r}; {hint}"


def _read_inside(data: Table) -> str:
    """What of a config that is not read is: its decoder's table."""
    for field in ("text_config", "llm_config", "language_config"):
        table = data.get(field)
        kind = table.get("model_type") if isinstance(table, dict) else None
        if isinstance(kind, str) and kind in by_type():
            return f"; its decoder alone is read, {kind}: write the table '{field}' as a config.json of its own"
    return ""


def _may_be_meant(kind: str, known: str) -> bool:
    """Whether one type can be a slip for another: a version or a variant of it is other blocks."""
    same_version = re.findall(r"\d+", kind) == re.findall(r"\d+", known)
    return same_version and difflib.SequenceMatcher(None, kind, known).ratio() >= SLIP


def config_file(path: Path) -> tuple[str, Table]:
    """Where a config.json is, by its path or its folder, and its fields."""
    file = path / "config.json" if is_folder(path) else path
    return str(file), json_table(text_of(file, ModelError), str(file), ModelError)
