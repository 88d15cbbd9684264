"""All strategies side by side on one scenario's machine and model; of a split model, other ways to split it over the
same GPUs, with the same samples in a step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from clustersim.core.errors import ClusterSimError
from clustersim.core.texts import data_table
from clustersim.scenario import Scenario, load
from clustersim.scenario.file.reading import Changes, Table
from clustersim.scenario.run.held import ScenarioParts, held
from clustersim.scenario.run.parts import machine
from clustersim.training.parallel import ParallelConfig, preset
from clustersim.training.strategies import STRATEGIES

if TYPE_CHECKING:
    from clustersim.scenario.run.split_step import Split

SHORT = ("bf16", "fp16")
COMMON = ("micro_batch_size", "gradient_accumulation_steps", "param_dtype")
"""Knobs of the scenario's own strategy that every other is given too."""

VARIANTS: Mapping[str, Mapping[str, Changes]] = {
    "sgd_steps": {"gather": {}, "all_reduce": {"exchange": "all_reduce"}},
    "parameter_server": {
        "on a CPU": {},
        "a GPU each": {"server": "worker", "servers": 0, "sharding": "even"},
        "async, staleness 2": {"mode": "async", "staleness": 2},
    },
    "fsdp": {"": {}, "SHARD_GRAD_OP": {"version": 1, "sharding_strategy": "SHARD_GRAD_OP"}},
    "zero": {f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in (1, 2, 3)},
}
"""Kinds of which more than one form is worth a row; every other kind has one, with its defaults."""
_AWAY = {"device": "cpu", "pin_memory": True}
ON_THE_HOST: Mapping[str, Mapping[str, Changes]] = {
    "fsdp": {"all on the host": {"cpu_offload": True}},
    "zero": {
        "stage 2, optimizer on the host": {"zero_optimization": {"stage": 2, "offload_optimizer": _AWAY}},
        "stage 3, optimizer on the host": {"zero_optimization": {"stage": 3, "offload_optimizer": _AWAY}},
        "stage 3, all on the host": {
            "zero_optimization": {"stage": 3, "offload_optimizer": _AWAY, "offload_param": _AWAY}
        },
    },
}
"""Forms that keep states in the host's memory, for who asks what would fit."""

SCHEDULES: tuple[tuple[str, int | None], ...] = (
    ("gpipe", None),
    ("1f1b", None),
    ("interleaved_1f1b", 2),
    ("zb_h1", None),
    ("zb_2p", None),
    ("zbv", 2),
)
"""Schedules worth a row each, and the chunks of a rank that they are shown with."""
OF_A_SCHEDULE = tuple(data_table("parallel_fields")["schedule"])
OF_STAGES = (*OF_A_SCHEDULE, *data_table("parallel_fields")["stages"])
"""Fields that hold for the scenario's own stages alone."""
OF_TENSORS = tuple(data_table("parallel_fields")["tensors"])

OWN = "as written"
STEPS = 3
"""Steps of a row at most: enough for a steady one."""


@dataclass(frozen=True)
class ComparisonCase:
    """One row to come: a strategy and how it is played, and the fields to change in the scenario for it."""

    kind: str
    variant: str
    changes: Changes

    @property
    def own(self) -> bool:
        """Whether it is the scenario's."""
        return self.variant == OWN


class ComparisonRow(msgspec.Struct, frozen=True):
    """What one strategy, or one way to split a model, comes to on a machine.

    Parameters
    ----------
    strategy, variant : what it is. own : it is the scenario's.
    step_time_s, exposed_communication_s, exposed_transfer_s, waiting_for_peer_s, bubble_s : of a step [s], as in its
        run's summary; no bubble without a pipeline. samples_per_s : of the whole machine.
    bytes_per_parameter : of model states, unsplit: what tells precisions apart. gradients_in : the element type that
        gradients travel in; None of a split model, whose replicas have their own.
    peak_memory_bytes, bytes_sent_per_gpu : of a GPU, in a step. fits : in its memory. verdict, runs_out : as
        ``memory`` says it, and how likely it runs out.
    reason : why it cannot be run, which leaves its figures None, or does not fit; empty otherwise.
    steps : how many were played, of ``steps_asked`` in the scenario: its own run is a mean over more of them where that
        is more, and steps differ a little.
    """

    strategy: str
    variant: str
    own: bool
    step_time_s: float | None = None
    samples_per_s: float | None = None
    exposed_communication_s: float | None = None
    exposed_transfer_s: float | None = None
    waiting_for_peer_s: float | None = None
    bubble_s: float | None = None
    bytes_per_parameter: float | None = None
    gradients_in: str | None = None
    peak_memory_bytes: float | None = None
    bytes_sent_per_gpu: float | None = None
    fits: bool | None = None
    verdict: str | None = None
    runs_out: float | None = None
    reason: str = ""
    steps: int | None = None
    steps_asked: int | None = None


def compare(
    path: str, changes: Changes | None = None, progress: Callable[[int, int], None] | None = None
) -> list[ComparisonRow]:
    """A row per strategy, the scenario's own as it is written; of a split model a row per way to split it.

    ``path``, ``changes`` : as for :func:`clustersim.scenario.load`. ``progress`` : called with (rows done, rows in
    all). Raises :class:`ScenarioError` for a scenario that cannot be read.
    """
    own = load(path, changes)
    all_forms = forms(own)
    rows = []
    for done, form in enumerate(all_forms):
        rows.append(_row(own, form))
        if progress:
            progress(done + 1, len(all_forms))
    return rows


def forms(own: Scenario, *, on_the_host: bool = False) -> list[ComparisonCase]:
    """What every row changes, the scenario's own first among its kind; with forms ``on_the_host`` or without."""
    written = own.file.strategy
    parallel = own.file.parallel
    if parallel is not None and parallel.splits:
        kind = written["kind"]
        return [ComparisonCase(kind, OWN, {}), *split_forms(held(own), parallel)]
    common = {name: written[name] for name in COMMON if name in written}
    states = own.config.state_dtype
    all_forms: list[ComparisonCase] = []
    for kind in STRATEGIES:
        if kind == written["kind"]:
            all_forms.append(ComparisonCase(kind, OWN, {}))
        variants = dict(VARIANTS.get(kind, {"": {}})) | dict(ON_THE_HOST.get(kind, {}) if on_the_host else {})
        for variant, knobs in variants.items():
            table: Table = {**common, "kind": kind, **knobs} | _precision(kind, common, states)
            table |= _reduction(kind, table, own.config.wire_dtype)
            if table.get("servers") == 0:
                table["servers"] = _gpus(own)
            alone = {"cluster.nodes": 1, "cluster.gpus_per_node": 1} if STRATEGIES[kind].world_size == 1 else {}
            if table != written:
                all_forms.append(ComparisonCase(kind, variant, {"strategy": table, **alone}))
    return all_forms


def _precision(kind: str, common: Table, states: str) -> Table:
    """Knobs with which a strategy keeps its states in the dtype of the scenario's own, where it can.

    DDP and servers have no masters beside 16-bit parameters: where the scenario's own has, they keep fp32 parameters
    under autocast, as PyTorch trains with them. FSDP may keep shards in 16 bits.
    """
    dtype = str(common.get("param_dtype", "fp32"))
    if dtype not in SHORT:
        return {}
    if states == "fp32":
        config = msgspec.convert({**common, "kind": kind}, STRATEGIES[kind].config)
        return {} if config.state_dtype == "fp32" else {"param_dtype": "fp32"}
    return {"orig_dtype": dtype} if kind == "fsdp" else {}


def _reduction(kind: str, table: Table, wire: str) -> Table:
    """The knob with which a strategy reduces gradients in the dtype ``wire`` of the scenario's own, where it has one:
    another dtype is twice or half the traffic, which would be taken for the strategy's."""
    config_type = STRATEGIES[kind].config
    if "reduce_dtype" not in config_type.__struct_fields__ or msgspec.convert(table, config_type).wire_dtype == wire:
        return {}
    return {"reduce_dtype": wire}


def bytes_a_parameter(parts: ScenarioParts) -> float:
    """Of parameters, gradients and optimizer together, where nothing is shared out and nothing split [bytes]."""
    return parts.whole().model_states / parts.model.parameters


def split_forms(parts: ScenarioParts, parallel: ParallelConfig) -> Iterator[ComparisonCase]:
    """Every other way to split a model: schedules first, then degrees."""
    given = _said(parts, parallel)
    strategy = parts.scenario.file.strategy
    count = "gradient_accumulation_steps"
    batch = {f"strategy.{count}": 1} if count in strategy else {}  # the global batch size says it
    for name, table in chain(_schedules(parts.split, given, parallel), _degrees(parts, given, parallel)):
        yield ComparisonCase(strategy["kind"], name, {"parallel": table, **batch})


def _said(parts: ScenarioParts, parallel: ParallelConfig) -> Table:
    """The fields of ``[parallel]`` that are no defaults, with the batch instead of the micro-batches."""
    usual = preset(parallel.framework, {})
    plain = {name: usual.get(name, getattr(ParallelConfig(), name)) for name in parallel.__struct_fields__}
    table = {name: getattr(parallel, name) for name in plain if getattr(parallel, name) != plain[name]}
    table.pop("microbatches", None)
    # Degrees of data parallelism follow from the others.
    for name in ("dp_shard", "dp_replicate"):
        table.pop(name, None)
    config = parts.scenario.config
    samples = config.rank_samples * parts.mesh.size("dp")
    return table | {"framework": parallel.framework, "global_batch_size": samples}


def _without(given: Table, names: tuple[str, ...]) -> Table:
    return {name: value for name, value in given.items() if name not in names}


def _schedules(split: Split | None, given: Table, parallel: ParallelConfig) -> Iterator[tuple[str, Table]]:
    """The same stages in other orders; with two chunks a rank where the schedule needs them."""
    if split is None or parallel.pp == 1:
        return
    for name, chunks in SCHEDULES:
        if name == split.schedule.name and chunks in {None, len(split.partition.stages[0].chunks)}:
            continue
        table = _without(given, OF_A_SCHEDULE if chunks is None else OF_STAGES)
        if chunks is None and parallel.stages and len(parallel.stages) != parallel.pp:
            table = _without(table, OF_STAGES)
        yield f"schedule {name}", table | {"schedule": name} | ({"vpp": chunks} if chunks else {})


def _degrees(parts: ScenarioParts, given: Table, parallel: ParallelConfig) -> Iterator[tuple[str, Table]]:
    """Data parallelism alone, tensor parallelism over a node, and the neighbours of the scenario's own degrees."""
    t = parallel.tp
    p = parallel.pp
    world = parts.mesh.workers
    node = parts.mesh.nproc_per_node
    near = [(1.0, 1.0), (node, 1.0), (t / 2, p), (2 * t, p), (t, p / 2), (t, 2 * p), (2 * t, p / 2), (t / 2, 2 * p)]
    for tp, pp in dict.fromkeys(near):
        inside = tp * pp * parallel.cp
        if tp < 1 or pp < 1 or tp != int(tp) or pp != int(pp) or tp > node or world % inside or (tp, pp) == (t, p):
            continue
        table = given if pp == p else _without(given, OF_STAGES)
        table = table if tp > 1 else _without(table, OF_TENSORS)
        name = f"tp {int(tp)} x pp {int(pp)} x dp {world // int(inside)}"
        yield name, table | {"tp": int(tp), "pp": int(pp)}


def scenario_of(own: Scenario, form: ComparisonCase, **more: object) -> Scenario:
    """The scenario of a row. Raises :class:`ScenarioError` where it cannot be one."""
    changes = dict(own.changes)
    if "parallel" in form.changes:
        changes = {name: value for name, value in changes.items() if not name.startswith("parallel.")}
    return load(own.path, changes | dict(form.changes) | {name.replace("__", "."): v for name, v in more.items()})


def _gpus(own: Scenario) -> int:
    """GPUs of the scenario's machine, as many as can be told."""
    try:
        return machine(own)[1].world_size
    except ClusterSimError:
        return 1


def _row(own: Scenario, form: ComparisonCase) -> ComparisonRow:
    try:
        other_scenario = scenario_of(own, form, run__steps=min(own.file.run.steps, STEPS))
        result = other_scenario.run()
        state_bytes = bytes_a_parameter(result.prepared)
    except ClusterSimError as error:
        return ComparisonRow(form.kind, form.variant, form.own, reason=told(str(error)))
    figures = {name: result.summary[name] for name in ComparisonRow.__struct_fields__ if name in result.summary}
    figures |= {"steps": other_scenario.steps, "steps_asked": own.steps}
    parallel = other_scenario.file.parallel
    if parallel is None or not (parallel.splits or parallel.use_distributed_optimizer):
        figures["gradients_in"] = other_scenario.config.wire_dtype
    figures |= {"peak_memory_bytes": result.memory.total, "fits": result.fits, "bytes_per_parameter": state_bytes}
    figures |= {"verdict": result.verdict.state, "runs_out": result.verdict.runs_out}
    return ComparisonRow(
        form.kind, form.variant, form.own, **figures, reason="" if result.fits else str(result.verdict)
    )


def told(text: str) -> str:
    """An error without the changes it names: nobody wrote them."""
    return re.sub(r"^(?:--set|changes) (?:strategy|parallel|cluster)[\w.]*: ", "", text)
