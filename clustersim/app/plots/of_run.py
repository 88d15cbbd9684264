"""Every picture that a saved run can show, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from clustersim.app.plots.dimensions import mesh_on_machine, traffic
from clustersim.app.plots.drawing import Axes, Figure, only_one, save
from clustersim.app.plots.footprint import footprint, memory_over_time
from clustersim.app.plots.heat import link_heat
from clustersim.app.plots.machine import link_loads, loaded_topology
from clustersim.app.plots.pipeline import pipeline_grid
from clustersim.app.plots.shares import breakdown, working_groups
from clustersim.app.plots.stages import stage_bars, stage_memory
from clustersim.app.plots.timeline import gantt
from clustersim.app.plots.waterfall import waterfall
from clustersim.core.errors import ClusterSimError, nearest
from clustersim.core.saved_run import SavedRun
from clustersim.explain.breakdown import breakdown as where_time_went
from clustersim.explain.metrics import steady_window, step_word
from clustersim.explain.pieces import pieces, workers
from clustersim.explain.pipeline import has_pipeline, windows
from clustersim.explain.volume import by_dimension
from clustersim.explain.waterfall import waterfall as falls
from clustersim.explain.where import where


@dataclass(frozen=True)
class View:
    """What to show of a run; None is what the picture finds best.

    Parameters
    ----------
    title : None is the run's own. ranks : of a Gantt chart or a pipeline. window, zoom : (begin, end) [s].
    step : instead of a window. arrows : in a pipeline, from stage to stage. ax : of pictures of one axes.
    """

    title: str | None = None
    ranks: Sequence[int] | None = None
    window: tuple[float, float] | None = None
    zoom: tuple[float, float] | None = None
    step: int | None = None
    arrows: bool = False
    ax: Axes | None = None


def picture(kind: str, run: SavedRun, view: View | None = None) -> Figure:
    """A figure of a saved run. ``kind`` is a key of :data:`PICTURES`.

    Raises :class:`ClusterSimError` for an unknown picture, and for one that needs what the run does not have.
    """
    if kind not in PICTURES:
        raise ClusterSimError(f"no picture {kind!r}; {nearest(kind, PICTURES)}")
    view = view or View()
    title = view.title if view.title is not None else run.facts.title or None
    window = view.window
    if view.step is not None:
        step_windows = windows(run.timeline)
        if view.step not in step_windows:
            raise ClusterSimError(
                f"no step {view.step} in this run; it has {', '.join(map(str, list(step_windows)[:12]))}"
            )
        window = step_windows[view.step]
    return PICTURES[kind](run, replace(view, title=title, window=window))


def picture_file(kind: str, run: SavedRun, path: Path) -> None:
    """Write a picture of a saved run: a ``.png``, ``.svg`` or ``.pdf``; the same run gives the same bytes."""
    save(picture(kind, run), path)


def _breakdown(run: SavedRun, view: View) -> Figure:
    cut = pieces(run.timeline, *view.window) if view.window else None
    table = where_time_went(run.timeline, cut)
    return breakdown(table, view.title, working_groups(run.timeline, table), word=step_word(run.timeline), ax=view.ax)


def _waterfall(run: SavedRun, view: View) -> Figure:
    return waterfall(falls(run.timeline, run.facts), view.title, ax=view.ax)


def _window(run: SavedRun, view: View) -> tuple[float, float]:
    if view.window is not None:
        return view.window
    steady = steady_window(run.timeline)
    return steady.begin, steady.end


def _topology(run: SavedRun, view: View) -> Figure:
    if run.topology is None or run.timeline.links is None:
        raise ClusterSimError("this run does not know its machine, or what crossed its links")
    loads = link_loads(run.topology, run.timeline.links, _window(run, view))
    return loaded_topology(run.topology, loads, view.title, ax=view.ax)


def _links(run: SavedRun, view: View) -> Figure:
    if run.timeline.links is None:
        raise ClusterSimError("this run does not know what crossed its links")
    return link_heat(run.timeline.links, _window(run, view), view.title, ax=view.ax)


def _memory(run: SavedRun, view: View) -> Figure:
    memory = run.facts.memory
    course = run.facts.memory_course
    if not memory.by:
        raise ClusterSimError("this run does not know its memory")
    if course is None:
        return footprint(memory.by, memory.device_bytes, view.title, ax=view.ax)
    parts = course.columns()
    # What is there all the time, the driver's context, is no moment's; without it the peak would be another figure.
    still = {name: np.full(len(course.moments), nbytes) for name, nbytes in memory.by.items() if name not in parts}
    return memory_over_time(course.moments, still | parts, memory.device_bytes, view.title, ax=view.ax)


def _stage_memory(run: SavedRun, view: View) -> Figure:
    only_one(view.ax, "stage-memory")
    courses = run.facts.stage_memory
    if not courses or not has_pipeline(run.timeline):
        raise ClusterSimError("this run has no pipeline whose stages' memory is known")
    return stage_memory(courses, run.timeline, run.facts.memory.device_bytes, view.title)


def _traffic(run: SavedRun, view: View) -> Figure:
    only_one(view.ax, "traffic")
    timeline = run.timeline
    return traffic(by_dimension(timeline, steady_window(timeline).steps.tolist(), len(workers(timeline))), view.title)


def _mesh(run: SavedRun, view: View) -> Figure:
    if run.facts.mesh is None:
        raise ClusterSimError("this run does not know its mesh: it splits no model, or it was not simulated")
    return mesh_on_machine(run.facts.mesh, view.title, ax=view.ax)


PICTURES: dict[str, Callable[[SavedRun, View], Figure]] = {
    "gantt": lambda run, view: gantt(run.timeline, view.ranks, view.window, view.title, view.zoom, ax=view.ax),
    "pipeline": lambda run, view: pipeline_grid(
        run.timeline, view.window, view.title, view.ranks, view.arrows, ax=view.ax
    ),
    "breakdown": _breakdown,
    "waterfall": _waterfall,
    "topology": _topology,
    "links": _links,
    "memory": _memory,
    "stages": lambda run, view: stage_bars(where(run.timeline), view.title, ax=view.ax),
    "stage-memory": _stage_memory,
    "traffic": _traffic,
    "mesh": _mesh,
}
"""Every picture by name."""
