"""A plan's answer, as it is shown, drawn and kept in ``plan.json``."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from clustersim.core.texts import Table
from clustersim.studies.campaign.ledger import Percentiles


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One option's figures.

    Parameters
    ----------
    option : its name, without what all worth having share; in_full : with it. family, kind : of its strategy.
    degrees : of tp, pp, cp and ep. limited_by : where a step goes. stage_bytes : of each stage, of a split model.
    fit : whether its fullest GPU has room, and how likely; empty where it was sketched alone. has_room : that it is
        unlikely to run out of memory, as far as is known.
    dtype : of its matrix products. mfu : of the dense peak in that.
    rate : [tokens/s or samples/s]; step_s : [s]; None for what was not simulated. error : relative, of its kind of
        strategy. usd_per_1e9, kwh_per_1e9 : per 1e9 tokens or samples, None where not known. days, usd : for the
        plan's tokens; of a plan with a campaign the middle of its plays, with failures.
    """

    option: str
    in_full: str
    family: str
    machine: str
    nodes: int
    gpus: int
    batch: int
    kind: str
    degrees: dict[str, int]
    limited_by: str
    stage_bytes: list[float]
    rate: float | None
    step_s: float | None
    error: float
    usd_per_1e9: float | None
    kwh_per_1e9: float | None
    days: float | None
    usd: float | None
    dtype: str = ""
    mfu: float | None = None
    fit: str = ""
    has_room: bool = True


class ReasonedRow(PlanRow, frozen=True, kw_only=True):
    """An option, and ``why`` it is where it is; of one that was run, roughly at least, its ``scenario`` and the
    ``path`` of the plan, as a :class:`ChosenRow` has them."""

    why: str
    scenario: Table | UnsetType = UNSET
    path: str = ""


class FateRow(PlanRow, frozen=True, kw_only=True):
    """An option, and what became of it: ``state`` as of :class:`~clustersim.studies.plan.options.PlanOption`."""

    state: str
    reason: str

    @property
    def counts(self) -> bool:
        """Whether it was simulated and keeps every limit."""
        return self.state == "simulated" and not self.reason


class PlannedTraining(msgspec.Struct, frozen=True):
    """What became of an option's training.

    Parameters
    ----------
    days, usd : percentiles, USD None without a price. ideal_days : of its steps alone. goodput : effective training
        time, p50. in_time : share of replicas within the plan's deadline, None without one.
    beaten_by : another option of the front that with failures is better in everything, or nothing.
    wrong : why it was not played, or nothing.
    """

    days: Percentiles | None = None
    usd: Percentiles | None = None
    ideal_days: float = 0.0
    goodput: float = 0.0
    in_time: float | None = None
    beaten_by: str = ""
    wrong: str = ""


class ChosenRow(PlanRow, frozen=True, kw_only=True):
    """An option of the front: with its ``scenario``, the ``path`` of the plan (from the folder that keeps it), and its
    campaign where the plan has one. tokens_per_step : None where a model has no tokens."""

    scenario: Table
    path: str
    tokens_per_step: int | None
    why: str
    campaign: PlannedTraining | UnsetType = UNSET


BEST_OF_PLACES = "the fastest as predicted of each machine and size, with room in memory where anything has"
"""What :class:`PlaceRow` s are, above their table: one with less room may be on the front with a higher rate."""


class PlaceRow(msgspec.Struct, frozen=True, kw_only=True):
    """A machine and a number of its nodes: its ``best`` option, None where none is possible, and ``why`` that is or is
    not worth having. usd_per_gpu_hour : its price, with ``source``; None where nobody says."""

    machine: str
    nodes: int
    gpus: int
    usd_per_gpu_hour: float | None
    source: str
    best: ChosenRow | None
    why: str


class Degrees(msgspec.Struct, frozen=True):
    """The shortest step of a tp and a pp: ``step_s`` [s], None where none fits; ``sure``, that it was simulated and is
    no lower bound; ``best``, that it is the one to take."""

    tp: int
    pp: int
    step_s: float | None
    sure: bool = True
    best: bool = False


class UncertainSpan(msgspec.Struct, frozen=True):
    """What is uncertain, in words, and between which factors."""

    name: str
    low: float
    high: float


class Regret(msgspec.Struct, frozen=True):
    """How much longer an option trains than the best: at worst, at which corner that is, and at each; None or infinite
    where it never ends. ``robust`` : the one to take."""

    option: str
    rate: float
    regret: float | None
    at: str
    regrets: list[float | None]
    robust: bool


class MeasurementWorth(msgspec.Struct, frozen=True):
    """What a measurement is worth: by how much the worst regret falls, the ``choice`` at either end, and the
    ``command`` that measures."""

    name: str
    worth: float
    choice: dict[str, str]
    command: str


class RobustChoice(msgspec.Struct, frozen=True):
    """The robust choice, in a sentence; what is uncertain; its corners, of which each row has a regret; and what to
    measure, what is worth most first."""

    verdict: str
    uncertain: list[UncertainSpan]
    corners: list[dict[str, float]]
    rows: list[Regret]
    measure: list[MeasurementWorth]


class PlanAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer.

    Parameters
    ----------
    verdict : in a sentence. unit : ``"tokens"`` or ``"samples"``. front, tempting, alternatives : options with why.
    warnings, assumptions : sentences. counts : of options by what became of them. combined : how many combinations
        there were. options : every one, of a large space those that came to be simulated.
    landscape : of a split model, on the fastest one's machine. robust : of a robust search. failures : of a plan with a
        campaign, what the options' differences are made of. places : every machine and size asked for, in order.
    untried : usual alternatives that the space leaves out, in words. launch : a command, where one was looked for.
    """

    title: str
    verdict: str
    unit: str
    front: list[ChosenRow]
    tempting: list[ReasonedRow]
    alternatives: list[ReasonedRow]
    warnings: list[str]
    counts: dict[str, int]
    combined: int
    assumptions: list[str]
    options: list[FateRow]
    landscape: list[Degrees]
    robust: RobustChoice | UnsetType = UNSET
    failures: list[str] | UnsetType = UNSET
    launch: str | UnsetType = UNSET
    places: list[PlaceRow] = []
    untried: list[str] = []

    def numbered_others(self) -> Iterator[tuple[int, ReasonedRow]]:
        """What is tempting, then the alternatives, with the numbers that ``--option`` takes: those that were run,
        behind the front's; 0 of others, which have none."""
        number = len(self.front)
        for row in (*self.tempting, *self.alternatives):
            is_run = row.scenario is not UNSET
            number += is_run
            yield (number if is_run else 0), row
