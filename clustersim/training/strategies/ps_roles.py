"""What a worker of a parameter server does: pull, forward, backward, push; and what a server does: take gradients, add
them up or apply them at once, answer pulls.

A server cannot know who comes first, so its own work is :class:`~clustersim.core.program.Serve`: in order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from clustersim.core.mesh import Ints
from clustersim.core.model import Model, StepCost
from clustersim.core.program import Serve
from clustersim.training.schedules import Action
from clustersim.training.strategies import base
from clustersim.training.strategies.primitives import (
    Link,
    answer,
    collective,
    pull,
    push,
    request,
    requested,
    take,
    wait,
)
from clustersim.training.strategies.server_layout import ServerLayout
from clustersim.training.strategies.walk import WHOLE, LayerPart, Place

Waits = dict[int, tuple[int, ...]]
"""By piece (what travels together, usually one layer) or by layer: the ops that must have ended."""
SERVER_STREAM = "server"
ACCUMULATE_PASSES = 3.0
"""Memory traffic of adding a gradient to a sum, in tensors: two reads and a write."""


def pull_order(layers: Sequence[int], as_pushed: bool) -> Sequence[int]:
    """In which order layers are pulled; both ends of a connection must agree."""
    return layers[::-1] if as_pushed else layers


class WorkerRole:
    """The op list of workers that all do the same.

    ops : to append to. ranks : (n,) int, of the role.
    serves : the server that sits on this very rank, or -1: what it keeps needs no transfer.
    """

    def __init__(
        self, ops: base.OpList, model: Model, cost: StepCost, layout: ServerLayout, ranks: Ints, serves: int
    ) -> None:
        self.ops = ops
        self.model = model
        self.cost = cost
        self.layout = layout
        self.serves = serves
        self.by_layer = layout.config.by_layer
        self.element = layout.element
        self.talks = np.isin(ranks, layout.leaders)
        names = [layout.server_name(s) for s in range(len(layout.servers))]
        peers = [np.where(self.talks, server, -1) for server in layout.servers]
        self.links = [
            (Link(peer, f"push {name}"), Link(peer, f"pull {name}")) for peer, name in zip(peers, names, strict=True)
        ]
        self.ends_with = {piece.layers[0]: i for i, piece in enumerate(layout.pieces)}
        self.ready: Waits = {}
        self.pushed: Waits = {}
        self.at_home: Waits = {}

    def fetch(self, local: Waits) -> Waits:
        """Pull every piece, in the order forward needs them (``by_layer``: in the order their pushes end); what the
        first layer of each must wait for.

        ``local`` : what is to wait for where this rank's own server keeps a part.
        """
        pieces = self.layout.pieces
        servers = [s for s in range(len(self.layout.servers)) if s != self.serves]
        every = tuple(i for ends in self.pushed.values() for i in ends)
        as_pushed = self.by_layer and bool(self.pushed)
        requests = dict[int, int]()
        if not self.by_layer:
            requests = {s: self._ask("all layers", s, every) for s in servers}
        got: Waits = {}
        for i in pull_order(range(len(pieces)), as_pushed):
            waits = list(local.get(i, ()))
            piece_name = pieces[i].name
            for s in servers:
                if not self.layout.numel[i, s]:
                    continue
                if self.by_layer:
                    requests[s] = self._ask(piece_name, s, self.pushed.get(i, ()))
                name = f"{piece_name} <- {self.layout.server_name(s)}"
                waits.append(
                    pull(self.ops, name, float(self.layout.numel[i, s] * self.element), self.links[s][1], requests[s])
                )
            got[pieces[i].layers[0]] = self._spread(i, "broadcast", tuple(waits))
        return got

    def _ask(self, piece_name: str, s: int, after: tuple[int, ...]) -> int:
        return request(self.ops, f"{piece_name} -> {self.layout.server_name(s)}", self.links[s][1], after)

    def begin_step(self, ready: Waits) -> None:
        """Nothing is pushed yet; ``ready`` : what the first layer of each piece waits for."""
        self.ready = ready
        self.pushed = {}
        self.at_home = {}

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[LayerPart]:
        """Forward, each layer once its parameters are there; backward, and a push of each piece's gradients once they
        are final.

        All passes but the last only add up gradients in the worker's own memory.
        """
        i = place[1]
        passes = action.microbatch
        if action.kind == "F":
            self.ops.waits = self.ready.pop(i, ())
        yield WHOLE
        if action.kind == "F" or not last:
            return
        done = self.ops.kernel
        if passes:
            traffic = 3.0 * passes * float(self.layout.by_layer[i]) * self.element
            seconds = base.gradient_pass(traffic, self.cost)
            name = f"accumulate {self.model.layers[i].name}"
            done = self.ops.compute(name, seconds, "gradient", nbytes=traffic)
        if i in self.ends_with:
            self._push(self.ends_with[i], done)

    def _push(self, i: int, done: int) -> None:
        after = self._spread(i, "reduce", (done,))
        ends = []
        for s in np.flatnonzero(self.layout.numel[i]).tolist():
            if s == self.serves:
                self.at_home[i] = after
                continue
            name = f"{self.layout.pieces[i].name} -> {self.layout.server_name(s)}"
            ends.append(push(self.ops, name, float(self.layout.numel[i, s] * self.element), self.links[s][0], after))
        if ends:
            self.pushed[i] = tuple(ends)

    def _spread(self, i: int, kind: str, after: tuple[int, ...]) -> tuple[int, ...]:
        """Within a worker of several GPUs: parameters to all of them, gradients to the first."""
        nbytes = float(self.layout.numel[i].sum() * self.element)
        if self.layout.workers.shape[1] == 1 or not nbytes:
            return after
        name = f"{self.layout.pieces[i].name} inside a worker"
        return (
            collective(
                self.ops,
                kind,
                name,
                nbytes,
                self.layout.workers,
                after,
                stream=f"{kind} inside",
                communicator=f"{kind} inside",
            ),
        )

    def update(self, ready: Waits) -> None:
        """The worker's own optimizer step, where the server only adds up gradients."""
        got = wait(self.ops, "for aggregated gradients", tuple(dict.fromkeys(i for w in ready.values() for i in w)))
        self.ops.compute("optimizer", self.cost.optimizer, "optimizer", after=(got,))


class ServerRole:
    """A synchronous server: gradients of all workers are added up as they come, then used once. What travels together
    (a piece, usually one layer) is counted by ``i``.

    ops : to append to. s : which server. rate : [bytes/s] of its memory.
    own : the worker on the same rank, or -1; its gradients need no transfer.
    """

    def __init__(self, ops: base.OpList, model: Model, cost: StepCost, layout: ServerLayout, s: int) -> None:
        self.ops = ops
        self.model = model
        self.cost = cost
        self.layout = layout
        self.s = s
        self.by_layer = layout.config.by_layer
        worker = np.flatnonzero(layout.leaders == layout.servers[s])
        self.own = int(worker[0]) if layout.config.server == "worker" else -1
        self.kept = [i for i in range(len(layout.pieces)) if layout.numel[i, s]]
        memory = cost.host_bandwidth if layout.config.server == "cpu" else cost.grad_copy_bandwidth
        self.rate = memory / float(layout.neighbours[s])
        self.done: Waits = {}
        self.began = False
        leaders = layout.leaders.tolist()
        self.links = [
            (Link(np.array([rank]), f"push {w}"), Link(np.array([rank]), f"pull {w}")) for w, rank in enumerate(leaders)
        ]

    def fresh(self, w: int) -> Waits:
        """What worker ``w`` may read: per piece, the ops that must have ended."""
        if self.by_layer or not self.done:
            return self.done
        every = wait(
            self.ops, "for every update", tuple(i for ends in self.done.values() for i in ends), stream=f"wait {w}"
        )
        return dict.fromkeys(self.kept, (every,))

    def answer(self) -> Waits:
        """Answer everybody's pulls of this step; returns what the worker on this very rank waits for."""
        for w, (_, link) in enumerate(self.links):
            if w == self.own:
                continue
            fresh = self.fresh(w)
            to = self.layout.server_name(self.s)
            if not self.by_layer:
                request_op = requested(self.ops, f"all layers worker {w} -> {to}", link)
            for i in pull_order(self.kept, self.by_layer and self.began):
                layer = self.layout.pieces[i].name
                if self.by_layer:
                    request_op = requested(self.ops, f"{layer} worker {w} -> {to}", link)
                name = f"{layer} worker {w} <- {to}"
                answer(self.ops, name, self._bytes(i), link, (request_op, *fresh.get(i, ())))
        return self.fresh(self.own) if self.own >= 0 else {}

    def collect(self, own: Waits) -> None:
        """Take everybody's gradients of this step; ``own`` : when those of the worker on this rank are there."""
        came: dict[int, list[tuple[int, tuple[int, ...]]]] = {i: [] for i in self.kept}
        for w, (link, _) in enumerate(self.links):
            for i in reversed(self.kept):
                if w == self.own:
                    came[i].append((w, own[i]))
                    continue
                name = f"{self.layout.pieces[i].name} worker {w} -> {self.layout.server_name(self.s)}"
                came[i].append((w, (take(self.ops, name, self._bytes(i), link),)))
        self.use(came)

    def use(self, came: dict[int, list[tuple[int, tuple[int, ...]]]]) -> None:
        """Add up what came of each layer, then update it."""
        for i in reversed(self.kept):
            name = self.layout.pieces[i].name
            summed = []
            for w, after in came[i]:
                summed.append(
                    self._serve(f"accumulate {name} worker {w}", self.accumulate_seconds(i), "gradient", after)
                )
            if self.layout.config.server_updates:
                self.done[i] = (self._serve(f"update {name}", self.update_seconds(i), "optimizer", tuple(summed)),)
            else:
                self.done[i] = tuple(summed)
        self.began = True

    def accumulate_seconds(self, i: int) -> float:
        """Adding one gradient of a layer to the sum."""
        return ACCUMULATE_PASSES * self._bytes(i) / self.rate

    def update_seconds(self, i: int) -> float:
        """The optimizer on what this server keeps of a layer: a fused pass through its memory."""
        share = float(self.layout.numel[i, self.s]) / self.model.parameters
        return self.cost.optimizer_traffic * share / self.rate

    def _bytes(self, i: int) -> float:
        return float(self.layout.numel[i, self.s] * self.layout.element)

    def _serve(self, name: str, seconds: float, phase: str, after: tuple[int, ...]) -> int:
        nbytes = seconds * self.rate
        return self.ops.add(
            Serve(name, seconds, SERVER_STREAM, after, phase, "memory", 0.0, nbytes, step=self.ops.step, paced=False)
        )


class AsyncServer(ServerRole):
    """An asynchronous server: every gradient is applied when it comes, and a worker reads what there is.

    With a bound (stale synchronous parallel: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server", NIPS 2013) a worker that is about to begin step t waits until the gradients of step
    ``t - 1 - staleness`` of *all* workers have been applied. Bound 0 is bulk synchronous. Who is applied when is the
    run's to decide; who must have been applied before a read is known beforehand, so it is a list of ``after``.
    """

    def __init__(self, ops: base.OpList, model: Model, cost: StepCost, layout: ServerLayout, s: int) -> None:
        super().__init__(ops, model, cost, layout, s)
        self.staleness = layout.config.staleness
        self.applied: list[dict[int, list[int]]] = []  # [step][layer][worker]: the op that applied its gradient
        self.clocks: dict[tuple[int, int], int] = {}

    def fresh(self, w: int) -> Waits:
        """Its own gradients, and of everybody what the bound asks for."""
        if not self.applied:
            return {}
        needs = {i: (self.applied[-1][i][w], *self._clock(i)) for i in self.kept}
        if self.by_layer:
            return needs
        every = tuple(dict.fromkeys(op for ops in needs.values() for op in ops))
        return dict.fromkeys(self.kept, (wait(self.ops, f"for the turn of worker {w}", every, stream=f"wait {w}"),))

    def _clock(self, i: int) -> tuple[int, ...]:
        """An op that ends when the gradients of a layer that the bound asks for have been applied, of all workers."""
        if self.staleness is None or self.staleness >= len(self.applied):
            return ()
        step = len(self.applied) - 1 - self.staleness
        if (step, i) not in self.clocks:
            name = f"for step {step} of {self.layout.pieces[i].name}"
            self.clocks[step, i] = wait(self.ops, name, tuple(self.applied[step][i]), stream=f"clock {i}")
        return (self.clocks[step, i],)

    def use(self, came: dict[int, list[tuple[int, tuple[int, ...]]]]) -> None:
        """Apply each gradient on arrival."""
        self.applied.append({i: [] for i in self.kept})
        for i in reversed(self.kept):
            for w, after in came[i]:
                name = f"apply {self.layout.pieces[i].name} worker {w}"
                self.applied[-1][i].append(self._serve(name, self.update_seconds(i), "optimizer", after))
        self.began = True
