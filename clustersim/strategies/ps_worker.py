"""What a worker of a parameter server does: pull, forward, backward, push."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from clustersim.mesh import Ints
from clustersim.model import Model, StepCost
from clustersim.schedules import Action
from clustersim.strategies import base
from clustersim.strategies.primitives import Link, collective, pull, push, request, wait
from clustersim.strategies.server_layout import Layout
from clustersim.strategies.walk import WHOLE, Part, Place


def pull_order(layers: Sequence[int], as_pushed: bool) -> Sequence[int]:
    """In which order layers are pulled; both ends of a connection must agree."""
    return layers[::-1] if as_pushed else layers


class Worker:
    """The op list of workers that all do the same.

    Parameters
    ----------
    ops : to append to. ranks : (n,) int, of the role.
    serves : the server that sits on this very rank, or -1: what it keeps needs no transfer.
    """

    def __init__(
        self, ops: base.OpList, model: Model, cost: StepCost, layout: Layout, ranks: Ints, serves: int
    ) -> None:
        self.ops, self.model, self.cost, self.layout, self.serves = ops, model, cost, layout, serves
        self.by_layer, self.element = layout.config.by_layer, layout.element
        self.talks = np.isin(ranks, layout.leaders)
        self.links = [self._link(s) for s in range(len(layout.servers))]
        self.ends_with = {piece.layers[0]: i for i, piece in enumerate(layout.pieces)}
        self.ready: dict[int, tuple[int, ...]] = {}
        self.pushed: dict[int, tuple[int, ...]] = {}
        self.at_home: dict[int, tuple[int, ...]] = {}

    def _link(self, s: int) -> tuple[Link, Link]:
        peer = np.where(self.talks, self.layout.servers[s], -1)
        return Link(peer, f"push {self.layout.server_name(s)}"), Link(peer, f"pull {self.layout.server_name(s)}")

    def fetch(self, local: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        """Pull every piece, in the order forward needs them (``by_layer``: in the order their pushes end); what the
        first layer of each must wait for.

        ``local`` : what is to wait for where this rank's own server keeps a part.
        """
        pieces = self.layout.pieces
        servers = [s for s in range(len(self.layout.servers)) if s != self.serves]
        every = tuple(i for ends in self.pushed.values() for i in ends)
        as_pushed, asked = self.by_layer and bool(self.pushed), dict[int, int]()
        if not self.by_layer:
            asked = {s: self._ask("all layers", s, every) for s in servers}
        got: dict[int, tuple[int, ...]] = {}
        for i in pull_order(range(len(pieces)), as_pushed):
            waits, what = list(local.get(i, ())), pieces[i].name
            for s in servers:
                if not self.layout.numel[i, s]:
                    continue
                if self.by_layer:
                    asked[s] = self._ask(what, s, self.pushed.get(i, ()))
                name = f"{what} <- {self.layout.server_name(s)}"
                waits.append(
                    pull(self.ops, name, float(self.layout.numel[i, s] * self.element), self.links[s][1], asked[s])
                )
            got[pieces[i].layers[0]] = self._spread(i, "broadcast", tuple(waits))
        return got

    def _ask(self, what: str, s: int, after: tuple[int, ...]) -> int:
        return request(self.ops, f"{what} -> {self.layout.server_name(s)}", self.links[s][1], after)

    def begin_step(self, ready: dict[int, tuple[int, ...]]) -> None:
        """Nothing is pushed yet; ``ready`` : what the first layer of each piece waits for."""
        self.ready, self.pushed, self.at_home = ready, {}, {}

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[Part]:
        """Forward, each layer once its parameters are there; backward, and a push of each piece's gradients once they
        are final.

        All passes but the last only add up gradients in the worker's own memory.
        """
        i, passes = place[1], action.microbatch
        if action.kind == "F":
            self.ops.waits = self.ready.pop(i, ())
        yield WHOLE
        if action.kind == "F" or not last:
            return
        done = self.ops.kernel
        if passes:
            traffic = 3.0 * passes * float(self.layout.by_layer[i]) * self.element
            seconds, name = base.gradient_pass(traffic, self.cost), f"accumulate {self.model.layers[i].name}"
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
        return (collective(self.ops, kind, name, nbytes, self.layout.workers, after, stream=f"{kind} inside",
                           communicator=f"{kind} inside"),)  # fmt: skip

    def update(self, ready: dict[int, tuple[int, ...]]) -> None:
        """The worker's own optimizer step, where the server only adds up gradients."""
        got = wait(self.ops, "for aggregated gradients", tuple(dict.fromkeys(i for w in ready.values() for i in w)))
        self.ops.compute("optimizer", self.cost.optimizer, "optimizer", after=(got,))
