"""Sections of a YAML file that stand for nothing themselves: templates, which ``<<`` puts into the sections that count.

A framework that knows its keys by their ends would read a template as one more section, beside the section that takes
it and may say some of it otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TEMPLATE = re.compile(r"x-|[._]|.*(?:default|common|template|anchor|shared|base|alias)", re.IGNORECASE)
"""Names of sections that people give to templates; another section counts, whoever takes it too."""


def templates(text: str) -> frozenset[str]:
    """Top-level keys of a YAML text whose mapping ``<<`` merges into another, and whose name is a template's.

    >>> sorted(templates("my_defaults: &a {x: 1}\\nmodel: &b {<<: *a, y: 2}\\nother: {<<: *b}"))
    ['my_defaults']
    """
    if "<<" not in text:
        return frozenset()
    import yaml

    root = yaml.compose(text, yaml.SafeLoader)
    merged = {id(node) for node in _merged(root)}
    return frozenset(
        key.value
        for key, section in root.value
        if id(section) in merged and isinstance(key.value, str) and _TEMPLATE.match(key.value)
    )


def _merged(root: Any) -> Iterator[Any]:
    """Every node that ``<<`` merges, alone or in a list."""
    left = [root]
    seen: set[int] = set()
    while left:
        node = left.pop()
        if id(node) in seen or not isinstance(node.value, list):
            continue
        seen.add(id(node))
        for part in node.value:
            if not isinstance(part, tuple):
                left.append(part)
                continue
            key, below = part
            left.append(below)
            if key.value == "<<":
                yield below
                yield from below.value if isinstance(below.value, list) else ()
