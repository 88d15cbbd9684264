"""Each kind of measured kernel: which rows, which law, which constants are free, and within what bounds."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
from kernel_experts import expert_kind
from kernel_kind import Classes, Floats, Guess, Kind
from kernel_products import all_kind, product_kind
from kernel_rows import DEVICES, Kernels, Row, read

from clustersim.model.seconds.kernel_law.attention import AttentionLaw, Heads, attention_seconds
from clustersim.model.seconds.kernel_law.casts import StreamLaw, stream_seconds
from clustersim.model.seconds.kernel_law.scans import Scan, ScanLaw, scan_seconds
from clustersim.model.seconds.kernel_law.sheet import Sheet, legacy

# ------------------------------------------------------------------------------------------------------------ attention
ATTENTION_START = {
    "start": 10000.0,
    "norm": 2.5,
    "issued": 1.25,
    "level": -0.2,
    "narrow": 8.0,
    "weight": 0.7,
    "other": 4.0,
    "ramp_causal": 500.0,
    "ramp_full": 100.0,
    "whole": 0.8,
    "stream": 0.7,
    "cache": 2.0,
    "extra": 4.0,
    "slower": 1.1,
    "served": 1.2,
}
ATTENTION_FREE = {
    "start": (1000, 60000),
    "norm": (1, 8),
    "issued": (1, 6),
    "level": (-1.2, 0.0),
    "narrow": (0, 100),
    "weight": (0, 3),
    "other": (0, 20),
    "ramp_causal": (0, 1500),
    "ramp_full": (0, 1500),
    "whole": (0, 1),
    "stream": (0.3, 1.1),
    "cache": (1, 10),
    "extra": (0, 60),
    "slower": (0.7, 1.5),
    "served": (0.7, 1.6),
}
PUBLISHED = Path(__file__).parent / "data" / "nvidia_attention.csv"
"""Fused attention as steps run it, forward and backward, by others than the database."""
SYSTEM_OF: Mapping[str, str] = {name: system for system, name in DEVICES.items()} | {
    "H200": "h200",
    "B200": "b200_sxm",
    "GB200": "gb200",
    "GB300": "gb300",
}
OLD_CUDNN = "9.10"
"""Of 2025: on B200 a quarter slower at 4,096 tokens and a tenth at 16,384 than 9.18 and later, which 2026's
containers have."""
SERVED = ("flashinfer", "trtllm_mha")
"""Words of kernels that TensorRT-LLM's generator wrote for paged caches on Blackwell: no training step runs them."""


def attention_rows(arithmetic: str, most: int) -> Kernels:
    """Fused kernels on whole sequences. Triton's are left out: their rate is of their tuning, not of the GPU."""

    def wanted(row: Row) -> bool:
        plain = int(row["seq"]) >= 128 and row["window"] == "0" and row["head_dim"] in {"64", "128", "256"}
        odd = "triton" in row["kernel"] or "decode" in row["kernel"]
        return row["dtype"] == arithmetic and plain and not odd

    def group(row: Row) -> tuple[str, str, str, bool]:
        return row["system"], row["kernel"], row["mask"], _attention_flops(row) > 1e10

    swept = [{**row, "value_dim": row["head_dim"]} for row in read("attention", wanted, group, most).rows]
    return Kernels(swept + (published_rows("forward_ms") if arithmetic == "bf16" else []))


def published_rows(column: str) -> list[Row]:
    """Rows of :data:`PUBLISHED` that have a pass, as those of the database."""
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        table = [row for row in csv.DictReader(file) if row["window"] == "0" and row["version"] != OLD_CUDNN]
    return [
        {
            **row,
            "system": SYSTEM_OF[row["gpu"]],
            "framework": "",
            "publisher": row["source"].split("@")[0].split()[0],
            "mask": "causal" if row["causal"] == "1" else "full",
            "time_us": str(float(row[column]) * 1e3),
        }
        for row in table
        if row[column]
    ]


def _attention_flops(row: Row) -> float:
    square = float(row["batch"]) * float(row["heads"]) * float(row["seq"]) ** 2 * float(row["head_dim"])
    return square * (2.0 if row["mask"] == "causal" else 4.0)


def heads_of(rows: Kernels) -> Heads:
    """The shapes of attention rows."""
    shape = [rows[name] for name in ("batch", "seq", "heads", "kv_heads", "head_dim", "value_dim")]
    return Heads(*shape, causal=rows.words("mask") == "causal")


def attention_law(constants: Mapping[str, float]) -> AttentionLaw:
    """The law of a fit's constants."""
    return AttentionLaw(*(constants[name] for name in AttentionLaw.__dataclass_fields__))


def sheet_for(rows: Kernels, arithmetic: str, levels: Mapping[str, float]) -> Sheet:
    """The sheets of rows, those of FlashAttention-2 as it sees them."""
    sheet = rows.sheet(arithmetic, levels)
    issued = rows.words("kernel") == "fa2"
    other = legacy(sheet)
    columns = ((getattr(other, name), getattr(sheet, name)) for name in Sheet.__dataclass_fields__)
    return Sheet(*(np.where(issued, own, usual) for own, usual in columns))


def attention(arithmetic: str, rows: Kernels) -> Guess:
    """Seconds of fused attention; TensorRT-LLM's rotates queries and keys as well, and its kernels are its own, neither
    FlashAttention's nor cuDNN's. The database's causal kernels write keys and values to a cache."""
    heads = heads_of(rows)
    own = rows.words("framework") == "trtllm"
    cached = heads.causal & (rows.words("framework") != "")
    rotated = own & heads.causal
    moved = rotated * heads.heads * heads.width
    written = 2.0 * cached * heads.kv_heads * (heads.width + heads.value_width)
    kernels = rows.words("kernel").tolist()
    served = np.array([any(word in kernel for word in SERVED) for kernel in kernels]) & ~own

    def guess(constants: Mapping[str, float], levels: Mapping[str, float]) -> Floats:
        extra = constants["extra"] * moved + (constants["cache"] - 1.0) * written
        sheet = sheet_for(rows, arithmetic, levels)
        seconds = attention_seconds(attention_law(constants), sheet, heads, extra)
        return seconds * np.where(own, constants["slower"], np.where(served, constants["served"], 1.0))

    return guess


def attention_classes(rows: Kernels) -> Classes:
    """Sizes and masks of attention."""
    flops = np.array([_attention_flops(row) for row in rows.rows])
    causal = rows.words("mask") == "causal"
    big = flops > 1e10
    return {
        "above 10 GFLOP": big,
        "  causal, heads of 128": big & causal & (rows["head_dim"] == 128),
        "  full": big & ~causal,
        "below 10 GFLOP": ~big,
    }


def attention_kind(arithmetic: str, most: int) -> Kind:
    """Fused attention in one arithmetic."""
    plain = arithmetic == "bf16"
    return Kind(
        name="attention" if plain else f"attention in {arithmetic}",
        section=f"attention.{arithmetic}",
        read=partial(attention_rows, arithmetic, most),
        seconds=partial(attention, arithmetic),
        classes=attention_classes,
        start=ATTENTION_START,
        free=ATTENTION_FREE,
        shipped=frozenset(AttentionLaw.__dataclass_fields__),
        level="attention" if plain else "attention_fp8",
    )


BACKWARD_FREE = ("start", "level", "narrow", "ramp_causal", "ramp_full", "whole")
"""Constants that backward's rows tell. An exponential is forward's, and nothing overlaps."""


def backward_guess(rows: Kernels) -> Guess:
    """Seconds of fused attention, backward."""
    heads = heads_of(rows)

    def guess(constants: Mapping[str, float], levels: Mapping[str, float]) -> Floats:
        sheet = sheet_for(rows, "bf16", levels)
        return attention_seconds(attention_law(constants), sheet, heads, backward=True)

    return guess


def mla_rows() -> Kernels:
    """The kernel of DeepSeek-V3's attention: queries and keys of 192, values of 128."""

    def wanted(row: Row) -> bool:
        # These multiply latent vectors of 576 and 512: 3.4 times the work.
        absorbed = row["kernel"] in {"vllm_flash_attn_mla", "flash_attention"}
        return row["what"] == "kernel" and int(row["seq"]) >= 128 and "triton" not in row["kernel"] and not absorbed

    return read("mla", wanted, lambda row: (row["system"], row["framework"]), 100)


def mla(rows: Kernels) -> Guess:
    """Seconds of multi-head latent attention in its expanded form, as prefill and training run it."""
    ones = np.ones(len(rows.rows))
    count = rows["heads"]
    heads = Heads(rows["batch"], rows["seq"], count, count, 192.0 * ones, 128.0 * ones, ones > 0)

    def guess(constants: Mapping[str, float], levels: Mapping[str, float]) -> Floats:
        extra = (192.0 * constants["extra"] + 640.0 * (constants["cache"] - 1.0)) * count
        return attention_seconds(attention_law(constants), rows.sheet("bf16", levels), heads, extra)

    return guess


def mla_classes(rows: Kernels) -> Classes:
    """Sizes of latent attention."""
    flops = 320.0 * rows["batch"] * rows["heads"] * rows["seq"] ** 2
    return {"above 10 GFLOP": flops > 1e10, "below 10 GFLOP": flops <= 1e10}


# ---------------------------------------------------------------------------------------------------- linear attention
SCANS = {
    "gdn": ("gdn", ("chunk_gated_delta_rule", "chunk_gated_delta_rule_triton"), 4.5, 2.0),
    "gdn_fused": ("gdn", ("chunk_gated_delta_rule_flashinfer",), 1.0, 0.0),
    "kda": ("kda", ("chunk_kda",), 7.0, 2.0),
    "kda_fused": ("kda", ("flashkda_fwd",), 2.0, 2.0),
    "mamba2": ("mamba2", ("mamba_chunk_scan_combined",), 1.6, 6.0),
}
"""Family of scans -> what, the kernels, and how often they move inputs and outputs, and states, counted. A chain of
Triton kernels reads keys five times and values, and what it makes of them, six; with a gate for each channel, in fp32,
seven. Every chunk's state is written and read. One fused kernel reads and writes once and keeps the state, two of them
do so twice and hand it over. Fitted, passes of kernels that SMs limit on one GPU say nothing of those that memory
limits on another. Mamba-2's five kernels read values twice, B and C twice each, and write the output once; the states
they write and read in fp32, and what is handed on in 16 bits."""
MEASURED_UNDER: Mapping[str, str] = {"mamba2": "sustained"}
"""Family of scans -> the regime of its rows where there are none of a burst: one GPU's, and so none left out."""


CHUNK = 64.0
"""Tokens of a chunk, in flash-linear-attention."""


def scan_rows(family: str) -> Kernels:
    """The chunked scan of one family."""

    def wanted(row: Row) -> bool:
        what, kernels = SCANS[family][:2]
        return row["what"] == what and row["kernel"] in kernels and int(row["seq"]) >= 128

    regime = MEASURED_UNDER.get(family, "burst")
    return read("linear_attention", wanted, lambda row: (row["system"], row["framework"]), 120, regime)


def scans(rows: Kernels) -> Guess:
    """Seconds of a chunked scan."""
    sizes = [rows[name] for name in ("batch", "seq", "k_heads", "k_dim", "v_heads", "v_dim")]
    grouped = rows.words("what") == "mamba2"
    chunk = np.where(grouped, rows["chunk_size"], CHUNK)
    scan = Scan(*sizes, scored=np.where(grouped, rows["k_heads"], rows["v_heads"]), chunk=chunk)
    sglang = rows.words("framework") == "sglang"  # an older release of the same kernels

    def guess(constants: Mapping[str, float], levels: Mapping[str, float]) -> Floats:
        law = ScanLaw(*(constants[name] for name in ScanLaw.__dataclass_fields__))
        return scan_seconds(law, rows.sheet("bf16", {}), scan) * np.where(sglang, constants["older"], 1.0)

    return guess


def scan_classes(rows: Kernels) -> Classes:
    """Sizes of scans."""
    tokens = rows["batch"] * rows["seq"]
    return {"all": tokens > 0, "from 4,096 tokens": tokens >= 4096}


def scan_kind(family: str) -> Kind:
    """Scans of one family. Of gated DeltaNet alone there are rows of two releases."""
    passes, states = SCANS[family][2:]
    older = {"older": (1, 4)} if family == "gdn" else {}
    start = {"start": 50000, "passes": passes, "states": states, "share": 0.1, "chain": 1000}
    return Kind(
        name=f"scan {family}",
        section=f"scans.{family}",
        read=partial(scan_rows, family),
        seconds=scans,
        classes=scan_classes,
        start={**start, "norm": 2.0, "stream": 0.95, "older": 1.0},
        free={"start": (5000, 300000), "share": (0.01, 1.0), "chain": (0, 9000), **older},
        shipped=frozenset(ScanLaw.__dataclass_fields__),
    )


# -------------------------------------------------------------------------------------------------------------- streams
def cast_rows() -> Kernels:
    """Casts of bf16 to 8 bits by one kernel."""

    def wanted(row: Row) -> bool:
        return row["what"] == "cast_static" and row["framework"] == "vllm"

    return read("quantize", wanted, lambda row: row["system"], 400)


def casts(rows: Kernels) -> Guess:
    """Seconds of casts: two bytes read, one written."""
    nbytes = 3.0 * rows["m"] * rows["k"]

    def guess(constants: Mapping[str, float], levels: Mapping[str, float]) -> Floats:
        return stream_seconds(StreamLaw(constants["start"], constants["stream"]), rows.sheet("bf16", {}), nbytes)

    return guess


def cast_classes(rows: Kernels) -> Classes:
    """Sizes of casts."""
    nbytes = 3.0 * rows["m"] * rows["k"]
    return {"all": nbytes > 0, "above 200 MB": nbytes > 2e8}


KINDS: tuple[Kind, ...] = (
    all_kind(50),
    product_kind("bf16", 120),
    product_kind("fp8", 80),
    product_kind("fp8_block", 100),
    product_kind("nvfp4", 100),
    attention_kind("bf16", 60),
    Kind(
        "attention backward",
        "attention.backward",
        lambda: Kernels(published_rows("backward_ms")),
        backward_guess,
        attention_classes,
        ATTENTION_START,
        {name: ATTENTION_FREE[name] for name in BACKWARD_FREE},
        frozenset(AttentionLaw.__dataclass_fields__),
        base="attention",
        own={"norm": 1.0, "issued": 1.0, "other": 0.0},
        level="attention_backward",
    ),
    attention_kind("fp8", 60),
    Kind(
        "mla",
        "attention.mla",
        mla_rows,
        mla,
        mla_classes,
        ATTENTION_START,
        ATTENTION_FREE,
        frozenset(AttentionLaw.__dataclass_fields__),
        base="attention",
        level="mla",
    ),
    expert_kind(50),
    scan_kind("gdn"),
    scan_kind("gdn_fused"),
    scan_kind("kda"),
    scan_kind("kda_fused"),
    scan_kind("mamba2"),
    Kind(
        "casts",
        "stream",
        cast_rows,
        casts,
        cast_classes,
        {"start": 3000.0, "stream": 0.85},
        {"start": (500, 20000), "stream": (0.3, 1.05)},
        frozenset({"start", "stream"}),
    ),
)
