"""Names of vertices as topology files write them, many at a time."""

from __future__ import annotations

import re

from clustersim.core.errors import TopologyError
from clustersim.core.limits import MOST_NAMES, counted
from clustersim.core.texts import shown

_PARTS, _BRACKETS = re.compile(r",(?![^\[]*\])"), re.compile(r"([^\[\]]+)|\[([^\[\]]*)\]")


def expand(names: str) -> list[str]:
    """``"gpu[0-3]"`` -> gpu0..gpu3; ``"nic[0,2]"``; several brackets multiply; commas outside brackets list.

    >>> expand("gpu[0-2]")
    ['gpu0', 'gpu1', 'gpu2']
    >>> expand("node[0-1]/nic[0,3]")
    ['node0/nic0', 'node0/nic3', 'node1/nic0', 'node1/nic3']
    """
    if not re.fullmatch(r"(?:[^\[\]]|\[[^\[\]]+\])+", names):
        raise _misread(names)
    out: list[str] = []
    counted(_count(names), MOST_NAMES, f"the names {shown(names)}", TopologyError)
    for part in _PARTS.split(names):
        expanded = [""]
        for literal, group in _BRACKETS.findall(part.strip()):
            options = [literal] if literal else _numbers(group, names)
            expanded = [head + option for head in expanded for option in options]
        out += expanded
    return out


def _misread(names: str) -> TopologyError:
    return TopologyError(f"cannot read the names {shown(names)}; write them like 'gpu[0-7]' or 'nic[0,2]'")


def _count(names: str) -> float:
    """How many names there will be, before any is made."""
    total = 0.0
    for part in _PARTS.split(names):
        combinations = 1.0
        for _, group in _BRACKETS.findall(part):
            ranges = re.findall(r"(\d{1,300})(?:-(\d{1,300}))?", group)
            combinations *= sum(abs(float(high or low) - float(low)) + 1 for low, high in ranges) if group else 1.0
        total += combinations
    return total


def _numbers(group: str, pattern: str) -> list[str]:
    out: list[str] = []
    for item in group.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
        if not match or (match.group(2) and int(match.group(2)) < int(match.group(1))):
            raise _misread(pattern)
        out += [str(i) for i in range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1)]
    return out
