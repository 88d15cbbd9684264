"""What a notebook shows: figures with their words, tables, and runs side by side."""

from __future__ import annotations

import base64
import io
import re

import pytest
from PIL import Image

import clustersim
from clustersim.app import plots
from clustersim.app.plots.drawing import image
from clustersim.core.errors import ProgramError
from clustersim.core.units import format_time
from clustersim.explain.breakdown import breakdown
from clustersim.explain.per_step import per_step
from clustersim.explain.pieces import STATES


@pytest.fixture(scope="module")
def result():
    return clustersim.load("ddp_resnet50_1x8_v100").run()


@pytest.fixture(scope="module")
def served():
    strategy = {"kind": "parameter_server", "server": "cpu", "micro_batch_size": 4}
    return clustersim.load("ddp_resnet50_1x8_v100", {"strategy": strategy}).run()


def test_the_states_of_a_step_add_up_to_it(result, served):
    for run in (result, served):
        seconds = per_step(run.timeline)
        assert tuple(seconds) == STATES
        assert sum(seconds.values()) == pytest.approx(run.summary["step_time_s"])


def test_a_server_is_no_worker_whose_time_counts(served):
    table = breakdown(served.timeline)
    assert len(table.rank) == 9
    stall = table.states.index("waiting for a peer")
    assert per_step(served.timeline)["waiting for a peer"] == pytest.approx(table.seconds[:8, stall].mean())


def test_runs_side_by_side_are_bars_as_long_as_their_steps(result, served):
    figure = plots.breakdowns({"DDP": result.timeline, "server": served.timeline}, "two")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["DDP", "server"]
    for y, run in ((1, result), (0, served)):
        parts = [p.get_width() for p in axes.patches if abs(p.get_y() + p.get_height() / 2 - y) < 0.1]
        # A state under two pixels is left out.
        assert sum(parts) == pytest.approx(1e3 * run.summary["step_time_s"], rel=0.01)
    assert "DDP: compute-bound" in plots.alt_text(figure)
    with pytest.raises(ProgramError, match="no runs"):
        plots.breakdowns({})


def test_a_figure_shows_itself_in_a_notebook_with_its_words(result):
    figure = plots.gantt(result.timeline, [0], title="a <b> & 'c'")
    html = figure._repr_html_()
    alt, pixels = re.fullmatch(r'<img alt="([^"]+)" style="[^"]+" src="data:image/png;base64,([^"]+)">', html).groups()
    assert alt == plots.alt_text(figure)
    drawn = Image.open(io.BytesIO(base64.b64decode(pixels)))
    assert drawn.width == 1440


def test_words_beside_a_picture_are_escaped():
    assert image(b"x", "gif", 'a "quoted" <name> & more').startswith(
        '<img alt="a &quot;quoted&quot; &lt;name&gt; &amp; more" '
    )


def test_a_table_writes_values_as_people_do():
    rows = [
        {"name": "<ddp>", "time": 0.25, "GPUs": 16384, "fits": True, "loss": None},
        {"name": "fsdp", "time": 2.0, "GPUs": 8, "fits": False, "loss": 0.123456},
    ]
    shown = plots.table(rows, {"time": format_time}, "Two runs")
    assert shown.cells() == [["<ddp>", "250 ms", "16,384", "yes", ""], ["fsdp", "2 s", "8", "no", "0.1235"]]
    html = shown._repr_html_()
    assert "<caption>Two runs</caption>" in html
    assert "&lt;ddp&gt;" in html
    assert "<ddp>" not in html
    assert '<td style="text-align:right">16,384</td>' in html
    assert '<td style="text-align:left">yes</td>' in html
    assert repr(shown).splitlines()[:2] == ["Two runs", "name   time    GPUs    fits  loss"]


def test_a_table_says_what_it_lacks():
    with pytest.raises(ProgramError, match="no rows"):
        plots.table([])
    with pytest.raises(ProgramError, match="no column 'tmie' to format; the table has time"):
        plots.table([{"time": 1.0}], {"tmie": format_time})


def test_a_machine_at_rest_has_no_scale(result):
    topology = result.prepared.topology
    at_rest = plots.loaded_topology(topology, 0.0 * topology.link_bandwidth)
    at_work = plots.loaded_topology(topology, plots.link_loads(topology, result.timeline.links))
    assert [len(figure.axes) for figure in (at_rest, at_work)] == [1, 2]
