"""Chakra execution traces, of every rank or of one that stands for all, as a Program that any topology plays.

Ranks with the same nodes become one role again. Files of others have no streams: computation is one stream, host work
another, and each process group has its own, in the order of dependencies, then of ids (one thing at a time of each
kind, as ASTRA-sim plays them). Nodes of other types last as long as they say, and are counted in the notes.
"""

from __future__ import annotations

import ast
import heapq
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from clustersim.core.byte_matrix import byte_matrix
from clustersim.core.errors import TraceError
from clustersim.core.limits import MOST_RANKS, counted
from clustersim.core.program import (
    COLLECTIVES,
    COMM_STREAM,
    COMPUTE_STREAM,
    Collective,
    Compute,
    Op,
    Program,
    Recv,
    Role,
    Send,
    Serve,
)
from clustersim.core.texts import Table, decoded
from clustersim.files.launch.chakra import MOST_NODES, OWN, ChakraFields, ChakraHeader
from clustersim.files.launch.chakra_schema import COLLECTIVE_TYPES, LAYOUT, NODE_TYPES, VERSION, attributes, unframed
from clustersim.files.traces import files

T = TypeVar("T")
Group = tuple[int, ...]


@dataclass(frozen=True)
class _ChakraNode:
    """A node of one rank: ``group`` its members (empty: everybody), ``peer`` of a message, -1 for none."""

    name: str
    own: ChakraFields
    after: tuple[int, ...]
    group: Group = ()
    peer: int = -1


@dataclass(frozen=True)
class _ChakraRank:
    about: ChakraHeader
    nodes: tuple[_ChakraNode, ...]
    where: str

    @property
    def size(self) -> int:
        """Ranks of the run, as the file says or its groups name them."""
        named = (1 + max(node.group) for node in self.nodes if node.group)
        return max(self.about.world_size, max(named, default=0))


def read(paths: Sequence[str | Path], world: int = 0) -> Program:
    """The Program of per-rank files, or of one file whose rank all ``world`` ranks do the same as (0: as it says).

    Raises :class:`TraceError` for a file that is cut off or of another schema, ranks that are missing or there twice,
    and dependencies that are not there or go in circles.
    """
    trace_files = files.files_of([Path(path) for path in paths])
    trace_files = [path for path in trace_files if path.name.endswith((".et", ".et.gz"))] or trace_files
    skipped: Counter[str] = Counter()
    budget = MOST_NODES
    ranks: dict[int, _ChakraRank] = {}
    for path in trace_files:
        rank_trace = _rank(path, budget, skipped)
        budget -= len(rank_trace.nodes)
        if rank_trace.about.rank in ranks:
            raise TraceError(
                f"{path}: rank {rank_trace.about.rank} again (also in {ranks[rank_trace.about.rank].where})"
            )
        ranks[rank_trace.about.rank] = rank_trace
    world = world or max(max(r.size for r in ranks.values()), 1 + max(ranks))
    counted(world, MOST_RANKS, f"{trace_files[0]}: ranks of the run", TraceError)
    missing = [r for r in range(world) if r not in ranks] if len(ranks) > 1 else []
    if missing:
        raise TraceError(
            f"{trace_files[0]}: no file of rank {missing[0]} ({len(missing)} of {world} missing); give all, or one for "
            f"all"
        )
    notes = [f"{count} nodes of type {kind}: as long as their duration" for kind, count in sorted(skipped.items())]
    program = _program(ranks, world, notes)
    program.check()
    return program


# ---- one file --------------------------------------------------------------------------------------------------------


def _rank(path: Path, budget: int, skipped: Counter[str]) -> _ChakraRank:
    source = str(path)
    messages = unframed(files.whole(path), source)
    head = next(messages, None)
    if head is None:
        raise TraceError(f"{source}: no message of Chakra {VERSION}")
    about_file = attributes(head)
    version = getattr(head, "version", "") or _schema(about_file)
    if not re.fullmatch(r"(0\.0\.\d+)?", version):
        raise TraceError(f"{source}: a Chakra trace of version {version[:20]!r}; this reads {VERSION}")
    own_attribute = about_file.get(OWN)
    numbered = re.search(r"\.(\d{1,9})\.(?:et|json)(?:\.gz)?$", path.name)
    about = (
        ChakraHeader(0, int(numbered[1]) if numbered else 0, notes=_earlier(about_file))
        if own_attribute is None
        else _json(own_attribute, ChakraHeader, source)
    )
    groups: dict[str, Group] = {}
    nodes_by_id: dict[int, Any] = {}
    for node in messages:
        counted(len(nodes_by_id), budget, f"{source}: nodes", TraceError)
        if NODE_TYPES[node.type : node.type + 1] == ("METADATA_NODE",):
            groups |= _groups(node.inputs.values, source)
        elif node.id in nodes_by_id:
            raise TraceError(f"{source}: node {node.id} is there twice")
        else:
            nodes_by_id[node.id] = node
    return _ChakraRank(about, tuple(_ordered(nodes_by_id, groups, source, skipped)), source)


def _earlier(about: Table) -> tuple[str, ...]:
    """A note on what was taken for granted of a file of an earlier layout."""
    text = about.get(LAYOUT)
    return (text,) if isinstance(text, str) else ()


def _schema(about: Table) -> str:
    """Chakra's version by the schema of the execution trace that a converter made the file of; empty: not said."""
    match = re.search(r"chakra\.(\d+\.\d+\.\d+)$", str(about.get("schema", "")))
    return match[1] if match else ""


def _json(text: Any, kind: type[T], source: str) -> T:
    damaged = f"{source}: the attribute {OWN!r} is damaged"
    return decoded(text if isinstance(text, str) else "", kind, damaged, TraceError)


def _groups(values: str, where: str) -> dict[str, Group]:
    """Process groups of PyTorch's node: a list of one string that is JSON; empty ranks are everybody."""
    try:
        inner = ast.literal_eval(values) if values.startswith("[") else [values]
        rows = json.loads(inner[0]) if inner and inner[0] else []
        return {str(row["pg_name"]): tuple(int(rank) for rank in row["ranks"]) for row in rows}
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise TraceError(f"{where}: the list of process groups cannot be read: {str(error)[:100]}") from None


def _ordered(
    nodes_by_id: Mapping[int, Any], groups: Mapping[str, Group], source: str, skipped: Counter[str]
) -> Iterator[_ChakraNode]:
    """Nodes after what they wait for, by id where nothing else tells."""
    waits = {i: {*node.data_deps, *node.ctrl_deps} & nodes_by_id.keys() for i, node in nodes_by_id.items()}
    for i, node in nodes_by_id.items():
        if lost := {*node.data_deps, *node.ctrl_deps} - nodes_by_id.keys():
            if any(a.name == OWN for a in node.attr):
                raise TraceError(f"{source}: node {i} waits for node {min(lost)}, which is not there")
            skipped["dependency that is not in the file"] += len(lost)
    sorter = TopologicalSorter(waits)
    place_of = dict[int, int]()
    with suppress(CycleError):  # what no circle holds up is in order even so
        sorter.prepare()
    ready = sorted(sorter.get_ready())
    while ready:
        i = heapq.heappop(ready)
        place_of[i] = len(place_of)
        yield _node(nodes_by_id[i], place_of, groups, source, skipped)
        sorter.done(i)
        for j in sorter.get_ready():
            heapq.heappush(ready, j)
    if len(place_of) < len(nodes_by_id):
        raise TraceError(
            f"{source}: node {min(nodes_by_id.keys() - place_of.keys())} waits for itself: its dependencies are a "
            f"circle"
        )


def _node(
    node: Any, place_of: Mapping[int, int], groups: Mapping[str, Group], source: str, skipped: Counter[str]
) -> _ChakraNode:
    node_attributes = attributes(node)
    ours = node_attributes.get(OWN)
    own = (
        _json(ours, ChakraFields, source)
        if ours is not None
        else _foreign(node, node_attributes, groups, source, skipped)
    )
    deps = node.data_deps if ours is not None else {*node.data_deps, *node.ctrl_deps}
    name = str(node_attributes.get("pg_name") or "0")
    if not all(0 <= value < math.inf for value in (own.seconds, own.flops, own.nbytes)) and ours is not None:
        raise TraceError(f"{source}: node {node.id}: a time or a size that is below zero or without end")
    if own.type == "collective" and name not in groups and name != "0":
        raise TraceError(f"{source}: node {node.id}: process group {name[:40]!r} is not listed")
    peer = (
        node_attributes.get("comm_dst" if own.type == "send" else "comm_src", -1)
        if own.type in ("send", "recv")
        else -1
    )
    return _ChakraNode(
        node.name, own, tuple(sorted(place_of[i] for i in deps if i in place_of)), groups.get(name, ()), int(peer)
    )


def _foreign(
    node: Any, node_attributes: Table, groups: Mapping[str, Group], source: str, skipped: Counter[str]
) -> ChakraFields:
    """An op of somebody else's node, by Chakra's own attributes."""
    kind = NODE_TYPES[node.type] if 0 <= node.type < len(NODE_TYPES) else str(node.type)
    try:
        size = float(node_attributes.get("comm_size") or 0)
        took = float(node.duration_micros or node_attributes.get("runtime") or 0) * 1e-6
        if not 0 <= size < math.inf or not 0 <= took < math.inf:
            raise ValueError(f"comm_size {size} or runtime {took * 1e6:g} us is below zero or without end")
        if kind == "COMM_COLL_NODE":
            group = str(node_attributes.get("pg_name") or "0")
            which = COLLECTIVE_TYPES[int(node_attributes.get("comm_type") or 0)].removesuffix("_block")
            members = len(groups.get(group, ())) or -1  # everybody: how many is known when all files are
            return ChakraFields(
                "collective",
                f"{COMM_STREAM} {group}",
                kind=which,
                communicator=group,
                nbytes=size * (members if which == "all_gather" else 1),
            )
        if kind in ("COMM_SEND_NODE", "COMM_RECV_NODE"):
            direction = "send" if kind == "COMM_SEND_NODE" else "recv"
            return ChakraFields(
                direction, f"{COMM_STREAM} {direction}", nbytes=size, tag=str(node_attributes.get("comm_tag") or 0)
            )
        if kind != "COMP_NODE":
            skipped[kind] += 1
        host = bool(node_attributes.get("is_cpu_op", False))
        return ChakraFields(
            "compute",
            "host" if host else COMPUTE_STREAM,
            took,
            bound="host" if host else "compute",
            flops=float(node_attributes.get("num_ops") or 0),
            nbytes=float(node_attributes.get("tensor_size") or 0),
        )
    except (TypeError, ValueError, IndexError) as error:
        raise TraceError(f"{source}: node {node.id}: an attribute cannot be read: {error}") from None


# ---- all of them -----------------------------------------------------------------------------------------------------


def _program(ranks: Mapping[int, _ChakraRank], world: int, notes: list[str]) -> Program:
    alike: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        rank_trace = ranks[rank]
        nodes = tuple(
            (n.name, msgspec.structs.replace(n.own, seconds=0.0), n.after, len(n.group)) for n in rank_trace.nodes
        )
        alike[rank_trace.about.role, rank_trace.about.stage, rank_trace.about.serves, nodes].append(rank)
    if len(ranks) == 1 and world > 1:
        notes.append("one rank's file: all do the same at the same time, groups alike beside its own")
    roles: list[Role] = []
    known_groups: dict[Any, Any] = {}
    for (name, stage, serves, _), role_ranks in alike.items():
        members = np.array(role_ranks if len(ranks) > 1 else range(world), dtype=np.int64)
        ops = tuple(
            _op([ranks[r].nodes[k] for r in role_ranks], role_ranks, members, world, known_groups)
            for k in range(len(ranks[role_ranks[0]].nodes))
        )
        roles.append(Role(name or f"rank {role_ranks[0]}", members, ops, stage=stage, serves=serves))
    first = ranks[min(ranks)].about
    return Program(world, tuple(roles), first.overlap_slowdown, (*first.notes, *notes), own_paces=first.own_paces)


def _op(nodes: list[_ChakraNode], role_ranks: list[int], members: Any, world: int, known_groups: dict[Any, Any]) -> Op:
    node = nodes[0]
    own = nodes[0].own
    took = np.array([n.own.seconds for n in nodes])
    if own.type in ("compute", "serve"):
        spent = float(took[0]) if (took == took[0]).all() else took
        return (Serve if own.type == "serve" else Compute)(
            node.name, spent, own.stream, node.after, own.phase, own.bound, own.flops, own.nbytes, own.step, own.label
        )
    if own.type == "collective":
        key = tuple(n.group for n in nodes)
        if key not in known_groups:
            known_groups[key] = _together(list(dict.fromkeys(key)), len(nodes) < len(members), world)
        return _collective(node, known_groups[key], world)
    if own.type not in ("send", "recv"):
        raise TraceError(f"node {node.name[:60]!r}: no op is called {own.type[:40]!r}")
    peer = np.array([n.peer for n in nodes], dtype=np.int64)
    if len(nodes) < len(members):  # one stands for all: the same distance
        peer = (members + peer[0] - role_ranks[0]) % world if peer[0] >= 0 else np.full(world, -1, dtype=np.int64)
    return (Send if own.type == "send" else Recv)(
        node.name, own.nbytes, peer, own.stream, node.after, own.tag, own.phase, own.step, own.label
    )


def _collective(node: _ChakraNode, groups: Any, world: int) -> Collective:
    """The collective of a node; ``groups`` : (groups, members). Raises :class:`TraceError` for an unknown kind."""
    own = node.own
    if own.kind not in COLLECTIVES:
        raise TraceError(f"node {node.name[:60]!r}: no collective is called {own.kind[:40]!r}")
    return Collective(
        name=node.name,
        kind=own.kind,
        nbytes=own.nbytes if own.nbytes >= 0 else -own.nbytes * world,
        groups=groups,
        stream=own.stream,
        after=node.after,
        dtype=own.dtype,
        redop=own.redop,
        root=own.root,
        communicator=own.communicator,
        algorithm=own.algorithm,
        protocol=own.protocol,
        phase=own.phase,
        step=own.step,
        label=own.label,
        matrix=byte_matrix(own.matrix) if own.matrix else None,
    )


def _together(groups: list[Group], alone: bool, world: int) -> Any:
    """(groups, members) of an op; where one rank is ``alone`` known, the others' groups lie beside its own."""
    if groups == [()]:
        return np.arange(world, dtype=np.int64).reshape(1, -1)
    rows = np.array(groups, dtype=np.int64)
    if not alone or rows.size >= world or rows.max() >= world:
        return rows
    shape = rows[0] - rows[0].min()
    left = set(range(world))
    beside = []
    while left:
        group = min(left) + shape
        if not left.issuperset(group.tolist()):
            raise TraceError(f"ranks {rows[0].tolist()[:8]} form a group; how the others of {world} do does not follow")
        beside.append(group)
        left.difference_update(group.tolist())
    return np.array(beside)
