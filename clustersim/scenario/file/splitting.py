"""``[parallel]`` of a scenario: read by anybody's names, checked against model and machine, made into a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from clustersim.core.errors import ScenarioError
from clustersim.core.mesh import Mesh
from clustersim.scenario import Scenario
from clustersim.scenario.file.reading import Changes, Table, override
from clustersim.training.parallel import ModelShape, ParallelConfig, check, field_for, preset, recompute, translate
from clustersim.training.schedules import schedule
from clustersim.training.strategies.walk import accumulation

DEGREES = {"dp_shard": "data_parallel_shard_degree", "dp_replicate": "data_parallel_replicate_degree"}
"""The data-parallel degrees, as a mesh has them and as FSDP's own knobs say them."""
PLAYED = ("recompute_granularity", "use_distributed_optimizer", "overlap_grad_reduce", "schedule", "schedule_csv")
"""Settings that change a step even where every degree is 1; a schedule only where it is not :func:`accumulates`."""
PYTORCH = "pytorch"
MEGATRON = "megatron"
"""Frameworks whose DDP is played, as ``strategy.framework`` names them."""
BESIDE = ("ddp", "zero", "fsdp")
"""Strategies whose data-parallel ranks may hold a part of a model."""


def own_names(table: Table, changes: Changes) -> tuple[Table, Changes]:
    """The tables, and what ``--set`` changes, with ``[parallel]`` in its own names and other tables' fields moved.

    Raises :class:`ScenarioError` where two names say different things, in the file or between it and another table.
    """
    if isinstance(table.get("parallel"), dict):
        fields, elsewhere = translate(table["parallel"])
        for name, value in elsewhere.items():
            if (own_value := _at(table, name)) not in {None, value}:
                raise ScenarioError(
                    f"{name} = {own_value!r}, and [parallel] says {value!r}; write it once, in its own table (at "
                    f"$.{name})"
                )
        table = override(table | {"parallel": fields}, elsewhere)
    # A field under its own name is of the same source as what was written.
    return table, {
        type(name)(key): value for name, change in changes.items() for key, value in _change(name, change).items()
    }


def _change(name: str, value: object) -> Changes:
    table, _, field = name.partition(".")
    if name == "parallel" and isinstance(value, Mapping):
        fields, elsewhere = translate(dict(value))
        return {name: fields} | elsewhere
    if table != "parallel" or field.split(".")[0] == "routing" != field:
        return {name: value}
    fields, elsewhere = translate({field: value})
    return {f"parallel.{key}": meant for key, meant in fields.items()} | elsewhere


def _at(table: Any, name: str) -> Any:
    for part in name.split("."):
        table = table.get(part) if isinstance(table, dict) else None
    return table


def filled(table: Table) -> Table:
    """The tables with the framework's defaults where ``[parallel]`` says nothing, and FSDP's degrees said in both.

    Raises :class:`ScenarioError` where ``[parallel]`` and ``[strategy]`` have different data-parallel degrees.
    """
    parallel = table.get("parallel")
    strategy = table.get("strategy")
    if parallel is None and isinstance(strategy, dict) and strategy.get("framework") == MEGATRON:
        parallel = {}  # whose fields its data parallelism goes by
    if not isinstance(parallel, dict) or not isinstance(strategy, dict):
        return table
    strategy = _in_megatrons_types(table, parallel, strategy)
    parallel = {**preset(str(parallel.get("framework", "megatron")), parallel), **parallel}
    if strategy.get("kind") == "fsdp":
        if parallel.get("framework") == "torchtitan" and strategy.get("version", 2) == 2:
            strategy = {"ends_apart": True} | strategy
        for own_field, degree in DEGREES.items():
            parallel_degree = parallel.get(own_field)
            strategy_degree = strategy.get(degree)
            if parallel_degree is not None and strategy_degree is not None and parallel_degree != strategy_degree:
                raise ScenarioError(
                    f"parallel.{own_field} = {parallel_degree!r} and strategy.{degree} = {strategy_degree!r} "
                    f"contradict each other; say one (at $.parallel.{own_field})"
                )
            if parallel_degree is not None or strategy_degree is not None:
                parallel[own_field] = strategy_degree if parallel_degree is None else parallel_degree
                strategy = strategy | {degree: parallel[own_field]}
    elif isinstance(parallel.get("dp_shard"), int) and parallel["dp_shard"] > 1:
        raise ScenarioError(
            f"dp_shard = {parallel['dp_shard']} shares parameters out over data-parallel ranks, which strategy "
            f"{strategy.get('kind')!r} does not; use strategy 'fsdp' (at $.parallel.dp_shard)"
        )
    return table | {"parallel": parallel, "strategy": strategy}


def _in_megatrons_types(table: Table, parallel: Table, strategy: Table) -> Table:
    """``[strategy]`` with the parameters' type that Megatron's DDP has where nothing is said: that of its products,
    with fp32 copies in the optimizer (Megatron-LM core/transformer/module.py, ``Float16Module``); 8-bit products read
    16-bit parameters."""
    model = table.get("model")
    dtype = model.get("dtype") if isinstance(model, dict) else None
    framework = str(parallel.get("framework", MEGATRON))
    if strategy.get("kind") != "ddp" or framework != MEGATRON or strategy.get("param_dtype") is not None:
        return strategy
    split = any(parallel.get(name) not in (None, 1) for name in ("tp", "pp", "cp", "ep", "layout"))
    if dtype not in ("fp16", "bf16", "fp8") or not (split or "framework" in parallel or cause(parallel, strategy)):
        return strategy
    return strategy | {"param_dtype": "bf16" if dtype == "fp8" else dtype}


def misplaced(strategy: Changes, config_type: type[msgspec.Struct]) -> None:
    """Raise :class:`ScenarioError` for a field of ``[parallel]`` that is written in ``[strategy]``."""
    for name, value in strategy.items():
        home = None if name in {"kind", *config_type.__struct_fields__} else field_for(name)
        if home is not None and home.startswith("parallel."):
            raise ScenarioError(
                f"{name} = {value!r} is no field of a strategy; it belongs in the table [parallel]: write {home} "
                f"(at $.strategy.{name})"
            )


def split(scenario: Scenario, parallel: ParallelConfig, mesh: Mesh, shape: ModelShape) -> Mesh:
    """The mesh with the dimensions of ``[parallel]``, whose fields are checked against the model and the world.

    Raises :class:`ScenarioError`.
    """
    with scenario.at("$.parallel"):
        _check_strategy(scenario, parallel)
        recompute(parallel, scenario.file.model.activation_checkpointing)
        check(parallel, shape, mesh.workers)
        return dataclasses.replace(mesh, dims=parallel.dims(mesh.workers))


def _check_strategy(scenario: Scenario, parallel: ParallelConfig) -> None:
    """Whether the data-parallel ranks can do what they do beside a split model."""
    kind = scenario.strategy.name
    framework = getattr(scenario.config, "framework", None)
    if framework == PYTORCH and splits(scenario):
        cause = "[parallel] splits it" if parallel.splits else f"{cause_of(scenario)} is not PyTorch's"
        raise ScenarioError(
            f"framework = 'pytorch': its DDP is played of a whole model as it is, and {cause}; use 'megatron' "
            "(at $.strategy.framework)"
        )
    if framework == MEGATRON and parallel.framework != MEGATRON:
        raise ScenarioError(
            f"framework = 'megatron' and parallel.framework = {parallel.framework!r} contradict each other; say one "
            "(at $.strategy.framework)"
        )
    if splits(scenario) and kind not in BESIDE:
        raise ScenarioError(
            f"strategy {kind!r} has a whole model on every worker, which [parallel] splits; use 'ddp', 'zero' or "
            "'fsdp' (at $.strategy.kind)"
        )
    zero = getattr(scenario.config, "zero_optimization", None)
    if zero is not None and parallel.pp > 1 and zero.stage > 1:
        raise ScenarioError(
            f"ZeRO stage {zero.stage} with pp = {parallel.pp}: it gives gradients away after every micro-batch, and a "
            "pipeline's stage adds them up until its last, so that DeepSpeed refuses both together; use stage 0 or 1, "
            "or pp = 1 (at $.strategy.zero_optimization.stage)"
        )


def with_micro_batches(scenario: Scenario, mesh: Mesh) -> Scenario:
    """The scenario with as many ``gradient_accumulation_steps`` as ``[parallel]`` has micro-batches."""
    parallel = scenario.file.parallel
    config = scenario.config
    if parallel is None:
        return scenario
    with scenario.at("$.parallel"):
        count = parallel.micro_batches(mesh.size("dp"), config.micro_batch_size, config.gradient_accumulation_steps)
    return dataclasses.replace(scenario, config=msgspec.structs.replace(config, gradient_accumulation_steps=count))


def splits(scenario: Scenario) -> bool:
    """Whether the step builder plays it: something is split, or done as no rank with a whole model does it."""
    parallel = scenario.file.parallel
    return parallel is not None and (parallel.splits or bool(cause_of(scenario)))


def ddp_of(scenario: Scenario) -> str | None:
    """Whose DDP a scenario plays, as ``strategy.framework`` names it; None for another strategy or framework."""
    parallel = scenario.file.parallel
    if scenario.strategy.name != "ddp":
        return None
    if parallel is None or not splits(scenario):
        return PYTORCH
    return MEGATRON if parallel.framework == MEGATRON else None


def cause_of(scenario: Scenario) -> str:
    """:func:`cause` of a scenario."""
    parallel = msgspec.structs.asdict(scenario.file.parallel or ParallelConfig())
    return cause(parallel, scenario.file.strategy)


def cause(parallel: Changes, strategy: Changes) -> str:
    """The setting, ``"parallel.schedule = 'gpipe'"``, for which the step builder plays even a whole model; empty where
    there is none, and the tables change nothing."""
    for name in PLAYED:
        value = parallel.get(name)
        if value and not (name == "schedule" and accumulates(str(value))):
            return f"parallel.{name} = {value!r}"
    framework = strategy.get("framework")
    return f"strategy.framework = {framework!r}" if framework == MEGATRON else ""


@lru_cache(maxsize=64)
def accumulates(name: str) -> bool:
    """Whether a schedule of one stage is what a whole model plays anyway: forward and backward of each micro-batch in
    turn, and an update behind the last.

    >>> accumulates("1F1B"), accumulates("gpipe")
    (True, False)
    """
    try:
        row = schedule(name)
        return row.synchronous and all(row.order(1, 1, count)[0] == accumulation(count) for count in (1, 2, 3))
    except ScenarioError:  # whoever plays it says what is wrong
        return False
