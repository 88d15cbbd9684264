"""The environment of what a launch script starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Any


def handed_on(text: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """Variables that a script exports, or sets in front of a command.

    Parameters
    ----------
    text : of the script. variables : what its words come to, by name.

    >>> handed_on("export TP=4\\nPP=2 torchrun train.py\\nDP=8\\n", {"TP": "4", "PP": "2", "DP": "8"})
    {'PP': '2', 'TP': '4'}
    """
    names: set[str] = set()
    for line in text.splitlines():
        line_words = line.split()
        if line_words[:1] == ["export"] or line_words[:2] == ["declare", "-x"]:
            names.update(word.partition("=")[0] for word in line_words[1:])
            continue
        line_words = line_words[1:] if line_words[:1] == ["env"] else line_words
        ahead = list(takewhile(lambda word: re.match(r"[A-Za-z_]\w*=", word), line_words))
        names.update(word.partition("=")[0] for word in ahead if len(line_words) > len(ahead))
    exported: dict[str, str] = {}
    for name in sorted(names & variables.keys()):
        value = variables[name]
        only = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(only, str) and "$" not in only:
            exported[name] = only
    return exported
