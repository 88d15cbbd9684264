"""A sweep on a real Dask cluster of two worker processes, whose workers and scheduler are killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from conftest import ROOT
from test_sweeps_kill import CASES, TOML, rows

from clustersim.core.errors import ClusterSimError
from clustersim.studies import sweep as sweeps

distributed = pytest.importorskip("distributed", reason="needs distributed (the dask extra)")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep") / "sweep_tiny.toml"
    path.write_text(TOML)
    return path


@pytest.fixture(scope="module")
def undisturbed(file, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    sweeps.sweep(file, out, jobs=1)
    return rows(out)


@pytest.fixture
def cluster():
    before = set(os.environ)
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster
    for name in os.environ.keys() - before:  # a nanny leaves its seed of hashes to whoever starts a process later
        del os.environ[name]


def test_a_worker_killed_mid_sweep_costs_no_row(cluster, file, undisturbed, tmp_path):
    killed = []

    def kill(progress):
        if progress.done and not killed:
            killed.append(cluster.workers[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    done = sweeps.sweep(file, tmp_path, executor=sweeps.Dask(cluster.scheduler_address), progress=kill)
    assert killed
    assert done.computed == CASES
    assert rows(tmp_path) == undisturbed


class Cluster:
    """A scheduler and two workers as commands, which can be killed and started again."""

    def __init__(self, port):
        self.address = f"tcp://127.0.0.1:{port}"
        self.commands = [
            ["distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", str(port), "--no-dashboard"],
            ["distributed.cli.dask_worker", self.address, "--nworkers", "2", "--nthreads", "1", "--no-dashboard"],
        ]
        self.running = []

    def start(self):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        self.running = [
            subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, **quiet) for command in self.commands
        ]

    def kill(self):
        for process in self.running:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.running = []


def test_a_scheduler_killed_and_started_again_costs_no_row(file, undisturbed, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        cluster = Cluster(free.getsockname()[1])
    cluster.start()
    restarts = []

    def restart(progress):
        if progress.done and not restarts:
            cluster.kill()
            cluster.start()
            restarts.append(progress.done)

    try:
        done = sweeps.sweep(file, tmp_path, executor=sweeps.Dask(cluster.address), progress=restart)
    finally:
        cluster.kill()
    assert restarts
    assert restarts[0] < CASES
    assert done.lost == ()
    assert rows(tmp_path) == undisturbed


def test_an_address_without_a_scheduler_is_one_error():
    with pytest.raises(ClusterSimError, match=r"no Dask scheduler at 'tcp://127\.0\.0\.1:1'.*write it like"):
        sweeps.Dask("tcp://127.0.0.1:1", patience=1.0)
