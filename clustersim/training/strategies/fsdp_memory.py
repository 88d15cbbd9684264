"""What FSDP keeps on one rank, layer by layer: its shard, the units it has borrowed, and gradients not yet reduced.

Units in flight follow from who waits for whom in :mod:`clustersim.training.strategies.fsdp`:

* forward, version 1: the unit that computes and the next one, two of them ahead with ``forward_prefetch``; without
  ``limit_all_gathers`` the host runs through the whole forward, and everything may be gathered at once;
* forward, version 2: the unit that computes, its gathered buffer, and the next unit's;
* backward: the unit that computes, and the prefetched one (BACKWARD_PRE and version 2), or nothing more.
"""

from __future__ import annotations

import math

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.holding import Holding, always
from clustersim.core.mesh import Mesh
from clustersim.core.model import Model
from clustersim.training.strategies.fsdp_config import (
    FSDPConfig,
    FSDPPlan,
    accumulated_bytes,
    element_bytes,
    plan,
    unit_bytes,
)
from clustersim.training.strategies.sharded import Segments


def holding(model: Model, mesh: Mesh, config: FSDPConfig) -> Holding:
    """Bytes of one rank at every moment of a step. Raises :class:`ProgramError` where degrees do not fit the mesh."""
    laid = plan(model, mesh, config)
    n = len(model.layers)
    degree = laid.degree
    state_bytes = element_bytes(config)[2]
    shard = sum(unit.padded(degree) for unit in laid.units) / degree
    frozen = sum(unit.frozen_bytes(degree, math.inf) for unit in laid.units) / degree
    gradients = always(0.0, n)
    if not config.cpu_offload:
        gradients = _reduced(laid, n, state_bytes / degree)
        if config.gradient_accumulation_steps > 1 and not config.no_sync:
            gradients = always(gradients[-1], n)
    if config.no_sync and config.gradient_accumulation_steps > 1:
        gradients = gradients + always(accumulated_bytes(config) * sum(unit.numel for unit in laid.units), n)
    return Holding(
        parameters=0.0 if config.cpu_offload else state_bytes * shard + frozen,
        updated=0.0 if config.cpu_offload else shard,
        masters=0.0,
        state_bytes=state_bytes,
        gradients=gradients,
        gathered=_gathered(laid, config, n),
        buffers=_buffers(laid, config, n),
        fresh="" if config.no_sync and config.gradient_accumulation_steps > 1 else "buffers",
        away=shard if config.cpu_offload else 0.0,
        away_bytes=2 * state_bytes * shard + frozen if config.cpu_offload else 0.0,  # parameters and gradients
    )


def _reduced(laid: FSDPPlan, n: int, nbytes: float) -> Floats:
    """Gradient shards: each unit's from the moment after its last backward."""
    reduced = np.zeros(2 * n + 1)
    for unit in laid.units:
        done = 2 * n - 1 - min(unit.layers, default=0)
        reduced[done + 1 :] += nbytes * unit.padded(laid.degree)
    return reduced


def _gathered(laid: FSDPPlan, config: FSDPConfig, n: int) -> Floats:
    """Unsharded parameters at every moment."""
    gathered = np.zeros(2 * n + 1)
    if laid.degree == 1 and config.param_dtype == config.orig_dtype and not config.cpu_offload:
        return gathered  # nothing is borrowed, and nothing cast
    sizes = [unit_bytes(config, unit, laid.degree) for unit in laid.units]
    order = laid.segments
    for s, (unit, layers) in enumerate(order):
        live = _live_forward(s, order, config)
        back = _live_backward(s, order, config)
        for i in layers:
            # Version 2 copies out of the gathered buffer, which lives until the next copy.
            gathered[i] = sum(sizes[u] for u in live) + (sizes[unit] if config.version == 2 else 0.0)
            gathered[2 * n - 1 - i] = sum(sizes[u] for u in back)
    return gathered


def _live_forward(s: int, order: Segments, config: FSDPConfig) -> set[int]:
    """Units unsharded while segment ``s`` runs forward."""
    ahead = 1 + config.forward_prefetch
    if config.version == 1 and not config.limit_all_gathers:
        ahead = len(order)
    first = 0 if config.keeps else s
    live = {unit for unit, _ in order[first : s + ahead + 1]}
    later = {unit for unit, _ in order[s:]}
    return live | {0} if config.keeps_root or 0 in later else live


def _live_backward(s: int, order: Segments, config: FSDPConfig) -> set[int]:
    """Units unsharded while segment ``s`` runs backward; the root is needed until its end."""
    ahead = 1 if config.prefetch == "BACKWARD_PRE" else 0
    first = 0 if config.keeps else max(0, s - ahead)
    return {unit for unit, _ in order[first : s + 1]} | {0}


def _buffers(laid: FSDPPlan, config: FSDPConfig, n: int) -> Floats:
    """Unsharded gradients: a unit's while it computes, the root's from the head on, and the copy that is reduced.

    The reduction of one unit runs beside the backward of the next, which holds its input until then.
    """
    param_bytes, wire, _ = element_bytes(config)
    buffers = np.zeros(2 * n + 1)
    sizes = [unit.padded(laid.degree) for unit in laid.units]
    own = [unit.numel if config.version == 2 else unit.padded(laid.degree) for unit in laid.units]
    copies = config.version == 2 or wire != param_bytes
    order = laid.segments[::-1]
    for s, (unit, layers) in enumerate(order):
        before = order[s - 1][0] if s else 0
        reducing = (wire if copies else param_bytes) * sizes[before] if before else 0.0
        computing = param_bytes * own[unit] if unit else 0.0
        for i in layers:
            buffers[2 * n - 1 - i] = computing + reducing + param_bytes * own[0]
    buffers[2 * n - 1] += (wire if copies else 0) * sizes[0]
    return buffers
