"""torch.nn.DataParallel: one process, one thread per GPU, and device 0 at the centre of everything.

One forward: inputs are *scattered* from device 0; the module is *replicated*, which broadcasts every parameter and
buffer again in chunks of 10 MiB (``broadcast_coalesced``); ``parallel_apply`` runs the replicas in threads of one
Python process, whose global interpreter lock lets one launch at a time, so launching takes N times as long; outputs are
*gathered* on device 0, where the loss is. Backward runs on all devices (C++ threads, no lock), and when it is over all
gradients are added up on device 0 in chunks of 10 MiB (``reduce_add_coalesced``). Only device 0 has an optimizer.
Nothing overlaps. DistributedDataParallel exists because of every one of these sentences.

Sources: torch/nn/parallel/{data_parallel,replicate,parallel_apply,scatter_gather,_functions,comm}.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from clustersim.core.errors import ProgramError
from clustersim.core.holding import Holding, always
from clustersim.core.mesh import Mesh
from clustersim.core.model import Model
from clustersim.core.program import COMPUTE_STREAM, DTYPE_BYTES, HOST_STREAM, Compute
from clustersim.training.schedules import Action
from clustersim.training.strategies import base
from clustersim.training.strategies.buckets import assign
from clustersim.training.strategies.primitives import collective
from clustersim.training.strategies.walk import WHOLE, LayerPart, Place, WholeModelHooks, walked

CHUNK = 10 * 2**20
"""``buffer_size=10485760`` of replicate's broadcast_coalesced and of Broadcast.backward's reduce_add_coalesced."""


class DataParallelConfig(base.StrategyConfig, frozen=True, tag_field="kind", tag="data_parallel"):
    """Knobs of torch.nn.DataParallel; ``micro_batch_size`` is each device's part.

    Parameters
    ----------
    nccl : broadcast and reduce by NCCL; else by copies from and to device 0, as builds without NCCL do.
    gather_outputs : the model's outputs (logits) travel to device 0, as they always do unless the module returns only
        its loss.
    """

    nccl: bool = True
    gather_outputs: bool = True


class DataParallel(WholeModelHooks[DataParallelConfig]):
    """The hooks of every device; one of them is rank i of the program."""

    def __post_init__(self) -> None:
        model = self.model
        config = self.config
        mesh = self.mesh
        if mesh.n_nodes > 1:
            raise ProgramError(
                f"torch.nn.DataParallel is one process on one node, but the mesh has {mesh.n_nodes} nodes; use 'ddp', "
                "or cluster.nodes = 1 (at $.strategy.kind)"
            )
        self.group, self.n = mesh.world_group(), mesh.world_size
        element = DTYPE_BYTES[config.param_dtype]
        tensors = [t for layer in model.layers for t in layer.tensors if not t.tied_to]
        self.parameters = float(model.parameters * element)
        self.n_tensors = len(tensors)
        self.chunks = [float(chunk.nbytes) for chunk in assign(tensors, element, CHUNK, CHUNK)]
        self.buffers = float(sum(layer.buffers for layer in model.layers) * element)
        self.inputs = self.n * config.micro_batch_size * base.sample_bytes(model)
        self.outputs = self.n * config.micro_batch_size * base.output_elements(model) * element
        self.losses = [i for i, layer in enumerate(model.layers) if layer.kind == "loss"]

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[LayerPart]:
        """One device: DataParallel calls the module itself. Several: all of a pass's steps, one after another."""
        i = place[1]
        if self.n == 1:
            yield WHOLE
        else:
            yield from self._forward(i) if action.kind == "F" else self._backward(i)
        if action.kind == "B" and action.microbatch and not i:
            self._at_zero("accumulate gradients", base.gradient_pass(3.0 * self.parameters, self.cost), "gradient")

    def _forward(self, i: int) -> Iterator[LayerPart]:
        """Scatter, replicate, parallel_apply, gather, and the loss where the module does not compute it itself."""
        if i == 0:
            self.ops.waits = self._replicate((self._talk("scatter", "inputs", self.inputs, self.ops.here),))
        if i in self.losses:
            self._loss(i, "fwd", float(self.cost.forward[i]), float(self.cost.forward_flops[i]), "forward")
            return
        yield from self._launched(i)
        if i == len(self.model.layers) - len(self.losses) - 1 and self.config.gather_outputs:
            self._talk("gather", "outputs", self.outputs, self.ops.here)

    def _replicate(self, after: tuple[int, ...]) -> tuple[int, ...]:
        """Python builds a tree of modules per device (as long as touching every tensor once), and device 0 sends."""
        host = self._host("replicate modules", self.n * self.n_tensors * self.cost.per_tensor, after)
        copy = base.gradient_pass(2.0 * self.parameters, self.cost)
        flat = self._at_zero("flatten parameters", copy, "gradient", host)
        sent = 0
        for c, nbytes in enumerate([*self.chunks, *([self.buffers] if self.buffers else [])]):
            tensor_name = f"parameters chunk {c}" if c < len(self.chunks) else "buffers"
            sent = self._talk("broadcast", tensor_name, nbytes, (*flat, *host))
        return (sent, *host)

    def _launched(self, i: int) -> Iterator[LayerPart]:
        """All replicas' kernels, each launched by the one thread that holds the lock."""
        launches = self.cost.forward_launch
        name = self.model.layers[i].name
        if launches is not None and launches[i]:
            host = self._host(f"launch {name} on {self.n} devices", self.n * float(launches[i]), ())
            self.ops.waits = (*self.ops.waits, *host)
        yield WHOLE

    def _loss(self, i: int, verb: str, seconds: float, flops: float, phase: str) -> None:
        """On device 0, for everybody's outputs."""
        self._at_zero(f"{verb} {self.model.layers[i].name}", self.n * seconds, phase, self.ops.here, self.n * flops)

    def _backward(self, i: int) -> Iterator[LayerPart]:
        """Backward on every device, then all gradients to device 0."""
        if i in self.losses:
            self._loss(i, "bwd", float(self.cost.backward[i]), float(self.cost.backward_flops[i]), "backward")
            return
        if i == len(self.model.layers) - len(self.losses) - 1:
            latest = self.ops.here
            self.ops.waits = (
                (self._talk("scatter", "output gradients", self.outputs, latest),) if self.losses else latest
            )
        yield WHOLE
        if i == 0:
            copy = base.gradient_pass(2.0 * self.parameters, self.cost)
            flat = (self.ops.compute("flatten gradients", copy, "gradient", after=self.ops.here),)
            for c, nbytes in enumerate(self.chunks):
                self._talk("reduce", f"gradients chunk {c}", nbytes, flat)
            self._at_zero("unflatten gradients", copy, "gradient", self.ops.here)

    def finish(self) -> None:
        """Only device 0 has an optimizer."""
        self._at_zero("optimizer", self.cost.optimizer, "optimizer")

    def _at_zero(
        self, name: str, seconds: float, phase: str, after: tuple[int, ...] = (), flops: float = 0.0
    ) -> tuple[int, ...]:
        """Work of device 0 alone, on the same stream as its kernels."""
        first = np.zeros(self.n)
        first[0] = 1.0
        spent = first * seconds
        # FLOPs are a number per rank: device 0's share is spread, so that the total is right.
        op = Compute(name, spent, COMPUTE_STREAM, after, phase, "memory", flops / self.n, 0.0, self.ops.step)
        return (self.ops.add(op),)

    def _host(self, name: str, seconds: float, after: tuple[int, ...]) -> tuple[int, ...]:
        if not seconds:
            return ()
        return (
            self.ops.add(Compute(name, seconds, HOST_STREAM, after, "other", "host", step=self.ops.step, paced=False)),
        )

    def _talk(self, kind: str, tensor_name: str, nbytes: float, after: tuple[int, ...]) -> int:
        pin = None if self.config.nccl or kind not in {"broadcast", "reduce"} else "direct"
        dtype = self.config.param_dtype
        return collective(self.ops, kind, tensor_name, nbytes, self.group, after, dtype=dtype, algorithm=pin)

    def notes(self) -> tuple[str, ...]:
        """Chunks, and who waits for whom."""
        how = "NCCL" if self.config.nccl else "copies"
        count = len(self.chunks)
        return (
            f"data_parallel: 1 process, {self.n} device(s); {count} chunk(s) of about 10 MiB broadcast by {how} every "
            "forward",
            "data_parallel: launches of all replicas in forward share one interpreter lock; device 0 alone updates",
        )


def holding(model: Model, mesh: Mesh, config: DataParallelConfig) -> Holding:
    """What device 0 keeps: everything, and around the loss the outputs of all devices."""
    n = len(model.layers)
    outputs = always(0.0, len(model.layers))
    if config.gather_outputs and mesh.workers > 1:
        element = DTYPE_BYTES[config.param_dtype]
        outputs[n - 1 : n + 1] = mesh.workers * config.micro_batch_size * base.output_elements(model) * element
    return msgspec.structs.replace(base.whole(model, config), buffers=outputs)


build = walked(DataParallel)
STRATEGY = base.Strategy("data_parallel", DataParallelConfig, build, launch="single_process", holding=holding)
