"""All strategies side by side on one scenario's machine and model; of a split model, other ways to split it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from clustersim.errors import ClusterSimError
from clustersim.scenario import Scenario, load
from clustersim.scenario.held import held
from clustersim.scenario.parts import machine
from clustersim.scenario.reading import Changes, Table
from clustersim.scenario.split_forms import split_forms
from clustersim.strategies import STRATEGIES

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

OWN = "as written"
STEPS = 3
"""Steps of a row at most: enough for a steady one."""


@dataclass(frozen=True)
class Form:
    """One row to come: a strategy and how it is played, and the fields to change in the scenario for it."""

    kind: str
    variant: str
    changes: Changes

    @property
    def own(self) -> bool:
        """Whether it is the scenario's."""
        return self.variant == OWN


class Compared(msgspec.Struct, frozen=True):
    """What one strategy, or one way to split a model, comes to on a machine.

    Parameters
    ----------
    strategy, variant : what it is. own : it is the scenario's.
    step_time_s, exposed_communication_s, exposed_transfer_s, waiting_for_peer_s, bubble_s : of a step [s], as in its
        run's summary; no bubble without a pipeline. samples_per_s : of the whole machine.
    peak_memory_bytes, bytes_sent_per_gpu : of a GPU, in a step. fits : in its memory.
    reason : why it cannot be run, which leaves its figures None, or does not fit; empty otherwise.
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
    peak_memory_bytes: float | None = None
    bytes_sent_per_gpu: float | None = None
    fits: bool | None = None
    reason: str = ""


def compare(
    path: str, changes: Changes | None = None, progress: Callable[[int, int], None] | None = None
) -> list[Compared]:
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


def forms(own: Scenario) -> list[Form]:
    """What every row changes, the scenario's own first among its kind."""
    written, parallel = own.file.strategy, own.file.parallel
    if parallel is not None and parallel.splits:
        kind = written["kind"]
        return [Form(kind, OWN, {}), *(Form(kind, one.what, one.changes) for one in split_forms(held(own), parallel))]
    common = {name: written[name] for name in COMMON if name in written}
    found: list[Form] = []
    for kind in STRATEGIES:
        if kind == written["kind"]:
            found.append(Form(kind, OWN, {}))
        for variant, knobs in VARIANTS.get(kind, {"": {}}).items():
            table: Table = {**common, "kind": kind, **knobs}
            if table.get("servers") == 0:
                table["servers"] = _gpus(own)
            if table != written:
                found.append(Form(kind, variant, {"strategy": table} | _alone(kind)))
    return found


def _alone(kind: str) -> Table:
    one_gpu = STRATEGIES[kind].world_size == 1
    return {"cluster.nodes": 1, "cluster.gpus_per_node": 1} if one_gpu else {}


def scenario_of(own: Scenario, form: Form, **more: object) -> Scenario:
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


def _row(own: Scenario, form: Form) -> Compared:
    try:
        result = scenario_of(own, form, run__steps=min(own.file.run.steps, STEPS)).run()
    except ClusterSimError as error:
        return Compared(form.kind, form.variant, form.own, reason=told(str(error)))
    figures = {name: result.summary[name] for name in Compared.__struct_fields__ if name in result.summary}
    figures |= {"peak_memory_bytes": result.memory.total, "fits": result.fits}
    return Compared(form.kind, form.variant, form.own, **figures, reason="" if result.fits else str(result.verdict))


def told(text: str) -> str:
    """An error without the option it names: nobody wrote it."""
    return re.sub(r"^--set (strategy|parallel|cluster)[\w.]*: ", "", text)
