"""``clustersim describe``: repetitions are folded, and --json says the same in values."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim import scenario
from clustersim.app.cli.folding import folded

PIPELINE = "1f1b_gpt2_xl_1x8_a100"
AGAIN = re.compile(r"\.\.\. ops? (\d+)(?: to (\d+))?, (\d+) more times?, to op (\d+)")


def listed(sizes):
    """An op list of micro-batches, each with so many equal layers; every op waits for the one before."""
    ops = [f"{kind} layers.{i}  {size} ms" for size in sizes for kind in ("fwd", "bwd") for i in range(size)]
    return [f"{i:5d}  compute  {op}{f'  after {i - 1}' if i else ''}" for i, op in enumerate(ops)]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_every_op_is_printed_or_counted_as_a_repetition_of_one_that_is(sizes):
    lines = listed(sizes)
    covered = set()
    for text in folded(lines):
        again = AGAIN.search(text)
        if again is None:
            assert text in lines
            covered.add(int(text.split()[0]))
            continue
        first, last, times, end = (int(number or again[1]) for number in again.groups())
        assert end - last == times * (last - first + 1)
        covered |= set(range(last + 1, end + 1))
    assert covered == set(range(len(lines)))


def test_layers_and_micro_batches_are_folded_one_in_the_other():
    text = folded(listed([5] * 12))
    assert len(text) <= 10
    assert AGAIN.search(text[-1])[4] == str(2 * 5 * 12 - 1)


def test_a_list_without_repetitions_stays_as_it_is():
    lines = [f"{i:5d}  compute  fwd layers.0  {i} ms" for i in range(9)]
    assert folded(lines) == lines


def test_a_long_list_without_repetitions_is_not_walked_once_for_every_size(monkeypatch):
    lines = [f"{i:5}  compute  op number {i * i}  1 ms" for i in range(3000)]
    monkeypatch.setattr("clustersim.app.cli.folding._fold", lambda *_: pytest.fail("walked"))
    assert folded(lines) == lines


def test_a_pipeline_rank_is_described_in_a_screenful_and_whole_on_request(clustersim):
    short, whole = (clustersim("describe", PIPELINE, *more).stdout.splitlines() for more in ((), ("--all",)))
    assert len(short) < 150 < 1000 < len(whole)
    assert short[:12] == whole[:12]


def test_a_long_program_is_shown_by_its_begin_and_end(clustersim):
    """Interleaved chunks of 80 layers: no two passes of a rank are alike, and 16,000 ops are no answer."""
    lines = clustersim("describe", "tp8_pp4_llama3_70b_32x8_h100").stdout.splitlines()
    assert len(lines) < 140
    assert any("more lines: --all" in line for line in lines)
    assert "all_gather parameters gradients 4.0" in lines[-1]


def test_json_has_the_mesh_the_stages_and_every_op(clustersim):
    done = clustersim("describe", PIPELINE, "--rank", "3", "--json")
    facts = json.loads(done.stdout)
    prepared = scenario.load(PIPELINE).prepare()
    assert facts["degrees"]["pp"] == 8
    assert facts["rank"]["groups"] == [{"dims": ["pp"], "ranks": list(range(8))}]
    assert [stage["memory_bytes"] for stage in facts["stages"]] == [use.total for use in prepared.split.memory]
    ops = prepared.program.roles[3].ops
    assert [op["name"] for op in facts["ops"]] == [op.name for op in ops]
    assert [op["after"] for op in facts["ops"]] == [list(op.after) for op in ops]
    mesh = json.loads(clustersim("describe", PIPELINE, "--mesh", "--json").stdout)
    assert "ops" not in mesh
    assert mesh["groups"] == facts["groups"]


def test_models_are_listed_with_parameters_as_people_write_them(clustersim):
    rows = [line.split("│") for line in clustersim("list", "models").stdout.splitlines()]
    said = {row[1].strip(): [cell.strip() for cell in row[2:]] for row in rows if len(row) > 2}
    assert "671 B" in said["deepseek-v3"]
    assert "25.56 M" in said["resnet50"]
