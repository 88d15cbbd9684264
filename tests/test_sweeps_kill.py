"""Whatever is killed while a sweep runs, its table is in the end what it would have been, byte for byte."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT

from clustersim.core.errors import ClusterSimError
from clustersim.studies import sweep as sweeps
from clustersim.studies.sweep.driving import Driver

TOML = """
base = "ddp_resnet50_1x8_v100"
[set]
model.name = "resnet18"
run.steps = 3
[[axes]]
key = "strategy.micro_batch_size"
range = {start = 1, stop = 12, step = 1}
[[axes]]
key = "cluster.gpus_per_node"
values = [2, 9]
"""
CASES = 24


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "sweep_tiny.toml"
    path.write_text(TOML)
    return path


@pytest.fixture(scope="module")
def undisturbed(file, tmp_path_factory) -> list[bytes]:
    """The rows of a run that nothing disturbs, in this process, sorted."""
    out = tmp_path_factory.mktemp("whole")
    done = sweeps.sweep(file, out, jobs=1)
    assert (done.computed, done.failed) == (CASES, CASES // 2)
    return rows(out)


def rows(out: Path) -> list[bytes]:
    return sorted((out / "results.jsonl").read_bytes().splitlines())


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_client_killed_three_times_goes_on_where_it_was(file, undisturbed, tmp_path):
    command = [sys.executable, "-m", "clustersim", "sweep", str(file), "--out", str(tmp_path), "--jobs", "2"]
    results = tmp_path / "results.jsonl"
    for least in (2, 6, 10):
        client = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda least=least: results.exists() and results.read_bytes().count(b"\n") >= least)
        workers = Path(f"/proc/{client.pid}/task/{client.pid}/children")
        workers = workers.read_text().split() if workers.exists() else []
        client.send_signal(signal.SIGKILL)
        client.wait()
        with results.open("ab") as file:
            file.write(b'{"key":"0123')  # a write that the kill cut short
        # Nobody is left who computes for nobody.
        wait_for(lambda workers=workers: not any(Path(f"/proc/{pid}/exe").exists() for pid in workers))
    before = len(rows(tmp_path)) - 1
    last = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert rows(tmp_path) == undisturbed
    assert f'"kept": {before},' in last.stdout


def test_a_killed_worker_process_costs_no_row(file, undisturbed, tmp_path):
    killed = []

    def kill(progress):
        workers = multiprocessing.active_children()  # nobody, while those who died are being replaced
        if progress.done and workers and len(killed) < 2:
            killed.append(workers[0].pid)
            os.kill(workers[0].pid, signal.SIGKILL)

    done = sweeps.sweep(file, tmp_path, jobs=2, progress=kill)
    assert len(killed) == 2
    assert done.lost == ()
    assert rows(tmp_path) == undisturbed


class Fragile:
    """A crew whose workers die of some items, and take with them whatever else is under way."""

    def __init__(self, deadly):
        self.deadly = deadly
        self.under_way = []
        self.broken = False
        self.done = []
        self.ahead = 4

    def submit(self, work, items):
        if self.broken:
            raise BrokenExecutor("the pool is broken")
        future = Future()
        self.under_way.append((future, items))
        if any(item in self.deadly for item in items) or len(self.under_way) == self.ahead:
            self.step()
        return future

    def step(self):
        died = any(item in self.deadly for _, items in self.under_way for item in items)
        for future, items in self.under_way:
            if died:
                future.set_exception(BrokenExecutor("a worker died"))
            else:
                self.done += items
                future.set_result((0.1 * len(items), items))
        self.under_way = []
        self.broken = died

    def mend(self):
        self.broken = False
        return True

    def close(self):
        pass


@pytest.mark.parametrize("deadly", [set(), {0}, {7}, {3, 4, 5}, {0, 19}])
def test_work_that_kills_its_worker_each_time_is_found_and_costs_no_other(deadly):
    crew = Fragile(deadly)
    took = []
    driver = Driver(crew, None, took.extend)
    later = driver._next

    def next_done():
        if not any(future.done() for future in driver.waiting):
            crew.step()
        return later()

    driver._next = next_done
    driver.run(iter(range(20)))
    assert sorted(took) == sorted(crew.done) == sorted(set(range(20)) - deadly)
    assert sorted(item for item, _ in driver.given_up) == sorted(deadly)


class Forgetful:
    """A crew that lost the first pieces of work on their way, and says so when it is asked."""

    def __init__(self, pieces):
        self.ahead = 16
        self.left = pieces
        self.lost = []

    def submit(self, work, items):
        future = Future()
        if self.left:
            self.left -= 1
            self.lost.append(future)
        else:
            future.set_result((0.1 * len(items), items))
        return future

    def gone(self, futures):
        return [future for future in futures if future in self.lost]

    def mend(self):
        return True


@pytest.mark.parametrize("pieces", [1, 12])
def test_work_that_nobody_knows_of_is_handed_out_again(pieces, monkeypatch):
    monkeypatch.setattr("clustersim.studies.sweep.driving.SILENCE", 0.2)
    took = []
    driver = Driver(Forgetful(pieces), None, took.extend)
    driver.run(iter(range(20)))
    assert sorted(took) == list(range(20))
    assert driver.given_up == []


def test_workers_that_never_finish_anything_are_given_up(file, tmp_path):
    class Nobody:
        def submit(self, fn, *args):
            future = Future()
            future.set_exception(ModuleNotFoundError("No module named 'clustersim'"))
            return future

    with pytest.raises(ClusterSimError, match=r"finish nothing any more \(ModuleNotFoundError"):
        sweeps.sweep(file, tmp_path, executor=Nobody())


def test_a_worker_of_another_version_is_refused(file, tmp_path, monkeypatch):
    from clustersim.studies.sweep import running

    monkeypatch.setattr(running, "version", lambda: "0.0.1")
    with pytest.raises(ClusterSimError, match=r"the worker has clustersim 0\.0\.1"):
        running.compute({}, "x.toml", "0.1.0", [])


def test_any_executor_with_submit_gives_the_same_rows(file, undisturbed, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        sweeps.sweep(file, tmp_path / "threads", executor=pool)
    assert rows(tmp_path / "threads") == undisturbed

    class Polled:
        """As submitit's jobs: a result, and whether it is there."""

        def __init__(self, function, arguments):
            self.function = function
            self.arguments = arguments

        def done(self):
            return True

        def result(self):
            return self.function(*self.arguments)

    class Slow:
        def submit(self, fn, *args):
            return Polled(fn, args)

    sweeps.sweep(file, tmp_path / "polled", executor=Slow())
    assert rows(tmp_path / "polled") == undisturbed


def test_two_sweeps_do_not_write_to_one_folder(tmp_path):
    store = sweeps.Store(tmp_path)
    with store.writing(), pytest.raises(ClusterSimError, match="another sweep is writing here"), store.writing():
        pass
