"""A scenario with ``[parallel]``: what each stage holds, the step it plays, the memory of every stage, and which
settings have nothing to work on in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from clustersim.core.device import Device
from clustersim.core.errors import ScenarioError
from clustersim.core.memory_use import MemoryUse
from clustersim.core.mesh import Mesh
from clustersim.core.model import Model, StepCost
from clustersim.core.program import Program
from clustersim.core.texts import Table
from clustersim.model.seconds.base import BLOCKS, setting
from clustersim.model.seconds.host import STREAMS, HostLaw, bookkeeping, host_level
from clustersim.model.seconds.local import LocalCost
from clustersim.scenario import Scenario
from clustersim.scenario.file.schema import WHOLE_STEP
from clustersim.scenario.file.splitting import MEGATRON
from clustersim.scenario.run.frozen import check_frozen, check_reached
from clustersim.scenario.run.parts import execution_of, layer_time_of, located
from clustersim.scenario.run.replicas import (
    activations,
    check_replicas,
    replicas,
    stage_memory,
    summed_bytes,
)
from clustersim.scenario.run.split_notes import split_notes, uneven_groups
from clustersim.training.builder import StepRecipe, build
from clustersim.training.parallel import ParallelConfig, Recompute, recompute
from clustersim.training.partition import partition
from clustersim.training.partition.base import Partition, Work
from clustersim.training.partition.kept import LINEAR_BYTES, with_linears_in_8_bits
from clustersim.training.partition.routing import read_histogram
from clustersim.training.schedules import Order, Orders, PassCosts, Schedule, beside, from_csv, schedule
from clustersim.training.schedules.playable import check_own

PARTIAL = "num_microbatches_with_partial_activation_checkpoints"


@dataclass(frozen=True, eq=False)
class Split:
    """A split model, ready to be played.

    scenario, parallel, mesh : whose it is. partition : what each stage holds.
    schedule, orders : what each pipeline rank runs in a step. gpu : of the ranks.
    """

    scenario: Scenario
    parallel: ParallelConfig
    mesh: Mesh
    partition: Partition
    schedule: Schedule
    orders: Orders
    gpu: Device

    @cached_property
    def memory(self) -> tuple[MemoryUse, ...]:
        """Of one rank of each stage: a walk over every pass, which who asks for the time alone need not wait for."""
        return stage_memory(self)

    @property
    def worst(self) -> int:
        """The stage that needs most memory; the first of equal ones."""
        return int(np.argmax([use.total for use in self.memory]))

    def resized(self, size: int) -> Split:
        """The same stages and schedule with micro-batches of ``size`` samples."""
        config = msgspec.structs.replace(self.scenario.config, micro_batch_size=size)
        return replace(self, scenario=replace(self.scenario, config=config))


def split_of(scenario: Scenario, parallel: ParallelConfig, mesh: Mesh, model: Model, gpu: Device) -> Split:
    """Partition, schedule and memory. Raises :class:`ScenarioError` for what cannot be split so.

    ``gpu`` : of the ranks, whose kernel times a schedule that is found by search reckons with.
    """
    _check_kernels_of_experts(parallel, gpu)
    parts, row = parts_of(scenario, parallel, mesh, model)
    orders = orders_of(scenario, parallel, parts, row, gpu)
    if (count := getattr(parallel, PARTIAL)) is not None:
        if row.name not in {"1f1b", "interleaved_1f1b"}:
            raise ScenarioError(
                f"{PARTIAL} = {count} counts the micro-batches in flight of schedule '1f1b' or 'interleaved_1f1b', not "
                f"{row.name!r} (at $.parallel.{PARTIAL})"
            )
        again, _ = parts_of(scenario, parallel, mesh, model, Recompute("full"))
        parts = _partly_recomputed(parts, again, orders, count)
    return Split(scenario, parallel, mesh, parts, row, orders, gpu)


BEFORE_HOPPER = ("sm3", "sm5", "sm6", "sm7", "sm8")
"""Beginnings of generations of NVIDIA's without bulk copies of shared memory (TMA)."""


def _check_kernels_of_experts(parallel: ParallelConfig, gpu: Device) -> None:
    """Raise :class:`ScenarioError` for HybridEP where it does not run: it moves tokens by Hopper's bulk copies
    (deepseek-ai/DeepEP branch hybrid-ep, csrc/hybrid_ep/backend: ``cp_async_bulk``)."""
    if parallel.ep == 1 or parallel.dispatcher != "flex" or parallel.flex_backend != "hybridep":
        return
    if gpu.amd or gpu.arch.startswith(BEFORE_HOPPER):
        raise ScenarioError(
            f"flex_backend = 'hybridep' needs the bulk copies (TMA) of NVIDIA's Hopper and later, which {gpu.name} "
            "has not; use 'deepep', or dispatcher = 'alltoall' (at $.parallel.flex_backend)"
        )


def _partly_recomputed(partly: Partition, every: Partition, orders: Orders, count: int) -> Partition:
    """The partition ``partly``, whose stages pass the micro-batches that ``count`` leaves over as those of ``every``,
    which recomputes all layers. ``count`` : micro-batches of each window that recompute some; 0 is none.

    A stage holds as many activations as its warm-up has forwards, later stages fewer, and keeps what it has room for
    (Megatron-LM core/pipeline_parallel/schedules.py; Korthikanti et al., arXiv:2205.05198, appendix C).
    """
    pairs = zip(partly.stages, every.stages, orders, strict=True)
    stages = tuple(replace(stage, again=all_.chunks, repeated=beyond(order, count)) for stage, all_, order in pairs)
    return replace(partly, stages=stages)


def beyond(order: Order, count: int) -> frozenset[tuple[int, int]]:
    """(micro-batch, chunk) of the forwards that are not among the first ``count`` of their window, which is as many as
    may be in flight: those ahead of the first backward.

    >>> from clustersim.training.schedules.notation import parse
    >>> sorted(beyond(parse("F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"), 2))
    [(2, 0)]
    """
    kinds = [(action.kind, action.microbatch, action.chunk) for slot in order for action in slot]
    window = next((i for i, action in enumerate(kinds) if action[0] != "F"), len(kinds))
    forwards = [action[1:] for action in kinds if action[0] == "F"]
    return frozenset(action for i, action in enumerate(forwards) if i % window >= count)


def parts_of(
    scenario: Scenario, parallel: ParallelConfig, mesh: Mesh, model: Model, repeated: Recompute | None = None
) -> tuple[Partition, Schedule]:
    """Stages and schedule, which micro-batches do not change. Raises as :func:`split_of`.

    ``repeated`` : what backward recomputes, as the scenario says when None.
    """
    check_replicas(scenario, parallel)
    row = _schedule(scenario, parallel, model)
    repeats = repeated or recompute(parallel, scenario.file.model.activation_checkpointing)
    if model.partly_frozen:
        check_frozen(scenario, parallel, repeats)
    parts = partition(
        _as_linears_keep(scenario, parallel, model),
        parallel,
        repeats,
        placement=row.placement,
        nproc_per_node=mesh.nproc_per_node,
        nproc_per_domain=mesh.nproc_per_domain,
        histograms=_histograms(scenario, parallel.routing.file),
    )
    if model.partly_frozen:
        check_reached(parts)
    return parts, row


def _as_linears_keep(scenario: Scenario, parallel: ParallelConfig, model: Model) -> Model:
    """The model with what linears keep in 8 bits: Transformer Engine's, which Megatron has for all of them."""
    how = scenario.file.model
    if how.dtype != "fp8" or parallel.framework != "megatron" or parallel.float8_activations:
        return model
    return with_linears_in_8_bits(model, how.float8_recipe) if how.float8_recipe in LINEAR_BYTES else model


def _histograms(scenario: Scenario, file: str | None) -> tuple[tuple[float, ...], ...]:
    if file is None:
        return ()
    with scenario.at("$.parallel.routing.file"):
        return read_histogram(Path(located(scenario, "parallel.routing.file", file)))


def orders_of(scenario: Scenario, parallel: ParallelConfig, parts: Partition, row: Schedule, gpu: Device) -> Orders:
    """What each pipeline rank runs, for as many micro-batches as the scenario has."""
    config = scenario.config
    uneven = uneven_groups(scenario, parallel, row)
    if uneven and _says_framework(scenario):
        raise ScenarioError(f"{uneven} (at $.parallel.microbatches)")
    chunks = len(parts.stages[0].chunks)
    options = _options(row, parallel)
    if any(option.name == "costs" for option in row.options):
        options["costs"] = _chunk_costs(parts, local_cost(scenario, gpu))
    if not row.synchronous:
        options["steps"] = scenario.steps
    orders = row.order(parallel.pp, chunks, config.gradient_accumulation_steps, **options)
    played_steps = 1 if row.synchronous else scenario.steps
    check_own(row, orders, parallel.pp, config.gradient_accumulation_steps * played_steps, chunks)
    return tuple(beside(order) for order in orders) if parallel.ep_overlap else orders


def _says_framework(scenario: Scenario) -> bool:
    """Whether the scenario names the framework of its ``[parallel]``."""
    return "parallel.framework" in scenario.changes or "framework" in scenario.table.get("parallel", {})


def _schedule(scenario: Scenario, parallel: ParallelConfig, model: Model) -> Schedule:
    if parallel.schedule_csv is not None:
        with scenario.at("$.parallel.schedule_csv"):
            return from_csv(located(scenario, "parallel.schedule_csv", parallel.schedule_csv))
    return schedule(parallel.schedule_name(model.n_blocks or len(model.layers)))


def recipe_of(split: Split, cost: StepCost) -> StepRecipe:
    """What the step builder makes a Program of a split model from."""
    scenario = split.scenario
    parallel = split.parallel
    row = split.schedule
    count = scenario.config.gradient_accumulation_steps
    return StepRecipe(
        split.partition,
        split.orders,
        row.placement,
        _messages(parallel, row),
        activations(scenario),
        replicas(split, cost),
        0 if row.synchronous else count,
        row.accumulates,
        parallel.variable_seq_lengths,
        parallel.deferral(count) * row.synchronous,
    )


def program_of(split: Split, gpu: Device, cost: StepCost) -> Program:
    """The Program of a split model."""
    scenario = split.scenario
    recipe = recipe_of(split, cost)
    seed = scenario.file.run.seed
    program = build(recipe, local_cost(scenario, gpu, cost), cost, split.mesh, scenario.steps, seed)
    return replace(program, notes=(*split_notes(split), *program.notes))


def _options(row: Schedule, parallel: ParallelConfig) -> Table:
    """Of ``[parallel]``'s fields, those that are this schedule's options and are said."""
    fields = {name: getattr(parallel, name) for name in parallel.__struct_fields__}
    fields["overlap_moe_expert_parallel_comm"] = parallel.ep_overlap
    return {option.name: fields[option.name] for option in row.options if fields.get(option.name) is not None}


def _chunk_costs(parts: Partition, local: LocalCost) -> PassCosts:
    """Seconds of F, I and W of the middle chunk, which has neither embedding nor head."""
    chunks = sorted((chunk for stage in parts.stages for chunk in stage.chunks), key=lambda chunk: chunk.stage)
    spent = {"F": 0.0, "R": 0.0, "I": 0.0, "W": 0.0}
    for layer in chunks[len(chunks) // 2].layers:
        dense = local.in_recipe(layer.kind)
        for item in (*layer.forward, *layer.backward):
            if isinstance(item, Work):
                spent[item.part] += local.work(((item.kernels, item.part),), dense=dense).seconds
    return PassCosts(spent["F"], spent["I"] + spent["R"], spent["W"])


def _messages(parallel: ParallelConfig, row: Schedule) -> str:
    """How stages wait for each other: as the framework's plain, interleaved or runtime schedule does.

    OneFlow's actors send what is made while they make the next.
    """
    if parallel.framework in {"torchtitan", "oneflow"} or row.name not in {"1f1b", "gpipe", "interleaved_1f1b"}:
        return "overlapped"
    if row.name == "interleaved_1f1b":
        steady = "overlapped" if parallel.overlap_p2p_communication_warmup_flush else "steady"
        return steady if parallel.overlap_p2p_communication else "batched"
    return "blocking"


def local_cost(scenario: Scenario, gpu: Device, cost: StepCost | None = None) -> LocalCost:
    """Prices of one rank's kernels; with the ``cost`` of a step on its machine also of the host's calls."""
    how = execution_of(scenario)
    with scenario.at("$.model.dtype"):
        where = setting(gpu, how)
    if (parallel := scenario.file.parallel) is not None:
        where = replace(
            where,
            summed_bytes=summed_bytes(scenario, parallel),
            pads_experts=_pads(scenario, parallel),
            expert_streams=STREAMS * _one_by_one(scenario, parallel),
        )
    law = None if cost is None else host_law(scenario, gpu, cost)
    return LocalCost(where, scenario.config.micro_batch_size, how.optimizer, how.optimizer_impl, 4, law)


def _one_by_one(scenario: Scenario, parallel: ParallelConfig) -> bool:
    """Whether each expert has a product of its own, as Transformer Engine's grouped linear has it. A graph of the whole
    step has one kernel for them, unless a capacity says how many rows each takes: nobody else knows at its capture.
    """
    level = host_level(parallel.framework, scenario.file.model.implementation)
    return bool(level.by_expert) and (WHOLE_STEP not in scenario.file.run.cuda_graph or parallel.pad_to_capacity)


def _pads(scenario: Scenario, parallel: ParallelConfig) -> bool:
    """Whether a kernel of their own pads experts' rows: Megatron-Core's TEGroupedMLP does where neither the router nor
    a capacity has done so. It goes by counts that the host has read, of which a graph of the whole step knows none.

    HybridEP's own permutation pads (core/transformer/moe/token_dispatcher.py, ``pad_multiple``), and rows that need no
    more are not copied (Transformer Engine pytorch/module/fp8_padding.py: "no padding needed").
    """
    fused = parallel.framework == "megatron" and scenario.file.model.implementation == "fused"
    counted = WHOLE_STEP not in scenario.file.run.cuda_graph
    padded = parallel.dispatcher == "flex" and parallel.flex_backend == "hybridep" and parallel.ep > 1
    return fused and counted and not (padded or parallel.router_padding or parallel.pad_to_capacity)


def host_law(scenario: Scenario, gpu: Device, cost: StepCost) -> HostLaw | None:
    """What calls take the host of a split model; None where CUDA graphs replay them, and between ranks on CPUs, whose
    operators run where they are called."""
    parallel = scenario.file.parallel
    graphs = scenario.file.run.cuda_graph
    if parallel is None or WHOLE_STEP in graphs or gpu.arch == "cpu":
        return None
    model = scenario.file.model
    scales = ("blocks" if model.float8_recipe in BLOCKS else "tensor") if model.dtype == "fp8" else ""
    level = host_level(parallel.framework, model.implementation, scales=scales)
    seconds = layer_time_of(scenario)
    if not level.call and seconds is None:
        return None
    pace = cost.host_pace
    factor = 1.0 if scenario.fit is None else scenario.fit.host
    return msgspec.structs.replace(
        level,
        call=level.call * pace * factor,
        launch=gpu.launch.value * pace,  # which has the factor in it
        plain=min(level.call, host_level(MEGATRON, "megatron").call) * pace * factor,
        graphs=graphs,
        posts=cost.host_posts,
        layer_time=None if seconds is None else seconds * factor,
        bookkeeping=bookkeeping(
            fused=parallel.router_fusion,
            balance_loss=parallel.load_balancing.endswith("aux_loss"),
            pace=pace,
        ),
    )
