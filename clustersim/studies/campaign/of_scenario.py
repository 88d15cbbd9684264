"""What a scenario is as the job of a campaign: its step simulated once as it is, and once for each degraded state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clustersim.core.economics import GpuRates, rates, watts_per_gpu
from clustersim.core.errors import ScenarioError
from clustersim.core.memory_use import MemoryUse
from clustersim.core.mesh import Mesh
from clustersim.core.model import Model
from clustersim.core.optimizers import state_bytes
from clustersim.core.texts import Table
from clustersim.core.variation import Variation
from clustersim.scenario import Scenario
from clustersim.scenario.file.campaign_schema import CampaignTable, Degraded
from clustersim.scenario.run.held import held
from clustersim.scenario.run.running import Prepared
from clustersim.studies.campaign.job import Job
from clustersim.studies.what_if.rerun import step_time
from clustersim.studies.what_if.spread import SLOWEST, StepSpread, spread

MACHINES = 40
STEPS = 20
"""That a campaign takes its steps from."""


@dataclass(frozen=True)
class HourBill:
    """What an hour of a GPU costs and draws.

    usd_per_gpu_hour, usd_per_kwh : None where nobody says. busy_w, idle_w : of a GPU with its share of the machine and
        the building [W], while it trains and while it waits. sources : of the figures, in words.
    """

    usd_per_gpu_hour: float | None
    usd_per_kwh: float | None
    busy_w: float
    idle_w: float
    sources: Mapping[str, str]


def table_of(scenario: Scenario) -> CampaignTable:
    """The ``[campaign]`` table. Raises :class:`ScenarioError` where there is none."""
    if scenario.file.campaign is None:
        raise ScenarioError(
            f"{scenario.path}: says nothing of a whole training; add a table [campaign] "
            "(`clustersim schema scenario` lists its keys)"
        )
    return scenario.file.campaign


def job_of(scenario: Scenario) -> tuple[Job, HourBill]:
    """Simulate the scenario's step, one of each degraded state, and with ``[run.variation]`` those of several machines.

    Where steps vary, ``step_s`` is one that does not. Raises :class:`ScenarioError`.
    """
    table = table_of(scenario)
    host_spread, swapped = spreads(scenario)
    scenario = scenario if host_spread is None else scenario.changed({"run.jitter": 0.0})
    prepared = scenario.prepare()
    result = prepared.run()
    figures = result.summary
    step = step_time(result.timeline)
    tokens = figures["tokens_per_s_per_gpu"]
    job = Job(
        nodes=prepared.mesh.n_nodes,
        gpus=prepared.gpus,
        step_s=step,
        replicas=prepared.mesh.size("dp"),
        copies=copies(scenario, prepared.mesh),
        parameters=float(prepared.model.trained),
        bytes_per_parameter=kept_per_parameter(scenario, prepared.memory, prepared.model),
        tokens_per_step=None if tokens is None else round(tokens * prepared.mesh.workers * step),
        mfu=figures["mfu"],
        lacking=max(0.0, -result.verdict.spare),
        host_lacking=result.verdict.host.missing_bytes,
        slower={
            slowdown.name: _slower(scenario, prepared, slowdown, step)
            for slowdown in table.degraded
            if slowdown.factor is None
        },
        machines=(1.0,) if host_spread is None else tuple((host_spread.of_machines / host_spread.still).tolist()),
        swapped=() if swapped is None else tuple((swapped.of_machines / swapped.still).tolist()),
        step_cv=0.0 if host_spread is None else host_spread.within,
    )
    own = {kind.device: kind.own_gpu for kind in prepared.topology.node_types if kind.own_gpu is not None}
    return job, _bill(table, rates(prepared.devices, table.price.usd_per_gpu_hour, own_gpus=own), figures)


def spreads(scenario: Scenario) -> tuple[StepSpread | None, StepSpread | None]:
    """Steps of several machines, and of the same with others in place of their slowest hosts; None where nothing varies
    or no host differs. Raises :class:`ScenarioError`."""
    v = scenario.file.run.variation
    if v is None or v == Variation():
        return None, None
    hosts_differ = v.gpu_cv > 0 or (v.slow_hosts > 0 and v.slow_factor > 1)
    host_spread = spread(scenario, MACHINES, STEPS)
    return host_spread, spread(scenario, MACHINES, STEPS, best=SLOWEST) if hosts_differ else None


def job_at(scenario: Scenario, step_s: float, tokens_per_step: float | None) -> Job:
    """The same of a step that somebody knows, without a run of it; nothing in it varies or is slow for a while."""
    parts = held(scenario)
    return Job(
        nodes=parts.mesh.n_nodes,
        gpus=parts.mesh.workers,
        step_s=step_s,
        replicas=parts.mesh.size("dp"),
        copies=copies(parts.scenario, parts.mesh),
        parameters=float(parts.model.trained),
        bytes_per_parameter=kept_per_parameter(scenario, parts.use, parts.model),
        tokens_per_step=tokens_per_step,
    )


def copies(scenario: Scenario, mesh: Mesh) -> int:
    """Whole copies of the model and its optimizer state: a failure of a node leaves the others whole. Ranks that share
    out either of them (FSDP, ZeRO, Megatron's distributed optimizer) are one copy."""
    parallel = scenario.file.parallel
    shared = parallel is not None and parallel.use_distributed_optimizer
    if scenario.strategy.name == "ddp" and not shared:
        return mesh.size("dp")
    return getattr(scenario.config, "data_parallel_replicate_degree", None) or mesh.size("dp_replicate")


def kept_per_parameter(scenario: Scenario, memory: MemoryUse, model: Model) -> float:
    """Bytes of a checkpoint for each parameter that is trained: weights in the module's type, fp32 copies of 16-bit
    ones, and what the optimizer keeps in fp32. bf16 weights with Adam: 2 + 4 + 8 = 14; fp32 weights: 4 + 8 = 12."""
    weights = 6.0 if memory.largest("master_weights") > 0 else 4.0
    optimizer = scenario.file.run.optimizer
    return weights + state_bytes(model, None if optimizer == "none" else optimizer, 4.0) / max(1, model.trained)


def _slower(scenario: Scenario, prepared: Prepared, slowdown: Degraded, step: float) -> float:
    """How many times longer a step is while something is slow."""
    cluster = scenario.file.cluster
    if slowdown.speed is not None:
        rest = [{"ranks": list(slow.ranks), "speed": slow.speed} for slow in cluster.slow]
        changes: Table = {"cluster.slow": [*rest, {"ranks": [prepared.mesh.workers - 1], "speed": slowdown.speed}]}
    else:
        if cluster.changes:
            raise ScenarioError(
                f"{scenario.path}: a degraded link beside [[cluster.changes]]; write its factor "
                "(at $.campaign.degraded)"
            )
        changes = {"cluster.changes": [{"match": slowdown.match, "factor": slowdown.bandwidth}]}
    return step_time(scenario.changed(changes).run().timeline) / step


def _bill(table: CampaignTable, gpu_rates: GpuRates, figures: Table) -> HourBill:
    step, compute, exposed = (float(figures[k]) for k in ("step_time_s", "compute_s", "exposed_communication_s"))
    busy = watts_per_gpu(gpu_rates, step, compute, exposed)
    idle = watts_per_gpu(gpu_rates, 1.0, 0.0, 0.0)
    sources = {name: text.replace("the plan's", "the scenario's") for name, text in gpu_rates.sources.items()}
    return HourBill(gpu_rates.usd_per_gpu_hour, table.price.usd_per_kwh, busy, idle, sources)
