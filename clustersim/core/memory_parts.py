"""The parts of a GPU's memory: one row each, read by every place that shows them.

A part that is added here appears in ``memory``, ``run``, ``report``, ``explore`` and ``--json`` and in every picture of
memory, in its colour; tests/test_memory_parts.py holds that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from clustersim.core.arrays import Floats
from clustersim.core.device import Device

PartColumns = Mapping[str, Floats]
"""Bytes of a part at each moment of a step, by the part's key."""


class MemoryPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part.

    Parameters
    ----------
    key : its name in ``result.json`` and in a memory course. label : what people call it.
    colour : in every picture; brown is what a training keeps from step to step, slate what comes and goes.
    of : what it is part of: ``"states"`` (what the ZeRO paper counts, arXiv:1910.02054), ``"step"`` (the framework
        allocates it besides), or ``"driver"`` (no allocator sees it: the context alone).
    head : its column in the table of stages; the label where it is empty. within : the key of the part in whose column
        it is added up there instead.
    variant_head : its column in the table of strategies, which leaves it out where this is empty.
    value : computed at every moment (moments,) [bytes] from the others and the GPU whose memory it is; None for what
        the two that lay out a step say: ``training/memory`` for a model that is whole, and
        ``training/builder/stage_memory`` for one that is split.
    """

    key: str
    label: str
    colour: str
    of: str = "step"
    head: str = ""
    within: str = ""
    variant_head: str = ""
    value: Callable[[PartColumns, Device], Floats] | None = None


MEMORY_PARTS = (
    MemoryPart(key="parameters", label="parameters", colour="#4E2A1E", of="states", head="params"),
    MemoryPart(key="gathered", label="gathered", colour="#86A4B7", variant_head="gather"),
    MemoryPart(key="weight_copies", label="weight copies", colour="#BF8563", head="stashed"),
    MemoryPart(key="master_weights", label="master weights", colour="#7C4733", of="states", within="optimizer_states"),
    MemoryPart(key="gradients", label="gradients", colour="#A65E3A", of="states", head="grads"),
    MemoryPart(key="optimizer_states", label="optimizer states", colour="#D3A98C", of="states", head="optim"),
    MemoryPart(key="buckets", label="buckets", colour="#B5C8D4", variant_head="bucket"),
    MemoryPart(key="activations", label="activations", colour="#2B3F4E", head="activ", variant_head="activ"),
    MemoryPart(key="logits", label="logits", colour="#54748A", variant_head="logits"),
    MemoryPart(key="optimizer_workspace", label="optimizer workspace", colour="#EBD9CB", within="optimizer_states"),
    MemoryPart(key="context", label="context", colour="#DCE5EA", of="driver", head="driver"),
)
"""Every part, in the order in which a memory course has them."""


def all_parts(columns: PartColumns, gpu: Device | None = None) -> dict[str, Floats]:
    """Every part that the framework allocates, at each moment, from the ``columns`` of those that are not computed.

    ``gpu`` : whose memory it is.

    Raises ``KeyError`` where the columns lack such a part, or have one that is no row, and where a part is computed and
    no GPU is given.
    """
    rows = [part for part in MEMORY_PARTS if part.of != "driver"]
    stated = {part.key for part in rows if part.value is None}
    if stated != columns.keys():
        raise KeyError(f"parts of memory that have a row and no column, or no row: {sorted(stated ^ columns.keys())}")
    parts: dict[str, Floats] = {}
    for part in rows:
        if part.value is None:
            parts[part.key] = columns[part.key]
        elif gpu is None:
            raise KeyError(f"a part of memory that is computed needs the GPU whose memory it is: {part.key}")
        else:
            parts[part.key] = part.value(columns, gpu)
    return parts


def keys_of(of: str) -> Iterator[str]:
    """The parts of ``"states"``, of a ``"step"`` or of the ``"driver"``, in order."""
    return (part.key for part in MEMORY_PARTS if part.of == of)


def stage_columns() -> dict[str, list[str]]:
    """The columns of a table of stages, by what stands at their head: the parts that each adds up."""
    own = {part.key: part.head or part.label for part in MEMORY_PARTS if not part.within}
    columns: dict[str, list[str]] = {head: [] for head in own.values()}
    for part in MEMORY_PARTS:
        columns[own[part.within or part.key]].append(part.key)
    return columns


def variant_columns() -> dict[str, str]:
    """The columns of a table of strategies beside model states, by what stands at their head: the part of each."""
    return {part.variant_head: part.key for part in MEMORY_PARTS if part.variant_head}


def part_label(key: str) -> str:
    """What people call a part; of what is no part, the key without underscores.

    >>> part_label("weight_copies"), part_label("my_own")
    ('weight copies', 'my own')
    """
    return next((part.label for part in MEMORY_PARTS if part.key == key), key.replace("_", " "))


def part_colours() -> dict[str, str]:
    """The colour of each part, by its label."""
    return {part.label: part.colour for part in MEMORY_PARTS}
