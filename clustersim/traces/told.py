"""What a file says that is neither a run nor a benchmark: a hang's last collectives, NCCL's own choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from clustersim.texts import Plain


@dataclass(frozen=True, eq=False)
class Told:
    """What a log tells.

    Parameters
    ----------
    source : where it is from. lines : for people, the answer first. facts : the same for programs, plain values.
    skipped : what was left out, reason -> how many.
    """

    source: str
    lines: tuple[str, ...]
    facts: Plain
    skipped: Mapping[str, int] = field(default_factory=dict)
