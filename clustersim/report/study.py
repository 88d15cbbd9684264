"""The page of whatever a folder holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from clustersim import sweeps
from clustersim.errors import ClusterSimError
from clustersim.report.campaign import campaign_page
from clustersim.report.pages import Page, Said
from clustersim.report.plan import plan_page
from clustersim.report.sensitivity import sensitivity_page
from clustersim.report.sweep import sweep_page
from clustersim.texts import decoded, text_of

PAGES: dict[str, Callable[[Said], Page]] = {
    "plan.json": plan_page,
    "sensitivity.json": sensitivity_page,
    "campaign.json": campaign_page,
}
"""Of an answer, by the file it is kept in; a sweep is its rows."""


def page_of(folder: Path) -> Page:
    """The page of whatever a folder holds: a plan, a sensitivity study, a campaign or a sweep.

    Raises :class:`ClusterSimError` for none of them.
    """
    for name, page in PAGES.items():
        if (folder / name).is_file():
            said = _read(folder / name)
            try:
                return page(said)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                raise ClusterSimError(f"{folder / name}: is damaged, or of another version: {error!r}") from None
    return sweep_page(folder)


def holds_study(folder: Path) -> bool:
    """Whether a folder holds a plan, a sensitivity study or a sweep."""
    return any((folder / name).is_file() for name in PAGES) or sweeps.is_sweep(folder)


def _read(path: Path) -> dict[str, Any]:
    return decoded(text_of(path, ClusterSimError), dict[str, Any], f"{path}: cannot be read", ClusterSimError)
