"""One rank's step: the actions of its schedule in order, each a walk over the layers of a chunk.

This is the one place where a step is written, of a whole model and of a part of one. What varies is handed to it: in
*which order* (:mod:`clustersim.training.schedules`; gradient accumulation is the schedule of one stage), *what* a
layer's pass is (``lay``), what the data-parallel ranks do with parameters and gradients around it (:class:`Hooks`), and
what stages send each other (:class:`Messages`). It knows no formula: a bubble is what the engine finds when it plays
the list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.mesh import Mesh
from clustersim.core.mix import Mix
from clustersim.core.model import Model, StepCost
from clustersim.core.program import COMPUTE_STREAM, DTYPE_BYTES, Compute, Program, Role
from clustersim.core.variation import usual
from clustersim.training.schedules import Action, Order, Slot, schedule
from clustersim.training.strategies import base
from clustersim.training.strategies.offloading import D2H_STREAM, pinned_copy

Place = tuple[int, int]
"""A layer: (chunk, place in the chunk); a whole model is one chunk."""


class LayerPart(NamedTuple):
    """What of a layer runs next: a ``share`` of its pass, under the ``name`` of a sub-module; its own where empty."""

    share: float = 1.0
    name: str = ""


WHOLE = LayerPart()
Lay = Callable[[Place, Action, LayerPart], Iterable[None]]
"""Lays a part of a layer's pass; yields where another action's kernels may come between."""


class Hooks(Protocol):
    """What the data-parallel dimension does around the walk. It knows nothing of tp, pp, cp and ep."""

    def begin_step(self) -> None:
        """A step begins."""

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[LayerPart]:
        """A layer's pass: yields each part of it when it is to run. What is done before the first, between two and
        behind the last of them has that place in the op list. ``last`` : gradients are complete after it.
        """

    def finish(self) -> None:
        """All actions of the step are laid: reduce what is not reduced, clip, and update."""


class Messages(Protocol):
    """What a pipeline rank sends and receives between its actions."""

    def call(self, position: int) -> None:
        """The transfers issued after slot ``position`` (-1: before the first)."""

    def arrived(self, action: Action) -> tuple[int, ...]:
        """What an action's first kernel waits for."""


class LayPass(Protocol):
    """Lays a pass of a chunk, with ``lay`` or in a shorter way to the same ops."""

    def __call__(self, action: Action, lay: Callable[[], None], *, last: bool) -> None:
        """``last`` : gradients are complete after it."""


_OVER = object()


@dataclass
class RankWalk:
    """The op list of one rank in the making.

    Parameters
    ----------
    order : its slots in a step. depths : layers of each chunk.
    microbatches, accumulates : of an asynchronous order, which is all steps: micro-batches of a step, and whether a
        stage updates once in a step or after each of them; 0 where each step ends in a flush.
    turns : how often a layer's pass yields.
    deferred : layers whose weight gradients, those of at most ``limit`` micro-batches of a step, wait for its end.
    lay_pass : lays a pass that runs by itself; None for layer by layer.
    """

    ops: base.OpList
    order: Order
    depths: Sequence[int]
    lay: Lay
    hooks: Hooks
    messages: Messages | None = None
    microbatches: int = 0
    accumulates: bool = True
    turns: Callable[[Place, Action], int] = lambda place, action: 0
    deferred: frozenset[Place] = frozenset()
    limit: int = 0
    lay_pass: LayPass | None = None
    _later: list[tuple[Place, Action]] = field(default_factory=list, init=False)
    _last: dict[tuple[int, int], Action] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for action in chain.from_iterable(self.order):
            if action.kind in "BW":
                self._last[action.chunk, self._update(action)] = action

    def _update(self, action: Action) -> int:
        """Which of the order's updates an action's gradient is for."""
        if not self.microbatches:
            return 0
        return action.microbatch // (self.microbatches if self.accumulates else 1)

    def step(self) -> None:
        """Lay one step, with a flush at its end."""
        self.hooks.begin_step()
        self._call(-1)
        for position, slot in enumerate(self.order):
            self._slot(slot)
            self._call(position)
        while self._later:
            place, action = self._later.pop(0)
            deque(self._layer(place, action, last=place not in dict(self._later)), 0)
        self.hooks.finish()

    def through(self) -> None:
        """Lay an asynchronous order: no flush, each stage updates its weights as soon as it has their gradients."""
        last = set(self._last.values())
        self.hooks.begin_step()
        self._call(-1)
        for position, slot in enumerate(self.order):
            self.ops.step = slot[0].microbatch // self.microbatches
            self._slot(slot)
            self._call(position)
            if any(action in last for action in slot):
                self.hooks.finish()
                self.hooks.begin_step()

    def _call(self, position: int) -> None:
        if self.messages is not None:
            self.messages.call(position)

    def _slot(self, slot: Slot) -> None:
        """One action; or two whose kernels take turns, so that one's exchanges run beside the other's kernels.

        Whoever has the smaller share of its exchanges behind it is next: a backward that repeats some has more of them
        than a forward, and both must end together to hide each other to the end. Backward is first, whose gradients
        travel to the experts beside forward's attention; forward's tokens then travel beside the experts of backward
        (Megatron-LM core/models/common/model_chunk_schedule_plan.py, ``TransformerLayerSchedulePlan.run``; DeepSeek-V3,
        figure 4).
        """
        if len(slot) == 1 and self.lay_pass is not None:
            (action,) = slot
            self._await(action)
            self.lay_pass(action, lambda: deque(self._layers(action), 0).clear(), last=self._completes(action))
            return
        threads = dict(enumerate(self._action(action) for action in slot))
        turns = [1] * len(slot)
        if len(slot) > 1:
            turns = [1 + sum(self.turns((a.chunk, i), a) for i in range(self.depths[a.chunk])) for a in slot]
        done = [0] * len(slot)
        while threads:
            k = min(threads, key=lambda k: (done[k] / turns[k], slot[k].kind == "F"))
            done[k] += 1
            if next(threads[k], _OVER) is _OVER:
                del threads[k]

    def _action(self, action: Action) -> Iterator[None]:
        self._await(action)
        yield from self._layers(action)

    def _await(self, action: Action) -> None:
        if self.messages is not None:
            self.ops.waits = (*self.ops.waits, *self.messages.arrived(action))

    def _completes(self, action: Action) -> bool:
        """Whether gradients are complete after an action."""
        return self._last[action.chunk, self._update(action)] == action

    def _layers(self, action: Action) -> Iterator[None]:
        places = range(self.depths[action.chunk])
        last = self._completes(action)
        for i in places if action.kind == "F" else reversed(places):
            place = action.chunk, i
            waiting = sum(later_place == place for later_place, _ in self._later)
            if action.kind == "B" and place in self.deferred and waiting < self.limit:
                self._later.append((place, action._replace(kind="W")))
                yield from self._layer(place, action._replace(kind="I"), last=False)
            else:
                yield from self._layer(place, action, last=last and not waiting)

    def _layer(self, place: Place, action: Action, *, last: bool) -> Iterator[None]:
        for part in self.hooks.around(place, action, last=last):
            yield from self.lay(place, action, part)


def accumulation(passes: int) -> Order:
    """The order of one rank that does everything: forward and backward of each micro-batch in turn."""
    return schedule("1f1b").order(1, 1, passes)[0]


def whole(ops: base.OpList, model: Model, cost: StepCost) -> Lay:
    """Lays layers of a whole model, a kernel each."""
    passes = {
        "F": ("fwd", "forward", cost.forward, cost.forward_flops, cost.forward_bound, cost.forward_mix),
        "B": ("bwd", "backward", cost.backward, cost.backward_flops, cost.backward_bound, cost.backward_mix),
    }

    copies = None if cost.offloaded is None else ActivationCopies(ops, model, cost.offloaded, cost.offload_rates)

    def lay(place: Place, action: Action, part: LayerPart) -> Iterable[None]:
        """Lay a layer's kernel, with copies from and to the host around it."""
        i, waits, ops.waits = place[1], ops.waits, ()
        if copies is not None:
            waits = (*waits, *copies.ahead(i, forward=action.kind == "F"))
        verb, phase, all_seconds, all_flops, bounds, mixes = passes[action.kind]
        seconds = float(all_seconds[i]) * part.share
        flops = float(all_flops[i]) * part.share
        bound = bounds[i]
        mix = mixes[i].times(part.share) if mixes else Mix(memory=seconds) if bound == "memory" else None
        name = f"{verb} {part.name or model.layers[i].name}"
        ops.kernel = ops.add(Compute(name, seconds, COMPUTE_STREAM, waits, phase, bound, flops, step=ops.step, mix=mix))
        if copies is not None:
            copies.behind(i, ops.kernel, forward=action.kind == "F")
        return ()

    return lay


@dataclass
class ActivationCopies:
    """What layers keep for backward goes to the host beside the next layer's forward, and comes back beside the
    backward of the one behind it (torchtune/training/_activation_offloading.py, ``OffloadActivations`` with streams):
    the layer after the next waits until there is room again, and two are there at once.

    ``kept`` : (layers,) float [bytes]. ``rates`` : [bytes/s] to the host and back. ``away``, ``kernels`` : of a layer,
    its copy to the host and the last kernel of its backward.
    """

    ops: base.OpList
    model: Model
    kept: Floats
    rates: tuple[float, float]
    away: dict[int, int] = field(default_factory=dict)
    home: dict[int, int] = field(default_factory=dict)
    kernels: dict[int, int] = field(default_factory=dict)

    def ahead(self, i: int, *, forward: bool) -> tuple[int, ...]:
        """What a layer's pass waits for: of forward the copy of the last but one, of backward its own coming back."""
        if forward:
            self.home.clear()
            self.kernels.clear()
            return (self.away[i - 2],) if i - 2 in self.away else ()
        for j in (i, i - 1):
            if j in self.away and j not in self.home:
                after = (self.away[j], *((self.kernels[j + 2],) if j + 2 in self.kernels else ()))
                self.home[j] = self._copy(f"h2d {self.model.layers[j].name}", j, "h2d", after)
        return (self.home[i],) if i in self.home else ()

    def behind(self, i: int, kernel: int, *, forward: bool) -> None:
        """A layer's pass, or a part of it, is laid."""
        if not forward:
            self.kernels[i] = kernel
        elif self.kept[i]:
            self.away[i] = self._copy(f"d2h {self.model.layers[i].name}", i, D2H_STREAM, (kernel,))

    def _copy(self, name: str, i: int, stream: str, after: tuple[int, ...]) -> int:
        return pinned_copy(self.ops, name, float(self.kept[i]), self.rates, stream, after)


C = TypeVar("C", bound=base.StrategyConfig)


@dataclass
class WholeModelHooks(Generic[C]):
    """The hooks of ranks that have a whole model each: nothing is fetched, and every layer is one kernel."""

    ops: base.OpList
    model: Model
    cost: StepCost
    mesh: Mesh
    config: C

    def __post_init__(self) -> None:
        """What a rank keeps from step to step, where it is more."""

    def begin_step(self) -> None:
        """Nothing to fetch."""

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[LayerPart]:
        """One kernel; behind a backward, from the second micro-batch on, gradients pile up."""
        yield WHOLE
        if action.kind == "B" and action.microbatch and not place[1]:
            traffic = 3.0 * self.model.trained * DTYPE_BYTES[self.config.param_dtype]  # two reads and a write
            self.ops.compute("accumulate gradients", base.gradient_pass(traffic, self.cost), "gradient")

    def finish(self) -> None:
        """Update."""
        self.ops.compute("optimizer", self.cost.optimizer, "optimizer")

    def notes(self) -> tuple[str, ...]:
        """What is assumed, in words."""
        return ()


class AssumingHooks(Hooks, Protocol):
    """Hooks that say what they assume."""

    def notes(self) -> tuple[str, ...]:
        """In words."""


def walked(rank: Callable[[base.OpList, Model, StepCost, Mesh, Any], AssumingHooks]) -> base.Build:
    """``build`` of a strategy in which every rank walks the same whole model, with these hooks."""

    def build(model: Model, cost: StepCost, mesh: Mesh, config: Any, steps: int, seed: int) -> Program:
        """The program of all steps."""
        base.check(model, cost, steps)
        ops = base.OpList()
        paces = usual(cost.jitter, steps, mesh.world_size, seed)
        hooks = rank(ops, model, cost, mesh, config)
        order = accumulation(config.gradient_accumulation_steps)
        walk = RankWalk(ops, order, (len(model.layers),), whole(ops, model, cost), hooks)
        for step in range(steps):
            base.begin_step(ops, cost, step)
            walk.step()
        worker = Role("worker", np.arange(mesh.world_size, dtype=np.int64), tuple(ops.ops), paces)
        return Program(mesh.world_size, (worker,), cost.overlap_slowdown, (*hooks.notes(), *cost.notes))

    return build


MANY = 3
"""Passes of a step that has a first, a last and one between."""


def sampled(rank: Callable[[base.OpList, Model, StepCost, Mesh, Any], AssumingHooks]) -> base.Sample:
    """``sample`` of a strategy in which every rank walks the same whole model, with these hooks.

    A step of one pass, ahead of the one that is told, brings the hooks to where steps leave them.
    """

    def sample(model: Model, cost: StepCost, mesh: Mesh, config: Any) -> base.StepSample:
        """A step of one micro-batch, and one of many."""
        base.check(model, cost, 1)
        passes = MANY if config.gradient_accumulation_steps > 1 else 1
        ops = base.OpList()
        few = msgspec.structs.replace(config, gradient_accumulation_steps=passes)
        hooks = rank(ops, model, cost, mesh, few)
        lay_layer = whole(ops, model, cost)
        begins: list[int] = []

        def lay_pass(action: Action, lay: Callable[[], None], *, last: bool) -> None:
            """Lay a pass, and note where it begins."""
            begins.append(len(ops.ops))
            lay()

        for step, step_passes in enumerate((1, passes)):
            begins.clear()
            first = len(ops.ops)
            base.begin_step(ops, cost, step)
            order = accumulation(step_passes)
            RankWalk(ops, order, (len(model.layers),), lay_layer, hooks, lay_pass=lay_pass).step()
        if passes == 1:
            return base.StepSample(tuple(ops.ops[first:]))
        _, _, begin, _, end, _ = begins  # forward and backward of each pass
        return base.StepSample((*ops.ops[first:begin], *ops.ops[end:]), tuple(ops.ops[begin:end]))

    return sample
