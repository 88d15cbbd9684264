"""Optimizers that are not plain: states as torch has them, what their steps do, and where they are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from player import toy_cost

from clustersim.core.errors import ScenarioError
from clustersim.core.mesh import Mesh
from clustersim.core.model import Layer, MatrixUpdates, Model, Tensor
from clustersim.core.optimizers import OPTIMIZERS, matrices, state_bytes
from clustersim.core.program import Collective, Compute
from clustersim.model import model
from clustersim.scenario import load
from clustersim.training.memory import Training, memory
from clustersim.training.strategies.fsdp import build
from clustersim.training.strategies.fsdp_config import FSDPConfig

SIZES = {"up.weight": (96, 32), "up.bias": (96,), "down.weight": (32, 96), "norm.weight": (32,)}
BLOCK = Layer(
    "layers.0",
    "block",
    tuple(Tensor(name, int(np.prod(size)), width=size[1] if len(size) == 2 else 1) for name, size in SIZES.items()),
    (),
)
SMALL = Model("small", "mlp", (Layer("head", "head", (Tensor("head.weight", 4096, width=32),), ()), BLOCK))


@pytest.mark.parametrize(("name", "theirs"), [("adafactor", "Adafactor"), ("muon", "Muon"), ("adamw", "AdamW")])
def test_states_have_the_bytes_that_torch_keeps(name: str, theirs: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    if not hasattr(torch.optim, theirs):
        pytest.skip(f"this torch has no {theirs}")
    tensors = {key: torch.nn.Parameter(torch.ones(size)) for key, size in SIZES.items()}
    head = torch.nn.Parameter(torch.ones(128, 32))
    apart = [key for key in SIZES if name == "muon" and len(SIZES[key]) == 1]
    optimizers = [getattr(torch.optim, theirs)([t for key, t in tensors.items() if key not in apart])]
    optimizers.append(torch.optim.AdamW([*(tensors[key] for key in apart), head]))
    for parameter in (*tensors.values(), head):
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    kept = sum(
        value.numel() * value.element_size()
        for optimizer in optimizers
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    )
    ours = state_bytes(SMALL, name, 4.0)
    if name == "adafactor":  # the head above is AdamW's
        ours += 8 * 4096 - 4 * (128 + 32)
    assert ours == kept


def test_eight_bits_take_a_quarter_of_two_states() -> None:
    gpt2 = model("gpt2")
    assert state_bytes(gpt2, "adamw_4bit", 4.0) / state_bytes(gpt2, "adamw", 4.0) == pytest.approx(0.1328, abs=2e-3)
    assert state_bytes(gpt2, "adamw_8bit", 4.0) / state_bytes(gpt2, "adamw", 4.0) == pytest.approx(0.2539, abs=2e-3)
    run = {name: memory(gpt2, Training(micro_batch_size=1, optimizer=name)) for name in OPTIMIZERS}
    assert run["paged_adamw_8bit"].optimizer_states == 0
    assert run["adafactor"].optimizer_states < 0.01 * run["adamw"].optimizer_states
    assert run["muon"].optimizer_states == pytest.approx(
        run["adamw"].optimizer_states - 4 * sum(r * c * n for (r, c), n in matrices(gpt2).items())
    )


def test_muons_iterations_are_the_products_of_its_matrices() -> None:
    """Large matrices at the rate of a large product: 4 r^2 c + 2 r^3 FLOPs an iteration."""
    cost = load("single_gpt2_1x1_a100", {"run.optimizer": "muon", "model.name": "llama2-7b"}).prepare().cost
    flops = sum(
        n * 5 * (4 * min(size) ** 2 * max(size) + 2 * min(size) ** 3)
        for size, n in matrices(model("llama2-7b")).items()
    )
    seconds = sum(update.count * update.seconds for update in cost.matrices)
    assert 0.5 * 312e12 < flops / seconds < 312e12
    assert cost.optimizer > seconds


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 6), (2, 3), (4, 2), (16, 1)])
def test_shards_deal_out_matrices_in_rounds(ranks: int, rounds: int) -> None:
    cost = toy_cost(SMALL, optimizer=1.0 + 6 * 0.25, matrices=(MatrixUpdates(6, 3072, 0.25),))
    program = build(SMALL, cost, Mesh(np.arange(ranks), ranks), FSDPConfig(), 1, 0)
    ops = program.roles[0].ops
    (made,) = (op for op in ops if isinstance(op, Compute) and op.name == "orthogonalise")
    assert made.duration == pytest.approx(rounds * 0.25)
    sent = [op.nbytes for op in ops if isinstance(op, Collective) and op.kind == "all_to_all"]
    assert sent == ([2.0 * rounds * 3072] * 2 if ranks > 1 else [])
    (update,) = (op for op in ops if isinstance(op, Compute) and op.name == "optimizer")
    assert update.duration == pytest.approx(1.0 / ranks)


@pytest.mark.parametrize(
    ("scenario", "changes", "message"),
    [
        ("zero2_llama3_8b_2x8_a100", {"run.optimizer": "muon"}, "'muon' is not played with 'zero'"),
        ("fsdp_llama3_8b_64x8_h100", {"run.optimizer": "adafactor"}, "with strategies single, ddp"),
        ("tp8_pp4_llama3_70b_32x8_h100", {"run.optimizer": "adamw_8bit"}, "where [parallel] splits the model"),
        ("fsdp_llama3_8b_64x8_h100", {"run.optimizer": "adamw_8bit", "strategy.cpu_offload": True}, "on the host"),
        ("single_gpt2_1x1_a100", {"run.optimizer": "moun"}, "did you mean 'muon'?"),
    ],
)
def test_where_an_optimizer_is_not_played_it_is_refused(scenario: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as error:
        load(scenario, changes).prepare()
    assert message in str(error.value)
