"""Local layers laid down as ops: runs of kernels on the compute stream, exchanges on their communicators' streams."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import msgspec

from clustersim.core.label import Label
from clustersim.core.program import (
    COMPUTE_STREAM,
    COPY_ENGINE,
    DTYPE_BYTES,
    HOST_CALL,
    HOST_STREAM,
    Collective,
    Compute,
    Recv,
    Send,
)
from clustersim.training.builder.stage_ops import EXPERTS, StageOps, WorkRun
from clustersim.training.partition.base import Exchange, LocalLayer, Stage
from clustersim.training.partition.nodes import WAITS
from clustersim.training.schedules.base import Action
from clustersim.training.strategies.walk import LayerPart, Place

_SHORT = {"F": "fwd", "B": "bwd", "I": "dgrad", "W": "wgrad"}
"""Actions by the names that profiles have."""


class HostCalls(msgspec.Struct):
    """The host's calls of one layer's pass: an op ahead of each run of kernels that would be there before its calls.

    op : of the first, without its time; None where the host does not bind. seconds : ahead of each run, and behind the
    last. after : what the host waits for next.
    """

    stage_ops: StageOps
    op: Compute | None
    seconds: Iterator[float]
    after: tuple[int, ...] = ()

    def ahead(self) -> tuple[int, ...]:
        """Lays the calls ahead of the next run, or behind the last; what its kernels wait for."""
        seconds = next(self.seconds, 0.0)
        if self.op is None or not seconds:
            return ()
        op = msgspec.structs.replace(self.op, duration=seconds, after=self.after)
        self.after = ()
        return (self.stage_ops.ops.add(op),)


class StageLay(msgspec.Struct, frozen=True):
    """Local layers of one stage as ops: :data:`clustersim.training.strategies.walk.Lay`."""

    stage_ops: StageOps
    stage: Stage

    def __call__(self, place: Place, action: Action, part: LayerPart) -> Iterator[None]:
        """Lay one layer bit by bit: yields behind exchanges, where another action's kernels may come between.

        Exchanges listed one behind the other (two hops of one dispatch) are issued together.

        A local layer is cut at its exchanges and nowhere else, so that its part is always the whole of it.
        """
        chunk, i = place
        stage_ops = self.stage_ops
        ops = self.stage_ops.ops
        layer = self.stage.of(action.microbatch, chunk).layers[i]
        index: dict[int, int] = {}
        pieces, unneeded = stage_ops.runs(layer, action.kind)
        calls = self._calls(place, action, layer)
        for piece, following in zip_longest(pieces, pieces[1:]):
            if isinstance(piece, WorkRun):
                after = tuple(index[needed] for needed in piece.needs if needed in index)
                done = self._compute(layer, action, piece, (*after, *calls.ahead()))
                index |= dict.fromkeys(piece.items, done)
                if WAITS in piece.name.split("+"):
                    calls.after = (done,)
            else:
                i, exchange = piece
                after = tuple(index[n] for n in exchange.needs if n in index)
                index[i] = self._exchange(layer, action, exchange, after)
                if self._posted(exchange):
                    calls.after = (*calls.after, index[i])
                if following is None or isinstance(following, WorkRun):
                    yield
        calls.ahead()
        ops.waits = (*ops.waits, *(index[i] for i in unneeded))

    def _posted(self, exchange: Exchange) -> bool:
        """Whether the host posts an exchange's messages, and calls nothing until they are over."""
        host, kernel = self.stage_ops.cost.host, exchange.kernel
        return host is not None and kernel is not None and kernel.far and kernel.library in host.posts

    def turns(self, place: Place, action: Action) -> int:
        """How often a layer's pass yields."""
        pieces, _ = self.stage_ops.runs(self.stage.of(action.microbatch, place[0]).layers[place[1]], action.kind)
        kinds = [isinstance(piece, WorkRun) for piece in pieces]
        return sum(not one and other for one, other in zip(kinds, [*kinds[1:], True], strict=True))

    def _calls(self, place: Place, action: Action, layer: LocalLayer) -> HostCalls:
        """The host's calls of a layer's pass, where the GPU has to wait for them.

        The host comes to a pass when the one before is over and what the first kernel needs is there (it waits for
        messages, reads the loss); inside a pass it runs ahead, but where it waits for the device.
        """
        stage_ops = self.stage_ops
        ops = self.stage_ops.ops
        chunk = self.stage.of(action.microbatch, place[0])
        if stage_ops.cost.host is None or not stage_ops.host_binds(chunk, action.kind):
            return HostCalls(stage_ops, None, iter(()))
        first = place[1] == (0 if action.kind == "F" else len(chunk.layers) - 1)
        after = (*ops.waits, *((ops.kernel,) if ops.kernel >= 0 else ())) if first else ()
        op = Compute(
            f"{HOST_CALL}{_SHORT[action.kind]} {layer.name}",
            0.0,
            HOST_STREAM,
            (),
            "forward" if action.kind == "F" else "backward",
            "host",
            step=ops.step,
            label=Label(layer.name, action.kind, action.microbatch, action.chunk),
            paced=False,
        )
        return HostCalls(stage_ops, op, iter(stage_ops.host_seconds(layer, action.kind)), after)

    def _compute(self, layer: LocalLayer, action: Action, run: WorkRun, after: tuple[int, ...]) -> int:
        stage_ops = self.stage_ops
        ops = self.stage_ops.ops
        spent = stage_ops.price(layer, run)
        phase = "forward" if action.kind == "F" else "backward"
        label = Label(layer.name, "R" if run.part == "R" else action.kind, action.microbatch, action.chunk)
        name = f"{_SHORT[action.kind]} {layer.name}{' ' + run.name if run.name else ''}"
        seconds = spent.seconds * stage_ops.load(layer) if run.name == EXPERTS else spent.seconds
        op = Compute(
            name,
            seconds,
            COMPUTE_STREAM,
            (*ops.waits, *after),
            phase,
            spent.bound,
            spent.flops,
            step=ops.step,
            label=label,
            mix=spent.mix,
        )
        ops.waits, ops.kernel = (), ops.add(op)
        return ops.kernel

    def _exchange(self, layer: LocalLayer, action: Action, exchange: Exchange, after: tuple[int, ...]) -> int:
        """An exchange always follows the kernel listed before it: its data, or its place in the host's order."""
        stage_ops = self.stage_ops
        ops = self.stage_ops.ops
        dtype = exchange.dtype or stage_ops.dtype
        nbytes = float(
            exchange.elements * DTYPE_BYTES[dtype] * (stage_ops.cost.micro_batch_size if exchange.per_sample else 1)
        )
        dim = exchange.communicator or "-".join(exchange.dims)
        label = Label(layer.name, action.kind, action.microbatch, action.chunk, "-".join(exchange.dims))
        after = (*ops.waits, *after, *((ops.kernel,) if ops.kernel >= 0 else ()))
        step = ops.step
        name = f"{exchange.kind} {exchange.name} {layer.name}"
        if exchange.kind == "ring":
            tag = f"{dim} ring"
            # Two streams, since a rank sends and receives at once; whoever waits needs what has come, and the buffer
            # free.
            sent = Send(
                name, nbytes, stage_ops.ring(exchange.dims, True), f"{dim} send", after, tag, step=step, label=label
            )
            ops.add(sent)
            came = Recv(
                name, nbytes, stage_ops.ring(exchange.dims, False), f"{dim} recv", after, tag, step=step, label=label
            )
            return ops.add(came)
        groups = stage_ops.groups(exchange.dims)
        copies = exchange.kind == "copies"
        return ops.add(
            Collective(
                name,
                "sendrecv" if copies else exchange.kind,
                nbytes,
                groups,
                dim,
                after,
                dtype,
                communicator=dim,
                protocol=COPY_ENGINE if copies else None,
                step=step,
                label=label,
                matrix=exchange.matrix,
                kernel=exchange.kernel,
            )
        )
