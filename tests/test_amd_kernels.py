"""Kernels of AMD's GPUs, predicted beside tables that others measured (tests/data/amd_*.csv)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clustersim import scenario
from clustersim.core.device import device
from clustersim.core.model import Kernel
from clustersim.model.seconds.attention import attention_parts
from clustersim.model.seconds.base import Execution, Setting, setting
from clustersim.model.seconds.float8 import cast_seconds
from clustersim.model.seconds.gemm import grouped_parts
from clustersim.model.seconds.kernels import spent
from clustersim.scenario.run.parts import execution_of
from tests.tables import table_rows

DATA = Path(__file__).parent / "data"
CAST_BYTES = 6.0
"""Of an element of the weights, which Primus-Turbo's products cast each time: read twice, written in two layouts."""


def rows_of(table, **chosen):
    found = [row for row in table_rows(DATA / table) if all(row[key] == value for key, value in chosen.items())]
    assert found
    return found


def product(row):
    return tuple(int(row[key]) for key in ("m", "n", "k"))


def measured(row, flops, backward=2.0):
    """Seconds forward and, where the row has it, backward, whose work is so many times forward's."""
    forward = flops / float(row["forward_tflops"]) / 1e12
    if not row["backward_tflops"]:
        return forward
    return forward + backward * flops / float(row["backward_tflops"]) / 1e12


def predicted_product(where, row):
    """Seconds of a linear layer as a step has it, with its casts, and those of its weights, where there are any."""
    m, n, k = product(row)
    flops = 2.0 * m * n * k
    linear = Kernel("linear", "gemm", m=m, n=n, k=k, flops=flops, backward_flops=2 * flops, saved=m * k)
    parts = ("F", "B") if row["backward_tflops"] else ("F",)
    seconds = sum(spent(where, linear, 1, part)[0] + cast_seconds(where, linear, 1, part) for part in parts)
    return seconds + where.in_8_bits * CAST_BYTES * n * k / where.device.stream_rate()


def off(ratios):
    """Median and spread of predicted over measured."""
    return np.median(ratios), np.std(np.log(ratios))


@pytest.mark.parametrize(
    ("gpu", "dtype", "source", "spread"),
    [
        ("MI300X", "bf16", "Primus-Turbo", 0.06),
        ("MI300X", "fp8", "Primus-Turbo", 0.05),
        ("MI355X", "bf16", "aiter", 0.1),
        ("MI300X", "bf16", "TransformerEngine", 0.1),
    ],
)
def test_products_are_as_long_as_measured(gpu, dtype, source, spread):
    """Two publishers' whom nothing was fitted to are Transformer Engine's, within a tenth."""
    where = Setting(device(gpu), dtype)
    rows = [row for row in rows_of("amd_products.csv", gpu=gpu, dtype=dtype, count="1") if source in row["source"]]
    ratios = [predicted_product(where, row) / measured(row, 2.0 * np.prod(product(row), dtype=float)) for row in rows]
    middle, width = off(ratios)
    assert abs(middle - 1) < (0.1 if source == "TransformerEngine" else 0.03)
    assert width < spread


def test_products_in_mxfp8_reach_the_mean_rates_of_primus_turbo_on_cdna_4():
    """1,797 TFLOP/s forward, weights cast each time, and 1,978 backward (pull request 274), of the shapes that its
    benchmark has in 8 bits; nothing was fitted to which shape takes how long."""
    where = Setting(device("MI355X"), "fp8", float8_recipe="mxfp8")
    rates = {"F": [], "B": []}
    for row in rows_of("amd_products.csv", gpu="MI300X", dtype="fp8", count="1"):
        m, n, k = product(row)
        flops = 2.0 * m * n * k
        linear = Kernel("linear", "gemm", m=m, n=n, k=k, flops=flops, backward_flops=2 * flops, saved=m * k)
        for part, work in (("F", flops), ("B", 2.0 * flops)):
            seconds = spent(where, linear, 1, part)[0] + cast_seconds(where, linear, 1, part)
            weights = CAST_BYTES * n * k / where.device.stream_rate() if part == "F" else 0.0
            rates[part].append(work / (seconds + weights) / 1e12)
    assert np.mean(rates["F"]) == pytest.approx(1797, rel=0.05)
    assert np.mean(rates["B"]) == pytest.approx(1978, rel=0.05)


def test_products_of_experts_are_as_long_as_measured():
    where = Setting(device("MI300X"), "bf16")
    ratios = []
    for row in (row for row in rows_of("amd_products.csv") if row["count"] != "1"):
        m, n, k = product(row)
        count = int(row["count"])
        sizes = ((m, n, k), (m, k, n), (n, k, m))
        seconds = sum(max(grouped_parts(where, *each, count)) for each in sizes)
        ratios.append(seconds / measured(row, 2.0 * count * m * n * k))
    middle, width = off(ratios)
    assert abs(middle - 1) < 0.03
    assert width < 0.1


def attention_ratios(rows):
    """Predicted over measured seconds of fused attention; measured tables count half of the square under a mask."""
    ratios = []
    for row in rows:
        seq, width, heads, batch = (int(row[key]) for key in ("seq", "head_dim", "heads", "batch"))
        causal = row["causal"] == "1"
        flops = 4.0 * heads * seq**2 * width * (0.5 if causal else 1.0)
        kernel = Kernel(
            "attention", "attention", flops=flops, backward_flops=2.5 * flops,
            heads=heads, head_dim=width, seq=seq, causal=causal,
        )  # fmt: skip
        where = Setting(device(row["gpu"]), "bf16", attention_kernel=row["kernel"])
        passes = (False, True) if row["backward_tflops"] else (False,)
        seconds = sum(max(attention_parts(where, kernel, batch, backward=backward)) for backward in passes)
        ratios.append(seconds / measured(row, batch * flops, backward=2.5))
    return ratios


@pytest.mark.parametrize(
    ("gpu", "kernel", "source", "apart", "spread"),
    [
        ("MI300X", "fa2", "Primus-Turbo", 0.03, 0.06),
        ("MI300X", "fa2", "attn-dsl-bench", 0.05, 0.1),
        ("MI300X", "aotriton", "attn-dsl-bench", 0.03, 0.06),
        ("MI355X", "fa2", "HipKittens", 0.15, 0.2),
        ("MI355X", "aotriton", "HipKittens", 0.25, 0.6),
    ],
)
def test_attention_is_as_long_as_measured(gpu, kernel, source, apart, spread):
    """One publisher's table of Composable Kernel's and AITER's kernels tells another's on MI300X to 5 %. On MI355X the
    forward of PyTorch's kernels is told by MI300X's share of peak."""
    rows = [row for row in rows_of("amd_attention.csv", gpu=gpu, kernel=kernel) if source in row["source"]]
    middle, width = off(attention_ratios(rows))
    assert abs(middle - 1) < apart
    assert width < spread


def test_pytorch_has_aotritons_attention_and_transformer_engine_its_own():
    """On NVIDIA's both have FlashAttention-2's."""
    gpu = device("MI300X")
    assert setting(gpu, Execution()).attention_kernel == "aotriton"
    assert setting(gpu, Execution(transformer_engine=True)).attention_kernel == "fa2"
    assert setting(device("H100"), Execution()).attention_kernel == "fa2"
    assert execution_of(scenario.load("tp8_pp4_llama3_70b_32x8_h100")).transformer_engine
    assert not execution_of(scenario.load("fsdp_llama3_8b_64x8_h100")).transformer_engine
