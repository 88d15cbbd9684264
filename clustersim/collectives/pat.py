"""PAT: parallel aggregated trees, NCCL's log-step all_gather and reduce_scatter for one GPU per node (2.23).

Every member's piece travels down a binomial tree of its own, all n trees at once, and what goes the same way in the
same round goes as one message. Far partners come first, while a message is one piece; the last round, to the neighbour,
carries half the tensor (Jeaugey 2025, arXiv:2506.20252). A reduce_scatter is the same backwards.
"""

from __future__ import annotations

import numpy as np

from clustersim.collectives.base import Apart
from clustersim.collectives.rounds import Round, RoundSteps, powers_below, rounds_algorithm
from clustersim.core.arrays import Ints

KINDS = frozenset({"all_gather", "reduce_scatter"})


def steps(kind: str, n: int, root: int = 0) -> RoundSteps:
    """Everybody trades with the members at the round's distance; who has several pieces for one sends them together."""
    near = np.arange(n, dtype=np.int64)
    reduces = kind == "reduce_scatter"
    rounds = []
    for distance in reversed(powers_below(n)):
        # How far behind the nearer one the owners of the pieces are that go this much further.
        behind = np.arange(0, n - distance, 2 * distance)
        far = (near + distance) % n
        ends = (far, near) if reduces else (near, far)

        def pieces(edge: int, behind: Ints = behind) -> list[int]:
            """Numbers of the pieces that this edge carries."""
            return [(edge - offset) % n for offset in behind.tolist()]

        rounds.append(Round(*ends, len(behind) / n, pieces, reduces))
    return RoundSteps(tuple(rounds[::-1] if reduces else rounds), np.full(n, 1.0 / n), blocking=False)


_OVERLAP = "a member's sends of several rounds share its links where some of them wait for pieces"
APART = (Apart(frozenset({"all_gather"}), 0.08, _OVERLAP), Apart(frozenset({"reduce_scatter"}), 0.13, _OVERLAP))

PAT = rounds_algorithm("pat", KINDS, steps, APART)
