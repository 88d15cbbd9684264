"""What a run came to: its figures, pictures, page and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from clustersim.core import figures, views
from clustersim.core.arrays import Columns
from clustersim.core.cards import card
from clustersim.core.errors import ClusterSimError, needs
from clustersim.core.facts import MemoryMoments, RunFacts
from clustersim.core.memory_states import DOES_NOT_FIT
from clustersim.core.memory_use import MemoryUse, Verdict
from clustersim.core.paths import plain
from clustersim.core.saved_run import SavedRun
from clustersim.core.texts import Plain
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_time
from clustersim.explain.knobs import FACTOR
from clustersim.explain.metrics import summary
from clustersim.explain.volume import by_dimension, volume
from clustersim.scenario import Scenario
from clustersim.scenario.result.notes import outcome_notes
from clustersim.scenario.result.trust import trust
from clustersim.scenario.run.head import head_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from clustersim.core.facts import RunFacts
    from clustersim.explain.explain import Explanation
    from clustersim.explain.where import StageSeconds
    from clustersim.scenario.run.running import Prepared
    from clustersim.training.strategies.base import StrategyFigures


BLAMED = 600_000
"""Spans of a run up to which finding what it loses most by takes a second or less."""


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What a run came to: its Timeline, and figures drawn from it.

    Pictures, pages and files are of higher rooms: :mod:`clustersim.core.views` says who makes them.
    """

    prepared: Prepared
    timeline: Timeline

    @property
    def scenario(self) -> Scenario:
        """What was run."""
        return self.prepared.scenario

    @property
    def memory(self) -> MemoryUse:
        """Bytes on each GPU, by what holds them."""
        return self.prepared.memory

    @property
    def verdict(self) -> Verdict:
        """Whether the model fits in a GPU's memory, and what is offloaded in a host's, and by how much."""
        return self.prepared.verdict

    @property
    def fits(self) -> bool:
        """Whether the model fits in memory, with what allocator and libraries mostly take besides."""
        return self.verdict.ok

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What was assumed, and what the figures do not say by themselves."""
        return (*self.prepared.notes, *outcome_notes(self))

    @cached_property
    def summary(self) -> Plain:
        """The figures of :func:`clustersim.explain.metrics.summary`."""
        from clustersim.explain.where import told_apart

        p = self.prepared
        file = self.scenario.file
        config = self.scenario.config
        runs_as = p.device.runs_as(file.model.dtype)
        figures_of_run = summary(
            self.timeline,
            p.model,
            samples_per_step=config.rank_samples * p.mesh.size("dp"),
            workers=p.mesh.workers,
            together=self.scenario.strategy.together(config),
            peak=(p.peak_flops, f"dense {runs_as} of {p.devices}"),
        )
        return told_apart(figures_of_run, self.where[0]) if self.where else figures_of_run

    @property
    def figures(self) -> dict[str, float]:
        """Every figure of :data:`clustersim.core.figures.FIGURES` that the run has, by key."""
        return figures.known({**self._values, **figures.computed(self._values)})

    @property
    def _values(self) -> Plain:
        """What figures are computed from."""
        return {**self.summary, "peak_memory_bytes": self.memory.total}

    @cached_property
    def where(self) -> list[StageSeconds]:
        """Where a step of a split model went: :func:`clustersim.explain.where.where`; empty where every rank has a
        whole model."""
        from clustersim.explain.where import where

        return where(self.timeline) if self.prepared.split is not None else []

    @cached_property
    def volume_by_dimension(self) -> Columns:
        """Bytes a step moves over each dimension: :func:`clustersim.explain.volume.by_dimension`."""
        return by_dimension(self.timeline, self.summary["steady_steps"], self.prepared.mesh.workers)

    @cached_property
    def volume(self) -> Columns:
        """Bytes a step moves, by op and by kind of link: :func:`clustersim.explain.volume.volume`."""
        return volume(self.timeline, self.summary["steady_steps"])

    @cached_property
    def of_strategy(self) -> StrategyFigures | None:
        """Figures that only this strategy has, such as the staleness of an asynchronous run; often none."""
        p = self.prepared
        row = self.scenario.strategy
        if row.report is None:
            return None
        return row.report(p.program, self.timeline, p.topology, p.mesh, self.scenario.config)

    def __repr__(self) -> str:
        step = format_time(self.summary["step_time_s"])
        return f"<Result of {self.scenario.title}: {step} a step on {self.prepared.gpus:,} GPUs>"

    def _repr_html_(self) -> str:
        """What a notebook shows: what was run, and its figures."""
        rows = [*head_lines(self.prepared), *figures.in_words(self.figures, "run")]
        return card(self.scenario.title, rows)

    @cached_property
    def in_words(self) -> str:
        """:func:`clustersim.explain.verdict.verdict`; of a long run what it came to alone."""
        from clustersim.explain.stalls import causes
        from clustersim.explain.verdict import came_to, verdict

        facts = RunFacts.of(self.to_dict())
        timeline = self.timeline
        if int(timeline.per_op()["ranks"].sum()) <= BLAMED:
            return verdict(facts, causes(timeline))
        result_text = came_to(facts, self.summary["step_time_s"])
        return f"{result_text}{self._host_bound()}; `clustersim explain` says what it loses most by."

    def _host_bound(self) -> str:
        """That GPUs wait for the host more than for anything else; empty where they do not, or hardly do."""
        from clustersim.explain.verdict import SMALL

        step = self.summary["step_time_s"]
        idle = self.summary["idle_s"]
        others = ("exposed_transfer_s", "waiting_for_peer_s", "bubble_s")
        if idle < SMALL * step or idle <= max(self.summary.get(name, 0.0) for name in others):
            return ""
        return f"; it is host-bound: {idle / step:.1%} of the step GPUs wait for the host, the largest loss"

    def explain(self) -> Explanation:
        """Why it took as long: :func:`clustersim.explain.explain.explain`."""
        from clustersim.explain.explain import explain

        return explain(self.timeline, self.facts())

    def plot(self, kind: str = "gantt", view: Any = None) -> Figure:
        """A picture: :func:`clustersim.app.plots.picture`, whose kinds are :data:`clustersim.app.plots.PICTURES`."""
        figure: Figure = views.view("picture")(kind, self.saved, view)
        return figure

    def draw(self, kind: str, path: str | Path) -> None:
        """Write a picture, a ``.png``, ``.svg`` or ``.pdf``: :func:`clustersim.app.plots.picture_file`."""
        views.view("picture_file")(kind, self.saved, Path(path))

    def report(self, path: str | Path) -> None:
        """Write one HTML page that says what it came to and why: :func:`clustersim.app.report.write_report`."""
        views.view("report")(self.saved, Path(path), prepared=self.prepared)

    def to_pandas(self, ranks: Sequence[int] | None = None) -> Any:
        """Spans with their labels (name, phase, stream, stage, micro-batch ...) as a ``pandas.DataFrame``; all ranks'
        where ``ranks`` is None. Raises :class:`ClusterSimError` without pandas."""
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise ClusterSimError(needs("to_pandas", "notebooks")) from None
        return pandas.DataFrame(self.timeline.spans(ranks, labels=True))

    @cached_property
    def saved(self) -> SavedRun:
        """The run as a file of it has it: what pictures, pages and traces are made from."""
        return SavedRun(self.timeline, self.prepared.topology, self.facts())

    def to_dict(self) -> Plain:
        """Everything but the Timeline, in plain values: what ``clustersim run --json`` prints."""
        p = self.prepared
        return {
            "scenario": self.scenario.name,
            "changes": dict(self.scenario.changes),
            "topology": p.topology.name,
            "nodes": p.mesh.n_nodes,
            "gpus": p.gpus,
            "device": p.devices,
            "model": p.model.name,
            "parameters": p.model.parameters,
            "trained_parameters": p.model.trained,
            "strategy": self.scenario.strategy.name,
            **self.summary,
            **figures.computed(self._values),
            "trust": msgspec.to_builtins(trust(p)),
            "hottest_links": [
                {"link": name, "utilisation": used, "of": p.topology.rate_words_named(name), "bytes": nbytes}
                for name, used, nbytes in self.summary["hottest_links"]
            ],
            "peak_memory_bytes": self.memory.total,
            "peak_memory_reserved_bytes": self.verdict.reserved[1],
            "fits": self.fits,
            "memory": self._memory(),
            "volume": {name: column.tolist() for name, column in self.volume.items()},
            "volume_by_dimension": {name: column.tolist() for name, column in self.volume_by_dimension.items()},
            "where": [row.to_dict() for row in self.where],
            "of_strategy": msgspec.to_builtins(self.of_strategy or {}),
            "notes": list(self.notes),
        }

    def _memory(self) -> Plain:
        """What :meth:`to_dict` says of the fullest rank's memory."""
        return {
            "device_bytes": self.prepared.card.memory_bytes,
            "missing_bytes": max(0.0, -self.verdict.spare),
            "needed_bytes": self.memory.needed,
            "needed_range_bytes": list(self.memory.needed_range),
            "shown_bytes": self.verdict.shown[1],
            "shown_range_bytes": list(self.verdict.shown[::2]),
            "verdict": self.verdict.state,
            "by": self.memory.at_peak(),
            "peak": self.memory.peak,
            "where": self.memory.where,
            "message": str(self.verdict),
            "host": self.prepared.host.to_dict(),
            "doubled": self._doubled(),
        }

    def _doubled(self) -> Plain:
        """What :class:`clustersim.core.facts.DoubledBatch` says of twice the samples a micro-batch."""
        parts = self.prepared
        doubled = parts.verdict_of(parts.resized(int(FACTOR * self.scenario.config.micro_batch_size)))
        host_alone = doubled.state == DOES_NOT_FIT and doubled.of_device != DOES_NOT_FIT
        return {
            "needed_bytes": doubled.use.total,
            "state": doubled.state,
            "runs_out": doubled.runs_out,
            "host": doubled.host.in_words if host_alone else "",
        }

    def facts(self) -> RunFacts:
        """What a saved run carries beside its Timeline: figures, every input, memory over a step, and of a split model
        memory of every stage, and the mesh."""
        from clustersim.scenario.run.mesh_table import drawable

        p = self.prepared
        course = self.memory.course
        split = p.split is not None
        stages = [
            MemoryMoments(list(use.course.moments), plain({"context": use.context, **use.course.parts}))
            for use in (p.split.memory if p.split is not None else ())
        ]
        return msgspec.structs.replace(
            RunFacts.of(self.to_dict()),
            title=self.scenario.title,
            inputs=self.scenario.inputs(),
            memory_course=MemoryMoments(list(course.moments), plain(course.parts)),
            stage_memory=stages,
            mesh=drawable(p.topology, p.mesh) if split else None,
        )

    def save(self, path: str | Path) -> None:
        """Write the whole run to one file, for :func:`clustersim.files.traces.saved.load_run`."""
        views.view("run_file")(self.timeline, path, self.prepared.topology, self.saved.facts)
