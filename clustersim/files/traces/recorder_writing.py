"""A hang -> Flight Recorder dumps as ``torch.distributed`` 2.13 writes them, a file per rank: a pickle of plain values,
which its watchdog writes, or the same as JSON.

Fields and their order as ``torch._C._distributed_c10d._dump_fr_trace_json`` gives them (schema 2.10), states as of
ProcessGroupNCCL: "scheduled" until the GPU begins, "started", "completed".
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

import msgspec

from clustersim.core.program import DTYPE_BYTES
from clustersim.core.texts import Plain
from clustersim.engine.hang import Hang, RankCall
from clustersim.files import slices

VERSION = "2.10"
_NAMES = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base", "barrier": "all_reduce_barrier"}
"""What ProcessGroupNCCL calls a kind in ``profiling_name``, where it differs."""


GroupNames: TypeAlias = dict[tuple[str, tuple[int, ...]], tuple[str, str]]


def group_key(call: RankCall) -> tuple[str, tuple[int, ...]]:
    """The process group of a call: both ends of a message are of one, whichever streams they are on."""
    return ("pp", tuple(sorted(call.group))) if call.peer >= 0 else (call.communicator, call.group)


def group_names(hang: Hang) -> GroupNames:
    """Of each process group its number and description: the group of all ranks is the default one, ``"0"``."""
    everyone = tuple(range(hang.world_size))
    names = {("", everyone): ("0", "default_pg")}
    number = 0
    for calls in hang.calls.values():
        for call in calls:
            key = group_key(call)
            if call.peer < 0 and sorted(call.group) == list(everyone):
                names[key] = ("0", "default_pg")
            elif key not in names:
                number += 1
                names[key] = (str(number), key[0])
    return names


def dump_of(hang: Hang, rank: int, origin: float) -> Plain:
    """What a rank's recorder holds; ``origin`` : when the run began [s since 1970]."""
    names = group_names(hang)
    seqs = _default_seqs(hang.calls[rank], names)
    entries = [_entry(hang, call, i, names, seqs[i], origin) for i, call in enumerate(hang.calls[rank])]
    config = {
        number: {"desc": about, "name": number, "ranks": str(list(group))}
        for (_, group), (number, about) in names.items()
        if rank in group
    }
    return {
        "comm_lib_version": "2.27.5",
        "entries": entries,
        "nccl_comm_state": {},
        "pg_config": config,
        "pg_status": {},
        "rank": rank,
        "version": VERSION,
    }


def write_dumps(hang: Hang, folder: Path, ranks: Iterable[int], origin: float, pickled: bool = False) -> list[Path]:
    """Write ``nccl_trace_rank_N.json`` of each of these ranks that can write one, or without an ending a pickle (of
    protocol 2, as PyTorch's own pickler writes); returns the files.

    Raises :class:`TraceError` where one cannot be written.
    """
    paths = []
    for rank in ranks:
        if rank in hang.silent:
            continue
        path = folder / f"nccl_trace_rank_{rank}{'' if pickled else '.json'}"
        dump = dump_of(hang, rank, origin)
        slices.replace_file(path, pickle.dumps(dump, protocol=2) if pickled else msgspec.json.encode(dump))
        paths.append(path)
    return paths


def elements_of(call: RankCall) -> tuple[int, int]:
    """Elements that a rank puts in and gets out."""
    whole = int(call.nbytes / DTYPE_BYTES.get(call.dtype, 4))
    piece = whole // max(1, len(call.group))
    return (
        piece if call.kind == "all_gather" else whole,
        piece if call.kind == "reduce_scatter" else whole,
    )


def profiling_name(call: RankCall, own: int) -> str:
    """``"nccl:all_reduce"``, or of a message ``"nccl:send 0->1"``; ``own`` : the rank's place in the group."""
    if call.peer < 0:
        return f"nccl:{_NAMES.get(call.kind, call.kind)}"
    other = sorted(call.group).index(call.peer)
    return f"nccl:send {own}->{other}" if call.kind == "send" else f"nccl:recv {own}<-{other}"


def _default_seqs(calls: Iterable[RankCall], names: GroupNames) -> list[int]:
    """The number of each call in its process group: communicators of all ranks are one group there."""
    count: dict[str, int] = {}
    seqs = []
    for call in calls:
        number, _ = names[group_key(call)]
        count[number] = count.get(number, 0) + 1
        seqs.append(count[number])
    return seqs


def _entry(
    hang: Hang,
    call: RankCall,
    record: int,
    names: GroupNames,
    seq: int,
    origin: float,
) -> Plain:
    number, about = names[group_key(call)]
    inputs, outputs = elements_of(call)
    message = call.peer >= 0
    own = next((i for i, rank in enumerate(sorted(call.group)) if rank != call.peer), 0)
    dtype = slices.DTYPE_NAMES.get(call.dtype, call.dtype)
    done = call.ended is not None
    return {
        "collective_seq_id": 0 if message else seq,
        "input_dtypes": [dtype],
        "input_sizes": [[inputs]],
        "is_p2p": message,
        "op_id": seq,
        "output_dtypes": [dtype],
        "output_sizes": [[outputs]],
        "p2p_seq_id": seq if message else 0,
        "pg_id": int(number),
        "process_group": [number, about],
        "profiling_name": profiling_name(call, own),
        "record_id": record,
        "retired": done,
        "state": call.state,
        "time_created_ns": _stamp(call.created, origin),
        "time_discovered_completed_ns": _stamp(call.ended, origin),
        "time_discovered_started_ns": _stamp(call.started, origin),
        "timeout_ms": round(hang.timeout * 1e3),
    }


def _stamp(seconds: float | None, origin: float) -> int | None:
    return None if seconds is None else round((origin + seconds) * 1e9)
