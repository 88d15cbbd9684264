"""Every option a plan may take, as a scenario: machine, nodes, strategy, micro-batch, accumulation, checkpointing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clustersim import scenario
from clustersim.errors import ScenarioError
from clustersim.limits import MOST_VALUES, counted
from clustersim.planner.spec import Machine, PlanFile
from clustersim.scenario import Scenario
from clustersim.scenario.reading import Table

RUN: Mapping[str, Any] = {"steps": 3, "jitter": 0.0, "optimizer": "adamw", "optimizer_impl": "fused"}
"""What a plan's runs are unless it says otherwise: enough steps for a steady one, and GPUs that do not differ, since
options differ by less than a draw."""


@dataclass(frozen=True)
class Candidate:
    """One option.

    Parameters
    ----------
    number : its place among all, which settles ties. machine, nodes, gpus : where it runs.
    family : its strategy in words, with the knobs that vary among those of its kind. label : that, and how it is
        played: micro-batch, accumulation, checkpointing, as far as they vary.
    batch : samples of a step. changes : field -> value, on the plan's base.
    """

    number: int
    machine: Machine
    nodes: int
    gpus: int
    family: str
    label: str
    batch: int
    changes: Mapping[str, Any] = field(repr=False)

    @property
    def kind(self) -> str:
        """The ``kind`` of its strategy."""
        return str(self.changes["strategy"]["kind"])


def base(plan: PlanFile) -> Table:
    """The tables that all candidates change: the first machine and strategy stand in."""
    return {
        "cluster": plan.machines[0].cluster(1),
        "model": dict(plan.model),
        "strategy": {"kind": str(plan.tried.strategies[0].get("kind", ""))},
        "run": {**RUN, **plan.run},
    }


def scenario_of(plan: PlanFile, path: str | Path, candidate: Candidate) -> Scenario:
    """The scenario of a candidate. Raises :class:`ScenarioError` where its knobs contradict each other."""
    return scenario.from_table(base(plan), path, candidate.changes)


def candidates(plan: PlanFile, gpus_of: Mapping[tuple[int, int], int]) -> Iterator[Candidate]:
    """Every combination whose batch is within the plan's bounds and whose GPUs are within its limit.

    Of accumulation, the fewest and the most passes that the batch allows are tried.

    Parameters
    ----------
    gpus_of : (index of a machine, nodes) -> GPUs; those left out could not be built.
    """
    numbers, limit = itertools.count(), plan.limits.gpus
    kinds = sum(_count(table) for table in plan.tried.strategies)
    total = len(gpus_of) * kinds * len(plan.tried.micro_batch_size) * len(plan.tried.activation_checkpointing)
    counted(total, MOST_VALUES, "$.try: options of the plan", ScenarioError)
    strategies = [one for table in plan.tried.strategies for one in expanded(table)]
    words = [_words(one, strategies) for one in strategies]
    for (m, nodes), gpus in gpus_of.items():
        if limit is not None and gpus > limit:
            continue
        for strategy, said in zip(strategies, words, strict=True):
            for micro in plan.tried.micro_batch_size:
                for passes in _accumulations(plan, strategy, gpus, micro):
                    for kept in plan.tried.activation_checkpointing:
                        yield _candidate(next(numbers), plan, m, nodes, gpus, strategy, said, micro, passes, kept)


def expanded(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every choice of the lists in a strategy's table, inner tables included.

    >>> list(expanded({"kind": "fsdp", "version": 2, "reshard_after_forward": [True, False]}))[1]
    {'kind': 'fsdp', 'version': 2, 'reshard_after_forward': False}
    """
    choices: list[list[Any]] = []
    for value in table.values():
        if isinstance(value, dict):
            choices.append(list(expanded(value)))
        else:
            choices.append(value if isinstance(value, list) else [value])
    for chosen in itertools.product(*choices):
        yield dict(zip(table, chosen, strict=True))


def _count(table: Mapping[str, Any]) -> int:
    """How many tables :func:`expanded` makes."""
    sizes = (_count(v) if isinstance(v, dict) else len(v) if isinstance(v, list) else 1 for v in table.values())
    return math.prod(sizes)


def _accumulations(plan: PlanFile, strategy: Mapping[str, Any], gpus: int, micro: int) -> list[int]:
    if "gradient_accumulation_steps" in strategy:
        passes = int(strategy["gradient_accumulation_steps"])
        low, high = plan.batch.bounds
        return [passes] if low <= passes * gpus * micro <= high else []
    low, high = plan.batch.bounds
    fewest, most = -(-low // (gpus * micro)), high // (gpus * micro)
    return sorted({fewest, most}) if fewest <= most else []


def _candidate(
    number: int,
    plan: PlanFile,
    m: int,
    nodes: int,
    gpus: int,
    strategy: Mapping[str, Any],
    words: str,
    micro: int,
    passes: int,
    kept: str,
) -> Candidate:
    knobs = {**strategy, "micro_batch_size": micro, "gradient_accumulation_steps": passes}
    changes = {
        "cluster": plan.machines[m].cluster(nodes),
        "strategy": knobs,
        "model.activation_checkpointing": kept,
    }
    said = [words, _played(plan, micro, passes)]
    said += [f"{kept} checkpointing"] if len(plan.tried.activation_checkpointing) > 1 else []
    label = ", ".join(part for part in said if part)
    return Candidate(number, plan.machines[m], nodes, gpus, words, label, gpus * micro * passes, changes)


def _played(plan: PlanFile, micro: int, passes: int) -> str:
    """Micro-batch and passes in words; a micro-batch that all have is left out."""
    said = f"micro-batch {micro}" if len(plan.tried.micro_batch_size) > 1 else ""
    if passes == 1:
        return said
    return f"{said} x {passes} passes" if said else f"{passes} passes"


def _words(strategy: Mapping[str, Any], among: Sequence[Mapping[str, Any]]) -> str:
    """A strategy in words: its kind, and the knobs that tell it from others of its kind.

    >>> tables = [{"kind": "zero", "param_dtype": "bf16", "zero_optimization": {"stage": stage}} for stage in (1, 3)]
    >>> _words(tables[1], tables)
    'zero, stage 3'
    """
    flat = [_flat(other) for other in among if other.get("kind") == strategy.get("kind")]
    told = {key for one in flat for key in one if any(other.get(key) != one[key] for other in flat)}
    said = [f"{key.rpartition('.')[2]} {_value(value)}" for key, value in _flat(strategy).items() if key in told]
    return ", ".join([str(strategy.get("kind", "?")), *said])


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
