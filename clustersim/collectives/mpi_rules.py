"""Which algorithm Open MPI 4.1 runs, by communicator size and bytes, and what it calls them.

The rules are in ``data/mpi_rules.toml``, the names from coll_tuned_*_decision.c. A rule counts all bytes, or one
process's part of what is gathered, scattered or traded; no rule asks for segments.
"""

from __future__ import annotations

import tomllib
from functools import lru_cache

from clustersim.errors import ProgramError, nearest
from clustersim.paths import data_path

NAMES = {
    "all_reduce": ("basic_linear", "nonoverlapping", "recursive_doubling", "ring", "segmented_ring", "rabenseifner"),
    "all_gather": ("linear", "bruck", "recursive_doubling", "ring", "neighbor", "two_proc"),
    "reduce_scatter": ("basic_linear", "recursive_doubling", "recursive_halving", "butterfly"),
    "all_to_all": ("linear", "pairwise", "modified_bruck", "linear_sync", "two_proc"),
    "broadcast": ("basic_linear", "chain", "pipeline", "split_binary_tree", "binary_tree", "binomial", "knomial",
                  "scatter_allgather", "scatter_allgather_ring"),
    "reduce": ("linear", "chain", "pipeline", "binary", "binomial", "in-order_binary", "rabenseifner"),
    "gather": ("basic_linear", "binomial", "linear_sync"),
    "scatter": ("basic_linear", "binomial", "linear_nb"),
    "barrier": ("linear", "double_ring", "recursive_doubling", "bruck", "two_proc", "tree"),
}  # fmt: skip
"""Open MPI's names by kind, from number 1 on."""

VARIABLE = {
    "all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reduce_scatter_block",
    "all_to_all": "alltoall", "broadcast": "bcast", "reduce": "reduce", "gather": "gather", "scatter": "scatter",
    "barrier": "barrier",
}  # fmt: skip
"""MPI's names of the kinds, as in ``coll_tuned_NAME_algorithm``."""


@lru_cache(maxsize=1)
def rules() -> dict[str, dict[str, str]]:
    """By kind: communicators below a size -> algorithms by number, each followed by the bytes it is taken below."""
    return tomllib.loads((data_path("data") / "mpi_rules.toml").read_text(encoding="utf-8"))


def chosen(kind: str, n: int, nbytes: float) -> str:
    """The name of the algorithm that Open MPI's fixed rules take for ``n`` processes and S bytes.

    >>> chosen("all_reduce", 2, 1024.0), chosen("all_reduce", 4, 2.0**20), chosen("broadcast", 4, 32.0)
    ('recursive_doubling', 'rabenseifner', 'binary_tree')
    """
    row = next(row for below, row in rules()[kind].items() if below == "more" or n < int(below)).split()
    numbers, bounds = row[::2], [float(bound[1:]) for bound in row[1::2]]
    counted = nbytes if kind in {"all_reduce", "broadcast", "reduce"} else nbytes / n
    place = sum(counted >= bound for bound in bounds)
    return NAMES[kind][int(numbers[place]) - 1]


def forced(kind: str, n: int, pin: str) -> str | None:
    """The name that a pin means for this kind: a name, a number, or MCA settings, of which those of other kinds do not
    count; None where nothing is pinned. Raises :class:`ProgramError`.

    >>> forced("broadcast", 8, "coll_tuned_bcast_algorithm=6,coll_tuned_allreduce_algorithm=ring")
    'binomial'
    """
    names = NAMES.get(kind, ())
    if "=" in pin:
        settings = dict(one.split("=", 1) for one in pin.split(",") if "=" in one)
        known = {f"coll_tuned_{name}_algorithm" for name in VARIABLE.values()}
        for name in settings:
            if name not in known:
                raise ProgramError(f"Open MPI has no setting {name!r} here; {nearest(name, known)}")
        pin = settings.get(f"coll_tuned_{VARIABLE.get(kind)}_algorithm", "0")
    if pin in {"0", "ignore"}:
        return None
    found = names[int(pin) - 1] if pin.isdecimal() and 0 < int(pin) <= len(names) else pin
    if found not in names:
        had = ", ".join(f"{i} {name}" for i, name in enumerate(names, 1)) or "one way, which has no name"
        raise ProgramError(f"Open MPI runs {kind!r} by no algorithm {pin!r}; it has {had}")
    if found == "two_proc" and n != 2:
        raise ProgramError(f"Open MPI's {found!r} is for 2 processes, not {n}")
    return found
