"""What people call models (``data/names.toml``): those that are described here, and what the others are."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import takewhile

from clustersim.core.errors import nearest, nearest_name
from clustersim.core.texts import data_table

FAMILY = 0.75
"""How alike the first words of two names must be for one to be a slip of the pen."""
SHOWN = 3
"""Names shown where none is meant for sure."""


def names() -> dict[str, dict[str, str]]:
    """The tables of the file."""
    return data_table("names")


def plain(name: str) -> str:
    """A name without its organisation, in lower-case letters, digits and dots.

    >>> plain("meta-llama/Llama-3.1_8B")
    'llama3.18b'
    """
    return "".join(c for c in name.rsplit("/", 1)[-1].lower() if c.isalnum() or c == ".")


def what(name: str, *kinds: str) -> str:
    """What a name is that begins as one of these kinds (tables of the file) do, the longest first; empty for none.

    >>> what("gemma-2-9b", "others")
    'a Gemma 2, with capped attention scores and norms on both sides of a block'
    """
    reasons = {start: reason for kind in kinds for start, reason in names()[kind].items()}
    return next(
        (reasons[start] for start in sorted(reasons, key=len, reverse=True) if plain(name).startswith(start)), ""
    )


def described(name: str, model_type: bool = False) -> str:
    """Why a name or a ``model_type`` is not known, to follow ``model 'x' is``; empty where nobody knows what it is."""
    words = (names()["types"].get(name, "") if model_type else "") or what(name, "others", "experts")
    if not words:
        return ""
    by_file = not model_type and what(name, "read")
    way = " by a name: give the path of its config.json" if by_file else "; `clustersim trace-model` reads modules"
    return f"{words}, which is not described{way}"


def same_family(name: str, names_known: Iterable[str]) -> str:
    """:func:`~clustersim.core.errors.nearest` among names of the same family; else those that look most alike, which
    nobody takes for what is meant.

    >>> same_family("lama2-13b", ["llama2-13b", "gpt2"]), same_family("mystery-13b", ["llama2-13b", "gpt2"])
    ("did you mean 'llama2-13b'?", 'names most like it: llama2-13b, gpt2')
    >>> same_family("nope", ["open-llama-3b", "gpt2", "opt-1.3b", "llama2-7b"])
    'names most like it: open-llama-3b, opt-1.3b, gpt2'
    """
    every = sorted(set(names_known))
    head = _head(name)
    close = [near_name for near_name in every if _head(near_name) == head] or [
        near_name for near_name in every if _slip(head, _head(near_name))
    ]
    if nearest_name(name, close) is not None:
        return nearest(name, close)
    alike = sorted(every, key=lambda known: (known not in close, -_likeness(name, known), known))
    return "names most like it: " + ", ".join(alike[:SHOWN])


def _likeness(name: str, known: str) -> float:
    """From 0 to 1."""
    return difflib.SequenceMatcher(None, plain(name), plain(known)).ratio()


def _slip(first: str, second: str) -> bool:
    """Whether one word is the other, with letters that changed places or a few that are wrong.

    >>> _slip("gtp", "gpt"), _slip("lama", "llama"), _slip("mamba", "llama")
    (True, True, False)
    """
    return sorted(first) == sorted(second) or difflib.SequenceMatcher(None, first, second).ratio() >= FAMILY


def _head(name: str) -> str:
    """The letters a name begins with.

    >>> _head("GPT2-xl"), _head("bert-base")
    ('gpt', 'bert')
    """
    return "".join(takewhile(str.isalpha, name.rsplit("/", 1)[-1].lower()))
