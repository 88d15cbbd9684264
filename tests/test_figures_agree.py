"""One run has one figure of each name, wherever it is named: every output of one case is read and compared."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from clustersim import load
from clustersim.app.cli import cli
from clustersim.app.explore.runs import PlayRequest, RunPlayer
from clustersim.core.figures import FIGURES

MODEL = 'name = "gpt2"\nseq_len = 512\ndtype = "bf16"\nimplementation = "fused"\n'
STRATEGY = 'kind = "ddp"\nparam_dtype = "bf16"\n'
RUN = '[run]\nsteps = 2\njitter = 0.0\noptimizer = "adamw"\noptimizer_impl = "fused"\n'
CASE = f"""[cluster]
topology = "hgx-a100"
nodes = 1
[model]
{MODEL}[parallel]
tp = 2
pp = 2
global_batch_size = 16
[strategy]
{STRATEGY}micro_batch_size = 2
{RUN}"""
FULLEST = "1"
"""The stage of the case that holds most, in the table of stages."""
EAGER = CASE.replace('implementation = "fused"', 'implementation = "eager"').replace("jitter = 0.0\n", "")
"""A pipeline that hosts hold up, whose ranks differ."""
SLOW_NIC = f"""[cluster]
topology = "nic.toml"
nodes = 2
[model]
{MODEL}[strategy]
kind = "fsdp"
version = 2
param_dtype = "bf16"
micro_batch_size = 2
{RUN}"""
NIC = 'name = "nic"\nextends = "hgx-a100"\n[[changes]]\nmatch = "node1/nic0"\nfactor = 0.3\nsource = "planted"\n'
PLAN = f"""title = "small"
[model]
{MODEL}[[machines]]
topology = "hgx-a100"
nodes = [1]
usd_per_gpu_hour = 2.0
[batch]
samples = 16
[try]
micro_batch_size = [1, 2]
activation_checkpointing = ["none"]
[try.parallel]
tp = 2
pp = 2
[[try.strategies]]
{STRATEGY}{RUN}"""
SWEEP = 'base = "case.toml"\n[[axes]]\nkey = "strategy.micro_batch_size"\nvalues = [2]\n'
CASE_ROW = re.compile("micro-batch 2|^2$|^all$")
"""First cells of rows that are of the case: its option, its size in the sweep, all stages."""

SIZES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "%": 0.01, "": 1.0}
SIZES |= {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
NUMBER = r"[-−]?([\d,]+(?:\.\d+)?)[ \u00a0]?(us|ms|s|min|%|B|KiB|MiB|GiB)?(?![\w.])"
NAMES = {name: figure.key for figure in FIGURES for name in (figure.label, figure.column)}
NAMES |= {"peak memory": "peak_memory_bytes", "±": "trust", "+-": "trust"}
GIBIBYTES = {"total": "peak_memory_bytes"}
"""The head of what each stage holds, of which the fullest comes first."""
PLAN_KEYS = {"step_s": "step_time_s", "rate": "tokens_per_s", "mfu": "mfu", "error": "trust"}
BESIDE = "|".join(sorted(map(re.escape, NAMES), key=len, reverse=True))
NAMED = re.compile(rf"(?:^|[|,:;(])[ \n]*({BESIDE}):? *[| ] *{NUMBER}(?: *\| *{NUMBER})?", re.MULTILINE)
SENTENCES = {
    "step_time_s": r"(?:of a|of every|of|now:) ([\d.]+) (ms) (?:a )?step|\): ([\d.]+) (ms) a step|now: ([\d.]+) (ms)",
    "samples_per_s": rf"{NUMBER} samples per second",
    "tokens_per_s": rf"{NUMBER} tokens/s",
    "mfu": rf"(?:at {NUMBER} of peak)|(?:From peak to MFU *\| *now: {NUMBER})",
    "trust": rf"(?:trust: |tokens/s )(?:\+-|±){NUMBER}",
}
"""Figures that a sentence names in other words than their label."""


def is_time(key):
    return key.endswith("_s") and "per" not in key.replace("peer", "")


def rows_of(text):
    """Rows of every table, as cells."""
    if "</" in text:
        for row in re.findall(r"(?s)<tr.*?</tr>", text):
            yield [flat(cell).strip() for cell in re.findall(r"(?s)<t[hd].*?</t[hd]>", row)]
    for line in text.splitlines():
        if line[:1] in "│┃":
            yield [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]


def flat(text):
    """A page's words, what is in an element of its own between bars; the text of a terminal as it is."""
    if "</" not in text:
        return re.sub("[│┃]", "|", text)
    text = re.sub(r"(?s)<(script|style|svg)\b.*?</\1>", "|", text)
    return re.sub(r"(\s*\|\s*)+", " | ", html.unescape(re.sub(r"<[^>]+>", "|", text))).strip(" |")


def in_columns(text):
    """(key, number, unit) of the case's rows under heads that are names of figures."""
    head = []
    for cells in rows_of(text):
        if any(cell in NAMES or cell in GIBIBYTES for cell in cells[1:]):
            head = cells
        elif (
            cells
            and len(cells) == len(head)
            and (CASE_ROW.search(cells[0]) or (cells[0] == FULLEST and "total" in head))
        ):
            for name, cell in zip(head[1:], cells[1:], strict=True):
                match = re.fullmatch(NUMBER, cell)
                if match and name in NAMES | GIBIBYTES:
                    key = (NAMES | GIBIBYTES)[name]
                    yield key, match[1], match[2] or ("GiB" if name in GIBIBYTES else "%" if is_time(key) else "")


def readings(text):
    """(key, number as printed, unit) of every figure that a text or a page names."""
    yield from in_columns(text)
    words = flat(text)
    for match in NAMED.finditer(words):
        for number, unit in ((match[2], match[3]), (match[4], match[5])):
            if number and (unit or "per_s" in NAMES[match[1]]):
                yield NAMES[match[1]], number, unit or ""
    for key, pattern in SENTENCES.items():
        for match in re.finditer(pattern, words):
            number, *unit = filter(None, match.groups())
            yield key, number, unit[0] if unit else ""


def differing(place, found, true):
    """What a place says of a figure that is not the run's, within half of the last digit printed."""
    for key, number, unit in found:
        decimals = len(number.partition(".")[2])
        expected = true[key] / true["step_time_s"] if is_time(key) and unit == "%" else true[key]
        value = float(number.replace(",", "")) * SIZES[unit]
        half = 0.0 if (number, unit) == ("0", "s") else 0.5001 * 10**-decimals * SIZES[unit]  # "0 s" is rounded by none
        if abs(value - expected) > half:
            yield f"{place}: {key} is {number} {unit}, of the run {expected:.6g}"


def in_json(value):
    """(key, value) of every figure in a JSON document, at any depth; not those of single ranks and stages."""
    if isinstance(value, list):
        for item in value:
            yield from in_json(item)
    for key, inner in value.items() if isinstance(value, dict) and value.get("stage", -1) < 0 else ():
        if key in NAMES.values() and isinstance(inner, float | int):
            yield key, inner
        elif key != "per_rank" and key != "dimensions":
            yield from in_json(inner)


def call(*words):
    done = CliRunner(env={"COLUMNS": "400"}).invoke(cli, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """What every place says of the case, by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("agree"))
        for name, text in (("case.toml", CASE), ("plan.toml", PLAN), ("sweep.toml", SWEEP)):
            Path(name).write_text(text)
        shown = {
            "run": call("run", "case.toml", "--out", "run"),
            "run --json": Path("run/result.json").read_text(),
            "explain": call("explain", "run"),
            "explain --json": call("explain", "run", "--json"),
            "memory": call("memory", "case.toml"),
            "plan": call("plan", "plan.toml", "--out", "plan", "--jobs", "1", "--report", "plan.html"),
            "plan --json": Path("plan/plan.json").read_text(),
            "sweep": call("sweep", "sweep.toml", "--out", "sweep", "--jobs", "1", "--report", "sweep.html"),
            "explore": RunPlayer("case.toml")(PlayRequest()).html,
        }
        call("report", "run", "-o", "run.html")
        pages = {f"page of {kind}": Path(f"{kind}.html").read_text() for kind in ("run", "plan", "sweep")}
        result = load("case.toml").run().to_dict()
        tokens = result["tokens_per_s_per_gpu"] * result["gpus"]
        return shown | pages, result | {"trust": result["trust"]["p50"], "tokens_per_s": tokens}


LEAST = {
    "run": 15,
    "explain": 10,
    "memory": 1,
    "plan": 3,
    "sweep": 5,
    "explore": 12,
    "page of run": 12,
    "page of plan": 3,
    "page of sweep": 5,
}
"""How many figures each place names at least."""


@pytest.mark.parametrize("place", LEAST)
def test_a_place_says_the_run_s_figures(places, place):
    shown, true = places
    found = list(readings(shown[place]))
    assert list(differing(place, found, true)) == []
    assert len(found) >= LEAST[place]


@pytest.mark.parametrize("place", ["run --json", "explain --json"])
def test_a_document_has_the_run_s_figures(places, place):
    shown, true = places
    found = list(in_json(json.loads(shown[place])))
    assert [(key, value, true[key]) for key, value in found if value != pytest.approx(true[key], rel=1e-9)] == []
    assert len(found) >= len(FIGURES) - 1


def test_a_plan_s_document_has_the_figures_of_the_option_s_run(places):
    shown, true = places
    best = json.loads(shown["plan --json"])["front"][0]
    found = {key: best[name] for name, key in PLAN_KEYS.items()}
    assert found == pytest.approx({key: true[key] for key in found}, rel=1e-9)
    assert max(best["stage_bytes"]) == pytest.approx(true["peak_memory_bytes"], rel=1e-9)


@pytest.mark.parametrize("place", LEAST)
def test_a_changed_figure_is_seen(places, place):
    """Every figure that is read from a place, told otherwise, is what differs there."""
    shown, true = places
    for key in {key for key, _, _ in readings(shown[place])}:
        wrong = list(differing(place, readings(shown[place]), true | {key: true[key] * 1.5 + 0.1}))
        assert any(f"{place}: {key} is" in line for line in wrong)


@pytest.mark.parametrize("place", ["run", "explain", "sweep", "explore", "page of run", "page of sweep"])
def test_a_changed_text_is_seen(places, place):
    """A step time that one place has otherwise is told with the place's name."""
    shown, true = places
    step = next(figure for figure in FIGURES if figure.key == "step_time_s").text(true["step_time_s"])
    other = shown[place].replace(step, "987.6 ms").replace(step.replace(" ", "\u00a0"), "987.6 ms")
    wrong = list(differing(place, readings(other), true))
    assert any(line.startswith(f"{place}: step_time_s is 987.6 ms") for line in wrong)


def test_the_host_s_share_is_one_in_explain_and_on_the_page(places):
    shown, _ = places
    told = re.search(r"where the time goes:.*?\bhost ([\d.]+)%", shown["explain"])[1]
    assert told == re.search(r"(?m)^ +host +-([\d.]+)", shown["explain"])[1]
    assert told == re.search(r"host \| ([\d.]+)% \|", flat(shown["page of run"]))[1]


@pytest.fixture(scope="module", params=[EAGER, SLOW_NIC], ids=["pipeline", "slow NIC"])
def other(request, tmp_path_factory):
    """What the places of one run say of another case, its figures and its stage table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("other"))
        Path("nic.toml").write_text(NIC)
        Path("case.toml").write_text(request.param)
        shown = {
            "run": call("run", "case.toml", "--out", "run"),
            "explain": call("explain", "run"),
        }
        call("report", "run", "-o", "run.html")
        result = json.loads(Path("run/result.json").read_text())
        tokens = result["tokens_per_s_per_gpu"] * result["gpus"]
        true = result | {"trust": result["trust"]["p50"], "tokens_per_s": tokens}
        return shown | {"page of run": Path("run.html").read_text()}, true


def test_places_say_the_figures_of_other_cases(other):
    shown, true = other
    assert [line for place, text in shown.items() for line in differing(place, readings(text), true)] == []


def states(text):
    """Share [%] of the step by state, as the page's table has it."""
    return {cells[0]: float(cells[1][:-1]) for cells in rows_of(text) if len(cells) == 4 and cells[1].endswith("%")}


def test_what_computes_is_one_in_the_table_the_page_and_the_stages(other):
    """Loading a batch held the compute stream and was computing in the run's figure, the host's on the page."""
    shown, true = other
    shares = states(shown["page of run"])
    compute = 100 * true["compute_s"] / true["step_time_s"]
    kernels = ("compute-bound", "memory-bound", "launch-bound", "recomputation", "optimizer")
    assert sum(shares.get(name, 0.0) for name in kernels) == pytest.approx(compute, abs=0.3)
    assert shares["host"] == pytest.approx(100 * true["idle_s"] / true["step_time_s"], abs=0.1)
    assert sum(true["phase_shares"].values()) == pytest.approx(1.0)
    for row in true.get("where", []):
        if row["stage"] < 0:
            assert row["compute_s"] == pytest.approx(true["compute_s"])
            assert row["other_s"] == pytest.approx(true["idle_s"])


def test_a_pass_that_is_launch_bound_is_not_called_the_time_of_launches(other):
    """Launches are a state of kernels, of which a pass that is bound by them is another number: with another name."""
    shown, _ = other
    causes = re.findall(r"(?m)^ *\d+\. (Launch-bound[^:]*):", shown["explain"])
    assert set(causes) <= {"Launch-bound passes"}


RATES = re.compile(
    r"(\S.*?) limit '[^']+': kernels sustain ([\d.]+) (\S+) of payload where the links would let ([\d.]+) (\S+)"
)


def test_what_limits_a_transfer_is_what_its_two_rates_say(other):
    """Of 383.2 GB/s beside 385.1 GB/s one was called the limit and the other not."""
    shown, _ = other
    for text in shown.values():
        for who, kernels, unit, links, other_unit in RATES.findall(flat(text)):
            near = unit == other_unit and float(kernels) > 0.97 * float(links)
            assert who.endswith(
                "Communication kernels and links alike" if near else "Communication kernels, not links,"
            )


@pytest.mark.parametrize(("ceiling", "words"), [(383.2e9, "and links alike limit"), (206.4e9, ", not links, limit")])
def test_a_rate_just_below_the_links_is_no_limit_of_its_own(ceiling, words, monkeypatch):
    from types import SimpleNamespace

    from clustersim.explain import sentences

    monkeypatch.setattr(
        sentences, "_moving", lambda causes, charge: (0, SimpleNamespace(ceiling=ceiling, alone=385.1e9))
    )
    monkeypatch.setattr(sentences, "op_quoted", lambda causes, op: "'all_gather'")
    monkeypatch.setattr(sentences, "_exposed", lambda causes, charge: "rank 1 waits")
    assert words in sentences.limited_by_kernels(None, SimpleNamespace(op=0))


def test_a_plan_names_the_memory_risk_of_its_choice_as_its_rows_do(places):
    shown, _ = places
    answer = json.loads(shown["plan --json"])
    risk = re.search(r"\(likelihood of running out (\d+%)\)", answer["front"][0]["fit"])
    told = re.search(r"\(likelihood of running out (\d+%)\)", answer["verdict"].split(". ")[0])
    assert bool(told) == bool(risk and int(risk[1][:-1]) >= 25)
    assert answer["verdict"].startswith("Take 8 GPUs")
