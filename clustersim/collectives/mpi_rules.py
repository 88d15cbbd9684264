"""Which algorithm Open MPI 4.1 runs, by communicator size and bytes, and what it calls them.

Re-tabulated from ompi/mca/coll/tuned/coll_tuned_decision_fixed.c of tag v4.1.4 (for operations that commute), the names
from coll_tuned_*_decision.c. Bytes are what the rule of a kind counts (:func:`counted`); no rule asks for segments.
"""

from __future__ import annotations

from clustersim.errors import ProgramError, nearest

BEYOND = 2**31
"""Communicators of any size."""

RULES: dict[str, dict[int, str]] = {
    "all_reduce": {
        4: "4 <8 3 <4096 4 <8192 3 <16384 4 <65536 5 <262144 6",
        8: "4 <16 3 <8192 6",
        16: "3 <8192 6",
        32: "5 <64 3 <4096 6",
        64: "5 <128 6",
        128: "3 <262144 6",
        256: "2 <131072 3 <262144 6",
        512: "2 <4096 6",
        2048: "2 <2048 3 <16384 6",
        4096: "2 <2048 5 <4096 3 <16384 6",
        BEYOND: "2 <2048 5 <16384 3 <32768 6",
    },
    "all_to_all": {
        3: "2 <2 5 <4 2 <16 5 <64 2 <256 5 <4096 2 <32768 4 <262144 5 <1048576 2",
        8: "4 <8192 1 <16384 4 <65536 1 <524288 2 <1048576 1",
        16: "4 <262144 1",
        32: "4 <4 3 <512 4 <8192 1 <32768 4 <262144 1 <524288 4",
        64: "3 <512 1 <524288 4",
        128: "3 <1024 1 <2048 4 <4096 1 <262144 2",
        256: "3 <1024 4 <2048 1 <262144 2",
        512: "3 <1024 4 <8192 1 <32768 2",
        1024: "3 <512 4 <8192 1 <16384 4 <131072 1 <262144 2",
        2048: "3 <512 4 <1024 1 <2048 4 <16384 1 <262144 4",
        4096: "3 <1024 4 <4096 1 <8192 4 <131072 1",
        BEYOND: "3 <2048 4 <8192 1 <16384 4 <32768 1 <65536 4",
    },
    "barrier": {
        4: "3",
        8: "1",
        64: "3",
        256: "4",
        512: "6",
        1024: "4",
        4096: "6",
        BEYOND: "4",
    },
    "broadcast": {
        4: "3 <32 5 <256 3 <512 7 <1024 1 <32768 5 <131072 2 <262144 1 <524288 6 <1048576 5",
        8: "5 <64 6 <128 5 <2048 6 <8192 1 <1048576 2",
        16: "7 <8 5 <64 7 <4096 5 <16384 6 <32768 1",
        32: "7 <4096 6 <1048576 8",
        64: "6 <2048 7",
        128: "7",
        256: "6 <2 5 <16384 1 <32768 5 <65536 7",
        1024: "7 <16384 4 <32768 7",
        2048: "7 <524288 8",
        4096: "7 <262144 8",
        BEYOND: "7 <8192 5 <16384 7 <262144 8",
    },
    "reduce": {
        4: "7 <8 4 <16 3 <32 1 <262144 3 <524288 2 <1048576 3",
        8: "4 <4096 2 <65536 5 <262144 1 <524288 5 <1048576 1",
        16: "4 <8192 5",
        32: "4 <4096 5",
        256: "5",
        512: "5 <8192 6 <16384 5",
        2048: "5",
        4096: "5 <512 6 <1024 5 <8192 6 <16384 5",
        BEYOND: "5 <16 6 <32 5 <1024 6 <2048 5 <8192 6 <16384 5",
    },
    "reduce_scatter": {
        4: "2 <4 4 <8 3 <16 4 <128 3 <256 4 <4096 3 <8192 4 <131072 1",
        8: "3 <8 2 <32 4 <256 3 <8192 4 <16384 3 <1048576 1",
        16: "1 <4 3 <32 4 <128 3 <524288 1 <4194304 4",
        32: "1 <32 3 <524288 1 <2097152 3 <4194304 4",
        BEYOND: "3 <4 1 <16 4 <65536 1 <262144 4",
    },
    "all_gather": {
        3: "6",
        32: "3",
        64: "3 <1024 5 <65536 4",
        128: "3 <512 5 <65536 4",
        256: "3 <512 5 <131072 4 <524288 5 <1048576 4",
        512: "3 <32 2 <128 3 <1024 5 <131072 4 <524288 5 <1048576 4",
        1024: "3 <64 2 <256 3 <2048 5",
        2048: "3 <4 2 <8 3 <16 2 <32 3 <256 2 <512 3 <4096 5",
        4096: "2 <32 3 <128 2 <512 3 <4096 5",
        BEYOND: "3 <2 2 <8 3 <16 2 <512 3 <4096 5",
    },
    "gather": {
        4: "3 <2 1 <4 2 <32768 1 <65536 2 <131072 3",
        8: "2 <1024 1 <8192 2 <32768 1 <262144 3",
        256: "2",
        512: "2 <2048 1 <8192 2",
        BEYOND: "2",
    },
    "scatter": {
        4: "3 <2 1 <131072 3 <262144 1",
        8: "2 <2048 1 <4096 2 <8192 1 <32768 3 <1048576 1",
        16: "2 <16384 3 <1048576 1",
        32: "2 <16384 1 <32768 3",
        64: "2 <512 3 <8192 2 <16384 3",
        BEYOND: "2 <512 3",
    },
}
"""By kind: communicators below a size -> algorithms by number, each followed by the bytes it is taken below."""

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

TWO = frozenset({"two_proc"})
"""Algorithms of exactly two processes."""


def counted(kind: str, n: int, nbytes: float) -> float:
    """The bytes a kind's rule looks at: all, or one process's part of what is gathered, scattered or traded."""
    return nbytes if kind in {"all_reduce", "broadcast", "reduce"} else nbytes / n


def chosen(kind: str, n: int, nbytes: float) -> str:
    """The name of the algorithm that Open MPI's fixed rules take for ``n`` processes and S bytes.

    >>> chosen("all_reduce", 2, 1024.0), chosen("all_reduce", 4, 2.0**20), chosen("broadcast", 4, 32.0)
    ('recursive_doubling', 'rabenseifner', 'binary_tree')
    """
    row = next(row for below, row in RULES[kind].items() if n < below).split()
    numbers, bounds = row[::2], [float(bound[1:]) for bound in row[1::2]]
    place = sum(counted(kind, n, nbytes) >= bound for bound in bounds)
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
    if found in TWO and n != 2:
        raise ProgramError(f"Open MPI's {found!r} is for 2 processes, not {n}")
    return found
