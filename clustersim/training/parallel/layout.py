"""Megatron's layout string: which layers every stage of a pipeline has."""

from __future__ import annotations

import re

from clustersim.core.errors import ScenarioError
from clustersim.core.limits import MOST_LAYERS, counted

PARTS = "EtmL"
"""Embedding, transformer layer, multi-token prediction, loss (with the head)."""


def stages_of(layout: str) -> tuple[str, ...]:
    """The stages of a layout in the model's order, each as one letter per layer.

    Chunk ``c`` of pipeline rank ``r`` is entry ``c * pp + r`` (Megatron-LM core/transformer/
    pipeline_parallel_layer_layout.py ``parse_str_to_list``). ``*n`` repeats a letter or what is in parentheses; ``|``
    ends a stage; commas are for people.

    Raises :class:`ScenarioError` for anything else in it, or an embedding or loss that is not at its end.

    >>> stages_of("Et*2|(t|)*2,tL")
    ('Ett', 't', 't', 'tL')
    """
    text = re.sub(r"[\s,]", "", layout)
    text = re.sub(rf"([{PARTS}|])\*(\d+)", _repeated, text)
    while match := re.search(r"\(([^()]*)\)(?:\*(\d+))?", text):
        text = text[: match.start()] + _repeated(match) + text[match.end() :]
    if stray := re.sub(rf"[{PARTS}|]", "", text):
        raise ScenarioError(
            f"layout {layout!r}: cannot read {stray[0]!r}; write E, t, m, L, '|', '*n' and parentheses, like "
            "'Et*3|(tt|)*6,tL' (at $.parallel.layout)"
        )
    if not (text.startswith("E") and text.endswith("L") and text.count("E") == text.count("L") == 1):
        raise ScenarioError(f"layout {layout!r} begins with one E and ends with one L (at $.parallel.layout)")
    return tuple(text.split("|"))


def _repeated(match: re.Match[str]) -> str:
    """What stands before ``*n``, n times. Raises :class:`ScenarioError` for more layers than any model has."""
    times = int((match[2] or "1")[:9])
    counted(len(match[1]) * times, MOST_LAYERS, "layers of a layout (at $.parallel.layout)", ScenarioError)
    return match[1] * times
