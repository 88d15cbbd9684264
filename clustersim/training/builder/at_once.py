"""A pass of a chunk as one op, where nothing of its own rank runs beside it: what it takes is found by playing it so.

Everything between two messages of a pipeline rank is the same each time: kernels, and exchanges inside the stage. A
pass with data-parallel traffic beside it is not, and is laid in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from clustersim.core.label import Label
from clustersim.core.program import COMPUTE_STREAM, Compute, Program, Role
from clustersim.core.timeline import Timeline
from clustersim.training.builder.laying import StageLay
from clustersim.training.builder.stage_ops import StageOps
from clustersim.training.partition.base import Chunk, Stage
from clustersim.training.schedules.base import Action, Order
from clustersim.training.strategies.walk import WHOLE, LayerPart, Place

PASS = "pass"
"""Name of the empty op behind each pass that is played alone."""


class PassSeconds(NamedTuple):
    """Seconds of a pass until what follows it may begin, and what the next kernel pays for an overlap in it."""

    seconds: float
    owed: float


Known = Mapping[object, PassSeconds]
"""What each pass of a stage takes, by :func:`what`."""


def what(chunk: Chunk, kind: str) -> object:
    """What a pass is: equal for chunks whose layers do the same."""
    layers = ((id(x.forward), id(x.backward), x.kind, x.parameters, x.trained, x.expert_load) for x in chunk.layers)
    return kind, tuple(layers)


class JoinedPass(msgspec.Struct, frozen=True):
    """Lays a pass as one op while the rank's data-parallel streams are quiet:
    :data:`clustersim.training.strategies.walk.Lay`.

    laid : lays it in full. busy : whether data-parallel traffic may run beside it. known : what passes take.
    """

    laid: StageLay
    busy: Callable[[], bool]
    known: Known

    def __call__(self, place: Place, action: Action, part: LayerPart) -> Iterable[None]:
        """With the last layer of its chunk, all of the pass."""
        if self.busy():
            return self.laid(place, action, part)
        chunk = self.laid.stage.of(action.microbatch, place[0])
        ops = self.laid.stage_ops.ops
        if place[1] == (len(chunk.layers) - 1 if action.kind == "F" else 0):
            spent = self.known[what(chunk, action.kind)]
            label = Label("", action.kind, action.microbatch, action.chunk)
            phase = "forward" if action.kind == "F" else "backward"
            op = Compute(
                f"{action.kind} {action.microbatch}.{action.chunk}",
                spent.seconds,
                COMPUTE_STREAM,
                ops.waits,
                phase,
                step=ops.step,
                label=label,
            )
            ops.waits, ops.kernel = (), ops.add(op)
            ops.owed = spent.owed
        return ()


def alone(stage_ops: StageOps, stage: Stage, order: Order, slowdown: float) -> tuple[Program, tuple[object, ...]]:
    """A Program in which one stage's ranks play each kind of pass by itself, and what those are.

    ``slowdown`` : price of overlap. Others do nothing.
    """
    kinds: dict[object, Action] = {}
    for action in (action for slot in order for action in slot):
        kinds.setdefault((action.chunk, action.kind, action[1:] in stage.repeated), action)
    passes = {what(stage.of(a.microbatch, a.chunk), a.kind): a for a in kinds.values()}
    ops = stage_ops.ops
    laid = StageLay(stage_ops, stage)
    for action in passes.values():
        places = range(len(stage.chunks[action.chunk].layers))
        for i in places if action.kind == "F" else reversed(places):
            for _ in laid((action.chunk, i), action, WHOLE):
                pass
        ops.add(Compute(PASS, 0.0, COMPUTE_STREAM, (*ops.waits, ops.kernel)))
        ops.waits, ops.kernel = (), len(ops.ops) - 1
    world = stage_ops.mesh.world_size
    rest = np.setdiff1d(np.arange(world), stage_ops.ranks)
    roles = (Role("stage", stage_ops.ranks, tuple(ops.ops)), *((Role("others", rest, ()),) if len(rest) else ()))
    return Program(world, roles, slowdown), tuple(passes)


def spent(timeline: Timeline, passes: Iterable[object], *, apart: bool = False) -> dict[object, PassSeconds] | None:
    """What each pass of :func:`alone` took; None where ranks did not end theirs together, and may not (``apart``)."""
    pass_times = dict(zip(passes, _spent(timeline, apart), strict=True))
    return None if None in pass_times.values() else pass_times  # type: ignore[return-value]


def _spent(timeline: Timeline, apart: bool) -> Iterator[PassSeconds | None]:
    rows = timeline.per_op()
    before = 0.0
    for i in [i for i, op in enumerate(timeline.ops) if op.name == PASS]:
        start = rows["start"][i]
        end = rows["end"][i]
        mean_s = rows["seconds"][i] / rows["ranks"][i]
        together = abs(end - start - mean_s) <= 1e-12 * end
        if together:
            yield PassSeconds(float(start - before), float(end - start))
        else:
            yield PassSeconds(float(end - mean_s - before), float(mean_s)) if apart else None
        before = end
