"""The schema of Chakra execution traces (MLCommons), as data: version 0.0.4.

Field names, numbers and types as published in ``schema/protobuf/et_def.proto`` of mlcommons/chakra; messages are made
of them through the ``protobuf`` library (extra ``exchange``). Storage messages are left out: nothing here writes them,
and protobuf keeps fields that it does not know. A file is a sequence of messages, each behind its length as a varint:
one GlobalMetadata, then one Node after another.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from clustersim.core.errors import TraceError
from clustersim.core.texts import Table
from clustersim.files.launch import chakra_earlier, chakra_json
from clustersim.files.varints import varint

VERSION = "0.0.4"
JSON_HEAD = 64 * 1024
"""Bytes of a file whose first JSON object is looked at."""
LAYOUT = "clustersim.layout"
"""The attribute that says of a file of an earlier layout what was taken for granted."""

_SCALARS = (
    "double",
    "float",
    "int32",
    "int64",
    "uint32",
    "uint64",
    "sint32",
    "sint64",
    "fixed32",
    "fixed64",
    "sfixed32",
    "sfixed64",
    "bool",
    "string",
    "bytes",
)
"""Types of an attribute, each alone and as a list, in the order of their numbers, which begin at 3."""

_MESSAGES = {
    **{f"{kind.title()}List": (("values", 1, kind, True),) for kind in _SCALARS},
    "AttributeProto": (
        ("name", 1, "string", False),
        ("doc_string", 2, "string", False),
        *((f"{kind}_val", 3 + 2 * i, kind, False) for i, kind in enumerate(_SCALARS)),
        *((f"{kind}_list", 4 + 2 * i, f"{kind.title()}List", False) for i, kind in enumerate(_SCALARS)),
    ),
    "GlobalMetadata": (("version", 1, "string", False), ("attr", 2, "AttributeProto", True)),
    "EarlierMetadata": (("attr", 1, "AttributeProto", True),),
    "IOInfo": tuple((name, i, "string", False) for i, name in enumerate(("values", "shapes", "types"), start=1)),
    "Node": (
        ("id", 1, "uint64", False),
        ("name", 2, "string", False),
        ("type", 3, "NodeType", False),
        ("ctrl_deps", 4, "uint64", True),
        ("data_deps", 5, "uint64", True),
        ("start_time_micros", 6, "uint64", False),
        ("duration_micros", 7, "uint64", False),
        ("inputs", 8, "IOInfo", False),
        ("outputs", 9, "IOInfo", False),
        ("attr", 10, "AttributeProto", True),
    ),
}

NODE_TYPES = (
    "INVALID_NODE",
    "METADATA_NODE",
    "MEM_LOAD_NODE",
    "MEM_STORE_NODE",
    "COMP_NODE",
    "COMM_SEND_NODE",
    "COMM_RECV_NODE",
    "COMM_COLL_NODE",
    "STORAGE_NODE",
    "BATCH_NODE",
    "CHECKPOINT_NODE",
)
COLLECTIVE_TYPES = (
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "broadcast",
    "all_to_all",
    "reduce_scatter",
    "reduce_scatter_block",
    "barrier",
)
"""CollectiveCommType by number, in torch.distributed's words."""
_ENUMS = {"NodeType": NODE_TYPES, "CollectiveCommType": tuple(name.upper() for name in COLLECTIVE_TYPES)}


@lru_cache(maxsize=1)
def messages() -> dict[str, Any]:
    """The message classes by name. Raises :class:`TraceError` where protobuf is not installed."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise TraceError("Chakra traces need the protobuf package: pip install 'clustersim[exchange]'") from None
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    for name, enum in _ENUMS.items():
        file.enum_type.add(name=name).value.extend(
            descriptor_pb2.EnumValueDescriptorProto(name=word, number=i) for i, word in enumerate(enum)
        )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")
        for field, number, kind, repeated in fields:
            field_type = message.field.add(name=field, number=number, label=3 if repeated else 1)
            if kind in _SCALARS:
                field_type.type = getattr(field_type, f"TYPE_{kind.upper()}")
            else:
                field_type.type, field_type.type_name = (
                    field_type.TYPE_ENUM if kind in _ENUMS else field_type.TYPE_MESSAGE,
                    kind,
                )
            if name == "AttributeProto" and number > 2:
                field_type.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"ChakraProtoMsg.{name}"))
        for name in _MESSAGES
    }


def attribute(name: str, kind: str, value: object) -> Any:
    """An attribute: ``kind`` is one of the scalar types."""
    return messages()["AttributeProto"](**{"name": name, f"{kind}_val": value})


def attributes(message: Any) -> Table:
    """The attributes of a message, lists as lists."""
    values = {}
    for attribute in message.attr:
        which = attribute.WhichOneof("value")
        value: Any = getattr(attribute, which) if which else None
        values[attribute.name] = list(value.values) if which and which.endswith("_list") else value
    return values


def framed(message: Any) -> bytes:
    """A message behind its length."""
    data: bytes = message.SerializeToString(deterministic=True)
    size = len(data)
    length = bytearray()
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*length, size]) + data


_WIRES: dict[str, dict[int, tuple[int, ...]]] = {
    "GlobalMetadata": {1: (2,), 2: (2,)},
    "Node": {
        1: (0,),
        2: (2,),
        3: (0,),
        4: (0, 2),
        5: (0, 2),
        6: (0,),
        7: (0,),
        8: (2,),
        9: (2,),
        10: (2,),
        11: (2,),
    },
}
"""How protobuf writes the fields of a message, by number: 0 is a varint, 2 bytes behind their length."""


def sniff(head: bytes) -> bool:
    """Whether a file begins with GlobalMetadata, which may say a version or attributes or nothing, and with a node,
    each behind its length."""
    if chakra_json.is_jsonized(head):
        return True
    parts = _first_two(head)
    if parts and chakra_earlier.year(*parts):
        return True
    position = 0
    for kind in ("GlobalMetadata", "Node"):
        size, begin = varint(head, position)
        if size < 0 or (kind == "Node" and not size):
            return False
        position = begin + size
        if not _is_message(head[begin:position], _WIRES[kind], whole=position <= len(head)):
            return False
        if position >= len(head):
            return kind == "Node" or position == len(head) > 1  # a file may hold no node
    return True


def _first_two(data: bytes | bytearray) -> tuple[bytes, bytes] | None:
    """The first two messages of a file, as far as they go; None where there is none."""
    size, begin = varint(data, 0)
    if size <= 0 or begin + size > len(data):
        return None
    second, inside = varint(data, begin + size)
    return bytes(data[begin : begin + size]), bytes(data[inside : inside + max(second, 0)])


def _is_message(data: bytes, wires: dict[int, tuple[int, ...]], *, whole: bool) -> bool:
    """Whether bytes are fields of these numbers and kinds and nothing else."""
    position = 0
    while position < len(data):
        tag, position = varint(data, position)
        if tag < 0 or (tag & 7) not in wires.get(tag >> 3, ()):
            return tag < 0 and not whole
        size, position = varint(data, position)
        if size < 0:
            return not whole
        position += size if tag & 7 == 2 else 0
    return position == len(data) or not whole


def _metadata(data: bytes) -> str:
    """The message that begins a file: before 0.0.2 its first field was an attribute, which begins with its name."""
    return "EarlierMetadata" if re.match(rb"\x0a[\x01-\xff]{1,2}?\x0a", data) else "GlobalMetadata"


def _earlier(data: bytes, layout: int, kinds: dict[str, Any], where: str) -> Any:
    """A node of an earlier layout. Raises :class:`TraceError` for fields that are of another kind or out of range."""
    try:
        return chakra_earlier.node(data, layout, NODE_TYPES, COLLECTIVE_TYPES, kinds)
    except (TypeError, ValueError, AttributeError, struct.error) as error:
        raise TraceError(f"{where}: not a node of Chakra's layout of {layout}: {error}") from None


def unframed(data: bytes | bytearray, source: str) -> Iterator[Any]:
    """GlobalMetadata, then the nodes. Raises :class:`TraceError` where the file is cut off or holds something else."""
    from google.protobuf.message import DecodeError

    kinds = messages()
    if chakra_json.is_jsonized(bytes(data[:JSON_HEAD])):
        yield from chakra_json.messages_of(data, kinds, source)
        return
    parts = _first_two(data)
    layout = chakra_earlier.year(*parts) if parts else 0
    if layout == 2022:
        yield kinds["GlobalMetadata"](attr=[attribute(LAYOUT, "string", chakra_earlier.ABOUT[layout])])
    offset = 0
    first = layout != 2022
    view = memoryview(data)
    while offset < len(data):
        size = shift = 0
        while offset < len(data) and shift < 35:
            size |= (data[offset] & 0x7F) << shift
            shift = shift + 7
            offset = offset + 1
            if data[offset - 1] < 0x80:
                break
        if offset + size > len(data):
            raise TraceError(f"{source}: cut off: {size} bytes should follow byte {offset:,}, {len(data) - offset} do")
        message = bytes(view[offset : offset + size])
        if layout:
            if first:
                yield kinds["GlobalMetadata"](attr=[attribute(LAYOUT, "string", chakra_earlier.ABOUT[layout])])
            else:
                yield _earlier(message, layout, kinds, f"{source}: byte {offset:,}")
            offset = offset + size
            first = False
            continue
        try:
            yield kinds[_metadata(message) if first else "Node"].FromString(message)
        except DecodeError as error:
            raise TraceError(f"{source}: byte {offset:,}: not a message of Chakra {VERSION}: {error}") from None
        offset = offset + size
        first = False
