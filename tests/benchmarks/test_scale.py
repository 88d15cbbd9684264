"""What a run costs. Run with ``pytest tests/benchmarks --benchmark-enable`` for timings; by default each runs once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from clustersim import scenario

LARGE = "ddp_llama3_8b_128x8_h100"


def test_ddp_on_1024_gpus_takes_500_mib_as_a_whole_process():
    # A process of its own waits for its child, so that the peak is of this child alone.
    program = (
        "import resource, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-m', 'clustersim', 'run', '{LARGE}', '--json'],\n"
        "               check=True, stdout=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_maxrss)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) * (1 if sys.platform == "darwin" else 1024) < 500 * 2**20


def test_a_program_for_1024_ranks_is_no_longer_than_for_8():
    large = scenario.load(LARGE, {"cluster.nodes": 128}).program()
    small = scenario.load(LARGE, {"cluster.nodes": 1}).program()
    assert [len(role.ops) for role in large.roles] == [len(role.ops) for role in small.roles]


@pytest.mark.parametrize("name", ["ddp_resnet50_1x8_v100", "ddp_gpt2_xl_2x8_a100"])
def test_speed_of_a_shipped_scenario(benchmark, name):
    loaded = scenario.load(name)
    result = benchmark(loaded.run)
    # Events, not seconds: one collective is a handful of events however many ranks and steps it has.
    collectives = sum(op.kind != "compute" for op in result.timeline.ops)
    assert result.timeline.stats["events"] <= 20 * collectives + 100
