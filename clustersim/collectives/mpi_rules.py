"""Which algorithm Open MPI 4.1 runs, by communicator size and bytes, and what it calls them: ``data/mpi_rules.toml``.

A rule counts all bytes, or one process's part of what is gathered, scattered or traded; no rule asks for segments.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from clustersim.core.errors import ProgramError, nearest
from clustersim.core.texts import data_table


class MpiKind(msgspec.Struct, frozen=True):
    """What Open MPI has for a kind of collective.

    Parameters
    ----------
    variable : MPI's name of the kind, as in ``coll_tuned_NAME_algorithm``. names : of its algorithms, from number 1 on.
    below : communicators below a size -> algorithms by number, each followed by the bytes it is taken below.
    """

    variable: str
    names: tuple[str, ...]
    below: dict[str, str]


@lru_cache(maxsize=1)
def kinds() -> dict[str, MpiKind]:
    """Everything that Open MPI chooses an algorithm for."""
    return msgspec.convert(data_table("mpi_rules"), dict[str, MpiKind])


def chosen(kind: str, n: int, nbytes: float) -> str:
    """The name of the algorithm that Open MPI's fixed rules take for ``n`` processes and S bytes.

    >>> chosen("all_reduce", 2, 1024.0), chosen("all_reduce", 4, 2.0**20), chosen("broadcast", 4, 32.0)
    ('recursive_doubling', 'rabenseifner', 'binary_tree')
    """
    row = next(row for below, row in kinds()[kind].below.items() if below == "more" or n < int(below)).split()
    numbers = row[::2]
    bounds = [float(bound[1:]) for bound in row[1::2]]
    counted = nbytes if kind in {"all_reduce", "broadcast", "reduce"} else nbytes / n
    place = sum(counted >= bound for bound in bounds)
    return kinds()[kind].names[int(numbers[place]) - 1]


def forced(kind: str, n: int, pin: str) -> str | None:
    """The name that a pin means for this kind: a name, a number, or MCA settings, of which those of other kinds do not
    count; None where nothing is pinned. Raises :class:`ProgramError`.

    >>> forced("broadcast", 8, "coll_tuned_bcast_algorithm=6,coll_tuned_allreduce_algorithm=ring")
    'binomial'
    """
    own = kinds().get(kind, MpiKind("", (), {}))
    names = own.names
    if "=" in pin:
        settings = dict(setting.split("=", 1) for setting in pin.split(",") if "=" in setting)
        variables = {f"coll_tuned_{kind_rules.variable}_algorithm" for kind_rules in kinds().values()}
        for name in settings:
            if name not in variables:
                raise ProgramError(f"Open MPI has no setting {name!r} here; {nearest(name, variables)}")
        pin = settings.get(f"coll_tuned_{own.variable}_algorithm", "0")
    if pin in {"0", "ignore"}:
        return None
    algorithm = names[int(pin) - 1] if pin.isdecimal() and 0 < int(pin) <= len(names) else pin
    if algorithm not in names:
        had = ", ".join(f"{i} {name}" for i, name in enumerate(names, 1)) or "one way, which has no name"
        raise ProgramError(f"Open MPI runs {kind!r} by no algorithm {pin!r}; it has {had}")
    if algorithm == "two_proc" and n != 2:
        raise ProgramError(f"Open MPI's {algorithm!r} is for 2 processes, not {n}")
    return algorithm
