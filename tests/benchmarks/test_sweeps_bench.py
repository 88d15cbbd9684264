"""What resuming a large sweep costs: memory is asserted, seconds are printed by ``pytest --benchmark-enable``."""

from __future__ import annotations

import tracemalloc

from clustersim.studies import sweep as sweeps
from clustersim.studies.sweep.row import line

ROWS = 2000
PAD = "x" * 3000
"""As long as a row's figures are."""


def plan(count):
    axes = [{"key": "strategy.micro_batch_size", "range": {"start": 1, "stop": count, "step": 1}}]
    return sweeps.from_table({"base": "ddp_resnet50_1x8_v100", "axes": axes}, "mine.toml")


def fill(folder, whole):
    identity = sweeps.Fingerprints()
    lines = [line(identity(whole.scenario(case)), {"result": {"pad": PAD}}) for case in whole.cases()]
    with sweeps.Store(folder).writing() as writer:
        writer.append(lines)


def test_resuming_keeps_keys_in_memory_and_no_rows(tmp_path, benchmark):
    whole = plan(ROWS)
    fill(tmp_path, whole)
    assert (tmp_path / "results.jsonl").stat().st_size > ROWS * len(PAD)
    sweeps.sweep(whole, tmp_path, jobs=1)  # whatever is loaded and remembered once
    tracemalloc.start()
    done = sweeps.sweep(whole, tmp_path, jobs=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (done.kept, done.computed) == (ROWS, 0)
    assert peak < ROWS * len(PAD) / 5  # keys, twice
    benchmark(lambda: sweeps.sweep(whole, tmp_path, jobs=1))
