"""The JSON of PyTorch's profiler: only the fields that are needed, and ``args`` raw until an event needs them."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from clustersim.core.program import DTYPE_BYTES
from clustersim.files.traces.samples import dtype_of

_BOUNDARY = re.compile(rb"\}\s*,\s*\{")
_ESCAPE = re.compile(rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|(\\)')
"""A backslash with what JSON has behind it, or one with anything else: of a path of Windows."""
_NO_NUMBER = re.compile(rb"(?<=[:,\[])(\s*)[-+]?(?:nan|inf(?:inity)?)(?=\s*[,}\]])", re.I)
_LAST_COMMA = re.compile(rb",(?=\s*[}\]])")
TRIES = 64
"""Places near the end of a file that is cut off which are tried for the end of its last whole event."""


class KinetoEvent(msgspec.Struct, gc=False):
    """One entry of traceEvents; ``ts`` and ``dur`` [us]."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class KinetoInfo(msgspec.Struct):
    """Which rank of what; ``pg_config`` as older and newer releases write it."""

    rank: int | None = None
    world_size: int | None = None
    backend: str = ""
    pg_config: Any = None


class KinetoDevice(msgspec.Struct):
    """One of the machine's GPUs."""

    name: str = ""


class KinetoFile(
    msgspec.Struct,
    rename={
        "events": "traceEvents",
        "info": "distributedInfo",
        "base": "baseTimeNanoseconds",
        "devices": "deviceProperties",
    },
):
    """A whole file; ``base`` : nanoseconds that its ``ts`` count from."""

    events: list[KinetoEvent]
    info: KinetoInfo | None = None
    base: int = 0
    devices: list[KinetoDevice] = []
    host_name: str = ""
    clustersim: Any = None


class KernelArgs(
    msgspec.Struct,
    gc=False,
    rename={
        "collective": "Collective name",
        "inputs": "In msg nelems",
        "outputs": "Out msg nelems",
        "size": "Group size",
        "group": "Process Group Name",
        "ranks": "Process Group Ranks",
        "seq": "Seq",
        "purpose": "Process Group Description",
        "external": "External id",
        "function": "Record function id",
    },
):
    """What is said of a kernel, of a collective in NCCL's words, and of an operator: its number, which its kernels have
    too, and that in execution traces. ``inputs``, ``outputs`` : elements, -1 where it is not told."""

    correlation: int = -1
    external: int = -1
    function: int = -1
    stream: int | str | None = None
    collective: str | None = None
    inputs: int = -1
    outputs: int = -1
    size: int = 0
    group: str | int = ""
    purpose: str = ""
    ranks: str | list[int] | None = None
    dtype: str = ""
    seq: int | None = None
    rank: int | None = None
    step: int | None = None


class NoteArgs(msgspec.Struct, rename={"dims": "Input Dims", "types": "Input type"}):
    """Shapes and types of what an operator was given."""

    dims: Any = None
    types: Any = None


FILE = msgspec.json.Decoder(KinetoFile)
_LAX = msgspec.json.Decoder(KinetoFile, strict=False)
_EVENTS = msgspec.json.Decoder(list[KinetoEvent], strict=False)
KERNEL_ARGS = msgspec.json.Decoder(KernelArgs)
NOTE_ARGS = msgspec.json.Decoder(NoteArgs)


def decoded(data: bytes | bytearray) -> tuple[KinetoFile, bool]:
    """A file, and whether it was cut off and is read up to its last whole event.

    A list of events alone is a file as well, and numbers in quotes are numbers, as Chrome's trace format has it; what
    JSON has not and viewers open is read, too (:func:`_mended`). Raises msgspec's errors for anything else.
    """
    text = data[3:] if data[:3] == b"\xef\xbb\xbf" else data
    try:
        return _as_far(text)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        mended = _mended(text)
        if mended == text:
            raise
    return _as_far(mended)


def _as_far(text: bytes | bytearray) -> tuple[KinetoFile, bool]:
    """A file, and whether it was cut off. Raises msgspec's errors."""
    try:
        return _whole(text), False
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as error:
        events = _up_to_last(text) if "truncated" in str(error) else None
        if events is None:
            raise
        return events, True


def _mended(text: bytes | bytearray) -> bytes:
    """A text with what writers of traces get wrong made JSON: bytes that are no UTF-8 (a name that was cut), a lone
    backslash, numbers that are none (null), and a comma behind the last of a list."""
    plain = text.decode("utf-8", errors="replace").encode()
    plain = _ESCAPE.sub(lambda match: rb"\\" if match[1] else match[0], plain)
    return _LAST_COMMA.sub(b"", _NO_NUMBER.sub(rb"\1null", plain))


def _whole(text: bytes | bytearray) -> KinetoFile:
    if _is_list(text):
        return KinetoFile(_EVENTS.decode(text))
    try:
        return FILE.decode(text)
    except msgspec.ValidationError:
        return _LAX.decode(text)


def _is_list(text: bytes | bytearray) -> bool:
    return bytes(text[:64]).lstrip().startswith(b"[")


def _up_to_last(text: bytes | bytearray) -> KinetoFile | None:
    """What stands before the end of the last whole event; None where no such end is near the file's own."""
    end = b"]" if _is_list(text) else b"]}"
    starts = [match.start() for match in _BOUNDARY.finditer(text, max(0, len(text) - 2**20))]
    ends = [start + 1 for start in reversed(starts)]
    if text.endswith(b"}"):
        ends.insert(0, len(text))
    for at in ends[:TRIES]:
        try:
            return _whole(text[:at] + end)
        except msgspec.DecodeError:
            continue
    return None


PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}
"""Operators that are products of matrices -> which input is the first factor."""


def product_flops(name: str, args: NoteArgs) -> float:
    """FLOPs of a product, by the shapes of its factors, ``(..., m, k)`` and ``(..., k, n)``; 0 where they are not
    told."""
    dims = args.dims
    first = PRODUCTS[name]
    if not isinstance(dims, list) or len(dims) < first + 2:
        return 0.0
    left, right = dims[first : first + 2]
    shapes = isinstance(left, list) and isinstance(right, list) and len(left) >= 2 and len(right) >= 2
    if not shapes or not all(isinstance(size, int) for size in (*left, *right)):
        return 0.0
    return 2.0 * float(math.prod(left) * right[-1])


def ranks_named(ranks: str | list[int] | None) -> tuple[int, ...]:
    """Ranks from Kineto's text ``"[0, 1, 2, 3]"``; empty where it is cut off (``...``)."""
    if isinstance(ranks, list):
        return tuple(ranks)
    if not ranks or "..." in ranks:
        return ()
    return tuple(int(word) for word in re.findall(r"\d+", ranks))


def input_bytes(args: NoteArgs) -> tuple[float | None, str]:
    """Bytes of all input tensors and their type."""
    dims = args.dims
    types = args.types
    if not isinstance(dims, list) or not isinstance(types, list):
        return None, ""
    total = 0.0
    dtype = ""
    for shape, word in zip(dims, types, strict=False):
        tensor_dtype = dtype_of(word) if isinstance(word, str) else None
        if tensor_dtype and isinstance(shape, list) and all(isinstance(d, int) for d in shape):
            total += math.prod(shape) * DTYPE_BYTES[tensor_dtype]
            dtype = dtype or tensor_dtype
    return (total, dtype) if dtype else (None, "")


def by_rank(events: list[KinetoEvent]) -> dict[int, list[KinetoEvent]]:
    """The events of each rank, of a trace that this program wrote."""
    parts: dict[int, list[KinetoEvent]] = {}
    for event in events:
        if event.ph == "X" and event.cat == "kernel":
            parts.setdefault(KERNEL_ARGS.decode(event.args).rank or 0, []).append(event)
        elif event.ph == "X" and event.cat == "user_annotation":
            args = KERNEL_ARGS.decode(event.args)
            if args.rank is not None:  # what a host did; a step's own annotation is of all ranks
                parts.setdefault(args.rank, []).append(event)
    return parts


def groups_of(info: KinetoInfo) -> dict[str, tuple[int, ...]]:
    """Group name -> ranks, where the profiler wrote its groups down."""
    groups = {}
    for group in info.pg_config if isinstance(info.pg_config, list) else []:
        ranks = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and ranks and all(isinstance(r, int) for r in ranks):
            groups[str(group.get("pg_name"))] = tuple(ranks)
    return groups
