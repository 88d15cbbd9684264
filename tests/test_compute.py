"""Time of kernels and steps: closed forms and invariants, over every device and dtype."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_times import kernel_time, time_in

from clustersim.core.device import device, devices
from clustersim.core.errors import ModelError, ScenarioError
from clustersim.core.model import Kernel, Layer, Model, Tensor
from clustersim.core.program import BOUNDS
from clustersim.model import convnet, transformer
from clustersim.model import kernels as K
from clustersim.model.seconds import CONSTANTS, Execution, gemm_time, optimizer_time, setting, step_cost
from clustersim.model.seconds.attention import attention_level, attention_parts
from clustersim.model.seconds.base import MODES
from clustersim.model.seconds.conv import conv_parts, window_overlap
from clustersim.model.seconds.memory_bound import memory_time, traffic_rate

DEVICES = list(devices())
A100 = device("A100-SXM4-80GB")
H100 = device("H100-SXM5-80GB")
V100 = device("V100-SXM2-16GB")


def linear(m: int, n: int, k: int) -> Kernel:
    flops = 2.0 * m * n * k
    return Kernel("fc", "gemm", m=m, n=n, k=k, flops=flops, backward_flops=2 * flops)


def flash(seq: int = 4096, head_dim: int = 128, heads: int = 16) -> Kernel:
    flops = 2.0 * heads * seq**2 * head_dim
    return Kernel(
        "attention",
        "attention",
        flops=flops,
        backward_flops=2.5 * flops,
        nbytes=4.0 * seq * heads * head_dim,
        backward_nbytes=8.0 * seq * heads * head_dim,
        heads=heads,
        head_dim=head_dim,
        seq=seq,
        causal=True,
    )


def one_layer(*kernels: Kernel, kind: str = "block", parameters: int = 0) -> Model:
    return Model("one", "test", (Layer("0", kind, (Tensor("w", parameters),), kernels),))


# ------------------------------------------------------------------------------------------------------ closed forms


@pytest.mark.parametrize("name", DEVICES)
def test_a_huge_product_runs_at_the_best_measured_rate(name: str) -> None:
    part = device(name)
    for dtype in MODES:
        rate = 2.0 * 16384**3 / gemm_time(part, dtype, 16384, 16384, 16384)
        assert rate == pytest.approx(part.matmul_rate(dtype), rel=0.12), dtype


def test_a_streaming_kernel_takes_bytes_over_the_measured_bandwidth() -> None:
    kernel = Kernel("scale", "memory", nbytes=1e9, launches=1)
    seconds, bound = kernel_time(kernel, A100, 2, "fp32")
    expected = 2 * 4e9 / (2039 * 2**0 * 1e9 * 0.834 * CONSTANTS.memory_fp32)
    assert seconds == pytest.approx(expected + A100.kernel_floor.value)
    assert bound == "memory"


@pytest.mark.parametrize(("kind", "fused", "narrow"), K.NORM_OPERATORS)
def test_a_norm_that_nobody_reads_in_16_bits_moves_what_its_row_says(kind, fused, narrow) -> None:
    passes = K._read_norm(kind, fused, 0, narrow, False)
    usual = K.NORM[kind, fused]
    assert (passes.launches, passes.backward_launches, passes.saved) == (
        usual.launches,
        usual.backward_launches,
        usual.saved,
    )
    forward, backward = K.NORM_OPERATORS[kind, fused, narrow]
    assert passes.forward * passes.element[1] == pytest.approx(K.moved(forward)[1])
    assert passes.backward * passes.backward_element[1] == pytest.approx(K.moved(backward)[1])
    with_reader = K._read_norm(kind, fused, 1, narrow, False)
    assert with_reader.forward * with_reader.element[1] == pytest.approx(K.moved(forward)[1] + 6.0)  # fp32 to 16 bits


@pytest.mark.parametrize(
    ("dtype", "param_dtype", "place"), [("bf16", "bf16", 0), ("bf16", "fp32", 1), ("fp32", "fp32", 2)]
)
def test_a_kernel_that_tells_its_types_moves_the_bytes_of_those_it_runs_in(dtype, param_dtype, place) -> None:
    norm = K.NORM["rmsnorm", False]
    kernel = dataclasses.replace(K.memory("written_out", 1e6, norm), launches=0)
    assert [norm.forward * (norm.element or ())[i] for i in range(3)] == [36.0, 28.0, 28.0]
    assert [norm.backward * (norm.backward_element or ())[i] for i in range(3)] == pytest.approx([92.0, 92.0, 92.0])
    where = setting(A100, Execution(dtype=dtype, param_dtype=param_dtype))
    rate = traffic_rate(where, where.element_bytes)
    nbytes = [36e6, 28e6, 28e6][place]
    assert memory_time(where, kernel, 1, backward=False) == pytest.approx(nbytes / rate)


def test_flash_attention_reaches_half_its_rate_at_the_half_speed_length_where_charts_have_it() -> None:
    charted = V100.attention["efficient"][128]
    kernel = flash(seq=int(charted.s0_causal))
    where = setting(V100, Execution("fp16", "fp16", "efficient"))
    both = [attention_parts(where, kernel, 1, backward=b)[0] for b in (False, True)]
    rates = [kernel.flops / both[0], kernel.backward_flops / both[1]]
    assert rates == pytest.approx([charted.rate / 2 * 1.2, charted.rate / 2 * 0.94])


def test_forward_and_backward_of_flash_attention_add_up_to_the_charted_rate_at_the_level_of_steps() -> None:
    kernel = flash(seq=8192)
    ahead, _ = kernel_time(kernel, H100, 4, "bf16", attention_kernel="fa2")
    back, _ = kernel_time(kernel, H100, 4, "bf16", attention_kernel="fa2", backward=True)
    rate = 3.5 * 4 * kernel.flops / (ahead + back)
    level = attention_level(setting(H100, Execution("bf16", "bf16", "fa2")))
    assert rate * level == pytest.approx(308e12, rel=0.06)  # flash-attention README, H100, head_dim 128, causal, 8k


def test_fused_adam_moves_28_bytes_a_parameter_and_foreach_more() -> None:
    where = setting(A100, Execution("bf16", "bf16"))
    sizes = (10**9, 1)
    fused = optimizer_time(where, *sizes, "adam", "fused")
    assert fused == pytest.approx(28e9 / A100.stream_rate(), rel=0.02)
    assert 2 < optimizer_time(where, *sizes, "adam", "foreach") / fused < 3
    assert optimizer_time(where, *sizes, None, "fused") == 0.0


def test_a_for_loop_optimizer_over_many_small_tensors_is_limited_by_launches() -> None:
    where = setting(A100, Execution("fp32", "fp32"))
    sizes = (10_000, 1000)
    assert optimizer_time(where, *sizes, "adam", "for-loop") == pytest.approx(9000 * A100.launch.value)
    assert optimizer_time(where, *sizes, "adam", "fused") < 1e-3


def test_a_layer_of_tiny_kernels_takes_the_host_time_to_launch_them() -> None:
    tiny = Kernel("tiny", "memory", nbytes=1.0, backward_nbytes=1.0, launches=1, backward_launches=2)
    cost = step_cost(one_layer(*[tiny] * 50), H100, 1, Execution(dtype="fp32", optimizer=None))
    assert cost.forward_bound == cost.backward_bound == ("launch",)
    assert cost.forward[0] == pytest.approx(50 * H100.launch.value)
    assert cost.backward[0] == pytest.approx(100 * H100.launch.value)


def test_waves_quantise_a_half_precision_product() -> None:
    waves = [gemm_time(A100, "bf16", 256, 128 * n, 8192) for n in (100, 108, 109)]
    assert waves[0] == pytest.approx(waves[1], rel=1e-6)
    assert waves[2] > waves[1] * 1.02


# --------------------------------------------------------------------------------------------------------- contracts


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("dtype", MODES)
def test_no_kernel_beats_the_peak_or_the_nominal_bandwidth(name: str, dtype: str) -> None:
    part = device(name)
    # Gamers' cards were measured above the peak of the boost that their makers state.
    peak = max(part.peak[part.runs_as(dtype)], part.matmul_rate(dtype))
    for backward in (False, True):
        product = linear(4096, 4096, 4096)
        seconds, bound = kernel_time(product, part, 4, dtype, backward=backward)
        flops = product.backward_flops if backward else product.flops
        assert 4 * flops / seconds < peak
        assert bound in BOUNDS
        stream = Kernel("norm", "memory", nbytes=1e9, backward_nbytes=1e9)
        seconds, _ = kernel_time(stream, part, 1, dtype, backward=backward)
        assert 2e9 / seconds < part.memory_bandwidth


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_prices_a_transformer_and_a_convnet_in_every_dtype(name: str) -> None:
    for model in (transformer(2, 256, 4, 128, 1000), convnet("resnet18")):
        for dtype in MODES:
            cost = step_cost(model, device(name), 2, Execution(dtype=dtype))
            assert cost.forward.shape == cost.backward.shape == (len(model.layers),)
            assert np.all(cost.forward > 0)
            assert np.all(cost.backward > 0)
            assert set(cost.forward_bound) | set(cost.backward_bound) <= set(BOUNDS)
            assert cost.optimizer > 0


def test_executed_flops_are_the_models_and_recomputation_adds_a_forward() -> None:
    model = transformer(4, 512, 8, 256, 1000)
    none = step_cost(model, A100, 3)
    full = step_cost(model, A100, 3, Execution(activation_checkpointing="full"))
    selective = step_cost(model, A100, 3, Execution(activation_checkpointing="selective"))
    executed = sum(k.flops + k.backward_flops for layer in model.layers for k in layer.kernels)
    assert none.forward_flops.sum() + none.backward_flops.sum() == pytest.approx(3 * executed)
    blocks = np.array([layer.kind == "block" for layer in model.layers])
    assert np.allclose((full.backward_flops - none.backward_flops)[blocks], none.forward_flops[blocks])
    assert np.allclose((full.backward_flops - none.backward_flops)[~blocks], 0)
    assert none.backward.sum() < selective.backward.sum() < full.backward.sum()


def test_recomputation_that_stops_early_leaves_out_the_last_product_unless_something_behind_it_is_kept() -> None:
    up, down = (dataclasses.replace(linear(64, n, 384 - n), saved=64.0 * (384 - n)) for n in (256, 128))
    dropout = K.memory("dropout", 64.0 * 128, K.DROPOUT, saved=K.MASK)
    for kernels, repeated in (((up, down), up.flops), ((up, down, dropout), up.flops + down.flops)):
        none, early, full = (
            step_cost(one_layer(*kernels), A100, 2, how).backward_flops.sum()
            for how in (
                Execution(),
                Execution(activation_checkpointing="full", early_stop=True),
                Execution(activation_checkpointing="full"),
            )
        )
        assert early - none == pytest.approx(2 * repeated)
        assert full - none == pytest.approx(2 * (up.flops + down.flops))


def test_layers_with_the_same_kernels_cost_the_same() -> None:
    model = transformer(6, 512, 8, 256, 1000)
    cost = step_cost(model, A100, 2)
    blocks = [i for i, layer in enumerate(model.layers) if layer.kind == "block"]
    assert len(set(cost.forward[blocks])) == len(set(cost.backward[blocks])) == 1


def test_autocast_pays_for_casts_that_a_converted_model_does_not() -> None:
    model = transformer(4, 1024, 16, 512, 1000)
    autocast = step_cost(model, A100, 4, Execution(dtype="bf16", param_dtype="fp32", optimizer=None))
    converted = step_cost(model, A100, 4, Execution(dtype="bf16", param_dtype="bf16", optimizer=None))
    assert autocast.forward.sum() > converted.forward.sum()


def test_lower_precision_is_faster_where_the_hardware_has_it() -> None:
    model = transformer(4, 4096, 32, 2048, 1000)

    def seconds(dtype: str) -> float:
        cost = step_cost(
            model, H100, 2, Execution(dtype=dtype, param_dtype="fp32" if dtype in {"fp32", "tf32"} else "bf16")
        )
        return float(cost.forward.sum() + cost.backward.sum())

    assert seconds("fp8") < seconds("bf16") < seconds("tf32") < seconds("fp32")


def test_compiled_code_is_no_slower() -> None:
    model = transformer(4, 1024, 16, 512, 1000)
    eager = step_cost(model, A100, 4, Execution(implementation="eager"))
    compiled = step_cost(model, A100, 4, Execution(implementation="compiled"))
    assert compiled.forward.sum() <= eager.forward.sum()


@pytest.mark.parametrize("kernel", ["eager", "efficient", "fa1", "triton", "fa2", "fa3", "fa4", "cudnn"])
def test_every_attention_kernel_is_slower_than_the_tensor_cores_and_faster_than_nothing(kernel: str) -> None:
    seconds, _ = kernel_time(flash(), H100, 2, "bf16", attention_kernel=kernel)
    assert 2 * flash().flops / H100.peak["bf16"] < seconds < 0.1


def test_attention_kernels_rank_as_their_charts_do() -> None:
    order = ["eager", "triton", "fa2", "cudnn", "fa3", "fa4"]
    times = [kernel_time(flash(8192), H100, 2, "bf16", attention_kernel=kernel)[0] for kernel in order]
    assert times == sorted(times, reverse=True)


def test_a_dtype_without_units_is_noted() -> None:
    assert any(
        "has no fp8 units: GEMMs run as fp16" in note
        for note in step_cost(one_layer(), V100, 1, Execution(dtype="fp8")).notes
    )
    assert any("estimated" in note for note in step_cost(one_layer(), device("T4"), 1, Execution(dtype="fp16")).notes)


def test_a_grouped_convolution_reaches_less_of_the_rate_than_a_dense_one() -> None:
    flops = 1e10
    dense = Kernel("conv", "conv", m=3136, n=128, k=1152, flops=flops, backward_flops=2 * flops)
    grouped = dataclasses.replace(dense, n=4, k=36, groups=32)
    for dtype in ("fp32", "fp16"):
        assert kernel_time(grouped, V100, 8, dtype)[0] > kernel_time(dense, V100, 8, dtype)[0]


def test_a_convolution_is_fed_by_its_sms_or_waits_for_its_tensor_cores() -> None:
    # Of so many images that no SM is without a tile.
    kernel = Kernel("conv", "conv", m=3136 * 4096, n=128, k=1152, flops=1e12, backward_flops=2e12)

    def rate(name: str, dtype: str) -> float:
        part = device(name)
        images = dataclasses.replace(setting(part, Execution(dtype=dtype)), images=True)
        return kernel.flops / conv_parts(images, kernel, 1, backward=False)[0]

    # Two generations of tensor cores apart, an SM is fed alike in a clock; in TF32 with half as many numbers.
    hopper, ampere = device("H100-SXM5-80GB"), A100
    clocks = hopper.sms * hopper.clock / (ampere.sms * ampere.clock)
    assert rate(hopper.name, "bf16") / rate(ampere.name, "bf16") == pytest.approx(clocks, rel=1e-9)
    assert rate(ampere.name, "tf32") == pytest.approx(rate(ampere.name, "bf16") / 2, rel=1e-9)
    # A GeForce adds in fp32 at half rate: its convolutions reach nearly what its matrix products do.
    geforce = device("RTX-3090")
    kept = CONSTANTS.conv_half * CONSTANTS.sustained
    assert rate(geforce.name, "fp16") == pytest.approx(kept * geforce.matmul_rate("fp16"), rel=1e-9)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_few_images_leave_sms_of_a_convolution_without_work(dtype: str) -> None:
    kernel = Kernel("conv", "conv", m=196, n=256, k=256, nbytes=100352.0, flops=2.6e7, backward_flops=5.2e7)
    where = setting(V100, Execution(dtype=dtype, channels_last=True))
    images = dataclasses.replace(where, images=True)

    def of_one(batch: int, *, backward: bool = False) -> float:
        return conv_parts(images, kernel, batch, backward=backward)[0] / batch

    # A block makes 128 x 128 elements, 256 x 128 on tensor cores: one tile for each SM is filled to 2 ** -0.25.
    one_each = V100.sms * (128 if dtype == "fp32" else 256) * 128 / (kernel.m * kernel.n)
    filled = conv_parts(images, kernel, one_each, backward=False)[0] / one_each
    assert filled == pytest.approx(2**0.25 * of_one(10**6), rel=1e-6)
    assert of_one(1) > 5 * of_one(64) > 4.9 * of_one(10**6)
    # The gradient of weights, half of backward, is split along the images.
    assert of_one(1) < of_one(1, backward=True) < 2 * of_one(1)


def test_winograd_gains_less_where_memory_has_little_for_each_product() -> None:
    def gain(name: str, channels: int, pixels: int) -> float:
        part = device(name)
        dense = Kernel("conv", "conv", m=pixels, n=channels, k=9 * channels, nbytes=2.0 * pixels * channels)
        dense = dataclasses.replace(dense, flops=2.0 * pixels * channels * 9 * channels)
        plain = dense.flops / (part.matmul_rate("fp32") * CONSTANTS.conv_fp32)
        images = dataclasses.replace(setting(part, Execution(dtype="fp32")), images=True)
        return plain * 1024 / conv_parts(images, dense, 1024, backward=False)[0]

    early, late = gain("V100-SXM2-16GB", 64, 224 * 224), gain("V100-SXM2-16GB", 512, 14 * 14)
    assert 2.249 < early < late < 4.0
    assert gain("GTX-1080", 128, 112 * 112) < gain("V100-SXM2-16GB", 128, 112 * 112)


def test_norms_of_images_wait_for_memory_and_for_fp32_units() -> None:
    def share(name: str, dtype: str = "fp16") -> float:
        part = device(name)
        images = dataclasses.replace(setting(part, Execution(dtype=dtype)), images=True)
        return traffic_rate(images, images.element_bytes) / part.stream_rate()

    # GA102 and later have twice the units of Volta's SM, and GDDR less to move.
    assert share("A100-SXM4-80GB") < share("V100-SXM2-16GB") < share("RTX-3090") < share("RTX-4090") < 1.0
    assert share("RTX-4090", "fp32") == share("V100-SXM2-16GB", "fp32") == CONSTANTS.memory_images


def test_a_convolutions_window_is_read_off_its_implicit_gemm() -> None:
    kernels = [k for layer in convnet("resnet50").layers for k in layer.kernels if k.kind == "conv"]
    overlaps = {window_overlap(k) for k in kernels}
    assert overlaps == {49 / 4, 9.0, 9 / 4, 1.0, 1 / 4}


# -------------------------------------------------------------------------------------------------------- invariants


SIZES = st.integers(1, 5000)


@given(SIZES, SIZES, SIZES, st.sampled_from(MODES), st.sampled_from(["V100-SXM2-16GB", "H100-SXM5-80GB", "MI300X"]))
def test_a_product_is_above_its_roofline(m: int, n: int, k: int, dtype: str, name: str) -> None:
    part = device(name)
    seconds = gemm_time(part, dtype, m, n, k)
    assert seconds > 2.0 * m * n * k / part.peak[part.runs_as(dtype)]
    assert seconds > part.kernel_floor.value
    assert gemm_time(part, dtype, 2 * m, n, k) >= seconds * (1 - 1e-9)
    assert gemm_time(part, dtype, m, n, k, batch=2) >= seconds * (1 - 1e-9)


@given(st.integers(1, 64))
def test_time_grows_with_the_batch(batch: int) -> None:
    model = transformer(1, 256, 4, 64, 1000)
    small = step_cost(model, A100, batch, Execution(optimizer=None))
    large = step_cost(model, A100, batch + 1, Execution(optimizer=None))
    assert np.all(large.forward >= small.forward * (1 - 1e-9))
    assert np.all(large.backward >= small.backward * (1 - 1e-9))


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"dtype": "bf61"}, r"unknown dtype 'bf61' .*did you mean 'bf16'"),
        ({"attention_kernel": "fa9"}, "unknown attention kernel 'fa9'"),
        ({"attention_kernel": "fa3"}, "attention kernel 'fa3' does not run on A100-SXM4-80GB; it has eager"),
        ({"activation_checkpointing": "fulll"}, "did you mean 'full'"),
        ({"optimizer": "adamm"}, r"unknown optimizer 'adamm' .*did you mean 'adam"),
        ({"optimizer_impl": "fuse"}, "did you mean 'fused'"),
        ({"implementation": "compile"}, "did you mean 'compiled'"),
    ],
)
def test_an_unknown_choice_is_one_error_with_what_would_be_right(choice: dict[str, str], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        step_cost(one_layer(), A100, 1, Execution(**choice))  # type: ignore[arg-type]


def test_a_batch_below_one_and_an_unknown_kernel_are_errors() -> None:
    with pytest.raises(ScenarioError, match="micro_batch_size = 0 must be at least 1"):
        step_cost(one_layer(), A100, 0)
    with pytest.raises(ModelError, match="kernel 'x' has unknown kind 'gem'; did you mean 'gemm'"):
        kernel_time(Kernel("x", "gem"), A100, 1, "bf16")


# Weight gradients that are added to kept ones


@given(st.sampled_from(["A100-SXM4-80GB", "H100-SXM5-80GB"]), st.integers(6, 14), st.sampled_from([2, 4]))
def test_adding_to_a_kept_gradient_costs_more_than_writing_it_and_less_than_both_in_turn(
    name: str, log_rows: int, size: int
) -> None:
    fc = linear(2**log_rows, 8192, 4096)
    where = setting(device(name), Execution("bf16", "bf16"))
    summing = dataclasses.replace(where, summed_bytes=size)
    written, added = (time_in(one, fc, 1, "W")[0] for one in (where, summing))
    traffic = 2 * size * 8192 * 4096 / where.device.stream_rate()
    assert max(written, traffic) < added < written + traffic
    assert time_in(summing, fc, 1, "I") == time_in(where, fc, 1, "I")
    assert time_in(summing, fc, 1, "F") == time_in(where, fc, 1, "F")


def test_few_rows_leave_a_weight_gradient_the_time_of_its_sums() -> None:
    where = dataclasses.replace(setting(H100, Execution("bf16", "bf16")), summed_bytes=4)
    added, _ = time_in(where, linear(16, 8192, 8192), 1, "W")
    assert added == pytest.approx(8 * 8192**2 / H100.stream_rate(), rel=0.2)


def test_generated_code_reads_logits_as_the_product_wrote_them() -> None:
    """Under autocast, torch.compile casts logits in registers: no more bytes than of a model in 16 bits. Eager code
    writes them in fp32."""

    def loss(implementation: str, param_dtype: str) -> float:
        how = Execution(dtype="bf16", param_dtype=param_dtype, implementation=implementation, optimizer=None)
        fused = "eager" if implementation == "eager" else "fused"
        cost = step_cost(transformer(2, 256, 4, 128, 50304, implementation=fused), H100, 64, how)
        return float(cost.forward[-1] + cost.backward[-1])

    assert loss("compiled", "fp32") == pytest.approx(loss("compiled", "bf16"), rel=0.05)
    assert loss("eager", "fp32") > 1.5 * loss("compiled", "fp32")
