"""What clustersim raises for input it cannot use.

Every message says what is wrong, where (file and field path), the value, and what would be right; the command line
prints it as one line and exits with 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


class ClusterSimError(Exception):
    """Base of every error a user can cause."""


class UnitError(ClusterSimError, ValueError):
    """A text that is not the quantity asked for, or a bare number where a unit is needed."""


class ScenarioError(ClusterSimError):
    """A scenario file that does not describe a run."""


class TopologyError(ClusterSimError):
    """A topology file or graph that does not describe a machine, or a route that does not exist."""


class ModelError(ClusterSimError):
    """A model description (a Hugging Face config.json, a name) that cannot be turned into layers."""


class ProgramError(ClusterSimError):
    """A Program that cannot run: a bad group, a missing peer, ranks that wait for each other forever."""


class PluginError(ClusterSimError):
    """A row of another package that cannot be used, a broken import, or a name that is taken."""


class TraceError(ClusterSimError):
    """A log, table or trace that cannot be read."""


def nearest(word: str, known_names: Iterable[str]) -> str:
    """A tail for an error message: the known name nearest to a misspelt one, or the list of them.

    >>> nearest("rign", ["ring", "tree"])
    "did you mean 'ring'?"
    >>> nearest("xyz", ["ring", "tree"])
    'known: ring, tree'
    >>> nearest("batch", ["watchdog", "run"])
    'known: run, watchdog'
    """
    names = sorted(known_names)
    meant = nearest_name(word, names)
    return f"did you mean '{meant}'?" if meant is not None else "known: " + ", ".join(names)


def nearest_name(word: str, known_names: Iterable[str]) -> str | None:
    """The known name that a misspelt one most likely is; None where none is like it.

    Names that begin otherwise must be more alike: ``batch`` is no misspelt ``watchdog``.
    """
    written = str(word).lower()
    lowered = {name.lower(): name for name in sorted(known_names, reverse=True)}
    close = difflib.get_close_matches(written, lowered, n=3, cutoff=0.6)
    alike = set(difflib.get_close_matches(written, lowered, n=3, cutoff=0.7))
    return next((lowered[name] for name in close if name in alike or name[:1] == written[:1]), None)


def nearest_number(works: Callable[[int], bool], value: int, most: int) -> str:
    """The same for a number: those from 1 to ``most`` that work, next below and next above one that does not.

    >>> nearest_number(lambda n: 32 % n == 0, 3, 32)
    'use 2 or 4'
    """
    below = next((n for n in range(min(value - 1, most), 0, -1) if works(n)), None)
    above = next((n for n in range(value + 1, most + 1) if works(n)), None)
    return "use " + " or ".join(str(n) for n in (below, above) if n is not None)


def nearest_divisor(size: int, value: int) -> str:
    """``"use 2 or 4"``: the divisors of ``size`` next to a number that is none."""
    return nearest_number(lambda n: size % n == 0, value, size)


def several(number: int, noun: str) -> str:
    """A number with its noun.

    >>> several(1, "node"), several(1024, "node")
    ('1 node', '1,024 nodes')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def few(items: Iterable[object], most: int) -> str:
    """The first of a list in words, and how many more there are.

    >>> few(range(9), 3)
    '0, 1, 2 and 6 more'
    """
    named = [str(word) for word in items]
    return ", ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")


EXTRAS = {
    "perfetto": "6 MB",
    "dask": "30 MB",
    "parquet": "170 MB",
    "exchange": "4 MB",
    "explore": "5 MB",
    "notebooks": "JupyterLab and pandas, some 100 MB",
    "torch": "PyTorch: 0.8 GB after pip install torch --index-url https://download.pytorch.org/whl/cpu, else 6 GB",
    "capture": "PyTorch: 0.8 GB after pip install torch --index-url https://download.pytorch.org/whl/cpu, else 6 GB",
}
"""Extras of the package, and what each brings."""


def needs(feature: str, extra: str) -> str:
    """The sentence for work whose packages are not installed.

    >>> needs("a .pftrace", "perfetto")
    "a .pftrace needs an extra: pip install 'clustersim[perfetto]' (6 MB)"
    """
    return f"{feature} needs an extra: pip install 'clustersim[{extra}]' ({EXTRAS[extra]})"
