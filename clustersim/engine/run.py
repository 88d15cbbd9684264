"""Program x Topology -> Timeline: guess who shares links, play, check, and play again where the guess was wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from clustersim.engine import chunk, need
from clustersim.engine.bills import Bills
from clustersim.engine.clock import Clock
from clustersim.engine.guess import Guess, firsts
from clustersim.engine.loads import Loads, Slots, Varying
from clustersim.engine.meetings import sites as meet
from clustersim.engine.network import Network
from clustersim.engine.order import Task, look_ahead, tasks
from clustersim.engine.planning import Floats, Ints, PlanBook, Planner
from clustersim.engine.play import Play
from clustersim.engine.players import Flows, Player, Replay
from clustersim.engine.rows import Rows, timeline
from clustersim.engine.sites import Site, Standing
from clustersim.errors import ProgramError, nearest
from clustersim.mesh import Mesh
from clustersim.program import Collective, Op, Program, Send
from clustersim.timeline import Timeline
from clustersim.topology import Topology

FIDELITIES: dict[str, Callable[[Clock, Loads, PlanBook, tuple[Site, ...], Slots | None], Player]] = {
    "flow": lambda clock, loads, book, sites, slots: Flows(clock, loads, sites, slots),
    "chunk": lambda clock, loads, book, sites, slots: Replay(clock, loads, book, sites),
}
"""How a transfer on the clock is played: as one fluid flow, or every step of its algorithm by itself."""

PATIENCE = 4
"""Plays after which everything that could share is put on the clock."""


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
    whole: Mapping[tuple[str, bytes], Ints] | None = None,
    progress: Callable[[int, int], None] | None = None,
    varying: tuple[Varying, ...] = (),
) -> Timeline:
    """Play a Program on a Topology.

    Parameters
    ----------
    program : what should happen. topology : the machine. mesh : which GPU each rank drives.
    backend : who plans the collectives: ``"nccl"``, ``"gloo"``, ``"mpi"``, ``"mpi_cuda"`` or ``"ideal"``.
    fidelity : ``"flow"``, a collective is one fluid flow; ``"chunk"``, every transfer of its algorithm is one.
    planner : plans collectives instead of ``backend``: ``planner(request, group) -> Plan``; asked once for every
        distinct request and group.
    nccl_version, launch : as in :class:`clustersim.collectives.base.Group`.
    whole : communicator and ranks, as bytes -> GPUs of the group they stand for, where a Program is of some ranks that
        stand for all (:mod:`clustersim.builder.representative`).
    progress : called with (ops finished, ops in all). varying : links whose rate changes during the run, at flow
        fidelity; the topology has them at their best, which is what collectives are planned for.

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
    if varying and fidelity != "flow":
        raise ProgramError("links that change during the run need the fidelity 'flow'")
    program.check()
    need.check(need.flow(program, topology), "at flow fidelity", "use fewer steps, fewer ranks, or no jitter")
    loads = Loads(topology, varying)
    ask = planner or _backend_planner(backend)
    options = {"launch": launch, "nccl_version": nccl_version, "congruent": planner is None, "whole": whole}
    book = PlanBook(ask, topology, mesh, loads, **options)  # type: ignore[arg-type]
    sites = meet(program, book)
    lists = tasks(program, sites)
    # Only collectives run on SMs; a program of sends owes nothing, and needs no ledger.
    billed = program.overlap_slowdown > 0 and any(isinstance(op, Collective) for r in program.roles for op in r.ops)
    bills = Bills(program.overlap_slowdown, lists) if billed else None
    n_meetings = sum(len(site.ranks) for site in sites)
    guess = Guess(program, sites, loads) if fidelity == "flow" else None
    finished = _Finished(sum(map(len, lists)), progress)
    clocked, plays = guess.clocked if guess else firsts(sites), 0
    if varying:
        clocked |= {site.first for site in sites if loads.crossing(site.plans.load)}
    while True:
        clock = Clock()
        times = np.empty(n_meetings), np.empty(n_meetings)
        standing = {site.first: _standing(site, site.first in clocked, bool(guess), times) for site in sites}
        player = FIDELITIES[fidelity](clock, loads, book, sites, guess.slots if guess else None)
        if plays:
            _reset(lists)
        if bills:
            bills.reset(standing, player.not_before)
        if clocked:
            look_ahead(lists, clocked)
        finished.n = 0
        play = Play(lists, standing, clock, player.play, bills, finished)
        player.on_end = play.met
        play.run()
        plays += 1
        if any(task.left for mine in lists for task in mine):
            stuck = deadlock(program, standing, lists)
            _let_go(lists)
            raise stuck
        begin = times[0] + _all(sites, "latency") if guess else times[0]
        wrong = guess.wrong(begin, times[1]) if guess else set()
        if not wrong:
            _note(sites, clocked, begin, times[1], player.network)
            played = _timeline(program, topology, mesh, lists, loads, player, clock, sites)
            return chunk.complete(played, player.columns) if isinstance(player, Replay) else played
        clocked |= wrong if plays < PATIENCE else guess.open if guess else set()


def _standing(site: Site, clocked: bool, flows: bool, times: tuple[Floats, Floats]) -> Standing:
    mine = slice(site.first, site.first + len(site.ranks))
    # A plan's time is not that of its schedule.
    alone = site.plans.columns if flows else (0.0, 0.0)
    return Standing(site, clocked or not flows, alone, (times[0][mine], times[1][mine]))


def _all(sites: tuple[Site, ...], name: str) -> Floats:
    """A column of the plans of all meetings."""
    return np.concatenate([np.zeros(0), *(getattr(site.plans, name) for site in sites)])


def _reset(lists: list[list[Task]]) -> None:
    for mine in lists:
        for task in mine:
            task.reset()


def _let_go(lists: list[list[Task]]) -> None:
    """Tasks hold each other, and the collector does not look at them: it would take a tenth of the time."""
    for mine in lists:
        for task in mine:
            task.before, task.next, task.soft = [], [], ()


class _Finished:
    """Counts the ops that all ranks have ended, and tells: over all plays, no op twice."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self.n, self.total, self.told, self.progress = 0, total, 0, progress

    def __call__(self, task: Task) -> None:
        self.n += 1
        if self.progress and self.n > self.told:
            self.told = self.n
            self.progress(self.n, self.total)


def _timeline(
    program: Program,
    topology: Topology,
    mesh: Mesh,
    lists: list[list[Task]],
    loads: Loads,
    player: Player,
    clock: Clock,
    sites: tuple[Site, ...],
) -> Timeline:
    """The finished run, with its counts."""
    rows, network = Rows(program), player.network
    for mine in lists:
        for task in mine:
            rows.add(task)
    _let_go(lists)
    transfers = player.transfers()
    counts = {"events": clock.n_events, "solves": network.n_solves, "flows": network.n_flows}
    stats = {name: float(count) for name, count in (*counts.items(), ("transfers", len(transfers[0])))}
    if program.overlap_slowdown:
        stats["overlap_slowdown"] = program.overlap_slowdown
    return timeline(program, topology, mesh, rows, sites, loads, network.segments.columns(), transfers, stats)


def _note(sites: tuple[Site, ...], clocked: set[int], begin: Floats, end: Floats, network: Network) -> None:
    """What free transfers moved: each at the rate it has alone."""
    moves = (_all(sites, "nbytes") > 0) & (end > begin)
    for site in sites if clocked else ():
        if site.first in clocked:
            moves[site.first : site.first + len(site.ranks)] = False
    columns = begin, end, _all(sites, "alone")
    network.moved(np.flatnonzero(moves), *(columns if moves.all() else [column[moves] for column in columns]))


def _backend_planner(backend: str) -> Planner:
    from clustersim import collectives  # its tables are not needed where a planner is given

    return lambda request, group: collectives.plan(request, group, backend=backend)


SHOWN = 4
"""Meetings, and ranks of one list, that a message names before it says how many more there are."""


def deadlock(program: Program, standing: dict[int, Standing], tasks: list[list[Task]]) -> ProgramError:
    """The error for a run in which nothing more can happen: which ranks wait, at which op, for whom.

    Meetings with somebody there and somebody missing are listed by their first rank, at most :data:`SHOWN` of them.
    """
    lines: list[tuple[int, str]] = []
    for one in standing.values():
        missing = one.split() if one.started else np.zeros(0, dtype=np.int64)
        for meeting in np.flatnonzero((missing > 0) & (missing < one.site.ranks.shape[1])).tolist():
            lines.append(_line(program, one.site, meeting, tasks))
    lines.sort()
    shown = "; ".join(text for _, text in lines[:SHOWN])
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return ProgramError(
        f"the program never ends, ranks wait for each other forever: {shown}{more}. "
        "All members must issue the ops they share in the same order on each stream"
    )


def _line(program: Program, site: Site, meeting: int, tasks: list[list[Task]]) -> tuple[int, str]:
    here: list[int] = []
    at: list[str] = []
    sides = site.sides_of(np.array([meeting]))
    for side in sides:
        (r, i), role = side.key, program.roles[side.key[0]]
        task = tasks[r][i]
        came = role.ranks[(side.meeting_of == meeting) & (np.asarray(task.unmet) == 0)].tolist()
        here += came
        at += [f"op {i} {task.op.name!r}{_words(task.op)}"] if came else []
    missing = sorted(set(site.ranks[meeting].tolist()) - set(here))
    known = np.concatenate([program.roles[side.key[0]].ranks[side.meeting_of == meeting] for side in sides])
    never = sorted(set(missing) - set(known.tolist()))
    tail = f" ({_ranks(np.array(never))} never {'does' if len(never) == 1 else 'do'})" if never else ""
    verb = "waits" if len(here) == 1 else "wait"
    text = f"{_ranks(np.array(sorted(here)))} {verb} at {' and '.join(at)} for {_ranks(np.array(missing))}{tail}"
    return min(here), text


def _words(op: Op) -> str:
    if isinstance(op, Collective):
        return f" ({op.kind} on communicator {op.communicator!r}, stream {op.stream!r})"
    return f" ({'send' if isinstance(op, Send) else 'recv'}, stream {op.stream!r})"


def _ranks(ranks: npt.NDArray[np.int64]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return "ranks " + ", ".join(map(str, ranks[:SHOWN].tolist())) + more
