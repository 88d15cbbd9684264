"""The parts of a scenario, each from the file alone: machine and ranks, model, costs of a step, memory."""

from __future__ import annotations

from dataclasses import replace
from math import gcd, inf
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from clustersim.cluster import files as fabrics
from clustersim.collectives import fitted as fitting
from clustersim.collectives.costs import reported_nic_rate
from clustersim.collectives.expert_kernels import posted_by_host
from clustersim.collectives.nccl.settings import checked
from clustersim.core import gpu_file
from clustersim.core.arrays import Ints
from clustersim.core.calibrated import Calibration
from clustersim.core.device import Device, Speed, device, faster, of_cores, paced, with_efficiencies
from clustersim.core.errors import ScenarioError
from clustersim.core.memo import kept_with_first
from clustersim.core.memory_rates import host_bandwidth
from clustersim.core.memory_use import MemoryUse
from clustersim.core.mesh import Mesh
from clustersim.core.model import Model, StepCost
from clustersim.core.optimizers import OPTIMIZERS
from clustersim.core.texts import Table, shown, there
from clustersim.core.topology import CPU, Topology
from clustersim.model import named_models as models
from clustersim.model.base import TransformerShape
from clustersim.model.hf import MISSING, from_hf
from clustersim.model.seconds.base import Execution
from clustersim.model.seconds.host import pace_of
from clustersim.model.seconds.step import step_cost
from clustersim.model.traced import read_traced
from clustersim.scenario import Scenario
from clustersim.scenario.file.incident_table import KINDS
from clustersim.scenario.file.schema import WHOLE_STEP
from clustersim.scenario.file.splitting import MEGATRON, split, splits
from clustersim.scenario.run.hosts import CopyRates, copy_rates_of
from clustersim.scenario.run.misplaced import misplaced
from clustersim.scenario.run.trained import as_trained, compute_dtype, refuse_split
from clustersim.training.memory import Training, kept_by_layer, memory, types_of
from clustersim.training.parallel import ModelShape


def machine(scenario: Scenario) -> tuple[Topology, Mesh]:
    """The topology as the scenario changes it, and a rank on every GPU in use."""
    cluster = scenario.file.cluster
    with scenario.at("$.cluster.device"):
        gpu = gpu_of(scenario)
    with scenario.at("$.cluster.topology"):
        machine_file = located(scenario, "cluster.topology", cluster.topology)
    with scenario.at("$.cluster.measured"):
        numbers = fabrics.numbers_of(cluster.measured, "[cluster]") if cluster.measured else ()
    with scenario.at("$.cluster.fabric" if cluster.fabric else "$.cluster.topology"):
        topology = fitting.load(machine_file, cluster.nodes, gpu, cluster.fabric, numbers)
    for i, change in enumerate(cluster.changes):
        if change.timed:
            continue
        with scenario.at(f"$.cluster.changes[{i}]"):
            rate = None if change.bandwidth is None else float(change.bandwidth)
            topology = fabrics.change(topology, fabrics.Change(change.match, change.factor, rate, change.remove))
    for i, incident in enumerate(scenario.file.incident):
        with scenario.at(f"$.incident[{i}].{KINDS[incident.kind].where or 'kind'}"):
            topology = misplaced(topology, incident)
    with scenario.at("$.run.nccl_environment"):
        topology = checked(scenario.file.run.nccl_environment).on(topology)
    with scenario.at("$.cluster.gpus_per_node"):
        return topology, fabrics.mesh(topology, nproc_per_node=cluster.gpus_per_node)


def gpu_of(scenario: Scenario) -> str | Device | None:
    """The GPU that the scenario puts into its machine: a shipped one's name, or one that a file describes."""
    name = scenario.file.cluster.device
    if name is None:
        return None
    if gpu_file.is_own(name):
        return gpu_file.load(located(scenario, "cluster.device", name))
    device(name)
    return name


def placed(scenario: Scenario) -> tuple[Topology, Mesh]:
    """The machine with the ranks where the strategy has them, servers beside workers, in the dimensions of
    ``[parallel]``."""
    topology, mesh = machine(scenario)
    place = scenario.strategy.place
    with scenario.at("$.strategy"):
        ranks = mesh if place is None else place(topology, mesh, scenario.config)
    parallel = scenario.file.parallel
    return topology, ranks if parallel is None else split(scenario, parallel, ranks, shape_of(scenario))


def located(scenario: Scenario, field: str, name: str) -> str:
    """Where the file that a field names is. A shipped name stays as it is; a path starts at the scenario's own folder,
    and one that was set from outside the file at the working folder, if it is there. Raises :class:`ScenarioError`."""
    if field == "cluster.topology" and not name.endswith(".toml") and "/" not in name:
        return name
    own = scenario.path.parent / name
    changed = any(field == key or field.startswith(f"{key}.") for key in scenario.changes)
    if changed and there(name):
        return name
    if changed and not there(own):
        places = f"neither in the working folder nor beside {scenario.path.name}"
        raise ScenarioError(f"no file {shown(name)}: {places} (at $.{field})")
    return str(own)


def model_of(scenario: Scenario) -> Model:
    """What is trained, as packed, with what of it is frozen and adapters beside that."""
    return as_trained(scenario, _built(scenario))


def left_out(scenario: Scenario) -> tuple[str, ...]:
    """Notes on what the model's config does not say, and what is taken in its place."""
    return tuple(note for note in model_of(scenario).notes if note.startswith(MISSING))


def _built(scenario: Scenario) -> Model:
    """The model as its file has it."""
    spec = scenario.file.model
    if spec.file is not None:
        return _traced(scenario, spec.file)
    choices: Table = dict(spec.options)
    if spec.attention is not None:
        choices["attention"] = "eager" if spec.attention == "eager" else "flash"
    choices |= {k: v for k in ("implementation", "seq_len") if (v := getattr(spec, k)) is not None}
    if spec.hf_config is not None:
        with scenario.at("$.model.hf_config"):
            return from_hf(Path(located(scenario, "model.hf_config", spec.hf_config)), **choices)
    with scenario.at("$.model.name"):
        return models.model(str(spec.name), **choices)


def _traced(scenario: Scenario, name: str) -> Model:
    """The model of a file, in the types that the scenario trains in."""
    spec = scenario.file.model
    with scenario.at("$.model.file"):
        path = Path(located(scenario, "model.file", name))
        config = scenario.config
        model = read_traced(path, types_of(spec.dtype, config.param_dtype), config.micro_batch_size)
    scopes = [scope for scope in scenario.file.run.cuda_graph if scope != WHOLE_STEP]
    if scopes:
        with scenario.at("$.run.cuda_graph"):
            raise ScenarioError(
                f"cuda_graph = {scopes}: {name} was traced, and its modules are not Megatron's; full_iteration is known"
            )
    if spec.seq_len not in {None, model.seq_len}:
        with scenario.at("$.model.seq_len"):
            raise ScenarioError(
                f"seq_len = {spec.seq_len}: {name} was traced with {model.seq_len}; leave it out, or trace it again"
            )
    return model


def shape_of(scenario: Scenario) -> ModelShape:
    """The model's sizes, which degrees of parallelism must divide."""
    model = model_of(scenario)
    transformer = transformer_of(scenario)
    if transformer is None:
        layers = model.n_blocks or len(model.layers)
        biased = any("relative_attention_bias" in tensor.name for layer in model.layers for tensor in layer.tensors)
        return ModelShape(layers, model.seq_len, model.hidden, model.heads, model.heads, biased=biased)
    experts = transformer.experts
    return ModelShape(
        transformer.layers,
        model.seq_len,
        transformer.d_model,
        gcd(*(block.heads for block in transformer.attentions)),
        transformer.kv_heads,
        ffn=0 if experts and experts.are_in(0) else gcd(*transformer.widths) or transformer.d_ff,
        experts=experts.count if experts else 0,
        moe_ffn=experts.width if experts else 0,
        shared_ffn=experts.shared if experts else 0,
        kv_heads_of=tuple(b.kv_heads for b in transformer.attentions if b.kv_heads != transformer.kv_heads),
    )


def transformer_of(scenario: Scenario) -> TransformerShape | None:
    """The shape that the model was built from; None for one that comes from no config.json."""
    spec = scenario.file.model
    if spec.file is not None:
        return None
    name = located(scenario, "model.hf_config", spec.hf_config) if spec.hf_config else str(spec.name)
    return models.shape(Path(name) if spec.hf_config else name, dict(spec.options))


def cost_of(scenario: Scenario, topology: Topology, mesh: Mesh, model: Model, speed: Speed) -> tuple[Device, StepCost]:
    """The slowest device of the mesh, and what a step costs on it: a synchronous step waits for it."""
    slowest = kinds_of(scenario, topology, mesh, model, speed)[0]
    return slowest.device, slowest.cost


class DeviceKind(msgspec.Struct, frozen=True, eq=False):
    """GPUs of one kind: the ``device``, what a step ``cost``s on it, and the ``ranks`` that drive one, ascending."""

    device: Device
    cost: StepCost
    ranks: Ints


def kinds_of(scenario: Scenario, topology: Topology, mesh: Mesh, model: Model, speed: Speed) -> list[DeviceKind]:
    """Every kind of device of the mesh, and what a step costs on it, the slowest first."""
    types = [topology.node_types[n] for n in topology.vertex_node[mesh.gpus].tolist()]
    name_of = np.array([kind.device for kind in types])
    rates = copy_rates_of(scenario, topology, mesh)
    kinds = []
    for name, kind in {kind.device: kind for kind in types}.items():
        with scenario.at("$.cluster.topology"):
            card = _Card(kind.gpu, topology.calibration, cores_of(topology, mesh), speed, *factors_of(scenario))
            gpu = card.device
        cost = _priced(scenario, topology, model, card, rates)
        kinds.append(DeviceKind(gpu, cost, np.flatnonzero(name_of == name)))
    return sorted(kinds, key=lambda kind: -float(kind.cost.forward.sum() + kind.cost.backward.sum()))


def _priced(scenario: Scenario, topology: Topology, model: Model, card: _Card, rates: CopyRates) -> StepCost:
    run = scenario.file.run
    if scenario.file.model.channels_last and not any(k.kind == "conv" for layer in model.layers for k in layer.kernels):
        with scenario.at("$.model.channels_last"):
            raise ScenarioError(f"channels_last: {model.name} has no convolutions; leave it out")
    with scenario.at("$.run.optimizer"):
        cost = _step_cost(model, card, scenario.config.micro_batch_size, execution_of(scenario))
    # Ranks on a mixed machine serve from the first node's memory; sockets differ less than GPUs.
    node = topology.node_types[0]
    cost = replace(
        cost,
        host_bandwidth=host_bandwidth(node),
        host_pace=pace_of(node),
        host_posts=posted_by_host(node.net, reported_nic_rate(topology, 0)),
        host_copy_rates=rates,
    )
    if card.cores:
        # Gloo's threads run on the cores of their own rank's compute; a server is a process like any other.
        taken = 1.0 / max(1.0, card.cores)
        cost = replace(cost, overlap_slowdown=taken, host_bandwidth=card.device.stream_rate())
    cost = _offloading(scenario, model, cost)
    jitter = run.jitter if run.variation is None else 0.0
    return cost if jitter is None else replace(cost, jitter=jitter)


def _offloading(scenario: Scenario, model: Model, cost: StepCost) -> StepCost:
    """The costs with what activations take on their way to the host and back."""
    rate = scenario.file.model.activation_offloading
    if rate is None:
        return cost
    with scenario.at("$.model.activation_offloading"):
        if not scenario.strategy.partly:
            raise ScenarioError(f"activation_offloading is not played with strategy {scenario.strategy.name!r}")
        refuse_split(scenario, "activation_offloading")
        rates = cost.host_copy_rates if rate == inf else (float(rate), float(rate))
        return replace(cost, offloaded=kept_by_layer(model, _training(scenario)), offload_rates=rates)


def execution_of(scenario: Scenario) -> Execution:
    """How a scenario's step is computed."""
    spec = scenario.file.model
    run = scenario.file.run
    config = scenario.config
    return Execution(
        dtype=spec.dtype,
        param_dtype=compute_dtype(scenario),
        attention_kernel=None if spec.attention == "flash" else spec.attention,
        activation_checkpointing=spec.activation_checkpointing,
        early_stop=stops_early(scenario),
        optimizer=_optimizer(scenario),
        optimizer_impl=run.optimizer_impl,
        implementation="compiled" if spec.implementation in {"megatron", "fused"} else "eager",
        channels_last=spec.channels_last,
        state_dtype=config.state_dtype,
        float8_recipe=spec.float8_recipe,
        layer_time=layer_time_of(scenario),
        graphed=WHOLE_STEP in run.cuda_graph,
        transformer_engine=scenario.file.parallel is not None and scenario.file.parallel.framework == MEGATRON,
    )


def stops_early(scenario: Scenario) -> bool:
    """Whether recomputation ends with what backward needs: FSDP's checkpoint_wrapper is not reentrant, and a compiled
    graph has nothing that nobody reads; frameworks that split models have checkpoints of their own."""
    spec, parallel = scenario.file.model, scenario.file.parallel
    if spec.early_stop is not None:
        return spec.early_stop
    framework = scenario.file.strategy.get("framework") if parallel is None else parallel.framework
    if scenario.strategy.name == "fsdp":
        return framework != "megatron"
    return spec.implementation == "fused" and framework in {None, "torchtitan"}


def layer_time_of(scenario: Scenario) -> float | None:
    """[s] that the host takes for a layer's forward and backward, where that was measured."""
    measured = scenario.file.measured
    return None if measured is None or measured.layer_time is None else float(measured.layer_time)


def factors_of(scenario: Scenario) -> tuple[float, float]:
    """How many times as long as usual kernels and the host's calls take, by what was measured."""
    fit = scenario.fit
    return (1.0, 1.0) if fit is None else (fit.kernels, fit.host)


def cores_of(topology: Topology, mesh: Mesh) -> float:
    """CPU cores of each rank, a whole number or a part of one; 0 where ranks run on GPUs.

    PyTorch gives each of a node's processes the whole threads that its cores divide into.
    """
    homes = mesh.gpus[: mesh.workers].tolist()
    if any(topology.vertex_kinds[vertex] != CPU for vertex in homes):
        return 0.0
    processes = mesh.world_size / mesh.n_nodes  # servers are processes, too
    share = (topology.node_types[int(topology.vertex_node[homes[0]])].cores or processes) / processes
    return float(int(share)) if share >= 1 else share


class _Card(NamedTuple):
    """A device, with what is fitted to its machine, at a speed; of a CPU, the cores of a rank, else 0.

    kernels, host : how many times as long as usual its kernels and its host's calls take.
    """

    shipped: Device
    fitted: Calibration | None
    cores: float
    speed: Speed
    kernels: float = 1.0
    host: float = 1.0

    @property
    def device(self) -> Device:
        """It as it runs here."""
        gpu = self.shipped
        if self.fitted is not None:
            gpu = with_efficiencies(gpu, self.fitted.values("device"))
        gpu = paced(faster(gpu, self.speed), self.kernels, self.host)
        return of_cores(gpu, self.cores) if self.cores else gpu


@kept_with_first(maxsize=128)
def _step_cost(model: Model, card: _Card, micro_batch_size: int, how: Execution) -> StepCost:
    """:func:`step_cost` on a device; a sweep asks for few batch sizes, many times each."""
    return step_cost(model, card.device, micro_batch_size, how)


def _optimizer(scenario: Scenario) -> str | None:
    """Its name. Raises :class:`ScenarioError` for one that is not played with the strategy."""
    name = scenario.file.run.optimizer
    row = OPTIMIZERS.get(name)
    if row is not None and row.kinds:
        kind = scenario.strategy.name
        away = scenario.config.offloads_optimizer
        if kind not in row.kinds or splits(scenario) or away:
            place_text = (
                "on the host" if away else "where [parallel] splits the model" if splits(scenario) else f"with {kind!r}"
            )
            raise ScenarioError(
                f"optimizer {name!r} is not played {place_text}; it is with strategies "
                f"{', '.join(row.kinds)}, or use 'adamw' (at $.run.optimizer)"
            )
    return None if name == "none" else name


def smallest_card(topology: Topology, mesh: Mesh) -> Device:
    """The GPU of the ranks; the one with least memory where node types are mixed."""
    cards: dict[str, Device] = {}
    for node in np.unique(topology.vertex_node[mesh.gpus[: mesh.workers]]).tolist():
        kind = topology.node_types[node]
        cards[kind.device] = kind.gpu
    return min((cards[name] for name in sorted(cards)), key=lambda card: card.memory_bytes)


def memory_of(scenario: Scenario, model: Model, topology: Topology, mesh: Mesh, *, whole: bool = False) -> MemoryUse:
    """Bytes on each GPU, or of each process on CPU cores, which has no driver's context; ``whole``: what they would be
    if nothing were shared."""
    training = replace(
        _training(scenario),
        holding=None if whole else scenario.strategy.holding(model, mesh, scenario.config),
        gpu=smallest_card(topology, mesh),
    )
    use = replace(memory(model, training), communicates=mesh.workers > 1)
    return replace(use, context=0.0, communicates=False) if cores_of(topology, mesh) else use


def _training(scenario: Scenario) -> Training:
    """What of a scenario decides the memory of its steps, beside what its strategy holds."""
    spec = scenario.file.model
    run = scenario.file.run
    config = scenario.config
    return Training(
        micro_batch_size=config.micro_batch_size,
        dtype=spec.dtype,
        param_dtype=compute_dtype(scenario),
        trained_dtype=config.param_dtype,
        # 16-bit parameters whose optimizer keeps fp32 have masters, shared or not.
        master_weights=config.state_dtype == "fp32",
        activation_checkpointing=spec.activation_checkpointing,
        optimizer=_optimizer(scenario),
        optimizer_impl=run.optimizer_impl,
        compiled=spec.implementation == "fused",
        offloaded=spec.activation_offloading is not None,
    )
