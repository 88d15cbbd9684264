"""Every picture of one axes can be drawn on an axes that the caller has, and then nothing else is drawn."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

import clustersim
from clustersim.app import plots
from clustersim.app.plots import animation, campaign, dimensions, stages
from clustersim.app.plots.drawing import narrow
from clustersim.app.plots.pipeline import pipeline_frame, usual_step
from clustersim.core.errors import ProgramError
from clustersim.core.facts import DimensionGroups, MeshMap, RunFacts
from clustersim.explain.breakdown import breakdown
from clustersim.explain.waterfall import waterfall
from clustersim.explain.where import where
from clustersim.studies.campaign import LedgerPart
from clustersim.studies.campaign.whatif import KnobPoint
from clustersim.studies.plan.rows import Degrees
from clustersim.studies.sensitivity import BreakEven, Swing

GIB = 2.0**30


@cache
def run():
    return clustersim.load("dp_torch_1x8").run()


@cache
def split():
    return clustersim.load("1f1b_gpt2_xl_1x8_a100", {"run.steps": 3}).run()


@cache
def film():
    return plots.ring_run(4)


@cache
def machine():
    topology = run().saved.topology
    return topology, plots.link_loads(topology, run().timeline.links)


def dots():
    return [plots.FrontDot("A", "8 GPUs", 1.0, 2.0, True, 0.1), plots.FrontDot("B", "16 GPUs", 2.0, 3.0, False)]


def bars():
    """A sweep over something without an order."""
    columns = {"step_time_s": [0.1, 0.2], "gpus": [8, 8], "samples_per_s": [10.0, 5.0], "error": ["", ""]}
    return {"strategy.name": np.array(["ddp", "zero"])} | {name: np.array(column) for name, column in columns.items()}


def points():
    return [KnobPoint(x, y, y, y) for x, y in ((60.0, 0.9), (600.0, 0.95), (6000.0, 0.8))]


LEDGER = {"productive": LedgerPart(9.0, 0.9), "restart": LedgerPart(1.0, 0.1)}
SWINGS = [Swing("GPU compute", 0.9, 1.2, 0.1, 0.2), Swing("NIC", 0.99, 1.02, 0.01, 0.02)]
NETWORK = BreakEven(0.05, 2e10, (1e10, 2e10, 4e10), (0.3, 0.2, 0.19), 1.5e10)
OPTION = SimpleNamespace(option="a", machine="m", days=3.0, usd=5.0, gpus=8)
EXCHANGES = [{"how": how, "n": n, "seconds": 0.1 * n} for how in ("ring", "direct") for n in (2, 4, 8)]
DIMS = [
    DimensionGroups("TP", 2, ["NVLink"], [0, 1], [0, 0, 1, 1]),
    DimensionGroups("DP", 2, ["NVLink"], [0, 2], [0, 1, 0, 1]),
]
MESH = MeshMap(4, 4, DIMS)
MOMENTS = ("fwd a", "fwd b", "bwd b", "bwd a")
HELD = {"parameters": np.full(4, GIB), "activations": np.array([1.0, 2.0, 2.0, 1.0]) * GIB}

ONE = {
    "breakdown": lambda **on: plots.breakdown(breakdown(run().timeline), "a", **on),
    "breakdowns": lambda **on: plots.breakdowns({"x": run().timeline, "y": run().timeline}, "a", **on),
    "degrees": lambda **on: plots.degrees([Degrees(1, 2, 0.1), Degrees(2, 1, 0.2, best=True)], "a", **on),
    "exchange_times": lambda **on: plots.exchange_times(EXCHANGES, nbytes=1e9, bandwidth=1e9, title="a", **on),
    "film_frame": lambda **on: animation.film_frame(film(), 1e-4, "a", **on),
    "footprint": lambda **on: plots.footprint({"parameters": 3 * GIB, "gradients": GIB}, 5 * GIB, "a", **on),
    "footprints": lambda **on: plots.footprints({"a": {"parameters": 1e9}}, 2e9, "a", **on),
    "front": lambda **on: plots.front(dots(), x="tokens/s", y="USD an hour", title="a", **on),
    "gantt": lambda **on: plots.gantt(run().timeline, title="a", **on),
    "gantt_pair": lambda **on: plots.gantt_pair(("one", run().timeline), ("other", run().timeline), "a", **on),
    "goodput_over_gpus": lambda **on: campaign.goodput_over_gpus(points(), 8, "a", **on),
    "ledger": lambda **on: campaign.ledger(LEDGER, "a", **on),
    "lines": lambda **on: plots.lines({"a": ([1, 2], [1, 2])}, laws={"b": ([1, 2], [1, 2])}, title="a", **on),
    "link_heat": lambda **on: plots.link_heat(run().timeline.links, title="a", **on),
    "loaded_topology": lambda **on: plots.loaded_topology(*machine(), "a", **on),
    "loss_over_interval": lambda **on: campaign.loss_over_interval(points(), 300, "a", **on),
    "memory_over_time": lambda **on: plots.memory_over_time(MOMENTS, HELD, 4 * GIB, "a", **on),
    "mesh_on_machine": lambda **on: dimensions.mesh_on_machine(MESH, "a", **on),
    "month": lambda **on: campaign.month([(0.0, 9e4, "training"), (9e4, 1e5, "restart")], "a", **on),
    "network_speed": lambda **on: plots.network_speed(NETWORK, "a", **on),
    "picture": lambda **on: plots.picture("waterfall", run().saved, plots.View(title="a", **on)),
    "pipeline_frame": lambda **on: pipeline_frame(split().timeline, usual_step(split().timeline), 1.0, "a", **on),
    "pipeline_grid": lambda **on: plots.pipeline_grid(split().timeline, title="a", arrows=True, **on),
    "stage_bars": lambda **on: stages.stage_bars(where(split().timeline), "a", **on),
    "sweep_curves": lambda **on: plots.sweep_curves(bars(), ["strategy.name"], "a", **on),
    "tornado": lambda **on: plots.tornado(SWINGS, 0.2, "a", **on),
    "tradeoff": lambda **on: plots.tradeoff(SimpleNamespace(options=[OPTION], front=[OPTION]), title="a", **on),
    "waterfall": lambda **on: plots.waterfall(waterfall(run().timeline, RunFacts(peak_flops=1e13)), "a", **on),
}
"""Pictures of one axes, drawn small."""

SEVERAL = {
    "accuracy": "every row, and beside it the error of each part",
    "distributions": "a row for each distribution",
    "efficiency_losses": "a panel for each kind of scaling",
    "scaling": "throughput, and beside it the efficiency",
    "stage_memory": "a row for each stage",
    "storyboard": "a panel for each step",
    "summarised": "a large machine's network, nodes and busiest node",
    "traffic": "a bar for each kind of link, with an axis of its own",
}
"""Pictures of several axes, and what these are."""
ALSO_SEVERAL = {
    "a zoom": lambda ax: plots.gantt(run().timeline, zoom=(0.0, 1e-3), ax=ax),
    "a sweep over numbers": lambda ax: plots.sweep_curves(bars() | {"gpus": np.array([8, 16])}, ["gpus"], ax=ax),
    "a mesh of 128 ranks": lambda ax: dimensions.mesh_on_machine(MeshMap(128, 4, DIMS), ax=ax),
    "a machine of 64 GPUs": lambda ax: plots.loaded_topology(*large(), ax=ax),
    "stage-memory": lambda ax: plots.picture("stage-memory", split().saved, plots.View(ax=ax)),
    "traffic": lambda ax: plots.picture("traffic", split().saved, plots.View(ax=ax)),
}


def large():
    topology = clustersim.cluster.files.load("hgx-a100", nodes=8)
    return topology, np.zeros(topology.n_links)


def drawing():
    """Every public function of the package that returns a figure."""
    files = [
        importlib.import_module(f"clustersim.app.plots.{one.name}") for one in pkgutil.iter_modules(plots.__path__)
    ]
    return {
        name: function
        for file in files
        for name, function in inspect.getmembers(file, inspect.isfunction)
        if function.__module__ == file.__name__
        and not name.startswith("_")
        and inspect.signature(function).return_annotation == "Figure"
        and name not in {"new_figure", "titled"}
    }


def test_every_picture_is_of_one_axes_or_it_is_said_which_its_axes_are():
    found = drawing()
    takes = {name for name, one in found.items() if "ax" in inspect.signature(one).parameters or name == "picture"}
    assert takes == set(ONE)
    assert set(found) - takes == set(SEVERAL)


@pytest.mark.parametrize("name", ONE)
def test_a_picture_of_one_axes_is_drawn_on_the_axes_it_is_given_and_nowhere_else(name, monkeypatch):
    figure = Figure(figsize=(9, 6), layout="constrained")
    right = figure.subplots(2, 2)[0, 1]
    before = [len(axes.get_children()) for axes in figure.axes]
    open_before = pyplot.get_fignums()
    ONE[name]()  # what it draws is made once, so that no film or run is made below
    monkeypatch.setattr(Figure, "__init__", lambda *_, **__: pytest.fail("a figure of its own"))
    assert ONE[name](ax=right) is figure
    assert right.get_title().strip() == "a"
    assert [len(axes.get_children()) for axes in figure.axes[:4] if axes is not right] == [before[0], *before[2:]]
    assert len(right.get_children()) > before[1]
    assert figure.get_suptitle() == figure.get_supxlabel() == ""
    assert figure.legends == figure.texts == []
    assert pyplot.get_fignums() == open_before
    assert plots.alt_text(figure)


@pytest.mark.parametrize("name", ONE)
def test_a_picture_without_axes_is_a_figure_that_holds_its_axes_and_at_most_a_scale(name):
    first = ONE[name]()
    second = ONE[name]()
    assert first is not second
    assert len(first.axes) == 1 + (name in {"link_heat", "loaded_topology"})
    assert first.get_suptitle() == "a"


@pytest.mark.parametrize("name", ALSO_SEVERAL)
def test_a_picture_that_is_of_several_axes_here_says_so_where_it_is_given_one(name):
    with pytest.raises(ProgramError, match=r"several axes, and cannot be drawn on one \(ax\)"):
        ALSO_SEVERAL[name](Figure().subplots())


def test_hollow_marks_are_explained_where_there_are_some():
    tempting = plots.FrontDot("A", "8 GPUs", 1.5, 2.0, False, 0.1, tempting=True)
    for more, words in (([], "USD an hour"), ([tempting], "USD an hour; hollow: better only if its prediction holds")):
        figure = plots.front([*dots(), *more], x="tokens/s", y="USD an hour")
        assert figure.axes[0].get_title("left") == words


def test_a_family_that_lies_above_the_chart_is_counted_and_not_in_its_legend():
    far = [plots.FrontDot("C", "16 GPUs", 0.5, 90.0, False), plots.FrontDot("C", "8 GPUs", 0.4, 80.0, False)]
    figure = plots.front([*dots(), *far], x="tokens/s", y="USD an hour", title="a")
    legends = figure.legends or [figure.axes[0].get_legend()]
    assert [text.get_text() for text in legends[0].get_texts()] == ["A", "B"]
    assert "2 dearer, not drawn" in [text.get_text() for text in figure.axes[0].texts]


def test_curves_of_a_sweep_and_their_legend_are_whole_on_a_phone():
    """Two charts beside each other cut their titles, and a legend of four columns lost its first names."""
    names = ["gcp-a3-mega, selective", "hgx-h200, selective", "pcie-h100, selective", "hgx-b200, selective"]
    columns = {
        "topology": np.repeat(names, 3),
        "strategy.micro_batch_size": np.tile([1, 2, 4], len(names)),
        "error": np.full(3 * len(names), ""),
        "gpus": np.full(3 * len(names), 8),
        "step_time_s": np.linspace(0.5, 2.0, 3 * len(names)),
        "share_exposed_communication": np.linspace(0.6, 0.1, 3 * len(names)),
    }
    with narrow():
        figure = plots.sweep_curves(columns, ["topology", "strategy.micro_batch_size"])
    figure.canvas.draw()
    first, second = figure.axes
    assert first.get_position().y0 > second.get_position().y1
    width = figure.bbox.width
    for words in [figure.legends[0], first.title, first._left_title, second._left_title]:
        box = words.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= width
