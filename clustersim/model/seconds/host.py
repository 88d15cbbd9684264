"""What the host contributes: the time it takes to call what a GPU runs.

A Python framework reaches each module, autograd node and collective through a call, which takes the host far
longer than the launch of its kernels: hooks, checks, shapes, allocator, autograd's graph. What a layer's pass takes the
host is

    ``launches x launch + calls x call``

with a call for each kernel of the op list and :data:`POST` of one for each exchange, forward and backward. Kernels wait
until the host has come to them. The level ``call`` belongs to a stack (``data/host.toml``) and to a generation of CPUs
(:data:`PACE`); CUDA graphs replay what they have by one call. ``tests/host_fit.py`` prints the level that published
steps ask for, and how far each publisher's steps are off with the level of the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from clustersim.core.model import Kernel, product_beside
from clustersim.core.texts import data_table
from clustersim.core.topology import NodeType
from clustersim.core.units import parse_time
from clustersim.model.seconds.calls import POST, adapter_calls
from clustersim.model.seconds.kernels import CLAMP, grouped, launches, weighted

PACE = {
    "bdw": 1.9,
    "skl": 1.7,
    "clx": 1.6,
    "icx": 1.3,
    "spr": 1.0,
    "emr": 1.0,
    "rome": 1.5,
    "milan": 1.3,
    "genoa": 1.0,
    "grace": 1.35,
}
"""CPU generation -> how long one thread takes for the same calls, in units of Sapphire Rapids'. Rome and Grace are
identified on Megatron-LM's functional tests of A100, H100 and GB200 (equal models, 7.5, 5.0 and 6.6 ms a layer); the
others lie between by their single-thread ratings, and are estimates."""
USUAL_PACE = 1.3
"""The same of a server whose CPU nobody names: a prior, Ice Lake's and Milan's, midway of the list."""


def pace_of(node: NodeType) -> float:
    """How long the node's CPU takes for what Sapphire Rapids does in 1; of an unknown model a usual server's."""
    return PACE.get(node.cpu_model, USUAL_PACE)


BOOKKEEPING = 11
"""Calls of a mixture of experts beside those of its op list, in a pass forward or backward: scores, masks, counts,
sorts and the balance loss. Qwen3-30B-A3B on p5 asks for 12 (17.4 ms a layer at the smallest batch, whatever the
dispatcher), Megatron-LM's functional tests with a balance loss for 9."""
BALANCED_BOOKKEEPING = 4
"""The same of routers without a balance loss: Megatron-LM's functional tests with Sinkhorn's of one expert."""
FUSED_BOOKKEEPING = 3
"""The same where the router's kernels are fused (Megatron's ``moe_router_fusion``). NVIDIA's performance tables ask for
4, Megatron-MoE-ModelZoo's for 2."""
SCORING = frozenset({"head_copies", "scale", "mask", "clamp", "softmax", "dropout", "context"})
"""Kernels of unfused attention behind its scores: functions of a module that was called already (Transformer Engine
pytorch/attention/dot_product_attention/backends.py, ``UnfusedDotProductAttention``; Megatron-LM
core/transformer/dot_product_attention.py). Megatron-LM's functional tests take as long with it as with fused attention,
on three CPUs."""
INDEXING = frozenset({"token_indices", "dispatch_layout", "token_map"})
"""What DeepEP's dispatcher makes of a router's choice. Fused, each is a function of a module that was called already;
op by op it is four or more, which are as much as a module (Megatron-LM core/transformer/moe/token_dispatcher.py,
``setup_metadata`` and ``_indices_to_multihot``)."""


FUNCTIONS = frozenset({"await_counts", "await_rows", "await_offset", "router_casts", "routing_scan", CLAMP})
"""Functions of a module that was called already, whatever the router's fusion."""


OUTSIDE = frozenset({"embedding", "head", "mtp"})
"""Sections that no scope of Megatron's has."""
FEED_FORWARD = frozenset({"norm_2", "gate", "up", "activation", "down", "mlp_residual"})
"""Kernels of a block's second half, and beginnings of those of its mixture of experts."""
EXPERT_KERNELS = ("router", "top_k", "expert_", "shared_", "dispatch", "combine", "token_", "read_counts")
ROUTED = frozenset(
    {"moe", "router", "tokens", "read", "preprocess", "permute", "dispatch", "experts", "combine", "unpermute"}
)
"""Sections of a layer that has a mixture of experts."""


STREAMS = 4
"""That the experts of Transformer Engine's grouped product are spread over (:data:`BY_EXPERT`)."""
BY_EXPERT: Mapping[str, int] = MappingProxyType({"": 1, "tensor": 2, "blocks": 3})
"""Launches of Transformer Engine's grouped product for each expert, by what the scales of 8 bits and fewer are of.

cuBLAS's products go on four streams (common/gemm/cublaslt_gemm.cu, ``multi_stream_cublas_gemm``), and casts one by one
(pytorch/csrc/extensions/cast.cpp, ``multi_tensor_quantize_impl``, which has a fused kernel for delayed scaling alone).
A product with scales of blocks takes the host as long as two launches: eight experts of 128 tokens take 267 us, all
scales in place (NVIDIA/TransformerEngine pull request 3134, NVFP4); and a cast 16 to 20 us on Grace (pull request 3137,
MXFP8). They are 50 us an expert, three launches there."""


def bookkeeping(*, fused: bool, balance_loss: bool, pace: float = 1.0) -> float:
    """Calls of a router beside those of its op list, on a CPU of this ``pace`` (:data:`PACE`).

    Op by op they are small kernels and waits for them rather than Python, and take no longer on a slower CPU: equal
    mixtures of Megatron-LM's functional tests take 0.96 to 1.17 times as long on Grace as on Sapphire Rapids, where
    equal dense models take 1.35 to 1.47 times, and on Rome add less to those than on either. With the CPU's pace its
    groups were 19.7 % off in the median, without 12.2 %, and Qwen3-30B-A3B's on Milan 6.6 and 7.2 %.
    """
    if fused:
        return FUSED_BOOKKEEPING
    return (BOOKKEEPING if balance_loss else BALANCED_BOOKKEEPING) / pace


class HostLaw(msgspec.Struct, frozen=True):
    """What calls and launches take a host.

    call, launch : float [s]. joined : linears that read one tensor (q, k and v; gate and up) are one module.
    source : where the level is from. known : somebody has measured this stack.
    graphs : what CUDA graphs replay, as ``cuda_graph_scope`` of Megatron names it.
    layer_time : float [s], measured, of a layer's forward and backward: its calls and launches are scaled to it.
    bookkeeping : calls of a router's choice beside its own.
    by_expert : launches for each expert of a grouped product, one of them a cast's where there are several; 0 where all
        are in one.
    posts : libraries of expert exchanges whose messages to other nodes the host posts: it calls nothing beside them.
    plain : float [s], of a linear of an adapter, which is Megatron's own where others are Transformer Engine's; of its
        other kernels, functions of a module that was called already, a part. 0 for ``call``.
    """

    call: float
    launch: float
    joined: bool = False
    source: str = ""
    graphs: tuple[str, ...] = ()
    layer_time: float | None = None
    known: bool = True
    bookkeeping: float = BOOKKEEPING
    by_expert: int = 0
    plain: float = 0.0
    posts: frozenset[str] = frozenset()

    def calls(
        self, name: str, kernels: Sequence[Kernel], part: str, called: set[tuple[str, ...]]
    ) -> Iterator[tuple[Kernel, float]]:
        """Kernels of a work of this name (:func:`clustersim.model.seconds.price.price` has the parts), each with the
        seconds [s] that its call takes. ``called`` : modules of the pass so far; pieces of one that overlaps its
        exchange are no further calls.
        """
        sections = f"{name}+moe" if any(kernel.cut.startswith("expert") for kernel in kernels) else name
        for kernel in kernels:
            if self.graphs and _captured(sections, kernel.name, self.graphs):
                replayed = part != "W" and ("graph", part) not in called
                called.add(("graph", part))
                yield kernel, replayed * self.call
            elif self.joined and _behind_another(kernel, kernels):
                yield kernel, 0.0
            else:
                yield kernel, self._one(name, kernel, part, called)

    def _one(self, name: str, kernel: Kernel, part: str, called: set[tuple[str, ...]]) -> float:
        """Seconds [s] to call one kernel that no graph has, and no call before it."""
        launched = launches(kernel, part)
        # Gradients of weights are of tensors that were cast for those of inputs.
        each = self.by_expert - (part == "W" and self.by_expert > BY_EXPERT[""])
        seconds = launched * self.launch * (each * kernel.repeat if each and grouped(kernel) else 1)
        # Autograd makes both gradients of a product in one call.
        if not launched or (part == "W" and kernel.kind == "gemm") or (name, kernel.name, part) in called:
            return seconds
        called.add((name, kernel.name, part))
        if calls := adapter_calls(kernel):
            return seconds + (self.plain or self.call) * calls
        # A router's choice brings masks, counts, sorts and the balance loss, which are called one by one.
        indexes = kernel.name in INDEXING and self.bookkeeping == FUSED_BOOKKEEPING
        inside = indexes or kernel.name in SCORING or kernel.name in FUNCTIONS
        return seconds + self.call * (POST if inside else 1 + self.bookkeeping * (kernel.name == "top_k"))

    def exchange(self, name: str, kind: str) -> float:
        """Seconds [s] to call an exchange of this name and kind; copies between pieces are the module's own."""
        graphed = self.graphs and _captured(name, "", self.graphs)
        return 0.0 if graphed or kind == "copies" else POST * self.call


def _behind_another(kernel: Kernel, kernels: Sequence[Kernel]) -> bool:
    """Whether a product reads what one before it reads, which keeps it; one of frozen weights keeps nothing."""
    if product_beside(kernel.name):
        return False
    if weighted(kernel):
        return not kernel.first_reader
    gated = any(other.name == "gate" for other in kernels)
    return kernel.kind == "gemm" and (kernel.name in {"k", "v"} or (gated and kernel.name == "up"))


def _captured(name: str, kernel: str, graphs: tuple[str, ...]) -> bool:
    """Whether a graph has a kernel of a work, or an exchange (no kernel). A work's name joins those of its sections.

    Megatron-LM core/transformer/transformer_layer.py, ``_get_submodules_under_cudagraphs``, and moe/moe_layer.py:
    ``moe_router`` has the norm, the router and shared experts, ``moe_preprocess`` what is ahead of the exchange;
    DeepEP's layout is asked for in the exchange itself. What comes behind it is in ``moe`` alone.
    """
    sections = frozenset(re.split(r"[+ ]", name))
    if sections & OUTSIDE:
        return False
    if "mamba" in sections:
        return "mamba" in graphs
    if sections & {"attention", "block"} and not (kernel in FEED_FORWARD or kernel.startswith(EXPERT_KERNELS)):
        return "attn" in graphs
    if not sections & ROUTED:
        return "mlp" in graphs
    if "moe" in graphs:
        return True
    ahead = {"token_indices", "read_counts"} | ({"dispatch"} if "permute" in sections else set())
    if kernel in ahead or name == "tokens per expert":
        return "moe_preprocess" in graphs
    return "moe_router" in graphs and (kernel in {"norm_2", "router", "top_k"} or kernel.startswith("shared_"))


def host_level(framework: str, implementation: str | None, *, scales: str = "") -> HostLaw:
    """The law of a stack on Sapphire Rapids, its launches at the device's usual cost left out: of a framework's
    implementation, of the framework, or the prior of those that nobody has measured. ``scales`` : of :data:`BY_EXPERT`,
    where linears run in 8 bits or fewer."""
    table = data_table("host")
    names = (f"{framework}/{implementation}", framework, "unknown")
    name = next(name for name in names if name in table)
    level = table[name]
    joined = bool(level.get("joined"))
    by_expert = BY_EXPERT[scales] if level.get("each_expert") else 0
    return HostLaw(
        parse_time(level["call"]), 0.0, joined, str(level["source"]), known=name != "unknown", by_expert=by_expert
    )
