"""What FSDP and ZeRO share: units of parameters, groups that share them, and the sharded step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Ints, Mesh
from clustersim.core.model import StepCost, Tensor
from clustersim.core.program import DTYPE_BYTES, Collective
from clustersim.training.strategies import base


class ShardUnit(msgspec.Struct, frozen=True):
    """Parameters that are gathered, freed and reduced together.

    name : of its first layer, or ``"root"``. layers : indices into the model's layers. numel : elements of its own that
    are trained.
    shapes : (rows, elements of a row) of each of these, where every one is sharded by its rows (version 2); empty
        where all are one flat parameter. is_block : it is no end of the model.
    frozen : (rows, elements of a row, bytes of an element) of its parameters that are not trained, which are gathered
        and not reduced.
    """

    name: str
    layers: tuple[int, ...]
    numel: int
    shapes: tuple[tuple[int, int], ...] = ()
    is_block: bool = True
    frozen: tuple[tuple[int, int, float], ...] = ()

    def padded(self, members: int) -> int:
        """Trained elements that the group gathers and reduces: the flat parameter padded to a multiple of its size, or
        each parameter's rows (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``padded_sharded_param_size``)."""
        if self.shapes:
            return sum(-(-rows // members) * members * width for rows, width in self.shapes)
        return -(-self.numel // members) * members

    def frozen_bytes(self, members: int, most: float) -> float:
        """Bytes of the parameters that are not trained, padded alike: as they are kept, and at ``most`` so many an
        element, where mixed precision casts them ahead of a gather."""
        return sum(-(-rows // members) * members * width * min(size, most) for rows, width, size in self.frozen)


Segments = tuple[tuple[int, tuple[int, ...]], ...]
"""In forward order (index of the unit, consecutive layers of it)."""


class _ShardedLayer(Protocol):
    """A layer to wrap, whole or one rank's part of it."""

    @property
    def name(self) -> str:
        """As the model calls it."""

    @property
    def kind(self) -> str:
        """Such as embedding, block, head or loss."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What is to be sharded."""

    @property
    def parameters(self) -> int:
        """Their elements."""


def units(
    layers: Sequence[_ShardedLayer],
    blocks_per_unit: int,
    min_num_params: int | None,
    *,
    each: bool,
    ends_apart: bool = False,
) -> tuple[ShardUnit, ...]:
    """The wrapping of layers in forward order; the root unit comes first and holds what no other unit does.

    Parameters
    ----------
    blocks_per_unit : how many consecutive blocks share a unit (``transformer_auto_wrap_policy`` takes one).
    min_num_params : wrap by size instead: consecutive layers until a unit holds as many parameters
        (``size_based_auto_wrap_policy``). Embeddings and heads stay in the root either way: they may be tied.
    each : every parameter is sharded by its own rows, as version 2 does it. ends_apart : the embedding is a unit, and
        what follows the blocks (final norm and head) is one (torchtitan models/llama3/infra/parallelize.py).
    """
    if ends_apart:
        return _with_ends(layers, blocks_per_unit, min_num_params, each=each)
    root = []
    wrapped = []
    open_unit = list[int]()
    for i, layer in enumerate(layers):
        if layer.kind in {"embedding", "head", "loss"} or (min_num_params is None and layer.kind != "block"):
            root.append(i)
            continue
        open_unit.append(i)
        enough = _numel(layers, open_unit) >= min_num_params if min_num_params else len(open_unit) == blocks_per_unit
        if enough:
            wrapped.append(open_unit)
            open_unit = []
    if open_unit:
        wrapped.append(open_unit)
    named = [_unit(layers[unit_layers[0]].name, layers, unit_layers, each=each) for unit_layers in wrapped]
    return (_unit("root", layers, root, each=each), *(unit for unit in named if unit.numel or unit.frozen))


def _with_ends(
    layers: Sequence[_ShardedLayer], blocks_per_unit: int, min_num_params: int | None, *, each: bool
) -> tuple[ShardUnit, ...]:
    """:func:`units` with the root's ends taken out of it."""
    root, *blocks = units(layers, blocks_per_unit, min_num_params, each=each)
    first = [i for i in root.layers if layers[i].kind == "embedding"]
    last = [i for i in root.layers if layers[i].kind in {"head", "loss"}]
    rest = [i for i in root.layers if i not in {*first, *last}]
    ends = [_unit(layers[some[0]].name, layers, some, each=each) for some in (first, last) if some]
    in_order = sorted((*ends, *blocks), key=lambda unit: unit.layers)
    return (_unit("root", layers, rest, each=each), *(unit for unit in in_order if unit.numel or unit.frozen))


def _unit(name: str, layers: Sequence[_ShardedLayer], some: list[int], *, each: bool) -> ShardUnit:
    """Some of the layers as a unit."""
    made = shapes([layers[i] for i in some]) if each else ()
    ends = name == "root" or any(layers[i].kind in {"embedding", "head", "loss"} for i in some)
    own = [t for i in some for t in layers[i].tensors if not t.tied_to]
    frozen = tuple((t.rows, t.width, t.element) for t in own if t.frozen)
    numel = sum(t.numel for t in own if not t.frozen)
    return ShardUnit(name, tuple(some), numel, made, not ends, frozen)


def shapes(layers: Sequence[_ShardedLayer]) -> tuple[tuple[int, int], ...]:
    """(rows, elements of a row) of each parameter that is trained, tied ones once."""
    return tuple((t.rows, t.width) for layer in layers for t in layer.tensors if not t.tied_to and not t.frozen)


def _numel(layers: Sequence[_ShardedLayer], unit_layers: list[int]) -> int:
    return sum(layers[i].parameters for i in unit_layers)


def segments(n_layers: int, wrapped: tuple[ShardUnit, ...]) -> Segments:
    """Of so many layers; those without a unit belong to the root."""
    owner = {i: u for u, unit in enumerate(wrapped) for i in unit.layers}
    segments_of: list[tuple[int, list[int]]] = []
    for i in range(n_layers):
        unit = owner.get(i, 0)
        if segments_of and segments_of[-1][0] == unit:
            segments_of[-1][1].append(i)
        else:
            segments_of.append((unit, [i]))
    return tuple((unit, tuple(layers)) for unit, layers in segments_of)


def shard_groups(mesh: Mesh, shard: int, field: str) -> Ints:
    """(world / shard, shard): consecutive ranks, so that a group of a node's size stays in a node.

    Raises :class:`ProgramError` naming the field ``field`` if the world does not divide.
    """
    if shard < 1 or mesh.world_size % shard:
        fits = ", ".join(str(n) for n in range(1, mesh.world_size + 1) if mesh.world_size % n == 0)
        raise ProgramError(
            f"{mesh.world_size} ranks do not divide into groups of {shard}; use one of {fits} (at {field})"
        )
    return np.arange(mesh.world_size, dtype=np.int64).reshape(-1, shard)


def clip(ops: base.OpList, cost: StepCost, group: Ints, shard_bytes: float, after: tuple[int, ...]) -> tuple[int, ...]:
    """clip_grad_norm_: the shard's norm, one number all-reduced, and the shard multiplied by the factor."""
    seconds = base.gradient_pass(shard_bytes, cost)
    norm: tuple[int, ...] = (ops.compute("gradient norm", seconds, "gradient", after=after, nbytes=shard_bytes),)
    norm = all_reduce_flag(ops, "all_reduce gradient norm", group, norm)
    scaled = ops.compute("clip gradients", 2 * seconds, "gradient", after=norm, nbytes=2 * shard_bytes)
    return (scaled,)


def all_reduce_flag(
    ops: base.OpList, name: str, group: Ints, after: tuple[int, ...], redop: str = "sum"
) -> tuple[int, ...]:
    """One fp32 number all-reduced; nothing where the group has one member."""
    if group.shape[1] == 1:
        return after
    return (ops.add(Collective(name, "all_reduce", 4.0, group, after=after, redop=redop, step=ops.step)),)


def optimizer(cost: StepCost, share: float) -> float:
    """Seconds of the optimizer step on a share of the parameters: bytes shrink, launches stay. What it does with whole
    matrices is apart."""
    plain = cost.optimizer - sum(update.count * update.seconds for update in cost.matrices)
    return max(plain * share, min(plain, cost.optimizer_floor))


def whole_matrices(ops: base.OpList, cost: StepCost, group: Ints, after: tuple[int, ...]) -> tuple[int, ...]:
    """Muon on shards: matrices of one size are dealt out to the ranks in rounds, whose momenta in bf16 go to their rank
    by an all_to_all, and what it makes of them comes back by another (microsoft/dion muon.py, also in torchtitan's
    experiments)."""
    ranks = group.shape[1]
    rounds = [(-(-update.count // ranks), update) for update in cost.matrices]
    if not rounds:
        return after
    nbytes = 2.0 * sum(n * update.elements for n, update in rounds)
    seconds = sum(n * update.seconds for n, update in rounds)

    def exchanged(name: str, after: tuple[int, ...]) -> tuple[int, ...]:
        """The exchange; nothing on one rank."""
        if ranks == 1:
            return after
        return (ops.add(Collective(name, "all_to_all", nbytes, group, after=after, dtype="bf16", step=ops.step)),)

    after = exchanged("all_to_all momenta", after)
    made = ops.compute("orthogonalise", seconds, "optimizer", "compute", after=after)
    return exchanged("all_to_all updates", (made,))


def nbytes(numel: float, dtype: str) -> float:
    """Bytes of so many elements."""
    return float(numel * DTYPE_BYTES[dtype])
