"""What the data-parallel ranks of a split model do, Megatron's DDP, DeepSpeed's ZeRO, or FSDP2, and what they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from clustersim.core.errors import ScenarioError
from clustersim.core.memory_use import MemoryUse
from clustersim.core.mesh import Mesh
from clustersim.core.model import StepCost
from clustersim.core.optimizers import OPTIMIZERS
from clustersim.core.program import DTYPE_BYTES
from clustersim.scenario import Scenario
from clustersim.training.builder import MakeReplicas
from clustersim.training.builder.gradients import EXPERT, SHARD, ReplicaConfig, ReplicatedHooks
from clustersim.training.builder.shards import ShardHooks, experts_outside
from clustersim.training.builder.stage_memory import MicroBatchStash, StateBytes, stages
from clustersim.training.builder.unshard import MOST_ACTIVE
from clustersim.training.builder.zero import zero_hooks, zero_states
from clustersim.training.parallel import ParallelConfig
from clustersim.training.partition.base import Stage
from clustersim.training.schedules import Schedule
from clustersim.training.strategies.fsdp_config import FSDPConfig, accumulated_bytes, element_bytes, gathered_bytes
from clustersim.training.strategies.zero_config import ZeroConfig

if TYPE_CHECKING:
    from clustersim.scenario.run.split_step import Split

BUSIEST = "the rank whose experts get most tokens"


def check_replicas(scenario: Scenario, parallel: ParallelConfig) -> None:
    """Raise :class:`ScenarioError` for data parallelism that is not played beside a split model."""
    config = scenario.config
    if isinstance(config, FSDPConfig) and config.version != 2:
        raise ScenarioError("a split model shards with FSDP2; write version = 2 (at $.strategy.version)")
    if isinstance(config, FSDPConfig) and parallel.ep > 1 and (parallel.dp_replicate or 1) > 1:
        raise ScenarioError(
            f"dp_replicate = {parallel.dp_replicate} with ep = {parallel.ep}: replicas of sharded experts are not "
            "played; use dp_replicate = 1, or ep = 1 (at $.parallel.dp_replicate)"
        )
    _check_offload(scenario)
    zero = sharding_zero(scenario)
    if parallel.ep > 1 and zero:
        block = zero.zero_optimization
        why = ""
        if block.stage == 3:
            why = "DeepSpeed refuses experts that are spread with ZeRO stage 3; use stage 0, 1 or 2, or ep = 1"
        elif not block.contiguous_gradients:
            why = "DeepSpeed refuses ZeRO stage 2 over experts that are spread without contiguous_gradients = true"
        elif zero.offloads_optimizer:
            why = "offload_optimizer beside experts that are spread is not played; use device 'none'"
        if why:
            raise ScenarioError(f"ep = {parallel.ep}: {why} (at $.parallel.ep)")


def _check_offload(scenario: Scenario) -> None:
    """Raise :class:`ScenarioError` for an offload whose states would stay on the GPUs."""
    config = scenario.config
    if isinstance(config, FSDPConfig) and config.cpu_offload:
        raise ScenarioError(
            "cpu_offload = true is not played where [parallel] splits the model; leave it out (at "
            "$.strategy.cpu_offload)"
        )
    if isinstance(config, ZeroConfig) and config.offloads_optimizer and config.zero_optimization.stage == 1:
        raise ScenarioError(
            "offload_optimizer with stage = 1 is not played where [parallel] splits the model; use stage 2 or 3, or "
            "device 'none' (at $.strategy.zero_optimization.offload_optimizer)"
        )


def sharding_zero(scenario: Scenario) -> ZeroConfig | None:
    """ZeRO's knobs where its stage shares out gradients too; stages 0 and 1 are Megatron's replicas."""
    config = scenario.config
    return config if isinstance(config, ZeroConfig) and config.zero_optimization.stage > 1 else None


def replicas(split: Split, cost: StepCost) -> MakeReplicas:
    """The hooks of the data-parallel dimension."""
    scenario = split.scenario
    schedule = split.schedule
    config = split.scenario.config
    # Stages of an asynchronous schedule update at different times: their copies of a tied table drift apart.
    ends = {0, len(split.partition.stages) - 1} if schedule.synchronous else set()

    def tied(rank: int) -> int:
        """Parameters that this rank holds as another end of the pipeline does, too."""
        return split.partition.tied if rank in ends else 0

    if isinstance(config, FSDPConfig):
        return lambda stage_ops, stage, rank: ShardHooks(stage_ops, stage, cost, config, tied(rank), split.orders[rank])
    sharing = sharding_zero(scenario)
    if sharing is not None:
        return lambda stage_ops, stage, rank: zero_hooks(stage_ops, stage, cost, sharing)
    replicated = replica_config(scenario, split.parallel, schedule)
    if not schedule.synchronous:  # nobody waits for everybody
        replicated = replace(replicated, clip=False)
    return lambda stage_ops, stage, rank: ReplicatedHooks(stage_ops, stage, rank, replicated, tied(rank))


def replica_config(scenario: Scenario, parallel: ParallelConfig, schedule: Schedule) -> ReplicaConfig:
    """Megatron's DDP by its own fields, or DeepSpeed's ZeRO-0 and 1. Other stages than an interleaved schedule's have
    one bucket, which is complete in their last pass."""
    config = scenario.config
    zero = getattr(config, "zero_optimization", None)
    wide = _fp32_gradients(scenario, parallel)
    return ReplicaConfig(
        parallel=parallel,
        distributed=parallel.use_distributed_optimizer or (zero is not None and zero.stage == 1),
        aligned=parallel.align_grad_reduce and parallel.framework == "megatron" and schedule.name == "interleaved_1f1b",
        grad_dtype="fp32" if wide else config.param_dtype,
        param_dtype=config.param_dtype,
        copies=6.0 if config.param_dtype in {"fp16", "bf16"} else 0.0,
        accumulated=_accumulated(scenario, parallel, wide=wide),
    )


def _accumulated(scenario: Scenario, parallel: ParallelConfig, *, wide: bool) -> float:
    """Bytes per element of a pass that reads new gradients and the kept ones, and writes their sum."""
    if _fused(parallel) or scenario.config.gradient_accumulation_steps == 1:
        return 0.0
    size = DTYPE_BYTES[scenario.config.param_dtype]
    return float(size + 2 * (4 if wide else size))


def summed_bytes(scenario: Scenario, parallel: ParallelConfig) -> int:
    """Bytes of an element that the products of weight gradients are added to; 0 where they are not."""
    if not _fused(parallel) or isinstance(scenario.config, FSDPConfig):
        return 0
    return 4 if _fp32_gradients(scenario, parallel) else DTYPE_BYTES[scenario.config.param_dtype]


def _fused(parallel: ParallelConfig) -> bool:
    """``gradient_accumulation_fusion``, or Megatron's default."""
    fusion = parallel.gradient_accumulation_fusion
    return parallel.framework == "megatron" if fusion is None else fusion


def _fp32_gradients(scenario: Scenario, parallel: ParallelConfig) -> bool:
    """Whether gradients are kept and reduced in fp32: said, or Megatron's default for bf16 parameters."""
    if parallel.grad_reduce_in_fp32 is not None:
        return parallel.grad_reduce_in_fp32
    return scenario.config.param_dtype == "fp32" or (
        parallel.framework == "megatron" and scenario.config.param_dtype == "bf16"
    )


def stage_memory(split: Split) -> tuple[MemoryUse, ...]:
    """Bytes of one rank of each stage, for the scenario's ``micro_batch_size``."""
    parallel = split.parallel
    mesh = split.mesh
    row = split.schedule
    config = split.scenario.config
    count = len(split.orders)
    states = [state_bytes(split.scenario, parallel, mesh, stage, row) for stage in split.partition.stages]
    versions = [row.versions(rank, count) for rank in range(count)]
    deferral = parallel.deferral(config.gradient_accumulation_steps)
    keeps = not parallel.deallocate_pipeline_outputs
    element = DTYPE_BYTES[activations(split.scenario)]
    batch = MicroBatchStash(config.micro_batch_size, element, deferral, keeps, parallel.ep_overlap)
    uses = stages(split.partition, split.orders, states, batch, versions, split.gpu)
    uneven = mesh.size("ep") > 1 and not parallel.routing.even and not parallel.pad_to_capacity
    if count == 1:
        return (replace(uses[0], where=BUSIEST),) if uneven else uses
    ranks = [BUSIEST if uneven else f"rank {mesh.ranks(pp=i)[0]}" for i in range(count)]
    return tuple(replace(use, where=f"stage {i}, {ranks[i]}") for i, use in enumerate(uses))


def activations(scenario: Scenario) -> str:
    """What activations and their gradients are in: fp8 keeps them in bf16."""
    dtype = scenario.file.model.dtype
    return {"fp8": "bf16", "tf32": "fp32"}.get(dtype, dtype)


def state_bytes(scenario: Scenario, parallel: ParallelConfig, mesh: Mesh, stage: Stage, row: Schedule) -> StateBytes:
    """Bytes per element of parameters, gradients and optimizer states (MODEL_PARALLEL.md 5: 18, or 6 + 12/dp)."""
    config = scenario.config
    optimizer = None if scenario.file.run.optimizer == "none" else scenario.file.run.optimizer
    size = float(DTYPE_BYTES[config.param_dtype])
    states = 4.0 * OPTIMIZERS[optimizer].states if optimizer else 0.0
    masters = 4.0 if size < 4 else 0.0
    if isinstance(config, FSDPConfig):
        kept = OPTIMIZERS[optimizer].states if optimizer else 0.0
        return _fsdp_states(config, mesh, stage, DTYPE_BYTES[config.state_dtype] * kept)
    sharing = sharding_zero(scenario)
    if sharing is not None:
        return zero_states(stage, mesh.size(*SHARD), mesh.size(*EXPERT), sharing, states)
    replicated = replica_config(scenario, parallel, row)
    dense = 1.0 / mesh.size(*SHARD) if replicated.distributed else 1.0
    expert = 1.0 / mesh.size(*EXPERT) if replicated.distributed else 1.0
    gradient = float(DTYPE_BYTES[replicated.grad_dtype])
    rank_states = StateBytes(
        (size, size), (gradient, gradient), (masters * dense, masters * expert), (states * dense, states * expert)
    )
    if parallel.framework != "deepspeed" or not replicated.distributed or size == 4:
        return rank_states
    # Of gradients the step keeps its own, flattens them, and converts the copy to fp32 (deepspeed/runtime/zero/
    # stage_1_and_2.py, ``step``).
    return replace(
        rank_states,
        reduced=(gradient * dense, gradient * expert),
        workspace=((gradient + 4.0) * dense, (gradient + 4.0) * expert),
    )


def _fsdp_states(config: FSDPConfig, mesh: Mesh, stage: Stage, states: float) -> StateBytes:
    """A pipeline gathers once a step, and adds gradients up unsharded until its last micro-batch's backward
    (torch/distributed/pipelining/stage.py, ``backward_maybe_with_nosync``). Experts are units beside their blocks."""
    dense = 1.0 / mesh.size("dp_shard", "cp")
    expert = 1.0 / mesh.size(*EXPERT)
    size = DTYPE_BYTES[config.orig_dtype]
    pipelined = mesh.size("pp") > 1
    param_bytes = size * dense, size * expert
    blocks = [layer.parameters for layer in stage.layers if layer.kind == "block"]
    total = stage.parameters
    experts = [layer.expert_parameters for layer in stage.layers]
    root = total - sum(blocks)
    # What is gathered at once: everything (of three chunks at the most), or the root, the current unit and the next.
    live, routed = (
        sum(sizes) if pipelined or config.keeps else min(sum(sizes), 2 * max(sizes, default=0))
        for sizes in (blocks, experts)
    )
    if pipelined and len(stage.chunks) > MOST_ACTIVE:
        chunks = [[layer.parameters for layer in c.layers if layer.kind == "block"] for c in stage.chunks]
        live = sum(sorted(map(sum, chunks))[-MOST_ACTIVE:])
    outside = experts_outside(config, mesh)
    block = gathered_bytes(config, block=True)
    gathered = (gathered_bytes(config, block=False) * root + block * live) / total if total else 0.0
    adds_up = pipelined or config.no_sync
    # A unit's gradient is in the parameters' type before it is added up, or copied for its reduction, which runs beside
    # the unit behind it.
    half, wire, _ = element_bytes(config)
    unit = max(
        (layer.parameters + layer.expert_parameters * (not outside) for layer in stage.layers if layer.kind == "block"),
        default=0,
    )
    accumulated = float(accumulated_bytes(config))
    buckets = float(half * unit if adds_up else (half + wire) * unit + half * root)
    return StateBytes(
        param_bytes,
        (accumulated, size if outside else accumulated) if adds_up else param_bytes,
        (0.0, 0.0),
        (states * dense, states * expert),
        gathered=(gathered, block * routed / sum(experts) if any(experts) and not outside else 0.0),
        buckets=buckets,
        reduced=param_bytes,
    )
