"""A split in words, and which settings have nothing to work on in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from clustersim.parallel import ParallelConfig, preset
from clustersim.scenario.replicas import sharding_zero
from clustersim.schedules import Schedule
from clustersim.strategies.fsdp_config import FSDPConfig

if TYPE_CHECKING:
    from clustersim.scenario import Scenario
    from clustersim.scenario.split_step import Split

OF_REPLICAS = (
    "use_distributed_optimizer", "num_distributed_optimizer_instances", "overlap_grad_reduce", "overlap_param_gather",
    "align_grad_reduce", "ddp_bucket_size", "ddp_num_buckets", "optimizer_post_validation",
)  # fmt: skip
"""Fields of Megatron's data parallelism, which ``ddp`` and ZeRO stages 0 and 1 are."""


def told(split: Split) -> Iterator[str]:
    """The degrees and the schedule; then what is said and changes nothing."""
    scenario, parallel, mesh, row = split.scenario, split.parallel, split.mesh, split.schedule
    degrees = " x ".join(f"{name} {mesh.size(name)}" for name in ("tp", "cp", "pp", "dp") if mesh.size(name) > 1)
    experts = f", experts ep {mesh.size('ep')} x etp {mesh.size('etp')}" if mesh.size("ep") > 1 else ""
    pipeline = f"; {row.name}, {len(split.partition.stages[0].chunks)} chunk(s) a rank" * (parallel.pp > 1)
    yield f"parallel: {degrees or 'one rank'}{experts}{pipeline}"
    whole = isinstance(scenario.config, FSDPConfig) or sharding_zero(scenario) is not None
    usual = preset(parallel.framework, {"tp": parallel.tp, "pp": parallel.pp, "ep": parallel.ep})
    plain = ParallelConfig()
    for name, need in _needs(row, parallel, whole=whole):
        if getattr(parallel, name) != usual.get(name, getattr(plain, name)):
            yield f"{name} changes nothing here: {need}"
    if not whole and (said := _strategy_not_played(scenario)):
        yield f"{', '.join(said)} changes nothing beside a split model, whose replicas are [parallel]'s"


def _needs(row: Schedule, parallel: ParallelConfig, *, whole: bool) -> Iterator[tuple[str, str]]:
    """Fields that have nothing to work on, and what they need; ``whole``: replicas are FSDP's, or ZeRO 2's and 3's."""
    interleaved, beside = row.name == "interleaved_1f1b", parallel.overlap_grad_reduce
    group = "microbatch_group_size_per_vp_stage"
    if all(option.name != group for option in row.options):
        yield group, f"schedule {row.name!r} has no groups"
    if not interleaved:
        for name in ("overlap_p2p_communication", "overlap_p2p_communication_warmup_flush"):
            yield name, f"it is the interleaved schedule's, not that of {row.name!r}"
    if whole:
        for name in OF_REPLICAS:
            yield name, "the replicas are the strategy's own"
    else:
        if not (interleaved and beside):
            yield "align_grad_reduce", "it needs an interleaved schedule and overlap_grad_reduce"
        if not beside:
            yield "ddp_bucket_size", "without overlap_grad_reduce a chunk has one bucket"
            yield "ddp_num_buckets", "without overlap_grad_reduce a chunk has one bucket"
    if parallel.dispatcher != "flex":
        yield "flex_backend", f"dispatcher is {parallel.dispatcher!r}"
    if parallel.capacity_factor is None:
        yield "min_capacity", "it needs a capacity_factor"
        yield "drop_tokens", "it needs a capacity_factor"
    if not parallel.defer_embedding_wgrad_compute:
        yield "wgrad_deferral_limit", "it needs defer_embedding_wgrad_compute"
    if parallel.cp == 1:
        yield "cp_comm_type", "cp is 1"
        yield "cp_load_balancer", "cp is 1"


def _strategy_not_played(scenario: Scenario) -> list[str]:
    """Of DDP's and ZeRO's own knobs, those that are set: beside a split model Megatron's hold, of ``[parallel]``."""
    config = scenario.config
    played = {"kind", "micro_batch_size", "gradient_accumulation_steps", "param_dtype", "zero_optimization"}
    plain = type(config)()
    said = [name for name in scenario.file.strategy if name not in played]
    return [f"strategy.{name}" for name in said if getattr(config, name) != getattr(plain, name)]
