"""A scenario with ``[parallel]``: what each stage holds, the step it plays, and the memory of every stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from clustersim.builder import MakeReplicas, Recipe, build
from clustersim.builder.gradients import EXPERT, SHARD, ReplicaConfig, Replicated
from clustersim.builder.laying import Here, Laid
from clustersim.builder.shards import Sharded
from clustersim.builder.stage_memory import StateBytes, stages, worst
from clustersim.builder.walk import Replicas
from clustersim.compute import setting
from clustersim.compute.local import LocalCost
from clustersim.device import Device
from clustersim.errors import ScenarioError
from clustersim.memory import STATES, MemoryUse
from clustersim.mesh import Mesh
from clustersim.model import Model, StepCost
from clustersim.parallel import ParallelConfig, recompute
from clustersim.partition import partition
from clustersim.partition.base import Partition, Stage, Work
from clustersim.partition.routing import read_histogram
from clustersim.program import DTYPE_BYTES, Program
from clustersim.schedules import Costs, Orders, Schedule, beside, schedule
from clustersim.strategies.fsdp_config import FSDPConfig

if TYPE_CHECKING:
    from clustersim.scenario import Scenario

HALF = frozenset({"fp16", "bf16"})


@dataclass(frozen=True, eq=False)
class Split:
    """A split model, ready to be played.

    Parameters
    ----------
    partition : what each stage holds. schedule, orders : what each pipeline rank runs in a step.
    memory : of one rank of each stage.
    """

    partition: Partition
    schedule: Schedule
    orders: Orders
    memory: tuple[MemoryUse, ...]

    @property
    def worst(self) -> int:
        """The stage that needs most memory."""
        return worst(self.memory)


def split_of(
    scenario: Scenario, parallel: ParallelConfig, mesh: Mesh, model: Model, gpu: Device | None = None
) -> Split:
    """Partition, schedule and memory. Raises :class:`ScenarioError` for what cannot be split so.

    ``gpu`` : whose kernel times a schedule that is found by search reckons with; None for equal F, I and W.
    """
    repeated = recompute(parallel, scenario.file.model.activation_checkpointing)
    row = schedule(parallel.schedule_name(model.n_blocks or len(model.layers)))
    parts = partition(
        model, parallel, repeated, placement=row.placement, nproc_per_node=mesh.nproc_per_node,
        histograms=_histograms(scenario, parallel),
    )  # fmt: skip
    config, chunks = scenario.config, len(parts.stages[0].chunks)
    options = _options(row, parallel)
    if gpu is not None and any(option.name == "costs" for option in row.options):
        options["costs"] = _chunk_costs(parts, _local(scenario, gpu))
    if not row.synchronous:
        options["steps"] = scenario.file.run.steps
    orders = row.order(mesh.size("pp"), chunks, config.gradient_accumulation_steps, **options)
    if parallel.ep_overlap:
        orders = tuple(beside(order) for order in orders)
    use = stages(parts, orders, _states(scenario, parallel, mesh, parts), config.micro_batch_size, _element(scenario))
    return Split(parts, row, orders, tuple(replace(one, where=f"stage {i}") for i, one in enumerate(use)))


def program_of(
    scenario: Scenario, parallel: ParallelConfig, split: Split, mesh: Mesh, gpu: Device, cost: StepCost
) -> Program:
    """The Program of a split model."""
    recipe = Recipe(
        split.partition,
        split.orders,
        split.schedule.placement,
        _messages(parallel, split.schedule),
        _activations(scenario),
        _replicas(scenario, parallel, split, cost),
        0 if split.schedule.synchronous else scenario.config.gradient_accumulation_steps,
        split.schedule.accumulates,
    )
    run = scenario.file.run
    program = build(recipe, _local(scenario, gpu), cost, mesh, run.steps, run.seed)
    return replace(program, notes=(_told(split, parallel, mesh), *_ignored(parallel), *program.notes))


def _options(row: Schedule, parallel: ParallelConfig) -> dict[str, Any]:
    """Of ``[parallel]``'s fields, those that are this schedule's options and are said."""
    fields = {name: getattr(parallel, name) for name in parallel.__struct_fields__}
    fields["overlap_moe_expert_parallel_comm"] = parallel.ep_overlap
    return {option.name: fields[option.name] for option in row.options if fields.get(option.name) is not None}


def _histograms(scenario: Scenario, parallel: ParallelConfig) -> tuple[tuple[float, ...], ...]:
    """Measured loads of experts, where routing is read from a file."""
    file = parallel.routing.file
    return read_histogram(scenario.path.parent / file) if file else ()


def _chunk_costs(parts: Partition, local: LocalCost) -> Costs:
    """Seconds of F, I and W of the middle chunk, which has neither embedding nor head."""
    chunks = sorted((chunk for stage in parts.stages for chunk in stage.chunks), key=lambda chunk: chunk.stage)
    spent = {"F": 0.0, "R": 0.0, "I": 0.0, "W": 0.0}
    for layer in chunks[len(chunks) // 2].layers:
        for item in (*layer.forward, *layer.backward):
            if isinstance(item, Work):
                spent[item.part] += local.work(((item.kernels, item.part),), dense=layer.kind == "block").seconds
    return Costs(spent["F"], spent["I"] + spent["R"], spent["W"])


def _messages(parallel: ParallelConfig, row: Schedule) -> str:
    """How stages wait for each other: as the framework's plain, interleaved or runtime schedule does."""
    if parallel.framework == "torchtitan" or row.name not in {"1f1b", "gpipe", "interleaved_1f1b"}:
        return "overlapped"
    if row.name == "interleaved_1f1b":
        return "overlapped" if parallel.overlap_p2p_communication else "batched"
    return "blocking"


def _activations(scenario: Scenario) -> str:
    """What activations and their gradients are in: fp8 keeps them in bf16."""
    dtype = scenario.file.model.dtype
    return {"fp8": "bf16", "tf32": "fp32"}.get(dtype, dtype)


def _element(scenario: Scenario) -> int:
    return DTYPE_BYTES[_activations(scenario)]


def _local(scenario: Scenario, gpu: Device) -> LocalCost:
    spec, run, config = scenario.file.model, scenario.file.run, scenario.config
    with scenario.at("$.model.dtype"):
        where = setting(
            gpu,
            spec.dtype,
            autocast=spec.dtype in {*HALF, "fp8"} and config.param_dtype == "fp32",
            attention_kernel=None if spec.attention == "flash" else spec.attention,
            implementation="compiled" if spec.implementation == "fused" else "eager",
        )
    optimizer = None if run.optimizer == "none" else run.optimizer
    return LocalCost(where, config.micro_batch_size, optimizer, run.optimizer_impl, 4)


# --- data parallelism -----------------------------------------------------------------------------------------------


def _replicas(scenario: Scenario, parallel: ParallelConfig, split: Split, cost: StepCost) -> MakeReplicas:
    config = scenario.config
    # Stages of an asynchronous schedule update at different times: their copies of a tied table drift apart.
    ends = {0, len(split.partition.stages) - 1} if split.schedule.synchronous else set()

    def tied(rank: int) -> int:
        return split.partition.tied if rank in ends else 0

    if isinstance(config, FSDPConfig):
        if config.version != 2:
            raise ScenarioError("a split model shards with FSDP2; write version = 2 (at $.strategy.version)")

        def shard(here: Here, laid: Laid, stage: Stage, rank: int) -> Replicas:
            return Sharded(here, laid, stage, cost, config, tied(rank))

        return shard
    replicated = _replica_config(scenario, parallel)
    if not split.schedule.synchronous:  # nobody waits for everybody
        replicated = replace(replicated, clip=False)

    def replicate(here: Here, laid: Laid, stage: Stage, rank: int) -> Replicas:
        return Replicated(here, laid, stage, rank, replicated, tied(rank))

    return replicate


def _replica_config(scenario: Scenario, parallel: ParallelConfig) -> ReplicaConfig:
    """Megatron's DDP by its own fields, or DeepSpeed's ZeRO-0 and 1."""
    config = scenario.config
    zero = getattr(config, "zero_optimization", None)
    if zero is not None and zero.stage > 1:
        raise ScenarioError(
            f"ZeRO stage {zero.stage} beside [parallel] is not played; use stage 1, or strategy 'fsdp' "
            "(at $.strategy.zero_optimization.stage)"
        )
    wide = _fp32_gradients(scenario, parallel)
    half = config.param_dtype in HALF
    return ReplicaConfig(
        distributed=parallel.use_distributed_optimizer or (zero is not None and zero.stage == 1),
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_size=parallel.ddp_bucket_size,
        grad_dtype="fp32" if wide else config.param_dtype,
        param_dtype=config.param_dtype,
        copies=6.0 if half else 0.0,
    )


def _fp32_gradients(scenario: Scenario, parallel: ParallelConfig) -> bool:
    """Whether gradients are kept and reduced in fp32: said, or Megatron's default for bf16 parameters."""
    if parallel.grad_reduce_in_fp32 is not None:
        return parallel.grad_reduce_in_fp32
    return scenario.config.param_dtype == "fp32" or (
        parallel.framework == "megatron" and scenario.config.param_dtype == "bf16"
    )


# --- memory ---------------------------------------------------------------------------------------------------------


def _states(scenario: Scenario, parallel: ParallelConfig, mesh: Mesh, parts: Partition) -> StateBytes:
    """Bytes per element of parameters, gradients and optimizer states (MODEL_PARALLEL.md 5: 18, or 6 + 12/dp)."""
    config = scenario.config
    optimizer = None if scenario.file.run.optimizer == "none" else scenario.file.run.optimizer
    size = float(DTYPE_BYTES[config.param_dtype])
    states, masters = 4.0 * STATES[optimizer], 4.0 if size < 4 else 0.0
    if isinstance(config, FSDPConfig):
        shard = 1.0 / mesh.size("dp_shard", "cp")
        kept = DTYPE_BYTES[config.orig_dtype] * shard
        pipelined = mesh.size("pp") > 1 or config.keeps
        gathered = size if pipelined else size * _two_units(parts)
        pair = (states * shard, states * shard)
        return StateBytes((kept, kept), (kept, kept), (0.0, 0.0), pair, (gathered, gathered))
    replicated = _replica_config(scenario, parallel)
    dense = 1.0 / mesh.size(*SHARD) if replicated.distributed else 1.0
    expert = 1.0 / mesh.size(*EXPERT) if replicated.distributed else 1.0
    gradient = float(DTYPE_BYTES[replicated.grad_dtype])
    return StateBytes(
        (size, size), (gradient, gradient), (masters * dense, masters * expert), (states * dense, states * expert)
    )


def _two_units(parts: Partition) -> float:
    """Of a stage's parameters, the share that FSDP has gathered at once: the root, the current unit and the next."""
    layers = parts.stages[0].layers
    root = sum(layer.parameters for layer in layers if layer.kind != "block")
    block = max((layer.parameters for layer in layers if layer.kind == "block"), default=0)
    whole = sum(layer.parameters for layer in layers)
    return min(1.0, (root + 2 * block) / whole) if whole else 0.0


UNMODELLED = (
    "variable_seq_lengths",
    "defer_embedding_wgrad_compute",
    "num_microbatches_with_partial_activation_checkpoints",
    "delay_wgrad_compute",
    "sp_overlap_comm",
)
"""Fields of ``[parallel]`` that are read and change nothing yet."""


def _ignored(parallel: ParallelConfig) -> tuple[str, ...]:
    """What was asked for and is not modelled, so that nobody believes it was."""
    said = [name for name in UNMODELLED if getattr(parallel, name) not in {None, False}]
    return (f"parallel: {', '.join(said)} read, but not modelled: the step is as without",) if said else ()


def _told(split: Split, parallel: ParallelConfig, mesh: Mesh) -> str:
    """The split in words."""
    degrees = " x ".join(f"{name} {mesh.size(name)}" for name in ("tp", "cp", "pp", "dp") if mesh.size(name) > 1)
    experts = f", experts ep {mesh.size('ep')} x etp {mesh.size('etp')}" if mesh.size("ep") > 1 else ""
    pipeline = f"; {split.schedule.name}, {len(split.partition.stages[0].chunks)} chunk(s) a rank" * (parallel.pp > 1)
    return f"parallel: {degrees or 'one rank'}{experts}{pipeline}"
