"""Where parameter servers sit, who their workers are, and which tensor each of them keeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustersim.arrays import Floats, Ints
from clustersim.errors import ProgramError
from clustersim.mesh import Mesh
from clustersim.model import Model
from clustersim.strategies.buckets import ready_order
from clustersim.topology import CPU, Topology


@dataclass(frozen=True)
class Piece:
    """Neighbouring layers that travel in one message: ``layers``, indices in ascending order, and a name for them."""

    name: str
    layers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """Who is who.

    Parameters
    ----------
    workers : (W, g) int, global ranks; a worker of several GPUs talks to servers through its first.
    servers : (S,) int, global ranks; workers' own ranks where workers serve.
    neighbours : (S,) int, how many servers share a server's memory, itself included.
    pieces : what travels in one message, in order of forward. numel : (pieces, S) float, elements of each piece's
        parameters that each server keeps. by_layer : (layers,) float, elements of each layer.
    on_cpu : servers keep them in host memory.
    """

    workers: Ints
    servers: Ints
    neighbours: Ints
    pieces: tuple[Piece, ...]
    numel: Floats
    by_layer: Floats
    on_cpu: bool

    @property
    def leaders(self) -> Ints:
        """(W,) the rank of each worker that talks to servers."""
        return self.workers[:, 0]

    def server_name(self, s: int) -> str:
        """``"server"``, numbered where there are several."""
        return f"server {s}" if len(self.servers) > 1 else "server"


def place(topology: Topology, mesh: Mesh, server: str, count: int) -> Mesh:
    """The mesh with ``count`` servers at its end: on CPUs, node by node and socket by socket, or on the last GPUs of
    the nodes, which then do not work. Servers that are workers need no place of their own.

    Raises :class:`ProgramError` where there is no CPU, or no GPU left to work.
    """
    if server == "worker":
        return mesh
    nodes = list(dict.fromkeys(topology.vertex_node[mesh.gpus].tolist()))
    if server == "cpu":
        kinds, home = topology.vertex_kinds, topology.vertex_node
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
    workers = [gpu for mine in free for gpu in mine]
    return Mesh(np.array(workers + servers), max(map(len, free)), count)


def layout(
    model: Model, mesh: Mesh, server: str, count: int, gpus_per_worker: int, sharding: str, cap: float = 0.0
) -> Layout:
    """Workers, servers and what each keeps, in messages of ``cap`` elements. Raises :class:`ProgramError` where ranks
    do not divide."""
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
    kept = shares(model, count, sharding)
    found = pieces(model, kept.sum(axis=1), cap)
    numel = np.array([kept[list(piece.layers)].sum(axis=0) for piece in found])
    return Layout(workers, servers, sharers[home], found, numel, kept.sum(axis=1), server == "cpu")


def pieces(model: Model, numel: Floats, cap: float) -> tuple[Piece, ...]:
    """Layers gathered in the order backward ends them, until a piece has ``cap`` elements; a layer each for cap 0."""
    gathered: list[list[int]] = []
    held = np.inf
    for i in reversed(range(len(model.layers))):
        if held >= cap:
            gathered.append([])
            held = 0.0
        gathered[-1].insert(0, i)
        held += float(numel[i])
    names = [model.layers[piece[0]].name for piece in gathered]
    ends = [model.layers[piece[-1]].name for piece in gathered]
    named = [a if a == b else f"{a}..{b}" for a, b in zip(names, ends, strict=True)]
    return tuple(Piece(name, tuple(piece)) for name, piece in zip(named, gathered, strict=True))[::-1]


def shares(model: Model, count: int, sharding: str) -> Floats:
    """(layers, servers) elements. ``round_robin`` deals out whole tensors in order of registration, as TensorFlow's
    replica_device_setter does; ``even`` cuts every tensor into equal parts.

    A tied tensor belongs to the first layer that uses it: it is needed there first and its gradient is final there.
    """
    order = {t.name: k for k, t in enumerate(t for layer in model.layers for t in layer.tensors if not t.tied_to)}
    kept = np.zeros((len(model.layers), count))
    for i, tensors in enumerate(ready_order(model)):
        for tensor in tensors:
            if sharding == "even":
                kept[i] += tensor.numel / count
            else:
                kept[i, order[tensor.name] % count] += tensor.numel
    return kept
