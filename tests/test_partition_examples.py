"""A split model against worked examples: bytes, FLOPs, parameters, layouts and activations of real frameworks.

``data/partition_examples.csv`` says where each number comes from; they must be met exactly, or to the digits printed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from clustersim.core.model import Model
from clustersim.model import from_hf, model
from clustersim.training.parallel import ParallelConfig, Recompute, stages_of
from clustersim.training.partition import Exchange, Item, LocalLayer, Partition, Work, partition
from clustersim.training.partition.stages import placed
from tests.tables import table_rows

ROWS = table_rows(Path(__file__).parent / "data" / "partition_examples.csv")
RECOMPUTE = {
    "": Recompute(),
    "full": Recompute("full"),
    "selective": Recompute("selective", modules=("core_attn",)),
}
BF16 = 2
FP32 = 4


@cache
def built(name: str, seq_len: int) -> Model:
    """A model of the table: a shipped one, or a GPT of the shape the row names, op by op with dropout as in 2022."""
    if not name.startswith("gpt"):
        return model(name, seq_len=seq_len)
    sizes = {"layers": 96, "heads": 96, "wide": 12288} if name == "gpt3-175b" else {"heads": 2, "wide": 64}
    sizes |= {word: int(n) for n, word in re.findall(r"(\d+) (layers|heads|wide)", name)}
    config = {
        "model_type": "gpt2",
        "n_embd": sizes["wide"],
        "n_head": sizes["heads"],
        "n_layer": sizes["layers"],
        "n_positions": seq_len,
        "vocab_size": 51200,
        "activation_function": "gelu",
    }
    if name == "gpt3-175b":
        # Megatron's estimators count no biases of linears and no position table.
        plain = {"qkv_bias": False, "out_bias": False, "mlp_bias": False, "positions": "none", "n_positions": 0}
        return from_hf(config, tied=True, **plain)
    return from_hf(config, attention="eager", implementation="fused")


class Case:
    """One row, and the partition it is about."""

    def __init__(self, row: dict[str, str]) -> None:
        self.row = row
        self.parallel = ParallelConfig(**json.loads(row["parallel"]))
        self.recompute = RECOMPUTE[row["recompute"]]

    @property
    def model(self) -> Model:
        return built(self.row["model"], int(self.row["seq_len"]))

    def split(self, **changes: Any) -> Partition:
        return partition(self.model, ParallelConfig(**json.loads(self.row["parallel"]) | changes), self.recompute)

    @property
    def block(self) -> LocalLayer:
        return next(layer for layer in self.split().stages[0].layers if layer.kind == "block")

    @property
    def head(self) -> LocalLayer:
        return self.split().stages[-1].layers[-1]

    def number(self, word: str) -> int:
        """The number behind a word of the quantity."""
        return int(re.search(rf"{word} (\d+)", self.row["quantity"])[1])


def exchanges(items: tuple[Item, ...], *kinds: str) -> list[Exchange]:
    return [item for item in items if isinstance(item, Exchange) and (not kinds or item.kind in kinds)]


def counted(items: tuple[Item, ...], size: int) -> list[list[int]]:
    """[how many, bytes of each] of every kind, in the order they first occur."""
    found: dict[str, list[int]] = {}
    for item in exchanges(items):
        count, nbytes = found.get(item.kind, [0, round(item.elements * size)])
        assert nbytes == item.elements * size
        found[item.kind] = [count + 1, nbytes]
    return list(found.values())


def model_flops(items: tuple[Item, ...]) -> float:
    """Forward and backward as an MFU counts them: a product twice more in backward, attention too."""
    return sum(3 * kernel.flops for item in items if isinstance(item, Work) for kernel in item.kernels)


def block_bytes(case: Case) -> float:
    layer = case.block
    return BF16 * (layer.kept + layer.kept_for_weights) * case.number("micro batch")


def percent(case: Case) -> float:
    case.recompute, mine = RECOMPUTE[""], block_bytes(case)
    case.row = case.row | {"parallel": json.dumps(json.loads(case.row["parallel"]) | {"sequence_parallel": False})}
    return round(100 * mine / block_bytes(case), 2)


def first_stage(case: Case) -> float:
    """Blocks of a chunk times chunks in flight on rank 0: p micro-batches, or p v + p - 1 chunks when interleaved."""
    pp = case.parallel.pp
    vpp = case.parallel.vpp or 1
    in_flight = pp if vpp == 1 else pp * vpp + pp - 1
    blocks = sum(layer.kind == "block" for layer in case.split().stages[0].chunks[0].layers)
    return round(block_bytes(case) * blocks * in_flight / 2**30, 6)


def most_loaded(case: Case) -> float:
    """As Megatron's estimator has it: blocks and final norm spread evenly over stages, beside a first stage's table."""
    uneven = {"first_stage_less_layers": 1, "last_stage_less_layers": 1} if case.model.n_blocks == 126 else {}
    stages = case.split(**uneven).stages
    layers = [layer for stage in stages for layer in stage.layers]
    table = layers[0].parameters
    table_of_head = sum(t.numel for t in layers[-1].tensors if t.cut == "vocab" and not t.tied_to)
    rest = sum(layer.parameters for layer in layers[1:]) - table_of_head
    return rest / len(stages) + table + (table_of_head if len(stages) == 1 else 0)


def ring_bytes(case: Case) -> float:
    """A ring all-reduce sends 2 (t - 1) / t of the tensor, an all-gather or reduce-scatter half of that."""
    t = case.parallel.tp
    layer = case.block
    items = exchanges(layer.forward) + exchanges(layer.backward)
    return sum(item.elements * BF16 * (2 if item.kind == "all_reduce" else 1) * (t - 1) / t for item in items)


def cp_items(case: Case, way: str) -> tuple[Item, ...]:
    items = case.block.forward if way == "forward" else case.block.backward
    return tuple(item for item in exchanges(items) if item.dims == ("cp",))


def step_flops(case: Case) -> float:
    steps = [k.flops for item in case.block.forward if isinstance(item, Work) for k in item.kernels if k.seq]
    assert len(steps) == case.parallel.cp
    assert len(set(steps)) == 1
    return steps[0]


def rank_heads(case: Case) -> list[int]:
    kernel = next(k for item in case.block.forward if isinstance(item, Work) for k in item.kernels if k.seq)
    tokens = kernel.seq
    t = case.parallel.tp
    s = case.model
    read = kernel.nbytes / (2 * tokens * kernel.head_dim)  # queries and outputs, keys and values
    assert kernel.heads * t == s.heads
    return [kernel.heads, round(read - kernel.heads)]


def qkv_output(case: Case) -> float:
    gathered = exchanges(case.block.forward, "all_gather")
    scattered = exchanges(case.block.backward, "reduce_scatter")
    assert len(gathered) == len(scattered) == 1
    assert gathered[0].elements == scattered[0].elements
    return gathered[0].elements * BF16


def gathered_keys(case: Case) -> float:
    again = cp_items(case, "backward")
    assert [item.kind for item in again] == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert len({item.elements for item in again}) == 1
    return sum(item.elements for item in cp_items(case, "forward")) * BF16


QUANTITIES: dict[str, Callable[[Case], Any]] = {
    "blocks by stage": lambda case: [
        sum(layer.kind == "block" for layer in stage.layers) for stage in case.split().stages
    ],
    "layout": lambda case: "|".join(stages_of(case.parallel.layout)),
    "model FLOPs": lambda case: sum(model_flops(layer.forward) for layer in case.split().stages[0].layers),
    "total parameters": lambda case: round(case.model.parameters / 1e9, 2),
    "parameters on most loaded shard": lambda case: round(most_loaded(case) / 1e9, 4),
    "bytes of weights, gradients and optimizer": lambda case: most_loaded(case) * (6 + 12 / case.number("dp")),
    "activation bytes of a block": block_bytes,
    "activation percent of TP only": percent,
    "activation GiB of the first stage": first_stage,
    "forward exchanges of a block": lambda case: counted(case.block.forward, BF16),
    "backward exchanges of a block": lambda case: counted(case.block.backward, BF16),
    "ring bytes of a block": ring_bytes,
    "exchanges of the loss": lambda case: counted(
        tuple(item for item in exchanges(case.head.forward) if item.dtype == "fp32"), FP32
    ),
    "message bytes": lambda case: case.split().stages[0].chunks[0].message * BF16,
    "fp32 bytes the head keeps": lambda case: case.head.fp32_kept * FP32,
    "fp32 bytes of the embedding": lambda case: case.split().stages[0].layers[0].parameters * FP32,
    "bytes of the gathered qkv output": qkv_output,
    "heads of a rank": rank_heads,
    "forward ring": lambda case: counted(cp_items(case, "forward"), BF16),
    "backward ring": lambda case: [
        len(cp_items(case, "backward")),
        sum(item.elements for item in cp_items(case, "backward")) * BF16,
    ],
    "gathered keys and values": gathered_keys,
    "bytes leaving in forward all-to-alls": lambda case: sum(
        item.elements * BF16 * (case.parallel.cp - 1) / case.parallel.cp for item in cp_items(case, "forward")
    ),
    "FLOPs of each ring step": step_flops,
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['id']}-{row['quantity']}-{row['parallel']}")
def test_a_worked_example_is_met(row: dict[str, str]) -> None:
    quantity = re.sub(r" at (micro batch|dp) \d+$", "", row["quantity"])
    found = QUANTITIES[quantity](Case(row))
    expected = json.loads(row["value"])
    if isinstance(expected, float) and expected > 1e6:
        assert math.isclose(found, expected, rel_tol=1e-15)
    else:
        assert found == expected


def test_a_layout_gives_every_rank_its_stages_in_megatrons_order() -> None:
    # ``chunk c of rank r is entry c*pp+r`` (NVIDIA/Megatron-LM@d98e8a64 pipeline_parallel_layer_layout.py).
    row = next(row for row in ROWS if row["quantity"] == "layout" and "t*2" in row["parallel"])
    parallel = ParallelConfig(**json.loads(row["parallel"]))
    split = partition(model("llama3-70b"), parallel)
    expected = [len(text) for text in stages_of(parallel.layout)]
    for rank, stage in enumerate(split.stages):
        assert [chunk.stage for chunk in stage.chunks] == list(placed(8, 5, "loop")[rank])
        assert [len(chunk.layers) for chunk in stage.chunks] == [expected[c * 8 + rank] for c in range(5)]
