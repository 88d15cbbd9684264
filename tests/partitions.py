"""Small models and configurations that partition tests share."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st

from clustersim.core.model import Kernel, Model
from clustersim.model import model, transformer
from clustersim.training.parallel import ParallelConfig, Recompute
from clustersim.training.partition import Exchange, Item, LocalLayer, Partition, Work
from clustersim.training.partition.tensor import PARTED

LLAMA = model("llama3.2-1b", seq_len=4096, implementation="fused")
OVERLAPS = ("none", "bulk", "userbuffers", "async_tp")


def small(**changes: object) -> Model:
    """Grouped queries, a gated MLP, rotary positions: every rule at once."""
    sizes = {"layers": 4, "d_model": 512, "heads": 16, "seq_len": 256, "vocab": 1000, "kv_heads": 4, "d_ff": 1024}
    options = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "tied": False, "bias": False}
    return transformer(**(sizes | options | changes))


def layers(split: Partition) -> list[LocalLayer]:
    return [layer for stage in split.stages for layer in stage.layers]


def kernels(items: tuple[Item, ...], part: str) -> list[Kernel]:
    return [kernel for item in items if isinstance(item, Work) and item.part == part for kernel in item.kernels]


def exchanges(items: tuple[Item, ...]) -> list[Exchange]:
    return [item for item in items if isinstance(item, Exchange)]


def flops(items: tuple[Item, ...], part: str = "F") -> float:
    return sum(kernel.flops for kernel in kernels(items, part))


def amounts(found: list[Kernel]) -> dict[str, float]:
    """Backward traffic and FLOPs by kernel; pieces of one and products of one input add up, and copies around exchanges
    are not the model's."""
    total: Counter[str] = Counter()
    for kernel in found:
        if kernel.name in {"joined", PARTED, "partial sums", "staged"}:
            continue
        total[{"k": "q", "v": "q", "up": "gate"}.get(kernel.name, kernel.name)] += (
            kernel.backward_flops + kernel.backward_nbytes
        )
    return dict(total)


def replace_config(parallel: ParallelConfig, **changes: object) -> ParallelConfig:
    fields = {name: getattr(parallel, name) for name in parallel.__struct_fields__}
    return ParallelConfig(**(fields | changes))


degrees = st.sampled_from([1, 2, 4, 8])
configs = st.builds(
    lambda tp, cp, pp, vpp, sp, overlap, comm: ParallelConfig(
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=vpp if pp == 2 else 1,
        sequence_parallel=sp and tp > 1,
        tp_overlap=overlap if sp and tp > 1 else "none",
        cp_comm_type=comm if tp * cp <= 4 else "p2p",
    ),
    degrees,
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from(OVERLAPS),
    st.sampled_from(["p2p", "all_gather", "a2a"]),
)
recomputes = st.sampled_from(
    [
        Recompute(),
        Recompute("full"),
        Recompute("full", num_layers=2),
        Recompute("full", "block", 1),
        Recompute("selective", modules=("core_attn",)),
        Recompute("selective", modules=("mlp", "layernorm")),
        Recompute("selective_op"),
    ]
)
