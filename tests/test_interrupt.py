"""Ctrl-C, at any moment: exit code 130, no traceback, and no file that is not whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clustersim.files.traces.saved import load_run

ROOT = Path(__file__).resolve().parents[1]
LONG = ("run", "ddp_gpt2_xl_2x8_a100", "--set", "run.steps=5000")
"""Nobody waits for this one to end."""


def started(*args):
    """The command in a process of its own, which takes SIGINT as a terminal's child does."""
    return subprocess.Popen(
        [sys.executable, "-m", "clustersim", *map(str, args)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )


def interrupted(process, when):
    """Send SIGINT once ``when()`` holds; what the process said, if it was still there to be interrupted."""
    while process.poll() is None and not when():
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    return process.returncode, out, err


def loaded(process, module):
    """Whether the process has a file of this name open or mapped: how far its imports are."""
    try:
        return module in Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return False


needs_proc = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("module", ["_multiarray_umath", "msgspec"])
def test_a_run_that_is_interrupted_leaves_with_130_and_nothing_behind(tmp_path, module):
    process = started(*LONG, "--out", tmp_path / "out")
    code, out, _ = interrupted(process, lambda: loaded(process, module))
    assert (code, out) == (130, "")
    assert not list(tmp_path.glob("out/*"))


def test_a_run_that_is_interrupted_while_it_writes_has_only_whole_files(tmp_path):
    folder = tmp_path / "out"
    process = started("run", "ddp_gpt2_xl_2x8_a100", "--out", folder)
    code, _, _ = interrupted(process, lambda: folder.is_dir() and any(f.name.startswith(".") for f in folder.iterdir()))
    assert code == 130
    names = {file.name for file in folder.iterdir()}
    assert not [name for name in names if name.startswith(".")]
    assert "gantt.png" not in names  # the last one
    if "run.npz" in names:
        assert load_run(folder / "run.npz").timeline.makespan > 0
    if "result.json" in names:
        assert json.loads((folder / "result.json").read_text())["scenario"] == "ddp_gpt2_xl_2x8_a100"


@needs_proc
def test_a_report_that_is_interrupted_leaves_no_page(tmp_path, clustersim):
    assert clustersim("run", "ddp_resnet50_1x8_v100", "--out", tmp_path).returncode == 0
    before = '<meta name="generator" content="clustersim">the page of before'
    (tmp_path / "old.html").write_text(before)
    process = started("report", tmp_path, "-o", tmp_path / "old.html")
    code, _, _ = interrupted(process, lambda: loaded(process, "ft2font"))  # it is drawing
    if code == 130:
        assert (tmp_path / "old.html").read_text() == before
    else:  # so fast a machine that it was written already
        assert (code, (tmp_path / "old.html").read_text()[:9].lower()) == (0, "<!doctype")
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def test_a_sweep_of_two_jobs_that_is_interrupted_says_nothing_of_semaphores(tmp_path):
    values = [1 + i / 10 for i in range(400)]
    text = f'base = "ddp_resnet50_1x8_v100"\n[[axes]]\nkey = "strategy.bucket_cap_mb"\nvalues = {values}\n'
    (tmp_path / "many.toml").write_text(text)
    process = started("sweep", tmp_path / "many.toml", "--out", tmp_path / "out", "--jobs", "2")
    rows = tmp_path / "out" / "results.jsonl"
    code, _, err = interrupted(process, lambda: rows.exists() and rows.stat().st_size > 0)
    said = [line for line in err.splitlines() if not line.startswith("sweep many: ")]  # how far it has come
    assert (code, said) == (130, [])


def test_a_sweep_that_is_interrupted_keeps_whole_rows_and_goes_on_from_them(tmp_path):
    out = tmp_path / "out"
    values = [1 + i / 10 for i in range(400)]
    text = f'base = "ddp_resnet50_1x8_v100"\n[[axes]]\nkey = "strategy.bucket_cap_mb"\nvalues = {values}\n'
    (tmp_path / "many.toml").write_text(text)
    process = started("sweep", tmp_path / "many.toml", "--out", out, "--jobs", "1")
    rows = out / "results.jsonl"
    code, _, err = interrupted(process, lambda: rows.exists() and rows.stat().st_size > 0)
    assert code == 130, err
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert 0 < len(found) < 400
    assert not [file for file in out.iterdir() if file.name.startswith(".")]
