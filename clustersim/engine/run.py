"""Program x Topology -> Timeline."""

from __future__ import annotations

from collections.abc import Callable

from clustersim.engine import chunk, need
from clustersim.engine.clock import Clock
from clustersim.engine.crowd import Crowd
from clustersim.engine.executor import Executor
from clustersim.engine.lanes import Lanes
from clustersim.engine.meetings import Ints, Site
from clustersim.engine.meetings import sites as meet
from clustersim.engine.network import Loads, Network
from clustersim.engine.planning import PlanBook, Planner
from clustersim.engine.players import Flows, Player, meetings
from clustersim.engine.replay import Replay
from clustersim.engine.rows import Rows, timeline
from clustersim.engine.unison import Unison, in_unison
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
        other forever, or a run that needs more memory than is free (:mod:`clustersim.engine.need`).
    """
    if fidelity not in FIDELITIES:
        raise ProgramError(f"no fidelity {fidelity!r}; {nearest(fidelity, FIDELITIES)}")
    if mesh.world_size != program.world_size:
        raise ProgramError(f"a program for {program.world_size} ranks does not fit a mesh of {mesh.world_size}")
    program.check()
    need.check(need.flow(program, topology), "at flow fidelity", "use fewer steps, fewer ranks, or no jitter")
    clock, loads = Clock(), Loads(topology)
    ask = planner or _backend_planner(backend)
    options = {"launch": launch, "nccl_version": nccl_version, "congruent": planner is None}
    book = PlanBook(ask, topology, mesh, loads, **options)  # type: ignore[arg-type]
    sites, rows = meet(program, book), Rows(program)
    if fidelity == "flow" and in_unison(program, sites):
        unison = Unison(program, sites, loads, rows, progress)
        unison.run()
        return _timeline(program, topology, mesh, rows, sites, unison.network, unison.n_events)
    player = FIDELITIES[fidelity](clock, loads, book, sites)
    executor = Executor(program, sites, clock, player, rows, progress)
    player.on_end = executor.met
    executor.run()
    played = _timeline(program, topology, mesh, rows, sites, player.network, clock.n_events, player.transfers())
    return chunk.complete(played, player.columns) if isinstance(player, Replay) else played


def _timeline(
    program: Program,
    topology: Topology,
    mesh: Mesh,
    rows: Rows,
    sites: tuple[Site, ...],
    network: Network | Lanes | Crowd,
    n_events: int,
    transfers: tuple[Ints, Ints] | None = None,
) -> Timeline:
    """The finished run, with its counts; ``transfers`` None: each meeting is one."""
    transfers = meetings(sites) if transfers is None else transfers
    counts = {"events": n_events, "solves": network.n_solves, "flows": network.n_flows}
    stats = {name: float(count) for name, count in (*counts.items(), ("transfers", len(transfers[0])))}
    if program.overlap_slowdown:
        stats["overlap_slowdown"] = program.overlap_slowdown
    return timeline(program, topology, mesh, rows, sites, network, transfers, stats)


def _backend_planner(backend: str) -> Planner:
    from clustersim import collectives  # its tables are not needed where a planner is given

    return lambda request, group: collectives.plan(request, group, backend=backend)
