"""Measured matrix products: their rows in each arithmetic, and what of the law is fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt
from kernel_kind import Classes, Floats, Guess, Kind
from kernel_rows import Kernels, Row, read

from clustersim.model.seconds.kernel_law.products import (
    EVERY,
    ProductLaw,
    Shapes,
    Tilings,
    by_tiling,
    product_seconds,
    tile_costs,
)
from clustersim.model.seconds.kernel_law.sheet import OPERAND_BYTES, PERSISTENT, Sheet

PRODUCT_FIELDS = tuple(ProductLaw.__dataclass_fields__)

PRODUCT_START = {
    "start": 4000.0,
    "store": 500.0,
    "norm": 2.0,
    "load_norm": 6.0,
    "level": -0.1,
    "thin": 0.3,
    "feed": 0.3,
    "growth": 0.3,
    "whole": 0.2,
    "block_whole": 0.5,
    "block_round": 2000.0,
    "reduce": 0.3,
    "stream": 1.0,
    "settle": 1e-3,
    "fall": 0.02,
    "steep": 1.0,
}
PRODUCT_FREE = {
    "start": (500, 20000),
    "store": (0, 4000),
    "norm": (1, 6),
    "level": (-0.6, 0.3),
    "thin": (0.0, 1.0),
    "feed": (0.05, 1.0),
    "growth": (-0.5, 1.5),
    "whole": (0, 1),
    "block_whole": (0, 1),
    "block_round": (0, 8000),
    "reduce": (0.05, 3),
    "stream": (0.5, 1.05),
    "settle": (1e-5, 1e-2),
    "fall": (0, 0.1),
    "steep": (0, 3),
}
OTHER_FREE = {
    "feed": (0.05, 1.5),
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
    """Seconds of products, with the cast of their activations in 8 bits and fewer: 16 bits are read and the operand
    written, and each element takes so many clocks of an SM. Casts that ran at a share of the bandwidth would be longer
    where memory is slow, and are not."""
    ones = np.ones(len(rows.rows))
    lines = line_by_line(arithmetic, rows)
    shapes = Shapes(rows["m"], rows["n"], rows["k"], ones, OPERAND_BYTES[arithmetic], lines=lines)
    which = {name: casts_of(arithmetic, rows) == name for name in (*FRAMEWORKS, *BLOCK_CASTS)}
    best = BestTilings()

    def guess(constants: Mapping[str, float], levels: Mapping[str, float]) -> Floats:
        law = ProductLaw(*(constants[name] for name in PRODUCT_FIELDS))
        sheet = rows.sheet(arithmetic, levels)
        seconds = product_seconds(law, sheet, shapes, best(law, sheet, shapes))
        if arithmetic == "bf16":
            return seconds
        kernels = sum(constants[f"kernels_{name}"] * inside for name, inside in which.items() if inside.any())
        crawl = sum(constants[f"crawl_{name}"] * inside for name, inside in which.items() if inside.any())
        memory = (2.0 + shapes.operand) / (law.stream * sheet.bandwidth)
        cast = shapes.m * shapes.k * (memory + crawl / (sheet.sms * sheet.clock))
        return seconds + kernels * law.start / sheet.clock + cast

    return guess


class BestTilings:
    """The tiles of each product of a list. They are searched anew each time, but while :func:`held`: where constants
    change by little so do the best tiles' seconds, and others are no better."""

    kept = False

    def __init__(self) -> None:
        self.last: Tilings | None = None

    def __call__(self, law: ProductLaw, sheet: Sheet, shapes: Shapes) -> Tilings:
        if self.last is None or not BestTilings.kept:
            at = by_tiling(tile_costs(law, sheet), shapes).argmin(axis=-1)[..., None]
            self.last = Tilings(EVERY.rows[at], EVERY.columns[at], EVERY.split[at])
        return self.last


@contextmanager
def held() -> Iterator[None]:
    """Leave products the tiles that they had last."""
    BestTilings.kept = True
    try:
        yield
    finally:
        BestTilings.kept = False


def line_by_line(arithmetic: str, rows: Kernels) -> Floats:
    """1 of CUTLASS's kernels, and of those that are made of its parts: all in 4 bits, in 8 those of SGLang and vLLM.
    Products in 16 bits are cuBLAS's everywhere, in 8 TensorRT-LLM's are, and those of blocks are DeepGEMM's."""
    if arithmetic == "fp8":
        return 1.0 * (rows.words("framework") != "trtllm")
    return np.full(len(rows.rows), 1.0 if arithmetic == "nvfp4" else 0.0)


def casts_of(arithmetic: str, rows: Kernels) -> npt.NDArray[np.str_]:
    """Whose cast each row has: its framework's. Of blocks, DeepGEMM's for Blackwell packs scales as powers of two in
    kernels of its own (:data:`PACKED`), for Hopper they stay in fp32, and CUTLASS's for GPUs without the tensor memory
    accelerator have neither."""
    framework = rows.words("framework")
    if arithmetic != "fp8_block":
        return framework
    packed = np.isin(rows.generation, PACKED)
    fed = np.isin(rows.generation, list(PERSISTENT))
    return np.char.add(framework, np.where(packed, "", np.where(fed, "_fp32", "_block")))


PACKED = ("sm100", "sm103")
BLOCK_CASTS = tuple(f"{name}{ending}" for name in FRAMEWORKS for ending in ("_fp32", "_block"))


def by_flops(rows: Kernels) -> Classes:
    """Sizes of products."""
    flops = 2.0 * rows["m"] * rows["n"] * rows["k"]
    return {"all": flops > 0, "above 30 GFLOP": flops > 3e10, "below 1 GFLOP": flops < 1e9}


def _casts(names: Iterable[str]) -> dict[str, tuple[float, tuple[float, float]]]:
    """Where to begin: one kernel, two where scales are packed or padded as well."""
    kernels = {name: 1.0 if name in FRAMEWORKS or name.endswith("_fp32") else 2.0 for name in names}
    return {f"kernels_{name}": (count, (0.0, 8.0)) for name, count in kernels.items()} | {
        f"crawl_{name}": (0.2, (0.0, 3.0)) for name in names
    }


CASTS = _casts(FRAMEWORKS)
"""What frameworks add to products in 8 and fewer bits, kernels and clocks an element -> where to begin, and the
bounds."""


def product_kind(arithmetic: str, most: int) -> Kind:
    """Products in one arithmetic; the shape of the law is that of all. Blocks of 128 are scaled by the kernels
    themselves, not by the tensor cores: their level is their own."""
    plain = arithmetic == "bf16"
    blocks = arithmetic == "fp8_block"
    own = OTHER_FREE | ({"level": PRODUCT_FREE["level"]} if blocks else {})
    casts = {} if plain else _casts((*FRAMEWORKS, *(BLOCK_CASTS if blocks else ())))
    return Kind(
        name=arithmetic,
        section=f"products.{arithmetic}",
        read=partial(product_rows, arithmetic, most),
        seconds=partial(products, arithmetic),
        classes=by_flops,
        start={name: first for name, (first, _) in casts.items()},
        free=own | {name: bounds for name, (_, bounds) in casts.items()},
        shipped=frozenset(own),
        base="all products",
        level=arithmetic,
    )


TOGETHER = ("bf16", "fp8", "nvfp4")
"""Arithmetics whose tensor cores do the scaling, if any."""


def all_rows(most: int) -> Kernels:
    """Products in all of :data:`TOGETHER`."""
    return Kernels([row for arithmetic in TOGETHER for row in product_rows(arithmetic, most).rows])


def by_arithmetic(
    arithmetics: Sequence[str], of_one: Callable[[str, Kernels], Guess], own: Iterable[str], rows: Kernels
) -> Guess:
    """Seconds of kernels in several arithmetics by one set of constants, but for ``own``, whose names have the
    arithmetic before them."""
    inside = {arithmetic: rows.words("dtype") == arithmetic for arithmetic in arithmetics}
    guesses = {kind: of_one(kind, rows.take(which)) for kind, which in inside.items() if which.any()}

    def guess(constants: Mapping[str, float], levels: Mapping[str, float]) -> Floats:
        seconds = np.zeros(len(rows.rows))
        for arithmetic, of_these in guesses.items():
            its_own = {name: constants.get(f"{arithmetic}_{name}", 0.0) for name in own}
            seconds[inside[arithmetic]] = of_these({**constants, **its_own}, levels)
        return seconds

    return guess


def all_kind(most: int) -> Kind:
    """The shape of the law, from products in all arithmetics together."""
    casts = {f"{arithmetic}_{name}": of_it for arithmetic in TOGETHER[1:] for name, of_it in CASTS.items()}
    return Kind(
        name="all products",
        section="products.all",
        read=partial(all_rows, most),
        # How much an SM does a clock tells arithmetics apart.
        seconds=partial(by_arithmetic, TOGETHER, products, tuple(CASTS)),
        classes=by_flops,
        start=PRODUCT_START | {name: first for name, (first, _) in casts.items()},
        free=PRODUCT_FREE | {name: bounds for name, (_, bounds) in casts.items()},
        shipped=frozenset(PRODUCT_FIELDS),
        level="products",
    )
