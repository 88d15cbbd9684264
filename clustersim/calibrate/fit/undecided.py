"""What a log leaves open of its machine: structures that it neither shows nor rules out.

A log whose large messages are as its file says may still be of a machine with NVLS or trees off: over four nodes of
Hopper rings carry large messages, and what trees save small ones looks like a fast host. Constants that are fitted to
such a log hold what was measured, and are wrong of other sizes, collectives and node counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from clustersim.calibrate.fit.nccl import NcclTimes
from clustersim.calibrate.fit.structures import (
    AS_WELL,
    GAIN,
    NOTABLE,
    SMALL,
    Structure,
    candidates,
    errors_by_class,
    largest,
)

FEWEST = 4
"""Small messages of which a median says anything."""
DIFFERENT = 0.02
"""By which a structure's times differ from those of the machine as described, of some row, before it is a question."""


def undecided(described: NcclTimes, played: Callable[[Structure], NcclTimes]) -> Iterator[str]:
    """Sentences on what a log cannot tell, where nothing explains it and its machine counts as described.

    Parameters
    ----------
    described : the log's rows on the machine as its file has it. played : the same rows on one with a structure.

    Only what changes the algorithms is asked about: what NICs carry is told by large messages, or is not there.
    """
    expected = described.predict({})
    before = errors_by_class(described, expected)
    calls = np.array(described.classes) == SMALL
    slow = 0.0
    if calls.sum() >= FEWEST:
        slow = float(np.median((described.measured / expected)[calls]))
    as_well = []
    for structure in candidates(largest(described)):
        if structure.changes or "net" in structure.node:
            continue
        times = played(structure)
        if len(times.rows) != len(described.rows):
            continue
        other = times.predict({})
        after = errors_by_class(times, other)
        if np.max(np.abs(other / expected - 1.0)) < DIFFERENT or not _no_worse(before, after):
            continue
        if slow > 1.0 + NOTABLE and after[SMALL] <= GAIN * before[SMALL]:
            yield (
                f"{SMALL}: measured times are {slow:.2f} times those expected: a slow host, or {structure.words}, "
                f"with which they are off by {after[SMALL]:.0%} and not {before[SMALL]:.0%}; "
                "these rows do not tell which"
            )
        elif _large(after) and after.get(SMALL, 0.0) <= before.get(SMALL, 0.0) + NOTABLE:
            as_well.append(structure.words)
    if as_well:
        yield f"as its file says, or {'; or '.join(as_well)}: these rows do not tell which"


def _no_worse(before: dict[str, float], after: dict[str, float]) -> bool:
    """Whether every class above the smallest is predicted about as well."""
    return all(after[name] <= max(AS_WELL * before[name], before[name] + 0.01) for name in after if name != SMALL)


def _large(after: dict[str, float]) -> bool:
    """Whether there are messages that tell more than the host's time."""
    return any(name != SMALL for name in after)
