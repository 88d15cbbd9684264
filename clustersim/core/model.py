"""What is trained: layers with parameter tensors, the kernels they launch, and what they keep for backward.

Sizes are per *sample* (one image, one sequence) so that a Model is built once and priced at any batch size. The device
model (:mod:`clustersim.model.seconds`) turns kernels into seconds; strategies cut the parameter tensors into buckets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.memo import Keeper
from clustersim.core.mix import Mix

CUTS = ("whole", "sequence", "column", "row", "heads", "vocab", "expert_column", "expert_row", "expert")
"""How tensor parallelism over t ranks divides a kernel or a tensor (Megatron-LM's ColumnParallelLinear and its kin).

``whole``: every rank has all of it. ``sequence``: all tokens on every rank, or 1/t of them under sequence parallelism
(norms, dropout, residual sums). ``column``: 1/t of the outputs (qkv, up and gate projections). ``row``: 1/t of the
inputs; outputs are partial sums (output and down projections, the lookup in an embedding table cut by rows).
``heads``: between a column and a row cut, everything 1/t (attention, rotation, activation). ``vocab``: 1/t of the
padded vocabulary (embedding table, logits, loss). Of a tensor, ``whole`` and ``sequence`` are held by every rank;
the gradient of a ``sequence`` one is partial where its rank sees only 1/t of the tokens.
``expert...``: of routed experts, divided over expert and expert-tensor parallel ranks; ``expert_column`` and
``expert_row`` are their products."""


ByteSizes: TypeAlias = tuple[float, float, float]
"""Bytes in 16 bits, under autocast (fp32 parameters, 16-bit products), and in fp32."""
HALF, AUTOCAST, FULL = range(3)
"""Places of :data:`ByteSizes`."""


@dataclass(frozen=True)
class Tensor:
    """A parameter (or buffer) tensor, in registration order.

    Parameters
    ----------
    name : str, as ``model.named_parameters()`` would print it.
    numel : int, elements.
    tied_to : name of the tensor it shares storage with, counted once (``lm_head.weight`` tied to the embedding).
    cut : how tensor parallelism divides it, one of :data:`CUTS`.
    width : int, elements of one row of its first dimension, which FSDP2 shards by; 1 for a vector.
    frozen : it is not trained: no gradient and no state of an optimizer.
    element : bytes of an element that is frozen, a part of one where it is quantised; of what is trained, the run's.
    """

    name: str
    numel: int
    tied_to: str = ""
    cut: str = "whole"
    width: int = 1
    frozen: bool = False
    element: float = 0.0

    @property
    def quantised(self) -> bool:
        """Whether it is kept in fewer bits than any product reads, and is written out before each."""
        return self.frozen and self.element < 1.0

    @property
    def rows(self) -> int:
        """Length of its first dimension."""
        return self.numel // self.width


@dataclass(frozen=True)
class Kernel:
    """One forward GPU kernel of a layer; backward kernels follow from it.

    Parameters
    ----------
    name : str, such as ``"qkv"``, ``"softmax"``.
    kind : ``"gemm"`` (tensor cores where the dtype has them), ``"conv"`` (an implicit GEMM), ``"attention"``
        (fused flash attention), ``"scan"`` (linear attention or a state space, chunk by chunk), ``"memory"``
        (bandwidth-bound), ``"recurrent"`` (a GEMM repeated step after step, whose weights' gradient is one GEMM) or
        ``"host"`` (``launches`` things the host does while the device waits for it).
    m, n, k : GEMM shape; ``m`` is *per sample* (rows grow with the batch). A conv gives its implicit GEMM. Of a scan,
        tokens of a chunk, and elements of a value's head and of a key's.
    batch : int, independent GEMMs *per sample* (heads, for eager attention scores); then ``m`` does not grow with the
        batch and ``batch`` does.
    flops : float, forward, per sample. backward_flops : per sample (2x for a GEMM, 2.5x for flash attention).
    nbytes : float, HBM bytes moved forward per sample per *element byte* (multiply by the element size), weights
        excluded. backward_nbytes : the same for backward. element, backward_element : bytes of such an element in each
        type, where they are not the products': an fp32 tensor between 16-bit ones, a cast that autocast adds.
    groups : int, of a grouped convolution; of a scan, heads of values for each of keys.
    heads, head_dim, seq : for attention; ``heads`` of values and ``seq`` for a scan. causal : half of the square is
        computed. flash : FlashAttention has room for it; else (a mask, heads of two widths) PyTorch's memory-efficient
        kernel or cuDNN's runs it.
    fp32 : a product or an attention that runs in fp32 whatever the type of the others.
    launches, backward_launches : GPU kernels launched.
    cut : how tensor parallelism divides it, one of :data:`CUTS`.
    repeat : that many equal kernels (the grouped products of a rank's experts); sizes and FLOPs are of all together,
        ``m`` is of one.
    saved : elements per sample that forward keeps for this kernel's backward, its own and no other's (q, k and v read
        one input, which the first of them keeps), in 16 bits. rebuilt : it would keep its input, which is dropped and
        made again for backward, or which a kernel of another type keeps.
    kept : bytes per sample of the same by type, where they are not ``saved`` times the element. working : that its
        backward holds at once beside what is kept: gradients, and what it casts or computes again.
    """

    name: str
    kind: str
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 0
    flops: float = 0.0
    backward_flops: float = 0.0
    nbytes: float = 0.0
    backward_nbytes: float = 0.0
    groups: int = 1
    heads: int = 0
    head_dim: int = 0
    seq: int = 0
    causal: bool = False
    launches: int = 1
    backward_launches: int = 2
    cut: str = "sequence"
    repeat: int = 1
    saved: float = 0.0
    kept: ByteSizes | None = None
    working: ByteSizes = (0.0, 0.0, 0.0)
    element: ByteSizes | None = None
    backward_element: ByteSizes | None = None
    halves: str = "IW"
    document: float = 0.0
    rebuilt: bool = False
    fp32: bool = False
    flash: bool = True

    @property
    def first_reader(self) -> bool:
        """Whether no kernel before it reads its input: it keeps it for backward, or would if that were not made again
        there."""
        return bool(self.saved) or self.rebuilt

    def kept_bytes(self, types: int) -> float:
        """Bytes per sample kept for backward in types of :data:`ByteSizes`."""
        return self.kept[types] if self.kept is not None else self.saved * (4.0 if types == FULL else 2.0)

    @property
    def model_flops(self) -> float:
        """Forward plus backward FLOPs per sample as an MFU counts them (PaLM, arXiv:2204.02311, appendix B).

        A fused attention kernel counts the full square even where a causal mask skips half of it, and no recomputation
        of scores in backward; everything else counts what it executes.
        """
        if self.kind == "attention":
            return (3.0 if self.halves else 1.0) * self.flops * (2.0 if self.causal else 1.0)
        return self.flops + self.backward_flops - (self.flops if "R" in self.halves else 0.0)


ADAPTER = "_lora_"
"""What joins the names of a product and of a kernel of the adapter beside it."""


def product_beside(name: str) -> str:
    """Beside which product a kernel is an adapter's; empty for any other kernel.

    >>> product_beside("q_lora_A"), product_beside("q")
    ('q', '')
    """
    product, joined, _ = name.rpartition(ADAPTER)
    return product if joined else ""


@dataclass(frozen=True)
class Layer:
    """A unit of compute: what FSDP would wrap and what a timeline shows as one span.

    Parameters
    ----------
    name : str, ``"layers.3"``.
    kind : ``"embedding"``, ``"block"``, ``"head"``, ``"conv"``, ``"norm"``, ``"pool"``, ``"linear"``...
    tensors : parameters in registration order. buffers : elements of floating-point buffers (BatchNorm statistics).
    kernels : forward kernels in order.
    activation_bytes : per sample *per element byte*, kept from forward to backward without checkpointing.
    boundary_bytes : per sample per element byte, of the layer's input (all that is kept under full checkpointing).
    heads, kv_heads : of its attention where they are not the model's; 0 where they are.
    """

    name: str
    kind: str
    tensors: tuple[Tensor, ...]
    kernels: tuple[Kernel, ...]
    buffers: int = 0
    activation_bytes: float = 0.0
    boundary_bytes: float = 0.0
    heads: int = 0
    kv_heads: int = 0

    @cached_property
    def parameters(self) -> int:
        """Elements of this layer's own parameters, tied tensors excluded."""
        return sum(t.numel for t in self.tensors if not t.tied_to)

    @cached_property
    def trained(self) -> int:
        """Of these, elements that are trained."""
        return sum(t.numel for t in self.tensors if not t.tied_to and not t.frozen)

    @cached_property
    def frozen_bytes(self) -> float:
        """Bytes of its own tensors that are not."""
        return sum(t.numel * t.element for t in self.tensors if t.frozen and not t.tied_to)

    @cached_property
    def unpacked(self) -> int:
        """Elements of its quantised tensors, which each pass writes out for its products."""
        return sum(t.numel for t in self.tensors if t.quantised)

    @cached_property
    def has_backward(self) -> bool:
        """Whether backward reaches it: it does not go before the first tensor that is trained."""
        return not self.kernels or any(kernel.halves for kernel in self.kernels)


@dataclass(frozen=True)
class Model(Keeper):
    """Layers in forward order.

    Parameters
    ----------
    name, family : ``"gpt2-xl"``, ``"gpt2"``.
    layers : in forward order; parameter registration order is the order of their tensors.
    seq_len : tokens per sample, or frames or audio samples of a clip; 0 for images. sample : what a sample is called,
        ``"sequence"``, ``"image"`` or ``"clip"``.
    n_blocks, hidden, heads, vocab : transformer shape for the usual formulas, 0 otherwise. kv_heads, head_dim : of its
        attention.
    notes : assumptions made while building.
    splits : of tp, cp, ep and pp, those by which it can be split; None where kernels and tensors say it themselves.
    """

    name: str
    family: str
    layers: tuple[Layer, ...]
    seq_len: int = 0
    sample: str = "sequence"
    n_blocks: int = 0
    hidden: int = 0
    heads: int = 0
    vocab: int = 0
    notes: tuple[str, ...] = field(default=())
    kv_heads: int = 0
    head_dim: int = 0
    splits: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"<Model {self.name}: {self.parameters:,} parameters in {self.depth}>"

    @property
    def depth(self) -> str:
        """How deep it is, in words: a transformer's blocks, which is what its config calls layers; else layers."""
        return f"{self.n_blocks} blocks" if self.n_blocks else f"{len(self.layers)} layers"

    @property
    def tokens(self) -> int:
        """Tokens per sample: of text alone, for what an image or a clip is cut into nobody counts a training by."""
        return self.seq_len if self.sample == "sequence" else 0

    @cached_property
    def parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(layer.parameters for layer in self.layers)

    @cached_property
    def trained(self) -> int:
        """Of these, elements that are trained: the others have no gradients and no states of an optimizer."""
        return sum(layer.trained for layer in self.layers)

    @cached_property
    def frozen_bytes(self) -> float:
        """Bytes of all tensors that are not."""
        return sum(layer.frozen_bytes for layer in self.layers)

    @property
    def partly_frozen(self) -> bool:
        """Whether something is not trained."""
        return self.trained < self.parameters

    @cached_property
    def gradients(self) -> Floats:
        """(layers,) float, elements of gradients by the layer whose backward makes them first: of a tied tensor the
        last one that has it."""
        elements = np.array([float(layer.trained) for layer in self.layers])
        tensors = [(i, tensor) for i, layer in enumerate(self.layers) for tensor in layer.tensors if not tensor.frozen]
        home = {tensor.name: i for i, tensor in tensors if not tensor.tied_to}
        last = {tensor.tied_to: i for i, tensor in tensors if tensor.tied_to}
        numel = {tensor.name: tensor.numel for layer in self.layers for tensor in layer.tensors if tensor.name in last}
        for name, i in last.items():
            if i > home.get(name, i):
                elements[home[name]] -= numel[name]
                elements[i] += numel[name]
        return elements

    def flops_per_sample(self) -> float:
        """Forward and backward FLOPs of one sample, the MFU numerator: ``6 N + 12 L H Q T`` per token (PaLM, app. B).

        The attention square counts in full and recomputation does not.
        """
        return sum(k.model_flops for layer in self.layers for k in layer.kernels)


@dataclass(frozen=True)
class MatrixUpdates:
    """Muon's iterations on matrices of one size: how many there are, their elements each, and seconds [s] of one."""

    count: int
    elements: int
    seconds: float


@dataclass(frozen=True, eq=False)
class StepCost:
    """What one rank's step costs on one device, layer by layer: the hand-over from compute to strategies.

    Parameters
    ----------
    forward, backward : (n_layers,) float [s], of one micro-batch; ``backward`` includes recomputation.
    forward_bound, backward_bound : what limits each, one of :data:`clustersim.core.program.BOUNDS`.
    forward_flops, backward_flops : (n_layers,) float, executed (recomputation included).
    optimizer : float [s] for all parameters of one rank without sharding. optimizer_floor : float [s], its launches,
        which do not shrink with a shard.
    grad_copy_bandwidth : float [bytes/s], for gradient copies into buckets and casts (read plus write counted).
    per_tensor : float [s], host and launch cost of touching one parameter tensor (a copy into DDP's bucket, or back).
    step_overhead : float [s] per step outside the layers: data loader hand-over, loss read, zero_grad.
    overlap_slowdown : float, extra fraction of an overlapped collective's duration that compute loses (SM and HBM
        contention); 0.3 means 10 ms of hidden communication cost 3 ms of compute.
    jitter : float, relative standard deviation of a rank's step.
    recomputed : (n_layers,) bool, whether backward repeats a layer's whole forward; empty for none.
    forward_launch : (n_layers,) float [s], host time to launch a layer's forward kernels; None for no cost.
    forward_mix, backward_mix : what each layer's seconds are spent on; empty where nobody knows.
    optimizer_traffic : float [bytes] a fused optimizer step reads and writes for all parameters, wherever it runs.
    optimizer_traffic_as_run : float [bytes], the same of the implementation that is asked for.
    matrices : what an optimizer does with whole matrices, once for each; in ``optimizer``, too.
    offloaded : (n_layers,) float [bytes] that a micro-batch keeps on the host between passes; None for nothing.
    offload_rates : (to the host, back) float [bytes/s] of their copies.
    host_copy_rates : (to the host, from it) float [bytes/s] of one GPU's copies while all GPUs of its node copy; zeros
        where nothing of a model's states is on the host.
    host_bandwidth : float [bytes/s] that one CPU socket's memory sustains, for work on parameters kept there.
    host_pace : float, how long the CPU takes for calls, in units of Sapphire Rapids'.
    host_posts : libraries of expert exchanges whose messages to other nodes a thread of the host posts here.
    """

    forward: Floats
    backward: Floats
    forward_bound: tuple[str, ...]
    backward_bound: tuple[str, ...]
    forward_flops: Floats
    backward_flops: Floats
    optimizer: float
    grad_copy_bandwidth: float
    per_tensor: float = 0.0
    optimizer_floor: float = 0.0
    step_overhead: float = 0.0
    overlap_slowdown: float = 0.0
    jitter: float = 0.0
    notes: tuple[str, ...] = field(default=())
    recomputed: tuple[bool, ...] = ()
    forward_launch: Floats | None = None
    forward_mix: tuple[Mix, ...] = ()
    backward_mix: tuple[Mix, ...] = ()
    optimizer_traffic: float = 0.0
    optimizer_traffic_as_run: float = 0.0
    matrices: tuple[MatrixUpdates, ...] = ()
    offloaded: Floats | None = None
    offload_rates: tuple[float, float] = (0.0, 0.0)
    host_copy_rates: tuple[float, float] = (0.0, 0.0)
    host_bandwidth: float = 100e9
    host_pace: float = 1.0
    host_posts: frozenset[str] = frozenset()

    def share_again(self, layer: int) -> float:
        """Share of a layer's backward that is its forward again: FLOPs beyond two of each of forward's."""
        backward = float(self.backward_flops[layer])
        return max(1.0 - 2.0 * float(self.forward_flops[layer]) / backward, 0.0) if backward else 0.0
