"""Chakra's files of before its attributes had types by field: nodes of 2022 and of 2023 as those of today's schema.

2022 (mlcommons/chakra-old, et_def.proto): a file is nodes alone, with parents and sizes in fields of their own;
durations are ASTRA-sim's ticks of a nanosecond. 2023 (et_def.proto of the first mlcommons/chakra): an attribute has its
name, a type's number and a value in a field of its own; durations are the attribute ``runtime`` [us]. Types of
collectives were counted otherwise in both.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

from clustersim.files.varints import varint

Field = tuple[int, int, Any]
"""Number, wire type, value: a whole number, or bytes."""
_KINDS_2022 = (
    "INVALID_NODE",
    "MEM_LOAD_NODE",
    "COMP_NODE",
    "MEM_STORE_NODE",
    "COMP_NODE",
    "COMM_SEND_NODE",
    "COMM_RECV_NODE",
    "COMM_COLL_NODE",
)
"""Types of nodes; a load with its computation is a computation."""
_SIZES_2022 = {6: "tensor_size", 12: "num_ops", 16: "comm_src", 17: "comm_dst", 18: "comm_size", 19: "comm_tag"}
_COLLECTIVES = {
    2022: {1: "all_reduce", 2: "all_to_all", 3: "all_gather", 4: "reduce_scatter"},
    2023: {0: "all_reduce", 1: "all_to_all", 2: "all_gather", 3: "reduce_scatter", 4: "broadcast"},
}
_VALUES_2023: dict[int, tuple[str, Callable[[Any], Any]]] = {
    4: ("bool", bool),
    5: ("double", lambda data: struct.unpack("<f", data)[0]),
    6: ("uint64", int),
    7: ("int64", lambda number: number - 2**64 if number >= 2**63 else number),
    8: ("string", lambda data: data.decode("utf-8", errors="replace")),
}
"""Of an attribute: the field that has its value, today's type, and how it is read. Lists are not needed."""


ABOUT = {
    2022: "a Chakra file of 2022: its run times are taken for ticks of a nanosecond, as ASTRA-sim's",
    2023: "a Chakra file of 2023: its run times are taken for microseconds, as PyTorch's",
}
"""What a file does not say of itself."""


def year(first: bytes, second: bytes) -> int:
    """2022 or 2023 by a file's first two messages; 0 for today's schema, or for something else."""
    if first[:1] == b"\x08":  # a node's number: there is no message about the file
        return 2022 if _is_node(first) else 0
    names = [value for number, wire, value in fields(second) if (number, wire) == (11, 2)]
    return 2023 if any(_typed(value) for value in names) else 0


def node(data: bytes, layout: int, kinds: tuple[str, ...], collectives: tuple[str, ...], messages: Any) -> Any:
    """A node of today's schema. kinds, collectives : its types of nodes and of collectives, by number."""
    made = messages["Node"]()
    for number, wire, value in fields(data):
        if number == 1:
            made.id = value
        elif number == 2:
            made.name = value.decode("utf-8", errors="replace")
        elif number == 3:
            word = _KINDS_2022[value] if layout == 2022 and value < len(_KINDS_2022) else None
            made.type = kinds.index(word) if word else value
        elif number == 4 and wire == 0:
            made.data_deps.append(value)
        elif layout == 2022 and number == 7:
            made.attr.add(name="runtime", double_val=value / 1000)
        elif layout == 2022 and number in _SIZES_2022:
            made.attr.add(name=_SIZES_2022[number], int64_val=value)
        elif layout == 2022 and number == 13:
            made.attr.add(name="comm_type", int64_val=_collective(value, layout, collectives))
        elif layout == 2023 and number == 11:
            _attribute(value, made, collectives)
    return made


def _attribute(data: bytes, made: Any, collectives: tuple[str, ...]) -> None:
    name = ""
    for number, _, value in fields(data):
        if number == 1:
            name = value.decode("utf-8", errors="replace")
        elif number in _VALUES_2023:
            kind, read = _VALUES_2023[number]
            plain = read(value)
            if name == "comm_type":
                plain = _collective(plain, 2023, collectives)
            made.attr.add(**{"name": name, f"{kind}_val": plain})


def _collective(number: int, layout: int, collectives: tuple[str, ...]) -> int:
    """Today's number of a collective's type; one beyond all for a type that was none."""
    word = _COLLECTIVES[layout].get(number)
    return collectives.index(word) if word in collectives else len(collectives)


def _is_node(data: bytes) -> bool:
    """Whether a message is a node of 2022: a number, a name, and whole numbers."""
    found = {number: wire for number, wire, _ in fields(data)}
    return found.get(1) == 0 and found.get(2) == 2 and all(n in (2, 14) or wire == 0 for n, wire in found.items())


def _typed(data: bytes) -> bool:
    """Whether an attribute has a name and then the number of a type."""
    return [(number, wire) for number, wire, _ in fields(data)][:2] == [(1, 2), (2, 0)]


def fields(data: bytes) -> Iterator[Field]:
    """A message's fields in their order, as far as they are whole."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        wire = tag & 7
        if tag < 8 or wire not in (0, 1, 2, 5):
            return
        if wire == 0:
            value, at = varint(data, at)
            if value < 0:
                return
            yield tag >> 3, wire, value
            continue
        size, at = varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        if size < 0 or at + size > len(data):
            return
        yield tag >> 3, wire, data[at : at + size]
        at += size
