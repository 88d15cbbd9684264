"""One exchange of gradients and nothing else: how devices on one switch can agree on a sum, and what each way costs.

N devices hold Z bytes of gradients each; at the end everybody has the sum. With a *parameter server* all push to one
device and pull from it: N Z through its link in, then N Z out, at B bytes/s 2 N Z / B. A *ring* of N pieces sends
2 (N-1)/N Z over every link, all of them at once (Patarasuk and Yuan 2009): 2 (N-1)/N Z / B, nearly the same for any N.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from clustersim import engine
from clustersim.cluster import files as fabrics
from clustersim.collectives import fitted as fitting
from clustersim.collectives.registry import ALGORITHMS
from clustersim.core.errors import ProgramError, nearest
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective, Program, Role, one_collective
from clustersim.core.texts import Plain
from clustersim.core.timeline import Timeline
from clustersim.core.topology import Topology
from clustersim.training.strategies import base
from clustersim.training.strategies.primitives import Link, answer, pull, push, request, requested, take

SERVER = "parameter_server"
"""What an exchange through one device is called, beside the algorithms' own names."""

MACHINE = "pcie-a100-1gpu-200g"
"""One device and one NIC a node, all NICs on one switch."""


def exchange(n: int, nbytes: float, how: str, topology: str = MACHINE, fidelity: str = "flow") -> Timeline:
    """Play one exchange of ``nbytes`` among ``n`` devices, at line rates.

    how : ``"parameter_server"`` (a further device serves), or an algorithm that can all_reduce, such as ``"ring"``.
    topology : a shipped machine or a file; a node of it for each device. fidelity : as of a scenario.

    Raises :class:`ProgramError` for fewer than two devices, and for an unknown way.
    """
    ways = [SERVER, *(name for name, row in ALGORITHMS.items() if "all_reduce" in row.kinds)]
    if n < 2:
        raise ProgramError(f"an exchange among {n} device(s); it takes at least two")
    if how not in ways:
        raise ProgramError(f"no exchange {how!r}; {nearest(how, ways)}")
    served = how == SERVER
    machine = fitting.load(topology, nodes=n + served)
    mesh = fabrics.mesh(machine, nproc_per_node=1)
    program = _served(n, nbytes) if served else _together("all_reduce", nbytes, mesh, how)
    ranks = Mesh(mesh.gpus, 1, servers=1) if served else mesh
    return engine.simulate(program, machine, ranks, backend="ideal", fidelity=fidelity)


def collective(topology: Topology, kind: str, nbytes: float) -> Timeline:
    """Play one collective of every GPU of a machine with NCCL, and nothing else: what its links carry.

    ``kind`` : one of :data:`clustersim.core.program.COLLECTIVES`. ``nbytes`` : [bytes], the full tensor.
    """
    mesh = fabrics.mesh(topology)
    return engine.simulate(_together(kind, nbytes, mesh), topology, mesh)


def _together(kind: str, nbytes: float, mesh: Mesh, algorithm: str | None = None) -> Program:
    """Everybody does one collective; ``algorithm`` pins the choice."""
    collective_op = Collective(f"{kind} gradients", kind, nbytes, mesh.world_group(), algorithm=algorithm)
    return one_collective(collective_op)


def _served(n: int, nbytes: float) -> Program:
    """Everybody pushes to the last rank, which answers when it has everything."""
    ranks = np.arange(n)
    server = base.OpList()
    worker = base.OpList()
    to_server = Link(np.full(n, n), "server")
    sent = push(worker, "gradients -> server", nbytes, to_server)
    pull(worker, "sum <- server", nbytes, to_server, request(worker, "sum <- server", to_server, (sent,)))
    links = [Link(np.array([k]), f"worker {k}") for k in range(n)]
    taken = tuple(take(server, f"gradients worker {k} -> server", nbytes, link) for k, link in enumerate(links))
    for k, link in enumerate(links):
        request_op = requested(server, f"sum <- worker {k}", link)
        answer(server, f"sum -> worker {k}", nbytes, link, (*taken, request_op))
    return Program(n + 1, (Role("worker", ranks, tuple(worker.ops)), Role("server", np.array([n]), tuple(server.ops))))


def exchanges(
    counts: Iterable[int], nbytes: float, hows: Iterable[str] = (SERVER, "ring"), topology: str = MACHINE
) -> list[Plain]:
    """A row for each way and number of devices.

    Returns
    -------
    list of dict: ``how``; ``n`` devices; ``seconds``; ``busiest_bytes``, through the link that carries most, in one
    direction; ``total_bytes``, that devices have sent, all together (what goes through a switch counts once).
    """
    rows = []
    for how in hows:
        for n in counts:
            timeline = exchange(n, nbytes, how, topology)
            machine = fitting.load(topology, nodes=n + (how == SERVER))
            busiest, total = _traffic(timeline, machine)
            rows.append(
                {"how": how, "n": n, "seconds": timeline.makespan, "busiest_bytes": busiest, "total_bytes": total}
            )
    return rows


def _traffic(timeline: Timeline, topology: Topology) -> tuple[float, float]:
    """Bytes of the busiest link, and bytes that left devices."""
    if timeline.links is None:
        return 0.0, 0.0
    moved = timeline.links.bytes_per_link()
    leaving = np.isin(topology.link_src, topology.gpus)
    return float(moved.max(initial=0.0)), float(moved[leaving].sum())
