"""What a layer keeps for backward, and what backward computes again.

Megatron-LM transformer/transformer_config.py and transformer_block.py for ``full`` and for ``selective`` with its
modules; torchtitan's per-operator policy for ``selective_op``. A forward that is repeated repeats its exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from clustersim.core.model import HALF, Kernel, Layer
from clustersim.model.kernels import saved_by_operator
from clustersim.training.partition.base import Item, StashedElements, Work
from clustersim.training.partition.context import GatheredAttention, RingAttention, Stepwise, SwappedHeads
from clustersim.training.partition.dispatch import is_expert, read_counts
from clustersim.training.partition.nodes import (
    Kernels,
    LayerNode,
    LocalKernels,
    NodeListing,
    Nodes,
    NodeSequence,
    forward_items,
    has_weights,
    makes_both,
)
from clustersim.training.partition.share import LayerShares, local_kernel, rows
from clustersim.training.partition.tensor import PARTED, ColumnLinears

ATTENTION_CORE = frozenset(
    {"attention", "scores", "scale", "mask", "clamp", "softmax", "dropout", "context", "head_copies"}
)
"""Kernels between the rotated queries, keys and values and the output projection (``core_attn``)."""


def module_of(kernel: Kernel, section: str) -> str:
    """Which of ``recompute_modules`` a block's kernel belongs to; empty for none.

    ``layernorm`` is none of them: it drops outputs, not what is inside.
    """
    if section == "attention" and kernel.name in ATTENTION_CORE:
        return "core_attn"
    if section == "moe" and is_expert(kernel):
        return "moe"
    if section == "attention" and (
        kernel.name in {"q_up", "kv_up", "join_heads"} or (kernel.name == "rotary" and kernel.n)
    ):
        return "mla_up_proj"
    if section == "mlp" and kernel.cut in {"column", "heads", "row"}:
        return "mlp"
    return ""


def held(nodes: Nodes, share: LayerShares) -> StashedElements:
    """What nodes keep. The loss: see :meth:`LayerShares.loss_elements`."""
    total = StashedElements()
    for node in nodes:
        if isinstance(node, CheckpointedNodes):
            inside = held(node.nodes, share)
            # The input is among what the nodes keep.
            total += replace(inside.dropped(node.keeps), repeated=inside.whole - node.keeps + node.brings)
        elif isinstance(node, RebuiltNorm):
            total += StashedElements(repeated=node.brings)
        else:
            total += sum((_of_kernel(kernel, share) for kernel in node.kernels), StashedElements())
    return total


def most_gradients(kernels: Kernels, between: float) -> float:
    """Elements per sample of gradients at the fullest moment of a layer's backward, beside what its forward has kept
    and less what backward has given back of that.

    Backward goes from the last kernel to the first. Its gradients have the shapes of what the kernel reads and writes,
    which is what one launch moves in forward where it does not say more; the gradient of what layers hand on
    (``between``) is beside them. The loss says what it holds in fp32.
    """
    most = given_back = 0.0
    for kernel in reversed(kernels):
        if (kernel.cut == "vocab" and not has_weights(kernel)) or not kernel.halves:
            continue
        gradients = kernel.working[HALF] / 2.0 or kernel.nbytes / max(1, kernel.launches)
        most = max(most, gradients + between - given_back)
        given_back += kernel.saved
    return most


def _of_kernel(kernel: Kernel, share: LayerShares) -> StashedElements:
    if has_weights(kernel) and kernel.n and kernel.k:
        return StashedElements(kept_for_weights=kernel.saved, stashed=rows(kernel) * kernel.n * makes_both(kernel))
    if kernel.cut == "vocab":
        return share.loss_elements(kernel)
    return StashedElements(kept=kernel.saved)


@dataclass(frozen=True)
class CheckpointedNodes(NodeSequence):
    """Nodes behind a checkpoint: ``keeps`` elements per sample are kept, and backward begins with their forward.

    ``brings`` : elements per sample of their outputs that nobody else keeps.
    """

    keeps: float
    brings: float = 0.0

    def backward(self, out: NodeListing) -> None:
        """Forward again, then backward."""
        self.forward(out, "R")
        super().backward(out)


class RebuiltNorm(msgspec.Struct, frozen=True):
    """A norm's output, dropped behind the linears that read it and rebuilt before their backward.

    ``brings`` : its elements per sample. ``awaited`` : what the host waits for behind it, if for anything. Experts'
    activation and the clamps ahead of it are dropped and rebuilt so, too (``moe_act``).
    """

    name: str
    norm: Kernel
    brings: float
    kernels: Kernels = ()
    awaited: str = ""

    def forward(self, out: NodeListing, part: str) -> None:
        """Nothing: the norm itself is another node."""

    def backward(self, out: NodeListing) -> None:
        """The norm's forward once more."""
        out.work(self.name, (self.norm,), "R")
        if self.awaited:
            read_counts(out, "R", self.awaited)


def checkpointed(nodes: Nodes) -> Nodes:
    """One checkpoint around nodes; kept is what the first kernel that keeps anything keeps: the input."""
    saved = (kernel.saved for kernel in NodeSequence(nodes).kernels if kernel.saved)
    return (CheckpointedNodes(nodes, next(saved, 0.0)),)


def without_inputs(nodes: Nodes) -> Nodes:
    """A checkpoint of up-projections whose output attention does not keep either, and that attention.

    Megatron-LM core/transformer/multi_latent_attention.py: ``mla_up_proj`` drops queries, keys and values behind
    attention, and projects them again before its backward.
    """
    nodes_out: list[LayerNode] = []
    for node in nodes:
        ahead = nodes_out[-1] if nodes_out else None
        if (
            isinstance(ahead, CheckpointedNodes)
            and isinstance(node, LocalKernels)
            and node.kernels[0].kind == "attention"
        ):
            # What it puts out is the output projection's to keep.
            nodes_out[-1] = replace(ahead, brings=node.kernels[0].saved)
            node = replace(node, kernels=(replace(node.kernels[0], saved=0.0), *node.kernels[1:]))
        nodes_out.append(node)
    return tuple(nodes_out)


def input_dropped(kernel: Kernel) -> Kernel:
    """A kernel whose input is made again for its backward."""
    return replace(kernel, saved=0.0, rebuilt=kernel.first_reader)


def rebuilding(node: LayerNode, norm: Kernel) -> Nodes:
    """Linears behind a norm whose output they do not keep, and what rebuilds it."""
    if not isinstance(node, ColumnLinears | LocalKernels):
        return (node,)
    brings = sum(kernel.saved for kernel in node.kernels)
    return (
        replace(node, kernels=tuple(map(input_dropped, node.kernels))),
        RebuiltNorm("norm", norm, brings),
    )


def every_second(kernels: Kernels) -> frozenset[str]:
    """Names of kernels whose output torchtitan's policy keeps."""
    return frozenset(kernels[i].name for i in saved_by_operator(kernels))


def repeated_operators(nodes: Nodes, names: frozenset[str]) -> tuple[tuple[Item, ...], tuple[int, ...]]:
    """The repeated forward under that policy: all but the named kernels, and but for reduce_scatters, which it saves,
    with what comes just before them.

    torchtitan distributed/activation_checkpoint.py ``_op_sac_save_list``. An attention over context-parallel ranks is
    one operator there, with what it sends of keys and values inside it: what saves its output repeats neither.
    """
    items, waiting = forward_items(tuple(without_attention(node) for node in nodes), "R")
    place: dict[int, int] = {}
    left: list[Item] = []
    for i, item in enumerate(items):
        needs = tuple(place[n] for n in item.needs if n in place)
        if isinstance(item, Work):
            kernels = tuple(kernel for kernel in item.kernels if kernel.name not in names | {PARTED})
            if not kernels:
                continue
            left.append(Work(item.name, kernels, item.part, needs))
        elif item.kind == "reduce_scatter":
            continue
        else:
            left.append(msgspec.structs.replace(item, needs=needs))
        place[i] = len(left) - 1
    return tuple(left), tuple(place[i] for i in waiting if i in place)


def without_attention(node: LayerNode) -> LayerNode:
    """The node, with nothing where it attends over context-parallel ranks; heads are still swapped for tokens around
    it, as their products' backward needs."""
    if isinstance(node, SwappedHeads):
        return msgspec.structs.replace(node, inside=without_attention(node.inside))
    return NodeSequence(()) if isinstance(node, RingAttention | GatheredAttention | Stepwise) else node


def kept_outputs(layer: Layer, share: LayerShares) -> float:
    """Elements per sample of the outputs that :func:`every_second` keeps.

    The sum behind a product cut by rows is kept as it is scattered: 1/t of it with sequence parallelism.
    """
    names = every_second(layer.kernels)
    total = 0.0
    for kernel in (local_kernel(kernel, share) for kernel in layer.kernels if kernel.name in names):
        if kernel.kind == "attention":
            total += kernel.heads * kernel.head_dim * kernel.seq / share.cp
        elif kernel.batch:
            total += kernel.n * kernel.m * kernel.batch
        else:
            total += kernel.n * rows(kernel) / (share.tokens / share.cp if kernel.cut == "row" else 1)
    return total
