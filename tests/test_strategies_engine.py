"""Strategies played by the engine, on machines with links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from player import play, toy_cost, toy_model

from clustersim.app.plots import gantt
from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Plan
from clustersim.engine import simulate
from clustersim.explain.metrics import summary
from clustersim.files.traces import write
from clustersim.training.strategies.ddp import DDPConfig, build

MIB = 2**20
NONE = np.zeros(0)


def planner(request, group):
    """A collective that touches no link: 20 us, then 10 GB/s of payload."""
    assert group.size > 1
    return Plan(request.kind, "ring", "Simple", 1, request.nbytes, 2e-5, NONE.astype(np.int64), NONE, 10e9)


@pytest.mark.parametrize("jitter", [0.0, 0.05])
@pytest.mark.parametrize(
    "config",
    [
        DDPConfig(),
        DDPConfig(gradient_as_bucket_view=True, bucket_cap_mb=4),
        DDPConfig(comm_hook="bf16_compress", gradient_accumulation_steps=3),
        DDPConfig(find_unused_parameters=True),
    ],
)
def test_the_engine_agrees_with_the_plain_player_span_by_span(config, jitter):
    model = toy_model([[2 * MIB, MIB // 2]] * 5 + [[12 * MIB]], buffers=64)
    topology = fabrics.load("hgx-a100", nodes=2)
    program = build(model, toy_cost(model, jitter=jitter), fabrics.mesh(topology), config, 3, 2)
    played = play(program, lambda op: 2e-5 + op.nbytes / 10e9).spans()
    simulated = simulate(program, topology, fabrics.mesh(topology), planner=planner).spans()
    assert np.array_equal(played["op"], simulated["op"])
    for column in ("ready", "start", "end"):
        assert played[column] == pytest.approx(simulated[column], rel=1e-12, abs=1e-15)


@pytest.fixture(scope="module")
def run():
    model = replace(toy_model([[4 * MIB]] * 8), seq_len=128)
    topology = fabrics.load("hgx-a100", nodes=2)
    mesh = fabrics.mesh(topology)
    program = build(model, toy_cost(model, jitter=0.01), mesh, DDPConfig(gradient_as_bucket_view=True), 4, 2)
    return model, simulate(program, topology, mesh, backend="ideal")


def test_a_run_on_two_nodes_sends_the_gradients_once_and_crosses_the_network(run):
    model, timeline = run
    result = summary(timeline, model, samples_per_step=16, peak=(312e12, "dense"))
    assert result["bytes_sent_per_gpu"] == pytest.approx(2 * 15 / 16 * model.parameters * 4)
    assert 0 < result["exposed_communication_s"] < result["communication_s"] + result["peer_wait_s"]
    assert result["step_time_s"] > 8 * 3e-3
    assert sum(result["phase_shares"].values()) == pytest.approx(1, abs=0.02)
    utilisation = [used for _, used, _ in result["hottest_links"]]
    assert utilisation == sorted(utilisation, reverse=True)
    assert 0 < utilisation[0] <= 1 + 1e-9
    moved = timeline.links.bytes_per_link()
    assert any("nic" in timeline.links.link_names[i] for i in np.flatnonzero(moved).tolist())


def test_a_simulated_run_is_drawn_and_written_with_link_counters(run, tmp_path):
    import json

    _, timeline = run
    gantt(timeline).savefig(tmp_path / "g.png")
    write(timeline, tmp_path / "t.json")
    document = json.loads((tmp_path / "t.json").read_text())
    counters = {e["name"] for e in document["traceEvents"] if e["ph"] == "C"}
    assert any("nic" in name for name in counters)
    assert any("gpu" in name for name in counters)
    reduced = next(e for e in document["traceEvents"] if e["name"] == "all_reduce bucket 0")
    assert reduced["args"]["Group size"] == 16
    assert reduced["args"]["dtype"] == "Float"
    assert reduced["args"]["algorithm"]
