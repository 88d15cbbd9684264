"""What ZeRO keeps on one rank: the table of the ZeRO paper, with DeepSpeed's buckets on top.

Psi parameters, N ranks, 16-bit parameters and gradients, Adam: 4 Psi + 12 Psi/N bytes for stage 1, 2 Psi + 14 Psi/N for
stage 2, 16 Psi/N for stage 3 (arXiv:1910.02054, figure 1).
"""

from __future__ import annotations

import numpy as np

from clustersim.arrays import Floats
from clustersim.holding import Holding, always, piling_up
from clustersim.mesh import Mesh
from clustersim.model import Model
from clustersim.program import DTYPE_BYTES
from clustersim.strategies.zero_config import ZeroConfig, elements
from clustersim.strategies.zero_trace import modules, persistent, visits


def holding(model: Model, mesh: Mesh, config: ZeroConfig) -> Holding:
    """Bytes of one rank at every moment of a step."""
    block, ranks, n = config.zero_optimization, mesh.world_size, len(model.layers)
    size, numel = DTYPE_BYTES[config.param_dtype], float(model.parameters)
    updated = 0.0 if config.offloads_optimizer else numel / ranks
    whole = numel if block.stage < 3 else 0.0 if config.offloads_parameters else numel / ranks
    return Holding(
        parameters=size * whole,
        updated=updated,
        masters=4.0 * updated if size < 4 else 0.0,
        state_bytes=4,
        gradients=_gradients(model, ranks, config),
        gathered=_gathered(model, config) if block.stage == 3 else always(0.0, n),
        buffers=_buffers(model, updated, config),
    )


def _gradients(model: Model, ranks: int, config: ZeroConfig) -> Floats:
    """Stage 1 keeps them whole until the step. Later stages keep a part, stage 3 in a buffer made once; a host's
    optimizer takes them away."""
    size, n = DTYPE_BYTES[config.param_dtype], len(model.layers)
    by_layer = np.array([float(size) * layer.parameters for layer in model.layers])
    if config.zero_optimization.stage == 1:
        if config.gradient_accumulation_steps > 1:
            return always(by_layer.sum(), n)
        return piling_up(by_layer)
    if config.offloads_optimizer:
        return always(0.0, n)
    if config.zero_optimization.stage == 2 and config.gradient_accumulation_steps == 1:
        return piling_up(by_layer / ranks)
    return always(by_layer.sum() / ranks, n)


def _gathered(model: Model, config: ZeroConfig) -> Floats:
    """What stage 3's coordinator has gathered while each layer runs, and what it never lets go."""
    block, n, size = config.zero_optimization, len(model.layers), DTYPE_BYTES[config.param_dtype]
    found = modules(model, block)
    held = always(size * float(persistent(model, block)), n)
    hpz = size * model.parameters / block.zero_hpz_partition_size if block.zero_hpz_partition_size > 1 else 0.0
    live = np.zeros(2 * n + 1)
    for k, visit in enumerate(visits(found, block)):
        layer = found[visit.module].layer
        moment = layer if k < len(found) else 2 * n - 1 - layer
        live[moment] = max(live[moment], size * float(visit.live))
    return held + live + hpz


def _buffers(model: Model, updated: float, config: ZeroConfig) -> Floats:
    """Buckets of contiguous gradients (two of them take turns where reductions overlap), and fp32 gradients of the
    step."""
    block, n, size = config.zero_optimization, len(model.layers), DTYPE_BYTES[config.param_dtype]
    bucket = float(size * min(elements(block.reduce_bucket_size), model.parameters))
    found = np.zeros(2 * n + 1)
    if block.stage == 3:
        found[:] = bucket
    elif block.contiguous_gradients:
        found[n : 2 * n] = bucket * (2.0 if block.overlaps else 1.0)
    if size < 4:
        found[2 * n] += 4.0 * updated
    return found
