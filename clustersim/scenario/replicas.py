"""What the data-parallel ranks of a split model do: Megatron's DDP, DeepSpeed's ZeRO, or FSDP2."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from clustersim.builder import MakeReplicas
from clustersim.builder.gradients import ReplicaConfig, Replicated
from clustersim.builder.shards import Sharded
from clustersim.builder.zero import zero_hooks
from clustersim.errors import ScenarioError
from clustersim.model import StepCost
from clustersim.parallel import ParallelConfig
from clustersim.program import DTYPE_BYTES
from clustersim.schedules import Schedule
from clustersim.strategies.fsdp_config import FSDPConfig
from clustersim.strategies.zero_config import ZeroConfig

if TYPE_CHECKING:
    from clustersim.scenario import Scenario
    from clustersim.scenario.split_step import Split


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
    zero = sharding_zero(scenario)
    if parallel.ep > 1 and zero:
        block, why = zero.zero_optimization, ""
        if block.stage == 3:
            why = "DeepSpeed refuses experts that are spread with ZeRO stage 3; use stage 0, 1 or 2, or ep = 1"
        elif not block.contiguous_gradients:
            why = "DeepSpeed refuses ZeRO stage 2 over experts that are spread without contiguous_gradients = true"
        elif zero.offloads_optimizer:
            why = "offload_optimizer beside experts that are spread is not played; use device 'none'"
        if why:
            raise ScenarioError(f"ep = {parallel.ep}: {why} (at $.parallel.ep)")


def sharding_zero(scenario: Scenario) -> ZeroConfig | None:
    """ZeRO's knobs where its stage shares out gradients too; stages 0 and 1 are Megatron's replicas."""
    config = scenario.config
    return config if isinstance(config, ZeroConfig) and config.zero_optimization.stage > 1 else None


def replicas(split: Split, cost: StepCost) -> MakeReplicas:
    """The hooks of the data-parallel dimension."""
    scenario, schedule, config = split.scenario, split.schedule, split.scenario.config
    # Stages of an asynchronous schedule update at different times: their copies of a tied table drift apart.
    ends = {0, len(split.partition.stages) - 1} if schedule.synchronous else set()

    def tied(rank: int) -> int:
        return split.partition.tied if rank in ends else 0

    if isinstance(config, FSDPConfig):
        return lambda here, stage, rank: Sharded(here, stage, cost, config, tied(rank))
    sharing = sharding_zero(scenario)
    if sharing is not None:
        return lambda here, stage, rank: zero_hooks(here, stage, cost, sharing)
    replicated = replica_config(scenario, split.parallel, schedule)
    if not schedule.synchronous:  # nobody waits for everybody
        replicated = replace(replicated, clip=False)
    return lambda here, stage, rank: Replicated(here, stage, rank, replicated, tied(rank))


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
    said = parallel.gradient_accumulation_fusion
    return parallel.framework == "megatron" if said is None else said


def _fp32_gradients(scenario: Scenario, parallel: ParallelConfig) -> bool:
    """Whether gradients are kept and reduced in fp32: said, or Megatron's default for bf16 parameters."""
    if parallel.grad_reduce_in_fp32 is not None:
        return parallel.grad_reduce_in_fp32
    return scenario.config.param_dtype == "fp32" or (
        parallel.framework == "megatron" and scenario.config.param_dtype == "bf16"
    )
