"""What every trace writer needs: which ranks, on which tracks, when in nanoseconds, and what to say of each slice."""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from clustersim.core.arrays import Ints
from clustersim.core.errors import TraceError
from clustersim.core.op_infos import each_kind, kinds
from clustersim.core.outputs import fresh
from clustersim.core.program import COMPUTE_STREAM, DTYPE_BYTES
from clustersim.core.texts import Plain
from clustersim.core.timeline import LinkUse, OpInfo, Timeline, step_ends
from clustersim.explain.representatives import representatives

Place = tuple[int, int]
"""A span: its rank and its op."""

MAX_SLICES = 400_000
"""Slices a viewer opens at ease (some 100 MB of JSON); a file of all ranks is cut to the ranks that fit."""

FEW = 64
"""Ranks that are all worth a trace."""

COUNTERS = 8
"""Links that get a counter track."""

_COLLECTIVE_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
}
"""As c10d records them; other kinds have the same name there."""

DTYPE_NAMES = {"fp32": "Float", "fp16": "Half", "bf16": "BFloat16", "fp64": "Double", "int32": "Int", "int64": "Long"}
DTYPE_NAMES |= {"uint8": "Byte", "fp8": "Float8_e4m3fn", "tf32": "Float"}


def replace_file(path: Path, data: bytes) -> None:
    """Write to a temporary name beside the file, then rename: a reader sees the old file or the whole new one. Gzipped
    where the name ends in ``.gz``, without a time: the same run gives the same bytes.

    Raises :class:`TraceError` where the file cannot be written.
    """
    write_pieces(path, (data,))


def write_pieces(path: Path, pieces: Iterable[bytes]) -> None:
    """The same of a file that comes piece by piece, so that it is never in memory as a whole."""
    try:
        with fresh(path) as temporary, temporary.open("wb") as file:
            # As gzip.compress writes it where no time is told.
            squeeze = zlib.compressobj(level=6, wbits=31) if path.suffix == ".gz" else None
            for piece in pieces:
                file.write(squeeze.compress(piece) if squeeze else piece)
            if squeeze:
                file.write(squeeze.flush())
    except OSError as error:
        raise TraceError(f"{path}: cannot write the trace: {error.strerror}") from None


def ranks_to_write(timeline: Timeline, ranks: Sequence[int] | None) -> tuple[int, ...]:
    """The ranks asked for, checked; for None all of them, or the leading nodes that stay under :data:`MAX_SLICES`."""
    world = timeline.world_size
    if ranks is not None:
        chosen = tuple(sorted(set(ranks)))
        if not chosen or not 0 <= chosen[0] <= chosen[-1] < world:
            raise TraceError(f"cannot write ranks {list(ranks)}: the timeline has ranks 0..{world - 1}")
        return chosen
    fit = max(1, MAX_SLICES // slices_of_rank(timeline))
    if fit >= world:
        return tuple(range(world))
    node = nodes(timeline)
    return tuple(range(int(np.argmax(node == node[fit])) or fit))


def worth_a_trace(timeline: Timeline) -> tuple[int, ...]:
    """Ranks to look at one by one, as many as a viewer opens at ease: all of a few; else the nodes that the
    representatives (:mod:`clustersim.explain.representatives`) are on; else those alone."""
    most = max(1, MAX_SLICES // slices_of_rank(timeline))
    if timeline.world_size <= min(FEW, most):
        return tuple(range(timeline.world_size))
    chosen = np.array(list(representatives(timeline)), dtype=np.int64)
    if timeline.rank_node is None:
        return tuple(chosen.tolist())
    on_nodes = np.flatnonzero(np.isin(timeline.rank_node, timeline.rank_node[chosen]))
    return tuple((on_nodes if len(on_nodes) <= most else chosen).tolist())


def slices_of_rank(timeline: Timeline) -> int:
    """How many slices a rank may have, in the mean: each of its spans may have a wait."""
    return 2 * max(1, int(timeline.per_op()["ranks"].sum()) // timeline.world_size)


def nodes(timeline: Timeline) -> Ints:
    """(world_size,) node of each rank; one node for a timeline that does not know."""
    return np.zeros(timeline.world_size, dtype=np.int64) if timeline.rank_node is None else timeline.rank_node


def streams(timeline: Timeline) -> list[str]:
    """Names of the streams, in order of first use; compute comes first where it exists, as on a real GPU."""
    names = dict.fromkeys(op.stream for op in kinds(timeline.ops))
    return sorted(names, key=lambda name: name != COMPUTE_STREAM)


def threads(timeline: Timeline, ranks: Sequence[int]) -> dict[tuple[int, str], tuple[int, int, str]]:
    """(rank, stream) -> (pid, tid, thread name). No pid or tid is 0, which Perfetto keeps for the idle task."""
    names = streams(timeline)
    node = nodes(timeline)
    _, first = np.unique(node, return_index=True)
    start = dict(zip(np.unique(node).tolist(), first.tolist(), strict=True))
    thread_ids = {}
    for rank in ranks:
        n = int(node[rank])
        for s, stream in enumerate(names):
            thread_ids[rank, stream] = (
                n + 1,
                rank * len(names) + s + 1,
                f"gpu{rank - start[n]} {stream} (rank {rank})",
            )
    return thread_ids


def nanoseconds(timeline: Timeline, ranks: Sequence[int]) -> Iterator[tuple[int, int, int, int, int]]:
    """rank, op, ready, start, end of each span in whole nanoseconds; see :func:`rounded`."""
    return zip(*(column.tolist() for column in rounded(timeline, ranks)), strict=True)


def rounded(timeline: Timeline, ranks: Sequence[int]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """(spans,) each: rank, op, ready, start, end in whole nanoseconds.

    Rounding is monotonic, so spans that touch still touch and none overlap.
    """
    spans = timeline.spans(ranks)
    ready, start, end = (np.rint(spans[name] * 1e9).astype(np.int64) for name in ("ready", "start", "end"))
    return spans["rank"], spans["op"], ready, start, end


def said_of(timeline: Timeline) -> list[Plain]:
    """What the viewer shows of each op: Kineto's words for collectives, and the simulator's own facts."""
    number = stream_numbers(timeline)
    return [args_of(op, number[op.stream], timeline.world_size) for op in timeline.ops]


def stream_numbers(timeline: Timeline) -> dict[str, int]:
    """The place of each of the :func:`streams`."""
    return {name: i for i, name in enumerate(streams(timeline))}


def args_of(op: OpInfo, stream: int, world_size: int) -> Plain:
    """What the viewer shows of one op on the stream of this number."""
    return (
        ({} if op.bound == "host" else {"stream": stream})  # to Kineto's readers a GPU's kernel has one
        | {"step": op.step, "phase": op.phase, "bound": op.bound}
        | (_kernel_args(op) if op.kind == "compute" else _collective_args(op, world_size))
    )


def _kernel_args(op: OpInfo) -> Plain:
    return {name: value for name, value in (("GFLOP", op.flops / 1e9), ("bytes", op.nbytes)) if value}


def _collective_args(op: OpInfo, world: int) -> Plain:
    detail = op.detail.copy()
    dtype = str(detail.pop("dtype", "fp32"))
    size = int(detail.pop("group_size", world))
    elements = int(op.nbytes / DTYPE_BYTES.get(dtype, 4))
    piece = elements // max(size, 1)
    args = {
        "Collective name": _COLLECTIVE_NAMES.get(op.kind, op.kind),
        "In msg nelems": piece if op.kind == "all_gather" else elements,
        "Out msg nelems": piece if op.kind == "reduce_scatter" else elements,
        "Group size": size,
        "dtype": DTYPE_NAMES.get(dtype, dtype),
        "Process Group Name": str(detail.pop("communicator", "world")),
        "bytes": op.nbytes,
    }
    return args | {str(name): value for name, value in detail.items() if isinstance(value, str | int | float)}


STEPS = "steps"
"""Of the track that shows where each step begins and ends."""


def step_track(timeline: Timeline, ranks: Sequence[int]) -> tuple[int, int]:
    """(pid, tid) of the track of steps: the last of the first rank's node."""
    return int(nodes(timeline)[ranks[0]]) + 1, timeline.world_size * len(streams(timeline)) + 1


def step_slices(timeline: Timeline, ranks: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """(name, begin, end [ns]) of each step of the first rank, named as PyTorch's profiler names them: from the end of
    the one before."""
    before = 0
    for step, ended in enumerate(np.rint(step_ends(timeline)[:, ranks[0]] * 1e9).astype(np.int64).tolist()):
        if ended > before:
            yield f"ProfilerStep#{step}", before, ended
            before = ended


def flows(timeline: Timeline, ranks: Sequence[int]) -> tuple[dict[Place, list[int]], dict[Place, list[int]]]:
    """Arrows among the ranks written, by number: those that leave a span, and those that reach it.

    From each send to its receive, which find each other by their ranks and by what their ops say they meet; and to each
    member of a collective from the one it had to wait for, the last to arrive.
    """
    leaving = defaultdict[Place, list[int]](list)
    reaching = defaultdict[Place, list[int]](list)
    for number, (source, target) in enumerate(chain(_sent(timeline, ranks), _met(timeline, ranks)), start=1):
        leaving[source].append(number)
        reaching[target].append(number)
    return leaving, reaching


def _met(timeline: Timeline, ranks: Sequence[int]) -> Iterator[tuple[Place, Place]]:
    """From the last to arrive at each meeting of a collective to every other member."""
    spans = timeline.spans(list(ranks))
    places = zip(spans["rank"].tolist(), spans["op"].tolist(), strict=True)
    arrived = dict(zip(places, spans["ready"].tolist(), strict=True))
    groups_of = _Chosen(lambda groups: _written_groups(groups, ranks))
    for i, op in each_kind(timeline.ops):
        groups = op.detail.get("groups")
        if op.kind in {"compute", "send", "recv"} or groups is None:  # without groups nobody knows who met whom
            continue
        for members in groups_of(groups):
            arrived_ranks = [rank for rank in members if (rank, i) in arrived]
            last = max(arrived_ranks, key=lambda rank: arrived[rank, i], default=-1)
            yield from (((last, i), (rank, i)) for rank in arrived_ranks if rank != last)


def _sent(timeline: Timeline, ranks: Sequence[int]) -> Iterator[tuple[Place, Place]]:
    pairs_of = _Chosen(lambda groups: _written_pairs(groups, ranks))
    recvs = [(i, op.detail.get("groups")) for i, op in each_kind(timeline.ops) if op.kind == "recv"]
    received = {(i, *pair) for i, groups in recvs for pair in pairs_of(groups)}
    for i, op in each_kind(timeline.ops):
        for source, target in pairs_of(op.detail.get("groups")) if op.kind == "send" else ():
            met = next((j for j in op.detail.get("meets", ()) if (j, source, target) in received), -1)
            if met >= 0:
                yield (source, i), (target, met)


class _Chosen:
    """What is chosen of the groups of ops, which share them: each array is looked at once."""

    def __init__(self, choose: Callable[[Any], list[Any]]) -> None:
        self._choose = choose
        self._known: dict[int, tuple[Any, list[Any]]] = {}

    def __call__(self, groups: Any) -> list[Any]:
        """What is chosen of these groups; nothing of None."""
        if groups is None:
            return []
        if id(groups) not in self._known:
            self._known[id(groups)] = groups, self._choose(groups)  # kept, so that no other takes its place
        return self._known[id(groups)][1]


def _written_groups(groups: Any, ranks: Sequence[int]) -> list[list[int]]:
    """Of each group with at least two members that are written: those, in order."""
    table = np.atleast_2d(np.asarray(groups))
    inside = np.isin(table, ranks)
    wanted = inside.sum(axis=1) > 1
    return [members[mask].tolist() for members, mask in zip(table[wanted], inside[wanted], strict=True)]


def _written_pairs(groups: Any, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """(sender, receiver) of each transfer between two ranks that are written."""
    pairs = np.asarray(groups).reshape(-1, 2)
    source, target = pairs[np.isin(pairs, ranks).all(axis=1)].T.tolist()
    return list(zip(source, target, strict=True))


def memory_levels(
    timeline: Timeline, rank: int, memory: Mapping[str, float] | None
) -> Iterator[tuple[str, int, float]]:
    """(track, time [ns], GiB) of one rank's memory: ``memory`` is bytes held while an op of that name runs."""
    if not memory:
        return
    before = -1.0
    for _, i, _, start, _ in nanoseconds(timeline, [rank]):
        held_bytes = memory.get(timeline.ops[i].name)
        if held_bytes is not None and held_bytes != before:
            before = held_bytes
            yield f"memory of rank {rank}", start, round(held_bytes / 2**30, 4)


def busiest_links(use: LinkUse, n: int = COUNTERS) -> list[int]:
    """Links worth a counter: of each sort of link (names alike but for numbers) the busiest, then the next ones."""
    utilisation = use.bytes_per_link() / use.link_bandwidth
    order = [i for i in np.argsort(-utilisation, kind="stable").tolist() if utilisation[i] > 0]
    sort_of = {i: re.sub(r"\d+", "#", use.link_names[i]) for i in order}
    seen: dict[str, int] = {}
    turn = {}
    for i in order:
        turn[i] = seen[sort_of[i]] = seen.get(sort_of[i], -1) + 1
    return sorted(order, key=lambda i: turn[i])[:n]


def link_rates(use: LinkUse | None) -> Iterator[tuple[str, int, float]]:
    """(link name, time [ns], GB/s) of each change on the busiest links."""
    if use is None or not len(use.segment_start):
        return
    for link in busiest_links(use):
        times, rates = use.series(link)
        levels = np.round(np.append(rates, 0.0) / 1e9, 4)
        changed = np.append(True, levels[1:] != levels[:-1])
        for ns, level in zip(np.rint(times * 1e9)[changed].tolist(), levels[changed].tolist(), strict=True):
            yield use.link_names[link], int(ns), level
