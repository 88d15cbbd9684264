"""Program x Topology -> Timeline: guess who shares links, play, check, and play again where the guess was wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TypedDict, Unpack, cast

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ProgramError, nearest
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective, Program
from clustersim.core.timeline import OWN_PACES, Timeline
from clustersim.core.topology import Topology
from clustersim.engine import chunk, need
from clustersim.engine.bills import Bills
from clustersim.engine.chains import link
from clustersim.engine.deadlock import deadlock
from clustersim.engine.finished import FinishedOps
from clustersim.engine.flows.clock import Clock
from clustersim.engine.flows.loads import Loads, Slots, VaryingLinks
from clustersim.engine.flows.network import FlowNetwork
from clustersim.engine.guess import OFTEN, SharingGuess, firsts
from clustersim.engine.inside import StretchPlans
from clustersim.engine.laid_out import transfers
from clustersim.engine.meetings import sites as meet
from clustersim.engine.op_facts import infos
from clustersim.engine.order import LookAhead, OpTask, tasks, unasked
from clustersim.engine.planning import Communicators, PlanBook, Planner
from clustersim.engine.play import Play
from clustersim.engine.players import FlowPlayer, Player, Replay, nobody
from clustersim.engine.rows import link_use
from clustersim.engine.sites import Site, SitePlay
from clustersim.engine.stretches import Shortened

FIDELITIES: dict[str, Callable[[Clock, Loads, PlanBook, tuple[Site, ...], Slots | None], Player]] = {
    "flow": lambda clock, loads, book, sites, slots: FlowPlayer(clock, loads, sites, slots),
    "chunk": lambda clock, loads, book, sites, slots: Replay(clock, loads, book, sites),
}
"""How a transfer on the clock is played: as one fluid flow, or every step of its algorithm by itself."""

PATIENCE = 4
"""Plays after which everything that could share is put on the clock."""


MOST = 0.75
"""The part of what could share that is on the clock from which all of it is put there. (Infinite: only what shares.)"""


class _WrongGuess(Exception):
    """Before the end it is known that these sites share (by their first meeting): the rest need not be played."""

    def __init__(self, wrong: set[int]) -> None:
        super().__init__("played again")
        self.wrong = wrong


class PlayOptions(TypedDict, total=False):
    """How a Program is played; see :func:`simulate`."""

    backend: str
    fidelity: str
    planner: Planner | None
    nccl_version: tuple[int, int]
    launch: str
    whole: Mapping[tuple[str, bytes], Ints] | None
    progress: Callable[[int, int], None] | None
    varying: tuple[VaryingLinks, ...]
    op_by_op: bool


def simulate(program: Program, topology: Topology, mesh: Mesh, **how: Unpack[PlayOptions]) -> Timeline:
    """Play a Program on a Topology.

    Parameters
    ----------
    program : what should happen. topology : the machine. mesh : which GPU each rank drives.
    backend : who plans the collectives: ``"nccl"`` (if absent), ``"gloo"``, ``"mpi"``, ``"mpi_cuda"`` or ``"ideal"``.
    fidelity : ``"flow"`` (if absent), a collective is one fluid flow; ``"chunk"``, every transfer of its algorithm is.
    planner : plans collectives instead of ``backend``: ``planner(request, group) -> Plan``; asked once for every
        distinct request and group.
    nccl_version, launch : as in :class:`clustersim.collectives.base.Group`.
    whole : communicator and ranks, as bytes -> GPUs of the group they stand for, where a Program is of some ranks that
        stand for all (:mod:`clustersim.training.builder.representative`).
    progress : called with (ops finished, ops in all). varying : links whose rate changes during the run, at flow
        fidelity; the topology has them at their best, which is what collectives are planned for.
    op_by_op : write out each pass, though it is repeated (:mod:`clustersim.core.repeated`), and play each op by itself,
        though a stretch of them can be played as one (:mod:`clustersim.engine.stretches`): the same times, but for the
        last bits, and slower.

    Returns
    -------
    Timeline; ``stats`` counts ``events``, ``solves``, ``flows`` and ``transfers``, and keeps ``overlap_slowdown``
    and ``own_paces``.

    Raises
    ------
    ProgramError : a Program that does not fit the mesh, members that disagree on a collective, ranks that wait for each
        other forever, or a run that needs more memory than is free (:mod:`clustersim.engine.need`).
    """
    fidelity = how.get("fidelity", "flow")
    if fidelity not in FIDELITIES:
        raise ProgramError(f"no fidelity {fidelity!r}; {nearest(fidelity, FIDELITIES)}")
    if mesh.world_size != program.world_size:
        raise ProgramError(f"a program for {program.world_size} ranks does not fit a mesh of {mesh.world_size}")
    _check_gpus(mesh, topology)
    if how.get("varying") and fidelity != "flow":
        raise ProgramError("links that change during the run need the fidelity 'flow'")
    if how.get("op_by_op"):
        program = replace(program, roles=tuple(replace(role, ops=tuple(role.ops)) for role in program.roles))
    program.check()
    need.check(need.flow(program, topology), "at flow fidelity", "use fewer steps, fewer ranks, or no jitter")
    with _no_collector():
        try:
            return _EngineRun(program, topology, mesh, how).timeline()
        except ProgramError:
            if how.get("op_by_op"):
                raise
        # What is wrong is told of the ops as they are written.
        return _EngineRun(program, topology, mesh, how | {"op_by_op": True}).timeline()


def _check_gpus(mesh: Mesh, topology: Topology) -> None:
    """Raises :class:`ProgramError` for a mesh whose ranks drive what the topology does not have."""
    drivable = np.isin(mesh.gpus, np.concatenate([topology.gpus, topology.cpus]))
    if drivable.all():
        return
    kinds = topology.vertex_kinds
    rank = int(np.argmin(drivable))
    vertex = int(mesh.gpus[rank])
    vertex_text = f"a {kinds[vertex]}" if 0 <= vertex < len(kinds) else f"none of its {len(kinds)} vertices"
    raise ProgramError(
        f"rank {rank} of the mesh drives vertex {vertex}, which is {vertex_text} in {topology.name} of "
        f"{topology.n_nodes} node(s); make the mesh of the same topology (clustersim.fabrics.mesh)"
    )


@contextmanager
def _no_collector() -> Iterator[None]:
    """Python's search for circles of garbage rests: nothing that a run makes is one, and to look through all of it time
    and again is a tenth of the run."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _EngineRun:
    """A Program that is played until a play is the exact one."""

    def __init__(self, program: Program, topology: Topology, mesh: Mesh, how: PlayOptions) -> None:
        self.whole = program
        self.topology = topology
        self.mesh = mesh
        self.fidelity, self.varying = how.get("fidelity", "flow"), how.get("varying", ())
        self.loads = Loads(topology, self.varying)
        self.book = _book(mesh, self.loads, how)
        self.progress = how.get("progress")
        self.opened: set[tuple[int, int]] = set()
        self.in_vain = 0
        self._looks = 0.0, 0.0  # when this play was looked at last, and before [s]
        self.op_by_op = how.get("op_by_op", False) or self.fidelity != "flow" or bool(self.varying or how.get("whole"))
        self._shorten(set())

    def _shorten(self, clocked: set[tuple[int, int]]) -> None:
        """Set up the play with what has not been opened played as one. ``clocked`` : ops that are known to share."""
        while True:
            self.short = Shortened(self.whole, self.opened, op_by_op=self.op_by_op)
            self.program = self.short.program
            self.sites = meet(self.program, self.book)
            opened = {self._place(site) for site in self.sites if _unsound(site)}
            if not opened:
                self._guess()
                first_of = {self._place(site): site.first for site in self.sites}
                self.clocked |= {first_of[place] for place in clocked}
                opened = self._stretches_of(self.clocked)
            if not opened:
                self._set_up()
                return
            self.opened |= opened

    def _place(self, site: Site) -> tuple[int, int]:
        """Role and place, in the whole list, of the first op of a site."""
        return self.short.place(site.sides[0].key)

    def _stretches_of(self, sites: set[int]) -> set[tuple[int, int]]:
        """Which of some sites, by first meeting, are stretches: their places."""
        if not self.short.any:
            return set()
        return {
            self._place(site) for site in self.sites if site.first in sites and isinstance(site.plans, StretchPlans)
        }

    def _guess(self) -> None:
        """Which sites share."""
        self.guess = SharingGuess(self.program, self.sites, self.loads) if self.fidelity == "flow" else None
        self.clocked = self.guess.clocked if self.guess else firsts(self.sites)
        if self.varying:
            self.clocked |= {site.first for site in self.sites if self.loads.crossing(site.plans.load)}

    def _set_up(self) -> None:
        """Tasks and what else a play needs."""
        program = self.program
        self.lists = tasks(program, self.sites)
        # Only collectives run on SMs; a program of sends owes nothing, and needs no ledger.
        billed = program.overlap_slowdown > 0 and any(isinstance(op, Collective) for r in program.roles for op in r.ops)
        self.bills = Bills(program.overlap_slowdown, self.lists) if billed else None
        link(self.lists)
        self.ahead: LookAhead | None = None
        meetings = sum(len(site.ranks) for site in self.sites)
        self.start, self.end = np.empty(meetings), np.empty(meetings)  # apart: the Timeline keeps one of them
        self._finished = FinishedOps(self.short, self.lists, self.bills, self.progress)

    def timeline(self) -> Timeline:
        """Play, check, and where the guess was wrong play again, with more on the clock."""
        self._finished.after_first_step = self._look_at_first_step if self.guess else None
        plays = 0
        while True:
            try:
                clock, player = self._play()
            except _WrongGuess as stop:
                wrong = stop.wrong
            else:
                plays += 1
                begin = self.start + _all(self.sites, "latency") if self.guess else self.start
                wrong = self.guess.wrong(begin, self.end) if self.guess else set()
                if self.guess and wrong:
                    wrong = self._in_each_pass(wrong) if plays < PATIENCE else self.guess.open
            self._finished.after_first_step = None
            if not self.guess or not wrong:
                break
            opened = self._stretches_of(wrong)
            self.clocked |= wrong
            if opened:
                known = {self._place(site) for site in self.sites if site.first in self.clocked}
                self.opened |= opened
                self._shorten(known - opened)
                continue
            for role_tasks in self.lists:
                for task in role_tasks:
                    task.reset()
        _note(self.sites, self.clocked, begin, self.end, player.network)
        player.on_end = nobody  # the play is over, and its columns may go
        if self.bills:
            self.bills.reset({}, lambda site, meeting: 0.0)
        del begin, self.end
        played = self._played(player, clock)
        return chunk.complete(played, player.columns) if isinstance(player, Replay) else played

    def _look_at_first_step(self) -> None:
        """What of the first step shares will share in each step: where that was not guessed, the play is over.
        Raises :class:`_WrongGuess`."""
        wrong = self._wrong_so_far()
        if wrong:
            raise _WrongGuess(cast(SharingGuess, self.guess).in_each_step(wrong))

    def _look_within_step(self, now: float) -> None:
        """The same within the only step, of what is over. Raises :class:`_WrongGuess`."""
        # What was over at the last look but one was looked at with all that it could meet.
        since, self._looks = self._looks[0], (self._looks[1], now)
        wrong = self._wrong_so_far(since)
        if wrong:
            raise _WrongGuess(self._in_each_pass(wrong))

    def _in_each_pass(self, wrong: set[int]) -> set[int]:
        """What is put on the clock because these share: the more, the more often a play was in vain."""
        guess = cast(SharingGuess, self.guess)
        wrong = guess.in_each_pass(wrong, self.end, OFTEN / 2**self.in_vain)
        self.in_vain += 1
        # The few that are left would be found one after another, each by a play.
        return guess.open if len(self.clocked | wrong) >= MOST * len(guess.open) else wrong

    def _wrong_so_far(self, since: float = 0.0) -> set[int]:
        """What of the play so far shares and was not guessed; ``since`` : as in :meth:`SharingGuess.wrong`."""
        end = np.where(self.end < np.inf, self.end, 0.0)  # what is not over has not moved anything
        return cast(SharingGuess, self.guess).wrong(self.start + _all(self.sites, "latency"), end, since)

    def _play(self) -> tuple[Clock, Player]:
        """One play; raises :class:`ProgramError` where ranks wait for each other forever."""
        clock = Clock()
        lists = self.lists
        if self.guess:
            self.guess.batches.part(self.clocked)
        standing = {site.first: self._standing(site) for site in self.sites}
        slots = self.guess.slots if self.guess else None
        player = FIDELITIES[self.fidelity](clock, self.loads, self.book, self.sites, slots)
        if self.bills:
            self.bills.reset(standing, player.not_before)
        if self.clocked and _asks_ahead(self.program, self.bills):
            self.ahead = self.ahead or LookAhead(lists, self._unasked())
            self.ahead.clock(self.clocked)
        self._finished.reset()
        play = Play(lists, standing, clock, player.play, self.bills, self._finished)
        player.on_end = play.met
        self.start[:] = self.end[:] = 0.0
        self._looks = 0.0, 0.0
        try:
            play.run(self._look_within_step if self.guess and not self._finished.several_steps else None)
        except _WrongGuess:
            play.standing = {}
            raise
        if any(task.left for role_tasks in lists for task in role_tasks):
            stuck = deadlock(self.program, standing, lists)
            _let_go(lists)
            raise stuck
        play.standing = {}  # it and its queues hold each other
        return clock, player

    def _unasked(self) -> frozenset[int]:
        """Of whom nobody asks how long they may wait; kernels that wait for bills do of everybody."""
        return frozenset() if self.bills else unasked(self.program, self.sites, self.clocked)

    def _standing(self, site: Site) -> SitePlay:
        meetings = slice(site.first, site.first + len(site.ranks))
        # A plan's time is not that of its schedule.
        alone = site.plans.columns if self.guess else (0.0, 0.0)
        return SitePlay(site, site.first in self.clocked, alone, (self.start[meetings], self.end[meetings]))

    def _played(self, player: Player, clock: Clock) -> Timeline:
        """The finished run, with its counts."""
        program = self.program
        sites = self.sites
        network = player.network
        rows = self._finished.rows()
        _let_go(self.lists)
        for site in sites:
            site.plans = site.played or site.plans
        moved = transfers(sites, network.segments.columns(), *player.transfers(), self.start)
        counts = clock.n_events, network.n_solves, network.n_flows + moved.more, len(moved.load)
        stats = dict(zip(("events", "solves", "flows", "transfers"), map(float, counts), strict=True))
        if program.overlap_slowdown:
            stats["overlap_slowdown"] = program.overlap_slowdown
        if program.own_paces:
            stats[OWN_PACES] = 1.0
        owner = np.array([rows.row_of(key) + k for key, k in moved.owners], dtype=np.int64)
        return Timeline.of_blocks(
            program.world_size,
            infos(self.short, rows, sites, self.topology, self.mesh),
            *rows.columns(),
            rows.blocks,
            links=link_use(self.loads, moved.segments, np.repeat(owner, moved.counts)[moved.meeting], moved.load),
            rank_node=self.topology.vertex_node[self.mesh.gpus],
            stats=stats,
        )


def _asks_ahead(program: Program, bills: Bills | None) -> bool:
    """Whether a play asks how long something may wait: pieces do, which a role of one rank never goes on in, and
    kernels that wait for bills."""
    return bills is not None or any(len(role.ranks) > 1 for role in program.roles)


def _book(mesh: Mesh, loads: Loads, how: PlayOptions) -> PlanBook:
    """Plans by whom :func:`simulate` was told."""
    launch = how.get("launch", "process_per_gpu")
    nccl = how.get("nccl_version", (2, 28))
    whole_groups = how.get("whole")
    groups = Communicators(loads.topology, mesh, launch=launch, nccl_version=nccl, whole=whole_groups)
    planner = how.get("planner")
    return PlanBook(planner or _backend_planner(how.get("backend", "nccl")), groups, loads, congruent=planner is None)


def _unsound(site: Site) -> bool:
    """Whether it is a stretch that cannot be played as one."""
    return isinstance(site.plans, StretchPlans) and not site.plans.sound


def _all(sites: tuple[Site, ...], name: str) -> Floats:
    """A column of the plans of all meetings."""
    return np.concatenate([np.zeros(0), *(getattr(site.plans, name) for site in sites)])


def _let_go(lists: list[list[OpTask]]) -> None:
    """Tasks hold each other, and the collector does not look at them: it would take a tenth of the time."""
    for role_tasks in lists:
        for task in role_tasks:
            task.before, task.next, task.soft, task.chain = [], [], (), None


def _note(sites: tuple[Site, ...], clocked: set[int], begin: Floats, end: Floats, network: FlowNetwork) -> None:
    """What free transfers moved: each at the rate it has alone."""
    moves = (_all(sites, "nbytes") > 0) & (end > begin)
    for site in sites:
        if isinstance(site.plans, StretchPlans):
            moves[site.first : site.first + len(site.ranks)] = False  # told of its collectives
    for site in sites if clocked else ():
        if site.first in clocked:
            moves[site.first : site.first + len(site.ranks)] = False
    columns = begin, end, _all(sites, "alone")
    network.moved(np.flatnonzero(moves), *(columns if moves.all() else [column[moves] for column in columns]))


def _backend_planner(backend: str) -> Planner:
    from clustersim.collectives import backends  # its tables are not needed where a planner is given

    return lambda request, group: backends.plan(request, group, backend=backend)
