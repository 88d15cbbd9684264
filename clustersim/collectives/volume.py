"""How many bytes a member of a collective sends and receives: what the row of the algorithm that played it says."""

from __future__ import annotations

from functools import lru_cache

from clustersim.collectives import mpi
from clustersim.collectives.base import Request
from clustersim.collectives.build import least_sent
from clustersim.collectives.registry import ALGORITHMS, algorithm


@lru_cache(maxsize=2**12)
def per_member(
    kind: str, n: int, played: str | None = "ring", n_islands: int = 1, nbytes: float = 1.0
) -> tuple[float, float]:
    """(sent, received): bytes per byte of NCCL's S, mean over the ``n`` members of one group.

    Parameters
    ----------
    kind : one of :data:`clustersim.core.program.COLLECTIVES`.
    played : the algorithm, a row of :data:`~clustersim.collectives.registry.ALGORITHMS` or Open MPI's name of several
        in a row; None where a measured run does not say, and then the least that any can do.
    n_islands : NVLink domains the members are in. nbytes : S [bytes], by which Open MPI chooses what it is built of.

    Raises :class:`ProgramError` for an algorithm that nothing is known of, and for a kind that it does not do.

    >>> per_member("all_reduce", 8), per_member("all_reduce", 8, "ring_unsplit")  # 2 (n-1)/n and n - 1
    ((1.75, 1.75), (7.0, 7.0))
    """
    if n == 1:
        return 0.0, 0.0
    if played is None:
        return least_sent(kind, n)
    if played not in ALGORITHMS and played in mpi.names(kind):
        return _built(kind, n, played, nbytes)
    return algorithm(played).sends(kind, n, n_islands)


def _built(kind: str, n: int, played: str, nbytes: float) -> tuple[float, float]:
    """Of an algorithm of Open MPI that is built of others: theirs together."""
    sent = 0.0
    received = 0.0
    for part in mpi.parts_of(Request(kind, nbytes, algorithm=played), n):
        out, into = algorithm(mpi.ROWS.get(part.name, part.name)).sends(part.kind, n, 1)
        sent = sent + out
        received = received + into
    return sent, received
