"""Toy pipelines for tests: stages of one layer whose passes take times that are easy to add up."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from toy import plan as toy_plan
from toy import star

from clustersim.core.dims import Dims
from clustersim.core.mesh import Mesh
from clustersim.core.mix import Mix
from clustersim.core.model import Kernel, Model, StepCost
from clustersim.engine import simulate
from clustersim.model.seconds.price import Pass
from clustersim.training.builder import StepRecipe, build
from clustersim.training.partition.base import Chunk, LocalLayer, Partition, Stage, Work
from clustersim.training.schedules.base import stage_count, stage_of
from clustersim.training.strategies.walk import WHOLE

KERNEL = Kernel("work", "gemm")


@dataclass(frozen=True)
class ToyCost:
    """A forward takes ``f``, an input gradient ``i``, a weight gradient ``w`` seconds; longer on some layers."""

    f: float = 1.0
    i: float = 1.0
    w: float = 1.0
    micro_batch_size: int = 1
    host: None = None

    def in_recipe(self, kind):
        return False

    def work(self, runs, *, dense, cast=0, packed=()):
        runs = [run for run in runs if run[0][0].kind != "host"]
        seconds = sum({"F": self.f, "R": self.f, "I": self.i, "W": self.w}[part] for _, part in runs)
        return Pass(seconds, 0.0, "compute", 0.0, Mix(peak=seconds))


class Nothing:
    """No data parallelism: a step ends with its last action."""

    def begin_step(self):
        pass

    def around(self, place, action, *, last):
        yield WHOLE

    def finish(self):
        pass


def partition(p, v, placement, message=1.0, head=False):
    """One layer a chunk; ``head``: the last has another like it, the head."""
    layer = LocalLayer(
        "layer", "block", (Work("", (KERNEL,), "F"),), (Work("", (KERNEL,), "I"), Work("", (KERNEL,), "W"))
    )
    n = stage_count(placement, p, v)
    at = [[stage_of(placement, r, c, p) for c in range(v)] for r in range(p)]
    last = (layer, replace(layer, name="head", kind="head")) if head else (layer,)
    stages = tuple(
        Stage(tuple(Chunk(s, last if s == n - 1 else (layer,), 0.0 if s == n - 1 else message) for s in mine))
        for mine in at
    )
    return Partition(Model("toy", "toy", ()), stages)


def play(orders, placement="loop", *, mode="overlapped", cost=None, transfer=0.0, steps=1, head=False, **recipe):
    """The Timeline of a toy pipeline whose transfers take ``transfer`` seconds each and share nothing."""
    p = len(orders)
    v = 1 + max(action.chunk for order in orders for slot in order for action in slot)
    topology = star(p)
    mesh = Mesh(topology.gpus, p, dims=Dims(pp=p))
    parts = partition(p, v, placement, head=head)
    made = StepRecipe(parts, orders, placement, mode, "bf16", lambda *_: Nothing(), **recipe)
    program = build(made, cost or ToyCost(), STEADY, mesh, steps, 0)
    program.check()
    return simulate(program, topology, mesh, planner=lambda request, group: toy_plan(request, [], transfer, np.inf))


_NONE = np.zeros(0)
STEADY = StepCost(_NONE, _NONE, (), (), _NONE, _NONE, 0.0, 1e12)
