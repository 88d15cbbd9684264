"""From a scenario to everything a run needs, and the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from clustersim.cluster.files.changes import NO_SUCH_BOARD, NO_SUCH_NODE, WHAT_IF
from clustersim.cluster.files.check import hidden_parts
from clustersim.cluster.files.networks import NO_EFFECT
from clustersim.collectives.base import Group
from clustersim.collectives.nccl.settings import settings_of
from clustersim.core import limits
from clustersim.core.device import AS_IS, Device, Speed
from clustersim.core.errors import ScenarioError
from clustersim.core.memory_use import MemoryUse
from clustersim.core.mesh import Mesh
from clustersim.core.model import StepCost
from clustersim.core.program import Program
from clustersim.core.timeline import Timeline
from clustersim.core.topology import GPU, Topology
from clustersim.core.units import format_bytes, format_time
from clustersim.engine import need
from clustersim.engine.hang import Hang
from clustersim.scenario import Scenario
from clustersim.scenario.file.incident_table import KINDS
from clustersim.scenario.result import Result
from clustersim.scenario.run.altered import draw, joined, mean_peak, pinned, pins_of, slowed, varied
from clustersim.scenario.run.fitted_notes import fitted_notes
from clustersim.scenario.run.head import head_lines
from clustersim.scenario.run.held import ScenarioParts, held
from clustersim.scenario.run.incidents import varying_of, with_incidents
from clustersim.scenario.run.parts import DeviceKind, kinds_of
from clustersim.scenario.run.played import backend_of, play
from clustersim.training.strategies import STRATEGIES
from clustersim.training.strategies.base import StepSample
from clustersim.training.strategies.exchange_contract import exchanges_nothing


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Prepared(ScenarioParts):
    """Everything a run needs, before it runs.

    Parameters
    ----------
    device : the GPU of every rank; the slowest where node types are mixed. cost : of one rank's step on it.
    program : what should happen. notes : assumptions, for people.
    peak_flops : float [FLOP/s], dense, of a GPU in the run's dtype; the mean where several kinds are mixed.
    """

    device: Device
    cost: StepCost
    program: Program
    notes: tuple[str, ...]
    peak_flops: float

    @property
    def memory(self) -> MemoryUse:
        """Of one rank, of the fullest stage."""
        return self.use

    def run(self, progress: Callable[[int, int], None] | None = None) -> Result:
        """Simulate; ``progress`` is called with (ops finished, ops in all).

        Raises :class:`ScenarioError` for a run that an incident hangs: it has no step time.
        """
        _goes_on(self.scenario)
        return Result(self, self.play(progress))

    def play(self, progress: Callable[[int, int], None] | None = None) -> Timeline:
        """The Timeline of the run, without an incident that hangs it."""
        fidelity = self.scenario.file.run.fidelity
        # What can still be wrong is a rank that cannot reach another, so the machine is named.
        with self.scenario.at("$.cluster"):
            varying = varying_of(self.scenario, self.topology)
            machine = self.program, self.topology, self.mesh
            return play(self.scenario, *machine, fidelity=fidelity, progress=progress, varying=varying)

    def hang(self, timeline: Timeline | None = None) -> Hang | None:
        """The hang that an incident makes of this run; None where it goes on. ``timeline`` : of :meth:`play`."""
        from clustersim.scenario.run.hanging import hang_of

        if not any(incident.hangs for incident in self.scenario.file.incident):
            return None
        return hang_of(self, self.play() if timeline is None else timeline)

    def __repr__(self) -> str:
        return f"<Prepared {self.scenario.title}: {self.gpus:,} GPUs of {self.topology.name}>"

    @property
    def backend(self) -> str:
        """Who plans the collectives: what the scenario says, or Gloo between CPUs and NCCL else."""
        return backend_of(self.scenario, self.topology, self.mesh)

    @property
    def devices(self) -> str:
        """The GPUs of all ranks by name, ``"A100-SXM4-80GB and H100-SXM5-80GB"``."""
        nodes = self.topology.vertex_node[self.mesh.gpus[: self.mesh.workers]].tolist()
        return " and ".join(dict.fromkeys(self.topology.node_types[n].device for n in nodes))

    @property
    def gpus(self) -> int:
        """How many GPUs take part; a rank on a CPU is none."""
        return sum(self.topology.vertex_kinds[vertex] == GPU for vertex in self.mesh.gpus.tolist())

    def describe(self, rank: int = 0) -> str:
        """The Program of one rank as text, under the facts it follows from."""
        head = [
            f"scenario  {self.scenario.title}",
            *(f"{what:9s} {words}" for what, words in head_lines(self)),
            *self._parts(),
            *(f"note      {note}" for note in self.notes),
            "",
        ]
        return "\n".join(head) + self.program.describe(rank)

    def _parts(self) -> Iterator[str]:
        """What a rank computes and holds; of a split model a line for each stage."""
        cost = self.cost
        room = format_bytes(self.device.memory_bytes)
        if self.split is None:
            yield (
                f"cost      forward {format_time(float(cost.forward.sum()))}, backward "
                f"{format_time(float(cost.backward.sum()))}, optimizer {format_time(cost.optimizer)} a micro-batch"
            )
            yield f"memory    {self.verdict}"
            return
        for i, (stage, use) in enumerate(zip(self.split.partition.stages, self.split.memory, strict=True)):
            layers_held = ", ".join(
                f"{layers[0].name} to {layers[-1].name}" for layers in (c.layers for c in stage.chunks)
            )
            yield f"stage {i:3d} {stage.parameters + stage.expert_parameters:,} parameters a rank: {layers_held}"
            yield f"          {format_bytes(use.total)} of {room}, most at {use.peak}"
        yield f"memory    {self.verdict}"


def _goes_on(scenario: Scenario) -> None:
    """Raise :class:`ScenarioError` where an incident hangs the run."""
    for i, incident in enumerate(scenario.file.incident):
        if incident.hangs:
            with scenario.at(f"$.incident[{i}]"):
                raise ScenarioError(
                    f"{incident} hangs this run, which has no step time; `clustersim run` says who waits for whom"
                )


def _affordable(parts: ScenarioParts, cost: StepCost) -> None:
    """Raise :class:`ScenarioError` where the ops of all passes, at the very least, take more memory than there is."""
    scenario = parts.scenario
    passes = scenario.steps * scenario.config.gradient_accumulation_steps
    whole = parts.split is None
    ops = scenario.strategy.least_ops(parts.model, cost, parts.mesh, scenario.config) if whole else 2
    use = f"for {passes:,} passes, forward and backward (run.steps x strategy.gradient_accumulation_steps)"
    use += f", of {ops:,} kernels and collectives each" if ops > 2 else ""
    limits.check(need.OP * passes * ops, use, "use fewer", ScenarioError)


def prepare(scenario: Scenario, speed: Speed = AS_IS) -> Prepared:
    """See :meth:`clustersim.scenario.Scenario.prepare`; ``speed``: on GPUs that are so much faster."""
    return prepare_held(held(scenario, speed), speed)


def prepare_held(parts: ScenarioParts, speed: Speed = AS_IS, *, steps: int | None = None) -> Prepared:
    """The same of a scenario whose memory is known: ``parts`` are of :func:`clustersim.scenario.run.held.held`, with
    this ``speed``. ``steps`` : that the Program of a whole model has, where it is looked at and not played."""
    scenario = parts.scenario
    topology = parts.topology
    mesh = parts.mesh
    model = parts.model
    kinds = kinds_of(scenario, topology, mesh, model, speed)
    gpu = kinds[0].device
    cost = kinds[0].cost
    file = scenario.file
    peak = mean_peak(kinds, file.model.dtype)
    _affordable(parts, cost)
    programs = [_program(parts, kind, steps or scenario.steps) for kind in kinds]
    program = programs[0] if len(kinds) == 1 else joined(programs, kinds, peak)
    with scenario.at("$.cluster.slow"):
        program = slowed(program, file.cluster.slow, mesh.workers)
    with scenario.at("$.run.pins"):
        program = pinned(program, file.run.pins)
    with scenario.at("$.run.nccl_environment"):
        settings = settings_of(file.run.nccl_environment)
        pins, unpinned = pins_of(settings)
        program = pinned(program, pins)
    if file.run.variation is not None:
        program = varied(program, draw(scenario, topology, mesh), mesh)
    if file.incident:
        program = _struck(scenario, program, topology, mesh)
    model_notes = (
        *_hosts(parts, cost),
        *model.notes,
        *_mixture(kinds),
        *_periods(scenario),
        *_changed(scenario, topology),
        *of_uneven_nodes(scenario, topology, mesh),
        *_told(scenario),
        *settings.notes,
        *unpinned,
        *_silent(scenario, program),
        *_fitted(scenario, topology, mesh, program),
    )
    notes = dict.fromkeys((*model_notes, *program.notes))
    return Prepared(**vars(parts), device=gpu, cost=cost, program=program, notes=tuple(notes), peak_flops=peak)


def sampled_step(parts: ScenarioParts) -> tuple[StepSample, StepCost] | None:
    """A steady step of a whole model in few passes, and its costs; None where its strategy has to be written out, or
    the scenario asks for it (``run.op_by_op``).

    Raises :class:`ScenarioError` as :func:`prepare_held` does, where passes would not fit in memory.
    """
    scenario = parts.scenario
    sample = scenario.strategy.sample
    kinds = kinds_of(scenario, parts.topology, parts.mesh, parts.model, AS_IS)
    if sample is None or parts.split is not None or len(kinds) > 1 or scenario.file.run.op_by_op:
        return None
    cost = kinds[0].cost
    _affordable(parts, cost)
    with scenario.at("$.strategy"):
        return sample(parts.model, cost, parts.mesh, scenario.config), cost


def _silent(scenario: Scenario, program: Program) -> Iterator[str]:
    """That a strategy of one's own exchanges nothing, which makes it the fastest of all; shipped ones are tested."""
    name = scenario.strategy.name
    workers = sum(len(role.ranks) for role in program.roles)
    if workers > 1 and STRATEGIES.own(name) is not None and exchanges_nothing(program):
        yield (
            f"{name}: no rank hears what another computes in the {scenario.steps} steps of this run: nothing that "
            "follows a backward is sent; clustersim.testing.check_strategy says more"
        )


def _fitted(scenario: Scenario, topology: Topology, mesh: Mesh, program: Program) -> Iterator[str]:
    if backend_of(scenario, topology, mesh) == "nccl":
        yield from fitted_notes(program, topology, mesh, scenario.strategy.launch or scenario.file.run.launch)


def _program(parts: ScenarioParts, kind: DeviceKind, steps: int) -> Program:
    """What should happen, if every rank had this kind of GPU."""
    scenario = parts.scenario
    file = parts.scenario.file
    cost = kind.cost
    if parts.split is not None:
        from clustersim.scenario.run.split_step import program_of  # a whole model needs no builder

        with scenario.at("$.parallel"):
            program = program_of(parts.split, kind.device, cost)
            program.check()
        return program
    with scenario.at("$.strategy"):
        build = scenario.strategy.build
        program = build(parts.model, cost, parts.mesh, scenario.config, steps, file.run.seed)
        program.check()
    return program


def _struck(scenario: Scenario, program: Program, topology: Topology, mesh: Mesh) -> Program:
    """What should happen, with what incidents make of the ranks' ops."""
    varying = varying_of(scenario, topology)

    def played(changed: Program) -> Timeline:
        """The timeline of a changed program."""
        return play(scenario, changed, topology, mesh, fidelity=scenario.file.run.fidelity, varying=varying)

    with scenario.at("$.incident"):
        return with_incidents(scenario, program, topology, mesh, played)


def _hosts(parts: ScenarioParts, cost: StepCost) -> Iterator[str]:
    """What is known of kernels and host: measured, or that nobody has measured this stack."""
    scenario = parts.scenario
    if scenario.fit is not None and scenario.fit.steps:
        yield str(scenario.fit)
    if parts.split is None or scenario.file.measured is not None:
        return
    from clustersim.scenario.run.split_step import local_cost

    law = local_cost(scenario, parts.card, cost).host
    if law is not None and not law.known:
        yield (
            f"host: nobody here has measured how long {parts.split.parallel.framework} takes to call a layer; "
            f"{format_time(law.call)} a call is a guess, two or three times off either way ([measured] layer_time)"
        )


def _periods(scenario: Scenario) -> Iterator[str]:
    """That more steps are played than asked for."""
    wanted = scenario.file.run.steps
    played = scenario.steps
    if played > wanted:
        period = scenario.strategy.period_of(scenario.config)
        yield (
            f"{scenario.strategy.name} repeats every {period} steps: {played} steps are played, not {wanted} "
            "(run.steps), so that figures of a step are means over whole periods"
        )


def _changed(scenario: Scenario, topology: Topology) -> Iterator[str]:
    """Of each change of a rate, the scenario's or the machine's, whether NCCL sees it: what it plans for follows."""
    for i, change in enumerate(scenario.file.cluster.changes):
        if change.timed or change.remove:
            continue
        place = f"cluster.changes[{i}]: {change.match}"
        if change.bandwidth is not None:
            yield f"{place} says its rate, and NCCL's search counts with it; factor is for what it does not see"
        elif change.factor is not None and change.factor < 1:
            yield f"{place} delivers {change.factor:g} of what NCCL reads and plans with; bandwidth is for what it sees"
    yield from (text for text in topology.assumed if text.endswith((WHAT_IF, NO_SUCH_NODE, NO_SUCH_BOARD, NO_EFFECT)))
    if not scenario.file.cluster.changes:
        yield from hidden_parts(topology)


def of_uneven_nodes(scenario: Scenario, topology: Topology, mesh: Mesh) -> Iterator[str]:
    """What NCCL makes of nodes that differ, on a scenario's machine or another that it would be on."""
    from clustersim.collectives.nccl.uneven import of_group

    if backend_of(scenario, topology, mesh) == "nccl":
        with scenario.at("$.cluster"):
            yield from of_group(Group(topology, mesh.gpus[: mesh.workers]))


def _told(scenario: Scenario) -> Iterator[str]:
    """What goes wrong, where and when."""
    for i, incident in enumerate(scenario.file.incident):
        until = "" if incident.until == math.inf else f" until {format_time(incident.until)}"
        yield f"incident[{i}]: {incident} from {format_time(incident.since)}{until}: {KINDS[incident.kind].words}"


def _mixture(kinds: Sequence[DeviceKind]) -> Iterator[str]:
    """What is to be known of several kinds of GPU in one run."""
    if len(kinds) > 1:
        names = ", ".join(f"{len(kind.ranks)} x {kind.device.name}" for kind in kinds)
        yield (
            f"mixed GPUs ({names}): each rank computes at its own pace, and synchronous steps wait for "
            f"{kinds[0].device.name}; MFU is of the mean peak; jitter and memory are those of {kinds[0].device.name}"
        )
