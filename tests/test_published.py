"""A scenario that cites a figure of its source has it as a field, and a run says how far it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from clustersim import scenario
from clustersim.core.errors import ScenarioError
from clustersim.scenario.result.trust import trust
from clustersim.studies.what_if.folded import folded

FOLDER = Path(__file__).parents[1] / "scenarios"
SHIPPED = [path for path in FOLDER.glob("*.toml") if not path.name.startswith(("plan_", "sweep_"))]
A_FIGURE = re.compile(r"[\d.,]+ ?(% MFU|GPU hours|s a step|tokens a second)|MFU of \d|has [\d.]+ %")
A_SOURCE = re.compile(r"arXiv|README|the paper|the report", re.IGNORECASE)


def published():
    files = {path.stem: path for path in SHIPPED}
    return {name: scenario.load(path) for name, path in files.items() if "[published]" in path.read_text()}


def test_a_figure_in_a_comment_beside_a_source_is_a_field():
    """A number in a comment is checked by nobody: of a published run it is in [published], with its source."""
    for path in SHIPPED:
        comments = " ".join(line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("#"))
        if A_FIGURE.search(comments) and A_SOURCE.search(comments):
            assert "[published]" in path.read_text(), path.name


def test_what_is_published_has_its_source_and_what_differs():
    cases = published()
    assert len(cases) >= 4
    for name, case in cases.items():
        row = case.file.published
        assert re.search(r"arXiv \d{4}\.\d{5}|README", row.source), name
        assert row.differs, name


def test_a_run_says_how_far_its_source_is_and_a_changed_one_does_not():
    name = "lora_qwen_7b_1x1_a100"
    result = scenario.load(name).run()
    (line,) = [note for note in result.notes if note.startswith("published")]
    real, simulated = float(result.scenario.file.published.step_time), result.summary["step_time_s"]
    assert f"{abs(real / simulated - 1):.0%} {'longer' if real > simulated else 'shorter'}" in line
    assert abs(real / simulated - 1) <= trust(result.prepared).p90
    changed = scenario.load(name, {"strategy.gradient_accumulation_steps": 1}).run()
    assert not any(note.startswith("published") for note in changed.notes)


def test_the_arrangement_of_the_llama_3_report_is_within_15_percent_of_it():
    """Plain 1F1B had 28.6 % of 41. All 128 replicas at one pace, folded: gradients go round as many as there."""
    made = scenario.load("tp8_pp16_vpp8_llama3_405b_32x8_h100", {"cluster.nodes": 2048, "run.jitter": 0.0})
    real = made.file.published.mfu
    prepared = made.prepare()
    work = prepared.model.flops_per_sample() * 16 * 128 / 16384
    mfu = work / (folded(made).step_time_s * prepared.device.peak["bf16"])
    assert abs(mfu / real - 1) < 0.15, mfu


def test_a_field_without_a_figure_is_refused():
    with pytest.raises(ScenarioError, match="write what the source says"):
        scenario.load("lora_qwen_7b_1x1_a100", {"published": {"source": "nobody"}})
