"""Measured expert layers: their rows in each arithmetic, and what of the law is fitted to them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from kernel_kind import Classes, Floats, Guess, Kind
from kernel_products import PRODUCT_FIELDS, BestTilings, by_arithmetic
from kernel_rows import Kernels, Row, read

from clustersim.model.seconds.kernel_law.experts import ExpertLaw, Experts, expert_seconds, grouped_products
from clustersim.model.seconds.kernel_law.products import ProductLaw
from clustersim.model.seconds.kernel_law.sheet import OPERAND_BYTES

ARITHMETICS = ("bf16", "fp8", "fp8_block", "nvfp4")
LIBRARIES = ("tuned", "triton", "generated")
OF_A_LIBRARY = ("starts", "thin", "passes", "inners")
"""Constants that a library has in all arithmetics alike."""


def library(kernel: str) -> str:
    """Whose kernel it is: the law's are CUTLASS's and DeepGEMM's, which are tuned to the shape; Triton's and those that
    TensorRT-LLM has generated ahead have constants of their own."""
    if "triton" in kernel or "vllm_fused_moe" in kernel:
        return "triton"
    return "tuned" if kernel.startswith("moe_torch_flow") or kernel == "deepgemm" else "generated"


def expert_rows(arithmetic: str, most: int) -> Kernels:
    """Balanced experts, where rank 0 computes what the table says.

    Triton's with expert parallelism compute remote choices on expert 0. The generated ones choose experts themselves,
    and not evenly: with 256 experts of DeepSeek-V3 on 32 or 64 ranks rank 0 takes as long as half of all choices of all
    ranks need, in 8 bits as in 4. FlashInfer's CUTLASS ran untuned, and is up to four times slower than the same
    kernels under TensorRT-LLM, whose Triton kernel of blocks ran on one GPU alone.
    """

    def wanted(row: Row) -> bool:
        balanced = row["table"] == "moe" and row["distribution"] == "balanced" and row["dtype"] == arithmetic
        enough = float(row["tokens"]) * float(row["topk"]) / float(row["ep"]) >= 128
        elsewhere = library(row["kernel"]) != "tuned" and row["ep"] != "1"
        odd = "flashinfer_cutlass" in row["kernel"] or "torch_flow_triton" in row["kernel"]
        return balanced and enough and not (elsewhere or odd)

    return read("moe", wanted, lambda row: (row["system"], library(row["kernel"])), most)


def experts(arithmetic: str, rows: Kernels) -> Guess:
    """Seconds of the experts of one layer, by the library whose kernels they are."""
    layer = Experts(
        routed=rows["tokens"] * rows["topk"] / rows["ep"],
        experts=rows["experts"] / rows["ep"],
        hidden=rows["hidden"],
        inner=rows["inter"] / rows["tp"],
        gated=rows["gated"],
        operand=OPERAND_BYTES[arithmetic],
    )
    up, down = grouped_products(layer)
    best_up, best_down = BestTilings(), BestTilings()
    inside = {name: np.array([library(row["kernel"]) == name for row in rows.rows]) for name in LIBRARIES}

    def guess(constants: Mapping[str, float], levels: Mapping[str, float]) -> Floats:
        products = ProductLaw(*(constants[name] for name in PRODUCT_FIELDS))
        own = {name: sum(constants[_of(name, k)] * v for k, v in inside.items()) for name in OF_A_LIBRARY}
        share = sum(constants[_share(arithmetic, k)] * v for k, v in inside.items())
        law = ExpertLaw(**own, share=share, crawl=constants["crawl"], overlap=constants["overlap"])
        sheet = rows.sheet(arithmetic, levels)
        tilings = best_up(products, sheet, up), best_down(products, sheet, down)
        return expert_seconds(law, products, sheet, layer, tilings)

    return guess


def _of(name: str, library_: str) -> str:
    return name if library_ == "tuned" else f"{name}_{library_}"


def _share(arithmetic: str, library_: str) -> str:
    """Blocks of 128 are scaled by the kernels themselves, and have a share of their own. The generated kernels ran on
    one generation alone, which cannot tell what they do less of in fewer bits from what they do less of on faster
    SMs."""
    name = _of("share", library_)
    return f"{arithmetic}_{name}" if library_ == "generated" else f"block_{name}" * (arithmetic == "fp8_block") or name


def expert_classes(rows: Kernels) -> Classes:
    """Arithmetics and sizes of expert layers."""
    flops = 2.0 * rows["tokens"] * rows["topk"] / rows["ep"] * rows["hidden"] * rows["inter"] / rows["tp"] * 3
    dtype = rows.words("dtype")
    big = {f"in {name}, above 30 GFLOP": (dtype == name) & (flops > 3e10) for name in ARITHMETICS}
    tuned = np.array([library(row["kernel"]) == "tuned" for row in rows.rows])
    return {"all": flops > 0, **big, "tuned to the shape, above 30 GFLOP": tuned & (flops > 3e10)}


COUNTED = {
    "passes": 2.0,
    "passes_triton": 1.0,
    "passes_generated": 1.0,
    "inners": 1.5,
    "inners_triton": 1.5,
    "inners_generated": 0.0,
}
"""What kernels read and write beside the products: Triton's and the generated ones gather rows as they multiply, the
latter activate in the same kernel."""
FREE = {
    **{_of("starts", name): (15.0, (1, 40)) for name in LIBRARIES},
    **{_of("thin", name): (0.4, (0.0, 2.0)) for name in LIBRARIES},
    **{_share(arithmetic, name): (0.7, (0.1, 2.5)) for name in LIBRARIES for arithmetic in ARITHMETICS},
    "crawl": (0.1, (0, 1)),
    "overlap": (1.5, (1, 4)),
}
"""Constant -> where to begin, and the bounds."""


def expert_kind(most: int) -> Kind:
    """Experts in all arithmetics together: how much an SM does a clock tells them apart."""
    return Kind(
        name="experts",
        section="experts",
        read=lambda: Kernels([row for arithmetic in ARITHMETICS for row in expert_rows(arithmetic, most).rows]),
        seconds=partial(by_arithmetic, ARITHMETICS, experts, ()),
        classes=expert_classes,
        start=COUNTED | {name: first for name, (first, _) in FREE.items()},
        free={name: bounds for name, (_, bounds) in FREE.items()},
        shipped=frozenset(ExpertLaw.__dataclass_fields__) | {_share("fp8_block", "tuned")},
        base="all products",
    )
