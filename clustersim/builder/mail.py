"""Where a pipeline rank's messages go, and the ops that carry them."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

import msgspec

from clustersim.builder.laying import Here
from clustersim.builder.messages import Call, Transfer, calls, direction
from clustersim.label import Label
from clustersim.mesh import Ints
from clustersim.model import Kernel
from clustersim.partition.dispatch import HOST_WAITS
from clustersim.program import DTYPE_BYTES, Recv, Send
from clustersim.schedules.base import Action, Order, rank_and_chunk, stage_of
from clustersim.strategies.base import OpList


class Route(msgspec.Struct, frozen=True):
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


SHAPE_BYTES = 3.0 * DTYPE_BYTES["int64"]
READ = Kernel("read_shapes", "host", launches=HOST_WAITS, backward_launches=0)


@dataclass
class Mail:
    """The messages of one stage: :class:`clustersim.strategies.walk.Messages`.

    Parameters
    ----------
    order : the stage's slots. mode : how it sends, see :mod:`clustersim.builder.messages`. dtype : of messages.
    shapes : a call sends the shapes of its tensors first, and the host waits for those that come before it asks for
        the tensors (Megatron-LM p2p_communication.py ``_communicate_shapes``).
    """

    here: Here
    ops: OpList
    route: Route
    order: InitVar[Order]
    mode: InitVar[str]
    dtype: str
    shapes: bool = False
    _calls: dict[int, list[Call]] = field(default_factory=dict, init=False)
    _arrived: dict[Action, tuple[int, ...]] = field(default_factory=dict, init=False)

    def __post_init__(self, order: Order, mode: str) -> None:
        route = self.route
        for call in calls(order, lambda a: route.crosses(a, out=True), lambda a: route.crosses(a, out=False), mode):
            self._calls.setdefault(call.at, []).append(call)

    def arrived(self, action: Action) -> tuple[int, ...]:
        """Receives in flight that an action needs."""
        return self._arrived.pop(action, ())

    def call(self, at: int) -> None:
        """The calls made after a slot: waited for by everything behind, or each receive by its action alone."""
        for call in self._calls.get(at, ()):
            if self.shapes:
                self._read(tuple(self._transfer(transfer, shape=True) for transfer in call.transfers))
            done = tuple(self._transfer(transfer) for transfer in call.transfers)
            if call.waited:
                self.ops.waits = (*self.ops.waits, *done)
                continue
            for transfer, op in zip(call.transfers, done, strict=True):
                if not transfer.sends:
                    self._arrived[transfer.action] = (*self._arrived.get(transfer.action, ()), op)

    def _read(self, shapes: tuple[int, ...]) -> None:
        """The host waits for the device, and for shapes."""
        ops, cost = self.ops, self.here.cost.work((((READ,), "F"),), dense=False)
        after, ops.waits = (*ops.waits, *shapes), ()
        ops.kernel = ops.compute("read shapes", cost.seconds, "other", "host", after=after)

    def _transfer(self, transfer: Transfer, *, shape: bool = False) -> int:
        """A send follows the kernel that made its data, and whatever the host waited for before it."""
        ops, here, action, way = self.ops, self.here, transfer.action, transfer.direction
        rank, border = self.route.border(action, out=transfer.sends)
        nbytes = float(self.route.borders[border] * here.batch * DTYPE_BYTES[self.dtype])
        after = (*ops.waits, *((ops.kernel,) if ops.kernel >= 0 else ()))
        tag = f"{way} {border}.{action.chunk if self.route.placement == 'both' else 0} mb {action.microbatch}"
        kind, verb = (Send, "send") if transfer.sends else (Recv, "recv")
        what = "activation" if way == "F" else "gradient"
        if shape:
            nbytes, tag, what = SHAPE_BYTES, f"{tag} shape", f"shape of {what}"
        label = Label("", action.kind, action.microbatch, action.chunk, "pp")
        stream = f"pp {verb} {way} {rank}"  # a pair of ranks has a communicator of its own
        return ops.add(
            kind(f"{verb} {what}", nbytes, self.route.peers[rank], stream, after, tag, step=ops.step, label=label)
        )
