"""Each kind of measured kernel: which rows, which law, which constants are free, and within what bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
from kernel_rows import Kernels, Row, read

from clustersim.model.seconds.kernel_law.attention import AttentionLaw, Heads, attention_seconds
from clustersim.model.seconds.kernel_law.casts import StreamLaw, stream_seconds
from clustersim.model.seconds.kernel_law.experts import ExpertLaw, Experts, expert_seconds
from clustersim.model.seconds.kernel_law.products import ProductLaw, Shapes, product_seconds
from clustersim.model.seconds.kernel_law.scans import Scan, ScanLaw, scan_seconds
from clustersim.model.seconds.kernel_law.sheet import OPERAND_BYTES

Floats = npt.NDArray[np.float64]
Guess = Callable[[Mapping[str, float], Mapping[str, float]], Floats]
Classes = Mapping[str, npt.NDArray[np.bool_]]
PRODUCT_FIELDS = tuple(ProductLaw.__dataclass_fields__)


@dataclass(frozen=True)
class Kind:
    """One kind of kernel.

    Parameters
    ----------
    name : of the kind. section : of the data file. read : its rows. seconds : rows -> (constants, levels) -> seconds.
    classes : rows -> label -> which. start : constants to begin from. free : name -> (least, most) of those to fit.
    base : another kind whose constants it begins from. own : of those, the ones it has otherwise. shipped : constants
    that the data file has. level : the key of its levels there; "" without any.
    """

    name: str
    section: str
    read: Callable[[], Kernels]
    seconds: Callable[[Kernels], Guess]
    classes: Callable[[Kernels], Classes]
    start: Mapping[str, float]
    free: Mapping[str, tuple[float, float]]
    shipped: frozenset[str]
    base: str = ""
    own: Mapping[str, float] = field(default_factory=dict)
    level: str = ""


# ------------------------------------------------------------------------------------------------------------- products
BF16_START = {
    "start": 4000.0,
    "round": 1150.0,
    "norm": 1.8,
    "load_norm": 6.0,
    "level": -0.21,
    "feed": 0.36,
    "growth": 0.18,
    "whole": 0.16,
    "reduce": 0.31,
    "stream": 1.0,
    "writing": 1.37,
    "settle": 7e-5,
    "fall": 0.012,
    "steep": 1.87,
}
BF16_FREE = {
    "start": (500, 20000),
    "round": (0, 5000),
    "norm": (1, 6),
    "level": (-0.6, 0.3),
    "feed": (0.05, 1.0),
    "growth": (-0.5, 1.5),
    "whole": (0, 1),
    "reduce": (0.05, 3),
    "stream": (0.5, 1.05),
    "writing": (1, 3),
    "settle": (1e-5, 1e-2),
    "fall": (0, 0.1),
    "steep": (0, 3),
}
OTHER_FREE = {
    "level": (-0.9, 0.3),
    "feed": (0.05, 1.5),
    "round": (0, 5000),
    "fall": (0, 0.1),
}
FRAMEWORKS = ("sglang", "trtllm", "vllm")


def product_rows(arithmetic: str, most: int) -> Kernels:
    """Products of 128 and more in each size, half of them above 30 GFLOP. vLLM's bf16 operands are uninitialised."""

    def wanted(row: Row) -> bool:
        small = min(int(row[name]) for name in "mnk") < 128
        return row["dtype"] == arithmetic and not small and (arithmetic, row["framework"]) != ("bf16", "vllm")

    def group(row: Row) -> tuple[str, str, bool]:
        return row["system"], row["framework"], 2.0 * int(row["m"]) * int(row["n"]) * int(row["k"]) > 3e10

    return read("gemm", wanted, group, most)


def products(arithmetic: str, rows: Kernels) -> Guess:
    """Seconds of products, with the cast of their activations in 8 bits and fewer."""
    ones = np.ones(len(rows.rows))
    shapes = Shapes(rows["m"], rows["n"], rows["k"], ones, OPERAND_BYTES[arithmetic])
    which = {name: rows.words("framework") == name for name in FRAMEWORKS}

    def guess(constants: Mapping[str, float], levels: Mapping[str, float]) -> Floats:
        law = ProductLaw(*(constants[name] for name in PRODUCT_FIELDS))
        sheet = rows.sheet(arithmetic, levels)
        seconds = product_seconds(law, sheet, shapes)
        if arithmetic == "bf16":
            return seconds
        kernels = sum(constants[f"kernels_{name}"] * inside for name, inside in which.items())
        nbytes = sum(constants[f"bytes_{name}"] * inside for name, inside in which.items())
        cast = nbytes * shapes.m * shapes.k / (law.stream * sheet.bandwidth)
        return seconds + kernels * law.start / sheet.clock + cast

    return guess


def by_flops(rows: Kernels) -> Classes:
    """Sizes of products."""
    flops = 2.0 * rows["m"] * rows["n"] * rows["k"]
    return {"all": flops > 0, "above 30 GFLOP": flops > 3e10, "below 1 GFLOP": flops < 1e9}


def product_kind(arithmetic: str, most: int) -> Kind:
    """Products in one arithmetic; of the others than bf16, the shape of the law is bf16's."""
    casts = {f"kernels_{name}": 1.0 for name in FRAMEWORKS} | {f"bytes_{name}": 3.0 for name in FRAMEWORKS}
    bounds = {name: ((0.0, 8.0) if name.startswith("kernels") else (0.0, 30.0)) for name in casts}
    plain = arithmetic == "bf16"
    return Kind(
        name=arithmetic,
        section=f"products.{arithmetic}",
        read=partial(product_rows, arithmetic, most),
        seconds=partial(products, arithmetic),
        classes=by_flops,
        start=BF16_START if plain else casts,
        free=BF16_FREE if plain else OTHER_FREE | bounds,
        shipped=frozenset(PRODUCT_FIELDS if plain else OTHER_FREE),
        base="" if plain else "bf16",
        level=arithmetic,
    )


# ------------------------------------------------------------------------------------------------------------ attention
ATTENTION_START = {
    "start": 21000.0,
    "norm": 1.25,
    "level": -0.34,
    "narrow": 4.0,
    "weight": 0.83,
    "ramp_causal": 210.0,
    "ramp_full": 0.0,
    "whole": 0.8,
    "stream": 0.7,
    "cache": 2.0,
    "extra": 4.0,
}
ATTENTION_FREE = {
    "start": (1000, 60000),
    "norm": (1, 6),
    "level": (-1.2, 0.3),
    "narrow": (0, 100),
    "weight": (0, 3),
    "ramp_causal": (0, 1500),
    "ramp_full": (0, 1500),
    "whole": (0, 1),
    "stream": (0.3, 1.1),
    "cache": (1, 10),
    "extra": (0, 60),
}


def attention_rows(arithmetic: str, most: int) -> Kernels:
    """Fused kernels on whole sequences. Triton's are left out: their rate is of their tuning, not of the GPU."""

    def wanted(row: Row) -> bool:
        plain = int(row["seq"]) >= 128 and row["window"] == "0" and row["head_dim"] in {"64", "128", "256"}
        odd = "triton" in row["kernel"] or "decode" in row["kernel"]
        return row["dtype"] == arithmetic and plain and not odd

    def group(row: Row) -> tuple[str, str, str, bool]:
        return row["system"], row["kernel"], row["mask"], _attention_flops(row) > 1e10

    return read("attention", wanted, group, most)


def _attention_flops(row: Row) -> float:
    square = float(row["batch"]) * float(row["heads"]) * float(row["seq"]) ** 2 * float(row["head_dim"])
    return square * (2.0 if row["mask"] == "causal" else 4.0)


def heads_of(rows: Kernels) -> Heads:
    """The shapes of attention rows."""
    shape = [rows[name] for name in ("batch", "seq", "heads", "kv_heads", "head_dim", "head_dim")]
    return Heads(*shape, causal=rows.words("mask") == "causal")


def attention(arithmetic: str, rows: Kernels) -> Guess:
    """Seconds of fused attention; TensorRT-LLM's rotates queries and keys as well."""
    heads = heads_of(rows)
    rotated = (rows.words("framework") == "trtllm") & heads.causal
    moved = rotated * heads.heads * heads.width

    def guess(constants: Mapping[str, float], levels: Mapping[str, float]) -> Floats:
        law = AttentionLaw(*(constants[name] for name in AttentionLaw.__dataclass_fields__))
        return attention_seconds(law, rows.sheet(arithmetic, levels), heads, constants["extra"] * moved)

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


def mla_rows() -> Kernels:
    """The kernel of DeepSeek-V3's attention: queries and keys of 192, values of 128."""

    def wanted(row: Row) -> bool:
        absorbed = row["kernel"] == "vllm_flash_attn_mla"  # multiplies latent vectors: three times the work
        return row["what"] == "kernel" and int(row["seq"]) >= 128 and "triton" not in row["kernel"] and not absorbed

    return read("mla", wanted, lambda row: (row["system"], row["framework"]), 100)


def mla(rows: Kernels) -> Guess:
    """Seconds of multi-head latent attention in its expanded form, as prefill and training run it."""
    ones = np.ones(len(rows.rows))
    count = rows["heads"]
    heads = Heads(rows["batch"], rows["seq"], count, count, 192.0 * ones, 128.0 * ones, ones > 0)

    def guess(constants: Mapping[str, float], levels: Mapping[str, float]) -> Floats:
        law = AttentionLaw(*(constants[name] for name in AttentionLaw.__dataclass_fields__))
        return attention_seconds(law, rows.sheet("bf16", levels), heads, constants["extra"] * count * 192.0)

    return guess


def mla_classes(rows: Kernels) -> Classes:
    """Sizes of latent attention."""
    flops = 320.0 * rows["batch"] * rows["heads"] * rows["seq"] ** 2
    return {"above 10 GFLOP": flops > 1e10, "below 10 GFLOP": flops <= 1e10}


# -------------------------------------------------------------------------------------------------------------- experts
def expert_rows(arithmetic: str, most: int) -> Kernels:
    """Balanced experts; Triton's with expert parallelism compute remote choices on expert 0."""

    def wanted(row: Row) -> bool:
        balanced = row["table"] == "moe" and row["distribution"] == "balanced" and row["dtype"] == arithmetic
        enough = float(row["tokens"]) * float(row["topk"]) / float(row["ep"]) >= 128
        return balanced and enough and not ("triton" in row["kernel"] and row["ep"] != "1")

    return read("moe", wanted, lambda row: (row["system"], row["framework"]), most)


def experts(arithmetic: str, rows: Kernels) -> Guess:
    """Seconds of the experts of one layer."""
    layer = Experts(
        routed=rows["tokens"] * rows["topk"] / rows["ep"],
        experts=rows["experts"] / rows["ep"],
        hidden=rows["hidden"],
        inner=rows["inter"] / rows["tp"],
        gated=rows["gated"],
        operand=OPERAND_BYTES[arithmetic],
    )

    def guess(constants: Mapping[str, float], levels: Mapping[str, float]) -> Floats:
        products_ = ProductLaw(*(constants[name] for name in PRODUCT_FIELDS))
        law = ExpertLaw(constants["starts"], constants["share"], constants["passes"])
        return expert_seconds(law, products_, rows.sheet(arithmetic, levels), layer)

    return guess


def expert_classes(rows: Kernels) -> Classes:
    """Sizes of expert layers."""
    flops = 2.0 * rows["tokens"] * rows["topk"] / rows["ep"] * rows["hidden"] * rows["inter"] / rows["tp"] * 3
    return {"all": flops > 0, "above 30 GFLOP": flops > 3e10}


def expert_kind(arithmetic: str, most: int) -> Kind:
    """Experts in one arithmetic, on the products of that arithmetic."""
    return Kind(
        name=f"experts in {arithmetic}",
        section=f"experts.{arithmetic}",
        read=partial(expert_rows, arithmetic, most),
        seconds=partial(experts, arithmetic),
        classes=expert_classes,
        start={"starts": 6.0, "share": 0.8, "passes": 6.0},
        free={"starts": (1, 40), "share": (0.2, 1.2), "passes": (0, 40)},
        shipped=frozenset({"starts", "share", "passes"}),
        base=arithmetic,
    )


# ---------------------------------------------------------------------------------------------------- linear attention
SCANS = {
    "gdn": ("gdn", ("chunk_gated_delta_rule", "chunk_gated_delta_rule_triton")),
    "gdn_fused": ("gdn", ("chunk_gated_delta_rule_flashinfer",)),
    "kda": ("kda", ("chunk_kda",)),
    "kda_fused": ("kda", ("flashkda_fwd",)),
}
"""Family of scans -> what, and the kernels: chains of Triton kernels, or one fused kernel."""


def scan_rows(family: str) -> Kernels:
    """The chunked scan of one family."""

    def wanted(row: Row) -> bool:
        what, kernels = SCANS[family]
        return row["what"] == what and row["kernel"] in kernels and int(row["seq"]) >= 128

    return read("linear_attention", wanted, lambda row: (row["system"], row["framework"]), 120)


def scans(rows: Kernels) -> Guess:
    """Seconds of a chunked scan."""
    scan = Scan(*(rows[name] for name in ("batch", "seq", "k_heads", "k_dim", "v_heads", "v_dim")))

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
    """Scans of one family."""
    return Kind(
        name=f"scan {family}",
        section=f"scans.{family}",
        read=partial(scan_rows, family),
        seconds=scans,
        classes=scan_classes,
        start={
            "start": 50000,
            "passes": 3,
            "states": 3,
            "share": 0.1,
            "chain": 1000,
            "norm": 1.5,
            "stream": 0.8,
            "older": 1.0,
        },
        free={
            "start": (5000, 300000),
            "passes": (0.2, 12),
            "states": (0.0, 12),
            "share": (0.01, 1.0),
            "chain": (0, 9000),
            "norm": (1, 4),
            "older": (1, 4),
        },
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
    product_kind("bf16", 120),
    product_kind("fp8", 80),
    product_kind("fp8_block", 100),
    product_kind("nvfp4", 100),
    attention_kind("bf16", 60),
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
    expert_kind("bf16", 80),
    expert_kind("fp8", 80),
    expert_kind("fp8_block", 80),
    expert_kind("nvfp4", 80),
    scan_kind("gdn"),
    scan_kind("gdn_fused"),
    scan_kind("kda"),
    scan_kind("kda_fused"),
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
