"""Outputs: whole or not at all, sets together, two runs never mixed, and nobody else's file touched."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from conftest import exit_code

from clustersim.app import lessons
from clustersim.app.cli import cli
from clustersim.app.cli.common import OutputFile, OutputFolder
from clustersim.calibrate.capture.parts import free
from clustersim.core.errors import ClusterSimError
from clustersim.core.outputs import MANIFEST, Folder, fresh, together
from clustersim.studies import plan as planner
from clustersim.studies import sweep as sweeps

BASE = "ddp_resnet50_1x8_v100"
SMALL = ("--set", "model.name=resnet18", "--set", "cluster.gpus_per_node=2", "--set", "run.steps=2")


def contents(folder):
    """Every file under a folder, byte for byte."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def sweep(**more):
    axes = [{"key": "strategy.micro_batch_size", "values": [1, 2]}]
    return sweeps.from_table({"base": BASE, "set": {"cluster.gpus_per_node": 2}, "axes": axes} | more, "mine.toml")


# ---- files of somebody else ------------------------------------------------------------------------------------------

FOREIGN = {
    "without a newline": b"dear diary",
    "lines": b"step,time\n1,2\n",
    "an object": b'{"key":"value"}\n',
    "binary": bytes(range(256)),
    "a row's beginning and more": b'{"key":"' + b"0" * 64 + b"x",
}


@pytest.mark.parametrize("kept", [True, False], ids=["resume", "no-resume"])
@pytest.mark.parametrize("case", FOREIGN)
def test_a_sweep_refuses_a_foreign_table_and_leaves_every_byte(case, kept, tmp_path):
    (tmp_path / "results.jsonl").write_bytes(FOREIGN[case])
    with pytest.raises(ClusterSimError, match=r"results\.jsonl: line 1 is no row of a sweep"):
        sweeps.sweep(sweep(), tmp_path, jobs=1, resume=kept)
    assert contents(tmp_path) == {"results.jsonl": FOREIGN[case]}


def test_a_torn_last_line_is_cut_only_behind_rows(tmp_path):
    sweeps.sweep(sweep(), tmp_path, jobs=1)
    rows = (tmp_path / "results.jsonl").read_bytes()
    (tmp_path / "results.jsonl").write_bytes(rows + b'{"key":"0123')
    assert sweeps.sweep(sweep(), tmp_path, jobs=1).kept == 2
    assert (tmp_path / "results.jsonl").read_bytes() == rows
    (tmp_path / "results.jsonl").write_bytes(rows + b"my own notes")
    with pytest.raises(ClusterSimError, match="line 3 is no row"):
        sweeps.sweep(sweep(), tmp_path, jobs=1)
    assert (tmp_path / "results.jsonl").read_bytes() == rows + b"my own notes"


def test_a_link_is_not_followed_out_of_the_folder(tmp_path):
    (tmp_path / "mine.txt").write_bytes(b"mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.jsonl").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(ClusterSimError, match="is a link"):
        sweeps.sweep(sweep(), tmp_path / "out", jobs=1)
    (tmp_path / "page.html").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(ClusterSimError, match="is a link"), fresh(tmp_path / "page.html") as path:
        path.write_bytes(b"page")
    assert (tmp_path / "mine.txt").read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == ["mine.txt", "out", "page.html"]


def test_a_pipe_and_a_device_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ClusterSimError, match="not a file to write to"), fresh(path):
            pass
    with pytest.raises(ClusterSimError, match="is a device"), fresh(Path("/dev/null")):
        pass


@pytest.mark.parametrize("name", ["run.npz", "result.json", "trace.json.gz", "gantt.png", MANIFEST])
def test_a_run_refuses_a_folder_with_a_foreign_file_before_it_runs(name, tmp_path, capsys, monkeypatch):
    (tmp_path / name).write_bytes(b"mine")
    monkeypatch.setattr("clustersim.scenario.Scenario.run", lambda *_: pytest.fail("it ran"))
    assert exit_code("run", BASE, "--out", tmp_path) == 2
    assert str(tmp_path / name) in capsys.readouterr().err
    assert contents(tmp_path) == {name: b"mine"}


def test_files_that_a_run_does_not_write_may_lie_beside_it(tmp_path):
    (tmp_path / "notes.txt").write_bytes(b"mine")
    assert exit_code("run", BASE, *SMALL, "--out", tmp_path) == 0
    assert (tmp_path / "notes.txt").read_bytes() == b"mine"


def test_a_page_is_written_over_a_page_and_over_nothing_else(tmp_path, capsys):
    assert exit_code("run", BASE, *SMALL, "--out", tmp_path / "run", "--report", tmp_path / "page.html") == 0
    assert exit_code("report", tmp_path / "run", "-o", tmp_path / "page.html") == 0
    (tmp_path / "mine.html").write_bytes(b"<html>mine")
    assert exit_code("report", tmp_path / "run", "-o", tmp_path / "mine.html") == 2
    assert "clustersim did not write it" in capsys.readouterr().err
    assert (tmp_path / "mine.html").read_bytes() == b"<html>mine"


def test_what_was_measured_is_not_written_over(tmp_path):
    free(tmp_path)
    (tmp_path / "compute.jsonl.partial").write_bytes(b"measured")
    with pytest.raises(ClusterSimError, match="not written over"):
        free(tmp_path)


# ---- two runs in one folder ------------------------------------------------------------------------------------------


def test_a_folder_is_of_one_run_and_the_same_run_may_write_it_again(tmp_path, capsys):
    assert exit_code("run", BASE, *SMALL, "--out", tmp_path) == 0
    before = contents(tmp_path)
    assert exit_code("run", BASE, *SMALL, "--out", tmp_path) == 0
    assert contents(tmp_path) == before
    for other in (("run", BASE, *SMALL, "--set", "run.seed=1"), ("sensitivity", BASE, *SMALL)):
        assert exit_code(*other, "--out", tmp_path) == 2
        assert "use another folder" in capsys.readouterr().err
    with pytest.raises(ClusterSimError, match="holds a run"):
        sweeps.sweep(sweep(), tmp_path, jobs=1)
    assert contents(tmp_path) == before


def test_a_sweep_does_not_go_on_in_the_folder_of_another(tmp_path):
    sweeps.sweep(sweep(), tmp_path, jobs=1)
    before = contents(tmp_path)
    with pytest.raises(ClusterSimError, match="holds another sweep"):
        sweeps.sweep(sweep(base="ddp_gpt2_xl_2x8_a100"), tmp_path, jobs=1)
    with pytest.raises(ClusterSimError, match="holds a sweep"):
        planner.plan("llama3_70b_h100", tmp_path, jobs=1)
    assert contents(tmp_path) == before


# ---- disks that are full, processes that are killed ------------------------------------------------------------------


def test_a_disk_that_is_full_leaves_the_old_set_or_the_new_one(tmp_path):
    folder = Folder(tmp_path, "run", "a run", ("a", "b", "c"), 1)
    with folder.files() as path_of:
        for name in folder.names:
            path_of(name).write_bytes(b"old")
    before = contents(tmp_path)

    def write(whole):
        with folder.files() as path_of:
            for name in folder.names[:whole]:
                path_of(name).write_bytes(b"new")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for whole in range(4):
        with pytest.raises(ClusterSimError, match="No space left"):
            write(whole)
        assert contents(tmp_path) == before


def test_a_full_disk_names_the_file_that_would_have_been_and_leaves_none(tmp_path):
    code = (
        "import resource, sys; from clustersim.app.cli import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500)); "
        "main(sys.argv[1:])"
    )
    words = ["run", BASE, *SMALL, "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path}/out/run.npz: cannot write the trace: File too large\n"
    assert list((tmp_path / "out").iterdir()) == []


def test_a_full_disk_does_not_mix_lessons(tmp_path, monkeypatch):
    lessons.copy(tmp_path)
    (tmp_path / lessons.lessons()[0].name).write_bytes(b"changed")
    before = contents(tmp_path)
    room = [3]
    write = Path.write_bytes

    def limited(path, data):
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", limited)
    with pytest.raises(ClusterSimError, match="No space left"):
        lessons.copy(tmp_path, force=True)
    assert contents(tmp_path) == before


def test_what_a_killed_process_left_half_written_goes_with_the_next_write(tmp_path):
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    for name in (f".{int(dead.stdout)}-a.txt", ".1-a.txt", f".{int(dead.stdout)}-b.txt", ".x-a.txt"):
        (tmp_path / name).write_bytes(b"half")
    with together(tmp_path) as path_of:
        path_of("a.txt").write_bytes(b"whole")
    kept = {".1-a.txt", f".{int(dead.stdout)}-b.txt", ".x-a.txt", "a.txt"}  # process 1 lives
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_the_same_run_gives_the_same_bytes_in_every_file(tmp_path, clustersim, monkeypatch):
    for seed in "12":
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        out = tmp_path / seed
        assert clustersim("run", BASE, *SMALL, "--out", out, "--report", out / "page.html").returncode == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("words", [("run", BASE, "--json"), ("check", "hgx-h100")])
def test_a_full_disk_under_stdout_is_one_line(words):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "clustersim", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr == "error: stdout: cannot be written: No space left on device\n"


def test_an_error_in_what_was_written_names_the_file_and_not_its_temporary_name(tmp_path):
    def write():
        with together(tmp_path) as path_of:
            path = path_of("mine.toml")
            path.write_text("x")
            raise ClusterSimError(f"{path}: $.x: is wrong")

    with pytest.raises(ClusterSimError) as raised:
        write()
    assert str(raised.value) == f"{tmp_path / 'mine.toml'}: $.x: is wrong"
    assert not list(tmp_path.iterdir())


# ---- paths are looked at before the work -----------------------------------------------------------------------------

READ = {"data", "files", "folder", "answer", "run", "run_dir", "given", "config", "table", "tables"}
"""Parameters that are paths of what a command reads, by name."""


def commands(group, words=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


PATHS = [
    (words, param)
    for words, command in commands(cli)
    for param in command.params
    if isinstance(param.type, click.Path) and not command.callback.__module__.startswith("tests.")
]
WRITTEN = [(words, param) for words, param in PATHS if isinstance(param.type, OutputFile | OutputFolder)]


def test_every_path_that_a_command_takes_is_read_or_is_looked_at_before_it_is_written():
    plain = {(words, param.name) for words, param in PATHS} - {(words, param.name) for words, param in WRITTEN}
    assert {name for _, name in plain} <= READ
    assert len(WRITTEN) >= 25


@pytest.mark.parametrize(
    ("words", "param"), WRITTEN, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_a_place_that_cannot_be_written_to_is_refused_before_anything_is_read(words, param, tmp_path, capsys):
    """``report -o DIR/x.html`` into a folder that was not there failed after the work."""
    (tmp_path / "file").write_text("mine")
    ending = ".png" if getattr(param.type, "endings", ()) else ".toml"
    place = tmp_path / "file" / f"x{ending}"
    _, command = next(pair for pair in commands(cli) if pair[0] == words)
    others = [
        "x" if not isinstance(other.type, click.Choice) else other.type.choices[0]
        for other in command.params
        if isinstance(other, click.Argument) and other.name != param.name and other.required
    ]
    own = [str(place)] if isinstance(param, click.Argument) else [param.opts[0], str(place)]
    assert exit_code(*words, *others, *own) == 2
    said = capsys.readouterr().err
    assert said == f"error: {place}: cannot be written: {tmp_path / 'file'} is no folder\n"
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_goes_into_a_folder_that_is_not_there_yet(tmp_path):
    place = tmp_path / "a" / "b" / "mine.toml"
    assert exit_code("new", "sweep", place) == 0
    assert place.is_file()
