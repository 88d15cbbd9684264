"""8-bit linears with one scale a row: their casts, and what torchao measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_times import time_in

from clustersim.core.device import SourcedFigure, device
from clustersim.core.errors import ScenarioError
from clustersim.core.model import Kernel
from clustersim.model.kernels import linear, sharing_input
from clustersim.model.seconds import Execution, setting
from clustersim.model.seconds.float8 import (
    CAST_ACROSS,
    CAST_ALONG,
    MXFP8_SHARE,
    RESCALE,
    cast_seconds,
    padding_seconds,
)
from clustersim.model.seconds.gemm import grouped_parts, linear_parts
from clustersim.model.seconds.kernel_law import kernel_laws, sheet_of
from clustersim.model.seconds.kernel_law.casts import stream_seconds
from clustersim.model.seconds.kernels import launches, parts, spent
from clustersim.model.seconds.price import in_recipe, price
from clustersim.training.partition.recompute import input_dropped

H100 = device("H100-SXM5-80GB")


def where(recipe: str, dtype: str = "fp8", name: str = "") -> object:
    gpu = device(name) if name else H100
    return setting(gpu, Execution(dtype, dtype, implementation="compiled", float8_recipe=recipe))


def step(layer: Kernel, recipe: str, dtype: str = "fp8") -> float:
    return sum(time_in(where(recipe, dtype), layer, 1, part)[0] for part in ("F", "I", "W"))


START = kernel_laws().stream.start / H100.clock


def test_each_operand_is_cast_along_both_dimensions_and_gradients_are_rescaled() -> None:
    rows = 1000
    k = 512
    n = 2048
    layer = linear("up", rows, k, n)
    rowwise = where("rowwise")
    rate = H100.stream_rate()
    seconds = {part: cast_seconds(rowwise, layer, 1, part) for part in "FIWB"}
    forward, inputs, weights = (
        (seconds[part] - casts * START) * rate for part, casts in (("F", 2), ("I", 3), ("W", 3))
    )
    assert forward == pytest.approx(CAST_ALONG * (rows * k + n * k))
    assert inputs == pytest.approx(CAST_ALONG * rows * n + CAST_ACROSS * n * k + RESCALE * rows * k)
    assert weights == pytest.approx(CAST_ACROSS * (rows * k + rows * n) + RESCALE * n * k)
    assert seconds["B"] == pytest.approx(seconds["I"] + seconds["W"])


def test_a_router_is_never_in_8_bits() -> None:
    router = linear("router", 65536, 4096, 64)
    of = {
        dtype: price(where("mxfp8", dtype, "B200-SXM-180GB"), (((router,), "B"),), 1, dense=True)
        for dtype in ("fp8", "bf16")
    }
    assert of["fp8"].seconds == of["bf16"].seconds
    other = replace(router, name="q")
    assert (
        price(where("mxfp8", "fp8", "B200-SXM-180GB"), (((other,), "B"),), 1, dense=True).seconds != of["bf16"].seconds
    )


def test_logits_are_never_in_8_bits_and_what_predicts_further_tokens_is_but_not_in_4() -> None:
    logits = linear("logits", 4096, 4096, 65536)
    wide, narrow = (
        price(where("mxfp8", dtype, "B200-SXM-180GB"), (((logits,), "B"),), 1, dense=True).seconds
        for dtype in ("bf16", "fp8")
    )
    assert wide == narrow
    for kind, recipe, inside in (
        ("block", "mxfp8", True),
        ("mtp", "mxfp8", True),
        ("mtp", "nvfp4", False),
        ("block", "nvfp4", True),
        ("head", "mxfp8", False),
    ):
        assert in_recipe(where(recipe, "fp8", "B200-SXM-180GB"), kind) == inside


def test_a_graph_of_the_whole_step_waits_for_no_host() -> None:
    reads = Kernel("read_counts", "host", launches=3, backward_launches=0)
    seconds = {
        graphed: sum(spent(setting(H100, Execution("bf16", "bf16", graphed=graphed)), reads, 1, "F")[:2])
        for graphed in (False, True)
    }
    assert seconds[False] == pytest.approx(3 * H100.launch.value)
    assert seconds[True] == 0.0


def test_linears_of_one_input_cast_it_once() -> None:
    layer = linear("k", 1000, 512, 2048)
    alone, shared = (cast_seconds(where("rowwise"), one, 1, "F") for one in (layer, sharing_input(layer)))
    assert alone - shared == pytest.approx(START + CAST_ALONG * 1000 * 512 / H100.stream_rate())


@pytest.mark.parametrize(
    ("recipe", "dtype", "name"),
    [
        ("tensorwise", "bf16", ""),
        ("rowwise", "bf16", ""),
        ("tensorwise", "fp8", "A100-SXM4-80GB"),
        ("rowwise", "fp8", "A100-SXM4-80GB"),
    ],
)
def test_nothing_else_is_cast_apart(recipe: str, dtype: str, name: str) -> None:
    assert cast_seconds(where(recipe, dtype, name), linear("up", 1000, 512, 2048), 1, "F") == 0


def test_a_weight_gradient_in_high_precision_takes_what_bf16_takes() -> None:
    layer = linear("up", 16384, 8192, 7168)
    kept, plain = (
        time_in(where(*args), layer, 1, "W")[0] for args in (("rowwise_with_gw_hp",), ("tensorwise", "bf16"))
    )
    assert kept == pytest.approx(plain)


@pytest.mark.parametrize(
    ("k", "n", "published"), [(8192, 1280, 1.757), (1024, 8192, 1.193), (8192, 7168, 5.707), (3584, 8192, 3.034)]
)
def test_single_linears_take_what_torchao_measured(k: int, n: int, published: float) -> None:
    """Milliseconds on H100, 16,384 rows, forward and backward compiled (pytorch/ao #2185, rescaled products)."""
    assert step(linear("up", 16384, k, n), "rowwise") * 1e3 == pytest.approx(published, rel=0.12)


@pytest.mark.parametrize(
    ("recipe", "name", "operand"),
    [
        ("blockwise", "H100-SXM5-80GB", 1 + 4 / 128),
        ("mxfp8", "B200-SXM-180GB", 1 + 1 / 32),
        ("nvfp4", "B200-SXM-180GB", 0.5 + 1 / 16),
        ("tensorwise", "H100-SXM5-80GB", 1),
        ("tensorwise", "MI300X-192GB", 1),
    ],
)
def test_operands_are_read_once_and_written_in_both_layouts(recipe: str, name: str, operand: float) -> None:
    """A scale of the tensor (NVFP4 has one beside its blocks') needs its largest value first: a kernel more, which
    reads two bytes."""
    blocks = where(recipe, name=name)
    layer = linear("up", 1000, 512, 2048)
    largest = recipe in {"tensorwise", "nvfp4"}
    each = (2 + 2 * operand + 2 * largest) / (MXFP8_SHARE if recipe == "mxfp8" else 1.0)
    gpu = blocks.device
    start = (1 + largest) * kernel_laws().stream.start / gpu.clock
    forward, inputs, weights = (cast_seconds(blocks, layer, 1, part) for part in ("F", "I", "W"))
    assert (forward - start) * gpu.stream_rate() == pytest.approx(each * 1000 * 512)
    assert (inputs - start) * gpu.stream_rate() == pytest.approx(each * 1000 * 2048)
    assert weights == 0


def test_a_step_and_the_law_give_a_cast_the_same_seconds() -> None:
    """Of a GPU whose copies run at the law's share of its bandwidth."""
    gpu = replace(H100, stream=SourcedFigure(kernel_laws().stream.stream, "a test"))
    step = setting(gpu, Execution("fp8", "fp8"))
    alone = stream_seconds(kernel_laws().stream, sheet_of(gpu, "bf16"), np.array([2.0, 4.0]) * 1000 * 512)
    assert cast_seconds(step, linear("up", 1000, 512, 2048), 1, "F") == pytest.approx(float(alone.sum()))


def test_products_of_fewer_bits_are_faster_and_no_faster_than_their_peak() -> None:
    layer = linear("up", 8192, 8192, 8192)
    b200 = device("B200-SXM-180GB")
    kinds = [("tensorwise", "bf16"), ("mxfp8", "fp8"), ("nvfp4", "fp8")]
    forward = [time_in(where(recipe, dtype, b200.name), layer, 1, "F")[0] for recipe, dtype in kinds]
    assert forward == sorted(forward, reverse=True)
    assert all(
        seconds > 2 * 8192.0**3 / b200.peak[units]
        for seconds, units in zip(forward, ("bf16", "fp8", "fp4"), strict=True)
    )


@pytest.mark.parametrize(("recipe", "name"), [("mxfp8", "H100-SXM5-80GB"), ("nvfp4", "H200-SXM5-141GB")])
def test_a_recipe_that_the_tensor_cores_do_not_have_is_refused(recipe: str, name: str) -> None:
    with pytest.raises(ScenarioError, match=f"{recipe}.*{name}.*blockwise"):
        where(recipe, name=name)


@pytest.mark.parametrize("name", ["L40S", "RTX-4090", "MI300X"])
def test_blockwise_scales_begin_with_hopper_as_in_transformer_engine(name: str) -> None:
    """Its ``_compute_fp8_block_scaling_support`` asks for compute capability 9.0; Ada has one scale a tensor."""
    with pytest.raises(ScenarioError, match=f"blockwise.*{name}.*it has tensorwise, rowwise$"):
        where("blockwise", name=name)
    where("tensorwise", name=name)
    where("blockwise", name="H100-SXM5-80GB")


def test_an_unknown_recipe_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ScenarioError, match="rowwise"):
        where("rowise")


def test_casts_to_mxfp8_take_as_long_as_transformer_engines_kernel_was_timed() -> None:
    """ROCm/TransformerEngine pull request 598, CAST_ONLY, both directions on B200: 52.34 us of bf16, 51.16 of fp16."""
    gpu = device("B200")
    linear = Kernel("up", "gemm", m=8192, n=8192, k=8192, cut="column", saved=1.0)
    blocks = setting(gpu, Execution("fp8", "fp8", float8_recipe="mxfp8"))
    assert cast_seconds(blocks, linear, 1, "F") == pytest.approx(52.3e-6, rel=0.05)
    assert cast_seconds(blocks, linear, 1, "I") == pytest.approx(52.3e-6, rel=0.05)


TIMED_LAYER = {"bf16": 13.102, "tensorwise": 6.812, "mxfp8": 7.161}
"""Milliseconds of a layer's twelve products on B300, operands cast before: 15,872 tokens, widths of 4,096 and 16,384
(NVIDIA/TransformerEngine docs/examples/gemm_profiling/gemm_profiling.rst)."""


def _layer_of_products(recipe: str) -> float:
    """Milliseconds of those products."""
    gpu = device("B300")
    how = Execution("bf16", "bf16") if recipe == "bf16" else Execution("fp8", "bf16", float8_recipe=recipe)
    setting_of = setting(gpu, how)
    sizes = [(4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096)]
    layer = [linear("up", 15872, k, n) for k, n in sizes]
    return 1e3 * sum(max(parts(setting_of, product, 1, part)) for product in layer for part in "FIW")


def test_products_with_mxfp8s_scales_are_slower_than_tensorwise_ones_as_transformer_engine_timed_them() -> None:
    ours = {recipe: _layer_of_products(recipe) for recipe in TIMED_LAYER}
    for recipe, other, within in (("mxfp8", "tensorwise", 0.025), ("mxfp8", "bf16", 0.035)):
        assert ours[recipe] / ours[other] == pytest.approx(TIMED_LAYER[recipe] / TIMED_LAYER[other], rel=within)
    for recipe, milliseconds in TIMED_LAYER.items():  # 7 to 9 % too fast before Blackwell's power limit was played
        assert ours[recipe] == pytest.approx(milliseconds, rel=0.06)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_rows_of_experts_are_padded_by_a_copy_there_and_back(recipe: str) -> None:
    gpu = device("B200")
    pads = replace(setting(gpu, Execution("fp8", "fp8", float8_recipe=recipe)), pads_experts=True)
    up, down = (
        Kernel(f"expert_{name}", "gemm", m=1000, n=n, k=k, repeat=16, cut=cut, saved=1.0)
        for name, n, k, cut in (("up", 768, 2048, "expert_column"), ("down", 2048, 768, "expert_row"))
    )
    copied = 16_000 * 2048 * 4 / gpu.stream_rate()
    for kernel in (up, down):
        assert [padding_seconds(pads, kernel, 1, part) for part in "FIW"] == pytest.approx([copied, copied, 0.0])
    assert padding_seconds(pads, sharing_input(up), 1, "F") == 0.0
    for other in (replace(pads, pads_experts=False), pads.with_dtype("bf16")):
        assert padding_seconds(other, up, 1, "F") == 0.0


EXPERTS = Kernel(
    "expert_down",
    "gemm",
    m=1000,
    n=2048,
    k=768,
    flops=1.0,
    backward_flops=2.0,
    repeat=16,
    cut="expert_row",
    saved=1.0,
)


@pytest.mark.parametrize("part", ["F", "I", "W"])
def test_experts_one_by_one_take_a_kernel_each_on_four_streams(part: str) -> None:
    gpu = device("B200")
    together = setting(gpu, Execution("fp8", "fp8"))
    apart = replace(together, expert_streams=4)
    work, floor, _ = spent(together, EXPERTS, 1, part)
    assert spent(apart, EXPERTS, 1, part)[:2] == pytest.approx((work, 4 * floor))
    assert floor == launches(EXPERTS, part) * gpu.kernel_floor.value
    # Gate and up are one product, which the first of them is.
    assert spent(apart, sharing_input(EXPERTS), 1, part)[1] == 0.0
    dense = replace(EXPERTS, cut="column")
    assert spent(apart, dense, 1, part) == spent(together, dense, 1, part)


ONE_KERNEL = ((8192, 5120, 591.0), (2048, 7168, 208.0))
"""n, k, us of 16,384 rows of 8 experts on B200 in MXFP8 by one CUTLASS kernel, whose GPU then made 2,420 TFLOP/s of a
plain product (Dao-AILab/quack pull request 161)."""


@pytest.mark.parametrize(("n", "k", "timed"), ONE_KERNEL)
def test_one_kernel_for_all_experts_in_mxfp8_is_nearly_as_fast_as_a_plain_product(n: int, k: int, timed: float) -> None:
    where = setting(device("B200"), Execution("fp8", "bf16", float8_recipe="mxfp8"))
    plain = 2.0 * 8192**3 / max(linear_parts(where, 8192, 8192, 8192))
    one = 2.0 * 16384 * n * k / max(grouped_parts(where, 2048, n, k, 8))
    assert one / plain == pytest.approx(2.0 * 16384 * n * k / (timed * 1e-6) / 2420e12, rel=0.06)
    # A kernel for each expert, on four streams, is no such kernel.
    assert max(grouped_parts(replace(where, expert_streams=4), 2048, n, k, 8)) > max(
        grouped_parts(where, 2048, n, k, 8)
    )


@pytest.mark.parametrize(("recipe", "kernels"), [("mxfp8", 1), ("tensorwise", 2)])
def test_what_experts_read_is_cast_one_after_the_other(recipe: str, kernels: int) -> None:
    together = setting(device("B200"), Execution("fp8", "fp8", float8_recipe=recipe))
    apart = replace(together, expert_streams=4)
    start = kernel_laws().stream.start / float(sheet_of(together.device, "bf16").clock)
    for part in "FI":
        more = cast_seconds(apart, EXPERTS, 1, part) - cast_seconds(together, EXPERTS, 1, part)
        assert more == pytest.approx(15 * kernels * start)


def test_an_input_that_is_made_again_for_backward_is_cast_all_the_same() -> None:
    where_fp8 = setting(device("B200"), Execution("fp8", "fp8", float8_recipe="mxfp8"))
    dropped = input_dropped(EXPERTS)
    assert dropped.saved == 0.0
    assert cast_seconds(where_fp8, dropped, 1, "F") == cast_seconds(where_fp8, EXPERTS, 1, "F") > 0.0
    shared = sharing_input(EXPERTS)
    assert cast_seconds(where_fp8, input_dropped(shared), 1, "F") == cast_seconds(where_fp8, shared, 1, "F") == 0.0


@pytest.mark.parametrize(
    ("recipe", "gpu", "words"),
    [
        ("nvfp4", "MI355X", r"is not played on MI355X: nobody's table .* it has tensorwise, rowwise, mxfp8"),
        ("mxfp8", "MI300X", r"does not run on MI300X, whose tensor cores do not scale such blocks"),
    ],
)
def test_scales_of_blocks_that_an_amd_gpu_has_not_are_refused(recipe, gpu, words):
    with pytest.raises(ScenarioError, match=words):
        where(recipe, "fp8", gpu)


def test_casts_to_mxfp8_on_cdna_4_take_as_long_as_rocms_kernel_was_timed():
    """8,192 squares in 16 bits, scaled along both dimensions: 56.6 us (ROCm/TransformerEngine pull request 598)."""
    linear = Kernel("linear", "gemm", m=8192, n=8192, k=8192, flops=1.0, saved=1.0)
    assert cast_seconds(where("mxfp8", "fp8", "MI355X"), linear, 1, "F") == pytest.approx(56.6e-6, rel=0.05)
