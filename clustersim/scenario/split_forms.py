"""Other ways to split one scenario's model over the same GPUs, with the same samples in a step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from clustersim.parallel import ParallelConfig, preset
from clustersim.scenario.turned import Choice
from clustersim.texts import Table

if TYPE_CHECKING:
    from clustersim.scenario.held import Held
    from clustersim.scenario.split_step import Split

SCHEDULES: tuple[tuple[str, int | None], ...] = (
    ("gpipe", None), ("1f1b", None), ("interleaved_1f1b", 2), ("zb_h1", None), ("zb_2p", None), ("zbv", 2),
)  # fmt: skip
"""Schedules worth a row each, and the chunks of a rank that they are shown with."""
OF_A_SCHEDULE = ("schedule", "schedule_csv", "vpp", "layers_per_virtual_stage", "microbatch_group_size_per_vp_stage")
OF_STAGES = (
    *OF_A_SCHEDULE, "layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip
"""Fields that hold for the scenario's own stages alone."""
OF_TENSORS = ("sequence_parallel", "tp_overlap", "tp_grad_overlap", "distribute_saved_activations")


def split_forms(held: Held, parallel: ParallelConfig) -> list[Choice]:
    """Every other way: schedules first, then degrees."""
    said = _said(held, parallel)
    ways = chain(_schedules(held.split, said, parallel), _degrees(held, said, parallel))
    return [Choice(name, _with(held, table)) for name, table in ways]


def _said(held: Held, parallel: ParallelConfig) -> Table:
    """The fields of ``[parallel]`` that are no defaults, with the batch instead of the micro-batches."""
    usual = preset(parallel.framework, {})
    plain = {name: usual.get(name, getattr(ParallelConfig(), name)) for name in parallel.__struct_fields__}
    table = {name: getattr(parallel, name) for name in plain if getattr(parallel, name) != plain[name]}
    table.pop("microbatches", None)
    # Degrees of data parallelism follow from the others.
    for name in ("dp_shard", "dp_replicate"):
        table.pop(name, None)
    config = held.scenario.config
    samples = config.micro_batch_size * config.gradient_accumulation_steps * held.mesh.size("dp")
    return table | {"framework": parallel.framework, "global_batch_size": samples}


def _with(held: Held, table: Table) -> Table:
    changes: Table = {"parallel": table}
    if "gradient_accumulation_steps" in held.scenario.file.strategy:
        changes["strategy.gradient_accumulation_steps"] = 1  # the batch says it
    return changes


def _without(said: Table, names: tuple[str, ...]) -> Table:
    return {name: value for name, value in said.items() if name not in names}


def _schedules(split: Split | None, said: Table, parallel: ParallelConfig) -> Iterator[tuple[str, Table]]:
    """The same stages in other orders; with two chunks a rank where the schedule needs them."""
    if split is None or parallel.pp == 1:
        return
    for name, chunks in SCHEDULES:
        if name == split.schedule.name and chunks in {None, len(split.partition.stages[0].chunks)}:
            continue
        table = _without(said, OF_A_SCHEDULE if chunks is None else OF_STAGES)
        if chunks is None and parallel.stages and len(parallel.stages) != parallel.pp:
            table = _without(table, OF_STAGES)
        yield f"schedule {name}", table | {"schedule": name} | ({"vpp": chunks} if chunks else {})


def _degrees(held: Held, said: Table, parallel: ParallelConfig) -> Iterator[tuple[str, Table]]:
    """Data parallelism alone, tensor parallelism over a node, and the neighbours of the scenario's own degrees."""
    t, p, world, node = parallel.tp, parallel.pp, held.mesh.workers, held.mesh.nproc_per_node
    near = [(1.0, 1.0), (node, 1.0), (t / 2, p), (2 * t, p), (t, p / 2), (t, 2 * p), (2 * t, p / 2), (t / 2, 2 * p)]
    for tp, pp in dict.fromkeys(near):
        inside = tp * pp * parallel.cp
        if tp < 1 or pp < 1 or tp != int(tp) or pp != int(pp) or tp > node or world % inside or (tp, pp) == (t, p):
            continue
        table = said if pp == p else _without(said, OF_STAGES)
        table = table if tp > 1 else _without(table, OF_TENSORS)
        name = f"tp {int(tp)} x pp {int(pp)} x dp {world // int(inside)}"
        yield name, table | {"tp": int(tp), "pp": int(pp)}
