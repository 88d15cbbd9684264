"""The page of whatever a folder holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from clustersim.app.report import write_page
from clustersim.app.report.campaign import campaign_page
from clustersim.app.report.pages import Page, rendered
from clustersim.app.report.plan import plan_page
from clustersim.app.report.sensitivity import sensitivity_page
from clustersim.app.report.sweep import sweep_page
from clustersim.core.errors import ClusterSimError
from clustersim.core.texts import decoded, text_of
from clustersim.studies import campaign
from clustersim.studies import sweep as sweeps
from clustersim.studies.plan import rows
from clustersim.studies.sensitivity import Study

PAGES: dict[str, tuple[Any, Callable[[Any], Page]]] = {
    "plan.json": (rows.PlanAnswer, plan_page),
    "sensitivity.json": (Study, sensitivity_page),
    "campaign.json": (campaign.CampaignAnswer, campaign_page),
}
"""Of an answer, by the file it is kept in, what that holds; a sweep is its rows."""


def page_of(folder: Path) -> Page:
    """The page of whatever a folder holds: a plan, a sensitivity study, a campaign or a sweep.

    Raises :class:`ClusterSimError` for none of them.
    """
    for name, (kind, page) in PAGES.items():
        if (folder / name).is_file():
            text = text_of(folder / name, ClusterSimError)
            result = decoded(text, kind, f"{folder / name}: cannot be read", ClusterSimError)
            try:
                return page(result)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise ClusterSimError(f"{folder / name}: is damaged, or of another version: {error!r}") from None
    return sweep_page(folder)


def holds_study(folder: Path) -> bool:
    """Whether a folder holds a plan, a sensitivity study or a sweep."""
    return any((folder / name).is_file() for name in PAGES) or sweeps.is_sweep(folder)


def study_html(folder: str | Path, title: str | None = None) -> str:
    """The report of the sweep, plan or study in a folder as one HTML document; ``title`` None takes its own.

    Raises :class:`ClusterSimError` where the folder holds none, or nothing in it has a result.
    """
    page = msgspec.structs.asdict(page_of(Path(folder)))
    return rendered("study.html.j2", **page | ({} if title is None else {"title": title}))


def write_study(folder: str | Path, path: str | Path, title: str | None = None) -> None:
    """Write the report of a sweep, a plan or a sensitivity study, as :func:`clustersim.app.report.write_report`
    does."""
    write_page(study_html(folder, title), Path(path))
