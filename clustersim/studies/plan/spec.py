"""A plan's file: what is trained, on which machines it could be, within which limits, and what may be tried.

In TOML::

    title = "Llama-3-70B on up to 512 H100"

    [model]                        # as in a scenario
    name = "llama3-70b"
    seq_len = 4096
    dtype = "bf16"

    [[machines]]                   # as a scenario's [cluster], with numbers of nodes to try
    topology = "hgx-h100"
    nodes = [16, 32, 64]
    usd_per_gpu_hour = 2.5         # instead of the shipped price

    [batch]
    samples = [512, 1024]          # a step's, over all ranks: at least and at most

    [limits]
    gpus = 512
    tokens = 1e12                  # to train on; needed by a deadline and a budget
    deadline = "60 d"
    budget_usd = 3e6

    [try]
    micro_batch_size = [1, 2, 4]
    activation_checkpointing = ["none", "full"]

    [[try.strategies]]             # any knob may be a list of values to try
    kind = "fsdp"
    data_parallel_replicate_degree = [1, 4]
    parallel = {framework = "torchtitan"}   # of [parallel], with this strategy alone

    [try.parallel]                 # as a scenario's [parallel]; see clustersim.studies.plan.knobs for a knob's values
    tp = "search"
    pp = [1, 2, 4, 8]
    vpp = { from = 1, to = 8, times = 2 }

    [try.recipe]                   # of [model], each a value or a list: numbers and kernels that are tried
    dtype = ["bf16", "fp8"]

    [campaign]                     # as in a scenario, for days and cost with failures
    failures = "llama3"
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.texts import fields_of, shown
from clustersim.core.units import Seconds, quantity
from clustersim.scenario.file.campaign_schema import CampaignTable
from clustersim.scenario.file.reading import Table, convert, place, read_toml, shipped_or_file
from clustersim.scenario.file.schema import Positive
from clustersim.studies.campaign.causes import failures_of
from clustersim.studies.plan.knobs import OWN_PARALLEL
from clustersim.training.parallel.names import field_for
from clustersim.training.strategies import STRATEGIES

RECIPE = ("dtype", "implementation", "attention", "float8_recipe")
"""Fields of ``[model]`` that ``[try.recipe]`` may have: how a model is computed, never which."""
EXACT = 2000
"""Options up to which whatever could be on the front is simulated."""


class _StrictPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: a misspelt field is an error."""


class Machine(_StrictPlan, frozen=True):
    """``[[machines]]``: one kind of machine to buy or rent.

    Parameters
    ----------
    topology, device, gpus_per_node, changes, fabric : as a scenario's ``[cluster]``. nodes : numbers to try.
    name : in tables; the topology's when empty. usd_per_gpu_hour : its price. power : shares of the power limit, see
        :class:`clustersim.core.economics.Power`.
    """

    topology: str
    nodes: tuple[Positive, ...]
    name: str = ""
    device: str | None = None
    gpus_per_node: Positive | None = None
    changes: list[Table] = []
    fabric: Table = {}
    usd_per_gpu_hour: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    power: dict[str, float] = {}

    def cluster(self, nodes: int) -> Table:
        """The scenario's ``[cluster]``."""
        table: Table = {"topology": self.topology, "nodes": nodes}
        for key in ("device", "gpus_per_node", "changes", "fabric"):
            if getattr(self, key):
                table[key] = getattr(self, key)
        return table

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.name or self.topology


class Batch(_StrictPlan, frozen=True):
    """``[batch]``: samples of one optimizer step over all ranks, one number or at least and at most.

    Parameters
    ----------
    samples : ``512``, or ``[512, 1024]``.
    """

    samples: int | tuple[int, int]

    def __post_init__(self) -> None:
        low, high = self.bounds
        if not 1 <= low <= high:
            raise ValueError(f"samples = {self.samples} must be one number above 0, or [at least, at most]")

    @property
    def bounds(self) -> tuple[int, int]:
        """At least, and at most."""
        return (self.samples, self.samples) if isinstance(self.samples, int) else self.samples


class Limits(_StrictPlan, frozen=True):
    """``[limits]``: what an option must keep.

    Parameters
    ----------
    gpus : at most. memory_margin : share of a GPU's memory that stays free. tokens : to train on (samples where the
        model has no tokens). deadline : time for that. budget_usd : for that.
    tp_across_nodes : whether a tensor-parallel group may be larger than a node.
    """

    gpus: Positive | None = None
    memory_margin: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    tokens: Annotated[float, Meta(gt=0, le=1e18)] | None = None
    deadline: Seconds | None = None
    budget_usd: Annotated[float, Meta(gt=0)] | None = None
    tp_across_nodes: bool = False

    def __post_init__(self) -> None:
        if self.tokens is None and (self.deadline is not None or self.budget_usd is not None):
            raise ValueError("a deadline or a budget needs tokens: how many to train on")


class Try(_StrictPlan, frozen=True):
    """``[try]``: what is searched. Every knob of a strategy may be a list of values.

    Parameters
    ----------
    strategies : as a scenario's ``[strategy]``, with lists, and its own ``parallel``. micro_batch_size : sizes to try.
    activation_checkpointing : settings to try. parallel : a scenario's ``[parallel]``, each knob a value, a list, a
        range or ``"search"`` (:mod:`clustersim.studies.plan.knobs`); without it the model is whole on every rank.
    recipe : fields of ``[model]`` of :data:`RECIPE`, each a value or a list; ``fp8`` is tried where the GPU has it.
    simulations : of a space of more than :data:`EXACT` options at most so many are simulated, best bound first.
    """

    strategies: Annotated[tuple[Table, ...], Meta(min_length=1)]
    micro_batch_size: Annotated[tuple[Positive, ...], Meta(min_length=1)] = (1, 2, 4, 8)
    activation_checkpointing: Annotated[tuple[str, ...], Meta(min_length=1)] = ("none", "full")
    parallel: Table = {}
    recipe: Table = {}
    simulations: Positive = 400

    def __post_init__(self) -> None:
        for name, value in self.recipe.items():
            if name not in RECIPE:
                raise ValueError(f"recipe.{name} = {value!r}: a recipe has {', '.join(RECIPE)}; others are [model]'s")


class PlanFile(_StrictPlan, frozen=True, rename={"tried": "try"}):
    """A whole file.

    Parameters
    ----------
    model : as in a scenario. title : of tables and pages.
    run : as in a scenario; two steps and no jitter are its defaults here.
    campaign : as in a scenario: what the whole training meets. Its length is ``limits.tokens`` where it says none. With
        it days and cost of what is worth having are told with failures, as percentiles.
    """

    model: Table
    machines: Annotated[tuple[Machine, ...], Meta(min_length=1)]
    batch: Batch
    tried: Try
    title: str = ""
    limits: Limits = Limits()
    run: Table = {}
    campaign: CampaignTable | None = None


def load(path: str | Path | Table) -> tuple[PlanFile, Path]:
    """A plan and its file, by path or by shipped name; of tables the file that errors name, ``plan.toml`` of this
    folder. Raises :class:`ScenarioError`."""
    if isinstance(path, dict):
        return from_table(path), Path("plan.toml")
    plan_path = shipped_or_file(path, "plan")
    return from_table(read_toml(plan_path), plan_path), plan_path


def from_table(table: Table, path: str | Path = "plan.toml") -> PlanFile:
    """A plan from the tables themselves; ``path`` is what errors name."""
    campaign = table.get("campaign")
    limits = table.get("limits")
    if isinstance(campaign, dict) and isinstance(limits, dict) and not {"tokens", "steps", "duration"} & set(campaign):
        table = table | {"campaign": campaign | {"tokens": limits.get("tokens")}}
    read = convert(table, PlanFile, str(path), dec_hook=quantity)
    for place_in_list, strategy in enumerate(read.tried.strategies):
        _check_knobs(strategy, f"$.try.strategies[{place_in_list}]", path)
    if read.campaign is not None:
        with place(str(path), "$.campaign", ()):
            failures_of(read.campaign)
    return read


def _check_knobs(strategy: Table, field: str, path: str | Path) -> None:
    """Raise :class:`ScenarioError` where a table of ``[[try.strategies]]`` has a kind or a knob that there is not: no
    option could be run with it."""
    kinds = strategy.get("kind")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    for kind in kinds:
        if not isinstance(kind, str) or kind not in STRATEGIES:
            problem = "missing field 'kind'" if kind is None else f"unknown strategy {shown(kind)}"
            raise ScenarioError(f"{path}: {problem}; {nearest(str(kind), STRATEGIES)} (at {field}.kind)")
    known = {name for kind in kinds for name in ("kind", *fields_of(STRATEGIES[kind].config))}
    for name, value in strategy.items():
        if name not in {*known, OWN_PARALLEL}:
            home = field_for(name) or ""
            near = (
                f"it belongs in a table of its own: write try.{home}"
                if home.startswith("parallel.")
                else nearest(name, known)
            )
            raise ScenarioError(f"{path}: unknown field {shown(name)} = {shown(value)}; {near} (at {field}.{name})")
