"""``clustersim validate all``: lines of everything there is a table of."""

from __future__ import annotations

import csv
import gzip
import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from clustersim.app.cli import cli
from clustersim.calibrate.score import read_table
from clustersim.calibrate.validate_nccl import validate_nccl
from clustersim.core.errors import ClusterSimError
from tests.evidence.evidence import EvidenceLine, evidence

TABLES = Path(__file__).parent / "data" / "measurements"
MACHINES = ("dgx-1v", "hgx-h100", "polaris-a100")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two logs of each of three machines, and the measured steps whose memory is known."""
    place = tmp_path_factory.mktemp("evidence")
    logs = read_table(TABLES / "nccl_tests.csv.gz", ())
    few = [name for machine in MACHINES for name in _first({r["case_id"]: 0 for r in logs if r["topology"] == machine})]
    _write(place / "nccl_tests.csv", [row for row in logs if row["case_id"] in few][::2])
    steps = read_table(TABLES / "training_steps.csv.gz", ())
    _write(place / "training_steps.csv", [row for row in steps if row["peak_mem_GiB"]])
    return place


def _first(names: dict[str, int]) -> list[str]:
    return list(names)[:2]


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)


@pytest.fixture(scope="module")
def lines(folder: Path) -> dict[str, EvidenceLine]:
    return {line.what: line for line in evidence(folder, again=False)}


def test_a_line_has_the_error_of_its_part_of_the_table(folder, lines):
    shipped = validate_nccl(folder / "nccl_tests.csv").by["size_class"]
    for name, stats in shipped.items():
        line = lines[f"collectives, {name}"]
        assert line.in_sample == (stats.median_abs_rel_error, stats.p90_abs_rel_error)
        assert (line.rows, line.cases) == (stats.n_rows, stats.n_cases)
    assert lines["memory, reserved"].cases == 14
    assert "steps, fsdp" in lines


def test_only_collectives_have_machines_left_out_and_ranges_are_tried_on_others(lines):
    for line in lines.values():
        collective = line.what.startswith("collectives")
        assert (line.left_out is not None) == (line.three_numbers is not None) == collective
        assert all(math.isnan(share) or 0 <= share <= 1 for share in line.held)
        assert not collective or not math.isnan(line.held[0])


def test_a_packed_table_is_found_and_a_folder_without_tables_is_refused(folder, tmp_path):
    with pytest.raises(ClusterSimError, match=r"holds none of nccl_tests\.csv, training_steps\.csv"):
        evidence(tmp_path)
    (tmp_path / "training_steps.csv.gz").write_bytes(gzip.compress((folder / "training_steps.csv").read_bytes()))
    found = CliRunner().invoke(cli, ["validate", "all", str(tmp_path), "--quick", "--json"])
    assert [line["what"] for line in json.loads(found.stdout)][-1] == "memory, reserved"
    table = CliRunner().invoke(cli, ["validate", "all", str(tmp_path), "--quick", "--markdown"]).stdout.splitlines()
    assert table[0].startswith("| what | rows | cases | publisher left out | three numbers known |")


def test_goodput_is_the_last_row_where_its_table_is_there_in_points(folder, tmp_path):
    (tmp_path / "run_reliability.csv.gz").write_bytes((TABLES / "run_reliability.csv.gz").read_bytes())
    (tmp_path / "training_steps.csv").write_bytes((folder / "training_steps.csv").read_bytes())
    said = json.loads(CliRunner().invoke(cli, ["validate", "all", str(tmp_path), "--quick", "--json"]).stdout)[-1]
    assert said["what"] == "goodput of whole trainings"
    alone = CliRunner().invoke(cli, ["validate", "campaign", str(tmp_path / "run_reliability.csv.gz"), "--json"])
    assert {name: said[name] for name in said if name != "what"} == json.loads(alone.stdout)["overall"]
    row = CliRunner().invoke(cli, ["validate", "all", str(tmp_path), "--quick", "--markdown"]).stdout.splitlines()[-1]
    assert f"{said['median_points']:.1f} points (worst {said['worst_points']:.1f})" in row


def test_a_planted_incident_is_diagnosed_with_all_files_and_with_some():
    """Seed 28 is a process that stands still: its missing dump says so, whatever else is missing."""
    from tests.evidence.incidents import CASES, diagnosed, mistaken, shares

    rows = list(diagnosed(28, "easy"))
    assert [row.files for row in rows] == ["all files", "one kind missing", "half the ranks"]
    assert len(rows) == len(CASES)
    assert rows[0].is_right
    assert rows[0].confident
    table = shares(rows)
    assert [row.count for row in table] == [1, 1, 1]
    assert table[0].right == table[0].cause == 1.0
    assert table[0].confident_wrong == 0.0
    assert len(mistaken(rows)) == sum(not row.is_right for row in rows)


def test_an_answer_without_a_place_is_neither_right_nor_wrong():
    from clustersim.studies.exam import ExamAnswer
    from tests.evidence.incidents import DiagnosedIncident

    right = ExamAnswer("slow_link", port="node0/mlx5_0")

    def row(given: ExamAnswer) -> DiagnosedIncident:
        return DiagnosedIncident(0, "all files", right, given, 0.9, True)

    assert (row(right).is_right, row(right).is_wrong) == (True, False)
    assert (row(ExamAnswer("slow_link")).is_right, row(ExamAnswer("slow_link")).is_wrong) == (False, False)
    assert row(ExamAnswer("slow_link", port="node1/mlx5_0")).is_wrong
    assert row(ExamAnswer("slow_gpu")).is_wrong


@pytest.mark.parametrize("fault", ["other_group_pair"])
def test_a_real_job_over_gloo_is_diagnosed_right_from_the_dumps_of_its_recorder(fault, monkeypatch):
    """One of the 21 of `python -m tests.evidence gloo-faults`: starting four processes takes most of its time."""
    pytest.importorskip("torch", reason="torch is not installed")
    from tests.evidence import gloo_faults

    monkeypatch.setattr(gloo_faults, "TIMEOUT", 2.0)
    job = gloo_faults.real_fault(fault, 2)
    assert job.is_right
    assert job.files >= 4


def test_every_real_fault_is_a_kind_of_incident_and_there_are_twenty():
    from clustersim.scenario.file.incident_table import KINDS
    from tests.evidence.gloo_jobs import REAL_FAULTS

    assert len(REAL_FAULTS) >= 20
    assert {row.kind for row in REAL_FAULTS.values()} <= set(KINDS)
    assert all(f'"{name}"' in row.program for name, row in REAL_FAULTS.items())


def test_logs_of_watchdogs_speak_when_they_were_played_to_and_nothing_changes_without_an_incident():
    from tests.evidence.incidents import diagnosed, unlike_without_incidents

    (first, *_) = diagnosed(10, "easy")
    assert first.detected is not None
    assert abs(first.detected) < 1e-6
    assert unlike_without_incidents()[0] == 0
