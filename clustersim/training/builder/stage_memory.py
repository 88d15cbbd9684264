"""Memory of each stage, read off its actions: what is allocated and freed in which order, and where the peak is.

A forward leaves its layers' activations, times the micro-batches in flight; the input gradient frees most of them, and
the weight gradient what it still needs (so a delayed W costs memory). Sources: MODEL_PARALLEL.md section 5
(Korthikanti et al., arXiv:2205.05198; Megatron-LM training/theoretical_memory_usage.py; zero-bubble README).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import msgspec
import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.device import Device
from clustersim.core.memory_use import MemoryCourse, MemoryUse
from clustersim.training.partition.base import Chunk, LocalLayer, Partition, Stage
from clustersim.training.schedules.base import Order, Orders


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a rank's model states, per element of its dense and of its expert parameters.

    Parameters
    ----------
    parameters, gradients : as the module holds them. masters, states : of the optimizer, shared out as they are: a
        pair (dense, expert) of bytes per element on this rank. gathered : borrowed while all units are unsharded.
    buckets : bytes of gradients on their way to a reduction, until the optimizer.
    reduced : gradients that the optimizer finds; None where they are those of the passes.
    workspace : its flat temporaries. host : of a dense element, in the host's memory; experts are not offloaded.
    """

    parameters: tuple[float, float]
    gradients: tuple[float, float]
    masters: tuple[float, float]
    states: tuple[float, float]
    gathered: tuple[float, float] = (0.0, 0.0)
    buckets: float = 0.0
    reduced: tuple[float, float] | None = None
    workspace: tuple[float, float] = (0.0, 0.0)
    host: float = 0.0


class MicroBatchStash(msgspec.Struct, frozen=True):
    """What is kept of each micro-batch.

    Parameters
    ----------
    samples : in it. element : bytes of an activation.
    deferral : micro-batches whose weight gradients of the head wait for the end of the step, with its input and the
        gradient of its output.
    keeps_sent : what a stage has sent is kept until its backward; Megatron's ``deallocate_pipeline_outputs`` frees it.
    layer_by_layer : a forward beside a backward runs a layer of each at a time (Megatron-LM core/models/common/
        model_chunk_schedule_plan.py), so that the one takes what the other gives back; else both are held whole.
    """

    samples: int
    element: int
    deferral: int = 0
    keeps_sent: bool = False
    layer_by_layer: bool = False


def stages(
    partition: Partition,
    orders: Orders,
    states: Sequence[StateBytes],
    batch: MicroBatchStash,
    versions: Sequence[int],
    gpu: Device | None = None,
) -> tuple[MemoryUse, ...]:
    """What one rank of each stage holds over a step.

    ``states`` : of each stage. ``versions`` : of the weights that each rank keeps, more than one in an asynchronous
    schedule. ``gpu`` : whose memory it is, which parts that are computed depend on.
    """
    return tuple(
        _stage(stage, order, bytes_, batch, copies, gpu)
        for stage, order, bytes_, copies in zip(partition.stages, orders, states, versions, strict=True)
    )


def _stage(
    stage: Stage, order: Order, states: StateBytes, batch: MicroBatchStash, versions: int, gpu: Device | None
) -> MemoryUse:
    count = stage.trained, stage.expert_trained
    packed = max((t.numel for layer in stage.layers for t in layer.quantised), default=0)
    names, activations, logits = zip(*_moments(stage, order, batch), strict=True)
    n = len(names)
    updating = np.arange(n) == n - 1

    def always(per_chunk: tuple[float, float]) -> Floats:
        """(n,) float: the same bytes at every moment, from those of a parameter."""
        return np.full(n, per_chunk[0] * count[0] + per_chunk[1] * count[1])

    workspace = always(states.workspace)
    columns = {
        "parameters": always(states.parameters) + stage.frozen_bytes,
        "gathered": always(states.gathered),
        "weight_copies": (versions - 1) * always(states.parameters) + np.where(updating, 0.0, 2.0 * packed),
        "master_weights": always(states.masters),
        "gradients": np.where(updating, always(states.reduced or states.gradients), always(states.gradients)),
        "optimizer_states": always(states.states),
        "buckets": np.where(updating, 0.0, states.buckets),
        "activations": np.array(activations),
        "logits": np.array(logits),
        "optimizer_workspace": np.where(updating, workspace, 0.0),
    }
    course = MemoryCourse.of(names, columns, gpu)
    return MemoryUse(course, flat=float(workspace[-1]), host_bytes=states.host * stage.trained)


def _moments(stage: Stage, order: Order, batch: MicroBatchStash) -> Iterator[tuple[str, float, float]]:
    """After each action of a rank: its name, bytes of activations and of logits held, at the most while it ran."""
    held_bytes = heads = 0.0
    head_layers = {c: stage.chunks[c].layers[i] for c, i in stage.heads}
    for slot in order:
        if batch.layer_by_layer and len(slot) > 1:
            pair = {action.kind: stage.of(action.microbatch, action.chunk) for action in slot}
            grows, logits = _fullest_pair(pair["F"].layers, pair["B"].layers, batch)
            yield f"B {slot[1].microbatch}.{slot[1].chunk}", held_bytes + grows, heads + logits
            ahead, back = (MicroBatchBytes.of(pair[kind], batch) for kind in "FB")
            held_bytes += ahead.kept + ahead.for_weights - back.kept - back.for_weights
            heads += ahead.fp32 - back.fp32
            continue
        for action in slot:
            micro_batch = MicroBatchBytes.of(stage.of(action.microbatch, action.chunk), batch)
            name = f"{action.kind} {action.microbatch}.{action.chunk}"
            if action.kind == "F":
                held_bytes = held_bytes + micro_batch.kept + micro_batch.for_weights
                heads = heads + micro_batch.fp32
                yield name, held_bytes, heads
                continue
            backward = action.kind in "BI"
            yield name, held_bytes + micro_batch.repeated * backward, heads - micro_batch.returned * backward
            if action.kind in "BI":
                held_bytes = held_bytes - micro_batch.kept
                heads = heads - micro_batch.fp32
            if action.kind == "I":
                held_bytes += micro_batch.stashed
            if action.kind in "BW":
                held_bytes -= micro_batch.for_weights + (micro_batch.stashed if action.kind == "W" else 0.0)
            if action.kind == "B" and action.chunk in head_layers and action.microbatch < batch.deferral:
                held_bytes += (
                    batch.samples
                    * batch.element
                    * (head_layers[action.chunk].kept_for_weights + head_layers[action.chunk].stashed)
                )
    yield "optimizer", max(held_bytes, 0.0), max(heads, 0.0)


class MicroBatchBytes(msgspec.Struct, frozen=True):
    """Bytes of one micro-batch on one chunk: what its forward leaves until I, until W, and of its loss; what backward
    has beside that at its fullest moment, and how much of the loss's it has ``returned`` by then; and the
    output gradients that I leaves for a later W."""

    kept: float
    for_weights: float
    fp32: float
    repeated: float
    stashed: float
    returned: float = 0.0

    @classmethod
    def of(cls, chunk: Chunk, batch: MicroBatchStash) -> MicroBatchBytes:
        """Of a micro-batch."""
        layers = chunk.layers
        size = batch.samples * batch.element
        repeated, returned = _fullest(layers, batch)
        return cls(
            size * (sum(layer.kept for layer in layers) + chunk.message * batch.keeps_sent),
            size * sum(layer.kept_for_weights for layer in layers),
            sum(_of_loss(layer, batch) for layer in layers),
            repeated,
            size * sum(layer.stashed for layer in layers),
            returned,
        )


def _of_loss(layer: LocalLayer, batch: MicroBatchStash) -> float:
    """Bytes that the loss of a micro-batch keeps: in fp32, and in the activations' type."""
    return batch.samples * (4.0 * layer.fp32_kept + batch.element * layer.fused_loss_kept)


def _fullest(layers: Sequence[LocalLayer], batch: MicroBatchStash) -> tuple[float, float]:
    """At the fullest moment of a chunk's backward, which goes from its last layer to its first: bytes beside what is
    kept of the micro-batch, and bytes in fp32 that are no longer."""
    size = batch.samples * batch.element
    given_back = returned = 0.0
    moments = [(0.0, 0.0)]
    for layer in reversed(layers):
        moments.append((size * (layer.repeated + layer.working) - given_back, returned))
        given_back += size * layer.kept
        returned += _of_loss(layer, batch)
    return max(moments, key=lambda moment: moment[0] - moment[1])


def _fullest_pair(
    ahead: Sequence[LocalLayer], back: Sequence[LocalLayer], batch: MicroBatchStash
) -> tuple[float, float]:
    """At the fullest moment of a chunk's forward beside another's backward, a layer of each at a time: bytes beside
    what was kept before, and bytes of the loss."""
    size = batch.samples * batch.element
    taken = taken_logits = 0.0
    moments = [(0.0, 0.0)]
    for forward, backward in zip_longest(ahead, reversed(back)):
        if forward is not None:
            taken += size * (forward.kept + forward.kept_for_weights)
            taken_logits += _of_loss(forward, batch)
        if backward is not None:
            moments.append((taken + size * (backward.repeated + backward.working), taken_logits))
            taken -= size * (backward.kept + backward.kept_for_weights)
            taken_logits -= _of_loss(backward, batch)
        moments.append((taken, taken_logits))
    return max(moments, key=sum)
