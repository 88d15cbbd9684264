"""Samples of a step: said in four ways, of which frameworks use two or three that must agree."""

from __future__ import annotations

from collections.abc import Mapping

from clustersim.core.errors import ScenarioError, nearest_divisor
from clustersim.files.launch.options import ScenarioFields
from clustersim.files.launch.table import FrameworkTable

OF = {
    "strategy.micro_batch_size": "batch.micro",
    "strategy.gradient_accumulation_steps": "batch.count",
    "parallel.microbatches": "batch.local",
    "parallel.global_batch_size": "batch.global",
}
"""Which of them a scenario's field came from."""


def said(fields: ScenarioFields, world: int, split: bool) -> dict[str, int]:
    """The fields of a scenario that say the batch.

    fields : with ``batch.micro`` (samples of one pass of a replica), ``batch.local`` (of a replica's call: all
        micro-batches of a pipeline together), ``batch.count`` (passes of a step) and ``batch.global`` (samples of a
        step), as far as they are said, and who said them; where ``batch.capped`` holds, a pass has no more than a
        replica's part of the step. world : ranks. split : whether there is ``[parallel]``.

    Raises :class:`ScenarioError` where they contradict each other.
    """
    degrees = [int(fields.get(f"parallel.{name}") or 1) for name in ("tp", "cp", "pp")]
    replicas, beyond = divmod(world, degrees[0] * degrees[1] * degrees[2])
    if beyond:  # which whoever checks degrees says better than a batch
        return {}
    global_batch = given if (given := fields.get("batch.global")) is not None and given > 0 else None
    local = fields.get("batch.local")
    count = fields.get("batch.count")
    if global_batch and "batch.count" not in fields.by:  # as many passes as it needs, whatever is usual
        count = None
    micro = fields.get("batch.micro", local if degrees[2] == 1 else None)
    if micro is not None and global_batch and fields.get("batch.capped"):
        micro = min(micro, max(1, global_batch // replicas))
    if micro is None:
        part, left = divmod(global_batch, replicas * (count or 1)) if global_batch else (1, 0)
        micro = 1 if left else part
    for name, value in (("micro", micro), ("local", local), ("count", count)):
        if value is not None and value < 1:
            raise _wrong(fields, f"batch.{name}", f"{value} samples or passes are none; use at least 1")
    if count is None and local is not None and local != micro:
        if local % micro:
            raise _wrong(fields, "batch.local", f"is no multiple of {micro} samples; {nearest_divisor(local, micro)}")
        count = local // micro
    if global_batch is not None:
        passes, left = divmod(global_batch, micro * replicas)
        if degrees[2] > 1 and not left:
            _refuse_more_pipelines(fields, local, count, passes)
        if left or passes < 1 or count not in {None, passes}:
            have = f"{micro} samples on each of {replicas} replicas" + (f" in {count} passes" if count else "")
            near = max(1, count or passes) * micro * replicas
            raise _wrong(fields, "batch.global", f"is not made of {have}; use {near}")
        count = passes
    sizes = {"strategy.micro_batch_size": micro}
    if split and global_batch is not None:
        sizes["parallel.global_batch_size"] = global_batch
    elif split:
        sizes["parallel.microbatches"] = count or 1
    else:
        sizes["strategy.gradient_accumulation_steps"] = count or 1
    return sizes


def _refuse_more_pipelines(fields: ScenarioFields, local: int | None, count: int | None, passes: int) -> None:
    """Raise :class:`ScenarioError` for a step of several pipelines, each filled and drained by itself."""
    if local is not None and count and count < passes and passes % count == 0:
        share = fields["batch.global"] * count // passes
        why = f"is {passes // count} pipelines of {count} micro-batches after another, which is not played; use {share}"
        raise _wrong(fields, "batch.global", f"{why}, which is one of them")


def _wrong(fields: ScenarioFields, name: str, why: str) -> ScenarioError:
    by = fields.by.get(name)
    return ScenarioError(f"{by.where}: {by.name} {by.value} {why}" if by else f"{name} = {fields.get(name)} {why}")


def told(micro: int, count: int, replicas: int, pipeline: bool) -> Mapping[str, int]:
    """The four numbers of a batch, for writing."""
    local = micro * count if pipeline else micro
    return {"batch.micro": micro, "batch.count": count, "batch.local": local, "batch.global": micro * count * replicas}


def ask_for_passes(fields: ScenarioFields, table: FrameworkTable) -> None:
    """Raises :class:`ScenarioError` where a framework makes no passes of a global batch alone: Megatron-Core, and
    what is built on it (``micro_batch_size must not be None``, megatron/training/arguments.py, ``validate_args``)."""
    is_alone = "batch.global" in fields.by and "batch.micro" not in fields
    if is_alone and table.asks_for_passes:
        why = "alone does not say how many samples a pass holds; say micro_batch_size beside it"
        raise _wrong(fields, "batch.global", why)
