"""Which chunks' parameters are gathered while a rank of a pipeline runs: PyTorch's runtime keeps at most three.

torch/distributed/pipelining/schedules.py, ``_add_unshard_reshard``: before each pass the next three different stages
that the rank will run are gathered, those that are none of them are given back, and come again when their turn does.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from clustersim.training.schedules import Action, Order

MOST_ACTIVE = 3
"""``max_active_stages``."""


class Regathering(msgspec.Struct, frozen=True):
    """Chunks that are given back before a pass, and those that are gathered, in their order."""

    evicted: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()


Passes = dict[tuple[str, int, int], Regathering]
"""By kind, micro-batch and chunk of a pass."""


def regathered(order: Order, most: int = MOST_ACTIVE) -> Passes:
    """What a rank gathers and gives back before each of its passes; a pass before which it does neither is left out.

    >>> from clustersim.training.schedules.notation import parse
    >>> found = regathered(parse("F0.0 F0.1 F0.2 F0.3"), 2)
    >>> [(name, each.evicted, each.gathered) for name, each in found.items()][:2]
    [(('F', 0, 0), (), (0, 1)), (('F', 0, 1), (0,), (2,))]
    """
    actions = [action for slot in order for action in slot]
    active: list[int] = []
    found: Passes = {}
    for i, action in enumerate(actions):
        coming = _next_chunks(actions[i:], most)
        evicted = tuple(chunk for chunk in active if chunk not in coming)
        gathered = tuple(chunk for chunk in coming if chunk not in active)
        active = [chunk for chunk in active if chunk in coming] + list(gathered)
        if evicted or gathered:
            found[action.kind, action.microbatch, action.chunk] = Regathering(evicted, gathered)
    return found


def _next_chunks(actions: Sequence[Action], most: int) -> list[int]:
    """The first ``most`` different chunks that are run."""
    coming: list[int] = []
    for action in actions:
        if action.chunk not in coming:
            coming.append(action.chunk)
        if len(coming) == most:
            break
    return coming
