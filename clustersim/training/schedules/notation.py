"""Schedules as text: ``F0 F1 B0 (F2|B1)``, with ``.c`` for chunk c where a rank has several chunks.

The reverse of each other: :func:`text` writes what :func:`parse` reads.
"""

from __future__ import annotations

import re

from clustersim.core.errors import ScenarioError
from clustersim.training.schedules.base import Action, Order, Slot

_ACTION = re.compile(r"([FBIW])(\d+)(?:\.(\d+))?")


def text(order: Order) -> str:
    """One rank's order on one line.

    >>> text(((Action("F", 0, 0),), (Action("F", 1, 0), Action("B", 0, 1))))
    'F0.0 (F1.0|B0.1)'
    """
    several = any(action.chunk for slot in order for action in slot)

    def word(action: Action) -> str:
        """One action; its chunk where there are several."""
        return f"{action.kind}{action.microbatch}" + f".{action.chunk}" * several

    return " ".join(word(slot[0]) if len(slot) == 1 else f"({'|'.join(map(word, slot))})" for slot in order)


def parse(line: str) -> Order:
    """One rank's order from its line. Raises :class:`ScenarioError` naming the word that is no action.

    >>> parse("F0 (F1|B0)")[1]
    (Action(kind='F', microbatch=1, chunk=0), Action(kind='B', microbatch=0, chunk=0))
    """
    return tuple(_slot(word) for word in line.split())


def _slot(word: str) -> Slot:
    pair = word.startswith("(") and word.endswith(")")
    return tuple(_action(part, word) for part in (word[1:-1].split("|") if pair else [word]))


def _action(part: str, word: str) -> Action:
    match = _ACTION.fullmatch(part)
    if match is None:
        raise ScenarioError(
            f"cannot read {word!r} as an action of a schedule; write it like 'F0', 'B3.1' (micro-batch 3 of chunk 1) "
            "or '(F4.0|B1.1)' (at $.parallel.schedule)"
        )
    kind, microbatch, chunk = match.groups()
    return Action(kind, int(microbatch), int(chunk or 0))
