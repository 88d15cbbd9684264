"""One pipeline stage's op list: its actions in order, each a walk over the local layers of a chunk.

This is the one place where a step of a split model is written. What varies is handed to it: *what* a rank computes
(:mod:`clustersim.partition`), in *which order* (:mod:`clustersim.schedules`), and what the data-parallel ranks do with
parameters and gradients (:class:`Replicas`). It knows no formula: a bubble is what the engine finds when it plays the
list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Protocol

from clustersim.builder.laying import Here, Laid
from clustersim.builder.messages import Call, Transfer, calls, direction
from clustersim.label import Label
from clustersim.mesh import Ints
from clustersim.partition.base import LocalLayer, Stage
from clustersim.program import DTYPE_BYTES, Recv, Send
from clustersim.schedules.base import Action, Order, Slot, rank_and_chunk, stage_of


class Replicas(Protocol):
    """What the data-parallel dimension does around the walk; it knows nothing of tp, pp, cp and ep.

    Layers are named by (chunk, place in the chunk). Each method may add ops to the stage's list.
    """

    def begin_step(self) -> None:
        """A step begins."""

    def before(self, chunk: int, layer: int, action: Action) -> tuple[int, ...]:
        """What the layer's first kernel waits for: parameters that are on their way."""

    def after(self, chunk: int, layer: int, action: Action, *, last: bool) -> None:
        """A layer is through an action; ``last``: its gradients are complete."""

    def finish(self) -> None:
        """All actions of the step are laid: reduce what is not reduced, clip, and update."""


@dataclass(frozen=True)
class Route:
    """Where a stage's messages go.

    Parameters
    ----------
    placement : of chunks on ranks. rank, stages : this pipeline rank, and how many there are. n : global stages.
    peers : (n,) int of every pipeline rank: its ranks, position by position.
    borders : elements per sample that one rank sends over each border, named by the global stage above it.
    """

    placement: str
    rank: int
    stages: int
    n: int
    peers: tuple[Ints, ...]
    borders: tuple[float, ...]

    def crosses(self, action: Action, *, out: bool) -> bool:
        """Whether an action's result goes to another rank (``out``), or its input comes from one."""
        rank, border = self.border(action, out=out)
        return 0 <= border < self.n - 1 and rank != self.rank

    def border(self, action: Action, *, out: bool) -> tuple[int, int]:
        """Pipeline rank on the other side of the border that an action's result or input crosses, and the border.

        A border is named by the stage above it; the ends of the pipeline are -1 and ``n - 1``.
        """
        stage = stage_of(self.placement, self.rank, action.chunk, self.stages)
        down = (direction(action) == "F") == out
        target = stage + 1 if down else stage - 1
        rank, _ = rank_and_chunk(self.placement, target % self.n, self.stages, action.chunk)
        return rank, min(stage, target)


@dataclass
class StageWalk:
    """The op list of one stage in the making.

    Parameters
    ----------
    stage : its chunks. order : its slots in a step. mode : how it sends, see :mod:`clustersim.builder.messages`.
    dtype : of messages. arrived : receives in flight, by the action that needs them.
    """

    here: Here
    laid: Laid
    stage: Stage
    order: Order
    route: Route
    replicas: Replicas
    mode: str
    dtype: str
    microbatches: int = 0
    accumulates: bool = True
    _calls: dict[int, list[Call]] = field(default_factory=dict, init=False)
    _arrived: dict[Action, tuple[int, ...]] = field(default_factory=dict, init=False)
    _last: dict[tuple[int, int], Action] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        route = self.route
        made = calls(self.order, lambda a: route.crosses(a, out=True), lambda a: route.crosses(a, out=False), self.mode)
        for call in made:
            self._calls.setdefault(call.at, []).append(call)
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
        self.replicas.begin_step()
        self._call(-1)
        for at, slot in enumerate(self.order):
            self._slot(slot)
            self._call(at)
        self.replicas.finish()

    def through(self) -> None:
        """Lay an asynchronous order: no flush, each stage updates its weights as soon as it has their gradients."""
        last = set(self._last.values())
        self.replicas.begin_step()
        self._call(-1)
        for at, slot in enumerate(self.order):
            self.laid.ops.step = slot[0].microbatch // self.microbatches
            self._slot(slot)
            self._call(at)
            if any(action in last for action in slot):
                self.replicas.finish()
                self.replicas.begin_step()

    def _slot(self, slot: Slot) -> None:
        """One action; or two whose kernels take turns, so that one's exchanges run beside the other's kernels."""
        threads = [self._action(action) for action in slot]
        for _ in threads[0] if len(threads) == 1 else chain.from_iterable(zip_longest(*threads)):
            pass

    def _action(self, action: Action) -> Iterator[None]:
        layers = self.stage.chunks[action.chunk].layers
        self.laid.waits = (*self.laid.waits, *self._arrived.pop(action, ()))
        places = range(len(layers)) if action.kind == "F" else reversed(range(len(layers)))
        for i in places:
            yield from self._layer(layers[i], i, action)

    def _layer(self, layer: LocalLayer, i: int, action: Action) -> Iterator[None]:
        laid, replicas = self.laid, self.replicas
        laid.waits = (*laid.waits, *replicas.before(action.chunk, i, action))
        yield from laid.pieces(self.here, layer, action)
        replicas.after(action.chunk, i, action, last=self._last[action.chunk, self._update(action)] == action)

    # --- messages ----------------------------------------------------------------------------------------------------

    def _call(self, at: int) -> None:
        for call in self._calls.get(at, ()):
            done = tuple(self._transfer(transfer) for transfer in call.transfers)
            if call.waited:
                self.laid.waits = (*self.laid.waits, *done)
                continue
            for transfer, op in zip(call.transfers, done, strict=True):
                if not transfer.sends:
                    self._arrived[transfer.action] = (*self._arrived.get(transfer.action, ()), op)

    def _transfer(self, transfer: Transfer) -> int:
        """A send follows the kernel that made its data, and whatever the host waited for before it."""
        laid, here, action, way = self.laid, self.here, transfer.action, transfer.direction
        rank, border = self.route.border(action, out=transfer.sends)
        nbytes = float(self.route.borders[border] * here.batch * DTYPE_BYTES[self.dtype])
        after = (*laid.waits, *((laid.kernel,) if laid.kernel >= 0 else ()))
        tag = f"{way} {border}.{action.chunk if self.route.placement == 'both' else 0} mb {action.microbatch}"
        kind, verb = (Send, "send") if transfer.sends else (Recv, "recv")
        what = "activation" if way == "F" else "gradient"
        label = Label("", action.kind, action.microbatch, action.chunk, "pp")
        stream = f"pp {verb} {way} {rank}"  # a pair of ranks has a communicator of its own
        return laid.ops.add(
            kind(f"{verb} {what}", nbytes, self.route.peers[rank], stream, after, tag, step=laid.ops.step, label=label)
        )
