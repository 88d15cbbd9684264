"""The front door: a model and its parallel configuration to stages of local layers."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from clustersim.core.errors import ScenarioError
from clustersim.core.model import Layer, Model, Tensor
from clustersim.training.parallel import ParallelConfig, Recompute
from clustersim.training.partition.base import Chunk, Item, LocalLayer, Partition, Stage, StashedElements, Work
from clustersim.training.partition.dispatch import FLOAT8_ROW
from clustersim.training.partition.expert import expert_tensors, other_tensors, reach_of
from clustersim.training.partition.kept import kept_by
from clustersim.training.partition.layers import Cutter
from clustersim.training.partition.nodes import LayoutChange, Nodes, NodeSequence, backward_items, forward_items
from clustersim.training.partition.recompute import (
    every_second,
    held,
    kept_outputs,
    most_gradients,
    repeated_operators,
)
from clustersim.training.partition.share import local_tensor, share_of
from clustersim.training.partition.stages import Range, placed, split
from clustersim.training.partition.tensor import ExchangeStyle

NO_RECOMPUTE = Recompute()


def partition(
    model: Model,
    parallel: ParallelConfig,
    recompute: Recompute = NO_RECOMPUTE,
    *,
    placement: str = "loop",
    nproc_per_node: int = 0,
    nproc_per_domain: int = 0,
    histograms: tuple[tuple[float, ...], ...] = (),
) -> Partition:
    """What every pipeline rank holds, computes and exchanges.

    Parameters
    ----------
    recompute : what backward computes again, :func:`clustersim.training.parallel.recompute.recompute`. placement : of
    chunks on ranks, one of :data:`clustersim.training.partition.stages.PLACEMENTS`, as the schedule has it.
    nproc_per_node : ranks of a node, which a dispatcher in two hops asks for; 0 where all are on one.
    nproc_per_domain : ranks of an NVLink domain that several nodes share; 0 where none do.
    histograms : loads of experts for ``routing.kind = "histogram"``, a row for each block or one for all
        (:func:`clustersim.training.partition.routing.read_histogram`).

    Raises :class:`ScenarioError` (or :class:`ModelError`) with the field, for degrees and layouts that do not fit and
    models that cannot be cut. :func:`clustersim.training.parallel.check` has said most of it before.

    >>> from clustersim.model import model
    >>> halves = partition(model("gpt2"), ParallelConfig(tp=2, pp=2))
    >>> [stage.parameters for stage in halves.stages], halves.tied
    ([41429760, 40644864], 19365888)
    """
    model = kept_by(model, parallel.framework)
    blocks = sum(layer.kind == "block" for layer in model.layers)
    chunks = 2 if placement == "both" else parallel.chunks(blocks)
    placed_stages = placed(parallel.pp, chunks, placement)
    ranges = split(model, parallel, parallel.pp if placement == "both" else parallel.pp * chunks)
    _check(model, parallel, ranges)
    if model.splits is not None and recompute.granularity == "selective":
        why = "is more than a stack of equal blocks" if model.family in _MORE_THAN_BLOCKS else "was traced"
        raise ScenarioError(
            f"recompute of {', '.join(recompute.modules)}: {model.name} {why}, and its modules have other names; "
            'use recompute_granularity = "full", or activation_checkpointing (at $.parallel.recompute_granularity)'
        )
    reach = reach_of(parallel, nproc_per_node, nproc_per_domain)
    builder = _LayerBuilder(model, parallel, recompute, reach, histograms)
    # Stages of one rank share tied tensors: the V placement has embedding and head on the first rank.
    beside = {
        stage: [model.layers[i] for earlier in rank_stages for i in range(*ranges[earlier])]
        for rank_stages in placed_stages
        for stage in rank_stages
    }
    built = [builder.chunk(stage, ranges, beside[stage]) for stage in range(len(ranges))]
    stages = tuple(Stage(tuple(built[stage] for stage in rank_stages)) for rank_stages in placed_stages)
    return Partition(model, stages, builder.tied, builder.notes())


def _check(model: Model, parallel: ParallelConfig, ranges: tuple[Range, ...]) -> None:
    empty = [stage for stage, (first, stop) in enumerate(ranges) if first == stop]
    if empty:
        field = "layout" if parallel.stages else "pp"
        raise ScenarioError(f"stage {empty[0]} of {len(ranges)} has no layer; give it one (at $.parallel.{field})")
    for field in ("tp", "cp", "ep", "pp"):
        degree = getattr(parallel, field)
        if model.splits is not None and degree > 1 and field not in model.splits:
            raise ScenarioError(f"{field} = {degree}: {_unsplit(model, field)}; use 1 (at $.parallel.{field})")
    cuts = {kernel.cut for layer in model.layers for kernel in layer.kernels}
    if parallel.tp > 1 and not cuts & {"column", "row", "heads", "vocab"}:
        raise ScenarioError(
            f"tp = {parallel.tp}: {model.name} has nothing that tensor parallelism cuts; use 1 (at $.parallel.tp)"
        )
    if parallel.cp > 1 and not model.seq_len:
        raise ScenarioError(f"cp = {parallel.cp} splits a sequence; {model.name} has none; use 1 (at $.parallel.cp)")
    if any(layer.kind == "projector" for layer in model.layers):
        for field in ("pp", "cp"):
            if getattr(parallel, field) > 1:
                raise ScenarioError(
                    f"{field} = {getattr(parallel, field)}: how {model.name}'s tower of images is cut by it is not "
                    f"described; use 1 (at $.parallel.{field})"
                )
    states = {"short_conv", "scan", "state_written"}
    if parallel.cp > 1 and any(kernel.name in states for layer in model.layers for kernel in layer.kernels):
        raise ScenarioError(
            f"cp = {parallel.cp}: how blocks of {model.name} that do not attend hand their states from one "
            "context-parallel rank to the next is not described; use 1 (at $.parallel.cp)"
        )


_MORE_THAN_BLOCKS = frozenset({"seq2seq", "speech"})
"""Families of models that are described without how they are divided."""


def _unsplit(model: Model, field: str) -> str:
    """Why a model that was traced, or is more than a stack of blocks, is not split."""
    if model.family in _MORE_THAN_BLOCKS:
        return f"{model.name} is more than a stack of equal blocks, and how it is divided is not described"
    if field == "pp":
        return f"a layer of {model.name} takes more than the one before it gives, so no pipeline can be cut there"
    return f"{model.name} was traced, and a trace does not say how its tensors and kernels are divided"


class _CheckpointUnit(msgspec.Struct, frozen=True):
    """Blocks behind one checkpoint, up to and with the layer it is about; ``ends``: that is the last of them."""

    layers: tuple[int, ...]
    ends: bool = True


class _LayerBuilder:
    """Builds local layers, equal ones once."""

    def __init__(
        self,
        model: Model,
        parallel: ParallelConfig,
        recompute: Recompute,
        nproc_per_node: int,
        histograms: tuple[tuple[float, ...], ...],
    ) -> None:
        self.model = model
        self.parallel = parallel
        self.recompute = recompute
        self.share = share_of(model, parallel)
        manner = ExchangeStyle(
            parallel.tp,
            parallel.sequence_parallel,
            parallel.tp_overlap,
            parallel.overlaps_tp_gradient,
            self.share.gathers_again,
            parallel.framework == "torchtitan",
            "fp8" if parallel.float8_tp else None,
        )
        self.cutter = Cutter(
            self.share, parallel, manner, float(model.seq_len * model.hidden), nproc_per_node, histograms
        )
        self.blocks = {i: n for n, i in enumerate(i for i, x in enumerate(model.layers) if x.kind == "block")}
        self.known: dict[tuple[object, ...], LocalLayer] = {}
        self.tied = 0

    def notes(self) -> tuple[str, ...]:
        """What was assumed."""
        share = self.share
        added = share.padded - share.vocab
        notes = [f"vocabulary padded by {added:,} to {share.padded:,} rows"] if added else []
        if share.cp > 1 and self.parallel.cp_load_balancer == "none":
            notes.append(
                "attention of all context-parallel ranks takes as long as the last one's, which sees most: what the "
                "others would wait is told as compute"
            )
        blocks = [layer for layer in self.model.layers if layer.kind == "block"]
        if self.parallel.sp_overlap_comm and not any(kernel.name == "v" for x in blocks for kernel in x.kernels):
            notes.append("sp_overlap_comm changes nothing: one product makes queries, keys and values together")
        return tuple(notes)

    def chunk(self, stage: int, ranges: tuple[Range, ...], beside: list[Layer]) -> Chunk:
        """One global stage; ``beside`` are all layers of its rank."""
        first, stop = bounds = ranges[stage]
        last = stage == len(ranges) - 1
        names = {tensor.name for layer in beside for tensor in layer.tensors}
        layers = tuple(self._layer(i, bounds, self._received(i, bounds, last), names) for i in range(first, stop))
        return Chunk(stage, layers, 0.0 if last else self._message(stop))

    def _message(self, index: int) -> float:
        """Elements of the input of a layer that is on another rank: 1/t of them where every rank needs only those."""
        divided = self.share.cp * self.share.tp if self.parallel.pipeline_partitioned else self.share.tokens
        return self.model.layers[index].boundary_bytes / divided

    def _received(self, index: int, chunk: Range, last: bool) -> tuple[float, float]:
        """Elements that DeepSpeed's partitioned messages are gathered to, in front of a layer and behind it."""
        if not self.parallel.pipeline_partitioned or self.share.tp == 1:
            return 0.0, 0.0
        first, stop = chunk
        layers = self.model.layers
        cp = self.share.cp
        ahead = layers[index].boundary_bytes / cp if index == first > 0 else 0.0
        return ahead, layers[stop].boundary_bytes / cp if index == stop - 1 and not last else 0.0

    def _layer(self, index: int, chunk: Range, received: tuple[float, float], names: set[str]) -> LocalLayer:
        layer = self.model.layers[index]
        unit = self._unit(index, chunk)
        comm = self.parallel.cp_comm(self.blocks.get(index, 0)) if self.parallel.cp > 1 else ""
        spread = self.cutter.spread(layer, self.blocks.get(index, 0))
        # Layers of one shape share their tuple of kernels.
        key = (
            layer.kind,
            id(layer.kernels),
            tuple(id(self.model.layers[i].kernels) for i in unit.layers),
            unit.ends,
            received,
            comm,
            spread,
        )
        if key not in self.known:
            self.known[key] = self._passes(index, unit, received)
        local_tensors = tuple(self._tensor(t, names) for t in other_tensors(self.model, index))
        partial = self.parallel.sequence_parallel and self.parallel.tp > 1
        return replace(
            self.known[key],
            name=layer.name,
            tensors=local_tensors,
            expert_tensors=expert_tensors(self.model, index, self.parallel.ep, self.parallel.etp or self.share.tp),
            replicated=sum(t.numel for t in local_tensors if t.cut == "sequence" and not (t.tied_to or t.frozen))
            if partial
            else 0,
            expert_load=spread.routed.load if spread else (),
        )

    def _tensor(self, tensor: Tensor, names: set[str]) -> Tensor:
        """A rank's shard. A tied tensor whose other is on another rank is a copy, kept equal by summing gradients."""
        local = local_tensor(tensor, self.share)
        if tensor.tied_to and tensor.tied_to not in names:
            self.tied += 0 if local.frozen else local.numel
            return replace(local, tied_to="")
        return local

    def _unit(self, index: int, chunk: Range) -> _CheckpointUnit:
        """``uniform`` : units of ``num_layers`` blocks of a stage. ``block`` : its first blocks, each for itself."""
        how = self.recompute
        if how.granularity != "full" or index not in self.blocks:
            return _CheckpointUnit(())
        first = next(i for i in range(*chunk) if i in self.blocks)
        place = index - first
        if how.method == "block":
            return _CheckpointUnit((index,)) if place < how.num_layers else _CheckpointUnit(())
        ends = place % how.num_layers == how.num_layers - 1 or index + 1 == chunk[1] or index + 1 not in self.blocks
        return _CheckpointUnit(tuple(range(index - place % how.num_layers, index + 1)), ends)

    def _nodes(self, index: int) -> Nodes:
        block = self.blocks.get(index)
        modules = self.recompute.modules if self.recompute.granularity == "selective" and block is not None else ()
        return self.cutter.nodes(self.model.layers[index], block or 0, modules)

    def _passes(self, index: int, unit: _CheckpointUnit, received: tuple[float, float]) -> LocalLayer:
        """Everything of a local layer but its name and tensors: layers with equal kernels share it."""
        layer = self.model.layers[index]
        nodes = self._nodes(index)
        keeps = held(nodes, self.share)
        if self.parallel.float8_activations and layer.kind in {"block", "mtp"}:
            keeps = replace(keeps, stashed=keeps.stashed * FLOAT8_ROW / 2.0)
        again: tuple[tuple[Item, ...], tuple[int, ...]] = ((), ())
        if unit.layers:
            keeps = self._checkpoint(unit)
            if unit.ends:
                again = forward_items(tuple(node for i in unit.layers for node in self._nodes(i)), "R")
        elif self.recompute.granularity == "selective_op" and index in self.blocks:
            keeps = keeps.dropped(layer.boundary_bytes / self.share.tokens + kept_outputs(layer, self.share))
            again = repeated_operators(nodes, every_second(layer.kernels))
        elif not any(kernel.saved for kernel in layer.kernels):
            # Models that are not described kernel by kernel; they are not cut either.
            keeps = replace(keeps, kept=layer.activation_bytes)
        between = layer.boundary_bytes / self.share.tokens
        keeps = replace(keeps, working=most_gradients(NodeSequence(nodes).kernels, between))
        ahead, behind = received
        if ahead:
            nodes = (LayoutChange("activation", ("all_gather", ""), ("tp",), ahead), *nodes)
        if behind:
            nodes = (*nodes, LayoutChange("activation", ("", "all_gather"), ("tp",), behind))
        backward = backward_items(nodes, *again)
        if self.parallel.delay_wgrad_compute:
            backward = _delayed(backward)
        return LocalLayer(layer.name, layer.kind, forward_items(nodes)[0], backward, **vars(keeps))

    def _checkpoint(self, unit: _CheckpointUnit) -> StashedElements:
        """The unit's first layer keeps the input; its last one's backward brings everything back."""
        first = self.model.layers[unit.layers[0]]
        shared = self.share.cp * self.share.tp if self.parallel.distribute_saved_activations else self.share.tokens
        everything = [held(self._nodes(i), self.share) for i in unit.layers]
        total = sum(everything, StashedElements())
        keeps = first.boundary_bytes / shared if len(unit.layers) == 1 else 0.0
        return replace(total.dropped(keeps), stashed=everything[-1].stashed)


def _delayed(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Backward with its weight gradients later: those of attention behind the layer, the others beside the exchange
    that follows their input gradient, which takes gradients of tokens home from their experts.

    ``delay_wgrad_compute`` is Megatron's beside ``ep_overlap`` (core/models/common/model_chunk_schedule_plan.py), which
    moves those of the first layer of a chunk on, behind the message to the stage before; here they precede it.
    """
    moved = {i: _later(items, i) for i, item in enumerate(items) if isinstance(item, Work) and item.part == "W"}
    order = sorted(range(len(items)), key=lambda i: (moved.get(i, i), i in moved, i))
    place = {old: new for new, old in enumerate(order)}
    return tuple(
        msgspec.structs.replace(items[i], needs=tuple(sorted(place[n] for n in items[i].needs))) for i in order
    )


def _later(items: tuple[Item, ...], position: int) -> int:
    """Behind which item a weight gradient goes: the last exchange before the next input gradient, or the list."""
    if "attention" in items[position].name.split("+"):
        return len(items)
    following = (i for i in range(position + 1, len(items)) if isinstance(items[i], Work) and items[i].part != "W")
    return next(following, len(items)) - 1
