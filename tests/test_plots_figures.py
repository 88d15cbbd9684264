"""Pictures of shares, links, memory, scaling and a ring in motion draw what their tables hold."""

from __future__ import annotations

import io
from io import BytesIO

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.patches import Rectangle
from PIL import Image
from player import link_use

import clustersim
from clustersim.app import plots
from clustersim.app.plots.animation import _HEIGHT, _WIDTH, _RingDrawing, film, film_frame
from clustersim.app.plots.campaign import ledger
from clustersim.app.plots.dimensions import mesh_on_machine
from clustersim.app.plots.drawing import narrow
from clustersim.app.plots.heat import binned
from clustersim.app.plots.intervals import packed
from clustersim.app.plots.movie import FRAMES_A_STEP
from clustersim.app.plots.of_run import PICTURES
from clustersim.app.plots.pipeline import pipeline_frame, usual_step
from clustersim.app.plots.shares import STATE_STYLE, rank_groups
from clustersim.core.errors import ClusterSimError, ProgramError
from clustersim.core.saved_run import SavedRun
from clustersim.core.units import format_bytes
from clustersim.explain.breakdown import NOT_RECORDED, Breakdown
from clustersim.explain.waterfall import Waterfall
from clustersim.explain.where import where
from clustersim.scenario.run.mesh_table import drawable
from clustersim.scenario.run.parts import placed
from clustersim.studies.campaign.answer import LedgerPart

STATES = (
    "compute-bound",
    "memory-bound",
    "launch-bound",
    "recomputation",
    "optimizer",
    "exposed transfer",
    "waiting for a peer",
    "bubble",
    "host",
)


def table(seconds):
    seconds = np.asarray(seconds, dtype=float)
    nothing = np.zeros(len(seconds))
    shares = seconds / np.maximum(seconds.sum(axis=1, keepdims=True), 1e-30)
    of_states = (np.arange(len(seconds)), seconds, shares)
    return Breakdown(list(STATES), *of_states, nothing, begin=0.0, end=1.0, steps=1)


def widths(figure):
    """Width of the drawn parts of each bar, by its height."""
    found = {}
    for patch in figure.axes[0].patches:
        if isinstance(patch, Rectangle) and patch.get_width() > 0:
            found.setdefault(round(patch.get_y(), 3), []).append(patch.get_width())
    return [sum(parts) for parts in found.values()]


def test_the_parts_of_a_bar_add_up_to_the_step():
    one = [0.05, 0.01, 0.0, 0.0, 0.02, 0.01, 0.005, 0.004, 0.001]
    figure = plots.breakdown(table([one, one]))
    assert widths(figure) == pytest.approx([100.0])
    assert "compute-bound 50.0%" in plots.alt_text(figure)


def test_a_share_is_written_in_a_box_on_each_state_with_a_hatch_and_a_mark_has_the_hatch():
    """Dark figures stood on the dark dots of recomputation, whose mark in a table was that of compute-bound."""
    figure = plots.breakdown(table([[0.04, 0.01, 0.0, 0.02, 0.0, 0.03, 0.0, 0.0, 0.0]]))
    boxed = {text.get_text(): text.get_bbox_patch() is not None for text in figure.axes[0].texts}
    assert boxed == {"40%": False, "10%": False, "20%": True, "30%": False}
    assert len({(look.colour, look.mark) for look in STATE_STYLE.values()}) == len(STATE_STYLE)
    marks = [STATE_STYLE[state].mark for state in ("recomputation", "waiting for a peer", NOT_RECORDED, "host")]
    assert marks == ["dotted", "stall", "outlined", ""]


def test_ranks_that_differ_have_bars_of_their_own_and_those_alike_share_one():
    fast = [0.05, 0, 0, 0, 0, 0.05, 0, 0]
    slow = [0.1, 0, 0, 0, 0, 0, 0, 0]
    groups = rank_groups(np.array([fast] * 3 + [slow]))
    assert {name: list(ranks) for name, ranks in groups.items()} == {
        "all 4 ranks": [0, 1, 2, 3],
        "ranks 0-2": [0, 1, 2],
        "rank 3": [3],
    }
    rng = np.random.default_rng(0)
    many = rank_groups(np.abs(rng.normal(1, 0.2, (64, 8))))
    assert len(many) == 4
    with pytest.raises(ProgramError, match="no ranks"):
        plots.breakdown(table(np.zeros((0, 8))))


def test_every_state_has_a_style():
    from clustersim.explain.breakdown import NOT_RECORDED
    from clustersim.explain.pieces import STATES as KNOWN

    assert {*KNOWN, NOT_RECORDED} == set(STATE_STYLE)


@given(
    cuts=st.lists(st.floats(0.01, 10), min_size=2, max_size=9, unique=True),
    data=st.data(),
    window=st.tuples(st.floats(0, 4), st.floats(5, 12)),
)
def test_binning_a_rate_keeps_the_bytes_inside_the_window(cuts, data, window):
    times = np.array(sorted(cuts))
    rates = np.array(data.draw(st.lists(st.floats(0, 5), min_size=len(times) - 1, max_size=len(times) - 1)))
    mean = binned(times, rates, *window, bins=13)
    inside = np.clip(np.minimum(times[1:], window[1]) - np.maximum(times[:-1], window[0]), 0, None)
    assert mean.sum() * (window[1] - window[0]) / 13 == pytest.approx((rates * inside).sum(), abs=1e-9)


def test_a_heat_map_has_a_row_for_each_busy_link():
    use = link_use([(0, 0.0, 4.0, 5.0), (1, 3.0, 5.0, 4.0)])
    figure = plots.link_heat(use)
    level = figure.axes[0].images[0].get_array()
    assert level.shape[0] == 2
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert set(names) == {"a -> b", "b -> c"}
    assert float(level[names.index("a -> b")].mean()) == pytest.approx(20 / 5 / 10)
    with pytest.raises(ProgramError, match="no link carried anything"):
        plots.link_heat(use, window=(7.0, 7.0))


def test_the_top_of_the_memory_stack_is_its_total():
    parts = {"parameters": np.full(5, 2.0**30), "activations": np.array([1, 2, 2, 1, 0]) * 2.0**30}
    moments = ["fwd a", "fwd b", "bwd b", "bwd a", "optimizer"]
    figure = plots.memory_over_time(moments, parts, capacity=4 * 2.0**30)
    tops = [c.get_paths()[0].get_extents().y1 for c in figure.axes[0].collections if len(c.get_paths())]
    assert max(tops) == pytest.approx(3.0)
    assert "peak at fwd b" in plots.alt_text(figure)
    assert "1 GiB to spare" in plots.alt_text(figure)


def test_a_footprint_is_as_long_as_what_it_holds():
    figure = plots.footprint({"parameters": 3 * 2.0**30, "gradients": 2.0**30, "buckets": 0.0}, 2.0**31)
    assert widths(figure) == pytest.approx([4.0])
    assert "2 GiB too much" in plots.alt_text(figure)
    with pytest.raises(ProgramError, match="nothing holds memory"):
        plots.footprint({"parameters": 0.0})


def test_efficiency_is_throughput_per_gpu_over_the_smallest_run_s():
    figure = plots.scaling({"ddp": ([16, 8, 32], [150, 100, 200])})
    line = figure.axes[1].lines[0]
    assert line.get_xdata().tolist() == [8, 16, 32]
    assert line.get_ydata().tolist() == pytest.approx([1.0, 0.75, 0.5])
    for bad in ({}, {"x": ([1, 2], [1])}, {"x": ([0], [1])}):
        with pytest.raises(ProgramError):
            plots.scaling(bad)


@pytest.fixture(scope="module")
def ring():
    return plots.ring_run(4)


def test_a_ring_starts_with_everybody_s_own_and_ends_with_every_sum(ring):
    s = ring.schedule
    assert s.n_chunks == 4
    before = ring.held(-1.0)
    after = ring.held(float(ring.end.max()))
    assert before.sum() == 4 * 4
    assert all(before[g, :, g].all() for g in range(4))
    assert after.all()
    half = ring.held(float(np.sort(ring.end)[len(ring.end) // 2 - 1]))
    assert (half.all(axis=2).sum(axis=1) >= 1).all()  # reduce-scatter is over: each GPU has a complete piece


def test_a_ring_s_transfers_take_the_time_of_their_bytes_and_wait_for_what_they_forward(ring):
    s = ring.schedule
    assert (ring.end > ring.start).all()
    for t in range(len(s.src)):
        for before in s.after[s.after_ptr[t] : s.after_ptr[t + 1]]:
            assert ring.end[before] <= ring.start[t] + 1e-12


def test_the_film_has_every_frame(ring, tmp_path):
    path = plots.ring_movie(ring).save(tmp_path / "ring.gif")
    shown = Image.open(path)
    assert shown.n_frames == 6 * FRAMES_A_STEP + 1
    assert path.stat().st_size < 600_000
    assert "0% of pieces" in plots.alt_text(film_frame(ring, 0.0))


def test_only_a_chunk_run_of_that_schedule_makes_a_film(ring):
    result = clustersim.load("ddp_resnet50_1x8_v100", {"run.steps": 1}).run()
    with pytest.raises(ProgramError, match="chunk-fidelity"):
        film(ring.schedule, result.timeline)


INTERVALS = st.lists(st.tuples(st.sampled_from("abc"), st.floats(1e-5, 0.02), st.floats(0, 0.01)), max_size=60)


@given(pieces=INTERVALS)
def test_packing_narrow_bars_keeps_the_time_of_each_kind(pieces):
    row = {kind: ([], []) for kind in "abc"}
    at = 0.0
    for kind, length, gap in pieces:
        row[kind][0].append(at)
        row[kind][1].append(at + length)
        at += length + gap
    row = {kind: (np.array(a, float), np.array(b, float)) for kind, (a, b) in row.items()}
    rest, stretches = packed(row, 0.0, 1.0)
    for kind, (a, b) in row.items():
        want = float(np.clip(np.minimum(b, 1.0) - a, 0, None).sum())
        got = float((rest[kind][1] - rest[kind][0]).sum()) if len(rest[kind][0]) else 0.0
        got += sum((high - low) * parts.get(kind, 0.0) for low, high, parts in stretches)
        assert got == pytest.approx(want, abs=1e-9)
    assert all(sum(parts.values()) <= 1 + 1e-9 for _, _, parts in stretches)


@pytest.fixture(scope="module")
def run():
    result = clustersim.load("ddp_resnet50_1x8_v100").run()
    facts = msgspec.structs.replace(result.facts(), title=r"a $\bad{ title")
    return SavedRun(result.timeline, result.prepared.topology, facts)


@pytest.fixture(scope="module")
def split_run():
    result = clustersim.load("1f1b_gpt2_xl_1x8_a100", {"parallel.microbatches": 8}).run()
    return SavedRun(result.timeline, result.prepared.topology, result.facts())


SPLIT = ("pipeline", "stages", "stage-memory", "mesh")
"""Pictures that only a split model has."""


@pytest.mark.parametrize("kind", PICTURES)
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_every_picture_of_a_run_is_saved_with_words_for_it(run, split_run, kind, suffix, tmp_path):
    figure = plots.picture(kind, split_run if kind in SPLIT else run)
    words = plots.alt_text(figure)
    assert len(words) > 40
    path = tmp_path / f"p.{suffix}"
    plots.save(figure, path, dpi=90)
    if suffix == "png":
        shown = Image.open(path)
        assert shown.info["Description"] == words
        assert shown.width == 900
        assert path.stat().st_size < 150_000
    else:
        assert "<svg" in path.read_text()


def test_a_picture_that_a_run_cannot_show_is_one_clear_error(run):
    with pytest.raises(ClusterSimError, match="did you mean 'gantt'"):
        plots.picture("gant", run)
    bare = SavedRun(run.timeline)
    for kind in ("topology", "memory"):
        with pytest.raises(ClusterSimError, match="does not know"):
            plots.picture(kind, bare)


def test_a_zoom_is_a_second_panel_of_the_same_rows(run):
    begin, end = plots.last_step(run.timeline)
    figure = plots.gantt(run.timeline, ranks=[0], zoom=(begin, end))
    first, second = figure.axes
    assert second.get_xlim() == pytest.approx((begin * 1e3, end * 1e3))
    assert [t.get_text() for t in first.get_yticklabels()] == [t.get_text() for t in second.get_yticklabels()]


@pytest.mark.parametrize("n", [2, 3, 8, 16])
def test_every_gpu_of_a_ring_is_inside_the_picture_and_clear_of_its_neighbours(n):
    ring = _RingDrawing.of(n, n)
    half = np.array([1.2 * ring.wide, ring.height / 2])
    low = ring.spots - half
    high = ring.spots + half
    assert (np.abs([low, high]) + 0.06 < [_WIDTH, _HEIGHT]).all()
    for a in range(n):
        b = (a + 1) % n
        apart = (low[b] > high[a] + 0.12) | (low[a] > high[b] + 0.12)
        assert apart.any(), (a, b)


def test_a_ring_says_which_half_it_is_in_between_its_steps_too(ring):
    ends = np.unique(ring.end)[:-1]
    said = [film_frame(ring, float(t)).axes[0].texts[-2].get_text().split("\n")[0] for t in ends]
    assert said[:2] == ["reduce-scatter"] * 2  # the third step's end is the beginning of the other half
    assert said[3:] == ["all-gather"] * 2


def test_bars_of_stages_add_up_to_the_step_and_say_so_in_words(split_run):
    figure = plots.picture("stages", split_run)
    rows = where(split_run.timeline)
    for total in widths(figure):
        assert total == pytest.approx(1e3 * rows[0].step, rel=0.01)  # parts under two pixels are not drawn
    assert "stage 7: compute" in plots.alt_text(figure)
    assert "imbalance" in plots.alt_text(figure)


def test_memory_of_a_stage_has_the_peaks_that_a_run_names(split_run):
    words = plots.alt_text(plots.picture("stage-memory", split_run))
    assert f"stage 0 {format_bytes(split_run.facts.peak_memory_bytes)}" in words


@pytest.mark.parametrize("nodes", [2, 16, 64])
def test_a_mesh_is_drawn_at_any_size_with_what_its_groups_use(nodes):
    topology, mesh = placed(clustersim.load("tp8_pp4_llama3_70b_32x8_h100", {"cluster.nodes": max(nodes, 4)}))
    words = plots.alt_text(mesh_on_machine(drawable(topology, mesh)))
    assert "tp 8 over NVSwitch" in words
    assert "pp 4 over NIC (ib)" in words


def test_groups_of_a_mesh_are_shades_of_their_dimensions_colour_and_rank_0s_has_it_full():
    from matplotlib.colors import to_hex, to_rgb

    from clustersim.app.plots.style import dimensions, palette

    topology, mesh = placed(clustersim.load("tp8_pp4_llama3_70b_32x8_h100", {"cluster.nodes": 4}))
    boxes = mesh_on_machine(drawable(topology, mesh)).axes[0].patches
    rows = [[np.array(box.get_facecolor()[:3]) for box in boxes[i : i + 32]] for i in (0, 32)]
    for row, name, first in zip(rows, ("TP", "PP"), (range(8), range(0, 32, 8)), strict=True):
        full = np.array(to_rgb(dimensions[name]))
        assert [rank for rank, colour in enumerate(row) if colour == pytest.approx(full)] == list(first)
        for colour in row:  # between the full colour and white
            share = (1 - colour) / (1 - full)
            assert share == pytest.approx(np.full(3, share[0]))
    assert len({to_hex(colour) for colour in rows[0]}) == 4
    assert len({to_hex(colour) for colour in rows[1]}) == 8
    assert not {to_hex(colour).upper() for row in rows for colour in row} & set(palette.values())


@pytest.mark.parametrize("kind", ["stage-memory", "mesh"])
def test_a_picture_of_a_split_says_when_nothing_is_split(run, kind):
    with pytest.raises(ClusterSimError, match="this run"):
        plots.picture(kind, run)


@pytest.mark.parametrize("schedule", [{"schedule": "zb_h1"}, {"schedule": "interleaved", "vpp": 6}])
def test_a_pipelines_legend_lies_within_the_picture_whatever_actions_and_chunks_there_are(schedule):
    changes = {
        "model.name": "gpt2",
        "model.seq_len": 128,
        "cluster.gpus_per_node": 2,
        "run.steps": 1,
        "parallel": {"pp": 2, "microbatches": 24, **schedule},
    }
    figure = plots.pipeline_grid(clustersim.load("1f1b_gpt2_xl_1x8_a100", changes).run().timeline)
    figure.draw_without_rendering()
    inside = figure.legends[0].get_window_extent()
    assert inside.x0 >= 0
    assert inside.x1 <= figure.bbox.x1


def test_a_pipeline_s_film_begins_empty_and_ends_as_the_grid(split_run):
    begin, end = usual_step(split_run.timeline)
    drawn = [
        sum(len(c.get_paths()) for c in pipeline_frame(split_run.timeline, (begin, end), t).axes[0].collections)
        for t in (begin, (begin + end) / 2, end, end + 1.0)
    ]
    whole = plots.pipeline_grid(split_run.timeline)
    assert drawn[0] < drawn[1] < drawn[2] == drawn[3]
    assert drawn[3] == sum(len(c.get_paths()) for c in whole.axes[0].collections)
    assert plots.alt_text(pipeline_frame(split_run.timeline, (begin, end), end)) == plots.alt_text(whole)


def test_a_film_is_any_figure_at_one_moment_after_the_other(split_run):
    short = plots.movie(lambda t: plots.lines({"a": ([0, 1], [0, t])}), [1.0, 2.0, 3.0], "A line that rises.")
    shown = Image.open(io.BytesIO(short.gif))
    assert shown.n_frames == 3
    assert 'alt="A line that rises."' in short._repr_html_()
    with pytest.raises(ProgramError, match="moments"):
        plots.movie(lambda t: plots.lines({}), [], "nothing")


def test_a_long_title_has_its_changes_below_and_neither_is_wider_than_the_picture():
    from clustersim.app.plots.drawing import new_figure, titled

    changes = ", ".join(f"cluster.some_key_{i}={i}" for i in range(40))
    figure = titled(new_figure(3.0), f"a_scenario ({changes})", "words")
    figure.canvas.draw()
    box = figure._suptitle.get_window_extent()
    first, second = figure.get_suptitle().split("\n")
    assert (first, second[-3:]) == ("a_scenario", "...")
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_what_is_chosen_is_a_colour_and_the_second_axis_a_dash():
    from clustersim.app.plots.style import curve_styles

    found = curve_styles([f"{one}, {other}" for one in ("ring", "server") for other in ("25 Gb/s", "100 Gb/s")])
    looks = [(style.colour, style.dash) for style in found.values()]
    assert len(set(looks)) == 4
    assert len({colour for colour, _ in looks}) == len({str(dash) for _, dash in looks}) == 2


def test_curves_of_one_choice_differ_in_dash_where_more_is_said_of_them_than_there_are_dashes():
    from clustersim.app.plots.style import DASHES, curve_styles

    said = [*(f"zero, stage {n}" for n in range(1, 4)), *(f"fsdp, degree {n}" for n in range(1, 4))]
    assert len(said) > len(DASHES)
    assert len({(style.colour, str(style.dash)) for style in curve_styles(said).values()}) == len(said)


def test_no_class_of_kernels_has_the_colour_of_a_phase():
    from clustersim.app.plots.style import kernels, palette

    assert not set(kernels.values()) & set(palette.values())


def test_every_dimension_has_a_colour_that_no_phase_kernel_or_holder_of_memory_has():
    from clustersim.app.plots.style import dimensions, kernels, palette, series
    from clustersim.core.memory_parts import part_colours
    from clustersim.explain.dimensions import DIMENSIONS

    assert tuple(dimensions) == DIMENSIONS
    assert len(set(dimensions.values())) == len(DIMENSIONS)
    assert not set(dimensions.values()) & {*palette.values(), *kernels.values(), *part_colours().values(), *series}


def test_the_peak_of_memory_over_a_step_is_the_one_figure_that_a_run_prints(run):
    held = sum(run.facts.memory.by.values())
    words = [text.get_text() for text in plots.picture("memory", run).axes[0].texts]
    assert any(word.startswith(f"peak {format_bytes(held)} at ") for word in words)
    assert format_bytes(run.facts.peak_memory_bytes) == format_bytes(held)


def test_figures_of_a_waterfall_keep_off_their_names_on_a_phone():
    """A bar from 32 to 52 had its figure on its left, over its name."""
    step = 1.201
    shares = {"bubble": 0.283, "launch": 0.067, "memory": 0.133, "products": 0.193, "masked": -0.013}
    lost = {key: share * step for key, share in shares.items()}
    row = Waterfall(-1, step, step - sum(lost.values()), lost)
    with narrow():
        figure = plots.waterfall([row])
        figure.canvas.draw()
        (axes,) = figure.axes
        frame = axes.get_window_extent()
        texts = [text.get_window_extent() for text in axes.texts]
    assert min(text.x0 for text in texts) >= frame.x0
    assert max(text.x1 for text in texts) <= frame.x1 + 10


def test_every_part_of_a_ledger_that_is_seen_has_its_colour_in_the_legend_and_none_is_less_than_nothing():
    """Of two failures in seven weeks the lower bar had five colours, and the legend three; and days "-0.00"."""
    days = {"productive": 47.42, "step variation": -1e-9, "checkpoint stalls": 0.03, "restart": 0.008, "loading": 1e-7}
    parts = {name: LedgerPart(length, length / 47.46) for name, length in days.items()}
    figure = ledger(parts)
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["productive 47.42 d", "checkpoint stalls 43.2 min", "restart 11.52 min"]
    assert "-" not in plots.alt_text(figure)


@pytest.mark.filterwarnings("error")  # where nothing is left for the bars, the legend is drawn on them
def test_a_bar_on_a_phone_is_as_high_as_its_words_however_long_the_legend_is():
    """A bar of eight pixels, with half of "62%" on it, stood above a legend of four rows."""
    seconds = np.full((2, len(STATES)), 1.0 / len(STATES))
    table = Breakdown(list(STATES), np.arange(2), seconds, seconds, np.zeros(2), begin=0.0, end=1.0, steps=1)
    with narrow():
        figure = plots.breakdown(table, groups={"now": np.arange(2)})
    figure.savefig(BytesIO())  # which lays it out
    (axes,) = figure.axes
    heights = [bar.get_window_extent().height for bar in axes.patches]
    assert min(heights) > max(text.get_window_extent().height for text in axes.texts)


def test_what_is_not_recorded_has_a_mark_that_is_seen():
    """It was white with a white edge, in the picture and beside the table."""
    look = STATE_STYLE[NOT_RECORDED]
    assert look.face == "white"
    assert look.edge != "white"
    assert look.colour == look.edge
