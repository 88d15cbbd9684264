"""The report says what the run came to, loads nothing, escapes what it prints, and opens without errors."""

from __future__ import annotations

import html as escaping
import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from browser import HOSTILE, Page, needs_browser, off_screen_on_a_phone, opened, width_on_a_phone
from player import play, toy_cost, toy_model

import clustersim
from clustersim.app.plots.drawing import is_narrow, narrow, new_figure
from clustersim.app.report import write_report
from clustersim.app.report.content import page as html
from clustersim.core.errors import TraceError
from clustersim.core.mesh import Mesh
from clustersim.core.saved_run import SavedRun
from clustersim.core.timeline import OWN_PACES
from clustersim.explain.stalls import costliest
from clustersim.files.traces.saved import load_run
from clustersim.training.strategies.ddp import DDPConfig, build


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    result = clustersim.load("ddp_gpt2_xl_2x8_a100").run()
    path = tmp_path_factory.mktemp("run") / "run.npz"
    result.save(path)
    return load_run(path)


@pytest.fixture(scope="module")
def page(run):
    return html(run)


@pytest.fixture(scope="module")
def hostile(run):
    """Every name that can come from a file is an attack."""
    timeline = run.timeline
    ops = tuple(msgspec.structs.replace(op, name=f"{HOSTILE} {op.name}", stream=op.stream) for op in timeline.ops)
    names = [f"{HOSTILE} {i} -> x" for i in range(len(timeline.links.link_names))]
    links = replace(timeline.links, link_names=names)
    topology = replace(run.topology, name=HOSTILE)
    facts = msgspec.structs.replace(run.facts, title=HOSTILE, model=HOSTILE, notes=[HOSTILE], inputs={HOSTILE: HOSTILE})
    return SavedRun(replace(timeline, ops=ops, links=links), topology, facts)


def test_every_part_is_there_in_the_order_a_reader_needs(page):
    parts = [
        "verdict",
        'id="time"',
        'id="gantt"',
        'id="stalls"',
        'id="hotspots"',
        'id="path"',
        'id="memory"',
        'id="inputs"',
    ]
    body = page[page.index("<main>") :]
    places = [body.index(part) for part in parts]
    assert places == sorted(places)


def test_figures_are_those_of_the_run(page, run):
    words = " ".join(" ".join(Page(page).words).split())
    assert f"{run.facts.samples_per_s:,.1f}" in words
    assert f"{run.facts.mfu:.1%}" in words
    assert "cluster.topology" in words
    assert run.facts.notes[0] in words


def test_a_page_says_why_kernels_take_less_from_peak_to_mfu_than_where_the_time_goes(page):
    """Recomputation was 1.335 s in the table and 1.255 s in the waterfall below it, and no word why."""
    words = " ".join(" ".join(Page(page).words).split())
    assert "Here kernels (recomputation too) count at their usual pace" in words


def test_what_if_is_what_was_run_again_and_never_a_bound(page, tmp_path):
    assert "What if" not in page
    assert "would save" not in page  # a run that is over cannot be run again
    clustersim.load("why_slow_gpu").run().report(tmp_path / "page.html")
    told = (tmp_path / "page.html").read_text()
    section = told[told.index("What if") :]
    assert "(run again)" in section[: section.index("</ul>")]
    assert "at most" not in section[: section.index("</ul>")]


def test_a_changed_scenario_is_shown_as_its_file_writes_it_and_beside_what_it_was_without_the_change(tmp_path):
    """A list stood there as Python has it, ({'ranks': (3,), ...},), and "explain" alone ran the step without it."""
    changed = {"cluster.slow": [{"ranks": [3], "speed": 0.8}]}
    clustersim.load("ddp_gpt2_xl_2x8_a100", changed).run().report(tmp_path / "page.html")
    words = Page((tmp_path / "page.html").read_text(encoding="utf-8")).words
    text = " ".join(words)
    assert "[{ranks = [3], speed = 0.8}]" in text
    assert "({'ranks'" not in text
    assert not {"True", "False"} & {word.strip() for word in words}
    assert re.search(
        r"without cluster\.slow=\[\{ranks = \[3\], speed = 0\.8\}\] a step takes [0-9.]+ ms, .* less", text
    )


def test_numbers_of_a_run_have_names_that_people_read(page, run):
    """Its slowdown of kernels beside transfers was shown as 0, under the key of a table: overlap_slowdown."""
    text = " ".join(Page(page).words)
    assert "overlap_slowdown" not in text
    assert run.timeline.stats["overlap_slowdown"]
    assert f"kernels beside transfers take longer by {run.timeline.stats['overlap_slowdown']:.1%}" in text
    free = replace(run.timeline, stats={**run.timeline.stats, OWN_PACES: 1.0})
    assert "each rank steps at its own pace yes" in " ".join(Page(html(replace(run, timeline=free))).words)


def test_stalls_that_print_as_nothing_are_counted_and_not_listed(page, tmp_path):
    """Of every run 0.0 % of a step was listed, as what waits."""
    assert "Left out" not in page.split('id="stalls"')[1].split("<h2")[0]
    result = clustersim.load("why_slow_gpu").run()
    result.save(tmp_path / "run.npz")
    listed = html(load_run(tmp_path / "run.npz")).split('id="stalls"')[1].split("<h2")[0]
    assert "(0.0%)" not in listed
    left = len(costliest(result.explain().charged)) - listed.count("<li>")
    assert left > 1
    assert f"Left out: {left} causes more of less than 0.05% of the step together." in listed


def test_elements_close_in_order_and_ids_are_unique(page):
    read = Page(page)
    assert read.open == []
    assert len(read.ids) == len(set(read.ids))
    known = set(read.ids)
    used = re.findall(r'href="#([^"]+)"', page) + re.findall(r"url\(#([^)]+)\)", page)
    assert used
    assert set(used) <= known


def test_the_page_loads_nothing(page):
    read = Page(page)
    for name, value in read.attributes:
        if name in {"src", "href", "xlink:href", "data", "action"}:
            assert value.startswith(("#", "data:")), (name, value)
    assert not re.search(r"@import|url\((?!#)", page)
    policy = next(value for name, value in read.attributes if name == "content" and value.startswith("default-src"))
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy


def test_hostile_names_stay_text(hostile):
    page = html(hostile)
    read = Page(page)
    assert read.tags.count("script") == 1
    assert "<img" not in page
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert escaping.escape(HOSTILE) in page or HOSTILE in " ".join(read.words)
    assert read.open == []


def test_each_bar_of_the_gantt_tells_its_op_and_when(page, run):
    last = page[page.index("The last step") : page.index("The whole run")]
    titles = [escaping.unescape(t) for t in re.findall(r"<title>(.*?)</title>", last, re.S)]
    assert any(t.startswith("optimizer\n") and "GFLOP" not in t for t in titles)
    assert any("physical bound" in t for t in titles)
    assert any(t.startswith("many short ones") for t in titles)
    assert any(t.startswith("waits") for t in titles)


def test_a_run_that_nobody_said_anything_about_has_a_report_too(tmp_path):
    model = toy_model([[2**21]] * 4)
    program = build(model, toy_cost(model, jitter=0.05), Mesh(np.arange(16), 8), DDPConfig(), 3, 1)
    timeline = replace(play(program, lambda op: 1e-3), source="a measured trace")
    write_report(SavedRun(timeline), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "a run of 16 ranks (a measured trace)" in text
    assert 'id="hotspots"' not in text
    assert 'id="memory"' not in text
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_a_report_on_1024_gpus_is_small(tmp_path):
    result = clustersim.load("ddp_llama3_8b_128x8_h100", {"run.steps": 2}).run()
    write_report(SavedRun(result.timeline, result.prepared.topology, result.facts()), tmp_path / "r.html")
    assert (tmp_path / "r.html").stat().st_size < 5e6


def test_a_missing_run_says_how_to_make_one(tmp_path):
    with pytest.raises(TraceError, match=r"run\.npz: no such file; .*--out DIR"):
        load_run(tmp_path / "nowhere" / "run.npz")


HOVER = """
var bar = Array.from(document.querySelectorAll('.gantt rect')).find(function (r) { return r.querySelector('title'); });
var said = bar.querySelector('title').textContent;
bar.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: 50, clientY: 50}));
var tip = document.getElementById('tip');
document.documentElement.dataset.hover = tip.style.display === 'block' && tip.textContent === said;
document.documentElement.dataset.main = document.querySelector('main').scrollWidth <= window.innerWidth;
console.log('seen');
"""


@needs_browser
@pytest.mark.parametrize("which", ["page", "hostile"])
def test_it_opens_without_a_word_on_the_console_and_bars_tell_what_they_are(which, request, tmp_path):
    text = html(request.getfixturevalue("hostile")) if which == "hostile" else request.getfixturevalue("page")
    document, console = opened(text, tmp_path, HOVER)
    assert 'data-hover="true"' in document
    assert 'data-main="true"' in document
    assert len(console) == 1
    assert "seen" in console[0]


@needs_browser
def test_a_phone_scrolls_figures_and_never_the_page(page, tmp_path):
    assert width_on_a_phone(page, tmp_path) <= 390


@needs_browser
def test_nothing_of_a_pipeline_s_page_is_off_screen_on_a_phone(tmp_path):
    result = clustersim.load("1f1b_gpt2_xl_1x8_a100", {"run.steps": 2, "parallel.microbatches": 8}).run()
    write_report(SavedRun(result.timeline, result.prepared.topology, result.facts()), tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert text.count('<svg class="gantt"') == 4
    assert off_screen_on_a_phone(text, tmp_path) == 0


def test_coordinates_of_paths_are_short_and_words_of_a_picture_are_not(page):
    """Hatches in millionths of a point were most of a page; a label cut in the same way was a wrong figure."""
    assert not re.search(r' d="[^"]*\.\d{3}', page)
    assert re.search(r"<text[^>]*>[^<]*\d\.\d{3} (?:ms|s|GiB)", page)


def test_a_legend_has_the_colours_that_are_drawn_and_no_others(page):
    entries = re.findall(r'<li><span class="chip (\w+)"', page)
    drawn = set(re.findall(r'<rect class="(\w+)(?: e)?" ', page))
    assert set(entries) == drawn
    assert len(entries) == len(set(entries)) < 10


def test_a_phone_sees_the_whole_of_where_the_time_went(page):
    """Bars whose right half is off the screen hide the waits, which are what they are drawn for."""
    assert page.count('<div class="desk">') == page.count('<div class="phone">') == page.count('role="img"') / 2
    small = page.partition("@media screen and (max-width: 600px)")[2]
    assert ".desk { display: none; } .phone { display: block; } .scroll .phone svg { min-width: 0; }" in small
    with narrow():
        figure = new_figure(2.0)
    assert is_narrow(figure)
    assert not is_narrow(new_figure(2.0))
