"""The fitted constants of the laws, from ``data/kernel_law.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from clustersim.core.texts import Table, data_table
from clustersim.model.seconds.kernel_law.attention import AttentionLaw
from clustersim.model.seconds.kernel_law.casts import StreamLaw
from clustersim.model.seconds.kernel_law.experts import ExpertLaw
from clustersim.model.seconds.kernel_law.products import ProductLaw
from clustersim.model.seconds.kernel_law.scans import ScanLaw

KINDS = ("products", "attention", "experts", "scans", "streams")


@dataclass(frozen=True)
class KernelLaws:
    """All laws.

    Parameters
    ----------
    products : arithmetic -> law, ``"all"`` that of all together. levels : arithmetic (of a product, or ``"attention"``)
        -> generation -> what it adds to the logarithm of the rate.
    attention : arithmetic -> law. experts : the same, on products of ``"all"``. scans : kernel family -> law. stream :
        of kernels that only move data.
    """

    products: Mapping[str, ProductLaw]
    attention: Mapping[str, AttentionLaw]
    experts: Mapping[str, ExpertLaw]
    scans: Mapping[str, ScanLaw]
    stream: StreamLaw
    levels: Mapping[str, Mapping[str, float]]

    def level(self, arithmetic: str, arch: str) -> float:
        """Of a generation in an arithmetic; of one that nobody measured, its nearest kin's (:data:`KIN`), or 0."""
        known = self.levels.get(MEASURED_AS.get(arithmetic, arithmetic), {})
        return known.get(arch, known.get(KIN.get(arch, ""), 0.0))


MEASURED_AS: Mapping[str, str] = {"fp16": "bf16", "mxfp8": "fp8"}
"""Arithmetic without measurements -> the one that the same units do at the same rate: tensor cores multiply by the
scales of MXFP8's blocks as they go."""
KIN: Mapping[str, str] = {"sm103": "sm100", "sm121": "sm120", "sm86": "sm80", "sm89": "sm120"}
"""Generations without measurements -> the one whose tensor cores are most like theirs."""


@lru_cache(maxsize=1)
def kernel_laws() -> KernelLaws:
    """The shipped laws."""
    raw = without_sources(data_table("kernel_law"))
    base = ProductLaw(**raw["products"]["all"])
    own = {name: replace(base, **constants) for name, constants in raw["products"].items()}
    block_share = raw["experts"].pop("block_share")
    experts = ExpertLaw(**raw["experts"])
    return KernelLaws(
        products=MappingProxyType(own | {"fp16": own["bf16"], "mxfp8": own["fp8"]}),
        attention=MappingProxyType({name: AttentionLaw(**table) for name, table in raw["attention"].items()}),
        experts=MappingProxyType(
            dict.fromkeys(("bf16", "fp8", "nvfp4"), experts) | {"fp8_block": replace(experts, share=block_share)}
        ),
        scans=MappingProxyType({name: ScanLaw(**table) for name, table in raw["scans"].items()}),
        stream=StreamLaw(**raw["stream"]),
        levels=MappingProxyType(raw["levels"]),
    )


def without_sources(table: Table) -> Table:
    """The numbers of a table of constants, without what each part says of where they are from."""
    return {
        name: without_sources(part) if isinstance(part, dict) else part
        for name, part in table.items()
        if name != "source"
    }
