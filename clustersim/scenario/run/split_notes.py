"""What a run says of a split model: its degrees and schedule, and what is said and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from clustersim.core.texts import data_table
from clustersim.scenario import Scenario
from clustersim.scenario.file.splitting import MEGATRON, cause_of
from clustersim.scenario.run.replicas import replica_config, sharding_zero
from clustersim.training.parallel import ParallelConfig, preset
from clustersim.training.schedules import Schedule
from clustersim.training.strategies.ddp import DDPConfig
from clustersim.training.strategies.fsdp_config import FSDPConfig
from clustersim.training.strategies.zero_config import ZeroConfig

if TYPE_CHECKING:
    from clustersim.scenario.run.split_step import Split

OF_REPLICAS = tuple(data_table("parallel_fields")["replicas"])
"""Fields of Megatron's data parallelism, which ``ddp`` and ZeRO stages 0 and 1 are."""


def split_notes(split: Split) -> Iterator[str]:
    """The degrees and the schedule; then what is said and changes nothing."""
    scenario = split.scenario
    parallel = split.parallel
    mesh = split.mesh
    row = split.schedule
    degrees = " x ".join(f"{name} {mesh.size(name)}" for name in ("tp", "cp", "pp", "dp") if mesh.size(name) > 1)
    experts = f", experts ep {mesh.size('ep')} x etp {mesh.size('etp')}" if mesh.size("ep") > 1 else ""
    pipeline = f"; {row.name}, {len(split.partition.stages[0].chunks)} chunk(s) a rank" * (parallel.pp > 1)
    yield f"parallel: {degrees or 'one rank'}{experts}{pipeline}"
    whole = isinstance(scenario.config, FSDPConfig) or sharding_zero(scenario) is not None
    usual = preset(parallel.framework, {"tp": parallel.tp, "pp": parallel.pp, "ep": parallel.ep})
    plain = ParallelConfig()
    if split.gpu.amd and parallel.ep > 1 and parallel.dispatcher == "flex":
        yield (
            f"dispatcher 'flex': kernels of {parallel.flex_backend} were timed on NVIDIA's GPUs alone; played are "
            "theirs, with a compute unit for an SM (ROCm has Primus-Turbo's port of DeepEP)"
        )
    if typed := _types(scenario):
        yield typed
    if uneven := uneven_groups(scenario, parallel, row):
        yield f"{uneven}; played are PyTorch's rounds"
    for name, need in _needs(row, parallel, whole=whole):
        if getattr(parallel, name) != usual.get(name, getattr(plain, name)):
            yield f"{name} changes nothing here: {need}"
    if not parallel.splits and isinstance(scenario.config, DDPConfig):
        yield _framework(split, scenario.config)
    if isinstance(scenario.config, ZeroConfig):
        yield from scenario.config.notes
    if not whole and (unplayed := _strategy_not_played(scenario)):
        yield f"{', '.join(unplayed)} changes nothing beside a split model, whose replicas are [parallel]'s"


def _types(scenario: Scenario) -> str:
    """In what Megatron's parameters are, where the scenario does not say it."""
    is_said = "strategy.param_dtype" in scenario.changes or "param_dtype" in scenario.table.get("strategy", {})
    dtype = scenario.config.param_dtype
    if is_said or dtype == "fp32" or not isinstance(scenario.config, DDPConfig):
        return ""
    return (
        f"parameters in {dtype} with fp32 copies in the optimizer, as Megatron-LM keeps them (strategy.param_dtype = "
        "'fp32' is autocast)"
    )


def _framework(split: Split, config: DDPConfig) -> str:
    """Whose DDP a whole model is played with, and in what that is not PyTorch's."""
    scenario = split.scenario
    parallel = split.parallel
    made = replica_config(scenario, parallel, split.schedule)
    buckets = "buckets beside backward" if parallel.overlap_grad_reduce else "one bucket behind backward"
    masters = ", fp32 main parameters" if made.copies else ""
    owner = "Megatron-Core" if parallel.framework == MEGATRON else f"Megatron-Core with {parallel.framework}'s defaults"
    cause_text = "" if config.framework else f", since {cause_of(scenario)} (strategy.framework)"
    return f"ddp: that of {owner} ({buckets}, gradients in {made.grad_dtype}{masters}), not PyTorch's{cause_text}"


def _needs(row: Schedule, parallel: ParallelConfig, *, whole: bool) -> Iterator[tuple[str, str]]:
    """Fields that have nothing to work on, and what they need; ``whole``: replicas are FSDP's, or ZeRO 2's and 3's."""
    interleaved = row.name == "interleaved_1f1b"
    beside = parallel.overlap_grad_reduce
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
    played = {
        "kind",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "param_dtype",
        "zero_optimization",
        "framework",
    }
    plain = type(config)()
    unplayed = [name for name in scenario.file.strategy if name not in played]
    return [f"strategy.{name}" for name in unplayed if getattr(config, name) != getattr(plain, name)]


def uneven_groups(scenario: Scenario, parallel: ParallelConfig, row: Schedule) -> str:
    """Why Megatron-LM does not run its interleaved schedule with so many micro-batches; empty where it does.

    Its group is pp where nothing is said, and a rest below pp is a RuntimeError (core/pipeline_parallel/schedules.py,
    ``forward_backward_pipelining_with_interleaving``).
    """
    count = scenario.config.gradient_accumulation_steps
    grouped = parallel.microbatch_group_size_per_vp_stage is not None
    if parallel.framework != MEGATRON or row.name != "interleaved_1f1b" or grouped or count % parallel.pp == 0:
        return ""
    near = max(1, round(count / parallel.pp)) * parallel.pp
    return (
        f"{count} micro-batches on pp = {parallel.pp}: Megatron-LM's interleaved schedule needs a multiple of pp, such "
        f"as {near}, or a microbatch_group_size_per_vp_stage"
    )
