"""The nouns of a split model: what one rank computes, what it exchanges with others in between, and in which order.

A :class:`LocalLayer` is a layer as one rank of its stage sees it: kernels in *local* shapes, cut at its *exchanges*.
All of it is data. An exchange names mesh dimensions, never ranks, so that a collective on the wrong group cannot be
written; the step builder (:mod:`clustersim.training.builder`) turns it into an op on the groups of those dimensions.

Sizes are per *sample* (one sequence), as in :mod:`clustersim.core.model`: the builder multiplies by the micro-batch
size. A rank that holds 1/c of every sequence (context parallelism) has kernels of that share of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import msgspec

from clustersim.core.byte_matrix import ByteMatrix
from clustersim.core.model import Kernel, Model, Tensor
from clustersim.core.program import ExchangeKernel

PARTS = ("F", "I", "W", "R")
"""Forward; gradient of the inputs, and all of backward that is no product with weights; gradient of the weights; a
forward repeated in backward (recomputation)."""


class Work(msgspec.Struct, frozen=True, gc=False):
    """Kernels that run back to back, with no exchange between them.

    Parameters
    ----------
    name : what it is inside its layer: ``"attention"``, ``"mlp"``.
    kernels : in local shapes, *forward* descriptions whatever the part; ``part`` says which of their passes runs.
    part : one of :data:`PARTS`.
    needs : indices, in the same list of items, of exchanges that must be over. Works of a list run in order anyway.
    """

    name: str
    kernels: tuple[Kernel, ...]
    part: str
    needs: tuple[int, ...] = ()


class Exchange(msgspec.Struct, frozen=True, gc=False):
    """A communication inside a layer.

    Parameters
    ----------
    name : what travels: ``"attention output"``. kind : one of :data:`clustersim.core.program.COLLECTIVES`, or
    ``"ring"``: every rank of a group sends to the next one and
        receives from the one before; or ``"copies"``: the same by copy engines, inside a node.
    dims : mesh dimensions whose groups exchange, such as ``("tp",)`` or ``("tp", "ep")``. Groups of one are left out by
        the builder.
    elements : per sample, of the full tensor: NCCL's S (for all_gather and reduce_scatter the gathered size, for
        all_to_all what one rank holds); of a ring, what one rank sends.
    part : one of :data:`PARTS`, the pass it belongs to; a W exchange is only needed by W work.
    needs : indices, in the same list, of items that must be over before it starts; exchanges of one communicator run in
        order anyway, and it always follows the work listed before it.
    dtype : of the elements; None for the activations'.
    per_sample : False where the size does not grow with the micro-batch (counts of tokens).
    communicator : name of the communicator, and so of the stream; empty for its dimensions' names joined.
    matrix : of an all_to_all whose pairs differ, what positions of the group have for each other, over ``elements``.
    kernel : of an all_to_all that a library makes by itself.
    """

    name: str
    kind: str
    dims: tuple[str, ...]
    elements: float
    part: str
    needs: tuple[int, ...] = ()
    dtype: str | None = None
    per_sample: bool = True
    communicator: str = ""
    matrix: ByteMatrix | None = None
    kernel: ExchangeKernel | None = None


Item: TypeAlias = Work | Exchange


@dataclass(frozen=True, kw_only=True)
class StashedElements:
    """What forward leaves for backward, in elements per sample.

    Parameters
    ----------
    kept : freed when the input gradient is done.
    kept_for_weights : of inputs that weight gradients need, freed when those are done.
    repeated : what a repeated forward brings back while this layer's backward runs.
    working : of gradients at the fullest moment of this layer's backward, less what it has given back by then.
    fp32_kept : kept in fp32 whatever the activations' type (logits and softmax of the loss).
    fused_loss_kept : of a loss in one kernel, logits and their gradient in the activations' type.
    stashed : of output gradients that weight gradients need: held from I to W where a schedule separates them (they are
        what makes a delayed W cost memory, arXiv:2401.10241 s4).
    """

    kept: float = 0.0
    kept_for_weights: float = 0.0
    repeated: float = 0.0
    working: float = 0.0
    fp32_kept: float = 0.0
    fused_loss_kept: float = 0.0
    stashed: float = 0.0

    def __add__(self, other: StashedElements) -> StashedElements:
        return StashedElements(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def whole(self) -> float:
        """All of it in the activations' type."""
        return self.kept + self.kept_for_weights + self.repeated

    def dropped(self, keeps: float) -> StashedElements:
        """The same where forward leaves only so many elements and backward brings the rest back."""
        return replace(self, kept=keeps, kept_for_weights=0.0, repeated=self.whole)


@dataclass(frozen=True)
class LocalLayer(StashedElements):
    """A layer as one rank holds and computes it.

    Parameters
    ----------
    name, kind : the layer's, as in :class:`clustersim.core.model.Layer`.
    forward : items in the order a rank issues them, with part F. Exchanges that no item of a list needs must be over
        before what follows the list: the next layer, or a message.
    backward : items with parts R (first, where the forward is repeated), I and W. A full backward plays them in order;
        a schedule that splits backward plays R and I in one action and W in a later one, where needs on I are met.
    tensors : local parameter tensors (``numel`` of this rank's shard), dense ones.
    expert_tensors : local tensors of routed experts, which are reduced over ``edp``, not over ``dp`` and ``cp``.
    replicated : elements, among ``tensors``, that every tensor-parallel rank holds whole and computes part of the
        gradient of (norms and the router under sequence parallelism): summed over tp at the end of a step.
    expert_load : rows that each expert-parallel position receives, over their mean; empty where all are alike. It
        multiplies the duration of works named ``"experts"``. What is kept is the busiest position's.
    """

    name: str
    kind: str
    forward: tuple[Item, ...]
    backward: tuple[Item, ...]
    tensors: tuple[Tensor, ...] = ()
    expert_tensors: tuple[Tensor, ...] = ()
    replicated: int = 0
    expert_load: tuple[float, ...] = ()

    @cached_property
    def parameters(self) -> int:
        """Elements of this rank's dense parameters, tied copies excluded."""
        return sum(t.numel for t in self.tensors if not t.tied_to)

    @cached_property
    def expert_parameters(self) -> int:
        """Elements of this rank's routed experts."""
        return sum(t.numel for t in self.expert_tensors)

    @cached_property
    def trained(self) -> int:
        """Of its dense parameters, elements that are trained."""
        return sum(t.numel for t in self.tensors if not t.tied_to and not t.frozen)

    @cached_property
    def expert_trained(self) -> int:
        """Of its routed experts, elements that are trained."""
        return sum(t.numel for t in self.expert_tensors if not t.frozen)

    @cached_property
    def frozen_bytes(self) -> float:
        """Bytes of its tensors that are not."""
        own = (*self.tensors, *self.expert_tensors)
        return sum(t.numel * t.element for t in own if t.frozen and not t.tied_to)

    @cached_property
    def quantised(self) -> tuple[Tensor, ...]:
        """Its quantised tensors, which each pass writes out for its products."""
        return tuple(t for t in self.tensors if t.quantised)


class Chunk(msgspec.Struct, frozen=True):
    """A global stage of the pipeline: consecutive layers that one rank computes in one go (a *virtual stage*).

    Parameters
    ----------
    stage : its place from 0 in the order of forward. layers : local layers, equal ones the same object.
    message : elements per sample of the activation it sends to the next stage, and of the gradient it gets back, for
        one rank; 0 for the last.
    """

    stage: int
    layers: tuple[LocalLayer, ...]
    message: float


@dataclass(frozen=True)
class Stage:
    """What the ranks of one pipeline coordinate hold.

    chunks : by local chunk number. again : the same with every layer recomputed, for ``repeated`` passes, which are
        (micro-batch, chunk); both empty where all micro-batches are alike.
    """

    chunks: tuple[Chunk, ...]
    again: tuple[Chunk, ...] = ()
    repeated: frozenset[tuple[int, int]] = frozenset()

    def of(self, microbatch: int, chunk: int) -> Chunk:
        """A chunk as it is passed in a micro-batch."""
        return (self.again if (microbatch, chunk) in self.repeated else self.chunks)[chunk]

    @cached_property
    def layers(self) -> tuple[LocalLayer, ...]:
        """All layers, chunk after chunk."""
        return tuple(layer for chunk in self.chunks for layer in chunk.layers)

    @cached_property
    def heads(self) -> frozenset[tuple[int, int]]:
        """Heads, by chunk and place in it."""
        every = ((c, i, layer) for c, chunk in enumerate(self.chunks) for i, layer in enumerate(chunk.layers))
        return frozenset((c, i) for c, i, layer in every if layer.kind == "head")

    @cached_property
    def parameters(self) -> int:
        """Elements of dense parameters on one rank."""
        return sum(layer.parameters for layer in self.layers)

    @cached_property
    def expert_parameters(self) -> int:
        """Elements of routed experts on one rank."""
        return sum(layer.expert_parameters for layer in self.layers)

    @cached_property
    def trained(self) -> int:
        """Elements of dense parameters on one rank that are trained."""
        return sum(layer.trained for layer in self.layers)

    @cached_property
    def expert_trained(self) -> int:
        """Elements of routed experts on one rank that are trained."""
        return sum(layer.expert_trained for layer in self.layers)

    @cached_property
    def frozen_bytes(self) -> float:
        """Bytes of tensors on one rank that are not trained."""
        return sum(layer.frozen_bytes for layer in self.layers)


@dataclass(frozen=True)
class Partition:
    """A model split over a mesh: stages by pipeline coordinate.

    tied : elements, on one rank, of the embedding table that first and last stage both hold and whose gradients are
        summed between them; 0 where the head has weights of its own or one stage holds both.
    """

    model: Model
    stages: tuple[Stage, ...]
    tied: int = 0
    notes: tuple[str, ...] = ()
