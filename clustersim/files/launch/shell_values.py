"""Values of a script's variables, and what plain commands make of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeAlias

Variables: TypeAlias = dict[str, "str | list[str]"]
UNKNOWN = re.compile(r"\$\{[^}]*\}")
"""What only running tells."""


@dataclass(frozen=True)
class Expansion:
    """How words come to their values, for conditions and commands, which words may hold in turn.

    fields : what a word comes to, none, one or several words. value : as the value of a variable, which is not split.
    sum_of : a sum of whole numbers and variables, None for anything else. total_of : that in words, or a word that
    names the first variable that nothing sets.
    """

    fields: Callable[[str, Variables], list[str]]
    value: Callable[[str, Variables], str]
    sum_of: Callable[[str, Variables], int | None]
    total_of: Callable[[str, Variables], str]


def text_of(held: str | list[str]) -> str:
    """A variable's value as one text."""
    return held if isinstance(held, str) else " ".join(held)


def function_key(name: str) -> str:
    """The key of a function among variables, which no variable can have: its text is what it runs."""
    return f"{name}()"


def trimmed(held: str, op: str, pattern: str) -> str:
    """Without the shortest, or the longest, beginning or end that is of a pattern."""
    places = range(len(held) + 1)
    if op in {"#", "%%"}:
        order = list(places)
    else:
        order = list(reversed(places))
    for i in order:
        piece = held[:i] if op[0] == "#" else held[i:]
        if fnmatchcase(piece, pattern):
            return held[i:] if op[0] == "#" else held[:i]
    return held


def echoed(words: list[str]) -> str:
    """What ``echo`` prints of its words."""
    return " ".join(word for word in words if word not in {"-n", "-e"})


def counted_up(words: list[str]) -> str:
    """What ``seq`` prints: one number a line, or with ``-s`` something else between them.

    >>> counted_up(["-s,", "0", "3"]), counted_up(["-s", " ", "2"]), counted_up(["$N"])
    ('0,1,2,3', '1 2', '${command}')
    """
    between = "\n"
    if words[:1] == ["-s"]:
        between, words = "".join(words[1:2]), words[2:]
    elif words and words[0].startswith("-s"):
        between, words = words[0][2:], words[1:]
    if not 1 <= len(words) <= 3 or not all(re.fullmatch(r"-?\d{1,6}", word) for word in words):
        return "${command}"
    numbers = [int(word) for word in words]
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) == 3 else 1
    return between.join(str(number) for number in ranged(first, numbers[-1], step)) if step else "${command}"


def ranged(first: int, last: int, step: int) -> range:
    """Whole numbers from the first to the last, which is among them."""
    return range(first, last + (1 if step > 0 else -1), step)
