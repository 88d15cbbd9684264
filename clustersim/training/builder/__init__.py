"""The step builder: a partitioned model, a schedule and data-parallel hooks become a Program, one Role per stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from clustersim.core.mesh import Mesh
from clustersim.core.model import StepCost
from clustersim.core.program import Program, Role
from clustersim.core.variation import usual
from clustersim.model.seconds.local import LocalCost
from clustersim.training.builder.at_once import JoinedPass, Known
from clustersim.training.builder.gradients import ReplicatedHooks
from clustersim.training.builder.laying import StageLay
from clustersim.training.builder.messages import Route, StageMessages
from clustersim.training.builder.passes import RepeatedPasses
from clustersim.training.builder.shards import ShardHooks
from clustersim.training.builder.stage_ops import StageOps
from clustersim.training.partition.base import Partition, Stage
from clustersim.training.schedules.base import Action, Orders
from clustersim.training.strategies import base
from clustersim.training.strategies.walk import Hooks, Lay, RankWalk

MakeReplicas = Callable[[StageOps, Stage, int], Hooks]
"""``(stage ops, stage, pipeline rank) -> hooks`` of the data-parallel dimension."""


@dataclass(frozen=True, eq=False)
class StepRecipe:
    """What varies between steps of split models.

    Parameters
    ----------
    partition : what each stage holds. orders : what each pipeline rank runs. placement : of chunks on ranks. messages :
    how stages wait for each other, one of :data:`clustersim.training.builder.messages.MODES`. dtype : of activations
    and messages. replicas : the data-parallel hooks. shapes : as in
    :class:`~clustersim.training.builder.messages.StageMessages`. deferral : micro-batches whose weight gradients of the
        head wait for the end of a step (Megatron's ``defer_embedding_wgrad_compute``).
    microbatches, accumulates : as in :class:`~clustersim.training.strategies.walk.RankWalk`.
    known : of every pipeline rank, what its passes take: each is then one op where no data-parallel traffic runs beside
        it, or, ``roughly``, everywhere (:mod:`clustersim.training.builder.at_once`).
    """

    partition: Partition
    orders: Orders
    placement: str
    messages: str
    dtype: str
    replicas: MakeReplicas
    microbatches: int = 0
    accumulates: bool = True
    shapes: bool = False
    deferral: int = 0
    known: Sequence[Known] | None = None
    roughly: bool = False


def build(recipe: StepRecipe, local: LocalCost, cost: StepCost, mesh: Mesh, steps: int, seed: int) -> Program:
    """The Program of ``steps`` training steps.

    Parameters
    ----------
    local : prices of one rank's kernels. cost : the host's part of a step, jitter, and the price of overlap.
    mesh : with dimensions; ``pp`` ranks of it hold ``recipe.partition.stages``. steps : as many as the orders have, for
        an asynchronous schedule.
    """
    paces = usual(cost.jitter, steps, mesh.workers, seed)
    roles = []
    for rank in range(mesh.size("pp")):
        ranks = mesh.ranks(pp=rank)
        ops = _stage(recipe, local, cost, mesh, rank, steps)
        name = "worker" if mesh.size("pp") == 1 else f"stage {rank}"
        roles.append(Role(name, ranks, ops.made(), None if paces is None else paces[:, ranks], rank))
    notes = (*recipe.partition.notes, *cost.notes)
    return Program(mesh.world_size, tuple(roles), cost.overlap_slowdown, notes)


def _stage(recipe: StepRecipe, local: LocalCost, cost: StepCost, mesh: Mesh, rank: int, steps: int) -> base.OpList:
    """The op list of one pipeline rank."""
    stage = recipe.partition.stages[rank]
    order = recipe.orders[rank]
    stage_ops = StageOps(mesh, mesh.ranks(pp=rank), local, recipe.dtype)
    ops = stage_ops.ops
    laid = StageLay(stage_ops, stage)
    hooks = recipe.replicas(stage_ops, stage, rank)
    walk = RankWalk(
        ops,
        order,
        [len(chunk.layers) for chunk in stage.chunks],
        _lay(recipe, laid, hooks, rank),
        hooks,
        StageMessages(stage_ops, _route(recipe, mesh, rank), order, recipe.messages, recipe.shapes),
        recipe.microbatches,
        recipe.accumulates,
        laid.turns,
        stage.heads,
        recipe.deferral,
        _repeated(recipe, laid, hooks),
    )
    if recipe.microbatches:
        walk.through()
        return ops
    for step in range(steps):
        base.begin_step(ops, cost, step)
        walk.step()
    return ops


def _repeated(recipe: StepRecipe, laid: StageLay, hooks: Hooks) -> RepeatedPasses | None:
    """How passes that do the same are laid once; None where it is not known which do."""
    if recipe.known is not None or recipe.deferral or not isinstance(hooks, ReplicatedHooks):
        return None

    def alike(action: Action, last: bool) -> object | None:
        """What passes that do the same have in common."""
        again = (action.microbatch, action.chunk) in laid.stage.repeated
        return (action.kind, action.chunk, again) if hooks.quiet(action.chunk, last=last) else None

    return RepeatedPasses(laid.stage_ops.ops, alike)


def _lay(recipe: StepRecipe, laid: StageLay, hooks: Hooks, rank: int) -> Lay:
    """In full; or pass by pass, where that is known."""
    if recipe.known is None or recipe.deferral or not isinstance(hooks, ReplicatedHooks | ShardHooks):
        return laid
    # A pass that gathers its parameters layer by layer cannot wait for all of them.
    roughly = recipe.roughly and isinstance(hooks, ReplicatedHooks)
    return JoinedPass(laid, (lambda: False) if roughly else hooks.busy, recipe.known[rank])


def _route(recipe: StepRecipe, mesh: Mesh, rank: int) -> Route:
    borders = {chunk.stage: chunk.message for stage in recipe.partition.stages for chunk in stage.chunks}
    peers = tuple(mesh.ranks(pp=stage_rank) for stage_rank in range(mesh.size("pp")))
    return Route(recipe.placement, rank, peers, tuple(borders[s] for s in range(len(borders))))
