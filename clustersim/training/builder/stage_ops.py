"""Where a stage's ops are laid: its list and its groups, runs of its layers' kernels, and what these and the host's
calls take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.label import Label
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective
from clustersim.model.seconds.host import HostLaw
from clustersim.model.seconds.local import LocalCost, Runs
from clustersim.model.seconds.price import Pass
from clustersim.training.partition.base import Chunk, Exchange, Item, LocalLayer, Work
from clustersim.training.partition.nodes import WAITS
from clustersim.training.strategies.base import OpList

PARTS = {"F": "F", "B": "RIW", "I": "RI", "W": "W"}
"""Which parts of a layer's items each kind of action plays."""
EXPERTS = "experts"
"""Works that take as long as their rank has rows; see
:attr:`clustersim.training.partition.base.LocalLayer.expert_load`."""


class WorkRun(NamedTuple):
    """Adjacent works with nothing to wait for in between: one op. ``items`` : their places in the layer's list."""

    name: str
    runs: Runs
    part: str
    needs: tuple[int, ...]
    items: tuple[int, ...]


Pieces: TypeAlias = "tuple[WorkRun | tuple[int, Exchange], ...]"
"""What an action plays of a layer, in order; an exchange comes with its place in the layer's list."""


@dataclass(eq=False)
class StageOps:
    """Where ops are laid: one stage's ranks, and the list that their ops are in.

    mesh : with its dimensions. ranks : (n,) int, of the stage, ascending. cost : prices.
    dtype : of activations and the gradients of activations.
    """

    mesh: Mesh
    ranks: Ints
    cost: LocalCost
    dtype: str
    ops: OpList = field(default_factory=OpList)
    _groups: dict[tuple[str, ...], Ints] = field(default_factory=dict, init=False, repr=False)
    _rings: dict[tuple[tuple[str, ...], bool], Ints] = field(default_factory=dict, init=False, repr=False)
    _loads: dict[tuple[float, ...], Floats] = field(default_factory=dict, init=False, repr=False)
    _runs: dict[tuple[int, str], tuple[Sequence[Item], Pieces, tuple[int, ...]]] = field(
        default_factory=dict, init=False, repr=False
    )
    _calls: dict[tuple[int, int, str, str], tuple[LocalLayer, tuple[float, ...]]] = field(
        default_factory=dict, init=False, repr=False
    )
    _binds: dict[tuple[int, str], tuple[Chunk, bool]] = field(default_factory=dict, init=False, repr=False)

    def groups(self, dims: tuple[str, ...]) -> Ints:
        """(groups, members): the stage's groups over these dimensions, the same array at every call."""
        known = self._groups
        if dims not in known:
            everywhere = self.mesh.groups(*dims)
            mine = everywhere[np.isin(everywhere, self.ranks).any(axis=1)]
            known[dims] = everywhere if len(mine) == len(everywhere) else mine
        return known[dims]

    @property
    def rate(self) -> float:
        """[bytes/s] of a pass through the GPU's memory."""
        return self.cost.where.device.stream_rate()

    def collective(
        self, kind: str, name: str, nbytes: float, dtype: str, dims: tuple[str, ...], after: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Append a collective over mesh dimensions on their own stream; nothing, and no wait, where a group has one
        rank. ``name`` : of the tensor."""
        groups = self.groups(dims)
        dim = "-".join(dims)
        step = self.ops.step
        if groups.shape[1] == 1:
            return after
        op = Collective(
            f"{kind} {name}",
            kind,
            nbytes,
            groups,
            dim,
            after,
            dtype,
            communicator=dim,
            step=step,
            label=Label(name, dim=dim),
        )
        return (self.ops.add(op),)

    def ring(self, dims: tuple[str, ...], forward: bool) -> Ints:
        """(n,) int: whom each rank sends to on the ring of its group (``forward``), or receives from."""
        known = self._rings
        if (dims, forward) not in known:
            groups = self.groups(dims)
            peer = np.full(self.mesh.workers, -1, dtype=np.int64)
            peer[groups] = np.roll(groups, -1 if forward else 1, axis=1)
            known[dims, forward] = peer[self.ranks]
        return known[dims, forward]

    def host_seconds(self, layer: LocalLayer, kind: str) -> tuple[float, ...]:
        """Seconds [s] of the host's calls of an action's pass of a layer: ahead of each run of its kernels, and behind
        the last; empty where nobody asks.

        Of a layer in which the host waits for the device, as much is ahead of a run as its kernels would else come too
        early. All calls of another are ahead of its last run: the levels of the law were found so.
        """
        law = self.cost.host
        if law is None:
            return ()
        key = id(layer.forward), id(layer.backward), layer.kind, kind  # which the blocks of a stage share
        if key not in self._calls:
            pace = 1.0
            if law.layer_time is not None and layer.kind == "block":
                whole = self._whole(law, layer)
                pace = law.layer_time / whole if whole else 1.0
            ahead = tuple(self._called(law, layer, kind, pace))
            if not waits_in(layer):
                ahead = (*(0.0 for _ in ahead[2:]), sum(ahead), 0.0) if ahead[1:] else ahead
            self._calls[key] = layer, ahead
        return self._calls[key][1]

    def _whole(self, law: HostLaw, layer: LocalLayer) -> float:
        """Seconds [s] of all calls of a layer's forward and backward, of which nothing is repeated."""
        spent = 0.0
        modules: set[tuple[str, ...]] = set()
        for item in (*layer.forward, *layer.backward):
            if isinstance(item, Work) and item.part != "R":
                spent += sum(seconds for _, seconds in law.calls(item.name, item.kernels, item.part, modules))
            elif isinstance(item, Exchange) and item.part != "R" and self.groups(item.dims).shape[1] > 1:
                spent += law.exchange(item.name, item.kind)
        return spent

    def _called(self, law: HostLaw, layer: LocalLayer, kind: str, pace: float) -> Iterator[float]:
        """:meth:`host_seconds` where a call takes ``pace`` times as long as the law says.

        A run begins when none of its kernels will have to wait for its call any more: so late that the one that is
        called last, for what the device has done until then, is called in time.
        """
        items = layer.forward if kind == "F" else layer.backward
        modules: set[tuple[str, ...]] = set()
        dense = self.cost.in_recipe(layer.kind)
        spent = 0.0
        for piece in self.runs(layer, kind)[0]:
            if not isinstance(piece, WorkRun):
                spent += pace * law.exchange(piece[1].name, piece[1].kind)
                continue
            late = computed = 0.0
            for work in (item for item in map(items.__getitem__, piece.items) if isinstance(item, Work)):
                for kernel, seconds in law.calls(work.name, work.kernels, work.part, modules):
                    spent += pace * seconds
                    late = max(late, spent - computed)
                    computed += self.cost.kernel_seconds(kernel, work.part, dense=dense)
            yield late
            spent -= late
        yield spent

    def host_binds(self, chunk: Chunk, kind: str) -> bool:
        """Whether the GPU has to wait for the host's calls of a chunk's pass.

        It does where calling forward and backward takes longer than computing them. Where the host waits for the device
        in forward it cannot save up time in backward: forward's calls are played whatever they sum to, since what is
        called behind a wait is never ahead, and backward is asked for itself.
        """
        waits = any(waits_in(layer) for layer in chunk.layers)
        kinds = "FB" if not waits else "F" if kind == "F" else "B"
        if (id(chunk), kinds) not in self._binds:
            calls = sum(sum(self.host_seconds(layer, each)) for layer in chunk.layers for each in kinds)
            ahead = 0.0 if waits and kind == "F" else sum(self._kernels(layer, kinds) for layer in chunk.layers)
            self._binds[id(chunk), kinds] = chunk, calls > ahead
        return self._binds[id(chunk), kinds][1]

    def _kernels(self, layer: LocalLayer, kinds: str) -> float:
        pieces = (piece for kind in kinds for piece in self.runs(layer, kind)[0])
        return sum(self.price(layer, piece).seconds for piece in pieces if isinstance(piece, WorkRun))

    def price(self, layer: LocalLayer, run: WorkRun) -> Pass:
        """What a run of a layer's works costs."""
        dense = self.cost.in_recipe(layer.kind)
        if run.items[0]:
            return self.cost.work(run.runs, dense=dense)
        # Quantised weights are written out for each pass that reads them: forward, forward again, gradients of inputs.
        ahead = run.part == "F"
        again = not ahead and any(item.part == "R" for item in layer.backward)
        cast = layer.parameters if ahead else layer.trained
        return self.cost.work(run.runs, dense=dense, cast=cast, packed=layer.quantised * (2 if again else 1))

    def load(self, layer: LocalLayer) -> float | Floats:
        """Rows of a rank's experts over their mean: one number, or (n,) where positions differ."""
        if not layer.expert_load:
            return 1.0
        if layer.expert_load not in self._loads:
            positions = self.mesh.coordinates("ep")[self.ranks]
            self._loads[layer.expert_load] = np.array(layer.expert_load)[positions]
        return self._loads[layer.expert_load]

    def runs(self, layer: LocalLayer, kind: str) -> tuple[Pieces, tuple[int, ...]]:
        """What an action of this kind plays of a layer, and the places of exchanges that what follows it waits for."""
        known = self._runs
        items = layer.forward if kind == "F" else layer.backward
        if (id(items), kind) not in known:
            pieces = tuple(_joined(items, PARTS[kind], self))
            known[id(items), kind] = items, pieces, _unneeded(pieces)
        return known[id(items), kind][1:]


def waits_in(layer: LocalLayer) -> bool:
    """Whether the host waits for the device in a layer's forward."""
    return any(item.name == WAITS for item in layer.forward)


def _joined(items: Sequence[Item], parts: str, stage_ops: StageOps) -> Iterator[WorkRun | tuple[int, Exchange]]:
    """Items of these parts, works joined where nothing is waited for between them; exchanges of one rank are none."""
    real = [not isinstance(item, Exchange) or stage_ops.groups(item.dims).shape[1] > 1 for item in items]
    awaited = {n for item in items for n in item.needs}
    joined_works: list[tuple[int, Work]] = []
    for i, item in enumerate(items):
        if item.part not in parts or not real[i]:
            continue
        if isinstance(item, Exchange):
            if joined_works:
                yield _run(joined_works, real)
                joined_works = []
            yield i, item
            continue
        waits = any(real[n] and isinstance(items[n], Exchange) for n in item.needs)
        cut = joined_works and (waits or joined_works[-1][0] in awaited or _apart(joined_works[-1][1], item))
        if cut:
            yield _run(joined_works, real)
            joined_works = []
        joined_works.append((i, item))
    if joined_works:
        yield _run(joined_works, real)


def _apart(one: Work, other: Work) -> bool:
    """Whether two works are ops of their own: repeated forwards, experts, whose load differs between ranks, and what
    the host waits for."""
    alone = any((one.name == name) != (other.name == name) for name in (EXPERTS, WAITS))
    return alone or (one.part == "R") != (other.part == "R")


def _run(joined_works: Sequence[tuple[int, Work]], real: Sequence[bool]) -> WorkRun:
    works = [work for _, work in joined_works]
    names = list(dict.fromkeys(work.name for work in works))
    needs = tuple(n for work in works for n in work.needs if real[n])
    part = {frozenset("IW"): "B"}.get(frozenset(work.part for work in works), works[0].part)
    return WorkRun(
        "+".join(names),
        tuple((work.kernels, work.part) for work in works),
        part,
        needs,
        tuple(i for i, _ in joined_works),
    )


def _unneeded(pieces: Pieces) -> tuple[int, ...]:
    """Places of exchanges that nothing in the list waits for: what follows the list does."""
    needed = {n for piece in pieces for n in (piece.needs if isinstance(piece, WorkRun) else piece[1].needs)}
    return tuple(piece[0] for piece in pieces if not isinstance(piece, WorkRun) and piece[0] not in needed)
