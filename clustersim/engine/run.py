"""Program x Topology -> Timeline."""

from __future__ import annotations

from collections.abc import Callable

from clustersim.engine.clock import Clock
from clustersim.engine.executor import Executor
from clustersim.engine.meetings import Site
from clustersim.engine.meetings import sites as meet
from clustersim.engine.network import Loads
from clustersim.engine.planning import PlanBook, Planner
from clustersim.engine.players import Flows, Player
from clustersim.engine.replay import Replay
from clustersim.engine.rows import Rows, timeline
from clustersim.errors import ProgramError, nearest
from clustersim.mesh import Mesh
from clustersim.program import Program
from clustersim.timeline import Timeline
from clustersim.topology import Topology

FIDELITIES: dict[str, Callable[[Clock, Loads, PlanBook, tuple[Site, ...]], Player]] = {
    "flow": lambda clock, loads, book, sites: Flows(clock, loads, sites),
    "chunk": Replay,
}
"""How a transfer is played: as one fluid flow, or every step of its algorithm by itself."""


def simulate(
    program: Program,
    topology: Topology,
    mesh: Mesh,
    *,
    backend: str = "nccl",
    fidelity: str = "flow",
    planner: Planner | None = None,
    nccl_version: tuple[int, int] = (2, 28),
    launch: str = "process_per_gpu",
    progress: Callable[[int, int], None] | None = None,
) -> Timeline:
    """Play a Program on a Topology.

    Parameters
    ----------
    program : what should happen. topology : the machine. mesh : which GPU each rank drives.
    backend : who plans the collectives: ``"nccl"``, ``"gloo"`` or ``"ideal"``.
    fidelity : ``"flow"``, a collective is one fluid flow; ``"chunk"``, every transfer of its algorithm is one.
    planner : plans collectives instead of ``backend``: ``planner(request, group) -> Plan``; asked once for every
        distinct request and group.
    nccl_version, launch : as in :class:`clustersim.collectives.base.Group`.
    progress : called with (ops finished, ops in all).

    Returns
    -------
    Timeline; ``stats`` counts ``events``, ``solves``, ``flows`` and ``transfers``, and keeps ``overlap_slowdown``.

    Raises
    ------
    ProgramError : a Program that does not fit the mesh, members that disagree on a collective, ranks that wait for each
        other forever, or too many transfers for chunk fidelity.
    """
    if fidelity not in FIDELITIES:
        raise ProgramError(f"no fidelity {fidelity!r}; {nearest(fidelity, FIDELITIES)}")
    if mesh.world_size != program.world_size:
        raise ProgramError(f"a program for {program.world_size} ranks does not fit a mesh of {mesh.world_size}")
    program.check()
    clock, loads = Clock(), Loads(topology)
    ask = planner or _backend_planner(backend)
    options = {"launch": launch, "nccl_version": nccl_version, "congruent": planner is None}
    book = PlanBook(ask, topology, mesh, loads, **options)  # type: ignore[arg-type]
    sites = meet(program, book)
    player, rows = FIDELITIES[fidelity](clock, loads, book, sites), Rows(program)
    executor = Executor(program, sites, clock, player, rows, progress)
    player.on_end = executor.met
    executor.run()
    network, transfers = player.network, player.transfers()
    counts = {"events": clock.n_events, "solves": network.n_solves, "flows": network.n_flows}
    stats = {name: float(count) for name, count in (*counts.items(), ("transfers", len(transfers[0])))}
    if program.overlap_slowdown:
        stats["overlap_slowdown"] = program.overlap_slowdown
    return timeline(program, topology, mesh, rows, sites, network, transfers, stats)


def _backend_planner(backend: str) -> Planner:
    from clustersim import collectives  # its tables are not needed where a planner is given

    return lambda request, group: collectives.plan(request, group, backend=backend)
