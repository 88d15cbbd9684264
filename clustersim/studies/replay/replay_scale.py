"""What a larger run changes of a measured one: who averages with whom, how fast kernels are, how gradients are packed.

Groups: data parallelism grows, and tensor, pipeline, context and expert groups are copied as they are. A group's name
tells (``mesh_dp``, ``DATA_PARALLEL_GROUP``, ``dp_shard``); without a name its place does: neighbouring ranks share a
layer, ranks further apart average its gradients, as Megatron, torchtitan and DeepSpeed number them (tensor dimension
fastest). A group of everybody is data parallel.

Kernels: matrix products and attention by the rate that GPUs reach in the kernel's type, other kernels by memory
bandwidth, neither below the least time of a kernel; the host stays as it is.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.device import Device
from clustersim.core.errors import TraceError
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.core.units import format_bytes

_DATA = {"dp", "data", "ddp", "fsdp", "hsdp", "zero", "replicate"}
_MODEL = {"tp", "tensor", "pp", "pipeline", "cp", "context", "sp", "sequence", "ep", "expert", "mp", "model", "embd"}
_PRODUCT = re.compile(
    r"gemm|cutlass|cublas|nvjet|conv|winograd|wgrad|dgrad|xmma|flash|fmha|attention|cijk_|matmul", re.I
)
_TYPES = (
    ("fp8", r"e4m3|e5m2|fp8|qgmma"),
    ("bf16", r"bf16|bfloat16"),
    ("tf32", r"tf32|s1688gemm|tensorop_s\d"),
    ("fp16", r"h\d*gemm|hgemm|fp16|half|s16816gemm|h884|s884|h16816"),
)
_OPTIMIZER = re.compile(r"adam|lamb|adagrad|fusedsgd|_optimizer|multi_tensor_apply", re.I)
_GATHERS = ("all_gather", "reduce_scatter")
SCALARS = 4096.0
"""All-reduces of fewer bytes are losses and norms, not gradients."""


@dataclass(frozen=True)
class Scale:
    """How the run to play differs from the measured one.

    Parameters
    ----------
    times : copies of every rank, each with its own data.
    was, gpu : the measured device, and the one to play on; both or none.
    bucket : float [bytes] that a gradient bucket is filled to; 0 keeps the measured ones.
    dtype : of products whose names do not say it, such as the actions of a pipeline.
    """

    times: int = 1
    was: Device | None = None
    gpu: Device | None = None
    bucket: float = 0.0
    dtype: str = "bf16"

    def seconds(self, info: OpInfo, took: float, sharded: bool) -> float:
        """What a kernel that took ``took`` [s] takes here; ``sharded``: an optimizer's share shrinks with the ranks."""
        if info.bound in ("host", "launch", "communication") or info.kind != "compute":
            return took
        if sharded and (info.phase == "optimizer" or _OPTIMIZER.search(info.name)):
            took /= self.times
        if self.gpu is None:
            return took
        return max(took * self.ratio(info), min(took, self.gpu.kernel_floor.value))

    def ratio(self, info: OpInfo) -> float:
        """Time of a kernel here over its measured one: of products in their type, or by FLOPs and bytes where those are
        told, whichever bounds it on each device; of others by memory."""
        if self.was is None or self.gpu is None:
            return 1.0
        was, bound_now = (
            _bound(gpu, rate_of(info, self.dtype), info.flops, info.nbytes) for gpu in (self.was, self.gpu)
        )
        return bound_now / was

    def said(self, measured: Timeline, groups: ReplayGroups) -> list[str]:
        """Line by line, what follows from the trace and what from the model."""
        lines = []
        if self.times > 1:
            lines += [f"from the trace: {line}" for line in groups.said]
            lines.append(f"from the model: the times of collectives of {self.times} x the ranks, same work on each")
            if groups.sharded:
                lines.append(f"from the model: parameters are sharded, so optimizer kernels take 1/{self.times}")
        if self.was and self.gpu:
            kernels: defaultdict[str, Floats] = defaultdict(lambda: np.zeros(2))
            for info, seconds in zip(measured.ops, measured.per_op()["seconds"].tolist(), strict=True):
                if info.kind == "compute" and info.bound not in ("host", "launch"):
                    dtype = rate_of(info, self.dtype)
                    shapes_text = " of told shapes" if dtype and info.flops else ""
                    kernel_kind = f"{dtype} products{shapes_text}" if dtype else "memory-bound kernels"
                    kernels[kernel_kind] += seconds, seconds * self.ratio(info)
            total_s = sum(was for was, _ in kernels.values()) or 1.0
            for kernel_kind, (was, now_s) in sorted(kernels.items()):
                share = was / total_s
                ratio = now_s / (was or 1.0)
                lines.append(f"from the model: {kernel_kind}, {share:.0%} of kernel time, take {ratio:.2f} x as long")
            lines.append(f"from the trace: kernels and the host's own time, of {self.was.name}; the host is as it was")
            lines.append("not seen: launches that slower kernels hid, so a faster GPU may gain less")
        return lines


AS_MEASURED = Scale()


def _bound(gpu: Device, dtype: str, flops: float, nbytes: float) -> float:
    """What bounds a kernel on a device [s]; without FLOPs, of one FLOP of a product, or one byte of another kernel."""
    if not dtype:
        return 1 / gpu.stream_rate()
    return max((flops or 1.0) / gpu.matmul_rate(dtype), nbytes / gpu.stream_rate() if flops else 0.0)


def rate_of(info: OpInfo, unnamed: str = "bf16") -> str:
    """The element type of a matrix product or attention kernel by its name, ``"fp32"`` where that says none; empty for
    a kernel that memory bounds. An action of a pipeline counts as products, of the type ``unnamed``.

    >>> [rate_of(OpInfo(n, "compute", "compute")) for n in ("volta_sgemm_128x32_nt", "vectorized_elementwise_kernel")]
    ['fp32', '']
    """
    matrix_phase = info.phase in ("forward", "backward") and info.bound == "compute" and "kernel" not in info.detail
    dtype = str(info.detail.get("dtype", "")) if info.flops else ""
    if info.bound == "memory" or not (matrix_phase or dtype or _PRODUCT.search(info.name)):
        return ""
    named = next((d for d, pattern in _TYPES if re.search(pattern, info.name, re.I)), "")
    return named or dtype or (unnamed if matrix_phase else "fp32")


@dataclass(frozen=True)
class ReplayGroups:
    """Which collectives are data parallel.

    Parameters
    ----------
    grows : per collective (its row in the ops), whether its group grows with the copies. said : how that is known.
    degree : ranks that average gradients with one another. sharded : they hold shards, which shrink as they get more.
    """

    grows: Mapping[int, bool]
    said: tuple[str, ...]
    degree: int
    sharded: bool


def groups_of(measured: Timeline) -> ReplayGroups:
    """Of every collective, what its group's name or its place says."""
    grows: dict[int, bool] = {}
    counts: dict[str, int] = {}
    sizes: list[int] = []
    collectives = {i: op for i, op in enumerate(measured.ops) if op.kind not in ("compute", "send", "recv")}
    name_words = {i: set(re.split(r"[^a-z]+", _name(op).lower())) for i, op in collectives.items()}
    replicated = any("replicate" in w for w in name_words.values())
    for i, op in collectives.items():
        members = op.detail.get("members", ())
        size = len(members) or int(op.detail.get("group_size", 0))
        near = bool(members) and max(members) - min(members) == size - 1
        if size == measured.world_size:
            grows[i], why = True, "everybody"
        elif name_words[i] & (_DATA | _MODEL):  # where replicas of shards are named, shards are copied
            data = bool(name_words[i] & _DATA)
            grows[i], why = data and not (replicated and "shard" in name_words[i]), f"named {_name(op)!r}"
        else:
            grows[i], why = not near, "neighbouring ranks" if near else "ranks apart"
        line = f"groups of {size} ranks ({why}) " + ("average gradients and grow" if grows[i] else "are copied")
        counts[line] = counts.get(line, 0) + 1
        sizes += [size] if grows[i] and size < measured.world_size else []
    sharded = any(grows[i] and op.kind in _GATHERS and op.nbytes > SCALARS for i, op in collectives.items())
    lines = tuple(f"{line}: {n} collectives" for line, n in counts.items())
    return ReplayGroups(grows, lines, max(sizes, default=measured.world_size), sharded)


def _name(op: OpInfo) -> str:
    return str(op.detail.get("purpose") or op.detail.get("communicator", ""))


# ---- buckets ---------------------------------------------------------------------------------------------------------


def rebucketed(measured: Timeline, bucket: float) -> Timeline:
    """The run with gradients all-reduced in buckets of so many bytes: each is ready when its last gradient is.

    Between two measured buckets gradients are taken to come evenly, each at the end of a kernel. What waited for a
    bucket waits for the last new one that holds a part of it. Raises :class:`TraceError` where there are no buckets.
    """
    alike = _gradients(measured)
    if not alike:
        raise TraceError("no all-reduces of gradients to make buckets of; FSDP's units are the model's")
    spans = measured.spans()
    replaced = {i for ops in alike.values() for i in ops}
    ops = list(measured.ops)
    remaining = ~np.isin(measured.row_op, sorted(replaced))
    columns = measured.row_op, measured.row_set, measured.row_ready, measured.row_start, measured.row_end
    rows = [np.stack([c[remaining].astype(np.float64) for c in columns])]
    ranks = np.unique(spans["rank"]).tolist()
    sets = (*measured.rank_sets, *(np.array([rank], dtype=np.int64) for rank in ranks))
    for bucket_ops in alike.values():
        ends = np.cumsum([measured.ops[i].nbytes for i in bucket_ops])
        cuts = np.append(np.arange(bucket, ends[-1], bucket), ends[-1])
        bucket_of = np.minimum(np.searchsorted(ends, cuts * (1 - 1e-12)), len(bucket_ops) - 1)
        first = len(ops)
        info = measured.ops[bucket_ops[0]]
        detail = info.detail | {"rebucketed": True}
        detail.pop("transfer_s", None)
        detail.pop("skew_s", None)
        for k, size in enumerate(np.diff(cuts, prepend=0.0)):
            ops.append(msgspec.structs.replace(info, name=f"all_reduce bucket {k}", nbytes=float(size), detail=detail))
        for k, rank in enumerate(ranks, start=len(measured.rank_sets)):
            rows.append(_rank_rows(spans, rank, bucket_ops, (ends, cuts, bucket_of), (first, k)))
    op, of_set, ready, start, end = np.concatenate(rows, axis=1)
    return Timeline(
        measured.world_size,
        tuple(ops),
        sets,
        op.astype(np.int64),
        of_set.astype(np.int64),
        ready,
        start,
        end,
        source=measured.source,
        rank_node=measured.rank_node,
        stats=measured.stats,
    )


def _gradients(measured: Timeline) -> dict[tuple[object, ...], list[int]]:
    """The all-reduces of gradients of each step, group and type, in the order in which they came."""
    alike: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    grows = groups_of(measured).grows
    began = measured.per_op()["ready"]
    for i in np.argsort(began, kind="stable").tolist():
        info = measured.ops[i]
        if info.kind == "all_reduce" and info.nbytes > SCALARS and grows[i] and np.isfinite(began[i]):
            detail = info.detail
            alike[info.step, detail.get("communicator"), detail.get("members"), detail.get("dtype")].append(i)
    return alike


def _rank_rows(
    spans: Mapping[str, Floats],
    rank: int,
    bucket_ops: list[int],
    sizes: tuple[Floats, Floats, Ints],
    numbering: tuple[int, int],
) -> Floats:
    """(5, buckets) rows of one rank, from the op and the rank set of ``numbering``; none where it missed a bucket.

    ``sizes`` : where the measured buckets and the new ones end [bytes], and which measured one each new one ends in.
    """
    ends, cuts, bucket_of = sizes
    on_rank = spans["rank"] == rank
    row_of = dict(zip(spans["op"][on_rank].tolist(), np.flatnonzero(on_rank).tolist(), strict=True))
    if any(i not in row_of for i in bucket_ops):
        return np.zeros((5, 0))
    ready, done = (np.array([spans[c][row_of[i]] for i in bucket_ops]) for c in ("ready", "end"))
    ready = np.maximum.accumulate(ready)
    pace = (ready[-1] - ready[0]) / max(ends[-1] - ends[0], 1.0)
    come = np.interp(cuts, np.append(0.0, ends), np.append(max(0.0, ready[0] - pace * ends[0]), ready))
    works = np.sort(spans["end"][on_rank & ~np.isin(spans["op"], bucket_ops)])
    snapped = works[np.maximum(np.searchsorted(works, come, side="right") - 1, 0)] if len(works) else come
    inside = ~np.isin(cuts, ends)
    come = np.where(inside, np.minimum(come, np.maximum(snapped, 0.0)), come)
    buckets = numbering[0] + np.arange(len(cuts))
    return np.stack([buckets, np.full(len(cuts), numbering[1]), come, come, np.maximum(done[bucket_of], come)]).astype(
        np.float64
    )


def bucket_note(bucket: float) -> str:
    """What is assumed of other buckets."""
    return (
        f"from the model: buckets of {format_bytes(bucket)}, gradients coming evenly between the measured ones; "
        "from the trace: when they came"
    )
