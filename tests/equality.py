"""Is the engine exact? Random Programs, played by it and by the oracle, one beside the other.

    python tests/equality.py --programs 2000 --seed 0

prints a table by kind of Program: how many, how many of them cannot be played and why (both must say so), how many
differ, spans and transfers compared, and the largest difference in time as a share of the run: of spans, and of the
moments by which a transfer had moved so many bytes. Exits with 1 where any is above 1e-9, and tells which program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import oracle
import random_programs

from clustersim.core.errors import ProgramError, TopologyError
from clustersim.core.timeline import LinkUse, Timeline
from clustersim.engine import simulate, stretches

TOLERANCE = 1e-9


REASONS = ("waits forever", "disagree", "dead link", "two faults")
"""Why a Program cannot be played: ranks that wait for each other, members that ask for different things, a link without
bandwidth. Of two such faults the engine and the oracle may each meet another first: neither plays it."""


@dataclass
class Result:
    """What a comparison came to: ``worst`` is the largest difference, ``wrong`` says what differs where it matters.

    ``failed`` : one of :data:`REASONS` where the program could not be played.
    """

    spans: int = 0
    transfers: int = 0
    failed: str = ""
    worst: float = 0.0
    wrong: str = ""


def compare(case: random_programs.Case) -> Result:
    """Play a case twice."""
    (timeline, refused), (played, stuck) = _engine(case), _oracle(case)
    if refused or stuck:
        if refused == stuck:
            return Result(failed=stuck)
        if {refused, stuck} <= set(REASONS):
            return Result(failed=REASONS[3])
        return Result(failed=stuck or refused, wrong=f"engine {refused!r}, oracle {stuck!r}")
    result = Result()
    _spans(timeline, played, result)
    if not result.wrong:
        _transfers(timeline.links, played, max(timeline.makespan, 1e-300), result)
    return result


def _engine(case: random_programs.Case) -> tuple[Timeline | None, str]:
    try:
        return simulate(case.program, case.topology, case.mesh, **case.options), ""
    except (ProgramError, TopologyError) as error:
        return None, _reason(error)
    except Exception as error:  # whatever it is, it is a difference, and the other programs are still to be played
        return None, repr(error)


def _oracle(case: random_programs.Case) -> tuple[oracle.Played | None, str]:
    try:
        return oracle.play(case.program, case.topology, case.mesh, case.planner), ""
    except (ProgramError, TopologyError) as error:
        return None, _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, TopologyError):
        return REASONS[2]
    return REASONS[0] if "never ends" in str(error) else REASONS[1]


def _spans(timeline: Timeline, played: oracle.Played, result: Result) -> None:
    columns = timeline.spans()
    names = ("rank", "op", "ready", "start", "end")
    rows = zip(*(columns[name].tolist() for name in names), strict=True)
    found = {(rank, op): times for rank, op, *times in rows}
    if found.keys() != played.spans.keys():
        odd = sorted(found.keys() ^ played.spans.keys())
        result.wrong = f"spans of (rank, op) {odd[:4]} in one only"
        return
    whole = max((end for *_, end in played.spans.values()), default=0.0) or 1.0
    result.spans = len(found)
    for key, expected in played.spans.items():
        gap = max(abs(a - b) for a, b in zip(found[key], expected, strict=True)) / whole
        if gap > result.worst:
            result.worst = gap
            if gap > TOLERANCE:
                result.wrong = f"(rank, op) {key}: engine {tuple(found[key])}, oracle {expected}"


def _transfers(use: LinkUse, played: oracle.Played, whole: float, result: Result) -> None:
    """Transfers of one op over the same links are told apart by when they moved what."""
    mine: dict[object, list[list[oracle.Piece]]] = {}
    theirs: dict[object, list[list[oracle.Piece]]] = {}
    bounds = np.searchsorted(use.segment_transfer, np.arange(len(use.transfer_op) + 1))
    pieces = list(zip(use.segment_start.tolist(), use.segment_end.tolist(), use.segment_rate.tolist(), strict=True))
    for t, (op, load) in enumerate(zip(use.transfer_op.tolist(), use.transfer_load.tolist(), strict=True)):
        links, weights = use.loads[load]
        key = op, tuple(sorted(zip(links.tolist(), weights.tolist(), strict=True)))
        mine.setdefault(key, []).append(pieces[bounds[t] : bounds[t + 1]])
    for meeting in played.meetings:
        key = meeting.op, tuple(sorted(oracle.links_of(meeting.plan).items()))
        theirs.setdefault(key, []).append(meeting.pieces)
    if {key: len(all_) for key, all_ in mine.items()} != {key: len(all_) for key, all_ in theirs.items()}:
        result.wrong = "transfers of some op are not over the same links"
        return
    for key, some in mine.items():
        for one, other in zip(sorted(some), sorted(theirs[key]), strict=True):
            result.transfers += 1
            gap = _moved_apart(one, other, whole)
            result.worst = max(result.worst, gap)
            if gap > TOLERANCE:
                result.wrong = f"transfer of op {key}: engine {one}, oracle {other}"


def _moved_apart(one: Sequence[oracle.Piece], other: Sequence[oracle.Piece], whole: float) -> float:
    """How far two transfers are apart, as a share of the run: by the moments at which they begin and end, and by what
    they have moved at any moment, in seconds at their highest rate."""
    if not one or not other:
        return 0.0 if len(one) == len(other) else 1.0
    moments = np.unique([time for start, end, _ in (*one, *other) for time in (start, end)])
    curves = []
    for pieces in (one, other):
        begun, over, rate = (np.array(column)[:, None] for column in zip(*pieces, strict=True))
        curves.append((rate * np.clip(np.minimum(over, moments) - begun, 0.0, None)).sum(axis=0))
    ends = max(abs(one[0][0] - other[0][0]), abs(one[-1][1] - other[-1][1])) / whole
    fastest = max(rate for *_, rate in other)
    return max(float(np.abs(curves[0] - curves[1]).max()) / fastest / whole, ends)


def numbered(seed: int, number: int) -> random_programs.Case:
    """Program ``number`` of a seed; its kind is its turn among the kinds."""
    kinds = list(random_programs.KINDS)
    return random_programs.case(Random(seed * 1_000_003 + number), kinds[number % len(kinds)])


def main() -> int:
    """Compare so many programs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="play this program alone")
    chosen = parser.parse_args()
    stretches.ALIKE = 1  # one that is like no other is played as one, too
    rows: dict[str, list[Result]] = {kind: [] for kind in random_programs.KINDS}
    for number in range(chosen.programs) if chosen.only is None else [chosen.only]:
        case = numbered(chosen.seed, number)
        result = compare(case)
        rows[case.kind].append(result)
        if result.wrong:
            print(f"program {number} of seed {chosen.seed} ({case.kind}): {result.wrong}", file=sys.stderr)
    print(table(rows))
    return int(any(result.wrong for results in rows.values() for result in results))


def table(rows: dict[str, list[Result]]) -> str:
    """The figures by kind, and their sum."""
    heads = ["programs", *REASONS, "differ", "spans", "transfers", "largest"]
    lines = ["kind".ljust(26) + "".join(head.rjust(15) for head in heads)]
    for kind, results in [*rows.items(), ("all", [result for each in rows.values() for result in each])]:
        figures = [len(results), *(sum(r.failed == reason and not r.wrong for r in results) for reason in REASONS)]
        figures += [sum(bool(r.wrong) for r in results)]
        figures += [sum(getattr(r, name) for r in results) for name in ("spans", "transfers")]
        worst = max((r.worst for r in results), default=0.0)
        lines.append(kind.ljust(26) + "".join(f"{figure:15,d}" for figure in figures) + f"{worst:15.1e}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
