"""What is said of a memory and what is asked of it: the states, and how likely it runs out."""

from __future__ import annotations

FITS = "fits"
MAY_RUN_OUT = "may run out"
DOES_NOT_FIT = "does not fit"
"""What is said of a step and a memory, everywhere: it runs out less likely than :data:`UNLIKELY`; it is likelier to,
and what is needed has room; not even that has. How likely it is to run out is :func:`likelihood`."""
UNLIKELY = 0.25
"""Likelihood of running out below which a step fits: what is chosen for somebody lies below it where anything does, and
is named beside a faster one that does not."""
UNKNOWN = "unknown"
"""Of a memory whose size nobody has said."""


def verdict_of(needed: float, room: float, runs_out: float) -> str:
    """One of :data:`FITS`, :data:`MAY_RUN_OUT` and :data:`DOES_NOT_FIT`.

    ``needed`` : the least a step can do with [bytes]. ``room`` : what there is. ``runs_out`` : how likely the step
    takes more, with what allocator and libraries take besides; see :func:`likelihood`.

    >>> verdict_of(60.0, 80.0, 0.24), verdict_of(60.0, 80.0, 0.49), verdict_of(81.0, 80.0, 1.0)
    ('fits', 'may run out', 'does not fit')
    """
    if needed > room:
        return DOES_NOT_FIT
    return FITS if runs_out < UNLIKELY else MAY_RUN_OUT


def likelihood(between: tuple[float, float], middle: float, room: float) -> float:
    """How likely a step takes more than there is room for: half of what is taken lies on either side of the ``middle``,
    evenly from the least to the most [bytes]."""
    least, most = between
    if room >= middle:
        return 0.5 * max(0.0, most - room) / (most - middle) if most > middle else 0.0
    return 1.0 - 0.5 * max(0.0, room - least) / (middle - least) if middle > least else 1.0


def worded(state: str, between: tuple[float, float], middle: float, room: float) -> str:
    """One of the three states with how likely the step runs out of memory, where it may.

    >>> worded(FITS, (60.0, 90.0), 70.0, 84.0), worded(FITS, (40.0, 60.0), 50.0, 80.0)
    ('fits (likelihood of running out 15%)', 'fits')
    >>> worded(MAY_RUN_OUT, (60.0, 90.0), 80.0, 70.0)
    'may run out (likelihood of running out 75%)'
    """
    share = likelihood(between, middle, room)
    if state == DOES_NOT_FIT or (state == FITS and not share):
        return state
    return f"{state} ({running_out(share)})"


IN_CELLS = "in brackets how likely it runs out of memory"
"""What a table says of a column of :func:`in_cell`."""


def in_cell(state: str, share: float) -> str:
    """What :func:`worded` says, as a cell of a table. ``share`` : how likely it runs out.

    >>> in_cell(FITS, 0.0), in_cell(FITS, 0.06), in_cell(MAY_RUN_OUT, 0.75), in_cell(DOES_NOT_FIT, 1.0)
    ('fits', 'fits (6%)', 'may run out (75%)', 'does not fit')
    """
    if state == DOES_NOT_FIT or (state == FITS and not share):
        return state
    return f"{state} ({_percent(share)})"


def running_out(share: float) -> str:
    """How likely memory runs out, in words.

    >>> running_out(0.25)
    'likelihood of running out 25%'
    """
    return f"likelihood of running out {_percent(share)}"


def _percent(share: float) -> str:
    """A likelihood that is neither nothing nor all, as a percentage that says neither.

    >>> _percent(0.914), _percent(0.001), _percent(0.999)
    ('91%', '<1%', '>99%')
    """
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"
