"""Data parallelism with a parameter server: workers compute gradients, servers keep the parameters.

One step of a worker: *pull* the parameters (a request, then data; forward of a layer starts when it is there), forward,
backward, and *push* each gradient as soon as it is final. One step of a server: add up what comes, in order of arrival,
run the optimizer, and answer the next pulls. With N workers and gradients of Z bytes, N Z come in and N Z go out at the
server, so its links set the pace as N grows; a ring all-reduce keeps every link at 2 (N-1)/N Z. Several servers, each
with a part of the tensors, divide the load.

*Synchronous*: nobody reads parameters of step t before all gradients of step t-1 are in them. *Asynchronous*: every
gradient is applied when it comes, so nobody waits and everybody reads slightly old parameters; ``staleness`` bounds by
how many steps the fastest worker may run ahead of the slowest.

In the words of frameworks: TensorFlow's ``variable_update=parameter_server`` with ``local_parameter_device=cpu`` is one
synchronous server on a CPU that updates; MXNet's and BytePS's key-value stores let a layer be pulled as soon as it is
done (``by_layer``), and BytePS only adds up (``server_updates = false``).

Read :mod:`~clustersim.strategies.ps_worker`, then :mod:`~clustersim.strategies.ps_server`. Where servers sit is
:mod:`~clustersim.strategies.server_layout`; what a run shows of them, :mod:`~clustersim.strategies.ps_report`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np

from clustersim.holding import Holding, always, piling_up
from clustersim.mesh import Ints, Mesh
from clustersim.model import Model, StepCost
from clustersim.parallel.config import AtLeastOne
from clustersim.program import DTYPE_BYTES, Program, Role
from clustersim.schedules import Action
from clustersim.strategies import base, ps_report, server_layout
from clustersim.strategies.ps_server import AsyncServer, Server
from clustersim.strategies.ps_worker import Worker
from clustersim.strategies.server_layout import Layout
from clustersim.strategies.walk import Part, Place, Walk, accumulation, whole
from clustersim.topology import Topology
from clustersim.units import format_bytes
from clustersim.variation import usual


class ParameterServerConfig(base.StrategyConfig, frozen=True, tag_field="kind", tag="parameter_server"):
    """Knobs of training with parameter servers.

    Parameters
    ----------
    server : ``"cpu"`` (parameters in host memory, reached over PCIe), ``"gpu"`` (a GPU of its own) or ``"worker"``
        (a worker serves as well). servers : how many, each with a part of the parameters.
    sharding : ``"round_robin"`` deals out whole tensors, ``"even"`` cuts every tensor.
    gpus_per_worker : GPUs of one worker, which adds up their gradients before it pushes. gpus_per_server : GPUs of one
        server (only for ``server = "gpu"``), each with its part.
    server_updates : the server runs the optimizer; else it only adds up and the workers do.
    bucket_cap_mb : neighbouring layers travel together, in messages of as many MiB: pushed when the last of their
        gradients is final, used when all have been pulled. A message per layer when absent, as TensorFlow and MXNet
        send each variable by itself; a server behind PyTorch's RPC gets all gradients at once, so more than the model.
    by_layer : a layer can be pulled as soon as it is done, while others are still on their way.
    mode : ``"sync"`` or ``"async"``. staleness : steps a worker may be ahead of the slowest; no bound when absent.
    """

    server: Literal["cpu", "gpu", "worker"] = "cpu"
    servers: AtLeastOne = 1
    sharding: Literal["round_robin", "even"] = "round_robin"
    gpus_per_worker: AtLeastOne = 1
    gpus_per_server: AtLeastOne = 1
    server_updates: bool = True
    bucket_cap_mb: Annotated[float, msgspec.Meta(gt=0)] | None = None
    by_layer: bool = False
    mode: Literal["sync", "async"] = "sync"
    staleness: Annotated[int, msgspec.Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if self.mode == "sync" and self.staleness:
            raise ValueError(f"staleness = {self.staleness} needs mode = 'async'; a synchronous step is never stale")
        if self.mode == "async" and not self.server_updates:
            raise ValueError("mode = 'async' needs server_updates = true: nobody else sees every gradient")
        if self.gpus_per_server > 1 and self.server != "gpu":
            raise ValueError(f"gpus_per_server = {self.gpus_per_server} needs server = 'gpu'")

    @property
    def shards(self) -> int:
        """Server ranks: each keeps a part."""
        return self.servers * self.gpus_per_server

    @property
    def synchronous(self) -> bool:
        """Whether everybody waits for everybody, so that gradients may be added up before they are applied."""
        return self.mode == "sync" or self.staleness == 0


def place(topology: Topology, mesh: Mesh, config: ParameterServerConfig) -> Mesh:
    """The mesh with the servers' ranks at its end."""
    return server_layout.place(topology, mesh, config.server, config.shards)


def build(model: Model, cost: StepCost, mesh: Mesh, config: ParameterServerConfig, steps: int, seed: int) -> Program:
    """The Program of ``steps`` steps of every worker.

    Raises :class:`ProgramError` for a mesh without the servers' ranks, or ranks that do not divide into workers.
    """
    base.check(model, cost, steps)
    element = DTYPE_BYTES[config.param_dtype]
    cap = (config.bucket_cap_mb or 0.0) * 2**20 / element
    who = server_layout.layout(model, mesh, config.server, config.shards, config.gpus_per_worker, config.sharding, cap)
    paces = usual(cost.jitter, steps, mesh.workers, seed)
    roles = []
    for name, ranks, serves in _cast(who, config):
        works = serves < 0 or config.server == "worker"
        ops = base.OpList()
        server = _server(ops, model, cost, who, serves, config) if serves >= 0 else None
        worker = Worker(ops, model, cost, who, ranks, element, config.by_layer, serves) if works else None
        order = accumulation(config.gradient_accumulation_steps) if works else ()
        walk = Walk(ops, order, (len(model.layers),), whole(ops, model, cost), _Rank(config, worker, server))
        for ops.step in range(steps):
            if works:
                base.begin_step(ops, cost, ops.step)
            walk.step()
        pace = paces[:, ranks] if paces is not None and works else None
        roles.append(Role(name, ranks, tuple(ops.ops), pace, serves=bool(serves >= 0)))
    return Program(mesh.world_size, tuple(roles), cost.overlap_slowdown, (*_notes(model, who, config), *cost.notes))


def _cast(who: Layout, config: ParameterServerConfig) -> list[tuple[str, Ints, int]]:
    """Roles as (name, ranks, which server or -1): servers that work have an op list of their own."""
    everybody = np.sort(who.workers.ravel())
    only_work = np.setdiff1d(everybody, who.servers)
    name = "worker and server" if config.server == "worker" else "server"
    served = [(f"{name} {s}", who.servers[s : s + 1], s) for s in range(len(who.servers))]
    if len(served) == 1:
        served = [(name, who.servers, 0)]
    return ([("worker", only_work, -1)] if len(only_work) else []) + served


def _server(
    ops: base.OpList, model: Model, cost: StepCost, who: Layout, s: int, config: ParameterServerConfig
) -> Server:
    own = int(np.flatnonzero(who.leaders == who.servers[s])[0]) if config.server == "worker" else -1
    element = DTYPE_BYTES[config.param_dtype]
    if config.synchronous:
        updates, by_layer = config.server_updates, config.by_layer
        return Server(ops, model, cost, who, s, element, updates=updates, by_layer=by_layer, own=own)
    staleness = config.staleness
    return AsyncServer(ops, model, cost, who, s, element, by_layer=config.by_layer, own=own, staleness=staleness)


@dataclass
class _Rank:
    """The hooks of a rank that works, serves, or does both. Parameters are fetched before forward; a sum of gradients,
    where workers update by themselves, after backward."""

    config: ParameterServerConfig
    worker: Worker | None
    server: Server | None

    def begin_step(self) -> None:
        """Parameters to the workers."""
        updates = self.config.server_updates
        local = self.server.answer() if self.server and updates else {}
        if self.worker:
            self.worker.begin_step(self.worker.fetch(local) if updates else {})

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[Part]:
        """What a worker does around a layer."""
        return self.worker.around(place, action, last=last) if self.worker else iter(())

    def finish(self) -> None:
        """Gradients to the servers."""
        if self.server:
            self.server.collect(self.worker.at_home if self.worker else {})
        if self.config.server_updates:
            return
        local = self.server.answer() if self.server else {}
        if self.worker:
            self.worker.update(self.worker.fetch(local))


def holding(model: Model, mesh: Mesh, config: ParameterServerConfig) -> Holding:
    """What the fullest worker keeps: parameters and gradients whole; optimizer states only where it updates, and a sum
    of gradients where it serves."""
    element, n = DTYPE_BYTES[config.param_dtype], len(model.layers)
    kept = server_layout.shares(model, config.shards, config.sharding)
    served = float(kept.sum(axis=0).max()) if config.server == "worker" else 0.0
    updated = served if config.server_updates else float(model.parameters)
    gradients = piling_up(kept.sum(axis=1) * element)
    parameters = float(model.parameters * element)
    return Holding(parameters, updated, 0.0, element, gradients, always(0.0, n), always(served * element, n))


def _notes(model: Model, who: Layout, config: ParameterServerConfig) -> tuple[str, ...]:
    element = DTYPE_BYTES[config.param_dtype]
    kept = ", ".join(format_bytes(float(n) * element) for n in who.numel.sum(axis=0)[:8])
    more = ", ..." if who.numel.shape[1] > 8 else ""
    count, gpus = who.workers.shape
    where = {"cpu": "host memory", "gpu": "GPUs of their own", "worker": "workers' GPUs"}[config.server]
    pace = "synchronous"
    if not config.synchronous:
        bound = "no bound" if config.staleness is None else f"at most {config.staleness} step(s) stale"
        pace = f"asynchronous, {bound}"
    does = "adds up and updates" if config.server_updates else "adds up; workers update"
    if not config.synchronous:
        does = "applies every gradient when it comes"
    return (
        f"parameter_server: {count} worker(s) of {gpus} GPU(s), {len(who.servers)} server(s) in {where}, {pace}",
        f"parameter_server: a server {does}; each keeps {kept}{more}",
    )


STRATEGY = base.Strategy(
    "parameter_server",
    ParameterServerConfig,
    build,
    place=place,
    report=ps_report.report,
    holding=holding,
    together=lambda config: config.synchronous,
)
