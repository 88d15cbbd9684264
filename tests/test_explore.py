"""The page of a scenario's knobs: who may ask, what a change shows, and what it may not reach."""

from __future__ import annotations

import json
import re
import shlex
import tomllib

import pytest
from browser import HOSTILE, OFF_SCREEN, Page, needs_browser
from conftest import ROOT

from clustersim import scenario
from clustersim.app.cli.keys import keys, schema
from clustersim.app.explore import fence
from clustersim.app.explore.fields import IDLE, TABLES, form_of
from clustersim.app.explore.runs import PlayRequest, RunPlayer, told
from clustersim.app.explore.server import command, saved
from clustersim.app.explore.worker import RunWorker
from clustersim.app.plots.style import palette
from clustersim.core.errors import ClusterSimError, ScenarioError
from clustersim.core.tomls import toml_value
from clustersim.scenario.file.reading import override

SMALL = "ddp_resnet50_1x8_v100"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HOST = "127.0.0.1:8000"
TOKEN = "correct-horse"


@pytest.fixture(scope="module")
def made():
    return schema("scenario")


@pytest.fixture(scope="module")
def form(made):
    return form_of(scenario.load(SMALL), made)


@pytest.fixture(scope="module")
def client(made):
    """A browser that was given the address."""
    TestClient = pytest.importorskip("starlette.testclient", reason="explore needs starlette").TestClient
    from clustersim.app.explore.server import application

    worker = RunWorker(SMALL)
    yield TestClient(application(SMALL, made, TOKEN, HOST, worker), base_url=f"http://{HOST}")
    worker.close()


def play(client, now, before=None):
    answer = client.post(f"/{TOKEN}/play", json={"now": now, "before": before})
    assert answer.status_code == 200
    return answer.json()


def test_every_key_of_a_table_that_a_step_depends_on_is_a_field_but_those_that_name_files_or_do_nothing(form):
    told = {re.sub(r"\[kind=\w+\]", "", key.path): key for key in keys("scenario")}
    leaves = {path for path in told if not any(other.startswith((f"{path}.", f"{path}[")) for other in told)}
    missing = {path for path in leaves if path.partition(".")[0] in TABLES and "[" not in path} - set(form.known)
    silent = {path for path in missing if any(word in told[path].meaning for word in IDLE)}
    assert missing - silent == {"model.hf_config", "model.file", "parallel.schedule_csv", "parallel.routing.file"}


def test_the_files_own_keys_come_first_in_its_own_order(form):
    own = scenario.load(SMALL).table
    first = [one.key for one in form.sections[0].fields]
    assert first == [f"{table}.{key}" for table in own for key in own[table]]
    assert all(one.value for one in form.sections[0].fields)
    assert not any(one.value for part in form.sections[1:] for one in part.fields)


def test_a_field_has_the_schemas_choices_bounds_default_and_meaning(form):
    dtype, nodes, jitter = (form.known[key] for key in ("model.dtype", "cluster.nodes", "run.jitter"))
    assert set(dtype.choices) == {"fp32", "tf32", "fp16", "bf16", "fp8"}
    assert (nodes.number, nodes.whole, nodes.low, nodes.high) == (True, True, "1", "")
    assert (jitter.whole, jitter.low, jitter.high) == (False, "0", "1")
    ddp = next(part for part in form.sections if part.kind == "ddp")
    assert next(one.unit for one in ddp.fields if one.key == "strategy.bucket_cap_mb") == "MiB"
    assert form.known["run.fidelity"].default == "flow"
    assert "standard deviation" in jitter.meaning


@pytest.mark.parametrize("name", scenario.names())
def test_what_a_form_says_of_every_shipped_scenario_is_the_scenario(name, made):
    loaded = scenario.load(name)
    form = form_of(loaded, made)
    same = {one.key: one.value for one in form.sections[0].fields}
    assert form.settings(same) == ()
    again = scenario.parse_overrides(one.setting(one.value) for one in form.sections[0].fields if one.value)
    assert scenario.load(name, again).inputs() == loaded.inputs()


def test_a_text_that_looks_like_a_number_stays_text(form):
    assert form.known["run.nccl_version"].setting("2.20") == 'run.nccl_version="2.20"'
    assert form.known["model.dtype"].setting("bf16") == "model.dtype=bf16"
    assert form.known["run.jitter"].setting("0.5") == "run.jitter=0.5"
    assert form.known["run.jitter"].setting(" ") == "run.jitter="


def test_a_strategy_that_is_left_takes_its_tables_with_it(made):
    form = form_of(scenario.load("zero3_llama3_8b_2x8_a100"), made)
    inside = {key: "" for key, one in form.known.items() if one.value and key.startswith("strategy.zero_optimization.")}
    assert len(inside) > 1
    assert form.settings({"strategy.kind": "ddp", **inside}) == ("strategy.kind=ddp", "strategy.zero_optimization=")
    assert form.settings(dict(list(inside.items())[:1])) == (f"{next(iter(inside))}=",)


@pytest.mark.parametrize("name", ["why_slow_gpu", "zero3_llama3_8b_2x8_a100", "tp8_pp16_llama3_405b_2048x8_h100"])
def test_a_saved_scenario_is_the_changed_one(name, tmp_path):
    changed = scenario.load(
        name, {"run.seed": 7, "cluster.changes": [{"match": "node0/nic0", "factor": 0.5}], "run.jitter": None}
    )
    path = tmp_path / "saved.toml"
    path.write_text(saved(changed), encoding="utf-8")
    assert scenario.load(path).inputs() == changed.inputs()


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster.topology": "{file}"},
        {"cluster.topology": "../{name}"},
        {"cluster.device": "{device}"},
        {"cluster.device": "../{device_name}"},
        {"model.hf_config": "{file}"},
        {"model.file": "{file}"},
        {"model.name": "{file}"},
        {"model.name": "."},
        {"parallel.schedule_csv": "{file}"},
        {"parallel.routing": {"kind": "histogram", "file": "{file}"}},
    ],
)
def test_no_change_reaches_a_file_that_the_scenario_does_not_name(changes, tmp_path, monkeypatch):
    file = tmp_path / "secret.json"
    file.write_text("{}")
    monkeypatch.chdir(tmp_path)
    gpu = tmp_path / "secret.toml"
    gpu.write_text("")
    text = json.dumps(changes).replace("{file}", str(file)).replace("{name}", file.name)
    filled = json.loads(text.replace("{device}", str(gpu)).replace("{device_name}", gpu.name))
    texts = tuple(f"{key}={toml_value(value)}" for key, value in filled.items())
    reply = RunPlayer(SMALL)(PlayRequest(texts))
    assert (reply.html, reply.field.split(".")[:2]) == ("", next(iter(changes)).split("."))
    assert "explore reads no file but its own scenario's" in reply.error


def test_every_field_that_a_scenario_reads_a_file_by_is_fenced():
    named = set()
    for path in (ROOT / "clustersim").rglob("*.py"):
        named |= set(re.findall(r'located\(\w+, "([\w.]+)"', path.read_text("utf-8")))
    assert named | {"model.name"} == set(fence.FILES)


def test_the_scenarios_own_file_may_be_read(tmp_path):
    config = tmp_path / "config.json"
    config.write_text((ROOT / "clustersim/data/models/gpt2.json").read_text("utf-8"))
    path = tmp_path / "mine.toml"
    text = (ROOT / "scenarios/single_gpt2_1x1_a100.toml").read_text("utf-8")
    path.write_text(re.sub(r"(?m)^name = .*$", 'hf_config = "config.json"', text))
    assert "explore reads no file" in RunPlayer(str(path))(PlayRequest(("model.hf_config=config.json",))).error
    reply = RunPlayer(str(path))(PlayRequest(("run.steps=2",)))
    assert reply.error == ""
    assert reply.figures["step_time_s"] > 0
    assert form_of(scenario.load(path), schema("scenario")).known["model.hf_config"].fixed


def test_a_run_beside_itself_has_no_difference_and_beside_another_says_which_is_better():
    player = RunPlayer(SMALL)
    same = player(PlayRequest((), ()))
    assert 'class="n better"' not in same.html
    assert 'class="n worse"' not in same.html
    assert all(f'id="falls-{name}-' in same.html for name in ("before", "now"))  # from peak to MFU
    slow = player(PlayRequest(("cluster.slow=[{ranks = [0], speed = 0.5}]",), ()))
    assert re.search(r'step time</td>.*class="n worse">\+\d', slow.html)
    assert slow.html.count('class="gantt"') == 4  # each for a desk and for a phone
    double = player(PlayRequest(("strategy.micro_batch_size=128",), ()))
    assert re.search(r'step time</td>.*class="n ">\+\d', double.html)  # a longer step of more samples is not worse


def test_what_a_page_shows_closes_its_elements_and_asks_nobody(client):
    page = Page(client.get(f"/{TOKEN}/").text)
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    reply = Page(play(client, {"run.steps": "2"}, {})["html"])
    assert reply.open == []
    for name, value in page.attributes + reply.attributes:
        if name in {"src", "href", "xlink:href", "action"}:
            assert value.startswith(("#", "data:", "scenario.toml")), value


def test_a_form_holds_what_the_file_says_as_it_is_and_runs_none_of_it(made):
    from clustersim.app.report.pages import rendered

    texts = (HOSTILE, "node0/gpu0 -> node0/nvswitch*", "+- 1")
    loaded = scenario.load(SMALL, {"cluster.changes": [{"match": text, "remove": True} for text in texts]})
    hostile = scenario.from_table(override(loaded.table, loaded.changes), f"{HOSTILE.replace('/', '')}.toml")
    form = form_of(hostile, made)
    page = Page(rendered("explore.html.j2", name=hostile.name, sections=form.sections, nonce="n", palette=palette))
    assert "img" not in page.tags
    assert page.tags.count("script") == 1
    held = [value for name, value in page.attributes if name == "value" and value and "node0" in value]
    assert held == [toml_value(hostile.table["cluster"]["changes"])]
    assert "alert" not in told(f"$.cluster: {HOSTILE}").field


def test_a_change_is_what_run_prints_for_it_to_the_digit(client, clustersim):
    reply = play(client, {"strategy.bucket_cap_mb": "5", "run.steps": "5"}, {})
    words = shlex.split(reply["command"])
    assert words == ["clustersim", "run", SMALL, "--set", "strategy.bucket_cap_mb=5", "--set", "run.steps=5"]
    printed = json.loads(clustersim(*words[1:], "--json").stdout)
    assert reply["figures"] == {key: printed[key] for key in reply["figures"]}
    assert len(reply["figures"]) >= 10


def test_nobody_gets_in_without_the_token_or_by_another_name(client):
    assert client.get(f"/{TOKEN}/").status_code == 200
    for path in ("/", "/wrong/", f"/{TOKEN}x/", "/play", f"//{TOKEN}/"):
        assert client.get(path).status_code == 403, path
    for headers in ({"Host": "evil.example"}, {"Host": "127.0.0.1:1"}, {"Origin": "https://evil.example"}):
        assert client.get(f"/{TOKEN}/", headers=headers).status_code == 403, headers
        assert client.post(f"/{TOKEN}/play", headers=headers, json={}).status_code == 403, headers
    assert client.get(f"/{TOKEN}/../../etc/passwd").status_code in {403, 404}
    assert client.get(f"/{TOKEN}/scenario.toml/..%2f..%2fpyproject.toml").status_code == 404


def test_a_page_may_run_its_own_script_and_load_nothing(client):
    policy = client.get(f"/{TOKEN}/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]


def test_a_bad_field_is_told_in_the_usual_line_at_its_field(client):
    reply = play(client, {"cluster.nodes": "0"}, {})
    with pytest.raises(ScenarioError) as usual:
        scenario.load(SMALL, scenario.parse_overrides(["cluster.nodes=0"]))
    assert (reply["html"], reply["field"], reply["error"]) == ("", "cluster.nodes", str(usual.value))
    late = play(client, {"cluster.gpus_per_node": "9"}, {})  # which only the machine can tell
    assert (late["html"], late["field"]) == ("", "cluster.gpus_per_node")
    assert play(client, {"no.such": "1"}, {})["error"].startswith("no.such: is no field")


NO_CHANGE = (
    b"",
    b"[]",
    b"{}",
    b'{"now": 3, "before": null}',
    b'{"now": {"run.seed": 3}, "before": null}',
    b'{"now": {}, "before": null}' + b" " * 70_000,
    b"[" * 60_000,
)


@pytest.mark.parametrize("body", NO_CHANGE)
def test_what_is_no_change_is_refused(client, body):
    assert client.post(f"/{TOKEN}/play", content=body).status_code == 400


def test_a_scenario_can_be_taken_away(client):
    answer = client.get(f"/{TOKEN}/scenario.toml", params={"set": ["cluster.nodes=2", "run.steps=2"]})
    assert answer.headers["content-disposition"] == f'attachment; filename="{SMALL}.toml"'
    table = tomllib.loads(answer.text)
    assert (table["cluster"]["nodes"], table["run"]["steps"]) == (2, 2)
    assert client.get(f"/{TOKEN}/scenario.toml", params={"set": "model.hf_config=/etc/passwd"}).status_code == 400


def test_a_run_that_takes_long_is_given_up_for_the_next_change_and_at_its_limit():
    import asyncio

    long = PlayRequest(("run.steps=4000",))

    async def three():
        worker = RunWorker(SMALL, grace=0.2)
        await worker(PlayRequest())
        first = asyncio.create_task(worker(long))
        await asyncio.sleep(0.1)
        later = [asyncio.create_task(worker(PlayRequest((f"run.steps={steps}",)))) for steps in (2, 3)]
        replies = await asyncio.gather(first, *later)
        worker.close()
        return replies

    first, second, third = asyncio.run(three())
    assert first.error == "the run was stopped"
    assert second is None  # the third took its place before it began
    assert third.figures["step_time_s"] > 0
    limited = RunWorker(SMALL, longest=0.01)
    assert "takes more than" in asyncio.run(limited(long)).error
    limited.close()


def test_a_large_split_models_step_is_folded_and_the_page_says_so(monkeypatch):
    monkeypatch.setattr("clustersim.app.explore.runs.MANY", 100)
    player = RunPlayer("1f1b_gpt2_xl_1x8_a100")
    folded = player(PlayRequest(("run.jitter=0",)))
    whole = scenario.load("1f1b_gpt2_xl_1x8_a100", {"run.jitter": 0.0}).run()
    assert folded.figures["step_time_s"] == pytest.approx(whole.summary["step_time_s"], rel=1e-9)
    assert "its step was folded" in folded.html


def test_a_large_run_is_answered_without_jitter_first_and_with_it_when_asked(monkeypatch):
    monkeypatch.setattr("clustersim.app.explore.runs.MANY", 100)
    player = RunPlayer("1f1b_gpt2_xl_1x8_a100")
    first = player(PlayRequest())
    quiet = player(PlayRequest(("run.jitter=0",)))
    assert first.figures == quiet.figures
    assert "run.jitter = 0.0" in first.html
    varies = player(PlayRequest(("run.jitter=0.01",)))
    assert "A large run whose ranks vary" in varies.html
    assert varies.figures["step_time_s"] > first.figures["step_time_s"]


def test_without_the_extra_one_line_says_which_it_is_and_what_it_weighs(monkeypatch, made):
    import sys

    from clustersim.app.explore.server import serve

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ClusterSimError, match=r"pip install 'clustersim\[explore\]' \(5 MB\)"):
        serve(SMALL, made, 0, print)


def test_the_teachers_table_opens_every_lesson_with_a_shipped_scenario_and_a_knob_of_its_page(made):
    text = (ROOT / "notebooks" / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \|.*\| `(\w+)`: `([\w.]+)` \|$", text, re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == sorted(int(path.name[:2]) for path in NOTEBOOKS)
    for _, name, knob in rows:
        assert knob in form_of(scenario.load(name), made).known


def test_the_command_is_one_that_a_shell_reads_back():
    texts = ('cluster.changes=[{match = "node0/nic0", factor = 0.5}]', 'run.nccl_version="2.20"')
    words = shlex.split(command("my scenarios/x.toml", texts))
    assert words == ["clustersim", "run", "my scenarios/x.toml", "--set", texts[0], "--set", texts[1]]


@needs_browser
def test_in_a_browser_a_changed_field_changes_the_verdict_and_undo_brings_it_back(served, tmp_path):
    from devtools import Browser

    with Browser(tmp_path, width=390) as page:
        page.open(served)
        told = "document.querySelector('#answer:not(.busy) .verdict:not(.quiet)')?.textContent"
        first = page.until(told)
        set_field(page, "cluster.slow", "[{ranks = [3], speed = 0.5}]")
        page.until("document.querySelectorAll('#history li').length === 2")
        slow = page.until(told)
        assert slow != first
        assert "rank 3 is slow" in slow
        assert page.run("document.querySelector('.verdict.quiet').textContent") == first
        assert page.run("document.documentElement.scrollWidth") == 390
        assert page.run(OFF_SCREEN.format(root="document")) == 0
        set_field(page, "cluster.slow", "[{ranks = [3]}]")
        wrong = page.until("[...document.querySelectorAll('.wrong:not([hidden])')].map(e => e.textContent).join('|')")
        assert "missing required field" in wrong or "missing field" in wrong
        assert page.run(told) == slow  # nothing else changes
        page.run("document.getElementById('undo').click()")
        page.until(f"{told} === {json.dumps(first)}")
        assert page.run("document.querySelector('[name=\"cluster.slow\"]').value") == ""
        assert page.console == []


def set_field(page, name, text):
    """Write into a field as a hand does."""
    page.run(f"""(() => {{
        const field = document.querySelector('[name="{name}"]');
        field.closest("details").open = true;
        field.value = {json.dumps(text)};
        field.dispatchEvent(new Event("input", {{ bubbles: true }}));
    }})()""")


@pytest.fixture
def served():
    """The address of a page that ``clustersim explore`` serves."""
    pytest.importorskip("uvicorn", reason="explore needs uvicorn")
    import subprocess
    import sys

    command = [sys.executable, "-m", "clustersim", "explore", SMALL, "--no-browser"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout.readline().split()[0]
        process.terminate()
