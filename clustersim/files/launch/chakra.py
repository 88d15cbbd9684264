"""A Program as Chakra execution traces, one ``NAME.RANK.et`` a rank, as ASTRA-sim reads them.

A node is an op. ``data_deps`` are what it waits for; a stream's order is its ``ctrl_deps``. Durations are whole
microseconds there, sizes whole bytes (``comm_size`` is what a rank puts in: S/n of an all-gather), and a process group
is a number (``pg_name``, 0 for everybody), listed in a METADATA_NODE as PyTorch lists it. What Chakra has no word for
(exact seconds, streams, labels) is in one more attribute, ``clustersim``, so that reading gives the same Program back.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clustersim.core.errors import TraceError
from clustersim.core.label import Label
from clustersim.core.limits import counted
from clustersim.core.program import Collective, Compute, Op, Program, Recv, Role, Send, Serve, seconds
from clustersim.files.launch.chakra_schema import COLLECTIVE_TYPES, NODE_TYPES, VERSION, attribute, framed, messages

MOST_NODES = 3_000_000
"""Nodes of all files that are written or read together."""
OWN = "clustersim"
"""The attribute with what Chakra has no word for, as JSON."""


class ChakraFields(msgspec.Struct, omit_defaults=True, frozen=True):
    """An op's fields beyond its name, dependencies, group and peer; ``seconds`` are of this rank at its pace."""

    type: str
    stream: str
    seconds: float = 0.0
    kind: str = ""
    nbytes: float = 0.0
    flops: float = 0.0
    phase: str = "other"
    bound: str = "compute"
    step: int = 0
    dtype: str = "fp32"
    redop: str = "sum"
    root: int = 0
    communicator: str = "world"
    algorithm: str | None = None
    protocol: str | None = None
    tag: str = ""
    label: Label | None = None
    matrix: tuple[tuple[float, ...], ...] | None = None


class ChakraHeader(msgspec.Struct, omit_defaults=True, frozen=True):
    """What a file says of its rank and of the whole Program."""

    world_size: int
    rank: int
    role: str = ""
    stage: int = -1
    serves: bool = False
    overlap_slowdown: float = 0.0
    notes: tuple[str, ...] = ()
    own_paces: bool = False


def file_names(program: Program, name: str, ranks: Sequence[int] | None = None) -> dict[str, int]:
    """File -> rank; ``ranks`` None is all. Raises :class:`TraceError` for a rank that does not exist, or too many."""
    chosen = range(program.world_size) if ranks is None else ranks
    if wrong := [rank for rank in chosen if not 0 <= rank < program.world_size]:
        raise TraceError(f"no rank {wrong[0]}: the program has ranks 0..{program.world_size - 1}")
    nodes = sum(len(role.ops) * int(np.isin(role.ranks, chosen).sum()) for role in program.roles)
    counted(nodes, MOST_NODES, "Chakra traces, fewer with --ranks: nodes", TraceError)
    return {f"{name}.{rank}.et": rank for rank in chosen}


def write(program: Program, name: str, files: dict[str, int], path_of: Callable[[str], Path]) -> dict[int, list[int]]:
    """Write the files of some ranks; returns the process groups by number, 0 (everybody) left out."""
    groups = _numbered(program)
    place = {int(rank): (role, i) for role in program.roles for i, rank in enumerate(role.ranks)}
    for file, rank in files.items():
        role, i = place[rank]
        about = ChakraHeader(
            program.world_size,
            rank,
            role.name,
            role.stage,
            role.serves,
            program.overlap_slowdown,
            program.notes,
            program.own_paces,
        )
        head = messages()["GlobalMetadata"](version=VERSION, attr=[_own(about)])
        with path_of(file).open("wb") as out:
            out.write(framed(head))
            for node in _nodes(role, i, groups):
                out.write(framed(node))
    return {number: list(members) for members, number in groups.items() if number}


def _fields(kind: str, op: Op, took: float = 0.0) -> Any:
    """What :class:`ChakraFields` keeps of an op: the fields that are called the same."""
    same = {name: getattr(op, name) for name in ChakraFields.__struct_fields__ if name in op.__struct_fields__}
    if same.get("matrix") is not None:
        same["matrix"] = same["matrix"].rows
    return _own(ChakraFields(kind, seconds=took, **same))


def _own(value: msgspec.Struct) -> Any:
    return attribute(OWN, "string", msgspec.json.encode(value).decode())


def _numbered(program: Program) -> dict[tuple[int, ...], int]:
    """Members of every group -> its number; everybody in the order of ranks is 0."""
    numbers = {tuple(range(program.world_size)): 0}
    counted_groups: set[int] = set()
    for op in (op for role in program.roles for op in role.ops):
        if isinstance(op, Collective) and id(op.groups) not in counted_groups:
            counted_groups.add(id(op.groups))
            for members in op.groups.tolist():
                numbers.setdefault(tuple(members), len(numbers))
    return numbers


def _nodes(role: Role, i: int, groups: dict[tuple[int, ...], int]) -> Iterator[Any]:
    """The nodes of the role's i-th rank: its groups, then its ops."""
    rank = int(role.ranks[i])
    kinds = messages()
    own_groups = {members: number for members, number in groups.items() if rank in members}
    listed = [
        {"pg_name": str(number), "ranks": list(members) if number else []} for members, number in own_groups.items()
    ]
    values = f"['{msgspec.json.encode(listed).decode()}']"
    yield kinds["Node"](
        id=len(role.ops),
        name="## process_group:init ##",
        type=NODE_TYPES.index("METADATA_NODE"),
        inputs=kinds["IOInfo"](values=values, shapes="[[]]", types="['String']"),
    )
    last: dict[str, int] = {}
    members_of: dict[int, dict[int, tuple[int, ...]]] = {}
    for k, op in enumerate(role.ops):
        node = kinds["Node"](id=k, name=op.name, data_deps=op.after)
        if op.stream in last and not isinstance(op, Serve):
            node.ctrl_deps.append(last[op.stream])
        last[op.stream] = k
        if isinstance(op, Compute):
            _compute(node, op, role, i)
        elif isinstance(op, Collective):
            group_of = members_of.setdefault(id(op.groups), {r: tuple(g) for g in op.groups.tolist() for r in g})
            _collective(node, op, group_of[rank], own_groups[group_of[rank]])
        else:
            _message(node, op, rank, int(op.peer[i]))
        yield node


def _add(node: Any, **values: tuple[str, object]) -> None:
    node.attr.extend(attribute(name, kind, value) for name, (kind, value) in values.items())


def _compute(node: Any, op: Compute, role: Role, i: int) -> None:
    spent = seconds(role, op)
    took = float(spent[i]) if isinstance(spent, np.ndarray) and spent.ndim else float(spent)
    node.type, node.duration_micros = NODE_TYPES.index("COMP_NODE"), round(took * 1e6)
    _add(
        node,
        is_cpu_op=("bool", op.bound == "host"),
        num_ops=("int64", int(op.flops)),
        tensor_size=("uint64", int(op.nbytes)),
    )
    node.attr.append(_fields("serve" if isinstance(op, Serve) else "compute", op, took))


def _collective(node: Any, op: Collective, members: tuple[int, ...], number: int) -> None:
    named_kind = op.kind in COLLECTIVE_TYPES
    node.type = NODE_TYPES.index("COMM_COLL_NODE")
    put = op.nbytes / (len(members) if op.kind == "all_gather" else 1)
    _add(
        node,
        is_cpu_op=("bool", False),
        comm_type=("int64", COLLECTIVE_TYPES.index(op.kind) if named_kind else 0),
        comm_size=("int64", int(put)),
        pg_name=("string", str(number)),
    )
    node.attr.append(_fields("collective", op))


def _message(node: Any, op: Send | Recv, rank: int, peer: int) -> None:
    send = isinstance(op, Send)
    kind = "COMM_SEND_NODE" if send else "COMM_RECV_NODE"
    node.type = NODE_TYPES.index(kind if peer >= 0 else "INVALID_NODE")
    ends = (rank, peer) if send else (peer, rank)
    _add(
        node,
        is_cpu_op=("bool", False),
        comm_size=("int64", int(op.nbytes)),
        comm_src=("int32", ends[0]),
        comm_dst=("int32", ends[1]),
        comm_tag=("int32", zlib.crc32(op.tag.encode()) & 0x7FFFFFFF),
    )
    node.attr.append(_fields("send" if send else "recv", op))
