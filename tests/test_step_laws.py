"""A step's kernels and the kernel laws: one law says both what the evidence scores and what a step costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from clustersim.core.device import Device, SourcedFigure, device, devices, families
from clustersim.core.errors import ModelError
from clustersim.core.gpu_file import load
from clustersim.core.model import Kernel
from clustersim.model.seconds.attention import attention_level, attention_parts, half_of, heads_of
from clustersim.model.seconds.base import CONSTANTS, Execution, Setting, setting
from clustersim.model.seconds.gemm import grouped_parts, linear_parts, step_rate, sustained_level
from clustersim.model.seconds.kernel_law import kernel_laws, sheet_of
from clustersim.model.seconds.kernel_law.attention import Heads, attention_seconds
from clustersim.model.seconds.kernel_law.constants import KIN
from clustersim.model.seconds.kernel_law.experts import Experts, expert_seconds
from clustersim.model.seconds.kernel_law.scans import Scan, scan_seconds
from clustersim.model.seconds.kernel_law.sheet import legacy
from clustersim.model.seconds.kernels import spent
from clustersim.model.seconds.scan import FAMILIES, scan_of
from tests.tables import table_rows

LAWS = kernel_laws()
BY_LAW = [name for name, gpu in devices().items() if gpu.attention and not any(gpu.attention.values())]
MEASURED = ["A100-SXM4-80GB", "H100-SXM5-80GB", "B200-SXM-180GB"]


def flash(seq: float, *, causal: bool = True, heads: int = 32, width: int = 128) -> Kernel:
    flops = 4.0 * heads * seq**2 * width * (0.5 if causal else 1.0)
    nbytes = 4.0 * seq * heads * width
    return Kernel(
        "attention",
        "attention",
        flops=flops,
        backward_flops=2.5 * flops,
        nbytes=nbytes,
        backward_nbytes=2 * nbytes,
        heads=heads,
        head_dim=width,
        seq=int(seq),
        causal=causal,
    )


def in_a_burst(gpu: Device, stream: float) -> Device:
    """The GPU whose sustained rate of products is the law's, with the watts for it, and which streams at a share of its
    bandwidth."""
    gpu = replace(gpu, tdp=1e6)
    level = sustained_level(setting(gpu, Execution("bf16", "bf16")))
    figure = replace(gpu.matmul["bf16"], value=gpu.matmul["bf16"].value * level)
    matmul = MappingProxyType({**gpu.matmul, "bf16": figure})
    return replace(gpu, matmul=matmul, stream=SourcedFigure(stream, "a test"))


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_blackwell_keeps_of_a_burst_what_its_watts_let_it(dtype):
    """B200 keeps what was measured of it, with fewer watts less; a GB200's sixth more for an SM gives its clock no more
    than 2 %. None keeps more than its best measured rate. Hopper's limit is in its steps' rate."""

    def kept(name: str, watts: float | None = None) -> float:
        gpu = device(name)
        where = Setting(gpu if watts is None else replace(gpu, tdp=watts), dtype)
        return 1.0 / sustained_level(where)

    assert kept("B200") == pytest.approx(0.82)
    assert kept("B200", 500.0) == pytest.approx(0.82 * 0.5 ** (1 / 3))
    assert 1.0 < kept("GB200") * device("GB200").clock / (kept("B200") * device("B200").clock) < 1.02
    assert 0.75 < kept("GB200") < kept("B200") < kept("GB300") < kept("B300") < 0.9
    hopper = Setting(device("H100"), dtype)
    assert step_rate(hopper) == hopper.matmul_rate()
    unlimited = Setting(replace(device("B200"), tdp=1e6), dtype)
    assert step_rate(Setting(device("B200"), dtype)) < step_rate(unlimited) <= unlimited.matmul_rate()


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize(("kernel", "issued"), [("fa2", True), ("cudnn", False)])
def test_a_step_and_the_law_give_attention_the_same_seconds(name, kernel, issued):
    gpu = in_a_burst(device(name), LAWS.stream.stream)
    if kernel not in gpu.attention:
        kernel, issued = "fa2", True
    where = setting(gpu, Execution("bf16", "bf16", kernel))
    sheet = sheet_of(gpu, "bf16", LAWS.level("attention", gpu.arch))
    law = replace(LAWS.attention["bf16"], start=0.0)
    for causal in (True, False):
        for width in (64, 128):
            shape = (np.asarray(float(v)) for v in (4, 4096, 32, 32, width, width))
            heads = Heads(*shape, causal=np.asarray(causal))
            alone = float(attention_seconds(law, legacy(sheet) if issued else sheet, heads))
            step = max(attention_parts(where, flash(4096, causal=causal, width=width), 4, backward=False))
            assert step == pytest.approx(alone)


def test_a_gpu_that_sustains_less_is_slower_at_attention_by_as_much():
    gpu = device("H100-SXM5-80GB")
    half = replace(gpu, matmul={**gpu.matmul, "bf16": replace(gpu.matmul["bf16"], value=gpu.matmul["bf16"].value / 2)})
    kernel = flash(65536)
    cudnn = Execution("bf16", "bf16", "cudnn")
    compute, memory = (
        np.diff([max(attention_parts(setting(one, cudnn), kernel, 1, backward=b)) for b in (0, 1)])
        for one in (gpu, half)
    )
    assert memory == pytest.approx(2 * compute, rel=0.01)


@pytest.mark.parametrize("name", BY_LAW)
def test_every_gpu_of_the_law_prices_each_of_its_kernels_forward_and_backward(name):
    gpu = device(name)
    for kernel in gpu.attention:
        where = setting(gpu, Execution(half_of(gpu), half_of(gpu), kernel))
        ahead, back = (spent(where, flash(4096), 4, part)[0] for part in "FB")
        assert 4 * flash(4096).flops / gpu.peak[half_of(gpu)] < ahead
        # 2.6 to 3.5 times as long in all tables of heads of 128 from 4,096 tokens on (data/nvidia_attention.csv).
        assert 2.5 < back / ahead < 3.6


def test_kernels_that_warps_issue_gain_nothing_from_later_tensor_cores():
    gpu = device("H100-SXM5-80GB")
    seconds = {
        k: max(attention_parts(setting(gpu, Execution("bf16", "bf16", k)), flash(8192), 4, backward=False))
        for k in gpu.attention
    }
    assert seconds["fa3"] == seconds["fa4"] == seconds["cudnn"] < 0.65 * seconds["fa2"]
    assert seconds["triton"] == pytest.approx(seconds["fa2"] / CONSTANTS.first_flash)
    assert seconds["efficient"] == pytest.approx(seconds["fa2"] / CONSTANTS.efficient)


def test_kernels_that_warps_issue_are_slower_than_wgmma_where_tensor_cores_are_held_back():
    """An H20's are held below Ampere's rate: FlashAttention-2 was as fast as cuDNN's there. Forward of two samples of
    2,048 tokens, 16 heads of 128, causal: 65.9 and 107.8 TFLOP/s (Dao-AILab/flash-attention, issue 1310)."""
    gpu = device("H20")
    flops = 2.0 * 16 * 2048**2 * 128
    kernel = Kernel("attention", "attention", flops=flops, heads=16, head_dim=128, seq=2048, causal=True)
    for name, measured, most in (("fa2", 65.9e12, 0.1), ("cudnn", 107.8e12, 0.15)):
        where = Setting(gpu, "bf16", attention_kernel=name)
        burst = max(attention_parts(where, kernel, 2, backward=False)) / attention_level(where)
        assert burst == pytest.approx(2 * flops / measured, rel=most)


def test_a_window_or_a_document_is_a_shorter_sequence():
    whole = flash(8192)
    share = 1024 / 8192
    window = replace(whole, flops=share * whole.flops)
    document = replace(window, document=1024.0)
    for kernel in (window, document):
        heads = heads_of(kernel, 1)
        assert float(heads.seq) == pytest.approx(1024)
        assert float(heads.flops) == pytest.approx(kernel.flops)
    where = setting(device("A100-SXM4-80GB"), Execution("bf16", "bf16"))
    long, short = (attention_parts(where, kernel, 1, backward=False)[1] for kernel in (whole, window))
    assert short > share * long


def test_attention_of_no_flops_takes_its_traffic_alone():
    where = setting(device("A100-SXM4-80GB"), Execution("bf16", "bf16"))
    compute, memory = attention_parts(where, replace(flash(4096), flops=0.0, backward_flops=0.0), 1, backward=True)
    assert memory > 0
    assert compute == 0


@pytest.mark.parametrize("name", MEASURED)
def test_a_step_and_the_law_give_grouped_products_the_same_seconds(name):
    # A sustained rate was measured under the power limit, which a burst only begins to meet.
    products = replace(LAWS.products["all"], fall=0.0)
    gpu = in_a_burst(device(name), products.stream)
    where = setting(gpu, Execution("bf16", "bf16"), replace(CONSTANTS, grouped=1.0))
    layer = Experts(*(np.asarray(float(v)) for v in (65536, 16, 4096, 1536, 0)), operand=2.0)
    law = replace(LAWS.experts["bf16"], starts=0.0, passes=0.0, inners=0.0)
    alone = float(expert_seconds(law, products, sheet_of(gpu, "bf16", LAWS.level("products", gpu.arch)), layer))
    both = (grouped_parts(where, 4096, 1536, 4096, 16), grouped_parts(where, 4096, 4096, 1536, 16))
    assert sum(map(max, both)) == pytest.approx(alone)


@pytest.mark.parametrize("name", ["V100-SXM2-16GB", "MI300X-192GB"])
def test_groups_before_ampere_and_on_amd_are_products_side_by_side(name):
    where = setting(device(name), Execution("fp16", "fp16"), replace(CONSTANTS, grouped_amd=1.0))
    assert grouped_parts(where, 512, 4096, 4096, 8) == linear_parts(where, 512, 4096, 4096, 8)


def test_a_generation_without_measured_kernels_says_whose_level_it_has():
    measured = set(LAWS.levels["attention"])
    for arch in {device(name).arch for name in BY_LAW} - measured:
        assert KIN[arch] in measured
        assert f"level of {KIN[arch]}" in families()[arch]["source"]


def test_a_gpu_of_no_known_generation_follows_the_law_and_says_that_this_is_assumed(tmp_path):
    file = tmp_path / "gpu.toml"
    file.write_text(
        '[device]\nname = "Bare"\nmemory = "96 GiB"\nbandwidth = "3 TB/s"\npeak = { bf16 = "800 TFLOP/s" }\n'
    )
    gpu = load(file)
    assert "generation" in {entry.field for entry in gpu.assumed}
    assert any("generation" in note for note in gpu.notes)
    seconds = spent(setting(gpu, Execution("bf16", "bf16")), flash(4096), 4, "F")[0]
    assert 4 * flash(4096).flops / gpu.peak["bf16"] < seconds < 10 * 4 * flash(4096).flops / gpu.peak["bf16"]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_groups_of_every_recipe_have_a_law(recipe):
    where = setting(device("B200-SXM-180GB"), Execution("fp8", "bf16", float8_recipe=recipe))
    bf16 = max(grouped_parts(where.with_dtype("bf16"), 8192, 8192, 8192, 8))
    assert 0 < max(grouped_parts(where, 8192, 8192, 8192, 8)) < bf16


def test_faster_exponentials_save_forward_a_larger_part_than_backward():
    """GB300 beside GB200, cuDNN 9.19, heads of 128, 16,384 tokens, no mask: 11 % forward and 7 % backward (NVIDIA's
    rows of data/nvidia_attention.csv). Each is made once in either pass, beside two products forward and five backward.
    """
    fast = device("B300-SXM-288GB")
    passes = []
    for gpu in (replace(fast, arch="sm100"), fast):
        where = setting(gpu, Execution("bf16", "bf16", "cudnn"))
        kernel = flash(16384, causal=False)
        level = attention_level(where)
        passes.append([attention_parts(where, kernel, 4, backward=backward)[0] / level for backward in (False, True)])
    saved = [1.0 - after / before for before, after in zip(*passes, strict=True)]
    assert saved == pytest.approx([0.11, 0.07], abs=0.02)


PUBLISHED = Path(__file__).parent / "data" / "nvidia_attention.csv"
OLD_CUDNN = "9.10"


def published_ratios(publisher: str, gpu: str, *, backward: bool) -> list[float]:
    """Predicted over published seconds of fused attention of whole sequences of 4,096 tokens and more, in a burst."""
    name = "backward_ms" if backward else "forward_ms"
    ratios = []
    rows = [row for row in table_rows(PUBLISHED) if row["gpu"].startswith(gpu) and publisher in row["source"]]
    for row in rows:
        seq, width, value_width = (int(row[key]) for key in ("seq", "head_dim", "value_dim"))
        if seq < 4096 or row["window"] != "0" or row["version"] == OLD_CUDNN or not row[name]:
            continue
        kernel = flash(seq, causal=row["causal"] == "1", heads=int(row["heads"]), width=width)
        products = (2.0 * width + 2.0 * value_width, 6.0 * width + 4.0 * value_width)
        scores = kernel.flops / (4.0 * width)
        kernel = replace(kernel, flops=scores * products[0], backward_flops=scores * products[1])
        where = Setting(device(row["gpu"]), "bf16", attention_kernel=row["kernel"])
        seconds = max(attention_parts(where, kernel, int(row["batch"]), backward=backward))
        ratios.append(seconds / attention_level(where) / (float(row[name]) * 1e-3))
    return ratios


@pytest.mark.parametrize(
    ("publisher", "gpu", "backward", "apart"),
    [
        ("cudnn-frontend", "GB200", False, 0.08),
        ("cudnn-frontend", "GB200", True, 0.06),
        ("cudnn-frontend", "GB300", False, 0.15),
        ("cudnn-frontend", "GB300", True, 0.09),
        ("cudnn-frontend", "H200", False, 0.06),
        ("cudnn-frontend", "H200", True, 0.06),
        ("cudnn-frontend", "A100", False, 0.08),
        ("cudnn-frontend", "A100", True, 0.06),
        ("Dao-AILab", "GB300", False, 0.06),
        ("Dao-AILab", "B200", False, 0.06),
        ("Dao-AILab", "H100", False, 0.10),
        ("Dao-AILab", "H100", True, 0.10),
    ],
)
def test_attention_takes_as_long_as_others_published(publisher, gpu, backward, apart):
    ratios = published_ratios(publisher, gpu, backward=backward)
    assert len(ratios) >= 4
    assert np.median(ratios) == pytest.approx(1.0, abs=apart)


SCANS = {
    "gated_delta_rule": (32, 2, 128, 128, 64),
    "kimi_delta_rule": (32, 1, 128, 128, 64),
    "chunk_scan": (64, 8, 128, 64, 128),
}
"""Scan -> heads, heads for each of keys, widths of a key and of a value, tokens of a chunk."""


def chunked(name: str, seq: int = 8192) -> Kernel:
    heads, groups, key, value, chunk = SCANS[name]
    moved = 2.0 * seq * heads * (key / groups + value)
    sizes = {"m": chunk, "n": value, "k": key, "heads": heads, "groups": groups, "seq": seq}
    return Kernel(name, "scan", flops=1e9, backward_flops=2.5e9, nbytes=moved, backward_nbytes=2 * moved, **sizes)


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("gpu_name", MEASURED)
def test_a_step_and_the_law_give_a_scan_the_same_seconds(name, gpu_name):
    law = replace(LAWS.scans[FAMILIES[name]], start=0.0)
    gpu = in_a_burst(device(gpu_name), LAWS.stream.stream)
    heads, groups, key, value, chunk = SCANS[name]
    scored = heads // groups if name == "chunk_scan" else heads
    scan = Scan(*(np.asarray(float(v)) for v in (4, 8192, heads // groups, key, heads, value, scored, chunk)))
    alone = float(scan_seconds(law, sheet_of(gpu, "bf16"), scan))
    where = setting(gpu, Execution("bf16", "bf16"))
    assert spent(where, chunked(name), 4, "F")[0] == pytest.approx(alone)
    assert spent(where, chunked(name), 4, "B")[0] == pytest.approx(2.5 * alone, rel=0.2)


@pytest.mark.parametrize("name", [name for name, gpu in devices().items() if gpu.attention])
def test_every_gpu_prices_scans_and_none_is_faster_than_its_peak_or_its_memory(name):
    gpu = device(name)
    for scan in SCANS:
        heads, _, key, value, _ = SCANS[scan]
        where = setting(gpu, Execution(half_of(gpu), half_of(gpu)))
        fewer, seconds = (spent(where, chunked(scan), batch, "F")[0] for batch in (2, 4))
        assert seconds > 4 * 4.0 * 8192 * heads * key * value / gpu.peak[half_of(gpu)]
        assert seconds > 2.0 * 4 * chunked(scan).nbytes / gpu.memory_bandwidth
        assert fewer < seconds <= 2.001 * fewer


def test_a_scan_without_a_law_is_refused():
    with pytest.raises(ModelError, match=r"scan 'lightning' follows no law.*chunk_scan"):
        spent(
            setting(device("H100-SXM5-80GB"), Execution("bf16", "bf16")),
            replace(chunked("chunk_scan"), name="lightning"),
            1,
            "F",
        )


def test_a_tensor_parallel_rank_scans_its_share_of_the_heads():
    whole = chunked("gated_delta_rule")
    half = replace(whole, heads=whole.heads // 2, nbytes=whole.nbytes / 2, flops=whole.flops / 2)
    scans = [scan_of(kernel, 4, shared=False) for kernel in (whole, half)]
    assert [float(scan.batch) for scan in scans] == [4, 4]
    assert [float(scan.key_heads) for scan in scans] == [16, 8]
