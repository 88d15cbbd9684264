"""The whole answer of a campaign."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType, structs

from clustersim.core.outputs import Folder
from clustersim.core.texts import Table
from clustersim.core.units import DAY, HOUR, format_bytes, format_long
from clustersim.scenario import Scenario
from clustersim.scenario.file.campaign_schema import CampaignTable
from clustersim.scenario.run.identity import Fingerprints
from clustersim.studies.campaign import ledger, whatif
from clustersim.studies.campaign.batches import CampaignOptions, Told, played
from clustersim.studies.campaign.causes import sets
from clustersim.studies.campaign.job import LONGEST, Campaign, Job, campaign
from clustersim.studies.campaign.ledger import Percentiles, ReplicaRuns, percentiles
from clustersim.studies.campaign.of_scenario import HourBill, job_of, table_of
from clustersim.studies.campaign.replica import replica

FILE = "campaign.json"
FILES = (FILE, "month.png", "ledger.png", "interval.png", "nodes.png")
MONTH = 30 * DAY
ENOUGH = 0.9


class LedgerPart(msgspec.Struct, frozen=True):
    """A part of the ledger: mean days, and their share of the elapsed time."""

    days: float
    share: float


class ExpectedFailures(msgspec.Struct, frozen=True):
    """A cause of failures, how many of them are expected, and what each takes."""

    name: str
    expected: float
    scope: str


class SaveRow(msgspec.Struct, frozen=True):
    """A kind of save, as :class:`~clustersim.studies.campaign.axis.SaveKind`, and how long it takes to load [s]."""

    tier: str
    interval: float
    stall: float
    write: float
    load: float


class CampaignPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is played, with every figure that followed from something else; ``expected_days`` by the closed form, None
    where it has none; ``mtbf_s`` None where nothing fails; ``source`` : of the rates of failures."""

    steps: float
    ideal_days: float
    expected_days: float | None
    mtbf_s: float | None
    recovery_s: float
    causes: list[ExpectedFailures]
    source: str
    saves: list[SaveRow]
    checkpoint_bytes: float


class CampaignCost(msgspec.Struct, frozen=True):
    """USD of ``gpus``, spares included, that are paid for whatever they do (None without a price); kWh of those that
    train and those that wait, and what they cost."""

    gpus: float
    usd: Percentiles | None
    ideal_usd: float | None
    kwh: Percentiles
    usd_of_power: Percentiles | None
    sources: dict[str, str]


class CampaignOutcome(msgspec.Struct, frozen=True):
    """What became of replicas: days, failures, goodput by its definitions, the ledger by its parts; ``mfu`` of the
    whole training, None where that of a step is not known."""

    finishes: bool
    days: Percentiles
    failures: Percentiles
    goodput: dict[str, Percentiles]
    mfu: Percentiles | None
    ledger: dict[str, LedgerPart]
    cost: CampaignCost | None


NOTHING = Percentiles(0.0, 0.0, 0.0, 0.0)


class CampaignAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole answer: what was played (``job``, the ``table`` and the ``plan``), what became of it as in
    :class:`CampaignOutcome`, of one replica a ``month`` of (begin [s], end [s], state), and, where they were asked,
    questions. Of a campaign that does not finish before it is played there is no outcome.
    """

    title: str
    replicas: int
    seed: int
    job: Job
    table: Table
    plan: CampaignPlan
    finishes: bool
    days: Percentiles = NOTHING
    failures: Percentiles = NOTHING
    goodput: dict[str, Percentiles] = {}
    mfu: Percentiles | UnsetType | None = UNSET
    ledger: dict[str, LedgerPart] = {}
    cost: CampaignCost | UnsetType | None = UNSET
    month: list[tuple[float, float, str]] = []
    what_if: list[whatif.QuestionAnswer] = []
    interval: list[whatif.KnobPoint] = []
    nodes: list[whatif.KnobPoint] = []
    largest_job: float | UnsetType | None = UNSET
    gpus_per_node: float = 0.0
    verdict: str


def answer(
    scenario: Scenario,
    settings: CampaignOptions | None = None,
    folder: Folder | None = None,
    tell: Told = lambda done, total: None,
) -> CampaignAnswer:
    """Simulate the step, play the campaign, and say what became of it.

    folder : where batches of replicas are kept, see :func:`folder_for`. tell : called with (batches there, in all).

    Raises :class:`ScenarioError`.
    """
    settings = settings or CampaignOptions()
    table = table_of(scenario)
    if folder is None and settings.jobs > 1:  # processes hand over their batches in a folder
        with TemporaryDirectory() as temporary:
            return answer(scenario, settings, folder_for(scenario, temporary, settings), tell)
    with scenario.at("$.campaign"):
        job, bill = job_of(scenario)
        training = campaign(table, job)
    result = CampaignAnswer(
        title=scenario.title,
        replicas=settings.replicas,
        seed=settings.seed,
        job=job,
        table=table.plain(),
        plan=_plan(table, job, training),
        finishes=False,
        verdict=_hopeless(training) if training.hopeless else "",
    )
    if training.hopeless:
        return result
    outcome_found = outcome(training, played(training, settings, folder, told=tell), bill)
    spans = replica(training, settings.seed).spans
    month = [(span.begin, min(span.end, MONTH), span.state) for span in spans if span.begin < MONTH]
    result = structs.replace(
        result, **structs.asdict(outcome_found), month=month, verdict=_verdict(outcome_found, training)
    )
    return _questions(result, training) if settings.what_if else result


def outcome(training: Campaign, runs: ReplicaRuns, bill: HourBill | None = None) -> CampaignOutcome:
    """What became of replicas."""
    mfu = training.job.mfu
    elapsed = float(runs.elapsed.mean())
    means = {part: float(runs.part(part).mean()) for part in ledger.PARTS}
    return CampaignOutcome(
        finishes=bool(runs.finished.all()),
        days=percentiles(runs.elapsed / DAY),
        failures=percentiles(runs.failures.astype(np.float64)),
        goodput={name: percentiles(runs.goodput(name, mfu)) for name in ledger.GOODPUTS},
        mfu=None if mfu is None else percentiles(mfu * (runs.part("productive") / runs.elapsed)),
        ledger={part: LedgerPart(mean / DAY, mean / elapsed) for part, mean in means.items()},
        cost=None if bill is None else _cost(training, runs, bill),
    )


def _plan(table: CampaignTable, job: Job, training: Campaign) -> CampaignPlan:
    cause_set = sets().get(table.failures) if isinstance(table.failures, str) else None
    return CampaignPlan(
        steps=training.steps,
        ideal_days=training.axis.work / DAY,
        expected_days=None if training.policy == "drop_replica" else training.expected() / DAY,
        mtbf_s=training.mtbf if math.isfinite(training.mtbf) else None,
        recovery_s=training.recovery,
        causes=[
            ExpectedFailures(cause.name, cause.expected(training.axis.end), cause.scope) for cause in training.causes
        ],
        source="the scenario's own" if cause_set is None else cause_set.source,
        saves=[SaveRow(t.name, t.save.interval, t.save.stall, t.save.write, float(t.load)) for t in training.tiers],
        checkpoint_bytes=job.parameters * (table.checkpoints[0].bytes_per_parameter or job.bytes_per_parameter),
    )


def _cost(training: Campaign, runs: ReplicaRuns, bill: HourBill) -> CampaignCost:
    gpus_per_node = training.job.gpus / training.job.nodes
    gpus = training.job.gpus + gpus_per_node * (training.spares or 0)
    idle = runs.ledger[:, ledger.PAUSES].sum(axis=1)
    standing = (gpus - training.job.gpus) * runs.elapsed
    joule = training.job.gpus * (bill.busy_w * (runs.elapsed - idle) + bill.idle_w * idle) + bill.idle_w * standing
    usd = None if bill.usd_per_gpu_hour is None else gpus * runs.elapsed / HOUR * bill.usd_per_gpu_hour
    ideal = (
        None if bill.usd_per_gpu_hour is None else training.job.gpus * training.axis.work / HOUR * bill.usd_per_gpu_hour
    )
    power = None if bill.usd_per_kwh is None else joule / 3.6e6 * bill.usd_per_kwh
    return CampaignCost(
        gpus,
        None if usd is None else percentiles(usd),
        ideal,
        percentiles(joule / 3.6e6),
        None if power is None else percentiles(power),
        dict(bill.sources),
    )


def _questions(partial: CampaignAnswer, training: Campaign) -> CampaignAnswer:
    nodes = whatif.over_nodes(training, partial.seed)
    return structs.replace(
        partial,
        what_if=whatif.answers(training, partial.seed),
        interval=whatif.over_interval(training, partial.seed),
        nodes=nodes,
        largest_job=whatif.largest_job(nodes, ENOUGH),
        gpus_per_node=training.job.gpus / training.job.nodes,
    )


def _hopeless(training: Campaign) -> str:
    return (
        f"Does not finish: a failure comes every {format_long(training.mtbf)}, a recovery takes "
        f"{format_long(training.recovery)} and a save every {format_long(training.tiers[0].save.interval)} of work: "
        f"more than {LONGEST:.0f} times its {training.axis.work / DAY:,.1f} days."
    )


def _verdict(outcome: CampaignOutcome, training: Campaign) -> str:
    days = outcome.days
    ideal = training.axis.work / DAY
    if not outcome.finishes:
        return (
            f"Not every replica finishes within {LONGEST:.0f} times its {ideal:,.1f} days: "
            f"{outcome.ledger['waiting for nodes'].share:.0%} of the time is waiting for nodes and "
            f"{outcome.ledger['lost work'].share:.0%} lost work."
        )
    worst = sorted(
        ((part, part_of.share) for part, part_of in outcome.ledger.items() if part != ledger.PARTS[ledger.PRODUCTIVE]),
        key=lambda item: -item[1],
    )[:2]
    lost = " and ".join(f"{part} ({share:.1%})" for part, share in worst if share > 0.0005)
    productive = outcome.ledger[ledger.PARTS[ledger.PRODUCTIVE]].share
    failed = f"{outcome.failures.p50:,.0f} failure{'' if round(outcome.failures.p50) == 1 else 's'}"
    return (
        f"{_lacking(training)}{days.p50:,.1f} days instead of {ideal:,.1f} (19 in 20 within {days.p95:,.1f}): "
        f"{failed}, {productive:.1%} of the time is new steps at full pace"
        + (f"; most of the rest is {lost}." if lost else ".")
    )


def _lacking(training: Campaign) -> str:
    """That it does not fit, and who lacks how much memory; empty where it does."""
    short = [("a GPU", training.job.lacking), ("a node's host", training.job.host_lacking)]
    lacks = " and ".join(f"{who} lacks {format_bytes(nbytes)} of memory" for who, nbytes in short if nbytes)
    return f"It does not fit: {lacks}. If it were there, " if lacks else ""


def folder_for(scenario: Scenario, out: str | Path, settings: CampaignOptions) -> Folder:
    """Where a campaign goes. Raises :class:`ClusterSimError` where the folder holds something else."""
    fingerprint = Fingerprints()(scenario)
    inputs = (fingerprint.inputs, fingerprint.files, table_of(scenario).plain(), settings.seed)
    folder = Folder(Path(out), "campaign", scenario.title, FILES, inputs)
    folder.check()
    return folder
