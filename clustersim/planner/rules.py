"""What people take without a search: tensor parallelism over the node, then as many stages as the memory asks for."""

from __future__ import annotations

from collections.abc import Iterable

from clustersim.planner.options import Option


def rule(options: Iterable[Option]) -> dict[tuple[str, int], Option]:
    """By machine and nodes what the simple rule takes, "TP 8, then PP until it fits": no other dimension, no
    interleaving, and the first that fits."""
    found: dict[tuple[str, int], Option] = {}
    for one in options:
        mine = one.candidate
        degrees, key = mine.degrees, (mine.machine.label, mine.nodes)
        plain = mine.changes.get("parallel", {}).get("vpp", 1) == 1 and degrees["cp"] == degrees["ep"] == 1
        if one.bound is None or degrees["tp"] != 8 or not plain:
            continue
        if key not in found or _simple(one) < _simple(found[key]):
            found[key] = one
    return found


def _simple(option: Option) -> tuple[int, int, int]:
    mine = option.candidate
    return mine.degrees["pp"], mine.played[0], mine.number
