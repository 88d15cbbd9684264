"""FSDP2 sends the bytes that torch's own ``fully_shard`` sends, recorded on its fake process group."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from player import toy_cost

from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective
from clustersim.model import from_hf
from clustersim.model.adapters import Trained, with_trained
from clustersim.training.strategies.fsdp import build
from clustersim.training.strategies.fsdp_config import FSDPConfig

LLAMA = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 16,
}


@functools.cache
def sent_by_torch(
    ranks: int, param_dtype: str, reduce_dtype: str, frozen: tuple[str, ...] = (), *, ends_apart: bool = False
) -> tuple[list[int], list[int]]:
    """Bytes of the all_gathers and of the reduce_scatters of one forward and backward, in their order, where parameters
    whose names begin as ``frozen`` says are not trained. ``ends_apart``: wrapped as torchtitan wraps a Llama."""
    torch = pytest.importorskip("torch", reason="needs torch")
    store = pytest.importorskip("torch.testing._internal.distributed.fake_pg", reason="needs torch's fake group")
    fully = pytest.importorskip("torch.distributed.fsdp", reason="needs FSDP2")
    dist = torch.distributed
    if dist.is_initialized():
        pytest.skip("another process group is open")
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    gathered: list[int] = []
    scattered: list[int] = []
    dist.init_process_group("fake", rank=0, world_size=ranks, store=store.FakeStore())
    try:
        mesh = dist.init_device_mesh("cpu", (ranks,))
        policy = fully.MixedPrecisionPolicy(param_dtype=types[param_dtype], reduce_dtype=types[reduce_dtype])
        model = _Llama(torch)
        for name, parameter in model.whole.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        if ends_apart:
            fully.fully_shard(model.whole.words, mesh=mesh, mp_policy=policy)
        for block in model.blocks:
            fully.fully_shard(block, mesh=mesh, mp_policy=policy)
        if ends_apart:
            last = [model.whole.norm, model.whole.head]
            fully.fully_shard(last, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully.fully_shard(model.whole, mesh=mesh, mp_policy=policy)
        with _Recorded(torch, gathered, scattered).mode():
            model.whole(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    finally:
        dist.destroy_process_group()
    return gathered, scattered


class _Recorded:
    """Sizes of the collectives that are dispatched."""

    def __init__(self, torch: Any, gathered: list[int], scattered: list[int]) -> None:
        self.torch = torch
        self.lists = {"all_gather": gathered, "reduce_scatter": scattered}

    def mode(self) -> Any:
        """A dispatch mode that writes them down."""
        lists = self.lists
        of_modes = self.torch.utils._python_dispatch

        class Mode(of_modes.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                name = func._schema.name
                if name.startswith("c10d::_allgather_base"):
                    lists["all_gather"].append(args[0].numel() * args[0].element_size())
                if name.startswith("c10d::_reduce_scatter_base"):
                    lists["reduce_scatter"].append(args[1].numel() * args[1].element_size())
                return func(*args, **(kwargs or {}))

        return Mode()


class _Llama:
    """Modules with the parameters of :data:`LLAMA`; what they compute does not matter."""

    def __init__(self, torch: Any) -> None:
        nn = torch.nn
        h = LLAMA["hidden_size"]
        kv = h // 3
        f = LLAMA["intermediate_size"]

        def block() -> Any:
            widths = {
                "q": (h, h),
                "k": (h, kv),
                "v": (h, kv),
                "o": (h, h),
                "gate": (h, f),
                "up": (h, f),
                "down": (f, h),
            }
            linears = {name: nn.Linear(*sizes, bias=False) for name, sizes in widths.items()}
            norms = {"norm1": nn.RMSNorm(h), "norm2": nn.RMSNorm(h)}
            return _module(nn, linears | norms, _every)

        self.blocks = [block() for _ in range(LLAMA["num_hidden_layers"])]
        ends = {"words": nn.Embedding(101, h), "norm": nn.RMSNorm(h), "head": nn.Linear(h, 101, bias=False)}
        chain = {f"block{i}": each for i, each in enumerate(self.blocks)}
        self.whole = _module(nn, ends | chain, _through)


def _module(nn: Any, parts: dict[str, Any], run: Any) -> Any:
    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                self.add_module(name, part)

        def forward(self, x: Any) -> Any:
            return run(self, x)

    return Made()


def _every(m: Any, x: Any) -> Any:
    y = m.norm1(x)
    y = x + m.o(m.q(y)) + (m.k(y) + m.v(y)).sum(-1, keepdim=True)
    return y + m.down(m.gate(m.norm2(y)) * m.up(y))


def _through(m: Any, x: Any) -> Any:
    y = m.words(x)
    for name in ("block0", "block1"):
        y = getattr(m, name)(y)
    return m.head(m.norm(y))


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("dtypes", [("fp32", "fp32"), ("bf16", "fp32")])
def test_every_parameter_is_padded_as_fully_shard_pads_it(ranks: int, dtypes: tuple[str, str]) -> None:
    gathered, scattered = sent_by_torch(ranks, *dtypes)
    model = from_hf(LLAMA | {"tie_word_embeddings": False})
    config = FSDPConfig(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    program = build(model, toy_cost(model), Mesh(np.arange(ranks), ranks), config, 1, 0)
    ops = [op for role in program.roles for op in role.ops if isinstance(op, Collective)]
    assert [op.nbytes for op in ops if op.kind == "all_gather"] == gathered
    assert [op.nbytes for op in ops if op.kind == "reduce_scatter"] == scattered


@pytest.mark.parametrize("ranks", [3, 8])
def test_torchtitans_ends_are_units_of_their_own(ranks: int) -> None:
    gathered, scattered = sent_by_torch(ranks, "bf16", "fp32", ends_apart=True)
    assert (gathered, scattered) != sent_by_torch(ranks, "bf16", "fp32")
    model = from_hf(LLAMA | {"tie_word_embeddings": False})
    config = FSDPConfig(param_dtype="bf16", reduce_dtype="fp32", ends_apart=True)
    program = build(model, toy_cost(model), Mesh(np.arange(ranks), ranks), config, 1, 0)
    ops = [op for role in program.roles for op in role.ops if isinstance(op, Collective)]
    assert [op.nbytes for op in ops if op.kind == "all_gather"] == gathered
    assert [op.nbytes for op in ops if op.kind == "reduce_scatter"] == scattered


FROZEN = {
    "embedding and first block": (("model.embed_tokens", "model.layers.0"), ("words", "block0")),
    "all but two products": (
        ("*norm*", "*.[kvo]_proj", "*.mlp", "model.embed_tokens", "lm_head", "model.layers.0.self_attn.q_proj"),
        (
            "words",
            "norm",
            "head",
            "block0",
            *(f"block1.{name}" for name in ("k", "v", "o", "norm", "gate", "up", "down")),
        ),
    ),
}


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("which", FROZEN)
def test_what_is_frozen_is_gathered_and_not_reduced(ranks: int, which: str) -> None:
    patterns, theirs = FROZEN[which]
    gathered, scattered = sent_by_torch(ranks, "bf16", "fp32", theirs)
    model = with_trained(from_hf(LLAMA | {"tie_word_embeddings": False}), Trained(patterns))
    config = FSDPConfig(param_dtype="bf16", reduce_dtype="fp32")
    program = build(model, toy_cost(model), Mesh(np.arange(ranks), ranks), config, 1, 0)
    ops = [op for role in program.roles for op in role.ops if isinstance(op, Collective)]
    assert [op.nbytes for op in ops if op.kind == "all_gather"] == gathered
    assert [op.nbytes for op in ops if op.kind == "reduce_scatter"] == scattered
