"""A plan that names a campaign: days and cost of its front with failures, and what of their differences is failure."""

from __future__ import annotations

import copy
import json
import re

import pytest
from click.testing import CliRunner
from msgspec import UNSET, structs

from clustersim.app.cli import cli
from clustersim.app.report.plan import plan_page
from clustersim.core.errors import ScenarioError
from clustersim.studies import plan as planner

PLAN = {
    "title": "small",
    "model": {"name": "gpt2-xl", "seq_len": 1024, "dtype": "bf16"},
    "machines": [{"topology": "hgx-h100", "nodes": [2, 4], "usd_per_gpu_hour": 2.0}],
    "batch": {"samples": 128},
    "limits": {"tokens": 3e11, "deadline": "6.9 d"},
    "try": {
        "micro_batch_size": [4],
        "activation_checkpointing": ["none"],
        "strategies": [{"kind": "fsdp", "param_dtype": "bf16"}],
    },
}
CAMPAIGN = {
    "failures": "rsc1",
    "factor": 1000,
    "recovery": {"policy": "replace", "restart": "10 min"},
    "checkpoints": [{"every": "best"}],
    "storage": {"write": "1 GB/s", "read": "2 GB/s"},
}


def table(**changes):
    return copy.deepcopy(PLAN) | {"campaign": CAMPAIGN | changes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def said(folder):
    return planner.plan(planner.from_table(table()), folder, jobs=1)


def test_days_and_cost_of_the_front_are_percentiles_with_failures(said):
    assert len(said.front) == 2
    for row in said.front:
        one = row.campaign
        assert (row.days, row.usd) == (one.days.p50, one.usd.p50)  # the answer's own figures count failures
        assert one.ideal_days < one.days.p5 <= one.days.p50 <= one.days.p95
        assert one.usd.p50 == pytest.approx(2.0 * row.gpus * 24 * row.days, rel=1e-6)
        assert one.ideal_days == pytest.approx(3e11 / row.rate / 86400, rel=0.01)
        assert one.goodput == pytest.approx(one.ideal_days / one.days.p50, rel=0.01)
    first, second = (row.campaign.in_time for row in said.front)
    assert first > 0.9 > 0.1 > second  # both keep the deadline by their steps alone


def test_the_answer_says_how_much_of_a_difference_is_failure(said):
    whole, steps, failures = (float(x) for x in re.findall(r"([+-][\d.]+)(?= days| by)", said.failures[0]))
    first, second = (row.campaign for row in said.front)
    assert whole == pytest.approx(steps + failures, abs=0.11)
    assert whole == pytest.approx(second.days.p50 - first.days.p50, abs=0.06)
    assert failures != 0


def test_without_failures_and_saves_the_days_are_those_of_the_steps(folder):
    free = table(factor=0, checkpoints=[{"every": "1 d", "stall": "0 s", "load": "0 s"}])
    for row in planner.plan(planner.from_table(free), folder, jobs=1).front:
        assert row.campaign.days.p95 == row.campaign.days.p5
        assert row.campaign.days.p50 == pytest.approx(row.campaign.ideal_days)


def test_a_plan_without_a_campaign_is_the_plan_it_was(said, folder):
    plain = planner.plan(planner.from_table(PLAN), folder, jobs=1)
    assert plain.failures is UNSET
    assert "failures" not in json.loads((folder / "plan.json").read_text())
    of_steps = {row.option: {"days": row.days, "usd": row.usd, "usd_per_1e9": row.usd_per_1e9} for row in plain.front}
    assert [structs.replace(row, campaign=UNSET, **of_steps[row.option]) for row in said.front] == plain.front


def test_an_option_whose_campaign_cannot_be_is_an_answer(folder):
    for recovery, told in (
        ({"policy": "replace", "restart": "30 d"}, "does not finish"),
        ({"policy": "drop_replica"}, "keep one copy of the optimizer states"),
    ):
        found = planner.plan(planner.from_table(table(recovery=recovery)), folder, jobs=1)
        assert all(told in row.campaign.wrong for row in found.front)
        assert len(found.failures) == len(found.front)


def test_the_command_and_the_page_say_it(said, folder, tmp_path):
    assert "failures" in {section.id for section in plan_page(said).sections}
    path = tmp_path / "plan.toml"
    path.write_text("\n".join(_toml(table())))
    done = CliRunner().invoke(cli, ["plan", str(path), "--out", str(folder), "--jobs", "1"])
    assert done.exit_code == 0, done.output
    assert "with failures" in done.output
    assert json.loads((folder / "plan.json").read_text())["failures"] == said.failures


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"failures": "rsc-1"}, "did you mean 'rsc1'?"),
        ({"factor": "much"}, "$.campaign.factor"),
        ({"recovery": {"policy": "hope"}}, "$.campaign.recovery.policy"),
    ],
)
def test_a_wrong_campaign_is_told_before_anything_is_simulated(changes, told, tmp_path):
    with pytest.raises(ScenarioError, match=re.escape(told)):
        planner.plan(planner.from_table(table(**changes)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _toml(of, at=""):
    """A table as TOML: enough for this one."""
    yield from (f"{key} = {_value(value)}" for key, value in of.items() if not isinstance(value, dict))
    for key, value in of.items():
        if isinstance(value, dict):
            yield f"[{at}{key}]"
            yield from _toml(value, f"{at}{key}.")


def _value(value):
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_value(one)}' for key, one in value.items())}}}"
    return json.dumps(value)


def test_the_verdict_says_days_and_money_with_failures(said):
    best = said.front[0]
    assert f"{best.days:,.1f} days, {best.usd:,.0f} USD" in said.verdict
    assert best.usd > 1.05 * best.campaign.ideal_days * 24 * best.gpus * 2.0
