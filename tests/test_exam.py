"""An exam's folder follows from its seed, its answer is sealed, and anybody's answer is graded by it."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner
from conftest import ROOT

from clustersim.app.cli import cli, main
from clustersim.core.errors import ClusterSimError
from clustersim.scenario.file.incident_table import KINDS
from clustersim.studies import exam as exams
from clustersim.studies.diagnosis import diagnose
from clustersim.studies.exam import ExamAnswer
from clustersim.studies.exam.grading import given_answer
from clustersim.studies.exam.sealing import answer_of

SEED = 28
"""A process that is stopped, in a pipeline."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("exam") / "first"
    exams.write_exam(exams.planted(SEED), path)
    return path


def test_the_same_seed_gives_the_same_bytes(folder, tmp_path):
    exams.write_exam(exams.planted(SEED), tmp_path / "again")
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert len(names) > 10
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_seeds_differ_and_a_hard_exam_is_another_one():
    drawn = [exams.planted(seed).incident for seed in (SEED, 6)]
    assert drawn[0] != drawn[1]
    assert exams.planted(SEED, "hard").incident != exams.planted(SEED).incident


def test_a_hard_exam_has_files_of_half_of_the_ranks(tmp_path):
    exam = exams.planted(SEED, "hard")
    kept = exams.write_traces(exam, tmp_path)
    per_rank = kept.get("dumps") or kept["profiles"]
    assert len(per_rank) <= len(exam.hosts) / 2


def test_a_sealed_answer_is_not_read_at_a_glance_and_opens(folder):
    data = (folder / "answer.sealed").read_text()
    right = exams.opened(folder / "answer.sealed")
    assert right == answer_of(exams.planted(SEED))
    assert not any(kind in data for kind in KINDS)
    assert not any("answer" in path.name for path in (folder / "files").iterdir())


def test_a_seal_that_was_changed_says_so(folder, tmp_path):
    other = tmp_path / "answer.sealed"
    said = json.loads((folder / "answer.sealed").read_text())
    other.write_text(json.dumps(said | {"sha256": "0" * 64}))
    with pytest.raises(ClusterSimError, match="was changed"):
        exams.opened(other)
    other.write_text(json.dumps(said | {"answer": "AAAA"}))
    with pytest.raises(ClusterSimError, match="damaged"):
        exams.opened(other)
    other.write_text("{}")
    with pytest.raises(ClusterSimError, match="is no sealed answer"):
        exams.opened(other)


@pytest.mark.parametrize(
    ("given", "points"),
    [
        ({"kind": "stopped_rank", "rank": 14}, 2),
        ({"kind": "dead_rank", "rank": 14}, 1),
        ({"kind": "stopped_rank", "rank": 3}, 1),
        ({"kind": "slow_host", "host": "node1"}, 0),
        ({"suspects": [{"kind": "stopped_rank", "rank": 14, "confidence": 0.9, "place": "rank 15"}]}, 2),
    ],
)
def test_cause_and_place_give_a_point_each(folder, tmp_path, given, points):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(given))
    assert exams.opened(folder / "answer.sealed") == ExamAnswer("stopped_rank", rank=14)
    assert exams.graded(given_answer(path), exams.opened(folder / "answer.sealed")).points == points


def test_either_of_two_nics_whose_cables_are_swapped_is_right():
    right = ExamAnswer("wrong_rail", port="node1/mlx5_2", other="node1/mlx5_5")
    for port, points in (("node1/mlx5_2", 2), ("node1/mlx5_5", 2), ("node1/mlx5_3", 1)):
        assert exams.graded(ExamAnswer("wrong_rail", port=port), right).points == points


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{"kind": "slow_gp", "rank": 3}', "did you mean 'slow_gpu'"),
        ("not json", "is no answer in JSON"),
        ('{"kind": "slow_gpu", "rank": "three"}', "is no answer in JSON"),
        ("{}", "no kind ''"),
    ],
)
def test_an_answer_that_cannot_be_read_is_one_error(tmp_path, text, wrong):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ClusterSimError, match=wrong):
        given_answer(path)


def test_our_own_diagnosis_is_graded_as_anybodys(folder, tmp_path):
    said = CliRunner().invoke(cli, ["diagnose", str(folder / "files"), "--json"], catch_exceptions=False).output
    (tmp_path / "ours.json").write_text(said)
    answer = CliRunner().invoke(cli, ["incident", "grade", str(folder), str(tmp_path / "ours.json")])
    assert answer.output == "2 of 2: the cause is right, the place is right\nit was stopped_rank of 14\n"
    assert diagnose([folder / "files"]).suspects[0].rank == 14


def test_the_command_writes_an_exam_and_never_over_another(tmp_path):
    out = str(tmp_path / "exam")
    words = ["incident", "new", "--seed", "6", "--out", out]
    answer = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert answer.exit_code == 0
    assert "question.txt" in answer.output
    assert "is there already" in str(CliRunner().invoke(cli, words).exception)


@pytest.mark.parametrize(
    "words",
    [
        ["incident", "new", "--difficulty", "odd", "--out", "x"],
        ["incident", "grade", "nowhere", "mine.json"],
        ["diagnose", "nowhere"],
    ],
)
def test_bad_words_leave_with_2_and_one_line(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_ten_incidents_for_a_class_are_ten_kinds_that_can_be_played():
    text = (ROOT / "notebooks" / "README.md").read_text()
    named = re.findall(r"^\| `--seed (\d+)(?: --difficulty (\w+))?` \|", text, re.M)
    assert len(named) == 10
    drawn = [exams.planted(int(seed), difficulty or "easy").incident["kind"] for seed, difficulty in named]
    assert len(set(drawn)) == 10
