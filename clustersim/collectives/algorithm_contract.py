"""The contract that every collective algorithm keeps (:mod:`clustersim.testing` has those of other rows)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from math import isclose

import numpy as np

from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Algorithm, Channel, Group, Request, TransferSchedule
from clustersim.collectives.channels import channels
from clustersim.core.arrays import Floats, Ints
from clustersim.core.contract import CLOSE, require
from clustersim.core.errors import ProgramError


def check_algorithm(row: Algorithm, groups: Iterable[Group] | None = None) -> None:
    """Every member ends with the right data, and traffic, schedule and ``sends`` move the same bytes.

    Parameters
    ----------
    row : an :class:`~clustersim.collectives.base.Algorithm`, in the table or not.
    groups : what to try; 2 to 16 GPUs of one to three HGX H100 where nothing is said. A group that it refuses with a
        :class:`ProgramError` is left out, but each kind must take one.

    Raises :class:`AssertionError` where the contract is broken.
    """
    tried = list(_groups() if groups is None else groups)
    for kind in sorted(row.kinds):
        taken = [members for members in tried if takes(row, kind, members)]
        require(bool(taken), row, f"{kind}: it takes none of the groups")
        for members in taken:
            if kind != "send":  # which has its own op on each side
                check_sends(row, kind, members)
            if row.schedule is not None:
                check_edges(row, kind, members)
            if row.schedule is not None and kind != "barrier":
                check_data(row, kind, members)


def _groups() -> Iterator[Group]:
    for nodes in (1, 2, 3):
        topology = fabrics.load("hgx-h100", nodes=nodes)
        for n in (2, 3, 4, 5, 6, 8, 16):
            if nodes <= n <= 8 * nodes:
                counts = [n // nodes + (node < n % nodes) for node in range(nodes)]
                yield Group(topology, np.concatenate([topology.node_gpus(i)[:c] for i, c in enumerate(counts)]))


def _asked(row: Algorithm, kind: str, members: Group) -> tuple[Request, Group, tuple[Channel, ...]]:
    request = Request(kind, 2.0**22, root=members.size - 1, algorithm=row.name)
    return request, members, channels(members, 2, row.layout)


def takes(row: Algorithm, kind: str, members: Group) -> bool:
    """Whether an algorithm takes a group; one that it refuses with a :class:`ProgramError` it need not do."""
    try:
        row.traffic(*_asked(row, kind, members))
    except ProgramError:
        return False
    return True


def _schedule(row: Algorithm, kind: str, members: Group) -> TransferSchedule:
    if row.schedule is None:
        raise AssertionError(f"{row.name}: it has no schedule")
    return row.schedule(*_asked(row, kind, members))


def check_sends(row: Algorithm, kind: str, members: Group) -> None:
    """``sends`` is the mean over members of what the traffic's edges from and to root 0 carry."""
    traffic = row.traffic(Request(kind, 1.0, algorithm=row.name), members, channels(members, 2, row.layout))
    carried = [float(traffic.fraction[end >= 0].sum()) / members.size for end in (traffic.src, traffic.dst)]
    stated = row.sends(kind, members.size, members.topology.n_nodes)
    same = all(isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE) for a, b in zip(stated, carried, strict=True))
    require(same, row, f"{kind} of {members.size}: sends says {stated}, the traffic has {tuple(carried)}")


def check_edges(row: Algorithm, kind: str, members: Group) -> None:
    """The schedule moves the bytes of the traffic on every edge."""
    traffic = row.traffic(*_asked(row, kind, members))
    schedule = _schedule(row, kind, members)
    moved = _per_edge(schedule.src, schedule.dst, schedule.chunk_fraction[schedule.chunk])
    wanted = _per_edge(traffic.src, traffic.dst, traffic.fraction)
    for edge in sorted(moved.keys() | wanted.keys()):
        both = moved.get(edge, 0.0), wanted.get(edge, 0.0)
        words = f"{kind} of {members.size}: the schedule sends {both[0]:g} from {edge[0]} to {edge[1]}"
        require(isclose(*both, rel_tol=CLOSE), row, f"{words}, the traffic {both[1]:g}")


def _per_edge(src: Ints, dst: Ints, fraction: Floats) -> dict[tuple[int, int], float]:
    totals: dict[tuple[int, int], float] = defaultdict(float)
    for s, d, f in zip(src.tolist(), dst.tolist(), fraction.tolist(), strict=True):
        totals[s, d] += f
    return {edge: total for edge, total in totals.items() if total > 0}


def check_data(row: Algorithm, kind: str, members: Group, operation: np.ufunc = np.add) -> None:
    """Executing the schedule with numbers gives every member what the kind promises."""
    schedule = _schedule(row, kind, members)
    checked = 0
    for member, piece, wanted, value in _results(kind, schedule, members.size, members.size - 1, operation):
        checked += 1
        right = value is not None and isclose(value, wanted, rel_tol=1e-12)
        words = f"{kind} of {members.size}: member {member} ends with {value} of piece {piece}"
        require(right, row, f"{words}, not with {wanted}")
    require(checked > 0, row, f"{kind} of {members.size}: no member gets anything")


Own = Callable[[int, int], "float | None"]
"""What a member begins with of a piece; None: nothing."""


def _results(
    kind: str, schedule: TransferSchedule, n: int, root: int, operation: np.ufunc
) -> Iterator[tuple[int, int, float, float | None]]:
    """(member, piece, what it should end with, what it ends with) for everything that the kind promises."""
    data = np.random.default_rng(7).uniform(0.5, 1.5, size=(n, schedule.n_chunks))
    gathered = kind == "all_reduce" and schedule.chunk_fraction.sum() > n - 0.5

    def own(member: int, piece: int) -> float | None:
        """What a member starts with of a piece, None where it has none."""
        has_piece = {
            "all_gather": piece % n == member,
            "gather": piece % n == member,
            "sendrecv": piece % n == member,
            "all_to_all": piece // n == member,
            "broadcast": member == root,
            "scatter": member == root,
            "send": member == 0,
        }.get(kind, piece % n == member if gathered else True)
        return float(data[member, piece]) if has_piece else None

    end = _executed(schedule, n, operation, own)
    total = operation.reduce(data, axis=0)
    for member in range(n):
        for piece in range(schedule.n_chunks):
            its = piece % n == member
            if gathered or kind == "all_gather" or (kind == "gather" and member == root):
                wanted = data[piece % n, piece]
            elif kind == "all_reduce" or (kind == "reduce_scatter" and its) or (kind == "reduce" and member == root):
                wanted = total[piece]
            elif kind == "broadcast" or (kind == "scatter" and its):
                wanted = data[root, piece]
            elif kind == "all_to_all" and its:
                wanted = data[piece // n, piece]
            elif (kind == "sendrecv" and (piece + 1) % n == member) or (kind == "send" and member == 1):
                wanted = data[0 if kind == "send" else piece, piece]
            else:
                continue
            yield member, piece, float(wanted), end[member][piece]


def _executed(schedule: TransferSchedule, n: int, operation: np.ufunc, own: Own) -> list[list[float | None]]:
    """What each member ends with of each piece."""
    carried: list[float | None] = []
    arrived: dict[tuple[int, int], list[int]] = defaultdict(list)

    def combined(start: float | None, transfers: list[int]) -> float | None:
        """What a piece becomes by these transfers in order: added to, or replaced."""
        value = start
        added: list[float | None] = []
        for t in transfers:
            if schedule.reduce[t]:
                added.append(carried[t])
            else:
                value = carried[t]
                added = []
        return reduce(operation, added, value) if value is not None else reduce(operation, added) if added else None

    for t in range(len(schedule.src)):
        src = int(schedule.src[t])
        piece = int(schedule.chunk[t])
        needs = schedule.after[schedule.after_ptr[t] : schedule.after_ptr[t + 1]].tolist()
        if any(need >= t for need in needs):
            raise AssertionError(f"transfer {t} waits for a later one")
        brought = [need for need in needs if schedule.dst[need] == src and schedule.chunk[need] == piece]
        hands_on = bool(schedule.passes.any() and schedule.passes[t])
        if hands_on:
            brought = brought[-1:]  # others that it waits for were brought before, and are no part of it
        carried.append(combined(None if hands_on else own(src, piece), brought))
        arrived[int(schedule.dst[t]), piece].append(t)
    return [[combined(own(m, p), arrived[m, p]) for p in range(schedule.n_chunks)] for m in range(n)]
