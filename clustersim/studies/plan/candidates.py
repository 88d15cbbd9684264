"""Every option a plan may take, as a scenario: machine, nodes, strategy, micro-batch, accumulation, checkpointing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from clustersim import scenario
from clustersim.core.errors import ScenarioError
from clustersim.core.limits import MOST_CASES, counted
from clustersim.core.tomls import flat
from clustersim.scenario import Scenario
from clustersim.scenario.file.reading import Table
from clustersim.scenario.file.splitting import cause
from clustersim.studies.plan.knobs import DEGREES, OWN_PARALLEL, meant, own_parallel
from clustersim.studies.plan.spec import Machine, PlanFile
from clustersim.training.strategies import STRATEGIES

RUN: Table = {"steps": 3, "jitter": 0.0, "optimizer": "adamw", "optimizer_impl": "fused"}
"""What a plan's runs are unless it says otherwise: enough steps for a steady one, and GPUs that do not differ, since
options differ by less than a draw."""


class StrategyForm(msgspec.Struct, frozen=True, gc=False):
    """Everything of an option but where it runs, its micro-batch, passes and checkpointing.

    Parameters
    ----------
    strategy, parallel, recipe : tables of its scenario; ``recipe`` is of ``[model]``. family : its strategy and
        degrees in words, with the knobs that vary among strategies of its kind, and what varies of the recipe.
    knobs : those of ``parallel`` that vary, in words. tells : whether micro-batches, and checkpointing, vary.
    split : whether the step builder plays it. degrees : of :data:`DEGREES`, 1 where nothing is said.
    """

    strategy: Table
    parallel: Table
    family: str
    knobs: tuple[str, ...]
    tells: tuple[bool, bool]
    number: int
    split: bool
    degrees: dict[str, int]
    recipe: Table = {}

    @property
    def sort(self) -> str:
        """Its strategy and what it computes in: of each sort the best is worth knowing."""
        return " ".join([str(self.strategy["kind"]), str(self.recipe.get("dtype", ""))]).strip()

    @property
    def inside(self) -> int:
        """Ranks that work on the same samples."""
        return math.prod(self.degrees[name] for name in ("tp", "cp", "pp"))

    @property
    def of_experts(self) -> int:
        """Ranks that share out the experts of a stage's layers, and all stages: as many as divide the machine."""
        cut = self.parallel.get("etp") or self.degrees["tp"]
        return int(cut) * self.degrees["ep"] * self.degrees["pp"]

    @property
    def rounds(self) -> int:
        """What passes are a multiple of: an interleaved schedule takes as many micro-batches as there are stages."""
        return self.degrees["pp"] if (self.parallel.get("vpp") or 1) > 1 else 1


class PlanCandidate(msgspec.Struct, frozen=True, gc=False):
    """One option.

    Parameters
    ----------
    number : its place among all, which settles ties. machine, nodes, gpus : where it runs. form : what it is.
    played : samples of a micro-batch, and passes of a step. kept : its ``activation_checkpointing``.
    """

    number: int
    machine: Machine
    nodes: int
    gpus: int
    form: StrategyForm
    played: tuple[int, int]
    kept: str

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.gpus // self.form.inside * self.played[0] * self.played[1]

    @property
    def changes(self) -> Table:
        """Field -> value, on the plan's base."""
        micro, passes = self.played
        knobs = {**self.form.strategy, "micro_batch_size": micro, "gradient_accumulation_steps": passes}
        changes = {"cluster": self.machine.cluster(self.nodes), "strategy": knobs}
        return (
            changes
            | {"model.activation_checkpointing": self.kept}
            | ({"parallel": self.form.parallel} if self.form.parallel else {})
            | {f"model.{name}": value for name, value in self.form.recipe.items()}
        )

    @property
    def knobs(self) -> tuple[str, ...]:
        """What else is chosen, in words, as far as it varies among options."""
        checkpointing = "no" if self.kept == "none" else self.kept
        return (*self.form.knobs, *([f"{checkpointing} checkpointing"] if self.form.tells[1] else []))

    def label(self, common: Collection[str] = ()) -> str:
        """It in words, without those of its knobs that are ``common``."""
        micro, passes = self.played
        passes_text = f"micro-batch {micro}" if self.form.tells[0] else ""
        if passes > 1:
            passes_text = f"{passes_text} x {passes} passes" if passes_text else f"{passes} passes"
        return ", ".join(
            filter(None, (self.form.family, *(knob for knob in self.knobs if knob not in common), passes_text))
        )


def base(plan: PlanFile) -> Table:
    """The tables that all candidates change: the first machine and strategy stand in."""
    return {
        "cluster": plan.machines[0].cluster(1),
        "model": dict(plan.model),
        "strategy": {"kind": str(plan.tried.strategies[0].get("kind", ""))},
        "run": {**RUN, **plan.run},
    }


def scenario_of(plan: PlanFile, path: str | Path, candidate: PlanCandidate) -> Scenario:
    """The scenario of a candidate. Raises :class:`ScenarioError` where its knobs contradict each other."""
    return scenario.from_table(base(plan), path, candidate.changes)


def candidates(
    plan: PlanFile, gpus_of: Mapping[tuple[int, int], int], tables: Sequence[Table] = ({},)
) -> Iterator[PlanCandidate]:
    """Every combination whose batch is within the plan's bounds and whose GPUs are within its limit.

    Of accumulation, the fewest and the most passes that the batch allows are tried.

    Parameters
    ----------
    gpus_of : (index of a machine, nodes) -> GPUs; those left out could not be built. tables : what is tried as
        ``[parallel]``, :func:`clustersim.studies.plan.knobs.combinations`.
    """
    numbers = itertools.count()
    limit = plan.limits.gpus
    kinds = plan.tried.activation_checkpointing
    counted(combined(plan, gpus_of, tables), MOST_CASES, "$.try: options", ScenarioError)
    forms = list(_forms(plan, tables))
    for (m, nodes), gpus in gpus_of.items():
        if limit is not None and gpus > limit:
            continue
        for form in forms:
            for micro in plan.tried.micro_batch_size:
                for passes in _accumulations(plan, form, gpus, micro):
                    for kind in kinds:
                        yield PlanCandidate(next(numbers), plan.machines[m], nodes, gpus, form, (micro, passes), kind)


def combined(plan: PlanFile, gpus_of: Mapping[tuple[int, int], int], tables: Sequence[Table]) -> int:
    """How many combinations of machines and knobs a plan has, whether or not they are possible."""
    return (
        sum(_count(table) for table in plan.tried.strategies)
        * _count(plan.tried.recipe)
        * len(tables)
        * len(gpus_of)
        * len(plan.tried.micro_batch_size)
        * len(plan.tried.activation_checkpointing)
    )


def _forms(plan: PlanFile, tables: Sequence[Table]) -> Iterator[StrategyForm]:
    strategies = [knob_table for table in plan.tried.strategies for knob_table in expanded(table)]
    names = {name for knob_table in tables for name in knob_table}
    telling = {
        name
        for name in names
        if len({repr(knob_table.get(name)) for knob_table in tables if meant(name, knob_table)}) > 1
    }
    number = itertools.count()
    tells = len(plan.tried.micro_batch_size) > 1, len(plan.tried.activation_checkpointing) > 1
    recipes = list(expanded(plan.tried.recipe))
    for recipe, strategy_table in itertools.product(recipes, strategies):
        own = own_parallel(strategy_table)
        strategy = {name: value for name, value in strategy_table.items() if name != OWN_PARALLEL}
        strategy_text = _words(strategy_table, strategies)
        computed = [
            str(value) for name, value in recipe.items() if any(knob_table[name] != value for knob_table in recipes)
        ]
        for table in ({**shared, **own} for shared in tables):
            degrees = {name: int(table.get(name) or 1) for name in DEGREES}
            knobs = [
                f"{name} {_value(table[name])}"
                for name in table
                if name in telling and name not in DEGREES and (name, table[name]) != ("vpp", 1)
            ]
            split_up = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
            family = ", ".join([strategy_text, *split_up, *computed])
            split = any(degree > 1 for degree in (*degrees.values(), table.get("etp") or 1))
            split = split or bool(cause(table, strategy))
            yield StrategyForm(strategy, table, family, tuple(knobs), tells, next(number), split, degrees, recipe)


def expanded(table: Table) -> Iterator[Table]:
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


def _count(table: Table) -> int:
    """How many tables :func:`expanded` makes."""
    sizes = (_count(v) if isinstance(v, dict) else len(v) if isinstance(v, list) else 1 for v in table.values())
    return math.prod(sizes)


def _accumulations(plan: PlanFile, form: StrategyForm, gpus: int, micro: int) -> list[int]:
    """The fewest and the most passes; none where the degrees or the batch do not divide."""
    if gpus % form.inside or gpus % form.of_experts:
        return []
    pass_samples = gpus // form.inside * micro
    low, high = plan.batch.bounds
    if "gradient_accumulation_steps" in form.strategy:
        passes = int(form.strategy["gradient_accumulation_steps"])
        return [passes] if low <= passes * pass_samples <= high else []
    fewest = -(-low // (pass_samples * form.rounds)) * form.rounds
    most = high // (pass_samples * form.rounds) * form.rounds
    return sorted({fewest, most}) if 0 < fewest <= most else []


def _words(strategy: Table, among: Sequence[Table]) -> str:
    """A strategy in words: its kind, and the knobs that tell it from others of its kind.

    >>> tables = [{"kind": "zero", "param_dtype": "bf16", "zero_optimization": {"stage": stage}} for stage in (1, 3)]
    >>> _words(tables[1], tables)
    'zero, stage 3'

    What is kept away from the GPU is told always, whether or not others of its kind keep it there too:

    >>> table = {"kind": "zero", "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    >>> _words(table, [table])
    'zero, optimizer on the host'
    """
    every = [flat(rival) for rival in among if rival.get("kind") == strategy.get("kind")]
    telling = {
        key for flat_table in every for key in flat_table if any(rival.get(key) != flat_table[key] for rival in every)
    }
    places = _places(strategy)
    texts = [
        f"{key.rpartition('.')[2]} {_value(value)}"
        for key, value in flat(strategy).items()
        if key in telling and key not in places
    ]
    return ", ".join([str(strategy.get("kind", "?")), *texts, *placed_away(strategy)])


def placed_away(strategy: Table) -> list[str]:
    """What a strategy keeps away from the GPU, in words."""
    flat_table = flat(strategy)
    texts = []
    for key, what in _places(strategy).items():
        device = flat_table.get(key)
        if device and device != "none":
            place = "the host" if device in {True, "cpu"} else device
            texts.append(f"{what} on {place}")
    return texts


def _places(strategy: Table) -> Mapping[str, str]:
    """Its knobs that say where something is kept (:attr:`StrategyConfig.PLACES`); none of a kind that is not known."""
    kind = str(strategy.get("kind"))
    return STRATEGIES[kind].config.PLACES if kind in STRATEGIES else {}


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
