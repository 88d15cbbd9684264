"""What should happen: ops on streams, in the words of PyTorch and NCCL. Knows no clock and no graph.

A Program is SPMD. One op stands for the same op on every rank of its role; a duration is one number or one number per
rank; a collective carries its groups as an array. Ops of one stream run in the order they are listed; an op also waits
for the ops named in ``after``, on its own rank. Nothing else orders anything, so overlap is what the streams allow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import msgspec
import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.byte_matrix import ByteMatrix
from clustersim.core.collective_kinds import COLLECTIVES as COLLECTIVES
from clustersim.core.collective_kinds import COPY_ENGINE as COPY_ENGINE
from clustersim.core.collective_kinds import DTYPE_BYTES as DTYPE_BYTES
from clustersim.core.collective_kinds import REDUCING as REDUCING
from clustersim.core.collective_kinds import ROOTED as ROOTED
from clustersim.core.collective_kinds import SPLIT as SPLIT
from clustersim.core.collective_kinds import ExchangeKernel as ExchangeKernel
from clustersim.core.errors import ProgramError
from clustersim.core.label import Label
from clustersim.core.mix import Mix
from clustersim.core.repeated import distinct
from clustersim.core.units import format_bytes, format_time

PHASES = ("forward", "backward", "optimizer", "gradient", "memcpy", "input", "communication", "other")
"""What an op is part of; colours, shares and bubbles are told by it. ``gradient`` is bucket copies and casts."""

HOST_CALL = "call "
"""What the names of ops begin with in which the host calls a layer's modules."""
BOUNDS = ("compute", "memory", "launch", "communication", "host")
"""What limits an op's own speed."""
GPU_BOUNDS = frozenset({"compute", "memory"})
"""Of these, what a slower GPU stretches; launches and input are the host's."""

COMPUTE_STREAM = "compute"
COMM_STREAM = "comm"
HOST_STREAM = "host"
"""The usual streams: kernels of the model; the process group's NCCL stream; what the rank's process does on the CPU,
which kernels wait for."""
DATA_LOADER = "data loader"
"""On the host's stream of a measured run: the wait for the next batch."""


class Compute(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A span of work on the rank's own device (or host), which no other rank can slow down.

    Parameters
    ----------
    name : ``"fwd layers.3"``: the class first, since viewers colour by name.
    duration : float or (n_ranks,) float [s], of this role's ranks in order, at their usual pace: see :func:`seconds`.
    after : indices, in the role's op list, of earlier ops that must have ended on the same rank.
    phase : one of :data:`PHASES`. bound : one of :data:`BOUNDS`.
    flops, nbytes : floating-point operations and HBM bytes of one rank, for MFU and roofline shares.
    paced : whether the rank's pace (:attr:`Role.pace`) lengthens it. mix : what its usual time is spent on.
    """

    name: str
    duration: float | Floats
    stream: str = COMPUTE_STREAM
    after: tuple[int, ...] = ()
    phase: str = "other"
    bound: str = "compute"
    flops: float = 0.0
    nbytes: float = 0.0
    step: int = 0
    label: Label | None = None
    paced: bool = True
    mix: Mix | None = None


class Serve(Compute, frozen=True, eq=False, gc=False):
    """Work that is done first come, first served: the one place where the run, not the list, decides an order.

    A server with many clients cannot know whose gradient comes first. Among the Serve ops of one stream and rank, the
    one whose needs are met first runs first (ties by their place in the list), one at a time. Everything else is as for
    :class:`Compute`; a stream holds Serve ops or none.
    """


class Collective(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A collective of one or more congruent groups, each starting when its last member arrives.

    Parameters
    ----------
    kind : one of :data:`COLLECTIVES`. nbytes : float [bytes], the full tensor, NCCL's S: for all_gather and
        reduce_scatter the gathered size.
    groups : (n_groups, members) int, global ranks; every rank of the role is in exactly one group.
    dtype, redop : element type and reduction. root : position of the root inside its group, where there is one.
    communicator : str; ops of one communicator must be issued in the same order by all members, as NCCL requires.
    algorithm, protocol : pin the choice, as NCCL_ALGO and NCCL_PROTO do; None lets the backend choose.
    matrix : of an all_to_all whose pairs differ, what positions of the group have for each other, per byte of S.
    kernel : of an all_to_all that a library makes by itself.
    """

    name: str
    kind: str
    nbytes: float
    groups: Ints
    stream: str = COMM_STREAM
    after: tuple[int, ...] = ()
    dtype: str = "fp32"
    redop: str = "sum"
    root: int = 0
    communicator: str = "world"
    algorithm: str | None = None
    protocol: str | None = None
    phase: str = "communication"
    step: int = 0
    label: Label | None = None
    matrix: ByteMatrix | None = None
    kernel: ExchangeKernel | None = None


class _Message(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One end of a point-to-point transfer."""

    name: str
    nbytes: float
    peer: Ints
    stream: str = COMM_STREAM
    after: tuple[int, ...] = ()
    tag: str = ""
    phase: str = "communication"
    step: int = 0
    label: Label | None = None


class Send(_Message, frozen=True, eq=False, gc=False):
    """A point-to-point send; pairs with the :class:`Recv` of the same ``tag`` and the k-th use of it on that pair.

    ``peer`` is (n_ranks,) int, the global rank each rank of the role sends to; -1 for ranks that send nothing.
    """


class Recv(_Message, frozen=True, eq=False, gc=False):
    """A point-to-point receive: ``peer`` is (n_ranks,) int, the global rank each rank receives from; -1 for none."""


Op: TypeAlias = Compute | Collective | Send | Recv


@dataclass(frozen=True, eq=False)
class Role:
    """Ranks that run the same op list.

    Parameters
    ----------
    name : such as ``"worker"``. ranks : (n,) int, global ranks in ascending order. ops : the op list, into which
        ``after`` indices point.
    pace : (steps, n) float, what multiplies each rank's compute in each step; None for a steady machine.
    stage : the ``pp`` coordinate of its ranks; -1 without a pipeline. serves : they serve parameters, and compute none.
    """

    name: str
    ranks: Ints
    ops: Sequence[Op]
    pace: Floats | None = None
    stage: int = -1
    serves: bool = False

    @cached_property
    def least_pace(self) -> list[float]:
        """Of each step the least pace of any rank; empty for a steady machine."""
        return [] if self.pace is None else self.pace.min(axis=1).tolist()


def least_seconds(role: Role, op: Compute) -> float:
    """The least of :func:`seconds` over ranks [s]."""
    if role.pace is None or not op.paced:
        return float(np.min(op.duration))
    if isinstance(op.duration, float):
        return op.duration * role.least_pace[op.step]
    return float(np.min(seconds(role, op)))


def seconds(role: Role, op: Compute) -> float | Floats:
    """What a Compute op takes on the role's ranks [s], one number or one per rank: its duration at their pace."""
    if role.pace is None or not op.paced:
        return op.duration
    spent: Floats = op.duration * role.pace[op.step]
    return spent


@dataclass(frozen=True, eq=False)
class Program:
    """Everything that should happen in a run.

    Parameters
    ----------
    roles : op lists; every rank is in exactly one role. notes : what the strategy decided, for people.
    overlap_slowdown : float, the extra fraction of an overlapped collective's time that the rank's compute loses to it
        (SM and HBM contention); the next Compute op that starts after the collective is lengthened by it.
    own_paces : nobody ever waits for the step of another, however far ahead it is: asynchronous without a bound.
    """

    world_size: int
    roles: tuple[Role, ...]
    overlap_slowdown: float = 0.0
    notes: tuple[str, ...] = field(default=())
    own_paces: bool = False

    def __repr__(self) -> str:
        roles = ", ".join(f"{role.name}: {len(role.ops):,} ops on {len(role.ranks):,} ranks" for role in self.roles[:4])
        return f"<Program of {self.world_size:,} ranks: {roles}{', ...' if len(self.roles) > 4 else ''}>"

    def check(self) -> None:
        """Raise :class:`ProgramError` where the Program cannot be played, naming role and op."""
        return self._checked

    @cached_property
    def _checked(self) -> None:
        owners = np.concatenate([role.ranks for role in self.roles]) if self.roles else np.array([], dtype=np.int64)
        if not np.array_equal(np.sort(owners), np.arange(self.world_size)):
            raise ProgramError(f"the roles must hold each of the {self.world_size} ranks once")
        for role in self.roles:
            _check_pace(role)
            _check_ops(role, self.world_size)
            queues = {op.stream for _, op in distinct(role.ops) if isinstance(op, Serve)}
            for i, op in distinct(role.ops):
                if op.stream in queues and not isinstance(op, Serve):
                    rule = "is served in order of arrival and can hold Serve ops only"
                    raise _wrong(role, i, f"stream {op.stream!r} {rule}")

    def describe(self, rank: int = 0) -> str:
        """The op list of one rank as text, a line per op: index, stream, what, size or time, what it waits for."""
        role = next((r for r in self.roles if rank in r.ranks), None)
        if role is None:
            raise ProgramError(f"no rank {rank} in a world of {self.world_size}")
        position = int(np.searchsorted(role.ranks, rank))
        return "\n".join(_describe_op(i, op, role, position) for i, op in enumerate(role.ops))


def one_collective(collective: Collective) -> Program:
    """The Program of a collective and nothing else, whose one group is everybody."""
    (everybody,) = collective.groups
    return Program(len(everybody), (Role("worker", everybody, (collective,)),))


def _check_ops(role: Role, world_size: int) -> None:
    whole: set[int] = set()  # ops share their groups, so each array is looked at once
    timed = _timed(role)
    for i, op in distinct(role.ops):
        if op.after and not (min(op.after) >= 0 and max(op.after) < i):
            raise _wrong(role, i, f"waits for ops {op.after}, which must come earlier in the list")
        if isinstance(op, Compute):
            if i not in timed and not _is_time(op.duration, len(role.ranks)):
                raise _wrong(role, i, "the duration must be one time >= 0, or one per rank")
        elif isinstance(op, Collective):
            if id(op.groups) not in whole:
                _check_groups(op, i, role, world_size)
                whole.add(id(op.groups))
            if op.kind not in COLLECTIVES:
                raise _wrong(role, i, f"unknown collective {op.kind!r}; known: {', '.join(COLLECTIVES)}")
            if not 0 <= op.root < op.groups.shape[1]:
                raise _wrong(role, i, f"root {op.root} is not a position in a group of {op.groups.shape[1]}")
        elif op.peer.shape != role.ranks.shape:
            raise _wrong(role, i, "peer must name one rank per rank of the role")


def _check_pace(role: Role) -> None:
    if role.pace is None:
        return
    steps = 1 + max((op.step for _, op in distinct(role.ops)), default=0)
    if role.pace.ndim != 2 or role.pace.shape[1] != len(role.ranks) or len(role.pace) < steps:
        raise ProgramError(
            f"role {role.name!r}: the pace must be ({steps} steps x {len(role.ranks)} ranks), not {role.pace.shape}"
        )
    if not (role.pace.min(initial=1.0) > 0 and np.isfinite(role.pace).all()):
        raise ProgramError(f"role {role.name!r}: every pace must be above zero and finite")


def _timed(role: Role) -> frozenset[int]:
    """Ops known to have a sound time per rank, looked at all together; none where any might not."""
    n = len(role.ranks)
    computed = ((i, op.duration) for i, op in distinct(role.ops) if isinstance(op, Compute))
    wide = {i: column for i, column in computed if isinstance(column, np.ndarray)}
    alike = all(column.shape == (n,) and column.dtype == np.float64 for column in wide.values())
    if not (wide and alike and n * len(wide) <= _AT_ONCE):
        return frozenset()
    return frozenset(wide) if _is_time(np.concatenate(list(wide.values())), n * len(wide)) else frozenset()


_AT_ONCE = 2**20
"""Elements looked at together: a copy that small costs less than a call for each op."""


def _is_time(duration: float | Floats, n: int) -> bool:
    if isinstance(duration, float):
        return bool(0 <= duration < math.inf)
    column = np.asarray(duration, dtype=np.float64)
    # A sum is finite only where every part is, and comparing with NaN is false.
    sound = column.min(initial=0.0) >= 0 and np.add.reduce(column, None) < math.inf
    return column.shape in ((), (n,)) and bool(sound)


def _check_groups(op: Collective, i: int, role: Role, world_size: int) -> None:
    if not isinstance(op.groups, np.ndarray) or op.groups.dtype.kind not in "iu":
        raise _wrong(role, i, "groups must be an array of whole numbers (groups x members), one row a group")
    table = op.groups.ndim == 2 and op.groups.size > 0
    if table and (op.groups.min() < 0 or op.groups.max() >= world_size):
        raise _wrong(role, i, f"a group names a rank outside 0..{world_size - 1}")
    if not table or np.bincount(op.groups.ravel()).max() > 1:
        raise _wrong(role, i, "groups must be (groups x members), with no rank twice")


def _wrong(role: Role, i: int, problem: str) -> ProgramError:
    return ProgramError(f"role {role.name!r}, op {i} {role.ops[i].name!r}: {problem}")


def _describe_op(i: int, op: Op, role: Role, position: int) -> str:
    if isinstance(op, Compute):
        value = float(np.broadcast_to(seconds(role, op), role.ranks.shape)[position])
        op_text = f"{format_time(value)} ({op.phase}, {op.bound}-bound)"
    elif isinstance(op, Collective):
        n_groups, members = op.groups.shape
        op_text = f"{op.kind} {format_bytes(op.nbytes)} {op.dtype}, {n_groups} group(s) of {members}"
    else:
        verb = "to" if isinstance(op, Send) else "from"
        op_text = f"{format_bytes(op.nbytes)} {verb} rank {op.peer[position]}"
    waits = f"  after {', '.join(map(str, op.after))}" if op.after else ""
    return f"{i:5d}  {op.stream:8s} {op.name:32s} {op_text}{waits}"
