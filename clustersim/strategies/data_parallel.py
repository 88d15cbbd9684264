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

import numpy as np

from clustersim.errors import ProgramError
from clustersim.holding import Holding, always, piling_up
from clustersim.mesh import Ints, Mesh
from clustersim.model import Model, StepCost
from clustersim.program import COMPUTE_STREAM, DTYPE_BYTES, Compute, Program
from clustersim.strategies import base
from clustersim.strategies.buckets import assign
from clustersim.strategies.primitives import collective

CHUNK = 10 * 2**20
"""``buffer_size=10485760`` of replicate's broadcast_coalesced and of Broadcast.backward's reduce_add_coalesced."""

HOST_STREAM = "host"
"""The process's Python: the same launches hold up every device."""


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


def build(model: Model, cost: StepCost, mesh: Mesh, config: DataParallelConfig, steps: int, seed: int) -> Program:
    """The Program of ``steps`` iterations; device i is rank i.

    Raises :class:`ProgramError` for several nodes: it is one process.
    """
    base.check(model, cost, steps)
    if mesh.n_nodes > 1:
        raise ProgramError(
            f"torch.nn.DataParallel is one process on one node, but the mesh has {mesh.n_nodes} nodes; use 'ddp', or "
            "cluster.nodes = 1 (at $.strategy.kind)"
        )
    ops, paces = base.OpList(), base.pace(cost.jitter, steps, mesh.world_size, seed)
    run = _Run(ops, model, cost, mesh.world_group(), config)
    for step in range(steps):
        base.begin_step(ops, cost, step)
        for micro_step in range(config.gradient_accumulation_steps):
            run.forward()
            run.backward()
            if micro_step:
                run.at_zero("accumulate gradients", base.gradient_pass(3.0 * run.parameters, cost), "gradient")
        run.at_zero("optimizer", cost.optimizer, "optimizer")
    return base.program(ops, mesh, cost, (*_notes(run), *cost.notes), paces)


class _Run:
    """The state of the op list: where every device stands."""

    def __init__(self, ops: base.OpList, model: Model, cost: StepCost, group: Ints, config: DataParallelConfig) -> None:
        self.ops, self.model, self.cost, self.group, self.config = ops, model, cost, group, config
        self.n = group.shape[1]
        element = DTYPE_BYTES[config.param_dtype]
        tensors = [t for layer in model.layers for t in layer.tensors if not t.tied_to]
        self.parameters = float(model.parameters * element)
        self.n_tensors = len(tensors)
        self.chunks = [float(chunk.nbytes) for chunk in assign(tensors, element, CHUNK, CHUNK)]
        self.buffers = float(sum(layer.buffers for layer in model.layers) * element)
        self.inputs = self.n * config.micro_batch_size * base.sample_bytes(model)
        self.outputs = self.n * config.micro_batch_size * base.output_elements(model) * element
        self.losses = [i for i, layer in enumerate(model.layers) if layer.kind == "loss"]

    def forward(self) -> None:
        """Scatter, replicate, parallel_apply, gather, and the loss where the module does not compute it itself."""
        if self.n == 1:  # DataParallel calls the module itself
            return base.forward(self.ops, self.model, self.cost)
        start = self._here()
        scattered = self._talk("scatter", "inputs", self.inputs, start)
        replicated = self._replicate((scattered,))
        self._parallel_apply(replicated)
        if self.config.gather_outputs:
            self._talk("gather", "outputs", self.outputs, self._here())
        for i in self.losses:
            self._loss(i, "fwd", float(self.cost.forward[i]), float(self.cost.forward_flops[i]), "forward")
        return None

    def _replicate(self, after: tuple[int, ...]) -> tuple[int, ...]:
        """Python builds a tree of modules per device (as long as touching every tensor once), and device 0 sends."""
        host = self._host("replicate modules", self.n * self.n_tensors * self.cost.per_tensor, after)
        copy = base.gradient_pass(2.0 * self.parameters, self.cost)
        flat = self.at_zero("flatten parameters", copy, "gradient", host)
        sent = 0
        for c, nbytes in enumerate([*self.chunks, *([self.buffers] if self.buffers else [])]):
            what = f"parameters chunk {c}" if c < len(self.chunks) else "buffers"
            sent = self._talk("broadcast", what, nbytes, (*flat, *host))
        return (sent, *host)

    def _parallel_apply(self, after: tuple[int, ...]) -> None:
        """All replicas' kernels, each launched by the one thread that holds the lock."""
        launches = self.cost.forward_launch
        for i, layer in enumerate(self.model.layers):
            if i in self.losses:
                continue
            waits = after if not i else ()
            if launches is not None and launches[i]:
                waits += self._host(f"launch {layer.name} on {self.n} devices", self.n * float(launches[i]), ())
            base.forward_layer(self.ops, self.model, self.cost, i, waits)

    def _loss(self, i: int, verb: str, seconds: float, flops: float, phase: str) -> None:
        """On device 0, for everybody's outputs."""
        self.at_zero(f"{verb} {self.model.layers[i].name}", self.n * seconds, phase, self._here(), self.n * flops)

    def backward(self) -> None:
        """Backward on every device, then all gradients to device 0."""
        if self.n == 1:
            return base.backward(self.ops, self.model, self.cost)
        for i in reversed(self.losses):
            self._loss(i, "bwd", float(self.cost.backward[i]), float(self.cost.backward_flops[i]), "backward")
        after = (
            (self._talk("scatter", "output gradients", self.outputs, self._here()),) if self.losses else self._here()
        )
        for i in reversed(range(len(self.model.layers))):
            if i not in self.losses:
                base.backward_layer(self.ops, self.model, self.cost, i, after=after)
                after = ()
        copy = base.gradient_pass(2.0 * self.parameters, self.cost)
        flat = (self.ops.compute("flatten gradients", copy, "gradient", after=self._here()),)
        for c, nbytes in enumerate(self.chunks):
            self._talk("reduce", f"gradients chunk {c}", nbytes, flat)
        self.at_zero("unflatten gradients", copy, "gradient", self._here())
        return None

    def at_zero(
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

    def _talk(self, kind: str, what: str, nbytes: float, after: tuple[int, ...]) -> int:
        pin = None if self.config.nccl or kind not in {"broadcast", "reduce"} else "direct"
        dtype = self.config.param_dtype
        return collective(self.ops, kind, what, nbytes, self.group, after, dtype=dtype, algorithm=pin)

    def _here(self) -> tuple[int, ...]:
        return (len(self.ops.ops) - 1,) if self.ops.ops else ()


def holding(model: Model, mesh: Mesh, config: DataParallelConfig) -> Holding:
    """What device 0 keeps: everything, and around the loss the outputs of all devices."""
    element, n = DTYPE_BYTES[config.param_dtype], len(model.layers)
    gradients = piling_up(np.array([float(layer.parameters * element) for layer in model.layers]))
    outputs = always(0.0, n)
    if config.gather_outputs and mesh.workers > 1:
        outputs[n - 1 : n + 1] = mesh.workers * config.micro_batch_size * base.output_elements(model) * element
    whole = float(model.parameters)
    return Holding(whole * element, whole, 0.0, element, gradients, always(0.0, n), outputs)


def _notes(run: _Run) -> tuple[str, ...]:
    n, chunks = run.n, len(run.chunks)
    how = "NCCL" if run.config.nccl else "copies"
    return (
        f"data_parallel: 1 process, {n} device(s); {chunks} chunk(s) of about 10 MiB broadcast by {how} every forward",
        "data_parallel: launches of all replicas in forward share one interpreter lock; device 0 alone updates",
    )


STRATEGY = base.Strategy("data_parallel", DataParallelConfig, build, launch="single_process", holding=holding)
