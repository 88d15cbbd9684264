"""What was run, in words: machine, model, batch, strategy and what was changed of the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from clustersim import ranges
from clustersim.tomls import plainly
from clustersim.units import format_bytes, format_time

if TYPE_CHECKING:
    from clustersim.scenario.running import Prepared


FIGURES = (
    ("step time", "step_time_s", "time"),
    ("samples per second", "samples_per_s", "number"),
    ("tokens per second and GPU", "tokens_per_s_per_gpu", "number"),
    ("MFU", "mfu", "percent"),
    ("HFU", "hfu", "percent"),
    ("compute", "compute_s", "time"),
    ("communication", "communication_s", "time"),
    ("exposed transfer", "exposed_transfer_s", "time"),
    ("waiting for a peer", "waiting_for_peer_s", "time"),
    ("bubble", "bubble_s", "time"),
    ("sent per GPU and step", "bytes_sent_per_gpu", "bytes"),
    ("peak memory per GPU", "peak_memory_bytes", "bytes"),
)
"""A run's figures: what they are called, their key in ``result.json``, and how they are written."""


def figures(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what, how much) of every figure that a run has, as text."""
    for label, key, unit in FIGURES:
        if values.get(key) is not None:
            yield label, value_text(values[key], unit)


def value_text(value: float, unit: str) -> str:
    """A figure as text; ``unit`` : "time", "bytes", "percent" or "number"."""
    if unit == "time":
        return format_time(value)
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:.1%}" if unit == "percent" else f"{value:,.1f}"


def ran(prepared: Prepared) -> Iterator[tuple[str, str]]:
    """(what, in words), for the head of a run's answer."""
    p, file = prepared, prepared.scenario.file
    between = f"{p.mesh.nproc_per_node} {p.devices}"
    yield "machine", f"{p.topology.name}: {p.mesh.n_nodes:,} node(s) x {between} = {p.gpus:,} GPUs"
    tokens = f", {file.model.seq_len:,} tokens a sample" if file.model.seq_len else ""
    size = f"{p.model.parameters:,} parameters in {p.model.depth}"
    yield "model", f"{p.model.name}: {size}, {file.model.dtype}{tokens}"
    yield "strategy", f"{_strategy(p)}; {_batch(p)}"
    if p.scenario.changes:
        yield "changed", ", ".join(f"{key} = {plainly(value)}" for key, value in p.scenario.changes.items())


def _strategy(p: Prepared) -> str:
    kind = str(p.scenario.file.strategy["kind"])
    if p.split is None:
        return kind
    degrees = (f"{name} {p.mesh.size(name)}" for name in ("tp", "cp", "pp", "ep", "dp") if p.mesh.size(name) > 1)
    return f"{kind} beside {', '.join(degrees)}"


def _batch(p: Prepared) -> str:
    config = p.scenario.config
    passes, replicas = config.gradient_accumulation_steps, p.mesh.size("dp")
    each = f"{config.micro_batch_size:,} sample(s) a micro-batch"
    several = f", {passes:,} micro-batches a step" if passes > 1 else ""
    return f"{each}{several}, {config.micro_batch_size * passes * replicas:,} samples a step"


class Trust(msgspec.Struct, frozen=True):
    """The range around a step time: ``p50`` and ``p90`` (relative), the ``rows`` and ``publishers`` they are from, and
    ``as_of``, the day of the validation."""

    p50: float
    p90: float
    rows: int
    publishers: int
    as_of: str

    def __str__(self) -> str:
        several = self.publishers > 1
        publishers = f"{self.publishers} publishers, each weighing the same" if several else "one publisher"
        return (
            f"half of {self.rows:,} published steps of this kind lay within {self.p50:.0%} of their prediction, "
            f"nine in ten within {self.p90:.0%} ({publishers})"
        )


def trust(prepared: Prepared) -> Trust:
    """How far steps of this kind were from their predictions."""
    kind = str(prepared.scenario.file.strategy["kind"])
    if prepared.split is not None:
        stages = prepared.split.partition.stages
        kind = "experts" if any(stage.expert_parameters for stage in stages) else "split"
    found = ranges.of_step(kind)
    return Trust(found.p50, found.p90, found.rows, found.groups, ranges.as_of())
