"""A step sketched: when its ops end if each takes as long as it does by itself, on one rank of each stage.

What is left out is what the engine is for: transfers that meet on links, kernels beside them, ranks of a stage that
differ. What a transfer takes by itself is the engine's, made by all ranks of its stage at once; when it may begin is
the Program's own order of streams and waits, so that a bubble is found as the engine finds it, in a small part of the
time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective, Compute, Op, Program, Recv, Role, Send
from clustersim.core.timeline import Timeline

Transfer = Collective | Send | Recv
Key = tuple[object, ...]
"""Equal for transfers that take equally long."""


@dataclass(eq=False)
class Sketch:
    """A Program of which the first rank of each role stands for it. ``mesh`` : of all ranks."""

    program: Program
    mesh: Mesh
    _keys: dict[object, Key] = field(default_factory=dict, init=False)
    _met: dict[object, object] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.role_of = {int(role.ranks[0]): i for i, role in enumerate(self.program.roles)}

    def seconds(self, taken: Mapping[Key, float]) -> float:
        """Of a step in the steady state; ``taken`` : what transfers take [s], as of :func:`spent`."""
        sites = _SketchOps()
        for i, role in enumerate(self.program.roles):
            self._lay(sites, i, role, taken)
        ends: dict[int, float] = defaultdict(float)
        for step, end in zip(sites.step, sites.ends(), strict=True):
            ends[step] = max(ends[step], end)
        first = min(ends)
        last = max(ends)
        return (ends[last] - ends[first]) / (last - first) if last > first else ends[last]

    def _lay(self, sites: _SketchOps, i: int, role: Role, taken: Mapping[Key, float]) -> None:
        streams: dict[str, int] = {}
        role_sites: list[int] = []
        uses = Counter[object]()
        for op in role.ops:
            if isinstance(op, Compute):
                spent = op.duration
                site = sites.new(float(spent if isinstance(spent, float) else np.max(spent)), op.step)
            else:
                meets = self._meets(i, op)
                uses[meets] += 1
                site = sites.at(meets and (meets, uses[meets]), taken[self._key(i, op)], op.step)
            before = streams.get(op.stream)
            sites.wait(site, {role_sites[a] for a in op.after} | (set() if before is None else {before}))
            streams[op.stream] = site
            role_sites.append(site)

    def _meets(self, i: int, op: Transfer) -> object:
        """Equal for ops of two roles that begin and end together; None where only ``i`` takes part."""
        if isinstance(op, Collective):
            if (key := (i, id(op.groups))) not in self._met:
                own = op.groups[(op.groups == self.program.roles[i].ranks[0]).any(axis=1)][0]
                self._met[key] = int(own[0]) if sum(rank in self.role_of for rank in own.tolist()) > 1 else None
            first = self._met[key]
            return None if first is None else (op.communicator, first)
        peer_role = self.role_of.get(int(op.peer[0]), i)
        return (
            None
            if peer_role == i
            else (min(i, peer_role), max(i, peer_role), isinstance(op, Send) == (i < peer_role), op.tag)
        )

    def _key(self, i: int, op: Transfer) -> Key:
        if isinstance(op, Collective):
            asked_for = op.kind, op.nbytes, op.dtype, op.protocol, id(op.matrix), op.kernel
            return op.communicator, *asked_for, op.groups.shape[1]
        if (own := (i, id(op.peer), op.nbytes)) not in self._keys:
            peer_role = self.role_of.get(int(op.peer[0]), i)
            near = self.mesh.gpus[[self.program.roles[k].ranks[0] for k in (i, peer_role)]] // self.mesh.nproc_per_node
            self._keys[own] = "ring" if peer_role == i else "message", op.nbytes, bool(near[0] == near[1])
        return self._keys[own]

    def alone(self, taken: Mapping[Key, float]) -> tuple[Program, tuple[Key, ...]]:
        """A Program that makes each transfer that is not ``taken`` yet once, one after the other, and which."""
        transfers: dict[Key, dict[int, Transfer]] = {}
        for i, role in enumerate(self.program.roles):
            for op in role.ops:
                if not isinstance(op, Compute | Recv) and (key := self._key(i, op)) not in taken:
                    transfers.setdefault(key, {}).setdefault(i, op)
        role_ops: list[list[Op]] = [[] for _ in self.program.roles]
        for k, by_role in enumerate(transfers.values()):
            for i, op in self._parts(by_role):
                waits = (len(role_ops[i]) - 1,) if role_ops[i] else ()
                stream = type(op).__name__
                role_ops[i].append(msgspec.structs.replace(op, name=str(k), after=waits, stream=stream, step=0))
        roles = tuple(replace(role, ops=tuple(ops)) for role, ops in zip(self.program.roles, role_ops, strict=True))
        return replace(self.program, roles=roles), tuple(transfers)

    def _parts(self, by_role: Mapping[int, Transfer]) -> Iterator[tuple[int, Transfer]]:
        """One transfer, as every role that takes part in it makes it."""
        i, op = next(iter(by_role.items()))
        if isinstance(op, Collective):
            meets = self._meets(i, op)
            yield from (
                (k, transfer)
                for k, transfer in by_role.items()
                if k == i or (meets and self._meets(k, transfer) == meets)
            )
            return
        ranks = self.program.roles[i].ranks
        peer_role = self.role_of.get(int(op.peer[0]), i)
        yield i, op
        # On a ring each receives from whoever sends to it; between stages, position by position.
        came = ranks[np.argsort(op.peer)] if peer_role == i else ranks
        yield peer_role, Recv(op.name, op.nbytes, came, tag=op.tag)


def spent(timeline: Timeline, keys: tuple[Key, ...]) -> dict[Key, float]:
    """What each transfer of :meth:`Sketch.alone` took [s], of the role where it took longest."""
    rows = timeline.per_op()
    seconds_of = dict.fromkeys(keys, 0.0)
    for i, op in enumerate(timeline.ops):
        if rows["ranks"][i]:
            key = keys[int(op.name)]
            seconds_of[key] = max(seconds_of[key], float(rows["seconds"][i] / rows["ranks"][i]))
    return seconds_of


@dataclass(eq=False)
class _SketchOps:
    """Ops, those that begin and end together as one: what each takes, and who waits for it."""

    spent: list[float] = field(default_factory=list)
    step: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    behind: list[list[int]] = field(default_factory=list)
    shared: dict[object, int] = field(default_factory=dict)

    def new(self, spent: float, step: int) -> int:
        """One more."""
        self.spent.append(spent)
        self.step.append(step)
        self.missing.append(0)
        self.behind.append([])
        return len(self.spent) - 1

    def at(self, key: object, spent: float, step: int) -> int:
        """The one of a key; a new one for None."""
        if key is None:
            return self.new(spent, step)
        if key not in self.shared:
            self.shared[key] = self.new(spent, step)
        return self.shared[key]

    def wait(self, site: int, on: set[int]) -> None:
        """``site`` begins when these have ended."""
        self.missing[site] += len(on)
        for earlier in on:
            self.behind[earlier].append(site)

    def ends(self) -> list[float]:
        """When each ends [s]. Raises :class:`ProgramError` where some wait for each other."""
        start = [0.0] * len(self.spent)
        left = self.missing.copy()
        ready = [site for site, missing in enumerate(left) if not missing]
        for site in ready:
            end = start[site] = start[site] + self.spent[site]
            for later in self.behind[site]:
                if end > start[later]:
                    start[later] = end
                left[later] -= 1
                if not left[later]:
                    ready.append(later)
        if len(ready) < len(start):
            raise ProgramError("ops of a sketched step wait for each other")
        return start
