"""What the contracts of rows share (:mod:`clustersim.testing` has them all)."""

from __future__ import annotations

from typing import Any

CLOSE = 1e-6
"""Relative error up to which two ways to work out the same number agree."""


def require(holds: bool, row: Any, message: str) -> None:
    """An assertion that ``python -O`` leaves in, of a row that has a name."""
    if not holds:
        raise AssertionError(f"{row.name}: {message}")
