"""Published trainings played from their public inputs, and the laws that answer published figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from clustersim.calibrate.score import number, read_table
from clustersim.core.errors import ClusterSimError
from clustersim.core.units import Seconds, quantity
from clustersim.scenario.file.campaign_schema import CampaignTable
from clustersim.scenario.file.reading import convert, read_toml
from clustersim.studies.campaign import pools
from clustersim.studies.campaign.job import Job, campaign
from clustersim.studies.campaign.ledger import percentiles
from clustersim.studies.campaign.many import play
from tests.evidence.standby import Standby, spares_refilled_daily

FILE = "campaign_cases.toml"
LAWS: dict[str, Callable[..., float]] = {
    "mtbf": pools.mtbf,
    "spares_for": pools.spares_for,
    "spares_refilled_daily": spares_refilled_daily,
    "standby_gain": lambda instead, **days: Standby(**days).gain(instead),
}
REPLICAS = 400
COLUMNS = ("row_id", "value", "unit", "status")
Figure = tuple[float, str, str]
"""A published value, its unit and its status."""


class GoodputCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A training: its row in the table, what a step is, and its campaign. assumed : what its publisher does not say.
    bound : ``above`` where what is left out can only lower the prediction, so that one above the figure is no error."""

    name: str
    row: str
    assumed: str
    nodes: int
    step: Seconds
    campaign: CampaignTable
    definition: str = "effective_training_time"
    gpus_per_node: int = 8
    parameters: float = 0.0
    bound: Literal["", "above"] = ""


class LawCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure that a closed form answers, times ``scale``. bound : as of :class:`GoodputCase`. published : the figure,
    where it stands in the notes of its row."""

    name: str
    row: str
    assumed: str
    law: str
    arguments: dict[str, float]
    scale: float = 1.0
    bound: Literal["", "above"] = ""
    published: float | None = None


class UnansweredFigure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure whose inputs nobody has published: nothing is predicted, and ``because`` says what is missing."""

    name: str
    row: str
    because: str


class PublishedCases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of them."""

    goodput: tuple[GoodputCase, ...]
    law: tuple[LawCase, ...]
    unanswered: tuple[UnansweredFigure, ...]


@dataclass(frozen=True)
class CheckedFigure:
    """One published figure and what was predicted.

    Parameters
    ----------
    published, unit, status : as the table has them; of a ``claim >=`` what is above it, and of a ``claim <=`` below,
        is no error. bound : as of a :class:`GoodputCase`. predicted : the middle replica's; p5, p95 : of replicas. All
        of them, and error, in the figure's own unit; not a number where nothing is predicted.
    """

    name: str
    row: str
    published: float
    unit: str
    status: str
    predicted: float
    p5: float
    p95: float
    error: float
    assumed: str
    bound: str = ""


def cases() -> PublishedCases:
    """Every shipped case."""
    return convert(read_toml(Path(__file__).parent / "data" / FILE), PublishedCases, FILE, dec_hook=quantity)


def validate(table: Path) -> list[CheckedFigure]:
    """Every case against its row. Raises :class:`ClusterSimError` for a table that is none, or without a row."""
    rows = {row["row_id"]: row for row in read_table(table, COLUMNS)}
    published_cases = cases()
    every: tuple[GoodputCase | LawCase | UnansweredFigure, ...] = (
        *published_cases.goodput,
        *published_cases.law,
        *published_cases.unanswered,
    )
    return [_checked(case, _published(rows, case.row, table)) for case in every]


def in_points(checked: list[CheckedFigure]) -> dict[str, float]:
    """Of goodputs: how many, how many of them are published as bounds (which have no error while they hold), and the
    median and the worst error in points, for a table of accuracy. Predictions that are bounds are left out."""
    played = [figure for figure in checked if figure.unit == "fraction" and figure.p95 > figure.p5 and not figure.bound]
    errors = np.array([100.0 * abs(figure.error) for figure in played])
    return {
        "n_cases": float(len(played)),
        "n_claims": float(sum(figure.status.startswith("claim") for figure in played)),
        "median_points": float(np.median(errors)),
        "worst_points": float(errors.max()),
    }


def _published(rows: Mapping[str, dict[str, str]], row: str, table: Path) -> Figure:
    if row not in rows:
        raise ClusterSimError(f"{table}: has no row {row!r}, which a case of {FILE} is checked against")
    try:
        return number(rows[row], "value"), rows[row]["unit"], rows[row]["status"]
    except ValueError as error:
        raise ClusterSimError(f"{table}: row {row!r}: {error}") from None


def _predicted(case: GoodputCase | LawCase) -> tuple[float, float, float]:
    """The middle one, p5 and p95."""
    if isinstance(case, LawCase):
        arguments = {name: int(value) if value == int(value) else value for name, value in case.arguments.items()}
        return (case.scale * LAWS[case.law](**arguments),) * 3
    job = Job(case.nodes, case.nodes * case.gpus_per_node, float(case.step), parameters=case.parameters)
    spread = percentiles(play(campaign(case.campaign, job), REPLICAS, seed=0).goodput(case.definition))
    return spread.p50, spread.p5, spread.p95


def _checked(case: GoodputCase | LawCase | UnansweredFigure, figure: Figure) -> CheckedFigure:
    published, unit, status = figure
    if isinstance(case, UnansweredFigure):
        return CheckedFigure(case.name, case.row, *figure, math.nan, math.nan, math.nan, math.nan, case.because)
    if isinstance(case, LawCase) and case.published is not None:
        published = case.published
    p50, p5, p95 = _predicted(case)
    error = p50 - published
    if status.startswith("claim"):
        error = min(error, 0.0) if ">=" in status else max(error, 0.0)
    elif case.bound:
        error = min(error, 0.0)
    return CheckedFigure(case.name, case.row, published, unit, status, p50, p5, p95, error, case.assumed, case.bound)
