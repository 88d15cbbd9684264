"""PyTorch's execution traces (``ExecutionTraceObserver``): what a profile of the same steps leaves out.

An operator there has the shapes and types of its tensors and the memory that they lie in; a Kineto trace has the times.
The two meet by the ``rf_id`` there and the ``Record function id`` here, and kernels by the ``External id`` of the
operator that launched them. Shapes give FLOPs and bytes; memory tells what waits for which collective, felt or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from clustersim.core.errors import TraceError
from clustersim.core.limits import counted
from clustersim.core.program import DTYPE_BYTES
from clustersim.core.texts import decoded, short
from clustersim.files.traces import files
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.samples import dtype_of

MOST_NODES = 10_000_000
"""Operators of one file."""
_SCHEMA = re.compile(r"\d+\.\d")
_KNOWN = re.compile(r"1\.(0\.[2-9]|[1-9])\S*-chakra")
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::_scaled_mm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Which tensor is the first factor."""
_TENSOR = re.compile(r"Tensor\(([^()]*)\)")
_ATTENTION = re.compile(r"aten::_scaled_dot_product_(flash|efficient|cudnn|fused)\w*?(_backward)?$")
Shape = tuple[int, ...]
Tensor = tuple[int, Shape, str]
"""Its storage, shape and type."""


class _TraceTensors(msgspec.Struct):
    values: list[Any] = []
    shapes: list[Any] = []
    types: list[str] = []


class _Attribute(msgspec.Struct):
    name: str = ""
    value: Any = None


class _TraceNode(msgspec.Struct):
    id: int
    name: str = ""
    ctrl_deps: int = 0
    inputs: _TraceTensors = msgspec.field(default_factory=_TraceTensors)
    outputs: _TraceTensors = msgspec.field(default_factory=_TraceTensors)
    attrs: list[_Attribute] = []


class _ExecutionTraceFile(msgspec.Struct):
    schema: str
    nodes: list[_TraceNode]
    pid: int = 0


@dataclass(frozen=True)
class Operator:
    """An operator of a rank and all that it calls.

    order : its place among the rank's operators. flops : of its products, convolutions and attention (dense); a part of
        one has those of the whole. nbytes : float [bytes], of its own tensors. dtype : of the first of them.
    storages : the memory that it and what it calls read and write, by number.
    """

    order: int
    flops: float = 0.0
    nbytes: float = 0.0
    dtype: str = ""
    storages: frozenset[int] = frozenset()


def sniff(head: Head) -> Likeness:
    """Whether this is an execution trace: a schema by number, and nodes."""
    schema = head.members.get("schema")
    named = schema is not None and bool(_SCHEMA.match(schema.text))
    nodes = head.members.get("nodes")
    empty = nodes is not None and nodes.opens == "[" and not nodes.names
    return likeness(named=named, shaped=named and (empty or head.lists("nodes", "id", "name")))


def read(path: Path) -> tuple[int, dict[int, Operator]]:
    """The process, and its operators by ``rf_id``. Raises :class:`TraceError` for a file that is damaged or older."""
    file = decoded(files.whole(path), _ExecutionTraceFile, f"{path}: not a whole execution trace", TraceError)
    if not _KNOWN.match(file.schema):
        raise TraceError(f"{path}: an execution trace of schema {short(file.schema)!r}; this reads 1.0.2-chakra on")
    counted(len(file.nodes), MOST_NODES, f"{path}: operators", TraceError)
    try:
        return file.pid, _operators(sorted(file.nodes, key=lambda node: node.id))
    except (TypeError, ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise TraceError(f"{path}: a tensor of an operator is not PyTorch's: {short(str(error))}") from None


def _operators(nodes: list[_TraceNode]) -> dict[int, Operator]:
    """By ``rf_id``: FLOPs go up to callers and down to what a product is made of, memory goes up."""
    operators = {node.id: _alone(node) for node in nodes}
    with_flops = {i for i, operator in operators.items() if operator.flops}
    for node in reversed(nodes):
        above = operators.get(node.ctrl_deps)
        operator_now = operators[node.id]
        if above is not None and node.ctrl_deps < node.id:
            flops = above.flops + (0.0 if node.ctrl_deps in with_flops else operator_now.flops)
            operators[node.ctrl_deps] = replace(above, flops=flops, storages=above.storages | operator_now.storages)
    for node in nodes:
        if node.ctrl_deps in with_flops and not operators[node.id].flops:
            operators[node.id] = replace(operators[node.id], flops=operators[node.ctrl_deps].flops)
            with_flops.add(node.id)
    ids = ((node.id, next((a.value for a in node.attrs if a.name == "rf_id"), 0)) for node in nodes)
    return {int(number): operators[i] for i, number in ids if number}


def _alone(node: _TraceNode) -> Operator:
    given = list(_tensors(node.inputs))
    outputs = list(_tensors(node.outputs))
    nbytes = sum(prod(shape) * DTYPE_BYTES[dtype] for _, shape, dtype in (*given, *outputs))
    flops = _flops(node.name, [shape for _, shape, _ in given], [shape for _, shape, _ in outputs])
    dtype = given[0][2] if given else ""
    return Operator(node.id, float(flops), float(nbytes), dtype, frozenset(s for s, *_ in (*given, *outputs)))


def _tensors(part: _TraceTensors) -> Iterator[Tensor]:
    """Tensors, those of lists too; a value is its number, storage, offset, elements, their bytes and the device."""
    for value, shape, kind in zip(part.values, part.shapes, part.types, strict=False):
        for word, (_, storage, *_), lengths in _leaves(kind, value, shape):
            if dtype := dtype_of(word):
                yield int(storage), tuple(int(n) for n in lengths), dtype


def _leaves(kind: str, value: Any, shape: Any) -> Iterator[tuple[str, Any, Any]]:
    """Element type, value and shape of each tensor of a value, by its type: of lists of lists too."""
    if match := _TENSOR.fullmatch(kind):
        yield match[1], value, shape
        return
    begin = kind.find("[")
    if begin < 0 or "Tensor(" not in kind or not isinstance(value, list):
        return
    inner = _split(kind[begin + 1 :].removesuffix("]"))
    if len(inner) == 1:
        inner *= len(value)
    for one, each, lengths in zip(inner, value, shape, strict=False):
        yield from _leaves(one, each, lengths)


def _split(kinds: str) -> list[str]:
    """What commas part at the outermost level."""
    parts = [""]
    depth = 0
    for letter in kinds:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _flops(name: str, given: list[Shape], outputs: list[Shape]) -> int:
    """Of an operator that multiplies; 0 for any other."""
    if name in _PRODUCTS:
        a, b = given[_PRODUCTS[name] : _PRODUCTS[name] + 2]
        return 2 * prod(a) * b[-1]
    if name == "aten::convolution":
        return 2 * prod(outputs[0]) * prod(given[1][1:])
    if name == "aten::convolution_backward":  # of the input, and of the weight
        return 4 * prod(given[0]) * prod(given[2][1:])
    if match := _ATTENTION.match(name):  # scores and values; backward, the scores again and four more
        query, key = given[1:3] if match[2] else given[:2]
        return (10 if match[2] else 4) * prod(query) * key[-2]
    return 0
