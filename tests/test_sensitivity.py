"""What a scenario depends on: knobs do what physics says, the break-even is where the step crosses, losses add up."""

from __future__ import annotations

import json
from io import BytesIO

import numpy as np
import pytest
from browser import Page, needs_browser, opened, width_on_a_phone
from click.testing import CliRunner
from msgspec import to_builtins

from clustersim import scenario
from clustersim.app import plots
from clustersim.app.cli import cli
from clustersim.app.plots.drawing import narrow
from clustersim.app.report.study import study_html
from clustersim.core.device import Speed, device, faster
from clustersim.core.errors import ProgramError
from clustersim.scenario.run.running import prepare
from clustersim.studies import sensitivity
from clustersim.studies.sensitivity import ScalingPoint, break_even, curve, last_worthwhile, tornado
from clustersim.studies.sensitivity.turned import CLOSE, KNOBS, Swing
from clustersim.studies.what_if.rerun import rerun_step, step_time

SMALL = {"run.jitter": 0.0, "run.steps": 3, "cluster.gpus_per_node": 2}


@pytest.fixture(scope="module")
def loaded():
    return scenario.load("ddp_gpt2_xl_2x8_a100", SMALL)


@pytest.fixture(scope="module")
def prepared(loaded):
    return loaded.prepare()


@pytest.fixture(scope="module")
def now(prepared):
    return step_time(prepared.run().timeline)


@pytest.fixture(scope="module")
def said(loaded):
    return sensitivity.study(loaded, sensitivity.StudyRequest(nodes=[1, 2, 4]))


# ---- knobs -----------------------------------------------------------------------------------------------------------


def test_a_gpu_as_it_is_changes_nothing(loaded, prepared, now):
    assert faster(device("H100-SXM5-80GB"), Speed()) is device("H100-SXM5-80GB")
    assert step_time(prepare(loaded, Speed()).run().timeline) == now


def test_kernels_take_as_long_as_the_rate_that_bounds_them_says(loaded):
    """Twice both rates: what compute and memory bound halves, until launches or a kernel's least time bound it."""
    before = loaded.prepare().cost
    after = prepare(loaded, Speed(2.0, 2.0)).cost
    bound = [i for i, what in enumerate(before.backward_bound) if what in {"compute", "memory"}]
    ratio = before.backward[bound] / after.backward[bound]
    assert np.median(ratio) > 1.9
    assert (ratio >= 1.0).all()
    assert (ratio <= 2.0 + 1e-9).all()


@pytest.mark.parametrize("knob", ["GPU compute", "HBM", "NIC", "NVLink", "network", "latency"])
def test_a_better_machine_is_never_slower(prepared, now, knob):
    assert rerun_step(prepared, knob, 2.0) <= now * 1.001
    assert rerun_step(prepared, knob, 0.5) >= now * 0.999


def test_a_knob_the_machine_has_not_is_left_out():
    alone = scenario.load("single_gpt2_1x1_a100", {"run.jitter": 0.0})
    run = alone.prepare()
    assert rerun_step(run, "network", 2.0) is None or rerun_step(run, "network", 0.1) == step_time(run.run().timeline)
    names = {one.knob for one in tornado(run, step_time(run.run().timeline))}
    assert {"GPU compute", "HBM bandwidth"} <= names <= {words.format(inside="NVLink") for words in KNOBS.values()}


def test_the_tornado_is_ordered_and_its_shares_are_of_the_step(prepared, now):
    found = tornado(prepared, now, 0.2)
    spans = [one.worse_s - one.better_s for one in found]
    assert spans == sorted(spans, reverse=True)
    for one in found:
        assert one.better_s == pytest.approx(now * (1 - one.gain))
        assert one.worse_s == pytest.approx(now * (1 + one.loss))
    assert {one.knob for one in found[:2]} == {"GPU compute", "HBM bandwidth"}
    compute = next(one for one in found if one.knob == "GPU compute")
    assert compute.loss < 0.25 + 1e-9  # a fifth slower cannot take more than a quarter longer


# ---- the network -----------------------------------------------------------------------------------------------------


def test_at_the_break_even_the_step_is_as_long_as_was_accepted(prepared, now):
    found = break_even(prepared, now, 0.05)
    factor = found.at / found.nic
    assert rerun_step(prepared, "network", factor * CLOSE) <= 1.05 * now * 1.001
    assert rerun_step(prepared, "network", factor / CLOSE) >= 1.05 * now * 0.999
    assert list(found.speeds) == sorted(found.speeds)


def test_a_step_that_hardly_uses_the_network_has_no_break_even(prepared, now):
    assert break_even(prepared, now, 1e6).at is None


# ---- scaling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_losses_add_up_to_what_is_lost(said, kind):
    points = [one for one in said.curves[kind] if not one.error]
    assert points[0].efficiency == 1.0
    for one in points:
        assert sum(one.losses.values()) == pytest.approx(1.0 - one.efficiency, abs=1e-6)
        assert one.rate == pytest.approx(one.batch / one.step_s)


def test_what_a_pipeline_loses_to_fewer_passes_is_its_bubble():
    """It was "idle"."""
    loaded = scenario.load("1f1b_gpt2_xl_1x8_a100", {"cluster.nodes": 2, "run.steps": 2, "parallel.microbatches": 8})
    points = sensitivity.study(loaded, sensitivity.StudyRequest(nodes=[1, 2])).strong
    assert points[1].cause == "bubble, over 8 passes instead of 16"


def test_strong_scaling_keeps_the_batch_and_weak_each_ranks(said):
    assert len({one.batch for one in said.strong if not one.error}) == 1
    assert len({one.batch // one.gpus for one in said.weak}) == 1


def test_nodes_that_do_not_divide_the_batch_are_a_point_that_says_so(loaded):
    one = curve(loaded, [3], "strong")[0]
    assert "do not divide over 3 nodes" in one.error


def test_the_first_doubling_that_does_not_pay_is_told():
    points = [
        ScalingPoint(1, rate=10.0),
        ScalingPoint(2, rate=19.0),
        ScalingPoint(4, rate=24.0),
        ScalingPoint(8, rate=40.0),
    ]
    assert last_worthwhile(points, 0.5) == (2, pytest.approx(5 / 19))
    assert last_worthwhile(points, 0.1) is None


# ---- pictures, pages, the command ------------------------------------------------------------------------------------


def test_on_a_phone_no_word_of_a_picture_is_on_another():
    """ "-14.4%" was on the name of its number, and the two titles of scaling on each other."""
    swings = [Swing("latency of transfers", 3.7, 5.2, 0.144, 0.217), Swing("GPU compute", 3.6, 5.3, 0.139, 0.2)]
    points = [ScalingPoint(n, gpus=8 * n, rate=10.0 * n, efficiency=1.0) for n in (1, 2, 4, 8)]
    with narrow():
        tornado_axes = plots.tornado(swings, 0.2).axes[0]
        scaling = plots.efficiency_losses({"strong": points, "weak": points})
    tornado_axes.figure.savefig(BytesIO())  # which lays it out
    name_end = max(label.get_window_extent().x1 for label in tornado_axes.get_yticklabels())
    assert min(text.get_window_extent().x0 for text in tornado_axes.texts) > name_end
    scaling.savefig(BytesIO())
    left, right = (axes._left_title.get_window_extent() for axes in scaling.axes)
    assert left.x1 < right.x0
    assert right.x1 <= scaling.bbox.width


def test_pictures_say_in_words_what_they_show(said):
    assert "GPU compute -" in plots.alt_text(plots.tornado(said.tornado, 0.2))
    assert "Step time over NIC" in plots.alt_text(plots.network_speed(said.network))
    assert "strong: 100% on 2 GPUs" in plots.alt_text(plots.efficiency_losses({"strong": said.strong}))
    with pytest.raises(ProgramError, match="nothing to draw"):
        plots.tornado([], 0.2)
    with pytest.raises(ProgramError, match="nothing to draw"):
        plots.efficiency_losses({"strong": []})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("sensitivity")
    changes = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    words = ["sensitivity", "ddp_gpt2_xl_2x8_a100", *changes, "--nodes", "1,2,4", "--out", str(out)]
    done = CliRunner().invoke(cli, [*words, "--report", str(out / "page.html")])
    assert done.exit_code == 0, done.output
    return out, done.stdout


def test_the_command_answers_first_and_writes_what_python_gives(folder, said):
    out, printed = folder
    assert printed.startswith(said.verdict)
    found = json.loads((out / "sensitivity.json").read_text())
    assert found["verdict"] == said.verdict
    assert found["tornado"] == to_builtins(said.tornado)
    assert {"tornado.png", "network.png", "scaling.png"} <= {path.name for path in out.iterdir()}


def test_the_page_says_it_first_and_loads_nothing(folder, said):
    out, _ = folder
    page = (out / "page.html").read_text()
    assert page == study_html(out)
    read = Page(page)
    assert read.open == []
    assert said.verdict in " ".join(" ".join(read.words).split())
    assert all(v.startswith(("#", "data:")) for name, v in read.attributes if name in {"src", "href", "xlink:href"})


@needs_browser
def test_the_page_opens_in_silence_and_fits_a_phone(folder, tmp_path):
    page = (folder[0] / "page.html").read_text()
    _, console = opened(page, tmp_path, "console.log('seen');")
    assert len(console) == 1
    assert width_on_a_phone(page, tmp_path) <= 390


def test_a_plans_option_can_be_studied(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(
        '[model]\nname = "resnet50"\n[[machines]]\ntopology = "dgx-1v"\nnodes = [1]\n[batch]\nsamples = 256\n'
        '[try]\nmicro_batch_size = [32]\nactivation_checkpointing = ["none"]\n[[try.strategies]]\nkind = "ddp"\n'
    )
    run = CliRunner().invoke
    assert run(cli, ["plan", str(file), "--out", str(tmp_path / "p"), "--jobs", "1"]).exit_code == 0
    words = ["sensitivity", str(tmp_path / "p"), "--nodes", "1", "--out", str(tmp_path / "s")]
    done = run(cli, words)
    assert done.exit_code == 0, done.output
    answer = json.loads((tmp_path / "s" / "sensitivity.json").read_text())
    assert answer["title"].startswith("1 x dgx-1v: ddp")
    rows = [json.loads(line) for line in (tmp_path / "p" / "results.jsonl").read_text().splitlines()]
    assert answer["step_s"] == pytest.approx(rows[0]["result"]["step_time_s"])
    missing = run(cli, [*words, "--option", "9"])
    assert "there is no 9" in str(missing.exception)


def test_a_plans_option_is_run_explained_and_added_up_as_its_scenario_is(tmp_path):
    table = scenario.load("ddp_resnet50_1x8_v100").table
    (tmp_path / "plan.json").write_text(json.dumps({"front": [{"scenario": table, "path": "p.toml", "option": "it"}]}))
    run = CliRunner().invoke
    for words in (["run"], ["memory"], ["explain"]):
        of_plan = run(cli, [*words, str(tmp_path), "--option", "1", "--json"])
        of_file = run(cli, [*words, "ddp_resnet50_1x8_v100", "--json"])
        assert of_plan.exit_code == 0, of_plan.output
        figures = [json.loads(done.stdout) for done in (of_plan, of_file)]
        for answer in figures:
            for name in ("scenario", "run"):
                answer.pop(name, None)
        assert figures[0] == figures[1]
    refused = run(cli, ["run", "ddp_resnet50_1x8_v100", "--option", "1"])
    assert "no folder that clustersim plan --out wrote" in str(refused.exception)
