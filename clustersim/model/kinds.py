"""Which block does what: from a list of the config, or from a period."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from clustersim.core.errors import ModelError
from clustersim.model.config import Config
from clustersim.model.families import Kinds

Values = dict[str, Any]
"""Dimensions of a Shape by name, those of its parts with a dot (``experts.count``)."""
WORDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "indexed_attention": "full",
    "conv": "conv",
    "mamba": "mamba",
}
"""Words of ``layer_types``, which transformers has for all families."""
ATTENTION_WORDS = {"full_attention": "full", "sliding_attention": "sliding"}
"""Those of families that have no other."""
MLP_WORDS = {"dense": "dense", "sparse": "experts"}
"""Words of ``mlp_layer_types``."""
LETTERS = re.compile("L+G")
"""A period as EXAONE 4's published files write it: local blocks, and a global one (``LLLG``)."""


def blocks_of(c: Config, kinds: Kinds, values: Values) -> Values:
    """``mixers`` (and ``mlps``) of a shape, as one period of its blocks; nothing where all attend to everything.

    Raises :class:`ModelError` for a list of another length than the blocks, or a word that is not known.
    """
    layers = values["layers"]
    listed = c.listed(kinds.field, "a word for each block") if kinds.field else []
    if listed:
        if len(listed) != layers:
            raise ModelError(
                f"{c.where}: '{kinds.field}' has {len(listed)} words for {layers} blocks; it must have one for each"
            )
        described = [_word(c, kinds, word) for word in listed]
    else:
        described = _periodic(c, kinds, layers)
    if not values.get("window"):
        described = [word.replace("sliding", "full").replace("chunked", "full") for word in described]
    if "mixers" in values and not listed:
        return {}
    return as_blocks(described)


def as_blocks(described: Sequence[str]) -> Values:
    """Mixers and MLPs of blocks that are each described as ``mixer`` or ``mixer/mlp``."""
    period = shortest(described)
    mixers = tuple(word.partition("/")[0] for word in period)
    mlps = tuple(word.partition("/")[2] for word in period)
    if set(mixers) == {"full"} and not any(mlps):
        return {}
    return {"mixers": mixers} | ({"mlps": mlps} if any(mlps) else {})


def experts_in(values: Values, sparse: list[bool]) -> None:
    """Blocks with experts, from a truth value for each: as leading dense ones where they are, else one by one."""
    first = sparse.index(True) if True in sparse else len(sparse)
    if all(sparse[first:]):
        values |= {"experts.dense_first": first, "experts.every": 1}
        return
    values["mlps"] = shortest(["experts" if there else "dense" for there in sparse])
    values.setdefault("mixers", ("full",))


def worded(c: Config, field: str, words: Mapping[str, str], layers: int, further: int = 0) -> list[str]:
    """What each block is by the word that a list of the config has for it; nothing where there is no list.

    ``further`` : words that may stand behind, of blocks that predict further tokens.
    Raises :class:`ModelError` for a list of another length than the blocks, or a word that is not of ``words``.
    """
    listed = c.listed(field, f"{' or '.join(words)} for each block")
    lengths = (0, layers, layers + further)
    if len(listed) not in lengths or not all(isinstance(word, str) and word in words for word in listed):
        allowed = " or ".join(map(repr, words))
        raise ModelError(f"{c.where}: '{field}' must be {allowed} for each of {layers} blocks, not {listed!r}")
    return [words[word] for word in listed[:layers]]


Word = TypeVar("Word")


def shortest(words: Sequence[Word]) -> tuple[Word, ...]:
    """The shortest beginning that, repeated, gives all words.

    >>> shortest(["a", "b", "a", "b", "a"]), shortest(["a", "b", "b"])
    (('a', 'b'), ('a', 'b', 'b'))
    """
    for length in range(1, len(words) + 1):
        if all(word == words[i % length] for i, word in enumerate(words)):
            return tuple(words[:length])
    return tuple(words)


def _word(c: Config, kinds: Kinds, word: object) -> str:
    known = WORDS | kinds.words
    if not isinstance(word, str) or word not in known:
        raise ModelError(f"{c.where}: '{kinds.field}' has {word!r}; it must be of {', '.join(map(repr, known))}")
    return known[word]


def _periodic(c: Config, kinds: Kinds, layers: int) -> list[str]:
    period = kinds.period
    if kinds.every:
        letters = c.value(kinds.every)
        if isinstance(letters, str) and LETTERS.fullmatch(letters):
            period = len(letters)
        else:
            period = c.number(kinds.every, kinds.period, "blocks from one that attends to everything to the next")
        c.defaults.pop(kinds.every, None)
    if not period:
        return [kinds.rest] * layers
    place = 0 if kinds.first else period - 1
    full = kinds.words.get("full_attention", "full")
    return [full if i % period == place else kinds.rest for i in range(layers)]
