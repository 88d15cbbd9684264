"""Who keeps what in memory: one scenario part by part, or every strategy on its machine and model side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from clustersim.device import Device, device
from clustersim.errors import ClusterSimError
from clustersim.mesh import Mesh
from clustersim.model import Model
from clustersim.scenario import Scenario, load
from clustersim.scenario.comparison import forms
from clustersim.scenario.parts import memory_of, model_of, placed
from clustersim.scenario.splitting import with_micro_batches
from clustersim.strategies import STRATEGIES
from clustersim.topology import Topology

MOST = 1 << 20
"""Micro-batches beyond this are not looked for."""


def table(path: str, changes: Mapping[str, object] | None = None, *, every: bool = False) -> list[dict[str, Any]]:
    """A row for the scenario as it is written, and with ``every`` one for each other strategy.

    Parameters
    ----------
    path, changes : as for :func:`clustersim.scenario.load`.

    Returns
    -------
    list of dict: ``strategy``, ``variant``, ``device``, ``device_bytes``; ``largest``, each part's own maximum
    [bytes], and ``at_peak``, the parts at the fullest moment; ``peak`` (its name), ``allocated_bytes``,
    ``total_bytes`` (with the driver's context), ``model_states_bytes``, ``saving`` (one GPU's model states over these),
    ``fits`` and ``largest_micro_batch`` (0 if not even one sample fits). Strategies that cannot run have ``reason`` and
    None.

    Raises :class:`ScenarioError` for a scenario that cannot be read.
    """
    own = load(path, changes)
    rows = [_row(own, own.file.strategy["kind"], "as written")]
    for kind, variant, knobs in forms(own) if every else ():
        if variant != "as written":
            rows.append(_other(own, kind, variant, knobs))
    return rows


def _other(own: Scenario, kind: str, variant: str, knobs: dict[str, Any]) -> dict[str, Any]:
    changes = dict(own.changes) | {"strategy": knobs}
    if STRATEGIES[kind].world_size == 1:
        changes |= {"cluster.nodes": 1, "cluster.gpus_per_node": 1}
    try:
        return _row(load(own.path, changes), kind, variant)
    except ClusterSimError as error:
        names = (
            "peak",
            "allocated_bytes",
            "total_bytes",
            "model_states_bytes",
            "saving",
            "fits",
            "largest_micro_batch",
        )
        return {"strategy": kind, "variant": variant, "reason": str(error)} | dict.fromkeys(names)


def _row(scenario: Scenario, kind: str, variant: str) -> dict[str, Any]:
    topology, mesh = placed(scenario)
    scenario = with_micro_batches(scenario, mesh)
    model = model_of(scenario)
    with scenario.at("$.strategy"):
        use = memory_of(scenario, model, topology, mesh)
    # The smallest card decides where node types are mixed.
    cards = {topology.node_types[n].device for n in topology.vertex_node[mesh.gpus[: mesh.workers]].tolist()}
    card = min((device(name) for name in sorted(cards)), key=lambda found: found.memory_bytes)
    whole = memory_of(scenario, model, topology, mesh, whole=True)
    return {
        "strategy": kind,
        "variant": variant,
        "device": card.name,
        "device_bytes": card.memory_bytes,
        "largest": use.parts(),
        "at_peak": {name: float(column[use.course.peak]) for name, column in use.course.parts.items()},
        "peak": use.peak,
        "allocated_bytes": use.allocated,
        "total_bytes": use.total,
        "model_states_bytes": use.model_states,
        "saving": whole.model_states / use.model_states if use.model_states else None,
        "fits": use.fits(card).ok,
        "largest_micro_batch": largest_micro_batch(scenario, model, topology, mesh, card),
        "reason": "",
    }


def largest_micro_batch(scenario: Scenario, model: Model, topology: Topology, mesh: Mesh, card: Device) -> int:
    """The largest ``micro_batch_size`` whose step fits on a card, everything else as written; 0 if none does."""

    def fits(size: int) -> bool:
        config = msgspec.structs.replace(scenario.config, micro_batch_size=size)
        return memory_of(replace(scenario, config=config), model, topology, mesh).fits(card).ok

    if not fits(1):
        return 0
    low, high = 1, 2
    while high < MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
