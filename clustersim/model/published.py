"""Configs of published models by name: files in ``data/models``, and rows of ``data/models.toml``."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path

from clustersim.core.errors import ModelError
from clustersim.core.paths import data_path, shipped
from clustersim.core.texts import Table, data_table, json_table, text_of
from clustersim.model.names import names


@cache
def configs() -> tuple[str, ...]:
    """Names of all whose config.json is known, sorted."""
    return tuple(sorted({*shipped("data/models", ".json"), *_rows()}))


def config(name: str) -> Table:
    """The config.json of one of :func:`configs`, for the caller to change."""
    if name in _rows():
        return copy.deepcopy(_rows()[name][1])
    path = source(name)
    return json_table(text_of(path, ModelError), str(path), ModelError)


def source(name: str) -> Path:
    """The file that a config is in: its own, or the table of rows."""
    return data_path("data") / ("models.toml" if name in _rows() else f"models/{name}.json")


def parameters() -> dict[str, float]:
    """What the page of each model that is a row says it has [billions]."""
    return {name: total for name, (total, _) in _rows().items()}


@cache
def _rows() -> dict[str, tuple[float, Table]]:
    made = {}
    for group in data_table("models")["class"]:
        for name, (total, *values) in group["models"].items():
            fields = copy.deepcopy(group["all"])
            for field, value in zip(group["fields"], values, strict=True):
                *parts, last = field.split(".")
                table = fields
                for part in parts:
                    table = table[part]
                table[last] = copy.copy(value)
            made[name] = (float(total), _unset(fields))
    return made


def _unset(fields: Table) -> Table:
    """Fields with null for what TOML has no word for."""
    return {
        name: _unset(value) if isinstance(value, dict) else None if value == "" else value
        for name, value in fields.items()
    }


# ---- what people call them -------------------------------------------------------------------------------------------

_SAME = frozenset(
    ("instruct", "chat", "it", "base", "hf", "pt", "deduped", "thinking", "think", "reasoning", "sft", "dpo")
)
"""Words behind a size in the name of a model that was trained further, or saved otherwise: its sizes are the same."""
_SIXTEEN_BITS = re.compile(r"[-_](bf16|fp16)$", re.IGNORECASE)
"""Behind the name of a model whose weights somebody saved in 16 bits; in fewer it is another model to a trainer."""
_MIDWAY = re.compile(r"[-_]intermediate[-_]step[-_].*$", re.IGNORECASE)
"""Behind the name of a model that was saved before its training ended."""
_CACHED = re.compile(r"^models--[^/]+--([^/]+)$")
"""The folder of a model in the hub's cache, which has its revisions below it."""


def known_as(name: str) -> str | None:
    """The config that a name on the hub, or the folder of a model, has the sizes of; None where none is known.

    A name is compared word by word and number by number, so that none is taken for its neighbour: behind a size it
    may end in what changes none (``-Instruct``, ``-it``, ``-hf``, ``-SFT``, ``-BF16``), and in a date of four digits.

    >>> known_as("Qwen/Qwen2.5-7B-Instruct"), known_as("/models/gemma-3-4b-it"), known_as("me/Qwen2.5-7B-mine")
    ('qwen2-7b', 'gemma3-4b', None)
    """
    parts = [part.replace("___", ".") for part in name.rstrip("/").split("/")]  # as ModelScope's cache has dots
    cached = next((found[1] for part in parts if (found := _CACHED.match(part))), parts[-1])
    words = _words(_MIDWAY.sub("", _SIXTEEN_BITS.sub("", cached)))
    for tried in (words, _plain(words), _plain(words[:-1]) if re.fullmatch(r"\d{4}", words[-1:][0]) else ()):
        if tried in _keys():
            return _keys()[tried]
    return None


@cache
def _keys() -> dict[tuple[str, ...], str]:
    """Each config by the words of its names."""
    keys = {}
    for name in configs():
        keys[_words(name)] = keys[_plain(_words(name))] = name
    for config_name, others in names()["hub"].items():
        for other in others:
            keys[_words(other)] = keys[_plain(_words(other))] = config_name
    return keys


def _words(name: str) -> tuple[str, ...]:
    """A name as words and numbers, without Llama's first.

    >>> _words("Meta-Llama-3.1_8B"), _words("llama3.1-8b") == _words("Llama-3.1-8B"), _words("")
    (('llama', '3.1', '8', 'b'), True, ('',))
    """
    words = tuple(re.findall(r"[a-z]+|\d+(?:\.\d+)*", name.lower())) or ("",)
    return words[1:] if words[:2] == ("meta", "llama") else words


def _plain(words: tuple[str, ...]) -> tuple[str, ...]:
    """Words without those behind a number that change no size.

    >>> _plain(("qwen", "7", "b", "base")), _plain(("t", "5", "base"))
    (('qwen', '7', 'b'), ('t', '5', 'base'))
    """
    first = next((at for at, word in enumerate(words) if word[:1].isdigit()), len(words))
    if words[first + 1 :] == ("base",):  # which is a size then: T5 has no number that says it
        return words
    return (*words[:first], *(word for word in words[first:] if word not in _SAME))
