"""A layer's kernels, cut for one rank and parted at its exchanges: nodes."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import msgspec

from clustersim.core.errors import ScenarioError
from clustersim.core.model import Kernel, Layer, product_beside
from clustersim.training.parallel import ParallelConfig
from clustersim.training.partition.adapters import AdaptedLinears, adapted, parted
from clustersim.training.partition.context import attention_node, coming_home_beside
from clustersim.training.partition.dispatch import ExpertSpread, is_expert
from clustersim.training.partition.expert import expert_nodes, mixture_of, spread_of
from clustersim.training.partition.kept import kept_in_8_bits
from clustersim.training.partition.nodes import (
    CrossEntropy,
    GradientSums,
    Kernels,
    LayerNode,
    LayoutChange,
    LocalKernels,
    Nodes,
    has_weights,
)
from clustersim.training.partition.recompute import checkpointed, module_of, rebuilding, without_inputs
from clustersim.training.partition.share import LayerShares, local_kernel, rows
from clustersim.training.partition.tensor import ColumnLinears, ExchangeStyle, RowLinears


class Cutter(msgspec.Struct, frozen=True):
    """What decides a layer's nodes beside its kernels.

    ``between`` : elements per sample of what layers hand on to each other.
    """

    share: LayerShares
    parallel: ParallelConfig
    manner: ExchangeStyle
    between: float = 0.0
    nproc_per_node: int = 0
    histograms: tuple[tuple[float, ...], ...] = ()

    def spread(self, layer: Layer, block: int) -> ExpertSpread | None:
        """How a layer's experts are spread; None for a dense layer or where every rank has all of them.

        Of a histogram with several rows each block has its own, or the last one.
        """
        mixture = mixture_of(layer.kernels)
        if mixture is None or (self.share.whole and self.parallel.ep == 1 and (self.parallel.etp or 1) == 1):
            return None
        histogram = self.histograms[min(block, len(self.histograms) - 1)] if self.histograms else ()
        return spread_of(mixture, self.share, self.parallel, self.nproc_per_node, histogram)

    def nodes(self, layer: Layer, block: int, modules: tuple[str, ...] = ()) -> Nodes:
        """Nodes of a layer.

        block : its number among the blocks, for lists with an entry per layer. modules : ``recompute_modules`` that are
            recomputed in it.

        Raises as :func:`~clustersim.training.partition.share.local_kernel` and
        :func:`~clustersim.training.partition.context.attention_node` do.
        """
        if (own := self.share.of(layer)) is not self.share:
            return msgspec.structs.replace(self, share=own).nodes(layer, block, modules)
        if self.parallel.float8_activations and layer.kind in {"block", "mtp"}:
            layer = replace(layer, kernels=tuple(map(kept_in_8_bits, layer.kernels)))
        if self.share.whole and self.parallel.ep == 1 and not modules:
            return (LocalKernels(layer.kind, layer.kernels),)
        plain, beside = parted(layer.kernels)
        layer = replace(layer, kernels=plain)
        sums = tuple(local_kernel(k, self.share) for k in layer.kernels if _only_backward(k))
        making = _LayerNodes(self, layer, block, modules, self.spread(layer, block), beside, sums)
        nodes_out: list[LayerNode] = []
        for name, kernels in sections(layer):
            for module, pairs in groupby(_groups(name, kernels), lambda pair: pair[0]):
                nodes = tuple(node for _, group in pairs for node in making.of_group(name, module, group))
                nodes_out += checkpointed(nodes) if module and module in modules else nodes
        making.refuse_left()
        if self.parallel.sp_overlap_comm:
            nodes_out = list(coming_home_beside(tuple(nodes_out)))
        return without_inputs(tuple(nodes_out)) if "mla_up_proj" in modules else tuple(nodes_out)

    def of_all_tokens(self, nodes: Nodes, *, ahead: bool) -> Nodes:
        """What every rank computes from all tokens: ``ahead`` of the blocks, which take their own of them, so that
        backward gathers the gradients (Megatron-LM's scatter_to_sequence_parallel_region); or behind them."""
        elements = self.between / self.share.cp
        tp = ("tp",)
        if ahead:
            return (*nodes, LayoutChange("tokens", ("", "all_gather"), tp, elements))
        return (LayoutChange("tokens", ("all_gather", ""), tp, elements), *nodes)

    def node(self, name: str, group: Kernels, block: int) -> Nodes:
        """Nodes of neighbouring kernels that are cut alike."""
        share = self.share
        first = group[0]
        local = tuple(local_kernel(kernel, share) for kernel in group)
        if is_expert(first):
            return (LocalKernels(name, local),)
        if share.cp > 1 and any(_is_attention(kernel) for kernel in group):
            return (attention_node(name, local[-1], share, self.parallel, block),)
        if share.tp == 1:
            return (LocalKernels(name, local),)
        if first.cut in {"column", "vocab"} and has_weights(first):
            # The head is no layer of Transformer Engine, whose overlap it has not.
            manner = self.manner
            if first.cut == "vocab":  # nor is it made 8-bit
                manner = replace(manner, gathered=None, overlap=manner.overlap.replace("userbuffers", "none"))
            columns = ColumnLinears(name, local, rows(first) / share.cp * first.k, manner)
            return (columns, *self._widened(name, group))
        if first.name == "rotary" and first.n and share.sequence_parallel:
            # Latent attention: the part of the keys that all heads share comes from a rank's own tokens.
            keys = LayoutChange("rotary keys", ("all_gather", "reduce_scatter"), ("tp",), first.n * first.k / share.cp)
            return (keys, LocalKernels(name, local))
        if first.cut == "vocab":
            # The kernel keeps two tensors of logits; Megatron-LM's keeps the softmax's fp32 shard alone.
            return (CrossEntropy(name, (local[0],), local[0].saved / 2 * share.tp / share.padded),)
        if first.cut == "row":
            # A lookup reads and writes every element of its output.
            output = rows(first) * first.n if has_weights(first) else first.nbytes / 2
            return (RowLinears(name, (local[0],), output / share.cp, self.manner),)
        return (LocalKernels(name, local),)

    def _widened(self, name: str, group: Kernels) -> Nodes:
        """Fewer key-value heads than ranks: qkv's whole output is gathered, and a rank takes what its heads need.

        Megatron-LM core/transformer/attention.py: the weight is cut t ways all the same.
        """
        share = self.share
        qkv = {"q", "k", "v", "qkv"} & {kernel.name for kernel in group}
        if not qkv or share.kv_heads % share.tp == 0:
            return ()
        elements = sum(rows(kernel) * kernel.n for kernel in group) / share.cp
        return (LayoutChange(f"{name} heads", ("all_gather", "reduce_scatter"), ("tp",), elements),)


class _LayerNodes(msgspec.Struct):
    """Nodes of one layer in the making.

    layer : without kernels of adapters. modules : that are recomputed. spread : of its experts, where they are spread.
    beside : kernels of adapters that no node has yet, by the id of the product that they stand beside.
    sums : of gradients that forward knows nothing of, until a node has them: the first linears, whose input gradients
        they are. norm : the last one, until the node that reads it makes it again.
    """

    cutter: Cutter
    layer: Layer
    block: int
    modules: tuple[str, ...]
    spread: ExpertSpread | None
    beside: dict[int, Kernels]
    sums: Kernels
    norm: Kernel | None = None

    def of_group(self, name: str, module: str, group: Kernels) -> Nodes:
        """Nodes of neighbouring kernels that are cut alike, of a ``module`` in the section ``name``."""
        share = self.cutter.share
        nodes = self._of_kernels(name, group)
        if added := tuple(k for kernel in group for k in self.beside.pop(id(kernel), ())):
            nodes = adapted(nodes, added, share)
        if share.sequence_parallel and group[0].cut == "whole":
            nodes = self.cutter.of_all_tokens(nodes, ahead=self.layer.kind == "embedding")
        if self.norm and has_weights(group[0]) and "layernorm" in self.modules and module not in self.modules:
            nodes = (*rebuilding(nodes[0], self.norm), *nodes[1:])
            self.norm = None
        if self.sums and (isinstance(nodes[0], ColumnLinears | AdaptedLinears) or share.tp == 1):
            nodes = (*nodes, GradientSums(name, self.sums))
            self.sums = ()
        self.norm = next((k for n in nodes for k in n.kernels if k.name in {"norm_1", "norm_2"}), self.norm)
        return nodes

    def _of_kernels(self, name: str, group: Kernels) -> Nodes:
        cutter = self.cutter
        if self.spread and is_expert(group[0]):
            return expert_nodes(group, cutter.share, cutter.parallel, cutter.manner, self.spread, self.modules)
        return cutter.node(name, group, self.block)

    def refuse_left(self) -> None:
        """Raises :class:`ScenarioError` for an adapter that no node has."""
        if not self.beside:
            return
        product = product_beside(next(iter(self.beside.values()))[0].name)
        raise ScenarioError(
            f"an adapter beside {product!r} of a mixture of experts is not played where [parallel] splits the "
            "model; take it out of target_modules (at $.model.adapter.target_modules)"
        )


def _only_backward(kernel: Kernel) -> bool:
    return not kernel.launches and not kernel.nbytes and not kernel.flops


def _is_attention(kernel: Kernel) -> bool:
    return kernel.kind == "attention" or kernel.name == "scores"


def sections(layer: Layer) -> list[tuple[str, Kernels]]:
    """Kernels up to and with each one cut by rows, with a name: attention, mamba, mlp, moe, embedding, head.

    What follows the last one belongs to it. Kernels of backward alone are in none.
    """
    kernels = tuple(kernel for kernel in layer.kernels if not _only_backward(kernel))
    ends = [i + 1 for i, kernel in enumerate(kernels) if kernel.cut == "row" and not is_expert(kernel)]
    # Behind which kernel no product is cut by rows any more, counting a mixture of experts as one.
    if ends and ends[-1] == max(i + 1 for i, kernel in enumerate(kernels) if kernel.cut in {"row", "expert_row"}):
        ends.pop()
    parts = [kernels[start:stop] for start, stop in zip([0, *ends], [*ends, len(kernels)], strict=True)]
    return [(_name(part, layer.kind), part) for part in parts if part]


def _name(kernels: Kernels, kind: str) -> str:
    names = {kernel.name for kernel in kernels}
    if any(_is_attention(kernel) for kernel in kernels):
        return "attention"
    if "mamba_in" in names:
        return "mamba"
    if any(kernel.cut.startswith("expert") for kernel in kernels):
        return "moe"
    if "gather" in names:
        return "embedding"
    if "logits" in names:
        return "head"
    return "mlp" if kind == "block" else kind


def _groups(name: str, kernels: Kernels) -> list[tuple[str, Kernels]]:
    """Neighbours that one node takes, with their module: linears on one input, attention's core alone, the rest."""

    def key(item: tuple[int, Kernel]) -> tuple[object, ...]:
        """What neighbours of one node share."""
        i, kernel = item
        module = module_of(kernel, name)
        if is_expert(kernel):
            return (module, "expert")
        if kernel.cut in {"column", "vocab"} and has_weights(kernel):
            return (module, kernel.cut, kernel.k)
        if kernel.cut in {"row", "vocab"} or kernel.kind == "attention":
            return (module, i)
        return (module, "whole" if kernel.cut == "whole" else "")

    return [(str(keys[0]), tuple(kernel for _, kernel in group)) for keys, group in groupby(enumerate(kernels), key)]
