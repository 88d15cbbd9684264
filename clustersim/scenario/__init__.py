"""A scenario: one TOML file that says which machine, which model, which strategy, and what to run.

>>> scenario = load("ddp_resnet50_1x8_v100", {"run.steps": 3})
>>> scenario.file.cluster.topology, scenario.config.micro_batch_size
('dgx-1v', 64)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from clustersim.core.cards import card
from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.paths import shipped
from clustersim.core.texts import shown
from clustersim.core.tomls import plainly
from clustersim.core.units import parse_nccl_version, quantity
from clustersim.scenario.file.incident_table import together
from clustersim.scenario.file.reading import (
    Changes,
    Table,
    by_field,
    convert,
    excluded,
    file_of,
    override,
    parse_overrides,
    place,
    read_toml,
    source_of,
)
from clustersim.scenario.file.schema import ScenarioFile

if TYPE_CHECKING:
    from clustersim.core.program import Program
    from clustersim.engine.hang import Hang
    from clustersim.scenario.result import Result
    from clustersim.scenario.run.running import Prepared
    from clustersim.scenario.run.timed import StepFit
    from clustersim.training.strategies import Strategy, StrategyConfig

__all__ = ["Scenario", "find", "from_table", "load", "names", "parse_overrides"]

MANY = ("sweep_", "plan_")
"""What the names of files begin with that are no single scenario."""


@dataclass(frozen=True)
class Scenario:
    """A scenario that has been read and checked as far as its file alone allows.

    Parameters
    ----------
    name : the file's name without suffix. path : the file; relative paths inside it start there.
    file : the tables. config : ``[strategy]``, by the strategy's own Struct.
    changes : what ``--set``, or a Python caller, changed. table : what the file says, without the changes.
    fit : what ``[measured]`` says of kernels and calls, once it has been asked (:mod:`clustersim.scenario.run.timed`).
    """

    name: str
    path: Path
    file: ScenarioFile
    config: StrategyConfig
    changes: Changes = field(default_factory=dict)
    table: Table = field(default_factory=dict, repr=False, compare=False)
    fit: StepFit | None = None

    def __repr__(self) -> str:
        cluster = self.file.cluster
        model = self.file.model
        summary = f"{self.file.strategy['kind']} of {model.name or model.hf_config or model.file} on {cluster.topology}"
        return f"<Scenario {self.title}: {summary}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the file's tables with their changes, a row each."""
        tables = override(self.table, self.changes)
        return card(self.title, ((name, str(value)) for name, value in tables.items()))

    @property
    def title(self) -> str:
        """The name, and what was changed."""
        changes = ", ".join(f"{key}={plainly(value)}" for key, value in self.changes.items())
        return f"{self.name} ({changes})" if changes else self.name

    @property
    def strategy(self) -> Strategy:
        """How it is trained: the row of ``strategy.kind``."""
        from clustersim.training.strategies import STRATEGIES

        return STRATEGIES[self.file.strategy["kind"]]

    @property
    def steps(self) -> int:
        """Steps that are played: ``run.steps``, and of a strategy that does not repeat every step as many more as make
        its figures means over whole periods (:func:`clustersim.explain.metrics.whole_periods`)."""
        period = self.strategy.period_of(self.config)
        if period == 1:
            return self.file.run.steps
        from clustersim.explain.metrics import whole_periods

        return whole_periods(self.file.run.steps, period)

    def inputs(self) -> Table:
        """Every field of the file, defaults included, in plain values."""
        import msgspec

        strategy = msgspec.to_builtins(self.config) | {"kind": self.file.strategy["kind"]}
        if strategy.get("framework", "") is None:
            del strategy["framework"]  # a run that does not say it is the run it was before there was such a field
        if strategy.get("ends_apart") is False:
            del strategy["ends_apart"]
        table: Table = msgspec.to_builtins(self.file, enc_hook=str)
        if self.file.parallel is None:
            del table["parallel"]  # a run without it is the run it was before there was such a table
        del table["campaign"], table["published"]  # no step depends on them
        if self.file.measured is None:
            del table["measured"]
        for name in ("frozen", "adapter", "loss", "packing", "activation_offloading", "channels_last"):
            if not table["model"][name]:
                del table["model"][name]
        if table["model"]["early_stop"] is None:
            del table["model"]["early_stop"]
        if not self.file.run.cuda_graph:
            del table["run"]["cuda_graph"]
        if not self.file.incident:
            del table["incident"]  # and one in which nothing goes wrong
            del table["watchdog"]  # which nobody sees there
        if self.file.run.variation is None:
            del table["run"]["variation"]  # and one that varies as it always did is the run it was
        return table | {"strategy": strategy}

    def at(self, field: str) -> AbstractContextManager[None]:
        """Within this, an error of a lower layer names this file and field, ``"$.cluster.topology"``."""
        return place(str(self.path), field, self.changes)

    def changed(self, changes: Changes) -> Scenario:
        """The same with more fields changed. Raises :class:`ScenarioError` as :func:`load` does."""
        changes = by_field(changes)
        gone = excluded(changes)
        earlier = {key: value for key, value in self.changes.items() if key not in gone}
        latest = {key: key for key in (*earlier, *changes)}  # of equal keys the later says who changed the field
        merged = {latest[key]: value for key, value in {**earlier, **changes}.items()}
        return from_table(self.table, self.path, merged)

    def prepare(self) -> Prepared:
        """Machine, model, costs and Program: everything before the run. Raises a ClusterSimError naming the field."""
        from clustersim.scenario.run.running import prepare

        return prepare(self)

    def program(self) -> Program:
        """What should happen."""
        return self.prepare().program

    def hang(self) -> Hang | None:
        """Who waits for whom, and when a watchdog says so, where an ``[[incident]]`` hangs the run; None where it goes
        on. A hang is an answer, not an error."""
        return self.prepare().hang()

    def run(self, progress: Callable[[int, int], None] | None = None) -> Result:
        """Simulate it; ``progress`` is called with (ops finished, ops in all).

        A model that does not fit in memory is an answer (``Result.fits``), not an error.
        """
        return self.prepare().run(progress)


def load(path: str | Path | Table, changes: Changes | None = None) -> Scenario:
    """A scenario from a file, a shipped one by name, or from its tables.

    Parameters
    ----------
    path : a ``.toml`` file, a name such as ``"ddp_resnet50_1x8_v100"``, or the tables of a file as a dict, in which
        relative paths start at the working folder.
    changes : dotted field -> value, such as ``{"cluster.nodes": 4}``; applied before anything is checked. A table of
        ``cluster``, ``model`` or ``run`` sets its fields beside the file's; another is set whole.

    Raises
    ------
    ScenarioError : naming file, field, value and what would be right.
    """
    if isinstance(path, dict):
        return from_table(copy.deepcopy(path), changes=by_field(changes or {}))
    file = find(path)
    return from_table(read_toml(file), file, by_field(changes or {}))


def from_table(table: Table, path: str | Path = "scenario.toml", changes: Changes | None = None) -> Scenario:
    """A scenario from the tables themselves; ``path`` is what errors name and where relative paths start."""
    from clustersim.scenario.file.splitting import filled, misplaced, own_names
    from clustersim.training.strategies import STRATEGIES

    path = Path(path)
    with place(str(path), "$.parallel", changes or {}):
        translated, changes = own_names(table, changes or {})
    tables = override(translated, changes)
    with place(str(path), "$.parallel", changes):
        tables = filled(tables)
    read = convert(tables, ScenarioFile, str(path), changed=changes, dec_hook=quantity)
    with place(str(path), "$.run.nccl_version", changes):
        parse_nccl_version(read.run.nccl_version)
    with place(str(path), "$.incident", changes):
        together(read.incident)
    kind = read.strategy.get("kind")
    if not isinstance(kind, str) or kind not in STRATEGIES:
        problem = "missing field 'kind'" if kind is None else f"unknown strategy {shown(kind)}"
        source = next((source_of(key) for key in changes if key == "strategy.kind"), path)
        raise ScenarioError(f"{source}: {problem}; {nearest(str(kind), STRATEGIES)} (at $.strategy.kind)")
    with place(str(path), "$.strategy", changes):
        misplaced(read.strategy, STRATEGIES[kind].config)
    config = convert(read.strategy, STRATEGIES[kind].config, str(path), "$.strategy", changes)
    return Scenario(path.stem, path, read, config, changes, table)


def find(path: str | Path) -> Path:
    """The file of a scenario given by path or by shipped name. Raises :class:`ScenarioError`."""
    return file_of(path, "scenario", names())


def names() -> list[str]:
    """Every shipped scenario; files in the same folder that hold many are another command's."""
    return [name for name in shipped("scenarios") if not name.startswith(MANY)]
