"""DeepSpeed's ``zero_optimization`` block as it is written, and what its defaults mean.

Names and defaults are those of deepspeed/runtime/zero/config.py and offload_config.py. Sizes are *elements*, not bytes.
Keys that do not change what is sent or kept (checkpoint and logging options) are read and left alone; what is not
played is told in the words of the launch files' table (``data/exchange/deepspeed.toml``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal

import msgspec

from clustersim.core.program import DTYPE_BYTES
from clustersim.core.texts import data_table
from clustersim.training.strategies import base, offloading

Count = Annotated[int, msgspec.Meta(ge=0)] | Annotated[float, msgspec.Meta(ge=0)] | str
"""A number of elements; JSON writes ``5e8``. Text is read so that ``"auto"``, which Hugging Face's Trainer replaces,
can be told from a mistake; both are errors."""
Flag = bool | str | None
HF_AUTO = {
    "reduce_bucket_size": "hidden_size squared",
    "stage3_prefetch_bucket_size": "0.9 x hidden_size squared",
    "stage3_param_persistence_threshold": "10 x hidden_size",
}
"""What Hugging Face's integration puts where a configuration says ``"auto"``."""
PREFETCHES = (0, 6)
"""The first release whose stage 3 prefetches as documented (deepspeedai/DeepSpeed pull request 1453)."""


class Offload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``offload_param`` and ``offload_optimizer``: where parameters or optimizer states live.

    Parameters
    ----------
    device : ``cpu`` or ``none``.
    pin_memory : whether memory is page-locked; copies of other memory are as fast as a thread moves it.
    ratio : of an optimizer's states that are on the host; refused below 1 in stage 3, which alone reads it.
    super_offload : refused where true.
    others : read as DeepSpeed does, without effect here.
    """

    device: Literal["none", "cpu", "nvme"] | None = "none"
    nvme_path: str | None = None
    buffer_count: int = 5
    buffer_size: float = 1e8
    max_in_cpu: float = 1e9
    pin_memory: bool = False
    pipeline: bool = False
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: float = 0.8

    def __post_init__(self) -> None:
        if self.device == "nvme":
            raise ValueError("device 'nvme' is not played; use 'cpu' or 'none'")
        if self.on and self.super_offload:
            raise ValueError(
                "super_offload = true is not played: leave it out for an optimizer that runs after backward"
            )

    @property
    def on(self) -> bool:
        """Whether anything is on the host."""
        return self.device == "cpu"


class LocoParam(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``zeropp_loco_param``: errors of quantized gradients that are added to the next ones (LoCo).

    Parameters
    ----------
    err_beta, reset_T : how errors are averaged, and after how many steps they are forgotten; without effect here.
    """

    err_beta: float = 0.8
    reset_T: int = 1024


class ZeroOptimization(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The block.

    Parameters
    ----------
    stage : 1 shards optimizer states, 2 gradients too, 3 parameters too.
    reduce_bucket_size : gradients that are reduced together. allgather_bucket_size : parameters gathered together
        after a step of stages 1 and 2. overlap_comm : reduce beside backward; true for stage 3 only when absent.
    reduce_scatter, use_multi_rank_bucket_allreduce : both true (the defaults) all-reduce each bucket, of which every
        rank keeps its part; without the second, each part is reduced to its owner.
    contiguous_gradients : gradients are copied into the bucket as they are made.
    stage3_prefetch_bucket_size : parameters gathered ahead. stage3_param_persistence_threshold : smaller tensors stay.
    stage3_max_live_parameters, stage3_max_reuse_distance : bounds on what is gathered, and kept until its next use.
    zero_hpz_partition_size : backward gathers from a second copy, shared by so many ranks (ZeRO++).
    offload_param, offload_optimizer : what lives on the host.
    zero_quantized_weights, zero_quantized_gradients : int8 all_gather, int4 all_to_all in two hops (ZeRO++).
    sub_group_size : elements that stage 3 updates together, without effect here: played is one update, and a note says
        so where DeepSpeed makes several.
    others : read as DeepSpeed does, without effect here; a run says so of what has one in DeepSpeed.
    mics_shard_size : refused where above 0. legacy_stage1 : refused where true.
    """

    stage: Literal[0, 1, 2, 3] = 0
    contiguous_gradients: Flag = True
    reduce_scatter: Flag = True
    reduce_bucket_size: Count = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: Count = 500_000_000
    overlap_comm: Flag = None
    offload_param: Offload | None = None
    offload_optimizer: Offload | None = None
    sub_group_size: Count = 1_000_000_000
    stage3_prefetch_bucket_size: Count = 50_000_000
    stage3_param_persistence_threshold: Count = 100_000
    stage3_model_persistence_threshold: Count | None = None
    stage3_max_live_parameters: Count = 1_000_000_000
    stage3_max_reuse_distance: Count = 1_000_000_000
    zero_hpz_partition_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    zero_quantized_weights: bool = False
    zero_quantized_gradients: bool = False
    zero_quantized_nontrainable_weights: bool = False
    # Read and left alone.
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    cpu_offload_use_pin_memory: bool | None = None
    stage3_gather_16bit_weights_on_model_save: Flag = False
    stage3_gather_fp16_weights_on_model_save: Flag = False
    stage3_module_granularity_threshold: Count = 0
    stage3_use_all_reduce_for_fetch_params: bool = False
    stage3_allgather_sequential: bool = False
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: Flag = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    zeropp_loco_param: LocoParam | None = None
    mics_shard_size: int = -1
    mics_hierarchical_params_gather: bool = False

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) == "auto":
                filled = f" (it would put {HF_AUTO[name]})" if name in HF_AUTO else f" of {', '.join(HF_AUTO)} alone"
                raise ValueError(f"{name} = 'auto' is filled in by Hugging Face's Trainer{filled}; write the value")
            if isinstance(getattr(self, name), str):
                raise ValueError(f"{name} = {getattr(self, name)!r}: write a number of elements, or true or false")
        if self.stage == 0:
            raise ValueError("stage 0 is plain data parallelism: use kind = 'ddp', or a stage of 1, 2 or 3")
        if self.legacy_stage1:
            raise ValueError("legacy_stage1 = true is the stage 1 of DeepSpeed before 0.5.9, not played; leave it out")
        if self.mics_shard_size > 0:
            raise ValueError("mics_shard_size (MiCS) is not played; fsdp with a replicate degree is the same idea")
        if self.reduce_bucket_size == 0:
            raise ValueError("reduce_bucket_size = 0: write how many elements are reduced together, such as 5e8")

    @property
    def overlaps(self) -> bool:
        """Whether reductions run beside backward: only stage 3 does so by default."""
        return self.stage == 3 if self.overlap_comm is None else bool(self.overlap_comm)

    def unplayed(self) -> Iterator[str]:
        """Of each field that is set and not played: what is played instead."""
        reasons = data_table("exchange/deepspeed")["unplayed"]
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if value in (None, field.default):
                continue
            name = f"zero_optimization.{field.name}"
            for glob, instead in reasons.items():
                if fnmatchcase(f"{name}={value}" if "=" in glob else name, glob):
                    yield f"zero: {field.name} is not played: {instead}"


class ZeroConfig(base.StrategyConfig, frozen=True, tag_field="kind", tag="zero"):
    """Knobs of DeepSpeed's ZeRO.

    Parameters
    ----------
    zero_optimization : DeepSpeed's own block; stage 1 when absent. gradient_clipping : the largest norm; 0 for none.
    version : DeepSpeed's release, such as "0.5.8"; the newest when absent. Before 0.6 stage 3 gathers nothing ahead and
        nothing beside compute.
    param_dtype : of parameters and gradients; 16-bit ones have fp32 masters in the optimizer.
    pcie_bandwidth : of one GPU in one direction; what copies reach of the machine's own links, all GPUs at once, if
        absent. dram_bandwidth : what all ranks of a node read and write of its memory; what their threads do if absent.
    host_threads : of a rank, for what it does on the host (OMP_NUM_THREADS), or "all": one a core, as the deepspeed
        launcher leaves it; one where a node has several ranks, as torchrun and accelerate set it, and else all cores
        if absent.
    bind_cores : each rank has cores of its own, all of which work for it (``deepspeed --bind_cores_to_rank``).
    """

    zero_optimization: ZeroOptimization = ZeroOptimization(stage=1)
    gradient_clipping: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    version: Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+(\.\d+)?$")] | None = None
    pcie_bandwidth: str | None = None
    dram_bandwidth: str | None = None
    host_threads: offloading.HostThreads | None = None
    bind_cores: bool = False

    def __post_init__(self) -> None:
        offloading.check_host(self)
        block = self.zero_optimization
        parameters_away = block.offload_param is not None and block.offload_param.on
        if parameters_away and block.stage < 3:
            raise ValueError("zero_optimization.offload_param needs stage 3: smaller stages keep parameters whole")
        ratio = 1.0 if block.offload_optimizer is None else block.offload_optimizer.ratio
        if self.offloads_optimizer and block.stage == 3 and ratio < 1:
            raise ValueError(
                f"zero_optimization.offload_optimizer.ratio = {ratio:g}: an optimizer that is in part on the GPU "
                "(ZeRO-Offload++) is not played; use 1, or no offload_optimizer"
            )

    @property
    def state_dtype(self) -> str:
        """What the optimizer's parameters and states are in."""
        return "fp32"

    @property
    def prefetches(self) -> bool:
        """Whether stage 3 gathers parameters ahead of their use, beside compute."""
        return self.version is None or tuple(map(int, self.version.split(".")[:2])) >= PREFETCHES

    PLACES: ClassVar[Mapping[str, str]] = {
        "zero_optimization.offload_optimizer.device": "optimizer",
        "zero_optimization.offload_param.device": "parameters",
    }

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer runs on the host."""
        away = self.zero_optimization.offload_optimizer
        return away is not None and away.on

    def pins(self, block: Literal["offload_optimizer", "offload_param"]) -> bool:
        """Whether what this block keeps on the host is page-locked."""
        away: Offload | None = getattr(self.zero_optimization, block)
        return away is not None and away.pin_memory

    @property
    def away_bytes(self) -> float:
        """Bytes that an element has on the host beside its optimizer states: with the optimizer its gradient and its
        master in fp32, with parameters the parameter.

        Stage 3 has a master beside 16-bit parameters alone, and the gradient in the parameters' type too
        (deepspeed/runtime/zero/stage3.py, ``fp32_partitioned_groups_flat``, ``grad_partitions_flat_buffer``). Stages 1
        and 2 have one beside any, a copy in the parameters' own type on its way back to the GPU, and one of the
        gradients where they are accumulated (stage_1_and_2.py of 02aa38c3, ``single_partition_of_fp32_groups``,
        ``param_buffer_of_bit16_for_cpu_offload_groups``, ``accumulated_grads_in_cpu``)."""
        size = DTYPE_BYTES[self.param_dtype]
        if self.zero_optimization.stage < 3:
            copies = 1 + (self.gradient_accumulation_steps > 1)
            return (4.0 + 4.0 + size * copies) * self.offloads_optimizer
        states = (4.0 + 4.0 * (size < 4) + size) * self.offloads_optimizer
        return states + size * self.offloads_parameters

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not played, and what is assumed of any stage."""
        texts = [*self.zero_optimization.unplayed()]
        if not self.offloads:
            return tuple(texts)
        texts.append("zero: copies to and from the host are streams of their own, at one rate whoever copies")
        away = (self.zero_optimization.offload_optimizer, self.zero_optimization.offload_param)
        if self.pcie_bandwidth is None and any(part is not None and part.on and not part.pin_memory for part in away):
            texts.append(
                "zero: without pin_memory = true copies are of pageable memory, as fast as one thread moves it"
            )
        if self.zero_optimization.stage < 3:
            texts.append(
                "zero: while it starts, every rank of a node has all parameters on the host twice, in their own type, "
                "before they are shared out: host memory is that of the steps after it"
            )
        return tuple(texts)

    @property
    def offloads_parameters(self) -> bool:
        """Whether shards live on the host."""
        away = self.zero_optimization.offload_param
        return away is not None and away.on

    @property
    def offloads(self) -> bool:
        """Whether optimizer or parameters live on the host."""
        return self.offloads_optimizer or self.offloads_parameters


def elements(value: int | float | str) -> int:
    """A checked :data:`Count` as a number."""
    return int(float(value))
