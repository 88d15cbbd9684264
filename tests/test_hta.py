"""Holistic Trace Analysis reads a simulated run: its breakdown is ours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import clustersim
from clustersim.files import traces

hta = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")


def union(starts: np.ndarray, ends: np.ndarray) -> float:
    """Seconds that some interval covers."""
    order = np.argsort(starts)
    until = np.concatenate([[-np.inf], np.maximum.accumulate(ends[order])[:-1]])
    return float(np.maximum(ends[order] - np.maximum(starts[order], until), 0.0).sum())


@pytest.mark.parametrize("scenario", ["ddp_resnet50_1x8_v100", "zero3_llama3_8b_2x8_a100"])
def test_its_breakdown_of_an_exported_run_is_ours_within_rounding(tmp_path: Path, scenario: str):
    run = clustersim.load(scenario, {"run.steps": 1}).run().timeline
    files = {}
    for rank in (0, 3):
        files[rank] = str(tmp_path / f"rank{rank}.hta.json.gz")
        traces.write(run, files[rank], [rank])
    analysis = hta.TraceAnalysis(trace_files=files)
    table = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    overlap = analysis.get_comm_comp_overlap(visualize=False).set_index("rank")
    for rank in files:
        spans = run.spans([rank])
        device = np.array([run.ops[i].bound != "host" for i in spans["op"]])
        compute = np.array([run.ops[i].kind == "compute" for i in spans["op"]]) & device
        start = spans["start"]
        end = spans["end"]
        rounding = 1e-6 * 2 * device.sum()  # HTA keeps whole microseconds of each kernel
        busy = union(start[device], end[device])
        computing = union(start[compute], end[compute])
        whole = end[device].max() - start[device].min()
        assert table["compute_time(us)"][rank] * 1e-6 == pytest.approx(computing, abs=rounding)
        assert table["idle_time(us)"][rank] * 1e-6 == pytest.approx(whole - busy, abs=rounding)
        talking = union(start[device & ~compute], end[device & ~compute])
        hidden = computing + talking - busy
        assert overlap["comp_comm_overlap_pctg"][rank] / 100 == pytest.approx(hidden / talking, abs=0.02)
