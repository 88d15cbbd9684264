"""What a stage's blocks cost is asked once for all that are alike: a search prices thousands of stages."""

from __future__ import annotations

from clustersim import scenario as scenarios
from clustersim.core.device import AS_IS
from clustersim.model.seconds import local
from clustersim.scenario.run.held import held
from clustersim.scenario.run.parts import cost_of
from clustersim.scenario.run.split_step import local_cost
from clustersim.training.builder.stage_ops import StageOps


def test_blocks_that_are_alike_are_priced_once(monkeypatch):
    """Each kernel of each block was priced again for the host that calls it: a sixth of a sketch's time."""
    parts = held(scenarios.load("1f1b_gpt2_xl_1x8_a100", {"run.cuda_graph": []}))
    split = parts.split
    gpu, cost = cost_of(parts.scenario, parts.topology, parts.mesh, parts.model, AS_IS)
    stage_ops = StageOps(parts.mesh, parts.mesh.ranks(pp=0), local_cost(parts.scenario, gpu, cost), "bf16")
    blocks = [layer for layer in split.partition.stages[0].layers if layer.kind == "block"]
    assert len(blocks) > 2
    asked = []
    price = local.price
    monkeypatch.setattr(local, "price", lambda *args, **named: asked.append(1) or price(*args, **named))
    first = [stage_ops.host_seconds(blocks[0], kind) for kind in "FB"]
    assert asked
    assert any(sum(calls) for calls in first)
    asked.clear()
    for block in blocks[1:]:
        assert [stage_ops.host_seconds(block, kind) for kind in "FB"] == first
        assert stage_ops.runs(block, "F") is not None
    assert not asked
