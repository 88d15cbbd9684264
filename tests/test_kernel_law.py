"""Kernel laws: bounds that no kernel beats, shapes that must order, and constants that meet measured kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.core.device import device, devices
from clustersim.model.seconds.kernel_law import kernel_laws, sheet_of
from clustersim.model.seconds.kernel_law.attention import Heads, attention_seconds
from clustersim.model.seconds.kernel_law.casts import stream_seconds
from clustersim.model.seconds.kernel_law.experts import Experts, expert_seconds
from clustersim.model.seconds.kernel_law.products import Shapes, product_seconds, rereads
from clustersim.model.seconds.kernel_law.sheet import OPERAND_BYTES, UNITS

LAWS = kernel_laws()
NEWER = [name for name, gpu in devices().items() if gpu.sm >= 80]
SIZES = st.integers(64, 20_000)


def product(name: str, m: float, n: float, k: float, arithmetic: str = "bf16", count: float = 1) -> float:
    gpu = device(name)
    sheet = sheet_of(gpu, arithmetic, LAWS.level(arithmetic, gpu.arch))
    sizes = (np.asarray(float(size)) for size in (m, n, k, count))
    return float(product_seconds(LAWS.products[arithmetic], sheet, Shapes(*sizes, OPERAND_BYTES[arithmetic])))


@given(SIZES, SIZES, SIZES, st.sampled_from(NEWER))
def test_a_product_is_above_its_roofline_and_grows_with_its_sizes(m, n, k, name):
    gpu = device(name)
    seconds = product(name, m, n, k)
    assert seconds > 2.0 * m * n * k / gpu.peak["bf16"]
    assert seconds > 2.0 * (m * k + k * n + m * n) / gpu.memory_bandwidth * 0.9
    assert product(name, m, n, 2 * k) >= seconds * (1 - 1e-9)
    assert product(name, 2 * m, n, k) >= seconds * (1 - 1e-9)


def test_a_product_of_few_tiles_and_a_long_k_is_split():
    whole = product("H100-SXM5-80GB", 256, 256, 4096)
    assert product("H100-SXM5-80GB", 256, 256, 65536) < 8 * whole


@pytest.mark.parametrize("name", ["H100-SXM5-80GB", "B200-SXM-180GB"])
def test_fewer_bits_are_faster_for_large_products(name):
    gpu = device(name)
    kinds = ["bf16", "fp8"] + (["nvfp4"] if "fp4" in gpu.peak else [])
    times = [product(name, 8192, 8192, 8192, kind) for kind in kinds]
    assert times == sorted(times, reverse=True)


def test_groups_take_as_long_as_their_tiles():
    name = "H100-SXM5-80GB"
    assert product(name, 512, 4096, 4096, count=8) == pytest.approx(product(name, 4096, 4096, 4096), rel=0.25)


def heads(seq: float, *, causal: bool = True) -> Heads:
    return Heads(*(np.asarray(float(v)) for v in (4, seq, 32, 8, 128, 128)), causal=np.asarray(causal))


@pytest.mark.parametrize("name", ["A100-SXM4-80GB", "H100-SXM5-80GB", "B200-SXM-180GB"])
def test_attention_is_above_its_roofline_and_a_causal_mask_saves_up_to_half(name):
    gpu = device(name)
    sheet = sheet_of(gpu, "bf16", LAWS.level("attention", gpu.arch))
    law = LAWS.attention["bf16"]
    full, causal = (float(attention_seconds(law, sheet, heads(8192, causal=mask))) for mask in (False, True))
    assert full > float(heads(8192, causal=False).flops) / gpu.peak["bf16"]
    assert 0.5 < causal / full < 0.7


def test_exponentials_limit_attention_more_where_products_are_faster():
    """B200 has 2.3 times the FLOP/s of H100 and as many exponentials a clock and SM."""
    law = LAWS.attention["bf16"]
    times = [
        float(attention_seconds(law, sheet_of(device(name), "bf16"), heads(8192)))
        for name in ("H100-SXM5-80GB", "B200-SXM-180GB")
    ]
    flops = device("B200-SXM-180GB").peak["bf16"] / device("H100-SXM5-80GB").peak["bf16"]
    assert 1.0 < times[0] / times[1] < 0.95 * flops


def test_blackwell_ultra_is_faster_at_attention_by_its_exponentials_alone():
    """B300's sheet says of 16-bit products and bandwidth what B200's does."""
    law = LAWS.attention["bf16"]
    names = ("B200-SXM-180GB", "B300-SXM-288GB")
    times = [float(attention_seconds(law, sheet_of(device(name), "bf16"), heads(8192))) for name in names]
    assert 0.7 < times[1] / times[0] < 0.95


def expert_layer(routed: float, inner: float = 1536, *, faster: float = 1.0) -> float:
    """Seconds of 128 experts on an H100 whose memory is so many times faster."""
    sheet = sheet_of(device("H100-SXM5-80GB"), "bf16")
    sheet = replace(sheet, bandwidth=faster * sheet.bandwidth)
    sizes = (np.asarray(float(v)) for v in (routed, 128, 4096, inner, 1))
    return float(expert_seconds(LAWS.experts["bf16"], LAWS.products["all"], sheet, Experts(*sizes, operand=2.0)))


def test_experts_that_hold_few_tokens_take_the_time_of_their_weights():
    weights = 128 * 3 * 4096 * 1536 * 2.0 / device("H100-SXM5-80GB").memory_bandwidth
    assert weights < expert_layer(1024) < 3 * weights
    assert expert_layer(65536) > expert_layer(1024)


def test_narrow_experts_gain_less_than_wide_memory_would_give_them():
    """What gathers and sums rows is limited by the SMs beside the memory, where weights are limited by it alone."""
    moving = expert_layer(262144, inner=64) / expert_layer(262144, inner=64, faster=2.0)
    weights = expert_layer(128, inner=8192) / expert_layer(128, inner=8192, faster=2.0)
    assert 1.0 < moving < 1.5 < weights < 2.0


def test_experts_on_blocks_keep_less_of_the_rate_than_on_tensors():
    assert LAWS.experts["fp8_block"].share < LAWS.experts["fp8"].share


def test_rounds_of_tiles_are_felt_where_each_tile_is_a_block_of_its_own():
    """One tile of 128 x 128 more than an A100 has SMs costs a round, on Hopper a part of one."""

    def step(name: str) -> float:
        sms = device(name).sms
        return product(name, 128 * (sms + 1), 128, 4096) / product(name, 128 * sms, 128, 4096)

    assert step("A100-SXM4-80GB") > step("H100-SXM5-80GB") > 1


def test_tensor_cores_that_do_more_in_a_clock_keep_less_of_their_peak():
    """In each arithmetic alike: what an SM is brought in a clock has not grown as its tensor cores have."""
    gpu = device("B200-SXM-180GB")
    peaks = {"bf16": gpu.peak["bf16"], "fp8": gpu.peak["fp8"], "nvfp4": gpu.peak["fp4"]}
    kept = [2 * 8192.0**3 / product(gpu.name, 8192, 8192, 8192, kind) / peak for kind, peak in peaks.items()]
    assert kept == sorted(kept, reverse=True)


def test_a_cast_runs_near_the_memory_bandwidth():
    gpu = device("H100-SXM5-80GB")
    nbytes = 3.0 * 8192 * 8192
    seconds = float(stream_seconds(LAWS.stream, sheet_of(gpu, "bf16"), np.asarray(nbytes)))
    assert nbytes / gpu.memory_bandwidth < seconds < 1.6 * nbytes / gpu.memory_bandwidth


def test_a_generation_that_nobody_measured_takes_its_kins_level():
    assert LAWS.level("bf16", "sm103") == LAWS.level("bf16", "sm100")
    assert LAWS.level("bf16", "gfx950") == 0.0


def test_tiles_that_go_line_by_line_read_again_what_the_cache_does_not_keep():
    """Twice the L2 keeps more, and a product whose shorter operand fits half of it is read once."""
    sheet = sheet_of(device("H100-SXM5-80GB"), "fp8")
    wide, narrow = (Shapes(*(np.asarray(float(v)) for v in (m, 51200, 12288, 1)), 1.0) for m in (32768, 1024))
    assert float(rereads(sheet, narrow)) == 0
    assert float(rereads(sheet, wide)) > float(rereads(replace(sheet, l2=8 * sheet.l2), wide)) > 0
    law = LAWS.products["fp8"]
    lines, squares = (float(product_seconds(law, sheet, replace(wide, lines=lines))) for lines in (1.0, 0.0))
    assert 1.1 < lines / squares < 3


MODERN = [name for name, gpu in devices().items() if gpu.sm >= 70 or gpu.arch.startswith("gfx")]
ARITHMETICS = ("bf16", "fp16", "fp8", "fp8_block", "mxfp8", "nvfp4")


@pytest.mark.parametrize("name", MODERN)
def test_every_shipped_gpu_has_sane_products_and_attention(name):
    """Of GPUs that nobody measured too: large kernels run at a third of the peak and more, small ones take a launch,
    more work never takes less, and one tile more no cliff."""
    gpu = device(name)
    powers = 2.0 ** np.arange(5, 17)
    rows = np.arange(64, 16385, 64.0)
    for arithmetic in (kind for kind in ARITHMETICS if UNITS.get(kind, kind) in gpu.peak):
        sheet, law = sheet_of(gpu, arithmetic, LAWS.level(arithmetic, gpu.arch)), LAWS.products[arithmetic]
        cubes = Shapes(powers, powers, powers, np.ones(12), OPERAND_BYTES[arithmetic])
        seconds = product_seconds(law, sheet, cubes)
        assert (np.diff(seconds) > 0).all()
        assert 1e-6 < seconds[0] < 1e-5
        share = cubes.flops / seconds / sheet.peak
        assert (share < 1).all()
        assert (share[7:] > 0.3).all(), (arithmetic, share)
        growth = product_seconds(
            law, sheet, Shapes(rows, 0 * rows + 4096, 0 * rows + 4096, 0 * rows + 1, cubes.operand)
        )
        assert (np.diff(growth) >= 0).all()
        assert (growth[1:] < 2 * growth[:-1]).all()
    if "bf16" in gpu.peak:
        sheet = sheet_of(gpu, "bf16", LAWS.level("attention", gpu.arch))
        length = 2.0 ** np.arange(7, 18)
        ones = np.ones(11)
        one = Heads(ones, length, 32 * ones, 8 * ones, 128 * ones, 128 * ones, ones > 0)
        seconds = attention_seconds(LAWS.attention["bf16"], sheet, one)
        share = one.flops / seconds / sheet.peak
        assert (np.diff(seconds) > 0).all()
        assert 0.3 < share[-1] < 1
        assert (np.diff(share) > 0).all()


@pytest.mark.shared
@pytest.mark.parametrize(
    ("kind", "label", "most"), [("bf16", "above 30 GFLOP", 0.06), ("attention", "above 10 GFLOP", 0.13)]
)
def test_shipped_constants_meet_measured_kernels(kind, label, most):
    rows_of = pytest.importorskip("kernel_forms")
    from kernel_rows import FOLDER

    if not FOLDER.exists():
        pytest.skip("needs ../shared/measurements/kernels")
    law = next(entry for entry in rows_of.KINDS if entry.name == kind)
    rows = law.read()
    constants = {**law.start, **vars(LAWS.products["bf16"] if kind == "bf16" else LAWS.attention["bf16"])}
    predicted = law.seconds(rows)(constants, LAWS.levels[law.level])
    inside = law.classes(rows)[label]
    systems = rows.words("system")
    wrong = np.abs(predicted / rows.seconds - 1)
    medians = [np.median(wrong[inside & (systems == name)]) for name in set(systems.tolist())]
    assert np.mean(medians) < most
