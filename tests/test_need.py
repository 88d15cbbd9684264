"""Memory told before a run, against what a process of its own really took."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clustersim.core import limits
from clustersim.core.errors import ProgramError
from clustersim.engine import need

WITHIN = 2.0
"""The estimate is right to within this factor, either way."""

PEAK = "print([int(line.split()[1]) * 1024 for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"


def measured(code):
    """What a process that ran this code says it estimated, and its peak memory [bytes]."""
    done = subprocess.run([sys.executable, "-c", f"{code}\n{PEAK}"], capture_output=True, text=True, check=True)
    estimate, peak = (float(line) for line in done.stdout.split())
    return estimate, peak


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")

RUN = """
from clustersim import scenario
from clustersim.core import limits
from clustersim.engine import need
prepared = scenario.load({name!r}, {changes!r}).prepare()
print(need.flow(prepared.program, prepared.topology))
prepared.run().to_dict()
"""

REPLAY = """
import numpy as np
from clustersim import collectives, fabrics
from clustersim.engine import chunk, need, simulate
from clustersim.core.program import Collective, Program, Role
topology = fabrics.load("hgx-h100", nodes={nodes})
mesh = fabrics.mesh(topology)
ranks = mesh.world_group()
op = Collective("c", "all_reduce", 2.0**28, ranks, algorithm={algorithm!r})
program = Program(mesh.world_size, (Role("worker", ranks[0], (op,)),))
planner = lambda request, group: collectives.plan(request, group, "nccl", {channels})
timeline = simulate(program, topology, mesh, planner=planner, fidelity="chunk")
listed = not isinstance(timeline.links, chunk.LateLinks)
print(need.flow(program, topology) + listed * need.replay(int(timeline.stats["transfers"])))
"""


@needs_proc
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ddp_resnet50_1x8_v100", {}),
        ("ddp_llama3_8b_128x8_h100", {}),
        ("fsdp_llama3_405b_2048x8_h100", {"cluster.nodes": 128, "run.jitter": 0.02, "run.steps": 1}),
        ("fsdp_llama3_405b_2048x8_h100", {"cluster.nodes": 1024, "run.jitter": 0.0, "run.steps": 1}),
        ("ps_async_1x8", {"cluster.nodes": 16, "run.steps": 5, "strategy.bucket_cap_mb": 200.0}),
    ],
)
def test_a_flow_run_takes_what_was_told(name, changes):
    told, took = measured(RUN.format(name=name, changes=changes))
    assert took / WITHIN < told < took * WITHIN


@needs_proc
@pytest.mark.parametrize(("algorithm", "nodes", "channels"), [("ring", 32, 1), ("ring", 64, 1), ("ring", 16, 8)])
def test_a_replay_takes_what_was_told(algorithm, nodes, channels):
    told, took = measured(REPLAY.format(algorithm=algorithm, nodes=nodes, channels=channels))
    assert took / WITHIN < told < took * WITHIN


def test_the_limit_of_a_control_group_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "GROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 100000\n")
    assert limits.free_memory() == 400_000
    (tmp_path / "memory.max").write_text("max\n")
    assert limits.free_memory() != 400_000


def test_little_is_not_asked_for_and_much_is_refused(monkeypatch):
    monkeypatch.setattr(limits, "free_memory", lambda: 4 * 2.0**30)
    need.check(3 * 2.0**30, "at flow fidelity", "use less")
    with pytest.raises(ProgramError, match="needs about 9 GiB at chunk fidelity, 4 GiB are free; use fidelity 'flow'"):
        need.check(9 * 2.0**30, "at chunk fidelity", "use fidelity 'flow'")
    monkeypatch.setattr(limits, "free_memory", lambda: 0.0)
    need.check(1e6, "at flow fidelity", "use less")


def test_a_ring_of_a_sixteen_thousand_ranks_is_refused_at_once_with_exit_code_2(clustersim):
    words = ("--topology", "hgx-h100", "--nodes", "2048", "--algorithm", "ring", "--fidelity", "chunk")
    done = clustersim("collective", "all_reduce", *words)
    assert done.returncode == 2
    assert "iB at chunk fidelity" in done.stderr
    errors = [line for line in done.stderr.splitlines() if "so far" not in line]  # a loaded machine tells its progress
    assert len(errors) == 1
