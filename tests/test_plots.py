"""The Gantt chart draws what the timeline holds, without a display."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_hex
from player import play, toy_cost, toy_model

from clustersim.app.plots import drawing, gantt, palette, representatives
from clustersim.app.plots.bars import BarCanvas
from clustersim.app.plots.drawing import new_figure
from clustersim.app.plots.intervals import joined as _joined
from clustersim.app.plots.intervals import minus as _minus
from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.program import PHASES
from clustersim.explain.metrics import steady_window
from clustersim.training.strategies.ddp import DDPConfig, build


def timeline(jitter=0.05, n=16, **config):
    model = toy_model([[2**21]] * 4)
    program = build(model, toy_cost(model, jitter=jitter), Mesh(np.arange(n), min(n, 8)), DDPConfig(**config), 3, 1)
    return play(program, lambda op: 1e-3)


def drawn(figure, colour, row):
    """Time covered by bars of a colour in a row, in seconds (the axis is in ms)."""
    boxes = [
        (corners.min(axis=0), corners.max(axis=0))
        for bars in figure.axes[0].collections
        if isinstance(bars, PolyCollection | PathCollection)
        and to_hex(bars.get_facecolor()[0]).upper() == colour.upper()
        for path in bars.get_paths()
        for corners in path.to_polygons()
    ]
    return sum(high[0] - low[0] for low, high in boxes if abs((low[1] + high[1]) / 2 - row) < 0.1) / 1e3


def test_bars_of_a_row_cover_the_time_its_spans_took():
    run = timeline()
    figure = gantt(run, ranks=[3])
    spans = run.spans([3])
    for phase in ("forward", "backward", "optimizer", "communication"):
        mine = [i for i, op in enumerate(spans["op"]) if run.ops[op].phase == phase]
        took = float((spans["end"] - spans["start"])[mine].sum())
        assert drawn(figure, palette[phase], 1 if phase == "communication" else 0) == pytest.approx(took, rel=1e-6)


def test_hatching_covers_exactly_the_exposed_communication_and_the_wait_for_peers():
    from clustersim.explain.occupancy import occupancy

    run = timeline()
    busy = occupancy(run, np.array([3]))
    figure = gantt(run, ranks=[3])
    assert drawn(figure, "#ffffff", 0) == pytest.approx(busy["exposed_communication_s"][0], rel=1e-6)
    assert drawn(figure, "#ffffff", 1) == pytest.approx(busy["peer_wait_s"][0], rel=1e-6)


def test_a_window_shows_only_what_is_inside():
    run = timeline()
    figure = gantt(run, ranks=[0], window=(0.004, 0.009), title="a part")
    assert figure.axes[0].get_xlim() == pytest.approx((4, 9))
    assert drawn(figure, palette["idle"], 0) == pytest.approx(0.005)
    assert drawn(figure, palette["forward"], 0) + drawn(figure, palette["backward"], 0) <= 0.005 + 1e-9
    with pytest.raises(ProgramError, match="nothing to draw"):
        gantt(run, window=(1e3, 2e3))


def test_the_default_ranks_are_the_ends_the_slowest_and_the_fastest():
    run = timeline()
    steady = steady_window(run)  # as the breakdown beside the chart tells them
    busy = [sum(e - s for o, s, e in _compute_spans(run, rank) if s >= steady.begin - 1e-9) for rank in range(16)]
    chosen = representatives(run)
    assert {rank for rank, remark in chosen.items() if remark == "slowest"} == {int(np.argmax(busy))}
    assert {rank for rank, remark in chosen.items() if remark == "fastest"} == {int(np.argmin(busy))}
    assert {0, 15} <= set(chosen)
    assert list(chosen) == sorted(chosen)
    assert representatives(timeline(jitter=0.0)) == {0: "", 15: ""}
    assert representatives(timeline(n=1)) == {0: ""}


def _compute_spans(run, rank):
    spans = run.spans([rank])
    rows = zip(spans["op"], spans["start"], spans["end"], strict=True)
    return [(o, s, e) for o, s, e in rows if run.ops[o].stream == "compute"]


def test_every_phase_has_a_colour_and_no_two_kinds_of_work_share_one():
    assert set(PHASES) <= set(palette)
    shown = {
        palette[name] for name in ("forward", "backward", "optimizer", "gradient", "communication", "stall", "idle")
    }
    assert len(shown) == 7


def test_a_figure_is_saved_without_a_display_and_plots_import_without_matplotlib(tmp_path):
    code = (
        "import sys, clustersim.app.plots; assert 'matplotlib' not in sys.modules;"
        "assert 'scipy' not in sys.modules and 'networkx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for suffix in ("png", "svg"):
        path = tmp_path / f"gantt.{suffix}"
        gantt(timeline(comm_hook="fp16_compress", find_unused_parameters=True)).savefig(path)
        assert path.stat().st_size > 5000


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=8)


@given(some=INTERVALS, others=INTERVALS)
def test_subtracting_intervals_equals_counting_every_instant(some, others):
    def columns(intervals):
        return np.array([a for a, _ in intervals], float), np.array([a + n for a, n in intervals], float)

    want = np.zeros(60, bool)
    got = np.zeros(60, bool)
    for a, n in some:
        want[a : a + n] = True
    for a, n in others:
        want[a : a + n] = False
    for a, b in zip(*_minus(columns(some), columns(others)), strict=True):
        got[int(a) : int(b)] = True
    assert np.array_equal(want, got)


def test_intervals_that_touch_are_joined():
    starts, ends = _joined(np.array([5.0, 0.0, 2.0]), np.array([6.0, 2.0, 3.0]), 0.1)
    assert (starts.tolist(), ends.tolist()) == ([0, 5], [3, 6])


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_a_picture_is_walked_once_when_it_is_saved_and_is_what_two_walks_make_of_it(kind, tmp_path, monkeypatch):
    run = timeline()
    walked = []
    walk = PolyCollection.draw
    monkeypatch.setattr(PolyCollection, "draw", lambda marks, renderer: (walked.append(marks), walk(marks, renderer)))
    saved = {}
    counts = {}
    for way in ("once", "twice"):
        if way == "twice":
            monkeypatch.setattr(drawing, "_draws", lambda renderer: True)
        walked.clear()
        drawing.save(gantt(run), tmp_path / f"{way}.{kind}")
        saved[way] = (tmp_path / f"{way}.{kind}").read_bytes()
        counts[way] = len(walked)
    assert saved["once"] == saved["twice"]
    assert counts["twice"] == 2 * counts["once"] > 0


def test_stretches_of_narrow_bars_are_one_mark_a_colour_however_many():
    axes = new_figure(2.0).add_subplot()
    begin = np.arange(0.0, 1000.0)
    canvas = BarCanvas(axes, 0.0, 1000.0, 1.0, "s")
    rest = canvas.shares(0.0, {"forward": (begin, begin + 0.5), "backward": (begin + 0.5, begin + 0.75)})
    assert not any(len(starts) for starts, _ in rest.values())
    area = {}
    for marks in axes.collections:
        boxes = [path.get_extents() for path in marks.get_paths()]
        area[to_hex(marks.get_facecolor()[0]).upper()] = sum(box.width * box.height for box in boxes)
        assert len(boxes) == 50
    height = 0.84 * 999.75  # of a bar, from the first to the end of the last
    assert area == {
        palette["forward"].upper(): pytest.approx(height * 500 / 999.75),
        palette["backward"].upper(): pytest.approx(height * 250 / 999.75),
    }
    assert len(axes.collections) == 2
