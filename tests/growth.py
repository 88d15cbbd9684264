"""What a run costs, counted: pieces of ops handled, events of the clock, solves, over all of its plays."""

from __future__ import annotations

from typing import Any

import pytest

from clustersim import scenario
from clustersim.engine import run
from clustersim.engine.play import Play

SHARDED = "fsdp_llama3_405b_2048x8_h100"
SMALL = {"model.name": "llama3-8b", "run.jitter": 0.02, "run.steps": 1}


def fsdp(nodes: int) -> tuple[str, dict[str, Any]]:
    """Everybody shards with everybody."""
    return SHARDED, {**SMALL, "cluster.nodes": nodes}


def hsdp(nodes: int) -> tuple[str, dict[str, Any]]:
    """Shards of eight nodes at most, each on its own and its gradients averaged with the other shards'."""
    shard = min(8 * nodes // 2, 64)
    degrees = {"shard": shard, "replicate": 8 * nodes // shard}
    return SHARDED, {
        **SMALL,
        "cluster.nodes": nodes,
        **{f"strategy.data_parallel_{name}_degree": degree for name, degree in degrees.items()},
    }


def pipeline(nodes: int) -> tuple[str, dict[str, Any]]:
    """Tensor groups of two, pipelines of four, and replicas: more of them on more nodes."""
    split = {"tp": 2, "pp": 4, "vpp": 1, "global_batch_size": 4 * nodes}
    changes = {f"parallel.{name}": value for name, value in split.items()}
    return "tp8_pp4_llama3_70b_32x8_h100", {**SMALL, "cluster.nodes": nodes, **changes}


WAYS = {"FSDP": fsdp, "HSDP": hsdp, "TP x PP x DP": pipeline}


def counted(way: str, nodes: int) -> tuple[int, int]:
    """Ranks times the ops of each, and what playing them costs."""
    prepared = scenario.load(*[WAYS[way](nodes)][0]).prepare()
    cost = 0
    handled = Play._go
    made = []

    def handle(self: Play, *piece: Any) -> None:
        nonlocal cost
        cost += 1
        handled(self, *piece)

    class Counting(run.Clock):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Play, "_go", handle)
        patch.setattr(run, "Clock", Counting)
        timeline = prepared.run().timeline
    size = sum(len(role.ranks) * len(role.ops) for role in prepared.program.roles)
    return size, cost + sum(clock.n_events for clock in made) + int(timeline.stats["solves"])
