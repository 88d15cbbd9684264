"""A run as one file, whole: its Timeline and the machine it ran on, to look at again without running it.

A zip of numpy columns and one JSON member for the words (``run.npz``). Nothing in it is executed when it is read.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from clustersim.core.calibrated import Calibration
from clustersim.core.errors import TraceError
from clustersim.core.facts import UNKNOWN, RunFacts
from clustersim.core.op_infos import InfoPass, RepeatedInfos
from clustersim.core.paths import RUN_FILE
from clustersim.core.saved_run import SavedRun
from clustersim.core.texts import Plain, is_folder, plain_file, there
from clustersim.core.timeline import LinkUse, OpInfo, Timeline
from clustersim.core.topology import NodeType, Topology
from clustersim.core.units import format_bytes
from clustersim.files.slices import replace_file
from clustersim.files.traces.files import LARGEST
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.packing import (
    packed,
    packed_blocks,
    parts,
    ragged,
    seal,
    unpacked,
    unpacked_blocks,
    zipped,
)

_BROKEN = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
    MemoryError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""What a file that is cut off, or something else, makes readers raise."""
VERSION = 6
"""Of the file's layout; from 4 on files are sealed, from 5 on ops of repeated passes are kept once, and from 6 on times
that are counted from others are kept so."""

Array = npt.NDArray[Any]
_USE = ("segment_transfer", "segment_start", "segment_end", "segment_rate", "transfer_op", "transfer_load")
_LINKS = ("link_src", "link_dst", "link_bandwidth", "link_latency", "vertex_node")


class _SavedLinks(msgspec.Struct):
    """Names and kinds of a run's links; None: they are its machine's."""

    names: list[str] | None
    kinds: list[str] | None
    changing: tuple[int, ...] = ()


class _SavedMachine(msgspec.Struct):
    """A topology without its arrays; ``node_type_of`` : each node's place in ``node_types``."""

    name: str
    vertex_names: tuple[str, ...]
    fabric: str
    routing: str
    vertex_kinds: tuple[str, ...]
    link_kinds: tuple[str, ...]
    node_types: list[NodeType]
    node_type_of: list[int]
    calibration: Calibration | None


_SAME = tuple(name for name in _SavedMachine.__struct_fields__ if not name.startswith("node_type"))
"""What a :class:`_SavedMachine` has as a topology has it."""


class _SavedLayout(msgspec.Struct):
    version: int


class _SavedOp(OpInfo, frozen=True, gc=False):
    """An op as the file has it: arrays of its detail stand in the file's own columns."""

    detail: Plain = msgspec.field(default_factory=dict)  # type: ignore[assignment]


class _SavedWords(_SavedLayout):
    world_size: int
    source: str
    stats: dict[str, float]
    facts: RunFacts
    ops: tuple[_SavedOp, ...]
    passes: tuple[InfoPass, ...] = ()
    links: _SavedLinks | None = None
    topology: _SavedMachine | None = None


def save_run(timeline: Timeline, path: str | Path, topology: Topology | None = None, facts: RunFacts = UNKNOWN) -> None:
    """Write a run; ``topology`` : the machine of its links. Raises :class:`TraceError` where the file cannot be
    written."""
    sets, op, set_of, *times = timeline._rows()
    arrays: dict[str, Array] = {"row_op": op.astype(np.int32), "row_set": set_of.astype(np.int32)}
    arrays |= packed(*times) | packed_blocks(timeline.blocks) | ragged("set", sets)
    if timeline.rank_node is not None:
        arrays["rank_node"] = timeline.rank_node
    written = timeline.ops
    passes: tuple[InfoPass, ...] = ()
    if isinstance(written, RepeatedInfos):  # what repeats is kept once
        passes = written.passes
        arrays["op_of"] = written.of.astype(np.int32)
        written = written.written
    details = [{key: _kept(value, arrays) for key, value in op.detail.items()} for op in written]
    ops = tuple(
        _SavedOp(**{**msgspec.structs.asdict(op), "detail": op_detail})
        for op, op_detail in zip(written, details, strict=True)
    )
    links = None if timeline.links is None else _link_words(timeline.links, topology, arrays)
    machine = None if topology is None else _topology_words(topology, arrays)
    whole = timeline.world_size, timeline.source, timeline.stats
    saved_words = _SavedWords(VERSION, *whole, facts, ops, passes, links, machine)
    arrays["words"] = np.frombuffer(msgspec.json.encode(saved_words, enc_hook=_plain), dtype=np.uint8)
    replace_file(Path(path), zipped(arrays))


def load_run(path: str | Path) -> SavedRun:
    """Read what :func:`save_run` wrote; a folder is the ``run.npz`` inside it.

    Raises :class:`TraceError` for a file that is missing or something else.
    """
    path = Path(path)
    path = path / RUN_FILE if is_folder(path) else path
    if there(path):
        plain_file(path, TraceError)
    try:
        _fits(path)
        with np.load(path, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
        text = arrays["words"].tobytes()
        version = msgspec.json.decode(text, type=_SavedLayout).version
        if version != VERSION:
            raise TraceError(f"{path}: written by another version of clustersim (layout {version}); run it again")
        saved_words = msgspec.json.decode(text, type=_SavedWords)
        topology = None if saved_words.topology is None else _topology(saved_words.topology, arrays)
        return SavedRun(_timeline(saved_words, arrays, topology), topology, saved_words.facts)
    except FileNotFoundError:
        raise TraceError(f"{path}: no such file; `clustersim run SCENARIO --out DIR` writes it") from None
    except (OSError, EOFError, *_BROKEN, msgspec.DecodeError) as error:
        raise TraceError(f"{path}: not a run that clustersim saved ({type(error).__name__})") from None


def _fits(path: Path) -> None:
    """Raise :class:`TraceError` where what is packed in a file would be larger than any trace that is read, or is not
    what was sealed: whatever reads a run may then rely on all of it."""
    with zipfile.ZipFile(path) as archive:
        size = sum(member.file_size for member in archive.infolist())
        sealed = archive.comment == seal(archive)
    if size > LARGEST:
        raise TraceError(f"{path}: unpacks to {format_bytes(size)}; at most {format_bytes(LARGEST)} are read")
    if not sealed:
        raise TraceError(
            f"{path}: not a run that clustersim saved, or one of another version, or changed since; run it again"
        )


def sniff(head: Head) -> Likeness:
    """Whether a file is a zip, as a saved run is."""
    return likeness(named=False, shaped=head.data.startswith(b"PK\x03\x04"))


def read(paths: Sequence[Path]) -> Timeline:
    """The Timeline of one saved run. Raises :class:`TraceError` for several."""
    if len(paths) != 1:
        raise TraceError(f"{paths[0]} is a whole run; read one at a time")
    return load_run(paths[0]).timeline


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)


def _kept(value: Any, arrays: dict[str, Array]) -> Any:
    """What JSON cannot hold, infinity and arrays, as an object that :func:`_restored` knows; arrays go beside the other
    columns, equal ones once."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, tuple | list):
        return [_kept(item, arrays) for item in value]
    if not isinstance(value, np.ndarray):
        return value
    import hashlib

    name = "detail_" + hashlib.sha256(str((value.dtype.str, value.shape)).encode() + value.tobytes()).hexdigest()[:24]
    arrays[name] = value
    return {"$array": name}


def _link_words(use: LinkUse, topology: Topology | None, arrays: dict[str, Array]) -> _SavedLinks:
    arrays |= {name: getattr(use, name) for name in _USE}
    arrays |= ragged("load_links", tuple(links for links, _ in use.loads))
    arrays |= ragged("load_weights", tuple(weights for _, weights in use.loads))
    arrays["use_bandwidth"] = use.link_bandwidth
    # The machine's own links need no names of their own.
    if topology is not None and topology.n_links == len(use.link_bandwidth):
        return _SavedLinks(None, None, tuple(use.changing))
    return _SavedLinks(list(use.link_names), list(use.link_kinds), tuple(use.changing))


def _topology_words(topology: Topology, arrays: dict[str, Array]) -> _SavedMachine:
    arrays |= {f"topology_{name}": getattr(topology, name) for name in _LINKS}
    by_id = {id(t): t for t in topology.node_types}
    types = list(by_id)
    return _SavedMachine(
        node_types=[replace(node_type, sources=dict(node_type.sources)) for node_type in by_id.values()],
        node_type_of=[types.index(id(t)) for t in topology.node_types],
        **{name: getattr(topology, name) for name in _SAME},
    )


def _topology(saved_machine: _SavedMachine, arrays: dict[str, Array]) -> Topology:
    same: Any = {name: getattr(saved_machine, name) for name in _SAME} | {
        name: arrays[f"topology_{name}"] for name in _LINKS
    }
    return Topology(node_types=tuple(saved_machine.node_types[i] for i in saved_machine.node_type_of), **same)


def _timeline(saved_words: _SavedWords, arrays: dict[str, Array], topology: Topology | None) -> Timeline:
    rows = (arrays["row_op"].astype(np.int64), arrays["row_set"].astype(np.int64), *unpacked(arrays))
    details = [{key: _restored(value, arrays) for key, value in op.detail.items()} for op in saved_words.ops]
    ops = tuple(
        OpInfo(**{**msgspec.structs.asdict(op), "detail": op_detail})
        for op, op_detail in zip(saved_words.ops, details, strict=True)
    )
    of = arrays.get("op_of")
    return Timeline.of_blocks(
        world_size=saved_words.world_size,
        ops=ops if of is None else RepeatedInfos(ops, of.astype(np.int64), saved_words.passes),
        rank_sets=parts("set", arrays),
        rows=rows,
        blocks=unpacked_blocks(arrays),
        links=None if saved_words.links is None else _links(saved_words.links, arrays, topology),
        source=saved_words.source,
        rank_node=arrays.get("rank_node"),
        stats=saved_words.stats,
    )


def _restored(value: Any, arrays: dict[str, Array]) -> Any:
    if isinstance(value, dict):
        return arrays[value["$array"]] if "$array" in value else float(value["$float"])
    return tuple(_restored(item, arrays) for item in value) if isinstance(value, list) else value


def _links(saved_links: _SavedLinks, arrays: dict[str, Array], topology: Topology | None) -> LinkUse:
    names = saved_links.names
    kinds = saved_links.kinds
    if names is None or kinds is None:
        if topology is None:
            raise ValueError("links without names")
        names = [topology.link_name(i) for i in range(topology.n_links)]
        kinds = list(topology.link_kinds)
    loads = tuple(zip(parts("load_links", arrays), parts("load_weights", arrays), strict=True))
    columns = {name: arrays[name] for name in _USE}
    return LinkUse(
        **columns,
        loads=loads,
        link_names=names,
        link_bandwidth=arrays["use_bandwidth"],
        link_kinds=kinds,
        changing=saved_links.changing,
    )
