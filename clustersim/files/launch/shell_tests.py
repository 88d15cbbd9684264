"""What conditions of a script come to: ``[ ... ]``, ``[[ ... ]]`` and ``(( ... ))``."""

from __future__ import annotations

import operator
import re
from fnmatch import fnmatchcase

from clustersim.files.launch.shell_values import UNKNOWN, Expansion, Variables, text_of

_COMPARED = {
    "==": operator.eq,
    "=": operator.eq,
    "!=": operator.ne,
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
_ARGUMENT = re.compile(r"\$(?:\d|\{\d\})")
"""An argument of the script that is not known: ``$1``."""


def arithmetic(text: str, variables: Variables, expansion: Expansion) -> bool | None:
    """What ``(( ... ))`` comes to, whose assignments change ``variables``; None where the script does not say."""
    assigned = re.fullmatch(r"\s*(\w+)\s*=(?!=)(.*)", text, re.DOTALL)
    stepped = re.fullmatch(r"\s*(?:(\w+)(\+\+|--)|(\+\+|--)(\w+))\s*", text)
    if assigned or stepped:
        name = assigned[1] if assigned else stepped[1] or stepped[4] if stepped else ""
        written = assigned[2] if assigned else f"{name}{(text.strip().strip(name) or '+')[0]}1"
        total = expansion.sum_of(written, variables)
        variables[name] = expansion.total_of(written, variables)
        return None if total is None else total != 0
    parts = re.fullmatch(r"(.+?)\s*(==|!=|<=|>=|<|>)\s*(.+)", text.strip(), re.DOTALL)
    if parts is None or "&&" in text or "||" in text:
        total = expansion.sum_of(text, variables)
        return None if total is None else total != 0
    left = expansion.sum_of(parts[1], variables)
    right = expansion.sum_of(parts[3], variables)
    return None if left is None or right is None else bool(_COMPARED[parts[2]](left, right))


def compared(words: list[str], variables: Variables, expansion: Expansion, *, patterns: bool) -> bool | None:
    """What the words of ``[ ... ]`` come to, or with ``patterns`` of ``[[ ... ]]``; None where nobody says."""
    for joint, alternative in (({"||", "-o"}, True), ({"&&", "-a"}, False)):
        at = next((i for i, word in enumerate(words) if word in joint), None)
        if at is not None:
            sides = [compared(side, variables, expansion, patterns=patterns) for side in (words[:at], words[at + 1 :])]
            if alternative in sides:
                return alternative
            return None if None in sides else not alternative
    if words[:1] == ["!"]:
        answer = compared(words[1:], variables, expansion, patterns=patterns)
        return None if answer is None else not answer
    if words[:1] == ["("] and words[-1:] == [")"]:
        return compared(words[1:-1], variables, expansion, patterns=patterns)
    if len(words) == 2 and words[0] == "-v":
        return text_of(variables.get(words[1], "")) != ""
    if len(words) == 2 and words[0] in {"-z", "-n"}:
        # What nothing in the script sets is taken to be empty, as where it runs alone.
        held = UNKNOWN.sub("", expansion.value(words[1], variables))
        return (held == "") == (words[0] == "-z")
    if len(words) == 1:
        held = expansion.value(words[0], variables)
        return None if UNKNOWN.search(held) else held != ""
    if len(words) != 3 or words[1] not in _COMPARED:
        return None
    left = expansion.value(words[0], variables)
    right = expansion.value(words[2], variables)
    if words[1] in {"==", "=", "!="}:  # a script that nobody gives arguments has none
        left = _ARGUMENT.sub("", left)
        right = _ARGUMENT.sub("", right)
    if "" in (left, right) and words[1] in {"==", "=", "!="}:  # as -z is: "$HOST" == ""
        left = UNKNOWN.sub("", left)
        right = UNKNOWN.sub("", right)
    if UNKNOWN.search(left + right):
        return None
    if words[1].startswith("-"):
        a = expansion.sum_of(left, {})
        b = expansion.sum_of(right, {})
        return None if a is None or b is None else bool(_COMPARED[words[1]](a, b))
    if patterns and words[1] in {"==", "=", "!="} and not words[2].startswith(("'", '"')):
        return fnmatchcase(left, right) != (words[1] == "!=")
    return bool(_COMPARED[words[1]](left, right))
