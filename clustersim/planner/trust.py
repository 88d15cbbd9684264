"""How far a plan's figures are to be trusted: the error that validation found, carried into every one of them.

``data/accuracy.toml`` has, per kind of strategy, how far predicted steps were from published ones; ``python
tests/readme.py`` writes it beside the table of the README.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from clustersim.paths import data_path


@dataclass(frozen=True)
class Trust:
    """Relative error of step times of one kind of strategy: ``median`` and ``p90`` over ``cases`` published tables."""

    median: float
    p90: float
    cases: int

    def span(self, seconds: float) -> tuple[float, float]:
        """What half of published steps lay within, around a predicted one [s]."""
        return seconds / (1.0 + self.median), seconds * (1.0 + self.median)


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    return tomllib.loads((data_path("data") / "accuracy.toml").read_text(encoding="utf-8"))


def trust(kind: str) -> Trust:
    """Of a strategy's ``kind``; of one that no published table is about, of all together."""
    steps = _data()["steps"]
    found = steps.get(kind, steps["all"])
    return Trust(float(found["median"]), float(found["p90"]), int(found["cases"]))


def as_of() -> str:
    """The day of the validation."""
    return str(_data()["date"])


def alike(a_kind: str, a: float, b_kind: str, b: float) -> bool:
    """Whether two predictions differ by less than the error of either kind of strategy, so that which of the two is
    better is not known."""
    error = max(trust(a_kind).median, trust(b_kind).median)
    return abs(a - b) <= error * min(a, b)
