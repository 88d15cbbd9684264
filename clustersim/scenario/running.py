"""From a scenario to its parts (machine, model, costs, Program), and from those to a result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustersim import fabrics, models
from clustersim.calibrated import Calibration
from clustersim.compute import step_cost
from clustersim.compute.host import host_bandwidth
from clustersim.device import AS_IS, Device, Speed, device, faster, of_cores, with_efficiencies
from clustersim.memo import kept_with_first
from clustersim.memory import REPLICATED, MemoryUse, Verdict, memory
from clustersim.mesh import Mesh
from clustersim.model import Model, StepCost
from clustersim.program import Program
from clustersim.scenario.schema import version
from clustersim.scenario.slow import slowed
from clustersim.strategies import STRATEGIES
from clustersim.timeline import Timeline
from clustersim.topology import CPU, GPU, Topology
from clustersim.units import format_bytes, format_time

if TYPE_CHECKING:
    from clustersim.scenario import Scenario

LINK_COLUMNS = ("link", "utilisation", "bytes")


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything a run needs, before it runs.

    Parameters
    ----------
    device : the GPU of every rank; the slowest where node types are mixed. cost : of one rank's step on it.
    memory : of one rank. program : what should happen. notes : assumptions, for people.
    """

    scenario: Scenario
    topology: Topology
    mesh: Mesh
    model: Model
    device: Device
    cost: StepCost
    memory: MemoryUse
    program: Program
    notes: tuple[str, ...]

    def run(self, progress: Callable[[int, int], None] | None = None) -> Result:
        """Simulate; ``progress`` is called with (ops finished, ops in all)."""
        from clustersim import engine

        run = self.scenario.file.run
        # What can still be wrong is a rank that cannot reach another, so the machine is named.
        with self.scenario.at("$.cluster"):
            timeline = engine.simulate(
                self.program,
                self.topology,
                self.mesh,
                backend=self.backend,
                fidelity=run.fidelity,
                launch=STRATEGIES[self.scenario.file.strategy["kind"]].launch or run.launch,
                nccl_version=version(run.nccl_version),
                progress=progress,
            )
        return Result(self, timeline)

    @property
    def backend(self) -> str:
        """Who plans the collectives: what the scenario says, or Gloo between CPUs and NCCL else."""
        between = "gloo" if cores_of(self.topology, self.mesh) else "nccl"
        return self.scenario.file.run.backend or between

    @property
    def gpus(self) -> int:
        """How many GPUs take part; a rank on a CPU is none."""
        return sum(self.topology.vertex_kinds[vertex] == GPU for vertex in self.mesh.gpus.tolist())

    def describe(self, rank: int = 0) -> str:
        """The Program of one rank as text, under the facts it follows from."""
        cost, layers, mesh = self.cost, len(self.model.layers), self.mesh
        head = [
            f"scenario  {self.scenario.title}",
            f"cluster   {self.topology.name}: {mesh.n_nodes} node(s) x {mesh.nproc_per_node} {self.device.name}",
            f"model     {self.model.name}: {self.model.parameters:,} parameters in {layers} layers",
            f"cost      forward {format_time(float(cost.forward.sum()))}, backward "
            f"{format_time(float(cost.backward.sum()))}, optimizer {format_time(cost.optimizer)} a micro-batch",
            f"memory    {format_bytes(self.memory.total)} of {format_bytes(self.device.memory_bytes)}",
            *(f"note      {note}" for note in self.notes),
            "",
        ]
        return "\n".join(head) + self.program.describe(rank)


@dataclass(frozen=True, eq=False)
class Result:
    """What a run came to: its Timeline, and figures drawn from it."""

    prepared: Prepared
    timeline: Timeline

    @property
    def scenario(self) -> Scenario:
        """What was run."""
        return self.prepared.scenario

    @property
    def memory(self) -> MemoryUse:
        """Bytes on each GPU, by what holds them."""
        return self.prepared.memory

    @property
    def verdict(self) -> Verdict:
        """Whether the model fits in a GPU's memory, by how much, and what holds it."""
        return self.memory.fits(self.prepared.device)

    @property
    def fits(self) -> bool:
        """Whether the model fits in a GPU's memory."""
        return self.verdict.ok

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed."""
        return self.prepared.notes

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The figures of :func:`clustersim.analysis.metrics.summary`."""
        from clustersim.analysis.metrics import summary

        p, file = self.prepared, self.scenario.file
        config = self.scenario.config
        runs_as = p.device.runs_as(file.model.dtype)
        return summary(
            self.timeline,
            p.model,
            samples_per_step=config.micro_batch_size * config.gradient_accumulation_steps * p.mesh.workers,
            workers=p.mesh.workers,
            together=STRATEGIES[file.strategy["kind"]].together(config),
            peak_flops=p.device.peak[runs_as],
            peak=f"dense {runs_as} of {p.device.name}",
        )

    @cached_property
    def volume(self) -> dict[str, Any]:
        """Bytes a step moves, by op and by kind of link: :func:`clustersim.analysis.volume.volume`."""
        from clustersim.analysis.volume import volume

        return volume(self.timeline, self.summary["steady_steps"])

    @cached_property
    def of_strategy(self) -> dict[str, Any]:
        """Figures that only this strategy has, such as the staleness of an asynchronous run; often none."""
        p, row = self.prepared, STRATEGIES[self.scenario.file.strategy["kind"]]
        if row.report is None:
            return {}
        return row.report(p.program, self.timeline, p.topology, p.mesh, self.scenario.config)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the Timeline, in plain values: what ``clustersim run --json`` prints."""
        p = self.prepared
        return {
            "scenario": self.scenario.name,
            "changes": dict(self.scenario.changes),
            "topology": p.topology.name,
            "nodes": p.mesh.n_nodes,
            "gpus": p.gpus,
            "device": p.device.name,
            "model": p.model.name,
            "parameters": p.model.parameters,
            "strategy": self.scenario.file.strategy["kind"],
            **self.summary,
            "hottest_links": [
                {"link": name, "utilisation": used, "bytes": nbytes}
                for name, used, nbytes in self.summary["hottest_links"]
            ],
            "peak_memory_bytes": self.memory.total,
            "fits": self.fits,
            "memory": {
                "device_bytes": p.device.memory_bytes,
                "missing_bytes": max(0.0, -self.verdict.spare),
                "by": self.memory.parts(),
                "message": str(self.verdict),
            },
            "volume": {name: column.tolist() for name, column in self.volume.items()},
            "of_strategy": self.of_strategy,
            "notes": list(self.notes),
        }

    def facts(self) -> dict[str, Any]:
        """What a saved run carries beside its Timeline: :meth:`to_dict`, every input, and memory over a step."""
        course = self.memory.course
        return {
            **self.to_dict(),
            "title": self.scenario.title,
            "inputs": self.scenario.inputs(),
            "memory_course": {"moments": list(course.moments), "parts": course.parts},
        }

    def save(self, path: str | Path) -> None:
        """Write the whole run to one file, for :func:`clustersim.traces.saved.load_run`."""
        from clustersim.traces.saved import save_run

        save_run(self.timeline, path, self.prepared.topology, self.facts())


def prepare(scenario: Scenario, speed: Speed = AS_IS) -> Prepared:
    """See :meth:`clustersim.scenario.Scenario.prepare`; ``speed``: on GPUs that are so much faster."""
    topology, mesh = machine(scenario)
    row = STRATEGIES[scenario.file.strategy["kind"]]
    if row.place:
        with scenario.at("$.strategy"):
            mesh = row.place(topology, mesh, scenario.config)
    model = model_of(scenario)
    gpu, cost, notes = _cost(scenario, topology, mesh, model, speed)
    file, config = scenario.file, scenario.config
    with scenario.at("$.strategy"):
        use = memory_of(scenario, model, mesh)
    with scenario.at("$.strategy"):
        program = row.build(model, cost, mesh, config, file.run.steps, file.run.seed)
        program.check()
    with scenario.at("$.cluster.slow"):
        program = slowed(program, file.cluster.slow, mesh.workers)
    said = dict.fromkeys((*model.notes, *notes, *program.notes))
    return Prepared(scenario, topology, mesh, model, gpu, cost, use, program, tuple(said))


def machine(scenario: Scenario) -> tuple[Topology, Mesh]:
    """The topology as the scenario changes it, and a rank on every GPU in use."""
    cluster = scenario.file.cluster
    with scenario.at("$.cluster.device"):
        if cluster.device is not None:
            device(cluster.device)
    with scenario.at("$.cluster.topology"):
        found = _beside(scenario, cluster.topology)
    with scenario.at("$.cluster.fabric" if cluster.fabric else "$.cluster.topology"):
        topology = fabrics.load(found, nodes=cluster.nodes, device=cluster.device, fabric=cluster.fabric)
    for i, one in enumerate(cluster.changes):
        with scenario.at(f"$.cluster.changes[{i}]"):
            rate = None if one.bandwidth is None else float(one.bandwidth)
            topology = fabrics.change(topology, fabrics.Change(one.match, one.factor, rate, one.remove))
    with scenario.at("$.cluster.gpus_per_node"):
        return topology, fabrics.mesh(topology, nproc_per_node=cluster.gpus_per_node)


def _beside(scenario: Scenario, name: str) -> str:
    """A path starts at the scenario's own folder; a shipped name stays as it is."""
    if name.endswith((".toml", ".json")) or "/" in name:
        return str(scenario.path.parent / name)
    return name


def model_of(scenario: Scenario) -> Model:
    """What is trained."""
    spec = scenario.file.model
    choices: dict[str, Any] = dict(spec.options)
    if spec.attention is not None:
        choices["attention"] = "eager" if spec.attention == "eager" else "flash"
    choices |= {k: v for k in ("implementation", "seq_len") if (v := getattr(spec, k)) is not None}
    if spec.hf_config is not None:
        with scenario.at("$.model.hf_config"):
            return models.from_hf(scenario.path.parent / Path(spec.hf_config), **choices)
    with scenario.at("$.model.name"):
        return models.model(str(spec.name), **choices)


def _cost(
    scenario: Scenario, topology: Topology, mesh: Mesh, model: Model, speed: Speed
) -> tuple[Device, StepCost, tuple[str, ...]]:
    """The slowest device of the mesh, and what a step costs on it: a synchronous step waits for it."""
    names = dict.fromkeys(topology.node_types[n].device for n in topology.vertex_node[mesh.gpus].tolist())
    priced = []
    for name in names:
        with scenario.at("$.cluster.topology"):
            gpu = _gpu(name, topology.calibration, cores_of(topology, mesh), speed)
        priced.append((gpu, _priced(scenario, topology, mesh, model, gpu, speed)))
    gpu, cost = max(priced, key=lambda pair: float(pair[1].forward.sum() + pair[1].backward.sum()))
    notes = (f"mixed devices ({', '.join(names)}): every rank computes at the pace of {gpu.name}",)
    return gpu, cost, notes if len(priced) > 1 else ()


def _priced(scenario: Scenario, topology: Topology, mesh: Mesh, model: Model, gpu: Device, speed: Speed) -> StepCost:
    cores = cores_of(topology, mesh)
    spec, run, config = scenario.file.model, scenario.file.run, scenario.config
    with scenario.at("$.run.optimizer"):
        cost = _step_cost(
            model,
            gpu.name,
            topology.calibration,
            cores,
            speed,
            config.micro_batch_size,
            dtype=spec.dtype,
            param_dtype=config.param_dtype,
            attention_kernel=None if spec.attention == "flash" else spec.attention,
            activation_checkpointing=spec.activation_checkpointing,
            optimizer=_optimizer(scenario),
            optimizer_impl=run.optimizer_impl,
            state_dtype=config.state_dtype,
            implementation="compiled" if spec.implementation == "fused" else "eager",
        )
    # Ranks on a mixed machine serve from the first node's memory; sockets differ less than GPUs.
    cost = replace(cost, host_bandwidth=host_bandwidth(topology.node_types[0]))
    if cores:
        # A server is a process like any other.
        cost = replace(cost, overlap_slowdown=_taken(cores), host_bandwidth=gpu.stream_rate())
    return cost if run.jitter is None else replace(cost, jitter=run.jitter)


def cores_of(topology: Topology, mesh: Mesh) -> float:
    """CPU cores of each rank, a whole number or a part of one; 0 where ranks run on GPUs.

    PyTorch gives each of a node's processes the whole threads that its cores divide into.
    """
    homes = mesh.gpus[: mesh.workers].tolist()
    if any(topology.vertex_kinds[vertex] != CPU for vertex in homes):
        return 0.0
    each = mesh.world_size / mesh.n_nodes  # servers are processes, too
    share = (topology.node_types[int(topology.vertex_node[homes[0]])].cores or each) / each
    return float(int(share)) if share >= 1 else share


def _taken(cores: float) -> float:
    """Of a collective's time, what it takes from the compute of its own rank: Gloo's threads run on the same cores."""
    return 1.0 / max(1.0, cores)


def _gpu(name: str, fitted: Calibration | None, cores: float, speed: Speed) -> Device:
    """A device by name, with what is fitted to this machine, at a speed; of a CPU, a rank's cores."""
    found = device(name) if fitted is None else with_efficiencies(device(name), fitted.values("device"))
    found = faster(found, speed)
    return of_cores(found, cores) if cores else found


@kept_with_first(maxsize=128)
def _step_cost(
    model: Model,
    gpu: str,
    fitted: Calibration | None,
    cores: float,
    speed: Speed,
    micro_batch_size: int,
    **choices: Any,
) -> StepCost:
    """:func:`step_cost` on a device by name; a sweep asks for few batch sizes, many times each."""
    return step_cost(model, _gpu(gpu, fitted, cores, speed), micro_batch_size, **choices)


def _optimizer(scenario: Scenario) -> str | None:
    name = scenario.file.run.optimizer
    return None if name == "none" else name


def memory_of(scenario: Scenario, model: Model, mesh: Mesh, *, whole: bool = False) -> MemoryUse:
    """Bytes on each GPU; ``whole``: what they would be if nothing were shared."""
    spec, run, config = scenario.file.model, scenario.file.run, scenario.config
    row = STRATEGIES[scenario.file.strategy["kind"]]
    holding = row.holding(model, mesh, config) if row.holding and not whole else None
    return memory(
        model,
        micro_batch_size=config.micro_batch_size,
        dtype=spec.dtype,
        param_dtype=config.param_dtype,
        strategy=row.name if row.name in REPLICATED and not whole else "single",
        world_size=mesh.world_size,
        holding=holding,
        # 16-bit parameters whose optimizer keeps fp32 have masters, shared or not.
        master_weights=config.state_dtype == "fp32",
        activation_checkpointing=spec.activation_checkpointing,
        optimizer=_optimizer(scenario),
        optimizer_impl=run.optimizer_impl,
        gradient_as_bucket_view=getattr(config, "gradient_as_bucket_view", False),
    )
