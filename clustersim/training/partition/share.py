"""One rank's share of kernels and tensors: global shapes to local ones, by their cut."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import msgspec

from clustersim.core.errors import ScenarioError
from clustersim.core.model import Kernel, Layer, Model, Tensor
from clustersim.model.kernels import EAGER_LOSS, FUSED_LOSS
from clustersim.training.parallel import ParallelConfig, padded_vocab
from clustersim.training.partition.base import StashedElements
from clustersim.training.partition.nodes import ARITHMETIC, TRAFFIC, scaled

_WITH_KEYS = frozenset({"rotary", "qk_norm", "repeat_kv"})
"""Kernels over queries and keys, of which a rank always has a whole head."""


class LayerShares(msgspec.Struct, frozen=True):
    """The degrees that divide a layer, and the sizes that do not divide evenly.

    Parameters
    ----------
    tp, cp : degrees. sequence_parallel : whether ``sequence`` cuts have 1/tp of the tokens.
    gathers_again : whether a gathered input is dropped (:class:`clustersim.training.partition.tensor.ExchangeStyle`).
    vocab, padded : rows of the embedding as the model has it, and as the ranks hold it together.
    heads, kv_heads, head_dim : of the model's attention.
    """

    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    vocab: int = 0
    padded: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    gathers_again: bool = True

    def of(self, layer: Layer) -> LayerShares:
        """The share of a layer, whose attention may have other heads than the model's."""
        heads, kv_heads = layer.heads or self.heads, layer.kv_heads or self.kv_heads
        if (heads, kv_heads) == (self.heads, self.kv_heads):
            return self
        return msgspec.structs.replace(self, heads=heads, kv_heads=kv_heads)

    def loss_elements(self, loss: Kernel) -> StashedElements:
        """What a loss of the local logits keeps. A vocabulary that is cut has Megatron-LM's own loss, with its fp32
        softmax in place of the logits, or torchtitan's ``loss_parallel``, with what PyTorch's keeps op by op: its
        log-softmax and two gradients in fp32. One that is whole has what the model's kernel is: of one kernel, as
        torch.compile makes it, the logits and their gradient."""
        logits = loss.saved / 2
        if self.tp > 1:
            return StashedElements(fp32_kept=logits * (1 if self.gathers_again else EAGER_LOSS / 4))
        if loss.n == FUSED_LOSS and loss.kept is None:
            return StashedElements(fused_loss_kept=loss.saved)
        return StashedElements(fp32_kept=logits * loss.n / 4)

    @property
    def tokens(self) -> int:
        """By how much the tokens between tensor-parallel parts are divided."""
        return self.cp * (self.tp if self.sequence_parallel else 1)

    @property
    def inputs(self) -> int:
        """By how much the tokens of a column cut's kept input are divided."""
        return self.tokens if self.gathers_again else self.cp

    @property
    def local_kv_heads(self) -> int:
        """Key-value heads of a rank: at least one, though its weights are a part of one (Megatron-LM attention.py)."""
        return max(1, self.kv_heads // self.tp)

    @property
    def whole(self) -> bool:
        """Whether a rank computes all of every layer."""
        return self.tp == self.cp == 1


def share_of(model: Model, parallel: ParallelConfig) -> LayerShares:
    """The share of a rank. The vocabulary is padded where tensor parallelism cuts it."""
    padded = padded_vocab(model.vocab, parallel.make_vocab_size_divisible_by, parallel.tp)
    return LayerShares(
        parallel.tp,
        parallel.cp,
        parallel.sequence_parallel,
        model.vocab,
        padded if parallel.tp > 1 else model.vocab,
        model.heads,
        model.kv_heads,
        model.head_dim,
        parallel.framework != "torchtitan",
    )


def local_kernel(kernel: Kernel, share: LayerShares) -> Kernel:
    """A kernel as one rank runs it; those of routed experts are :mod:`clustersim.training.partition.expert`'s.

    Raises :class:`ScenarioError` where the tensor-parallel degree does not divide it.
    """
    if share.whole or kernel.cut.startswith("expert"):
        return kernel
    local = _cut_kernel(kernel, share)
    if not any(kernel.working) or not kernel.nbytes:
        return local
    part = local.nbytes / kernel.nbytes
    half, autocast, full = (nbytes * part for nbytes in kernel.working)
    return replace(local, working=(half, autocast, full))


def _cut_kernel(kernel: Kernel, share: LayerShares) -> Kernel:
    t = share.tp
    c = share.cp
    if kernel.kind == "gemm" and not kernel.batch:
        return _product(kernel, share)
    if kernel.cut == "column":
        return _bias_gradients(kernel, share)
    if kernel.cut == "heads":
        return _of_heads(kernel, share)
    if kernel.cut == "vocab":
        return scaled(kernel, share.padded / share.vocab / (t * c))
    return scaled(kernel, 1 / (share.tokens if kernel.cut == "sequence" else c))


def rows(kernel: Kernel) -> float:
    """Rows per sample of a product with weights; of a repeated one, of all together."""
    return kernel.flops / (2.0 * kernel.n * kernel.k)


def _product(kernel: Kernel, share: LayerShares) -> Kernel:
    """A product with weights. Its input is whole (or a token shard) for a column cut and 1/t for a row cut."""
    t = share.tp
    divided = share.tokens if kernel.cut == "sequence" else share.cp
    n = kernel.n
    k = kernel.k
    inputs_kept = divided
    if kernel.cut == "column":
        n = _divided(kernel, "n", t)
        inputs_kept = share.inputs
    elif kernel.cut == "vocab":
        n = share.padded // t
        inputs_kept = share.inputs
    elif kernel.cut == "row":
        k = _divided(kernel, "k", t)
        inputs_kept = t * share.cp
    local = rows(kernel) / divided
    flops = 2.0 * local * n * k
    moved = local * (n + k)
    return replace(
        kernel,
        m=ceil(kernel.m / divided),
        n=n,
        k=k,
        flops=flops,
        backward_flops=flops * (kernel.backward_flops / kernel.flops),
        nbytes=moved,
        backward_nbytes=moved * (kernel.backward_nbytes / kernel.nbytes),
        saved=kernel.saved / inputs_kept,
    )


def _divided(kernel: Kernel, side: str, t: int) -> int:
    size = int(getattr(kernel, side))
    if size % t:
        raise ScenarioError(f"tp = {t} does not divide the {size:,} columns of {kernel.name!r} (at $.parallel.tp)")
    return size // t


def _bias_gradients(kernel: Kernel, share: LayerShares) -> Kernel:
    """Sums over tokens for ``n`` biases that are cut and ``k`` that are whole (``models.kernels.bias_gradients``)."""
    tokens = kernel.backward_nbytes / (kernel.n + kernel.k)
    moved = tokens / share.cp * kernel.n / share.tp + tokens / share.tokens * kernel.k
    return replace(kernel, n=kernel.n // share.tp, backward_nbytes=moved)


def _of_heads(kernel: Kernel, share: LayerShares) -> Kernel:
    """Everything between a column and a row cut. With fewer key-value heads than ranks each rank has one of them."""
    t = share.tp
    c = share.cp
    h = share.heads
    kv = share.kv_heads
    part = saved = 1 / (t * c)
    traffic = part
    if kv % t:
        with_keys = (h / t + share.local_kv_heads) / (h + kv) / c
        saved = (h / t + 2 * share.local_kv_heads) / (h + 2 * kv) / c
        traffic = with_keys if kernel.kind == "attention" or kernel.name in _WITH_KEYS else part
    keeps = saved if kernel.kind == "attention" or kernel.name == "scores" else part
    local = scaled(kernel, traffic, TRAFFIC, saved=kernel.saved * keeps)
    return scaled(local, part, ARITHMETIC, heads=kernel.heads // t, batch=kernel.batch // t)


def local_tensor(tensor: Tensor, share: LayerShares) -> Tensor:
    """A parameter tensor as one rank holds it; those of routed experts are
    :mod:`clustersim.training.partition.expert`'s."""
    if share.tp == 1 or tensor.cut in {"whole", "sequence"} or tensor.cut.startswith("expert"):
        return tensor
    numel = tensor.numel
    if tensor.cut == "vocab":
        numel = numel // share.vocab * share.padded
    if numel % share.tp:
        raise ScenarioError(f"tp = {share.tp} does not divide {numel:,} elements of {tensor.name} (at $.parallel.tp)")
    # A cut by rows of the product is one of the weight's columns.
    width = tensor.width // share.tp if tensor.cut == "row" and tensor.width % share.tp == 0 else tensor.width
    return replace(tensor, numel=numel // share.tp, width=width)
