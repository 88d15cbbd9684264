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

Workers and servers are in :mod:`~clustersim.training.strategies.ps_roles`. Where servers sit is
:mod:`~clustersim.training.strategies.server_layout`; what a run shows of them,
:mod:`~clustersim.training.strategies.ps_report`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from clustersim.core.holding import Holding, always, piling_up
from clustersim.core.mesh import Ints, Mesh
from clustersim.core.model import Model, StepCost
from clustersim.core.program import DTYPE_BYTES, Program, Role
from clustersim.core.units import format_bytes
from clustersim.core.variation import usual
from clustersim.training.schedules import Action
from clustersim.training.strategies import base, ps_report
from clustersim.training.strategies.ps_roles import AsyncServer, ServerRole, WorkerRole
from clustersim.training.strategies.server_layout import ParameterServerConfig, ServerLayout, layout, place, shares
from clustersim.training.strategies.walk import LayerPart, Place, RankWalk, accumulation, whole


def build(model: Model, cost: StepCost, mesh: Mesh, config: ParameterServerConfig, steps: int, seed: int) -> Program:
    """The Program of ``steps`` steps of every worker.

    Raises :class:`ProgramError` for a mesh without the servers' ranks, or ranks that do not divide into workers.
    """
    base.check(model, cost, steps)
    who = layout(model, mesh, config)
    paces = usual(cost.jitter, steps, mesh.workers, seed)
    roles = []
    for name, ranks, serves in _cast(who, config):
        works = serves < 0 or config.server == "worker"
        ops = base.OpList()
        kind = ServerRole if config.synchronous else AsyncServer
        server = kind(ops, model, cost, who, serves) if serves >= 0 else None
        worker = WorkerRole(ops, model, cost, who, ranks, serves) if works else None
        order = accumulation(config.gradient_accumulation_steps) if works else ()
        walk = RankWalk(
            ops, order, (len(model.layers),), whole(ops, model, cost), _ParameterServerRank(config, worker, server)
        )
        for ops.step in range(steps):
            if works:
                base.begin_step(ops, cost, ops.step)
            walk.step()
        pace = paces[:, ranks] if paces is not None and works else None
        roles.append(Role(name, ranks, tuple(ops.ops), pace, serves=bool(serves >= 0)))
    notes = (*_notes(model, who, config), *cost.notes)
    return Program(mesh.world_size, tuple(roles), cost.overlap_slowdown, notes, own_paces=config.unbounded)


def _cast(who: ServerLayout, config: ParameterServerConfig) -> list[tuple[str, Ints, int]]:
    """Roles as (name, ranks, which server or -1): servers that work have an op list of their own."""
    everybody = np.sort(who.workers.ravel())
    only_work = np.setdiff1d(everybody, who.servers)
    name = "worker and server" if config.server == "worker" else "server"
    served = [(f"{name} {s}", who.servers[s : s + 1], s) for s in range(len(who.servers))]
    if len(served) == 1:
        served = [(name, who.servers, 0)]
    return ([("worker", only_work, -1)] if len(only_work) else []) + served


class _ParameterServerRank(msgspec.Struct):
    """The hooks of a rank that works, serves, or does both. Parameters are fetched before forward; a sum of gradients,
    where workers update by themselves, after backward."""

    config: ParameterServerConfig
    worker: WorkerRole | None
    server: ServerRole | None

    def begin_step(self) -> None:
        """Parameters to the workers."""
        updates = self.config.server_updates
        local = self.server.answer() if self.server and updates else {}
        if self.worker:
            self.worker.begin_step(self.worker.fetch(local) if updates else {})

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[LayerPart]:
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
    element = DTYPE_BYTES[config.param_dtype]
    base_holding = base.whole(model, config)
    server_shares = shares(model, config.shards, config.sharding)
    served = float(server_shares.sum(axis=0).max()) if config.server == "worker" else 0.0
    return msgspec.structs.replace(
        base_holding,
        updated=served if config.server_updates else base_holding.updated,
        gradients=piling_up(server_shares.sum(axis=1) * element),
        buffers=always(served * element, len(model.layers)),
        fresh="",
    )


def _notes(model: Model, who: ServerLayout, config: ParameterServerConfig) -> tuple[str, ...]:
    element = DTYPE_BYTES[config.param_dtype]
    server_bytes = ", ".join(format_bytes(float(n) * element) for n in who.numel.sum(axis=0)[:8])
    more = ", ..." if who.numel.shape[1] > 8 else ""
    count, gpus = who.workers.shape
    place_text = {"cpu": "host memory", "gpu": "GPUs of their own", "worker": "workers' GPUs"}[config.server]
    pace = "synchronous"
    if not config.synchronous:
        bound = "no bound" if config.staleness is None else f"at most {config.staleness} step(s) stale"
        pace = f"asynchronous, {bound}"
    does = "adds up and updates" if config.server_updates else "adds up; workers update"
    if not config.synchronous:
        does = "applies every gradient when it comes"
    return (
        f"parameter_server: {count} worker(s) of {gpus} GPU(s), {len(who.servers)} server(s) in {place_text}, {pace}",
        f"parameter_server: a server {does}; each keeps {server_bytes}{more}",
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
