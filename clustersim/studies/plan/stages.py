"""Stages of a split model as numbers: what each holds, and the least its passes take.

What is held is read off the stages as partition has them, so that it is their own figure. The order of a schedule is
played once for the most that is in flight: memory is that, times the micro-batch. Times are lower bounds: a layer's
kernels and exchanges on their streams, the exchanges at line rate and with nobody else on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.program import DTYPE_BYTES
from clustersim.model.seconds.local import LocalCost
from clustersim.studies.plan.traffic import TrafficBounds
from clustersim.training.builder.stage_memory import MicroBatchBytes, MicroBatchStash
from clustersim.training.builder.stage_ops import EXPERTS, PARTS
from clustersim.training.partition.base import Chunk, Exchange, Item, LocalLayer, Partition, Stage, Work
from clustersim.training.schedules.base import Order, Orders


def activations(parts: Partition, orders: Orders, element: int, *, keeps_sent: bool = False) -> Floats:
    """(ranks,) bytes of activations and logits at the fullest moment, for micro-batches of one sample.

    ``element`` : bytes of an activation. ``keeps_sent`` : what a stage has sent is kept until its backward. As
    :func:`clustersim.training.builder.stage_memory.stages` walks it, without a head whose weight gradients are
    deferred.
    """
    flights = _flights(orders)
    batch = MicroBatchStash(1, element, keeps_sent=keeps_sent)
    return np.array([(rows @ _bytes(stage, batch)).max() for rows, stage in zip(flights, parts.stages, strict=True)])


def _bytes(stage: Stage, batch: MicroBatchStash) -> Floats:
    """(4 x chunks,) of a micro-batch: kept until the input gradient, until the weight gradient, stashed in between, and
    what backward has beside that at its fullest moment."""
    chunk_bytes = [MicroBatchBytes.of(chunk, batch) for chunk in stage.chunks]
    rows = [
        (part.kept + part.fp32, part.for_weights, part.stashed, part.repeated - part.returned) for part in chunk_bytes
    ]
    return np.array(rows, dtype=np.float64).T.reshape(-1)


@lru_cache(maxsize=512)
def _flights(orders: Orders) -> tuple[Floats, ...]:
    """Of each rank (moments, 4 x chunks): how much is held of each of :func:`_bytes`; equal moments once."""
    return tuple(_flight(order) for order in orders)


def _flight(order: Order) -> Floats:
    actions = [action for slot in order for action in slot]
    kinds = np.array([action.kind for action in actions])
    chunk = np.array([action.chunk for action in actions])
    of_chunk = chunk[:, None] == np.arange(chunk.max() + 1)
    forward, input_, weight = (np.isin(kinds, list(letters))[:, None] * of_chunk for letters in ("F", "BI", "BW"))
    split_in = (kinds == "I")[:, None] * of_chunk
    split_out = (kinds == "W")[:, None] * of_chunk
    change = np.concatenate([forward * 1.0 - input_, forward * 1.0 - weight, split_in * 1.0 - split_out], axis=1)
    # A forward counts from its own moment on, everything else from the one behind it.
    in_flight = np.cumsum(change, axis=0) - np.where((kinds == "F")[:, None], 0.0, change)
    return np.unique(np.concatenate([in_flight, input_ * 1.0], axis=1), axis=0)


class LeastSeconds(NamedTuple):
    """Seconds at least: of kernels alone, and with the exchanges that they wait for."""

    compute: float
    whole: float


def least_of(layer: LocalLayer, kind: str, local: LocalCost, traffic: TrafficBounds, element: int) -> LeastSeconds:
    """Of one layer's pass of one micro-batch. ``kind`` : of an action. ``element`` : bytes of an activation."""
    items = layer.forward if kind == "F" else layer.backward
    played = [(i, item) for i, item in enumerate(items) if item.part in PARTS[kind]]
    load = max(layer.expert_load, default=1.0)

    def work(items: Sequence[Work]) -> float:
        """Seconds of consecutive kernels."""
        runs = tuple((item.kernels, item.part) for item in items)
        seconds = local.work(runs, dense=local.in_recipe(layer.kind)).seconds if runs else 0.0
        return seconds * (load if runs and items[0].name == EXPERTS else 1.0)

    def exchange(item: Exchange) -> float:
        """Seconds of one exchange."""
        size = DTYPE_BYTES[item.dtype] if item.dtype else element
        batch = local.micro_batch_size if item.per_sample else 1
        return traffic.seconds(item.kind, item.elements * size * batch, item.dims, item.matrix)

    runs = tuple((item.kernels, item.part) for _, item in played if isinstance(item, Work))
    floor = local.work(runs, dense=local.in_recipe(layer.kind)).seconds if runs else 0.0
    return LeastSeconds(floor, max(floor, _played(played, work, exchange)))


def _played(
    items: Iterable[tuple[int, Item]], work: Callable[[Sequence[Work]], float], exchange: Callable[[Exchange], float]
) -> float:
    """When kernels in a row and exchanges in a row on each communicator are over, nothing being sent before the kernel
    listed ahead of it is done (:mod:`clustersim.training.builder.laying`).

    Kernels with no exchange between them are one op: it takes no longer than the builder's ops, which are cut more
    often."""
    now = 0.0
    free = dict[str, float]()
    done = dict[int, float]()
    needed = set[int]()
    waiting: list[Work] = []
    for i, item in items:
        ready = max((done[n] for n in item.needs if n in done), default=0.0)
        needed.update(item.needs)
        if isinstance(item, Work):
            if waiting and (ready > now or (waiting[0].name == EXPERTS) != (item.name == EXPERTS)):
                now = now + work(waiting)
                waiting = []
            now = max(now, ready)
            waiting.append(item)
            continue
        seconds = exchange(item)
        if seconds:
            now = now + work(waiting)
            waiting = []
            stream = item.communicator or "-".join(item.dims)
            free[stream] = done[i] = max(now, ready, free.get(stream, 0.0)) + seconds
    return max([now + work(waiting), *(end for i, end in done.items() if i not in needed)])


@dataclass(frozen=True, eq=False)
class MicroBatchTimes:
    """What one micro-batch takes at least: F and all of backward of each global stage and of each rank.

    Parameters
    ----------
    forward, backward : (global stages,) s, exchanges included. compute, whole : (ranks,) s, of kernels alone and with
        exchanges, all chunks together. first : (ranks,) global stage of each rank's first chunk.
    """

    forward: Floats
    backward: Floats
    compute: Floats
    whole: Floats
    first: Ints


def times_of(
    parts: Partition, kinds: Sequence[str], paired: bool, layer_seconds: Callable[[LocalLayer, str], LeastSeconds]
) -> MicroBatchTimes:
    """From what layers take. ``kinds`` : of the schedule's actions. ``paired`` : two passes run beside each other, so
    that exchanges of one may hide behind the other."""
    known_layers: dict[tuple[object, ...], LeastSeconds] = {}

    def layer(local_layer: LocalLayer, kind: str) -> LeastSeconds:
        """A layer's least seconds, asked once."""
        key = id(local_layer.forward), id(local_layer.backward), local_layer.expert_load, local_layer.kind, kind
        if key not in known_layers:
            known_layers[key] = layer_seconds(local_layer, kind)
        return known_layers[key]

    def total(chunk: Chunk, kinds: Iterable[str]) -> tuple[float, float]:
        """A chunk's seconds: computing, and with exchanges that nothing hides."""
        layer_times = [layer(least, kind) for least in chunk.layers for kind in kinds]
        compute = sum(least.compute for least in layer_times)
        return compute, compute if paired else sum(least.whole for least in layer_times)

    behind = [kind for kind in kinds if kind != "F"]
    of_stage: Mapping[int, tuple[tuple[float, float], tuple[float, float]]] = {
        chunk.stage: (total(chunk, "F"), total(chunk, behind)) for stage in parts.stages for chunk in stage.chunks
    }
    pick = [of_stage[i] for i in range(len(of_stage))]
    ranks = [[of_stage[chunk.stage] for chunk in stage.chunks] for stage in parts.stages]
    return MicroBatchTimes(
        np.array([forward[1] for forward, _ in pick]),
        np.array([backward[1] for _, backward in pick]),
        np.array([sum(f[0] + b[0] for f, b in rank) for rank in ranks]),
        np.array([sum(f[1] + b[1] for f, b in rank) for rank in ranks]),
        np.array([min(chunk.stage for chunk in stage.chunks) for stage in parts.stages]),
    )
