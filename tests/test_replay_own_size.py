"""Replay of a larger run: the trace's own size is simulated too, for how far the model is off where it was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from clustersim.app.cli import cli

TRACES = Path(__file__).parent / "data" / "traces"
GLOO = TRACES / "gloo_2_ranks"
PAIR = TRACES / "gloo_1_2"


def test_a_larger_run_stands_beside_the_traces_own_size_simulated_too():
    """Twelve ranks simulated stood beside three measured as "difference -62 %", and all of that was the model's error:
    what can be compared is simulated with simulated, and how far the model is off is told where it was measured."""
    arguments = [str(PAIR / "two"), "--topology", "cpu-gloo"]
    own = json.loads(CliRunner().invoke(cli, ["replay", *arguments, "--json"]).stdout)
    scaled = json.loads(CliRunner().invoke(cli, ["replay", *arguments, "--scale", "dp=8", "--json"]).stdout)
    assert (scaled["measured_ranks"], scaled["ranks"]) == (2, 8)
    assert scaled["at_own_size"]["predicted_step_s"] == pytest.approx(own["predicted_step_s"])
    ratio = own["predicted_step_s"] / own["measured_step_s"]
    assert scaled["at_own_size"]["predicted_over_measured"] == pytest.approx(ratio)
    (row,) = scaled["collectives"]
    assert (row["group_size"], row["ranks_played"]) == (2, 8)
    text = " ".join(CliRunner().invoke(cli, ["replay", *arguments, "--scale", "dp=8"]).output.split())
    change = scaled["predicted_step_s"] / own["predicted_step_s"]
    assert "at the trace's own size (2 ranks)" in text
    assert f"measured: {ratio:.2f} x; 8 ranks: {change:.2f} x of that, both simulated" in text
    assert "difference" not in text
    assert "at the trace's own size" not in CliRunner().invoke(cli, ["replay", *arguments]).output


def test_a_model_that_is_far_off_at_the_traces_own_size_is_warned_of():
    arguments = ["replay", str(GLOO), "--topology", "cpu-gloo", "--scale", "dp=8"]
    answer = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    assert answer["at_own_size"]["predicted_over_measured"] < 0.9
    assert "is no time to plan with" in " ".join(CliRunner().invoke(cli, arguments).output.split())


def test_a_trace_whose_own_size_does_not_fit_the_machine_is_told_so(shared: Path):
    """Three GPUs of each of eight machines are a larger run; eight ranks on one machine of four are not."""
    files = str(shared / "measurements" / "traces" / "dlrm_8xv100_kineto")
    arguments = ["replay", files, "--topology", "hgx-v100-4gpu-10g", "--nodes", "8", "--scale", "dp=24"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert "how far the model is off is not known: the trace's own 8 ranks were not played here" in " ".join(
        done.output.split()
    )


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ([], "the larger job's 8 ranks are joined by no network"),
        (["--topology", "cpu-gloo", "--nodes", "1"], "8 ranks are on 1 node(s) of cpu-gloo, 8 on each: all inside it"),
        (["--topology", "cpu-gloo", "--nodes", "4"], "4 node(s) of cpu-gloo, 2 on each, joined by the network of that"),
    ],
)
def test_a_larger_job_says_what_network_joins_it(machine, words):
    """A trace of one node says nothing of the network that more nodes are joined by; nor did the answer."""
    arguments = ["replay", str(PAIR / "two"), *machine]
    notes = json.loads(CliRunner().invoke(cli, [*arguments, "--scale", "dp=8", "--json"]).stdout)["notes"]
    assert sum(words in note for note in notes) == 1
    if not machine:
        own = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)["notes"]
        assert not any("larger job" in note for note in own)
