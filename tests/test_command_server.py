"""A command that is forked says and leaves what a new interpreter's does."""

import os
import subprocess
import sys

import command_server
import pytest
from conftest import ROOT

COMMANDS = (
    ("--version",),
    ("describe", "ddp_resnet50_1x8_v100"),
    ("run", "nowhere.toml"),
    ("collective", "all_reduce", "--topology", "hgx-a100", "--size", "1MiB", "--json"),
    ("plot", "gantt", "ddp_resnet50_1x8_v100", "gantt.svg"),
)


def new_interpreter(words, folder, env):
    command = [sys.executable, "-m", "clustersim", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_forked_command_is_a_new_interpreters(words, clustersim, tmp_path):
    said = []
    for name in ("forked", "new"):
        (tmp_path / name).mkdir()
        if name == "forked":
            done = clustersim(*words, cwd=tmp_path / name)
        else:
            done = new_interpreter(words, tmp_path / name, {**os.environ, "NO_COLOR": "1", "COLUMNS": "160"})
        files = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        said.append((done.args, done.returncode, done.stdout, done.stderr, files))
    assert said[0] == said[1]


@pytest.mark.skipif(not command_server.CAN_FORK, reason="only Linux forks")
def test_a_command_has_its_own_process_and_settings_of_python_a_new_interpreter(clustersim, monkeypatch):
    started = []
    run = subprocess.run
    monkeypatch.setattr(
        command_server.subprocess, "run", lambda *what, **how: started.append(what) or run(*what, **how)
    )
    assert clustersim("--version", cwd=ROOT).returncode == 0
    assert not started
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert clustersim("--version", cwd=ROOT).returncode == 0
    assert len(started) == 1
