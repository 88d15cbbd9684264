"""Parameter servers as they are asked for: where they sit, who their workers are, and which tensor each keeps."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.model import Model
from clustersim.core.program import DTYPE_BYTES
from clustersim.core.topology import CPU, Topology
from clustersim.training.parallel.config import AtLeastOne
from clustersim.training.strategies import base
from clustersim.training.strategies.buckets import ready_order


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

    @property
    def unbounded(self) -> bool:
        """Whether the fastest worker may run ahead of the slowest for ever."""
        return self.mode == "async" and self.staleness is None


class MessagePiece(msgspec.Struct, frozen=True):
    """Neighbouring layers that travel in one message: ``layers``, indices in ascending order, and a name for them."""

    name: str
    layers: tuple[int, ...]


class ServerLayout(msgspec.Struct, frozen=True, eq=False):
    """Who is who.

    Parameters
    ----------
    workers : (W, g) int, global ranks; a worker of several GPUs talks to servers through its first.
    servers : (S,) int, global ranks; workers' own ranks where workers serve.
    neighbours : (S,) int, how many servers share a server's memory, itself included.
    pieces : what travels in one message, in order of forward. numel : (pieces, S) float, elements of each piece's
        parameters that each server keeps. by_layer : (layers,) float, elements of each layer.
    config : the knobs.
    """

    workers: Ints
    servers: Ints
    neighbours: Ints
    pieces: tuple[MessagePiece, ...]
    numel: Floats
    by_layer: Floats
    config: ParameterServerConfig

    @property
    def element(self) -> int:
        """Bytes of an element on the wire."""
        return DTYPE_BYTES[self.config.param_dtype]

    @property
    def leaders(self) -> Ints:
        """(W,) the rank of each worker that talks to servers."""
        return self.workers[:, 0]

    def server_name(self, s: int) -> str:
        """``"server"``, numbered where there are several."""
        return f"server {s}" if len(self.servers) > 1 else "server"


def place(topology: Topology, mesh: Mesh, config: ParameterServerConfig) -> Mesh:
    """The mesh with the servers at its end: on CPUs, node by node and socket by socket, or on the last GPUs of the
    nodes, which then do not work. Servers that are workers need no place of their own.

    Raises :class:`ProgramError` where there is no CPU, or no GPU left to work.
    """
    server = config.server
    count = config.shards
    if server == "worker":
        return mesh
    nodes = list(dict.fromkeys(topology.vertex_node[mesh.gpus].tolist()))
    if server == "cpu":
        kinds = topology.vertex_kinds
        home = topology.vertex_node
        sockets = [[v for v, kind in enumerate(kinds) if kind == CPU and home[v] == node] for node in nodes]
        if not all(sockets):
            raise ProgramError(
                f"{topology.name} has a node without a CPU to serve; use server = 'gpu' (at $.strategy.server)"
            )
        chosen = [sockets[k % len(nodes)][k // len(nodes) % len(sockets[k % len(nodes)])] for k in range(count)]
        return Mesh(np.concatenate([mesh.gpus, np.array(chosen)]), mesh.nproc_per_node, count)
    if count >= mesh.world_size:
        raise ProgramError(f"{count} server GPU(s) of {mesh.world_size} leave nobody to work (at $.strategy.servers)")
    free = [mesh.gpus[topology.vertex_node[mesh.gpus] == node].tolist() for node in nodes]
    servers = [free[k % len(nodes)].pop() for k in range(count)]
    workers = [gpu for node_gpus in free for gpu in node_gpus]
    return Mesh(np.array(workers + servers), max(map(len, free)), count)


def layout(model: Model, mesh: Mesh, config: ParameterServerConfig) -> ServerLayout:
    """Workers, servers and what each keeps. Raises :class:`ProgramError` where ranks do not divide."""
    server = config.server
    count = config.shards
    gpus_per_worker = config.gpus_per_worker
    if mesh.workers % gpus_per_worker:
        raise ProgramError(
            f"{mesh.workers} GPUs do not divide into workers of {gpus_per_worker} (at $.strategy.gpus_per_worker)"
        )
    workers = np.arange(mesh.workers, dtype=np.int64).reshape(-1, gpus_per_worker)
    if server == "worker":
        if count > len(workers):
            raise ProgramError(f"{count} servers among {len(workers)} workers (at $.strategy.servers)")
        servers = workers[np.arange(count) * len(workers) // count, 0]
    else:
        if mesh.servers != count:
            raise ProgramError(f"the mesh has {mesh.servers} server rank(s), the strategy {count}; place them first")
        servers = np.arange(mesh.workers, mesh.world_size, dtype=np.int64)
    _, home, sharers = np.unique(mesh.gpus[servers], return_inverse=True, return_counts=True)
    server_shares = shares(model, count, config.sharding)
    cap = (config.bucket_cap_mb or 0.0) * 2**20 / DTYPE_BYTES[config.param_dtype]
    message_pieces = pieces(model, server_shares.sum(axis=1), cap)
    numel = np.array([server_shares[list(piece.layers)].sum(axis=0) for piece in message_pieces])
    return ServerLayout(workers, servers, sharers[home], message_pieces, numel, server_shares.sum(axis=1), config)


def pieces(model: Model, numel: Floats, cap: float) -> tuple[MessagePiece, ...]:
    """Layers gathered in the order backward ends them, until a piece has ``cap`` elements; a layer each for cap 0."""
    gathered: list[list[int]] = []
    piece_bytes = np.inf
    for i in reversed(range(len(model.layers))):
        if piece_bytes >= cap:
            gathered.append([])
            piece_bytes = 0.0
        gathered[-1].insert(0, i)
        piece_bytes += float(numel[i])
    names = [model.layers[piece[0]].name for piece in gathered]
    ends = [model.layers[piece[-1]].name for piece in gathered]
    named = [a if a == b else f"{a}..{b}" for a, b in zip(names, ends, strict=True)]
    return tuple(MessagePiece(name, tuple(piece)) for name, piece in zip(named, gathered, strict=True))[::-1]


def shares(model: Model, count: int, sharding: str) -> Floats:
    """(layers, servers) elements. ``round_robin`` deals out whole tensors in order of registration, as TensorFlow's
    replica_device_setter does; ``even`` cuts every tensor into equal parts.

    A tied tensor belongs to the first layer that uses it: it is needed there first and its gradient is final there.
    """
    order = {t.name: k for k, t in enumerate(t for layer in model.layers for t in layer.tensors if not t.tied_to)}
    numel_of = np.zeros((len(model.layers), count))
    for i, tensors in enumerate(ready_order(model)):
        for tensor in tensors:
            if sharding == "even":
                numel_of[i] += tensor.numel / count
            else:
                numel_of[i, order[tensor.name] % count] += tensor.numel
    return numel_of
