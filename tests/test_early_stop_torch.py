"""What torch's checkpoints compute again of a gated MLP, beside what is played: ``early_stop``."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from clustersim.scenario import load


class Counted(TorchDispatchMode):
    """Operators by name, as they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Gated(nn.Module):
    """The second half of a block."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((8, 16), (8, 16), (16, 8)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.dropout(self.down(nn.functional.silu(self.gate(h)) * self.up(h)))


@pytest.mark.parametrize(("dropout", "reentrant", "products"), [(0.0, True, 9), (0.0, False, 8), (0.1, False, 9)])
def test_a_checkpoint_that_is_not_reentrant_leaves_out_the_last_product(
    dropout: float, reentrant: bool, products: int
) -> None:
    """Six products are of gradients; a mask behind the last one is kept for backward, so that it runs again."""
    block, x = Gated(dropout), torch.randn(4, 8, requires_grad=True)
    y = checkpoint(block, x, use_reentrant=reentrant) if reentrant else checkpoint_wrapper(block)(x)
    with Counted() as counted:
        y.sum().backward()
    assert counted.calls["aten.mm.default"] == products


@pytest.mark.parametrize(
    ("kind", "implementation", "said", "stops"),
    [
        ("fsdp", "eager", None, True),
        ("zero", "eager", None, False),
        ("zero", "fused", None, True),
        ("zero", "eager", True, True),
        ("fsdp", "eager", False, False),
    ],
)
def test_recomputation_stops_early_where_fsdps_wrapper_or_a_compiler_does_it(
    kind: str, implementation: str, said: bool | None, stops: bool
) -> None:
    def backward(early: bool | None) -> float:
        model = {"name": "llama3.2-1b", "seq_len": 1024, "dtype": "bf16", "activation_checkpointing": "full"}
        model |= {"implementation": implementation} | ({} if early is None else {"early_stop": early})
        cluster = {"topology": "hgx-h100", "nodes": 1, "gpus_per_node": 2}
        strategy = {"kind": kind, "micro_batch_size": 1, "param_dtype": "bf16"}
        run = load({"cluster": cluster, "model": model, "strategy": strategy, "run": {"steps": 3}}).run()
        return float(run.summary["phase_shares"]["backward"] * run.summary["step_time_s"])

    assert backward(False) > backward(True)
    assert backward(said) == backward(stops)
