"""The reports of a sweep and of a plan: the answer first, every part there, nothing loaded, names that stay text."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from browser import HOSTILE, Page, needs_browser, off_screen_on_a_phone, opened, width_on_a_phone
from click.testing import CliRunner

from clustersim.app import plots
from clustersim.app.cli import cli
from clustersim.app.report.pages import rendered
from clustersim.app.report.study import holds_study, study_html
from clustersim.core.errors import ClusterSimError, ScenarioError
from clustersim.core.ranges import of_step
from clustersim.scenario.file.plan_option import option_of
from clustersim.studies import plan as planner
from clustersim.studies import sweep as sweeps
from clustersim.studies.plan import of_sweep
from clustersim.studies.plan.swept import SweptRows, load
from clustersim.studies.sweep.spec import Question

SWEEP = """
base = "ddp_resnet50_1x8_v100"
title = "two ways"
[question]
axis = "exchange"
[set]
run.steps = 3
[[axes]]
name = "exchange"
key = "strategy"
[axes.values]
"all-reduce" = {kind = "ddp", micro_batch_size = 8}
"one server" = {kind = "parameter_server", micro_batch_size = 8, server = "gpu"}
[[axes]]
key = "cluster.gpus_per_node"
values = [2, 4]
"""


GPT2 = {"model_type": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 256, "vocab_size": 5000}
OWN = 'name = "resnet50"', 'hf_config = "config.json"'
"""A model of one's own beside the plan, in place of a shipped one."""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep")
    (path / "mine.toml").write_text(SWEEP)
    sweeps.sweep(path / "mine.toml", path / "out", jobs=1)
    return path / "out"


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan")
    (path / "mine.toml").write_text(
        'title = "R"\n[model]\nname = "resnet50"\n[[machines]]\ntopology = "dgx-1v"\nnodes = [1, 2]\n'
        "usd_per_gpu_hour = 2.0\n[batch]\nsamples = [256, 512]\n[limits]\ntokens = 1e9\n"
        '[try]\nmicro_batch_size = [32]\nactivation_checkpointing = ["none"]\n[[try.strategies]]\nkind = "ddp"\n'
        "bucket_cap_mb = [1, 25]\n"
    )
    planner.plan(path / "mine.toml", path / "out", jobs=1)
    return path / "out"


@pytest.fixture(params=["swept", "planned"])
def folder(request):
    return request.getfixturevalue(request.param)


def words(page):
    return " ".join(" ".join(Page(page).words).split())


def of(rates, question=None, kind="ddp"):
    """A sweep of one axis of choices and one of cases, with these rates (choices, cases)."""
    rates = np.asarray(rates, dtype=float)
    choices, cases = rates.shape
    n = choices * cases
    names = [f"c{i}" for i in range(choices)] if question is None else np.arange(1, choices + 1)
    table = {
        "choice": np.repeat(names, cases),
        "run.seed": np.tile(np.arange(cases), choices),
        "samples_per_s": rates.ravel(),
        "tokens_per_s": np.full(n, np.nan),
        "strategy": np.full(n, kind),
        "steps_like": np.full(n, kind),
        "off_by": np.full(n, of_step(kind).p50),
        "device": np.full(n, "H100-SXM5-80GB"),
        "model": np.full(n, "m"),
        "gpus": np.full(n, 8),
        "fits": np.full(n, True),
    }
    return SweptRows("t", table, ("choice", "run.seed"), question, 0)


# ---- what a sweep answers --------------------------------------------------------------------------------------------


def test_the_choice_that_is_never_beaten_is_named_and_the_others_worst_case():
    said = of_sweep.answer(of([[100.0, 100.0], [50.0, 25.0]])).verdict
    assert said == (
        "C0 is the fastest, or as fast as can be told, in all 2 cases; c1 takes up to 4 times as long (seed 1)."
    )


def test_choices_that_predictions_cannot_tell_apart_are_named_together():
    said = of_sweep.answer(of([[100.0, 100.0], [101.0, 99.0]])).verdict
    assert said == "C0 or c1: in all 2 cases they differ by less than predictions are off."


def test_where_each_case_has_its_own_best_choice_no_one_is_named_best():
    assert "No choice is best everywhere" in of_sweep.answer(of([[100.0, 10.0], [10.0, 100.0]])).verdict


def without_room(rates, *full):
    """The same sweep, of which the (choice, case) of ``full`` do not fit in memory."""
    swept = of(rates)
    for choice, case in full:
        swept.table["fits"][choice * np.asarray(rates).shape[1] + case] = False
    return swept


def test_a_choice_that_does_not_fit_is_no_fastest_one():
    """204,833 tokens/s of a scenario that did not fit stood over the page as the fastest."""
    answer = of_sweep.answer(without_room([[100.0, 100.0], [50.0, 25.0]], (0, 1)))
    assert answer.verdict == (
        "No choice is best everywhere: c0 is the fastest in 1 case, c1 is the fastest in 1 case; c0 is the fastest "
        "wherever it fits, and does not fit in 1 of 2 cases; c1 takes up to 2 times as long (seed 0)."
    )
    assert answer.cases[1] == ["seed 1", "c1", "25", "+300.0%, does not fit", "0.0%"]


@pytest.mark.parametrize("word", ["none", "off", "true"])
def test_a_choice_whose_name_says_nothing_alone_is_told_with_its_axis(word):
    """A sweep of checkpointing said "none does not fit in 3 of them"."""
    swept = without_room([[100.0, 100.0], [50.0, 25.0]], (1, 0))
    names = np.where(swept.table.pop("choice") == "c1", word, "full")
    table = {"model.activation_checkpointing": names, **swept.table}
    said = of_sweep.answer(SweptRows("t", table, ("model.activation_checkpointing", "run.seed"), None, 0)).verdict
    assert said == (
        "Full is the fastest, or as fast as can be told, in all 2 cases; "
        f"activation checkpointing {word} takes up to 4 times as long (seed 1), and does not fit in 1 of 2 cases."
    )


def test_a_case_in_which_nothing_fits_decides_nothing():
    answer = of_sweep.answer(without_room([[100.0, 10.0], [50.0, 40.0]], (0, 1), (1, 1)))
    assert answer.verdict == (
        "C0 is the fastest, or as fast as can be told, in the one case in which anything fits; c1 takes up "
        "to 2 times as long (seed 0)."
    )
    assert answer.cases[1][:3] == ["seed 1", "nothing fits", "40"]
    nothing = of_sweep.answer(without_room([[100.0, 100.0], [50.0, 25.0]], *np.ndindex(2, 2)))
    assert nothing.verdict.startswith("C0 is the fastest, or as fast as can be told, in all 2 cases; c1 takes")


@pytest.mark.parametrize(
    ("second", "start"), [(99.0, "Yes, once it saves more than 1.0%"), (50.0, "Only where it saves more")]
)
def test_what_a_choice_costs_is_what_it_must_save(second, start):
    asked = Question(axis="choice", value=2, against=1, choice="the second")
    answer = of_sweep.answer(of([[100.0, 100.0], [second, 100.0 * second / 99.0 if second > 90 else second]], asked))
    assert answer.verdict.startswith(start)
    hour = planner.rates("H100-SXM5-80GB").usd_per_gpu_hour * 8
    lost = 1 - second / 100
    assert f"{lost:.1%} is {lost * hour:,.0f} of the {hour:,.0f} USD an hour" in answer.verdict


def test_a_question_about_an_axis_or_value_that_is_not_there_is_an_error():
    table = {"base": "ddp_resnet50_1x8_v100", "axes": [{"key": "run.steps", "values": [3, 4]}]}
    with pytest.raises(ScenarioError, match=r"\$\.question\.axis"):
        sweeps.from_table(table | {"question": {"axis": "run.step"}})
    with pytest.raises(ScenarioError, match=r"\$\.question\.value"):
        sweeps.from_table(table | {"question": {"axis": "run.steps", "value": 5, "against": 3}})
    with pytest.raises(ScenarioError, match="go together"):
        sweeps.from_table(table | {"question": {"axis": "run.steps", "value": 3}})


# ---- the pages -------------------------------------------------------------------------------------------------------


def test_the_answer_comes_first_and_is_the_commands(folder):
    page = study_html(folder)
    said = re.search(r'<p class="verdict">(.*?)</p>', page, re.DOTALL).group(1)
    if (folder / "plan.json").exists():
        answer = json.loads((folder / "plan.json").read_text())["verdict"]
    else:
        answer = of_sweep.answer(load(folder)).verdict
    assert words(said) == answer.replace("+-", "±")
    body = page[page.index("<main>") :]
    parts = ['class="verdict"', 'id="front"', 'id="assumed"', 'id="all"']
    places = [body.index(part) for part in parts]
    assert places == sorted(places)


def test_every_row_of_a_sweep_and_every_option_of_a_plan_is_in_its_table(folder):
    page = study_html(folder)
    table = page[page.index('<h2 id="all"') : page.index("</main>")]
    if (folder / "plan.json").exists():
        rows = [row["option"] for row in json.loads((folder / "plan.json").read_text())["options"]]
        assert all(row in words(table) for row in rows)
    else:
        rows = sweeps.read(folder)["key"]
    assert table.count("<tr") == len(rows) + 1


def test_elements_close_ids_are_unique_and_nothing_is_loaded(folder):
    read = Page(study_html(folder))
    assert read.open == []
    assert len(read.ids) == len(set(read.ids))
    for name, value in read.attributes:
        if name in {"src", "href", "xlink:href", "data", "action"}:
            assert value.startswith(("#", "data:")), (name, value)


def hostile(folder, tmp_path):
    """The same answer with every name an attack."""
    copy = tmp_path / "hostile"
    copy.mkdir()
    for file in folder.iterdir():
        text = file.read_text(errors="ignore")
        for name in ("one server", "25", "two ways", '"R"'):
            if file.suffix in {".json", ".jsonl"} and file.name != "results.jsonl" and not name.isdigit():
                text = text.replace(name, json.dumps(HOSTILE) if name == '"R"' else json.dumps(HOSTILE)[1:-1])
        copy.joinpath(file.name).write_text(text)
    return copy


def test_what_a_sentence_has_between_backticks_is_code_and_stays_text():
    """`jitter` in a plan's assumptions was shown with its backticks."""
    told = rendered("study.html.j2", title="t", verdict="take `a<b` now", figures=(), warnings=("`x`",), sections=())
    assert "take <code>a&lt;b</code> now" in told
    assert "<li><code>x</code></li>" in told


def test_names_are_text_never_markup(folder, tmp_path):
    page = study_html(hostile(folder, tmp_path))
    assert "alert(" in page
    assert "<script>alert" not in page
    assert "<img" not in page


@needs_browser
def test_it_opens_without_a_word_on_the_console_and_fits_a_phone(folder, tmp_path):
    page = study_html(folder)
    _, console = opened(page, tmp_path, "console.log('seen');")
    assert len(console) == 1
    assert "seen" in console[0]
    assert width_on_a_phone(page, tmp_path) <= 390


def test_a_folder_that_holds_neither_says_so(tmp_path):
    assert not holds_study(tmp_path)
    with pytest.raises(ClusterSimError, match="holds no sweep"):
        study_html(tmp_path)


def test_the_commands_write_the_same_page(swept, tmp_path):
    done = CliRunner().invoke(cli, ["report", str(swept), "-o", str(tmp_path / "a.html")])
    assert done.exit_code == 0, done.output
    file = str(swept.parent / "mine.toml")
    again = CliRunner().invoke(cli, ["sweep", file, "--out", str(swept), "--report", str(tmp_path / "b.html")])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert of_sweep.answer(load(swept)).verdict in again.stdout


def test_the_front_is_drawn_large_and_said_in_words():
    places = (("a", "8", 10.0, 5.0, True), ("b", "16", 19.0, 5.5, True), ("b", "16", 15.0, 7.0, False))
    dots = [plots.FrontDot(*place) for place in places]
    figure = plots.front(dots, x="tokens/s", y="USD")
    assert plots.alt_text(figure) == "USD over tokens/s. Not beaten by any other: a, 8: 10 at 5; b, 16: 19 at 5.5."
    with pytest.raises(ClusterSimError, match="nothing to draw"):
        plots.front([], x="x", y="y")


@needs_browser
def test_all_of_a_plan_is_seen_on_a_phone_without_moving_it(planned, tmp_path):
    page = study_html(planned)
    assert 'class="cards"' in page
    assert off_screen_on_a_phone(page, tmp_path) == 0


def test_an_option_of_a_plan_is_read_from_anywhere(planned, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    (tmp_path / "mine.toml").write_text((planned.parent / "mine.toml").read_text().replace(*OWN))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["plan", "mine.toml", "--out", "out"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    monkeypatch.chdir(planned)
    done = CliRunner().invoke(cli, ["memory", str(tmp_path / "out"), "--option", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_what_was_run_beside_the_front_of_a_plan_has_numbers_behind_it(tmp_path, monkeypatch):
    """What was told to be as fast as the front's first could not be run: it had no number."""
    plan = (
        f'title = "R"\n[model]\n{OWN[1]}\ndtype = "bf16"\n[[machines]]\ntopology = "hgx-a100"\nnodes = [1]\n'
        '[batch]\nsamples = [64, 64]\n[try]\nmicro_batch_size = [8]\nactivation_checkpointing = ["none"]\n'
        '[[try.strategies]]\nkind = "ddp"\n[[try.strategies]]\nkind = "fsdp"\n'
    )
    (tmp_path / "mine.toml").write_text(plan)
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(cli, ["plan", "mine.toml", "--out", "out", "--jobs", "1", "--exhaustive"]).output
    answer = json.loads((tmp_path / "out" / "plan.json").read_text())
    others = [row for row in answer["alternatives"] if row["rate"]]
    first = 1 + len(answer["front"])
    assert others
    assert f"{first}. " in told
    page = study_html(tmp_path / "out")  # a list with its numbers, where each once had a bullet as well
    assert re.search(r'<ol>\s*<li value="1"><strong>', page)
    assert re.search(rf'<ol>\s*<li value="{first}"><strong>', page)
    assert not re.search(r"<strong>\d+\. ", page)
    monkeypatch.chdir("/")  # it is found from anywhere, as the front is
    scenario, name = option_of(tmp_path / "out", first)
    assert name == others[0]["option"]
    assert scenario.file.strategy["kind"] in name
    assert scenario.program().roles
    with pytest.raises(ScenarioError, match="there is no 99: options 1 to "):
        option_of(tmp_path / "out", 99)
