"""Algorithms told as rounds: who sends which pieces to whom, each round over before the next begins.

An algorithm of this sort is one function ``(kind, n, root) -> RoundSteps``; its traffic and its schedule follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec
import numpy as np

from clustersim.collectives.base import Algorithm, Apart, Channel, Group, Request, Traffic, TransferSchedule
from clustersim.collectives.build import ScheduleWriter, traffic_of
from clustersim.core.arrays import Floats, Ints


@dataclass(frozen=True, eq=False)
class Round:
    """Everybody of ``src`` sends pieces to its ``dst``.

    Parameters
    ----------
    src, dst : (E,) int, positions in the group. share : of S on every edge, a number or (E,) float.
    pieces : which pieces an edge moves, by the edge's place in the round. reduce : the receiver adds them. passes : the
    sender hands on what it was brought last, not the sum it has.
    """

    src: Ints
    dst: Ints
    share: Floats | float
    pieces: Callable[[int], Sequence[int]]
    reduce: bool = False
    passes: bool = False


class RoundSteps(msgspec.Struct, frozen=True, eq=False):
    """All rounds of an algorithm, and its pieces as parts of S.

    ``blocking`` : a pair trades once both are through with their rounds before, all sends and receives, as in MPI's
    blocking exchange; else a piece is sent on as soon as its sender has it.
    """

    rounds: tuple[Round, ...]
    pieces: Floats
    blocking: bool = True


Maker = Callable[[str, int, int], RoundSteps]
"""``(kind, members, root)`` -> what is done."""


def rounds_algorithm(name: str, kinds: frozenset[str], make: Maker, apart: tuple[Apart, ...] = ()) -> Algorithm:
    """The row of an algorithm in rounds. Between nodes an edge goes by its sender's nearest NIC.

    Parameters
    ----------
    name, kinds, apart : of the row (:class:`~clustersim.collectives.base.Algorithm`).
    make : ``(kind, members, root)`` -> :class:`RoundSteps`, who sends which pieces to whom in each :class:`Round`. It
        raises :class:`~clustersim.core.errors.ProgramError` for a group that the algorithm does not take.
    """
    made_steps = lru_cache(maxsize=32)(make)

    def traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
        """Its rounds as traffic of a group."""
        steps = made_steps(request.kind, group.size, request.root)
        return in_rounds(steps.rounds, group, blocking=steps.blocking)

    @lru_cache(maxsize=1024)
    def sends(kind: str, n: int, n_islands: int = 1) -> tuple[float, float]:
        """Bytes that a member sends and receives on average, as shares of the request's."""
        total = sum(
            float(np.broadcast_to(step_round.share, len(step_round.src)).sum())
            for step_round in made_steps(kind, n, 0).rounds
        )
        return total / n, total / n

    def schedule(request: Request, group: Group, channels: tuple[Channel, ...]) -> TransferSchedule:
        """Its rounds as single transfers."""
        return all_sends(made_steps(request.kind, group.size, request.root))

    return Algorithm(name, kinds, traffic, sends, schedule, apart=apart)


def powers_below(n: int) -> list[int]:
    """1, 2, 4, ... below n: the distances in rounds of doubling.

    >>> powers_below(8), powers_below(9)
    ([1, 2, 4], [1, 2, 4, 8])
    """
    return [1 << k for k in range((n - 1).bit_length())]


def in_rounds(rounds: Sequence[Round], group: Group, *, blocking: bool = True) -> Traffic:
    """The bytes of every round."""
    crossing = sum(bool((group.nodes[round_now.src] != group.nodes[round_now.dst]).any()) for round_now in rounds)
    parts = [(round_now.src, round_now.dst, round_now.share, -1) for round_now in rounds]
    adds = np.repeat(
        np.array([round_now.reduce for round_now in rounds], dtype=np.bool_),
        [len(round_now.src) for round_now in rounds],
    )
    edges = traffic_of(parts, len(rounds), crossing, rounds=range(len(rounds)))
    return replace(edges, adds=adds, blocking=blocking)


def trade(src: Ints, dst: Ints, label: Ints, want: Ints, *, reduce: bool) -> Round:
    """Every edge moves the pieces whose label is what it wants; pieces are equal parts of S."""
    share = np.bincount(label, minlength=int(want.max()) + 1)[want] / len(label)
    return Round(src, dst, share, lambda edge: np.flatnonzero(label == want[edge]).tolist(), reduce)


def all_sends(steps: RoundSteps) -> TransferSchedule:
    """Every transfer, one per piece; where rounds block, a member's next round waits for each piece of its last one."""
    writer = ScheduleWriter()
    brought: dict[tuple[int, int], list[int]] = {}
    through: dict[int, list[int]] = {}  # member -> the sends and receives of its latest round
    rounds: list[int] = []
    for number, round_now in enumerate(steps.rounds):
        sent = []
        ends: dict[int, list[int]] = {}
        for edge, (src, dst) in enumerate(zip(round_now.src.tolist(), round_now.dst.tolist(), strict=True)):
            ready = [*through.get(src, ()), *through.get(dst, ())] if steps.blocking else []
            transfers: list[int] = []
            for piece in round_now.pieces(edge):
                arrived = brought.get((src, piece), ())
                after = sorted({*(arrived[-1:] if round_now.passes else arrived), *ready})
                transfer = writer.send(src, dst, piece, after=tuple(after), reduce=round_now.reduce)
                transfers.append(transfer)
                sent.append((dst, piece, transfer))
            for member in (src, dst) if transfers else ():
                ends.setdefault(member, []).extend(transfers)
        through |= ends
        rounds += [number] * len(sent)
        for dst, piece, transfer in sent:
            arrivals = brought.setdefault((dst, piece), [])
            if not round_now.reduce:
                arrivals.clear()
            arrivals.append(transfer)
    passes = np.array([step_round.passes for step_round in steps.rounds], dtype=np.bool_)
    in_round = np.array(rounds, dtype=np.int64)
    return replace(writer.done(steps.pieces), round=in_round, passes=passes[in_round])
