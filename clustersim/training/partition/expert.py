"""Routed and shared experts on one rank: how their products are cut, for expert and expert-tensor parallelism.

Every position of an expert-parallel group has E/ep experts, each cut over etp ranks like an MLP; tokens come to them
(:mod:`clustersim.training.partition.dispatch`). The router is whole on every rank, shared experts are cut over tp as a
dense MLP is. Megatron-LM core/transformer/moe/{moe_layer,experts,shared_experts}.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import gcd
from types import MappingProxyType

import msgspec

from clustersim.core.errors import ScenarioError
from clustersim.core.memo import kept_with_first
from clustersim.core.model import Kernel, Model, Tensor
from clustersim.model.seconds.kernels import CLAMP
from clustersim.training.parallel import ParallelConfig
from clustersim.training.partition.dispatch import (
    AHEAD_OF_EXPERTS,
    BEHIND_EXPERTS,
    BEHIND_SHARED,
    AllGather,
    AllToAll,
    Dispatcher,
    ExpertSpread,
    Mixture,
    TwoHops,
    read_counts,
)
from clustersim.training.partition.expert_activation import OFFSET, clamped, weighted_activation
from clustersim.training.partition.nodes import (
    TRAFFIC,
    Kernels,
    LayerNode,
    LocalKernels,
    NodeListing,
    Nodes,
    NodeSequence,
    scaled,
)
from clustersim.training.partition.recompute import RebuiltNorm, checkpointed, input_dropped
from clustersim.training.partition.routing import ExpertRouter, capacity, routed
from clustersim.training.partition.share import LayerShares, local_kernel, rows
from clustersim.training.partition.tensor import ColumnLinears, ExchangeStyle, RowLinears
from clustersim.training.partition.torch_dispatch import TorchAllToAll, of_all_tokens, summed

DISPATCHERS: Mapping[str, Callable[[ExpertSpread], Dispatcher]] = MappingProxyType(
    {"allgather": AllGather, "alltoall": AllToAll, "flex": TwoHops, "torchtitan": TorchAllToAll}
)
"""``dispatcher`` of a scenario's ``[parallel]``, of which torchtitan has an ``alltoall`` of its own."""

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
"""Whose a tensor is, by its name."""


def mixture_of(kernels: Kernels) -> Mixture | None:
    """Sizes of a layer's mixture of experts, read off its kernels; None for a dense layer."""
    named = {kernel.name: kernel for kernel in kernels}
    if "expert_up" not in named:
        return None
    router = named["router"]
    up = named["expert_up"]
    choice = named["top_k"]
    return Mixture(router.m, router.k, up.k, router.n, round(rows(up) / router.m), choice.n, choice.k)


def reach_of(parallel: ParallelConfig, nproc_per_node: int, nproc_per_domain: int) -> int:
    """Ranks that one hop of ``flex`` reaches over NVLink; 0 where all are on one node.

    HybridEP's is the whole NVLink domain (deepseek-ai/DeepEP branch hybrid-ep, ``NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_
    DOMAIN``); DeepEP's normal kernels know nodes alone.
    """
    return max(nproc_per_node, nproc_per_domain) if parallel.flex_backend == "hybridep" else nproc_per_node


def spread_of(
    mixture: Mixture,
    share: LayerShares,
    parallel: ParallelConfig,
    nproc_per_node: int = 0,
    histogram: tuple[float, ...] = (),
) -> ExpertSpread:
    """How a layer's experts are spread.

    Parameters
    ----------
    nproc_per_node : ranks of a node, 0 where all are on one. histogram : loads of this layer's experts, for routing of
        that kind.

    Raises
    ------
    ScenarioError : for tensor parallelism without sequence parallelism, where ranks would route the same tokens; and
        for ``flex`` with cut experts.
    """
    etp = parallel.etp or parallel.tp
    ep = parallel.ep
    if share.tp > 1 and not share.sequence_parallel:
        raise ScenarioError(
            f"a mixture of experts with tp = {share.tp} needs sequence_parallel = true, which is false "
            "(at $.parallel.sequence_parallel)"
        )
    if parallel.dispatcher == "flex" and etp > 1:
        raise ScenarioError(f"dispatcher = 'flex' is described for etp = 1, which is {etp} (at $.parallel.etp)")
    own = of_torchtitan(parallel)
    divided = share.cp if own and etp > 1 else share.tokens
    router = router_of(mixture, parallel, mixture.tokens / divided, histogram)
    per_node = max(1, nproc_per_node // etp) if nproc_per_node else ep
    return ExpertSpread(
        mixture=mixture,
        ep=ep,
        etp=etp,
        tokens=router.tokens,
        routed=routed(router),
        per_node=ep if per_node >= ep else gcd(ep, per_node),
        kind="torchtitan" if own else parallel.dispatcher,
        backend=parallel.flex_backend,
        counted=not parallel.pad_to_capacity,
        sms=parallel.deepep_num_sms,
        float8=parallel.float8_dispatch,
        fused=parallel.permute_fusion,
        varying=router.capacity > 0 or parallel.router_padding,
        masked=parallel.framework == "megatron" and not parallel.permute_fusion,
        alike=own,
    )


def of_torchtitan(parallel: ParallelConfig) -> bool:
    """Whether tokens travel as torchtitan's own code has them: what fuses a permutation is another's."""
    return parallel.framework == "torchtitan" and parallel.dispatcher == "alltoall" and not parallel.permute_fusion


def router_of(
    mixture: Mixture, parallel: ParallelConfig, tokens: float, histogram: tuple[float, ...] = ()
) -> ExpertRouter:
    """What decides which tokens a layer's experts get, of so many ``tokens`` of one position and one sample."""
    most = 0
    if parallel.capacity_factor is not None:
        factor = parallel.capacity_factor
        most = capacity(tokens, mixture.experts, mixture.per_token, factor, parallel.min_capacity)
    return ExpertRouter(
        routing=parallel.routing,
        experts=mixture.experts,
        per_token=mixture.per_token,
        ep=parallel.ep,
        tokens=tokens,
        capacity=most,
        padded=parallel.pad_to_capacity,
        drops=parallel.drop_tokens,
        histogram=histogram,
    )


def expert_nodes(
    kernels: Kernels,
    share: LayerShares,
    parallel: ParallelConfig,
    manner: ExchangeStyle,
    spread: ExpertSpread,
    modules: tuple[str, ...],
) -> Nodes:
    """Nodes of a layer's mixture of experts, from its router to the sum with shared experts.

    ``modules`` : ``recompute_modules`` of it but ``moe``, which is a checkpoint around these nodes.
    """
    together = of_torchtitan(parallel) and share.tp > 1
    seen = msgspec.structs.replace(share, sequence_parallel=False) if together else share
    first, behind = (
        tuple(local_kernel(k, seen) for k in kernels if k.name in names) for names in (AHEAD_OF_EXPERTS, BEHIND_EXPERTS)
    )
    if parallel.router_dtype == "fp32":
        first = (*(router_casts(kernel) for kernel in first if kernel.name == "router"), *first)
    inside = {k.name: _local(k, spread, share) for k in kernels if k.cut.startswith("expert")}
    permute = inside.pop("dispatch")
    unpermute = inside.pop("combine")
    # Sizes are of the mean position, and time is multiplied by each one's load; memory must be there for the most.
    busiest = max(spread.routed.load, default=1.0)
    inside = {name: scaled(kernel, busiest, ("saved",)) for name, kernel in inside.items()}
    shared = shared_nodes(
        tuple(k for k in kernels if k.name.startswith("shared_") or k.name in BEHIND_SHARED),
        seen,
        manner,
        None if together else spread.mixture,
    )
    beside = parallel.shared_expert_overlap and bool(shared)
    again: Nodes = ()
    if parallel.framework == "megatron":
        inside["expert_activation"] = weighted_activation(inside)
        if inside["expert_activation"].n:
            inside = clamped(inside)
    if "moe_act" in modules:
        down = inside["expert_down"]
        again = (RebuiltNorm("experts", inside["expert_activation"], down.saved),)
        if clamp := inside.get(CLAMP):
            again = (*again, RebuiltNorm("experts", clamp, inside["expert_activation"].saved, awaited=OFFSET))
            inside["expert_activation"] = replace(inside["expert_activation"], saved=0.0)
        inside["expert_down"] = input_dropped(down)
    if "shared_experts" in modules and shared and not beside:
        shared = checkpointed(shared)
    node = ExpertExchange(permute, tuple(inside.values()), unpermute, spread, shared if beside else ())
    back: Nodes = (LocalKernels("experts", behind),) if behind else ()
    nodes: Nodes = (LocalKernels("router", first), node, *again, *back, *(() if beside else shared))
    return of_all_tokens(nodes, spread.mixture.tokens / share.cp * spread.mixture.hidden, manner) if together else nodes


def router_casts(router: Kernel) -> Kernel:
    """What a router in fp32 moves beside its product: forward's writes fp32 scores from 16-bit operands; backward casts
    the input, reads it and writes its gradient in fp32, and casts that back (Megatron-LM core/transformer/moe/
    moe_utils.py, ``RouterGatingLinearFunction``)."""
    # 16-bit elements: the cast reads 1 and writes 2, the product of weights reads 1 more, that of inputs writes 1 more,
    # and the cast back reads 2 and writes 1.
    moved = 8.0 * rows(router) * router.k
    return Kernel("router_casts", "memory", backward_nbytes=moved, launches=0, backward_launches=2)


def _local(kernel: Kernel, spread: ExpertSpread, share: LayerShares) -> Kernel:
    """A kernel of routed experts as one rank runs it; products are grouped, one launch for all experts of the rank."""
    m = spread.mixture
    etp = spread.etp
    everywhere = m.tokens * m.per_token  # rows of the model per sample
    if kernel.name in {"dispatch", "combine"}:  # where tokens are, not where experts are
        kernel = scaled(kernel, spread.routed.rows / everywhere, (*TRAFFIC, "saved"), launches=1, backward_launches=1)
        if spread.kind == "torchtitan" and kernel.name == "combine":
            return summed(kernel, spread.routed.rows * m.row, everywhere / share.cp * m.row)
        moved = spread.permuted * m.row
        return replace(kernel, nbytes=moved, backward_nbytes=moved) if spread.fused else kernel
    local_tokens = spread.received / everywhere
    if kernel.kind != "gemm":
        loops = kernel.launches // m.experts or 1, kernel.backward_launches // m.experts or 1
        n_loops = m.experts // spread.ep if kernel.name == "expert_bias" else 1  # one expert after the other
        launches = {"launches": loops[0] * n_loops, "backward_launches": loops[1] * n_loops}
        return scaled(kernel, local_tokens / etp, (*TRAFFIC, "saved"), **launches)
    column = kernel.cut == "expert_column"
    n, k = (kernel.n // etp, kernel.k) if column else (kernel.n, kernel.k // etp)
    experts = m.experts // spread.ep
    flops = 2.0 * spread.received * n * k
    moved = spread.received * (n + k)
    return replace(
        kernel,
        m=max(1, round(spread.received / experts)),
        n=n,
        k=k,
        flops=flops,
        backward_flops=flops * (kernel.backward_flops / kernel.flops),
        nbytes=moved,
        backward_nbytes=moved * (kernel.backward_nbytes / kernel.nbytes),
        repeat=experts,
        launches=1,
        backward_launches=len(kernel.halves),
        saved=kernel.saved * local_tokens / (1 if column else etp),
    )


def shared_nodes(kernels: Kernels, share: LayerShares, manner: ExchangeStyle, mixture: Mixture | None) -> Nodes:
    """Shared experts, a dense MLP that tensor parallelism cuts: to the activation, then to the sum with the routed.

    ``mixture`` : None where the whole mixture's tokens are gathered, and its partial sums added, around them."""
    local = {k.name: local_kernel(k, share) for k in kernels}
    if not local:
        return ()
    up = tuple(k for name, k in local.items() if name in {"shared_gate", "shared_up"})
    activation = local["shared_activation"]
    down = local["shared_down"]
    rest = tuple(k for name, k in local.items() if name in BEHIND_SHARED)
    name = "shared experts"
    if mixture is None or share.tp == 1:
        return (LocalKernels(name, (*up, activation)), LocalKernels(name, (down, *rest)))
    elements = mixture.tokens / share.cp * mixture.hidden
    rows_node = RowLinears(name, (down,), elements, manner)
    return (
        ColumnLinears(name, up, elements, manner),
        LocalKernels(name, (activation,)),
        rows_node,
        LocalKernels(name, rest),
    )


class ExpertExchange(msgspec.Struct, frozen=True):
    """Tokens to their experts and back.

    Parameters
    ----------
    permute, unpermute : kernels where the tokens are. own : of the rank's experts. spread : how tokens travel.
    beside : shared experts that run while tokens travel: first half during dispatch, second during combine
        (Megatron-LM's ``moe_shared_expert_overlap``).
    """

    permute: Kernel
    own: Kernels
    unpermute: Kernel
    spread: ExpertSpread
    beside: Nodes = ()

    @property
    def kernels(self) -> Kernels:
        """All of them."""
        return (self.permute, *self.own, self.unpermute, *NodeSequence(self.beside).kernels)

    def _experts(self) -> Kernels:
        ahead, behind = DISPATCHERS[self.spread.kind](self.spread).sorting(self.permute, self.unpermute)
        return (*ahead, *self.own, *behind)

    def forward(self, out: NodeListing, part: str) -> None:
        """Dispatch, experts, combine; works of the middle are named ``experts`` for their load."""
        dispatcher = DISPATCHERS[self.spread.kind](self.spread)
        half = len(self.beside) // 2
        dispatcher.prepare(out, part)
        if dispatcher.by_sender:
            out.work("permute", (self.permute,), part)
        dispatcher.there(out, part)
        _meanwhile(out, self.beside[:half], lambda node: node.forward(out, part))
        kernels = self._experts()
        clamps = next((i for i, kernel in enumerate(kernels, 1) if kernel.name == CLAMP), 0)
        if clamps:
            out.work("experts", kernels[:clamps], part)
            read_counts(out, part, OFFSET)
        out.work("experts", kernels[clamps:], part)
        dispatcher.home(out, part)
        _meanwhile(out, self.beside[half:], lambda node: node.forward(out, part))
        if dispatcher.by_sender:
            out.work("unpermute", (self.unpermute,), part)

    def backward(self, out: NodeListing) -> None:
        """The mirror: gradients go to the experts as outputs came from them, and back as inputs came."""
        dispatcher = DISPATCHERS[self.spread.kind](self.spread)
        half = len(self.beside) // 2
        if dispatcher.by_sender:
            out.work("unpermute", (self.unpermute,), "I")
        dispatcher.gradient_there(out)
        _meanwhile(out, self.beside[half:][::-1], lambda node: node.backward(out))
        out.work("experts", self._experts(), "I")
        out.work("experts", self._experts(), "W")
        dispatcher.gradient_home(out)
        _meanwhile(out, self.beside[:half][::-1], lambda node: node.backward(out))
        if dispatcher.by_sender:
            out.work("permute", (self.permute,), "I")


def _meanwhile(out: NodeListing, nodes: Nodes, play: Callable[[LayerNode], None]) -> None:
    """Play nodes that do not wait for what is on its way; what follows waits for both."""
    if not nodes:
        return
    waiting, out.waiting = out.waiting, ()
    for node in nodes:
        play(node)
    out.waiting = (*waiting, *out.waiting)


@kept_with_first(maxsize=1024)
def expert_tensors(model: Model, index: int, ep: int, etp: int) -> tuple[Tensor, ...]:
    """A rank's tensors of a layer's routed experts: those of the first position, each cut over ``etp``.

    A tensor holds one expert (Mixtral, DeepSeek, Qwen) or all of a layer's (GPT-OSS). Partitions of a model that has
    tens of thousands of them, with other degrees beside these two, share what this gives.
    """
    numbered = _numbered(model, index)
    n_local = len({number for _, number in numbered if number is not None}) // ep
    local_tensors = []
    for tensor, number in numbered:
        if number is None or number < n_local:
            numel = tensor.numel if number is not None else tensor.numel // ep
            local_tensors.append(replace(tensor, numel=numel if tensor.cut == "expert" else numel // etp))
    return tuple(local_tensors)


@kept_with_first(maxsize=1024)
def _numbered(model: Model, index: int) -> tuple[tuple[Tensor, int | None], ...]:
    """A layer's tensors of routed experts, each with whose it is; None where it is all experts'."""
    experts = (tensor for tensor in model.layers[index].tensors if tensor.cut.startswith("expert"))
    return tuple((tensor, _number(tensor)) for tensor in experts)


@kept_with_first(maxsize=1024)
def other_tensors(model: Model, index: int) -> tuple[Tensor, ...]:
    """A layer's tensors that are no routed experts'."""
    return tuple(tensor for tensor in model.layers[index].tensors if not tensor.cut.startswith("expert"))


def _number(tensor: Tensor) -> int | None:
    """Which expert's it is; None where it is all experts'."""
    match = _EXPERT.search(tensor.name)
    return int(match.group(1)) if match else None
