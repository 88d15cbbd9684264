"""report, plot and export: commands on a run that was saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import exit_code

from clustersim.app.cli import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "run"
    exit_code("run", "ddp_resnet50_1x8_v100", "--set", "run.steps=2", "--out", path, "--report", path / "with_run.html")
    return path


def test_run_writes_everything_the_other_commands_read(folder):
    names = {p.name for p in folder.iterdir()}
    assert names >= {"run.npz", "result.json", "trace.json.gz", "gantt.png", "with_run.html"}


def test_report_of_a_saved_run_is_the_report_of_the_run_but_for_what_needs_other_runs(folder, tmp_path):
    assert exit_code("report", folder, "-o", tmp_path / "later.html") == 0
    whole = (folder / "with_run.html").read_text()
    rerun = re.search(r"<h3>What if: .*?</ul>\n", whole, re.S)[0]
    assert (tmp_path / "later.html").read_text().split() == whole.replace(rerun, "").split()
    assert exit_code("report", folder) == 0
    assert (folder / "report.html").is_file()


def test_each_table_of_the_critical_path_counts_a_second_once(tmp_path):
    page = tmp_path / "path.html"
    assert exit_code("report", "ddp_gpt2_xl_2x8_a100", "-o", page) == 0
    text = page.read_text().partition('<h2 id="path">')[2].partition("<details>")[0]
    kinds, links = (re.findall(r">([\d.]+)%</td>", table) for table in text.split("</table>")[:2])
    assert sum(map(float, kinds)) == pytest.approx(100, abs=0.5)
    assert 0 < sum(map(float, links)) < 100
    assert "counted above as well" in text


@pytest.mark.parametrize("kind", ["gantt", "topology"])
def test_plot_draws_a_saved_run(folder, tmp_path, kind, capsys):
    more = ["--zoom", "last", "--rank", "0", "--window", "0..80 ms"] if kind == "gantt" else []
    assert exit_code("plot", kind, folder, tmp_path / "p.png", "--dpi", "60", *more) == 0
    assert (tmp_path / "p.png").stat().st_size > 5000
    assert "wrote" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["s.csv", "t.json.gz"])
def test_export_writes_the_ranks_asked_for(folder, tmp_path, name, capsys):
    assert exit_code("export", folder, tmp_path / name, "--ranks", "1-2,5", "--rank", "7") == 0
    assert "ranks 1-2, 5, 7 of 8" in capsys.readouterr().out


def test_a_folder_of_a_run_is_diagnosed_by_the_run(folder, capsys):
    assert exit_code("diagnose", folder) == 0
    of_folder = capsys.readouterr().out
    assert exit_code("diagnose", folder / "run.npz") == 0
    assert capsys.readouterr().out == of_folder
    assert "- profiles: " in of_folder


@pytest.mark.parametrize("name", ["memory", "run", "sensitivity"])
def test_a_command_of_scenarios_says_which_commands_read_a_run(folder, capsys, name):
    assert exit_code(name, folder) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {folder}: holds a run that is over, where a scenario is needed")
    assert "and the report what its memory holds" in error  # what explain prints has none of it
    assert f"`clustersim explain {folder}` and `clustersim report {folder}`" in error
    assert error.count("\n") == 1


def test_a_command_of_scenarios_says_which_folders_it_reads(tmp_path, capsys):
    assert exit_code("memory", tmp_path) == 2
    assert "a folder without plan.json; name a scenario, or a folder that" in capsys.readouterr().err


REFUSED = {
    "no run": (["report", "nowhere"], "no scenario 'nowhere'"),
    "picture": (["plot", "gant", "{}", "p.png"], "did you mean 'gantt'"),
    "suffix": (["plot", "gantt", "{}", "p.jpg"], "is to end with .png, .svg or .pdf"),
    "window": (["plot", "gantt", "{}", "p.png", "--window", "3"], "write it like '700 ms..1.06 s'"),
    "backwards": (["plot", "gantt", "{}", "p.png", "--window", "2 s..1 s"], "ends before it begins"),
    "format": (["export", "{}", "t.txt"], "no trace format has this ending"),
    "rank": (["export", "{}", "t.csv", "--rank", "99"], "0..7"),
    "ranks": (["export", "{}", "t.csv", "--ranks", "0-7,x"], "'x'"),
    "range backwards": (["export", "{}", "t.csv", "--ranks", "7-0"], "'7-0'"),
    "endless range": (["plot", "gantt", "{}", "t.png", "--ranks", "0-99999999999"], "at most 10,000,000 are made"),
    "picture of two": (["compare", "{}", "{}", "--plot", "t.gif"], "t.gif"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_line_and_exit_code_2(folder, case, capsys):
    words, part = REFUSED[case]
    assert exit_code(*(word.replace("{}", str(folder)) for word in words)) == 2
    said = capsys.readouterr().err.strip()
    assert part in said
    assert "\n" not in said


def test_a_report_is_also_of_a_scenario_or_of_traces(clustersim, tmp_path):
    page = tmp_path / "scenario.html"
    assert clustersim("report", "why_slow_gpu", "--set", "run.steps=4", "-o", page).returncode == 0
    assert "run.steps=4" in page.read_text()
    files = sorted((Path(__file__).parent / "data" / "traces" / "gloo_2_ranks").iterdir())
    assert clustersim("report", *files, "-o", tmp_path / "trace.html").returncode == 0
    assert "71.29 ms from first span to last; " in (tmp_path / "trace.html").read_text()
    refused = clustersim("report", *files, "--set", "run.steps=4", "-o", tmp_path / "no.html")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)


def test_traces_of_one_run_are_explained_and_compared_as_files_too():
    folder = Path(__file__).parent / "data" / "traces" / "gloo_2_ranks"
    files = sorted(map(str, folder.glob("*.json*")))
    run = CliRunner().invoke
    as_files, as_folder = (run(cli, ["explain", *given]).output.split(":", 1)[1] for given in (files, [str(folder)]))
    assert as_files == as_folder
    same = run(cli, ["compare", *files, str(folder)])
    assert "B: gloo_2_ranks" in same.output
    refused = run(cli, ["compare", *files, *files])
    assert refused.exit_code == 2
    assert refused.output.rstrip().endswith("give the traces of each run as a folder")
