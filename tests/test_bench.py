"""The table of ``clustersim bench``: its rows can be played, and it measures what it says."""

from __future__ import annotations

import json
import sys

import pytest

from clustersim.scenario import load, parse_overrides
from tests.evidence import bench


def test_a_process_is_measured_whole():
    busy = "import time\nkept = bytearray(200 << 20)\nwhile time.process_time() < 0.5: pass"
    cost = bench.measure([sys.executable, "-c", busy])
    assert cost.seconds >= 0.5
    assert cost.memory > 200 * 2**20
    assert not cost.error


def test_a_process_that_fails_says_why_instead_of_a_figure():
    cost = bench.measure([sys.executable, "-c", "raise SystemExit('no such machine')"])
    assert cost.error == "no such machine"


def test_a_row_is_given_up_after_a_while(monkeypatch):
    monkeypatch.setattr(bench, "PATIENCE", 0.2)
    assert "killed" in bench.measure([sys.executable, "-c", "while True: pass"]).error


@pytest.mark.parametrize("row", [row for row in bench.ROWS if row.arguments[:1] == ("run",)], ids=lambda row: row.name)
def test_a_row_that_runs_a_scenario_names_one_that_loads(row):
    changes = [value for word, value in zip(row.arguments, row.arguments[1:], strict=False) if word == "--set"]
    assert load(row.arguments[1], parse_overrides(changes)).file.cluster.nodes


def test_every_other_row_is_a_collective_or_a_job():
    for row in bench.ROWS:
        assert row.job in bench.JOBS or row.arguments[0] in {"run", "collective"}
    assert len({row.name for row in bench.ROWS}) == len(bench.ROWS)


def test_the_fit_is_the_line_through_what_was_measured(monkeypatch):
    clock = iter([0.0, 1.0, 0.0, 4.0])  # a run of 8 ranks takes a second, one of 32 takes four
    monkeypatch.setattr(bench.time, "process_time", lambda: next(clock))
    line = bench.fit((1, 4))
    assert line.ranks == [8, 32]
    assert line.ops[0] == line.ops[1]
    assert line.exponent == pytest.approx(1.0)
    assert line.r2 == pytest.approx(1.0)


def test_bench_prints_a_row_as_json(clustersim):
    done = clustersim("bench", "--only", "ring-chunk-64", "--repeats", "1", "--no-fit", "--json")
    (row,) = json.loads(done.stdout)["rows"]
    assert 0.05 < row["seconds"] < 60
    assert 0.05 < row["unit"] < 60
    assert row["units"] == pytest.approx(row["seconds"] / row["unit"])
    assert row["target"] == 0.5
    assert not row["error"]


def test_a_misspelt_row_is_told_the_nearest(clustersim):
    done = clustersim("bench", "--only", "ring-1025")
    assert done.returncode == 2
    assert "ring-1024" in done.stderr
