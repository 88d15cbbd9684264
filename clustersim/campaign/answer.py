"""The whole answer of a campaign in plain values, its verdict first."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from clustersim.campaign import ledger
from clustersim.campaign.batches import Asked, Told, played
from clustersim.campaign.causes import sets
from clustersim.campaign.job import LONGEST, Campaign, Job, campaign
from clustersim.campaign.ledger import Runs, percentiles
from clustersim.campaign.of_scenario import Bill, job_of, table_of
from clustersim.campaign.replica import replica
from clustersim.campaign.whatif import answers, largest_job, over_interval, over_nodes
from clustersim.outputs import Folder
from clustersim.scenario import Scenario
from clustersim.scenario.campaign_schema import CampaignTable
from clustersim.sweeps.row import Fingerprints
from clustersim.texts import Plain
from clustersim.units import DAY, HOUR, format_bytes, format_long

FILE = "campaign.json"
FILES = (FILE, "month.png", "ledger.png", "interval.png", "nodes.png")
MONTH = 30 * DAY
ENOUGH = 0.9


def answer(
    scenario: Scenario, asked: Asked | None = None, folder: Folder | None = None, told: Told = lambda done, total: None
) -> Plain:
    """Simulate the step, play the campaign, and say what became of it.

    Parameters
    ----------
    folder : where batches of replicas are kept, see :func:`folder_for`. told : called with (batches there, in all).

    Returns plain values: ``verdict``; ``job``, ``table`` and ``plan``, what was played; ``days``, ``failures``,
    ``cost``, each with percentiles; ``goodput`` by its definitions; ``ledger``; of one replica ``month``; and, where
    they were asked, ``what_if``, ``interval`` and ``nodes``. Raises :class:`ScenarioError`.
    """
    asked, table = asked or Asked(), table_of(scenario)
    if folder is None and asked.jobs > 1:  # processes hand over their batches in a folder
        with TemporaryDirectory() as temporary:
            return answer(scenario, asked, folder_for(scenario, temporary, asked), told)
    with scenario.at("$.campaign"):
        job, bill = job_of(scenario)
        made = campaign(table, job)
    said = {"title": scenario.title, "replicas": asked.replicas, "seed": asked.seed, **_inputs(table, job, made)}
    if made.hopeless:
        return said | {"finishes": False, "verdict": _hopeless(made)}
    runs = played(made, asked, folder, told=told)
    said |= outcome(made, runs, bill)
    said["month"] = [(s.begin, min(s.end, MONTH), s.state) for s in replica(made, asked.seed).spans if s.begin < MONTH]
    if asked.what_if:
        said |= _questions(made, asked.seed)
    return said | {"verdict": _verdict(said, made)}


def outcome(made: Campaign, runs: Runs, bill: Bill | None = None) -> Plain:
    """What became of replicas: days, failures, goodput, ledger, cost."""
    mfu, elapsed = made.job.mfu, runs.elapsed.mean()
    productive = runs.part("productive") / runs.elapsed
    return {
        "finishes": bool(runs.finished.all()),
        "days": percentiles(runs.elapsed / DAY),
        "failures": percentiles(runs.failures.astype(np.float64)),
        "goodput": {name: percentiles(runs.goodput(name, mfu)) for name in ledger.GOODPUTS},
        "mfu": None if mfu is None else percentiles(mfu * productive),
        "ledger": {
            part: {"days": float(runs.part(part).mean()) / DAY, "share": float(runs.part(part).mean() / elapsed)}
            for part in ledger.PARTS
        },
        "cost": None if bill is None else _cost(made, runs, bill),
    }


def _inputs(table: CampaignTable, job: Job, made: Campaign) -> Plain:
    """What is played, with every figure that followed from something else."""
    found = sets().get(table.failures) if isinstance(table.failures, str) else None
    plan = {
        "steps": made.steps,
        "ideal_days": made.axis.work / DAY,
        "expected_days": None if made.policy == "drop_replica" else made.expected() / DAY,
        "mtbf_s": made.mtbf if math.isfinite(made.mtbf) else None,
        "recovery_s": made.recovery,
        "causes": [{"name": c.name, "expected": c.expected(made.axis.end), "scope": c.scope} for c in made.causes],
        "source": "the scenario's own" if found is None else found.source,
        "saves": [{"tier": t.name, **asdict(t.save), "load": float(t.load)} for t in made.tiers],
        "checkpoint_bytes": job.parameters * (table.checkpoints[0].bytes_per_parameter or job.bytes_per_parameter),
    }
    return {"job": asdict(job), "table": table.plain(), "plan": plan}


def _cost(made: Campaign, runs: Runs, bill: Bill) -> Plain:
    """USD of GPUs, spares included, that are paid for whatever they do; kWh of those that train and those that wait."""
    each = made.job.gpus / made.job.nodes
    gpus = made.job.gpus + each * (made.spares or 0)
    idle = runs.ledger[:, ledger.PAUSES].sum(axis=1)
    standing = (gpus - made.job.gpus) * runs.elapsed
    joule = made.job.gpus * (bill.busy_w * (runs.elapsed - idle) + bill.idle_w * idle) + bill.idle_w * standing
    usd = None if bill.usd_per_gpu_hour is None else gpus * runs.elapsed / HOUR * bill.usd_per_gpu_hour
    ideal = None if bill.usd_per_gpu_hour is None else made.job.gpus * made.axis.work / HOUR * bill.usd_per_gpu_hour
    power = None if bill.usd_per_kwh is None else joule / 3.6e6 * bill.usd_per_kwh
    return {
        "gpus": gpus,
        "usd": None if usd is None else percentiles(usd),
        "ideal_usd": ideal,
        "kwh": percentiles(joule / 3.6e6),
        "usd_of_power": None if power is None else percentiles(power),
        "sources": dict(bill.sources),
    }


def _questions(made: Campaign, seed: int) -> Plain:
    nodes = over_nodes(made, seed)
    return {
        "what_if": [asdict(one) for one in answers(made, seed)],
        "interval": [asdict(one) for one in over_interval(made, seed)],
        "nodes": [asdict(one) for one in nodes],
        "largest_job": largest_job(nodes, ENOUGH),
        "gpus_per_node": made.job.gpus / made.job.nodes,
    }


def _hopeless(made: Campaign) -> str:
    return (
        f"Does not finish: a failure comes every {format_long(made.mtbf)}, a recovery takes "
        f"{format_long(made.recovery)} and a save every {format_long(made.tiers[0].save.interval)} of work: more "
        f"than {LONGEST:.0f} times its {made.axis.work / DAY:,.1f} days."
    )


def _verdict(said: Plain, made: Campaign) -> str:
    days, ideal = said["days"], made.axis.work / DAY
    if not said["finishes"]:
        return (
            f"Not every replica finishes within {LONGEST:.0f} times its {ideal:,.1f} days: "
            f"{said['ledger']['waiting for nodes']['share']:.0%} of the time is waiting for nodes and "
            f"{said['ledger']['lost work']['share']:.0%} lost work."
        )
    worst = sorted(
        ((part, one["share"]) for part, one in said["ledger"].items() if part != ledger.PARTS[ledger.PRODUCTIVE]),
        key=lambda item: -item[1],
    )[:2]
    lost = " and ".join(f"{part} ({share:.1%})" for part, share in worst if share > 0.0005)
    productive = said["ledger"][ledger.PARTS[ledger.PRODUCTIVE]]["share"]
    lacking = made.job.lacking
    wanted = f"It does not fit: a GPU lacks {format_bytes(lacking)} of memory. If it had them, " if lacking else ""
    return (
        f"{wanted}{days['p50']:,.1f} days instead of {ideal:,.1f} (19 in 20 within {days['p95']:,.1f}): "
        f"{said['failures']['p50']:,.0f} failures, {productive:.1%} of the time is new steps at full pace"
        + (f"; most of the rest is {lost}." if lost else ".")
    )


def folder_for(scenario: Scenario, out: str | Path, asked: Asked) -> Folder:
    """Where a campaign goes. Raises :class:`ClusterSimError` where the folder holds something else."""
    known = Fingerprints()(scenario)
    of = (known.inputs, known.files, table_of(scenario).plain(), asked.seed)
    folder = Folder(Path(out), "campaign", scenario.title, FILES, of)
    folder.check()
    return folder
