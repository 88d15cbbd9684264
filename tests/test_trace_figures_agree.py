"""One trace has one figure of each name, whichever command tells it; servers are in no mean of GPUs."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from clustersim import load
from clustersim.app.cli import cli
from clustersim.app.report.content import page
from clustersim.core.units import format_time

DATA = Path(__file__).parent / "data/traces"
SHARED = Path(__file__).parents[2] / "shared/measurements/traces"
TRACES = {
    "one step": SHARED / "dlrm_8xv100_kineto",
    "a warm-up": SHARED / "dlrm_v100_kineto",
    "many steps": DATA / "gloo_1_2/two",
    "no steps": DATA / "gloo_2_ranks",
    "one rank of two": DATA / "gloo_2_ranks/rank1.json.gz",
}


def call(*words):
    done = CliRunner(env={"COLUMNS": "400"}).invoke(cli, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def flat(text):
    text = re.sub(r"(?s)<(script|style|svg)\b.*?</\1>", "|", text)
    return re.sub(r"(\s*\|\s*)+", " | ", html.unescape(re.sub(r"<[^>]+>", "|", text))).replace("\u00a0", " ")


@pytest.fixture(scope="module", params=TRACES)
def told(request, tmp_path_factory):
    """Name, and what each command says of a trace."""
    path = TRACES[request.param]
    if not path.exists():
        pytest.skip("the trace is not here")
    out = tmp_path_factory.mktemp("told") / "page.html"
    call("report", path, "-o", out)
    return request.param, {
        "trace": call("trace", path),
        "explain": call("explain", path),
        "page": flat(out.read_text()),
        "trace --json": json.loads(call("trace", path, "--json")),
        "replay --json": json.loads(call("replay", path, "--json")),
        "explain --json": json.loads(call("explain", path, "--json")),
    }


def test_shares_are_of_one_window(told):
    """Of a trace whose ranks were recorded for parts of it, a share was of those parts in one place."""
    _, places = told
    digest = places["trace --json"]
    totals = {name: measured for name, (measured, _) in places["replay --json"]["totals"].items()}
    window = digest["window_s"]
    assert totals["window_s"] == pytest.approx(window)
    steps = max(len(digest["steady_steps"]), 1)
    for word, share in (
        ("waiting for a peer", "waiting_for_peer_share"),
        ("exposed transfer", "exposed_transfer_share"),
    ):
        mean = float(np.mean(digest[share]))
        printed = [
            re.search(rf"where the time goes:.*?{word} ([\d.]+)%", places["explain"]),
            re.search(rf"\| {word} \| ([\d.]+)% \| [\d.]+ \w+ \|", places["page"]),
            re.search(rf"\| {word} \| ([\d.]+)% \|", places["page"]),
        ]
        for match in printed:
            assert float(match[1] if match else 0.0) == pytest.approx(100 * mean, abs=0.06 if match else 0.5)
        row = re.search(rf"\| {word} \| [\d.]+% \| ([\d.]+ \w+) \|", places["page"])
        assert row is None or row[1] == format_time(mean * window / steps)
    beside = sum(np.mean(digest[name]) for name in ("waiting_for_peer_share", "exposed_transfer_share"))
    assert beside * window == pytest.approx(totals["exposed_communication_s"])
    for share, seconds in (("compute_share", "compute_s"), ("peer_wait_share", "peer_wait_s")):
        assert np.mean(digest[share]) * window == pytest.approx(totals[seconds])


def test_a_cause_costs_a_share_of_the_step_that_is_told(told):
    _, places = told
    step = places["trace --json"]["step_time_s"] or places["trace --json"]["window_s"]
    lengths = re.findall(r"Cost: .*? of (?:every|a) ([\d.]+ \w+) (?:step|window)", places["explain"])
    assert lengths
    assert set(lengths) == {format_time(step)}
    stalls = places["explain --json"]["stalls"]
    assert stalls["share"] == pytest.approx([cost / step for cost in stalls["cost_s"]])


def test_a_trace_without_steps_has_a_window_and_no_step(told):
    name, places = told
    without = name in {"no steps", "one rank of two"}
    for place in ("explain", "page"):
        assert bool(re.search(r"\bstep time\b|\ba step\b|\bms step\b", places[place])) != without
    assert ("| first span to last |" in places["page"]) == without
    assert ("step time" in places["trace"]) != without


def test_the_last_rank_is_one_rank(told):
    _, places = told
    last = re.search(r"(rank \d+) is the last to (\d+ of \d+)", places["trace"])
    if last:
        assert f"{last[1]} is the last to {last[2]}" in places["explain"]
        if "| Ranks 0, 1. |" in places["page"]:  # both are drawn, and neither was chosen
            assert f"{last[1]} is the last to {last[2]}" in places["page"]
        else:
            assert re.search(rf"Ranks [^|]*{last[1][5:]} \(last to most collectives", places["page"])
        assert "slowest)" not in places["page"]


def test_no_key_and_no_idle_idle_on_the_page(told):
    _, places = told
    assert not re.search(r"waiting_? ?\|? ?for_|idle \| idle", places["page"])
    share = places["trace --json"]["waiting_for_launch_share"]
    if share is not None:
        assert f"waiting for launches | {share:.1%}" in places["page"]


def test_servers_are_in_no_mean_on_the_page_of_a_parameter_server():
    result = load("why_parameter_server").run()
    text = flat(page(result.saved))
    figures = result.summary
    for word, key in (("exposed transfer", "exposed_transfer_s"), ("waiting for a peer", "waiting_for_peer_s")):
        row = re.search(rf"\| {word} \| ([\d.]+)% \| ([\d.]+ \w+) \|", text)
        assert row[2] == format_time(figures[key])
        assert float(row[1]) == pytest.approx(100 * figures[key] / figures["step_time_s"], abs=0.06)
    assert "Not in these means, the server, rank 8, of a step: " in text


def test_a_warm_up_is_left_out_of_shares_and_told():
    path = SHARED / "dlrm_v100_kineto"
    if not path.exists():
        pytest.skip("the trace is not in ../shared")
    assert "shares are of the other steps: step(s) 1009 left out: warm-up, or begun before the first span" in call(
        "trace", path
    )
    digest = json.loads(call("trace", path, "--json"))
    assert digest["window_s"] < 0.8 * digest["whole_s"]


def test_a_comparison_of_traces_without_steps_has_none():
    both = call("compare", TRACES["no steps"], TRACES["one rank of two"])
    assert "the window from first span to last takes 71.29 ms in A and " in both
    assert "a step" not in both
    mixed = call("compare", TRACES["no steps"], TRACES["many steps"])
    assert "a step takes 71.29 ms in A and " in mixed
    assert "A has no steps: from its first span to its last counts as one" in mixed
