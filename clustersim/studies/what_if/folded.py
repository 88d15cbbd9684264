"""The step time of a scenario from a run that is smaller than it: *folded* where the run repeats itself.

Who only asks how long a step takes (a table of measured steps, a search among thousands of candidates) need not play
everything. Where nothing is random, three things repeat, and each is played once:

* **replicas**: data-parallel replicas do the same at the same time. So few of them are played that they fill whole
  nodes and hold every expert; their exchanges are those of all replicas
  (:mod:`clustersim.training.builder.representative`).
* **passes**: a micro-batch's pass through a stage takes as long each time. It is played once by itself, and is one op
  wherever no data-parallel traffic runs beside it (:mod:`clustersim.training.builder.at_once`).
* **micro-batches**: past its warm-up a pipeline adds the same for each further round of them. Two numbers of
  micro-batches are played, and the others lie on the line through them, as a third one must.

So far the result is the whole run's, to rounding, and what cannot be folded so is played in full. *Roughly* folded,
passes are single ops everywhere: what data-parallel traffic and messages that share their links take from them is that
of one op, and of ranks that end a pass apart the last counts. Of ten rows of measured steps that were compared, nine
came within 0.6 % of the whole step, in a tenth of the time; one whose replicas share a node's only NIC, 2.6 %.
*Sketched*, nothing stands in anything else's way either (:mod:`clustersim.studies.what_if.sketch`): in a fifth of that
time.

A run is never folded unless it is asked for: :meth:`clustersim.scenario.Scenario.run` plays everything.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import lcm

import msgspec
import numpy as np

from clustersim.core.arrays import Ints
from clustersim.core.device import Device
from clustersim.core.memory_use import Verdict
from clustersim.core.model import StepCost
from clustersim.core.timeline import Timeline
from clustersim.core.topology import GPU, NIC, NVSWITCH
from clustersim.scenario import Scenario
from clustersim.scenario.run.held import ScenarioParts, held
from clustersim.scenario.run.parts import cost_of
from clustersim.scenario.run.played import backend_of, play
from clustersim.scenario.run.replicas import sharding_zero
from clustersim.scenario.run.split_step import Split, local_cost, orders_of, recipe_of
from clustersim.studies.what_if.folded_passes import PassesDiffer, can_fold, folded_passes
from clustersim.studies.what_if.rerun import Factors, rerun_with, speed_of, widened
from clustersim.studies.what_if.rerun import step_time as measured_step
from clustersim.studies.what_if.sketch import Key, Sketch
from clustersim.studies.what_if.sketch import spent as taken
from clustersim.training.builder import build
from clustersim.training.builder.at_once import Known, alone, spent, what
from clustersim.training.builder.representative import Representative, representative
from clustersim.training.builder.stage_ops import StageOps
from clustersim.training.partition.base import Exchange, Stage

PERIODIC = frozenset({"1f1b", "interleaved_1f1b"})
"""Schedules that add the same for each round of micro-batches."""

SOON_PERIODIC = frozenset({"zb_h1", "zb_2p"})
"""Those that do so from the second round on, as long as their search does not find another filling."""
EVEN = 1e-10
"""How far a third number of micro-batches may be from the line, relatively."""
STEADY = 2
"""Steps until one is like the one before: its first passes may begin before all ranks have ended the last step."""


@dataclass(frozen=True)
class FoldedStep:
    """A step time, and what was played for it.

    step_time_s : float [s]. ranks : played, of how many. micro_batches : played, of how many.
    passes : whether passes were ops. exact : whether it is the whole run's to rounding. memory : of the fullest rank.
    """

    step_time_s: float
    ranks: tuple[int, int] = (1, 1)
    micro_batches: tuple[tuple[int, ...], int] = ((1,), 1)
    passes: bool = False
    exact: bool = True
    memory: Verdict | None = None


def folded(
    scenario: Scenario, *, roughly: bool = False, sketched: bool = False, factors: Factors | None = None
) -> FoldedStep:
    """How long a step takes, as :meth:`clustersim.scenario.Scenario.run` would find, folded where that is possible;
    ``sketched`` goes before ``roughly``. ``factors`` : rates of the machine turned, as
    :func:`clustersim.studies.what_if.rerun.rerun_with` does.

    A scenario whose ranks differ (jitter, variation, slow GPUs, incidents) is played whole; one whose model is not
    split is folded as :mod:`clustersim.studies.what_if.folded_passes` does, or played whole. Raises as ``run``.
    """
    factors = factors or {}
    if not factors and can_fold(scenario):
        with suppress(PassesDiffer):
            return _of_few_passes(scenario)
    speed = speed_of(factors)
    parts = held(scenario, speed)
    parts = replace(parts, topology=widened(parts.topology, factors))
    gpu, cost = cost_of(parts.scenario, parts.topology, parts.mesh, parts.model, speed)
    split = parts.split
    cluster = scenario.file.cluster
    differ = (
        cost.jitter
        or cluster.slow
        or any(change.timed for change in cluster.changes)
        or scenario.file.run.variation is not None
        or scenario.file.incident
    )
    if split is None or differ or not split.schedule.synchronous:
        return FoldedStep(rerun_with(scenario, factors), memory=parts.verdict)
    return _ScenarioFold(parts, split, gpu, cost, roughly or sketched, sketched).result()


def _of_few_passes(scenario: Scenario) -> FoldedStep:
    """Raises :class:`PassesDiffer`."""
    parts = held(scenario)
    few = folded_passes(parts)
    count = scenario.config.gradient_accumulation_steps
    played = (few.ranks, parts.mesh.workers), ((few.passes,), count)
    return FoldedStep(few.of(count).step_time_s, *played, memory=parts.verdict)


@dataclass(eq=False)
class _ScenarioFold:
    """One scenario's foldings."""

    found: ScenarioParts
    split: Split
    gpu: Device
    cost: StepCost
    roughly: bool
    sketched: bool
    _taken: dict[Key, float] = field(default_factory=dict, init=False)

    def result(self) -> FoldedStep:
        """The step of all micro-batches, from one play or from the line through two."""
        count = self.found.scenario.config.gradient_accumulation_steps
        short, long = self._ends(count)
        times = {m: self._play(m) for m in {min(short, count), min(long, count)}}
        step = times[min(long, count)]
        if count > long and not self.roughly:
            # Messages that share a link may shift a little against each other in each round.
            third = min(count, 2 * long - short)
            times[third] = self._play(third)
            even = step + (third - long) * (step - times[short]) / (long - short)
            if abs(times[third] - even) > EVEN * even:
                times[count] = step = self._play(count)
                long = count
        if count > long:
            step += (count - long) * (step - times[short]) / (long - short)
        sizes = len(self._played), self.found.mesh.workers
        memory = self.found.verdict
        counts = tuple(sorted(times)), count
        return FoldedStep(step, sizes, counts, self._known is not None, not self.roughly, memory)

    def _ends(self, count: int) -> tuple[int, int]:
        """Two numbers of micro-batches between which, and past which, each round adds the same."""
        stages = self.split.parallel.pp
        if stages == 1:
            return 2, 3
        if count % stages and len(self.split.partition.stages[0].chunks) > 1:
            return count, count
        # Pairs of passes of two micro-batches begin behind the first round.
        if (self.roughly and self.split.schedule.name in SOON_PERIODIC) or self.split.parallel.ep_overlap:
            return 2 * stages, 3 * stages
        return (stages, 2 * stages) if self.split.schedule.name in PERIODIC else (count, count)

    def _play(self, count: int) -> float:
        config = msgspec.structs.replace(self.found.scenario.config, gradient_accumulation_steps=count)
        scenario = replace(self.found.scenario, config=config)
        split = self.split
        mesh = self.found.mesh
        orders = orders_of(scenario, split.parallel, split.partition, split.schedule, self.gpu)
        recipe = recipe_of(replace(split, scenario=scenario, orders=orders), self.cost)
        recipe = replace(recipe, known=self._known, roughly=self.roughly)
        local = local_cost(scenario, self.gpu, self.cost)
        seed = scenario.file.run.seed
        # A step that gathers its parameters in its own forward is hardly begun by the one before. Without a pipeline a
        # step is short, and what of its end hides behind the next one's begin was up to 9 % of it.
        alike = self.roughly and scenario.strategy.name == "fsdp"
        alike |= self.sketched and not self.split.parallel.overlap_param_gather and self.split.parallel.pp > 1
        program = build(recipe, local, self.cost, mesh, 1 if alike else min(scenario.steps, STEADY), seed)
        if not self.sketched:
            return measured_step(self._simulate(representative(program, mesh, self._played)))
        sketch = Sketch(program, mesh)
        lone_program, keys = sketch.alone(self._taken)
        if keys:
            self._taken |= taken(self._simulate(representative(lone_program, mesh, self._kept)), keys)
        return sketch.seconds(self._taken)

    def _simulate(self, part: Representative) -> Timeline:
        parts = self.found
        backend = backend_of(parts.scenario, parts.topology, parts.mesh)
        return play(parts.scenario, part.program, parts.topology, part.mesh, backend=backend, whole=part.whole)

    @cached_property
    def _kept(self) -> Ints:
        """Ranks that stand for all: of few replicas, and of a node's GPUs those of one NIC, where all NICs have as
        many and a switch joins the GPUs."""
        mesh = self.found.mesh
        inside = mesh.size("tp", "cp")
        unit = lcm(inside, mesh.nproc_per_node, mesh.size("ep") * mesh.size("etp"))
        ranks = np.arange(mesh.workers, dtype=np.int64)
        if sharding_zero(self.found.scenario):  # its reductions go to each rank in turn
            return ranks
        if mesh.size("dp") % (unit // inside) == 0 and mesh.size("dp_replicate") == 1:
            ranks = ranks[mesh.coordinates("dp")[ranks] < unit // inside]
        per_nic = self._gpus_of_a_nic
        if per_nic and mesh.nproc_per_node % mesh.size("tp") == 0 and mesh.size("tp") % per_nic == 0:
            ranks = ranks[mesh.coordinates("tp")[ranks] < per_nic]
        return ranks

    @cached_property
    def _played(self) -> Ints:
        """Ranks whose whole step is played: those that stand for all. Roughly, where passes are ops and each GPU has a
        NIC of its own, one of each stage: the stage's others send beside it what it sends."""
        mesh = self.found.mesh
        replicated = self.found.scenario.strategy.name == "ddp"
        if not self.roughly or not replicated or self._known is None or self._gpus_of_a_nic != 1:
            return self._kept
        return np.array([mesh.ranks(pp=rank)[0] for rank in range(mesh.size("pp"))], dtype=np.int64)

    @cached_property
    def _gpus_of_a_nic(self) -> int:
        """GPUs that share one, where all NICs of a node have as many and a switch joins the GPUs; else 0."""
        mesh = self.found.mesh
        top = self.found.topology
        first = np.flatnonzero(top.vertex_node == top.vertex_node[mesh.gpus[0]]).tolist()
        nics, gpus = (sum(kind == top.vertex_kinds[i] for i in first) for kind in (NIC, GPU))
        even = nics and gpus % nics == 0 and mesh.nproc_per_node == gpus and NVSWITCH in top.vertex_kinds
        return gpus // nics if even else 0

    @cached_property
    def _known(self) -> tuple[Known, ...] | None:
        """What every pipeline rank's passes take; None where they cannot be told from what runs beside them: parameters
        that are shared out are on their way all the time (but in a pipeline), two passes of one slot take turns, and
        a host calls what the GPUs run (which a rough answer leaves out)."""
        scenario = self.found.scenario
        # A pass that is one op waits for all of its parameters, and a short step has few other passes.
        waits = self.roughly and not self.sketched and self.split.parallel.overlap_param_gather
        gathers = scenario.strategy.name == "fsdp" or waits
        shared = (self.split.parallel.pp == 1 and gathers) or sharding_zero(scenario) is not None
        paired = any(len(slot) > 1 for order in self.split.orders for slot in order)
        # A host that is ahead of its GPU, or behind it, is so across passes: a pass does not take what it takes alone.
        called = not self.roughly and local_cost(scenario, self.gpu, self.cost).host is not None
        if shared or paired or called or not (self.roughly or self._apart):
            return None
        stage_costs: dict[object, Known] = {}
        every = []
        for rank, stage in enumerate(self.split.partition.stages):
            key = self._place(rank), tuple(what(chunk, "") for chunk in stage.chunks)
            if key not in stage_costs:
                stage_cost = self._alone(rank, stage)
                if stage_cost is None:
                    return None
                stage_costs[key] = stage_cost
            every.append(stage_costs[key])
        return tuple(every)

    def _alone(self, rank: int, stage: Stage) -> Known | None:
        scenario = self.found.scenario
        mesh = self.found.mesh
        recipe = recipe_of(self.split, self.cost)
        local = local_cost(scenario, self.gpu, self.cost)
        stage_ops = StageOps(mesh, mesh.ranks(pp=rank), local, recipe.dtype)
        program, passes = alone(stage_ops, stage, recipe.orders[rank], self.cost.overlap_slowdown)
        own_ranks = self._kept[np.isin(self._kept, stage_ops.ranks)]
        return spent(self._simulate(representative(program, mesh, own_ranks)), passes, apart=self.roughly)

    def _place(self, rank: int) -> bytes:
        """Where in its nodes a stage is."""
        top = self.found.topology
        mesh = self.found.mesh
        gpus = mesh.gpus[mesh.ranks(pp=rank)]
        node = top.vertex_node[gpus]
        return bytes((gpus - np.searchsorted(top.vertex_node, node)).astype(np.int64))

    @property
    def _apart(self) -> bool:
        """Whether exchanges inside passes share no link with messages or with another stage's passes meanwhile.

        Stages on nodes of their own do not meet, and a blocking message runs while its two ends do not compute. Behind
        a switch, a GPU's links to its node's others are its own, and no way to another node.
        """
        mesh = self.found.mesh
        top = self.found.topology
        items = [i for stage in self.split.partition.stages for x in stage.layers for i in (*x.forward, *x.backward)]
        dims = {item.dims for item in items if isinstance(item, Exchange) and mesh.size(*item.dims) > 1}
        node = top.vertex_node[mesh.gpus]
        inside = all((node[mesh.groups(*names)] == node[mesh.groups(*names)[:, :1]]).all() for names in dims)
        recipe = recipe_of(self.split, self.cost)
        blocking = recipe.messages != "overlapped"
        pairs = np.unique(np.stack([node, mesh.coordinates("pp")]), axis=1)
        alone = pairs.shape[1] == len(np.unique(node))
        switched = NVSWITCH in top.vertex_kinds
        if not dims or mesh.size("pp") == 1:
            return True
        return (alone and blocking) or (inside and switched and (alone or blocking))
