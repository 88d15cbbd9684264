"""8-bit linears with one scale a row: their casts, and what torchao measured."""

from __future__ import annotations

import pytest
from kernel_times import time_in

from clustersim.core.device import device
from clustersim.core.errors import ScenarioError
from clustersim.core.model import Kernel
from clustersim.model.kernels import linear, sharing_input
from clustersim.model.seconds import Execution, setting
from clustersim.model.seconds.float8 import CAST_ACROSS, CAST_ALONG, RESCALE, cast_seconds
from clustersim.model.seconds.memory_bound import traffic_rate

H100 = device("H100-SXM5-80GB")


def where(recipe: str, dtype: str = "fp8", name: str = "") -> object:
    gpu = device(name) if name else H100
    return setting(gpu, Execution(dtype, dtype, implementation="compiled", float8_recipe=recipe))


def step(layer: Kernel, recipe: str, dtype: str = "fp8") -> float:
    return sum(time_in(where(recipe, dtype), layer, 1, part)[0] for part in ("F", "I", "W"))


def test_each_operand_is_cast_along_both_dimensions_and_gradients_are_rescaled() -> None:
    rows = 1000
    k = 512
    n = 2048
    layer = linear("up", rows, k, n)
    rowwise = where("rowwise")
    rate = traffic_rate(rowwise, 2)
    forward, inputs, weights = (cast_seconds(rowwise, layer, 1, part) * rate for part in ("F", "I", "W"))
    assert forward == pytest.approx(CAST_ALONG * (rows * k + n * k))
    assert inputs == pytest.approx(CAST_ALONG * rows * n + CAST_ACROSS * n * k + RESCALE * rows * k)
    assert weights == pytest.approx(CAST_ACROSS * (rows * k + rows * n) + RESCALE * n * k)
    assert cast_seconds(rowwise, layer, 1, "B") * rate == pytest.approx(inputs + weights)


def test_linears_of_one_input_cast_it_once() -> None:
    layer = linear("k", 1000, 512, 2048)
    alone, shared = (cast_seconds(where("rowwise"), one, 1, "F") for one in (layer, sharing_input(layer)))
    assert alone - shared == pytest.approx(CAST_ALONG * 1000 * 512 / traffic_rate(where("rowwise"), 2))


@pytest.mark.parametrize(
    ("recipe", "dtype", "name"),
    [
        ("tensorwise", "fp8", ""),
        ("rowwise", "bf16", ""),
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
    ],
)
def test_operands_in_blocks_are_read_once_and_written_in_both_layouts(recipe: str, name: str, operand: float) -> None:
    """NVFP4's scale of the tensor needs its largest value first: one more read of two bytes."""
    blocks = where(recipe, name=name)
    layer = linear("up", 1000, 512, 2048)
    each = 2 + 2 * operand + 2 * (recipe == "nvfp4")
    rate = blocks.device.stream_rate()
    forward, inputs, weights = (cast_seconds(blocks, layer, 1, part) * rate for part in ("F", "I", "W"))
    assert (forward, inputs, weights) == (pytest.approx(each * 1000 * 512), pytest.approx(each * 1000 * 2048), 0)


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


def test_an_unknown_recipe_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ScenarioError, match="rowwise"):
        where("rowise")
