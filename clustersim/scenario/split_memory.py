"""Memory of a split model: bytes per element of its states, and what one rank of each stage holds over a step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from clustersim.builder.gradients import EXPERT, SHARD
from clustersim.builder.stage_memory import StateBytes, stages
from clustersim.builder.zero import zero_states
from clustersim.memory import STATES, MemoryUse
from clustersim.mesh import Mesh
from clustersim.parallel import ParallelConfig
from clustersim.partition.base import Partition
from clustersim.program import DTYPE_BYTES
from clustersim.scenario.replicas import replica_config, sharding_zero
from clustersim.schedules import Orders, Schedule
from clustersim.strategies.fsdp_config import FSDPConfig

if TYPE_CHECKING:
    from clustersim.scenario import Scenario


def stage_memory(
    scenario: Scenario, parallel: ParallelConfig, mesh: Mesh, parts: Partition, row: Schedule, orders: Orders
) -> tuple[MemoryUse, ...]:
    """Bytes of one rank of each stage, for the scenario's ``micro_batch_size``."""
    states = _states(scenario, parallel, mesh, parts)
    versions = [row.versions(rank, len(orders)) for rank in range(len(orders))]
    element = DTYPE_BYTES[activations(scenario)]
    config = scenario.config
    deferral = parallel.deferral(config.gradient_accumulation_steps)
    uses = stages(parts, orders, states, config.micro_batch_size, element, versions, deferral)
    return tuple(replace(use, where=f"stage {i}" if len(uses) > 1 else "") for i, use in enumerate(uses))


def activations(scenario: Scenario) -> str:
    """What activations and their gradients are in: fp8 keeps them in bf16."""
    dtype = scenario.file.model.dtype
    return {"fp8": "bf16", "tf32": "fp32"}.get(dtype, dtype)


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
    sharing = sharding_zero(scenario)
    if sharing is not None:
        return zero_states(parts.stages[0], mesh.size(*SHARD), sharing, states)
    replicated = replica_config(scenario, parallel)
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
