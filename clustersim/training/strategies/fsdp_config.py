"""FSDP's knobs, by PyTorch's names, and what they come to on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np

from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Ints, Mesh
from clustersim.core.model import Model
from clustersim.core.program import DTYPE_BYTES
from clustersim.training.parallel.config import AtLeastOne
from clustersim.training.strategies import base, offloading, sharded

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


class FSDPConfig(base.StrategyConfig, frozen=True, tag_field="kind", tag="fsdp"):
    """Knobs of FullyShardedDataParallel (``version = 1``) and ``fully_shard`` (``version = 2``, the default).

    Parameters
    ----------
    version : 1 or 2.
    param_dtype : of MixedPrecision(Policy): what is gathered and computed in. reduce_dtype : of the reduce_scatter;
        ``param_dtype`` when absent. orig_dtype : what shards, gradients on shards and optimizer states are kept in.
    blocks_per_unit, min_num_params : see :func:`clustersim.training.strategies.sharded.units`.
    sharding_strategy : version 1: FULL_SHARD gathers again in backward, SHARD_GRAD_OP keeps what forward gathered,
        NO_SHARD all-reduces as DDP does, HYBRID_SHARD and _HYBRID_SHARD_ZERO2 shard inside nodes and replicate over
        them.
    reshard_after_forward : version 2: true frees after forward; false keeps; a number reshards to groups of so many
        ranks, which backward gathers over. When absent, true for all but the root.
    data_parallel_shard_degree, data_parallel_replicate_degree : the 2-D mesh of hybrid sharding; -1 is what is left.
    backward_prefetch : version 1: the next unit is gathered before (BACKWARD_PRE) or after (BACKWARD_POST) the current
        unit's gradients are computed, or when it is needed (None). Version 2 always does the first.
    forward_prefetch : version 1: issue the next all_gather before the current forward, one unit further ahead.
    limit_all_gathers : version 1: at most two all-gathered units wait for compute.
    alloc_retries : version 1: the card is full (``num_alloc_retries`` of torch.cuda.memory_stats grows). Memory for an
        all_gather must be freed first, and the host waits until the device has done all that was issued.
    checkpoint_outside : version 1: units are wrapped inside of what is checkpointed, so that recomputation gathers and
        frees them once more, ahead of backward's own all_gather. With FSDP around the checkpoint it does not.
    no_sync : gradients of all but the last micro-batch stay unsharded and are not reduced
        (``set_requires_gradient_sync(False)`` in version 2).
    ends_apart : version 2: the embedding, and final norm with head, are units of their own, as torchtitan wraps them
        (the default where ``[parallel]`` names that framework). The last one stays gathered as the root does.
    experts_outside : experts of ``[parallel]`` that one rank alone has are no unit of FSDP: nothing is gathered of
        them, and their gradients stay in their own type (NeMo Automodel components/moe/parallelizer.py,
        ``ignored_params``).
    clip_grad_norm : the norm is all-reduced before the optimizer.
    float8_all_gather : weights of blocks' linears are cast on their shards and gathered in 8 bits; the root's are not
        (torchao's ``enable_fsdp_float8_all_gather``).
    cpu_offload : shards, gradients and optimizer live on the host.
    pcie_bandwidth : then, of one GPU in one direction; what copies reach of the machine's own links, all GPUs at once,
        when absent. dram_bandwidth : then, what all ranks of a node read and write of its memory; what their threads do
        when absent.
    host_threads : then, threads of a rank that update (OMP_NUM_THREADS), or "all": one a core; one where a node has
        several ranks, as torchrun sets it, and else all cores when absent.
    bind_cores : then, whether each rank has cores of its own, all of which update (torchrun's ``--numa-binding``).
    """

    version: Literal[1, 2] = 2
    reduce_dtype: base.ParamDtype | None = None
    orig_dtype: base.ParamDtype = "fp32"
    blocks_per_unit: AtLeastOne = 1
    min_num_params: AtLeastOne | None = None
    sharding_strategy: (
        Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] | None
    ) = None
    reshard_after_forward: bool | AtLeastOne | None = None
    data_parallel_shard_degree: Annotated[int, msgspec.Meta(ge=-1)] = -1
    data_parallel_replicate_degree: AtLeastOne | None = None
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "None"] | None = None
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    alloc_retries: bool = False
    checkpoint_outside: bool = False
    no_sync: bool = False
    ends_apart: bool = False
    experts_outside: bool = False
    clip_grad_norm: bool = False
    float8_all_gather: bool = False
    cpu_offload: bool = False
    pcie_bandwidth: str | None = None
    dram_bandwidth: str | None = None
    host_threads: offloading.HostThreads | None = None
    bind_cores: bool = False

    def __post_init__(self) -> None:
        offloading.check_host(self)
        if self.version == 2:
            for name, instead in _ONLY_V1.items():
                if getattr(self, name) != FSDPConfig.__struct_defaults__[FSDPConfig.__struct_fields__.index(name)]:
                    raise ValueError(f"{name} belongs to version = 1 (FSDP1); {instead}")
        elif self.reshard_after_forward is not None:
            raise ValueError("reshard_after_forward belongs to version = 2; write sharding_strategy")
        elif self.ends_apart:
            raise ValueError("ends_apart belongs to version = 2, as torchtitan has it")
        if self.checkpoint_outside and (self.blocks_per_unit > 1 or self.min_num_params):
            raise ValueError(
                "checkpoint_outside has units inside of a block; leave out blocks_per_unit and min_num_params"
            )
        if self.replicated and self.sharding_strategy not in (None, *HYBRID):
            raise ValueError("data_parallel_replicate_degree needs sharding_strategy = 'HYBRID_SHARD'")

    @property
    def state_dtype(self) -> str:
        """What the optimizer's parameters and states are in."""
        return self.orig_dtype

    PLACES: ClassVar[Mapping[str, str]] = {"cpu_offload": "everything"}

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer runs on the host."""
        return self.cpu_offload

    @property
    def replicated(self) -> bool:
        """Whether a replicate degree is asked for."""
        return (self.data_parallel_replicate_degree or 1) > 1

    @property
    def wire_dtype(self) -> str:
        """Element type that is reduced."""
        return self.reduce_dtype or self.param_dtype

    @property
    def keeps(self) -> bool:
        """Whether units stay gathered from forward to backward."""
        if self.version == 2:
            return self.reshard_after_forward is False
        return self.sharding_strategy in {"SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2"}

    @property
    def keeps_root(self) -> bool:
        """Whether the root unit stays gathered: backward begins with it."""
        return self.version == 1 or self.reshard_after_forward in {None, False}

    @property
    def prefetch(self) -> str:
        """When backward issues the next unit's all_gather."""
        return "BACKWARD_PRE" if self.version == 2 else self.backward_prefetch or "BACKWARD_PRE"


_ONLY_V1 = {
    "sharding_strategy": "version 2 writes reshard_after_forward, and data_parallel_replicate_degree for hybrid",
    "backward_prefetch": "version 2 always prefetches as BACKWARD_PRE does",
    "forward_prefetch": "version 2 prefetches implicitly",
    "limit_all_gathers": "version 2 always bounds its all-gathers",
    "alloc_retries": "version 2 gives memory back without events of other streams",
    "checkpoint_outside": "version 2 is played around checkpointed blocks, as torchtitan has it",
}


@dataclass(frozen=True, eq=False)
class FSDPPlan:
    """FSDP on a model and a mesh.

    Parameters
    ----------
    units, segments : of :mod:`clustersim.training.strategies.sharded`. shard : (groups, members), who shares
    parameters. backward : groups of backward's all_gather, smaller after ``reshard_after_forward = n``. replicate :
    (groups, members), who holds the same shard; one member each where nothing is replicated. roots : units that stay
    gathered behind their forward, since backward begins with them. ahead : segments that backward does not reach.
    """

    units: tuple[sharded.ShardUnit, ...]
    segments: sharded.Segments
    shard: Ints
    backward: Ints
    replicate: Ints
    roots: frozenset[int] = frozenset({0})
    ahead: frozenset[int] = frozenset()

    @property
    def degree(self) -> int:
        """Ranks that share a unit."""
        return int(self.shard.shape[1])

    @cached_property
    def first_of(self) -> dict[int, int]:
        """The first segment of each unit that backward reaches, and it reaches that last."""
        return {unit: s for s, (unit, _) in reversed([*enumerate(self.segments)]) if s not in self.ahead}

    @cached_property
    def last_of(self) -> dict[int, int]:
        """The last segment of each unit."""
        return {unit: s for s, (unit, _) in enumerate(self.segments)}


def plan(model: Model, mesh: Mesh, config: FSDPConfig) -> FSDPPlan:
    """Units and groups. Raises :class:`ProgramError` where degrees do not fit the world, and for frozen parts of flat
    parameters."""
    if config.version == 1 and model.partly_frozen:
        raise ProgramError(
            "version = 1 has flat parameters: PyTorch flattens no frozen ones with trained ones, reduces the gradients "
            "of both with use_orig_params, and PEFT's policy wraps each trained layer apart, none of which is played; "
            "use version = 2 (at $.strategy.version)"
        )
    wrapped = sharded.units(
        model.layers,
        config.blocks_per_unit,
        config.min_num_params,
        each=config.version == 2,
        ends_apart=config.ends_apart,
    )
    degree = shard_degree(mesh, config)
    shard = sharded.shard_groups(mesh, degree, "$.strategy.data_parallel_shard_degree")
    backward = shard
    again = config.reshard_after_forward
    if isinstance(again, int) and not isinstance(again, bool):
        if degree % again:
            raise ProgramError(
                f"{degree} sharding ranks do not divide by {again} (at $.strategy.reshard_after_forward)"
            )
        backward = sharded.shard_groups(mesh, again, "$.strategy.reshard_after_forward")
    spans = sharded.segments(len(model.layers), wrapped)
    reached = [any(model.layers[i].has_backward for i in layers) for _, layers in spans]
    ahead = frozenset(s for s, is_reached in enumerate(reached) if not is_reached)
    return FSDPPlan(wrapped, spans, shard, backward, np.ascontiguousarray(shard.T), last_unit(config, spans), ahead)


def last_unit(config: FSDPConfig, spans: sharded.Segments) -> frozenset[int]:
    """Units that stay gathered where the root does: it alone, or with what stands in for its end."""
    return frozenset({0, spans[-1][0]} if config.ends_apart and spans else {0})


def shard_degree(mesh: Mesh, config: FSDPConfig) -> int:
    """Ranks that share a unit's parameters. Raises :class:`ProgramError` for degrees that do not make up the world."""
    world = mesh.world_size
    degree = config.data_parallel_shard_degree
    replicas = config.data_parallel_replicate_degree
    if config.sharding_strategy == "NO_SHARD":
        return 1
    if degree == -1 and replicas is None:
        return mesh.nproc_per_node if config.sharding_strategy in HYBRID else world
    if degree == -1 and replicas and world % replicas == 0:
        return world // replicas
    if degree == -1:
        raise ProgramError(
            f"{world} ranks do not divide into {replicas} replicas (at $.strategy.data_parallel_replicate_degree)"
        )
    if degree < 1 or degree * (replicas or world // max(degree, 1)) != world:
        raise ProgramError(
            f"replicate degree {replicas} times shard degree {degree} is not the {world} ranks of the mesh "
            "(at $.strategy.data_parallel_replicate_degree)"
        )
    if replicas is None and degree != world and config.sharding_strategy not in HYBRID:
        raise ProgramError(
            f"shard degree {degree} leaves {world // degree} replicas; write data_parallel_replicate_degree too "
            "(at $.strategy.data_parallel_shard_degree)"
        )
    return degree


def gathered_bytes(config: FSDPConfig, *, block: bool) -> int:
    """Bytes of an element of a unit's parameters as they are gathered and computed with; embedding and head stay in 16
    bits where blocks have 8."""
    return 1 if config.float8_all_gather and block else DTYPE_BYTES[config.param_dtype]


def gathered_words(config: FSDPConfig) -> str:
    """In which types parameters are gathered.

    >>> gathered_words(FSDPConfig(param_dtype="bf16", float8_all_gather=True))
    'fp8 (all but the root, in bf16)'
    """
    return f"fp8 (all but the root, in {config.param_dtype})" if config.float8_all_gather else str(config.param_dtype)


def unit_bytes(config: FSDPConfig, unit: sharded.ShardUnit, degree: int) -> float:
    """Bytes of a unit as it is gathered: what is trained as it is computed with, what is frozen as it is kept, if that
    is less."""
    trained = unit.padded(degree) * gathered_bytes(config, block=unit.is_block)
    return float(trained + unit.frozen_bytes(degree, DTYPE_BYTES[config.param_dtype]))


def kept_bytes(config: FSDPConfig, unit: sharded.ShardUnit, degree: int) -> float:
    """Bytes of a unit as its shards are kept, which is what ``cpu_offload`` copies to GPUs: both versions cast there
    (``all_gather_inputs`` of torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``_use_low_precision_shard`` of
    torch/distributed/fsdp/_flat_param.py)."""
    element = element_bytes(config)[2]
    return float(unit.padded(degree) * element + unit.frozen_bytes(degree, element))


def accumulated_bytes(config: FSDPConfig) -> int:
    """Bytes of an element of gradients that stay unsharded over micro-batches: version 2 adds them up in the type of
    their reduction (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``to_accumulated_grad_if_needed``)."""
    return DTYPE_BYTES[config.wire_dtype if config.version == 2 else config.param_dtype]


def element_bytes(config: FSDPConfig) -> tuple[int, int, int]:
    """Bytes of an element as gathered, as reduced, and as kept."""
    return DTYPE_BYTES[config.param_dtype], DTYPE_BYTES[config.wire_dtype], DTYPE_BYTES[config.orig_dtype]
