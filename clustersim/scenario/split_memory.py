"""Memory of a split model: bytes per element of its states, and what one rank of each stage holds over a step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from clustersim.builder.gradients import EXPERT, SHARD
from clustersim.builder.stage_memory import Batch, StateBytes, stages
from clustersim.builder.zero import zero_states
from clustersim.memory import STATES
from clustersim.memory_use import MemoryUse
from clustersim.mesh import Mesh
from clustersim.parallel import ParallelConfig
from clustersim.partition.base import Stage
from clustersim.program import DTYPE_BYTES
from clustersim.scenario.replicas import replica_config, sharding_zero
from clustersim.schedules import Schedule
from clustersim.strategies.fsdp_config import FSDPConfig, accumulated_bytes, gathered_bytes

if TYPE_CHECKING:
    from clustersim.scenario import Scenario
    from clustersim.scenario.split_step import Split


BUSIEST = "the rank whose experts get most tokens"


def stage_memory(split: Split) -> tuple[MemoryUse, ...]:
    """Bytes of one rank of each stage, for the scenario's ``micro_batch_size``."""
    parallel, mesh, row, config = split.parallel, split.mesh, split.schedule, split.scenario.config
    count = len(split.orders)
    states = [state_bytes(split.scenario, parallel, mesh, stage, row) for stage in split.partition.stages]
    versions = [row.versions(rank, count) for rank in range(count)]
    deferral, keeps = parallel.deferral(config.gradient_accumulation_steps), not parallel.deallocate_pipeline_outputs
    batch = Batch(config.micro_batch_size, DTYPE_BYTES[activations(split.scenario)], deferral, keeps)
    uses = stages(split.partition, split.orders, states, batch, versions)
    uneven = mesh.size("ep") > 1 and parallel.routing.kind != "balanced" and not parallel.pad_to_capacity
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
    states, masters = 4.0 * STATES[optimizer], 4.0 if size < 4 else 0.0
    if isinstance(config, FSDPConfig):
        return _fsdp_states(config, mesh, stage, states)
    sharing = sharding_zero(scenario)
    if sharing is not None:
        return zero_states(stage, mesh.size(*SHARD), mesh.size(*EXPERT), sharing, states)
    replicated = replica_config(scenario, parallel, row)
    dense = 1.0 / mesh.size(*SHARD) if replicated.distributed else 1.0
    expert = 1.0 / mesh.size(*EXPERT) if replicated.distributed else 1.0
    gradient = float(DTYPE_BYTES[replicated.grad_dtype])
    found = StateBytes(
        (size, size), (gradient, gradient), (masters * dense, masters * expert), (states * dense, states * expert)
    )
    if parallel.framework != "deepspeed" or not replicated.distributed or size == 4:
        return found
    # Of gradients the step keeps its own, flattens them, and converts the copy to fp32 (deepspeed/runtime/zero/
    # stage_1_and_2.py, ``step``).
    return replace(
        found, reduced=(gradient * dense, gradient * expert),
        workspace=((gradient + 4.0) * dense, (gradient + 4.0) * expert),
    )  # fmt: skip


def _fsdp_states(config: FSDPConfig, mesh: Mesh, stage: Stage, states: float) -> StateBytes:
    """A pipeline gathers once a step, and adds gradients up unsharded until its last micro-batch's backward
    (torch/distributed/pipelining/stage.py, ``backward_maybe_with_nosync``). Experts are units beside their blocks."""
    dense, expert = 1.0 / mesh.size("dp_shard", "cp"), 1.0 / mesh.size(*EXPERT)
    size, whole = DTYPE_BYTES[config.orig_dtype], mesh.size("pp") > 1
    kept = size * dense, size * expert
    blocks, total = [layer.parameters for layer in stage.layers if layer.kind == "block"], stage.parameters
    experts, root = [layer.expert_parameters for layer in stage.layers], total - sum(blocks)
    # What is gathered at once: everything, or the root, the current unit and the next.
    live, routed = (
        sum(each) if whole or config.keeps else min(sum(each), 2 * max(each, default=0)) for each in (blocks, experts)
    )
    block = gathered_bytes(config, 1)
    gathered = (gathered_bytes(config, 0) * root + block * live) / total if total else 0.0
    piled = (float(accumulated_bytes(config)),) * 2 if whole or config.no_sync else kept
    return StateBytes(
        kept, piled, (0.0, 0.0), (states * dense, states * expert),
        gathered=(gathered, block * routed / sum(experts) if any(experts) else 0.0), reduced=kept,
    )  # fmt: skip
