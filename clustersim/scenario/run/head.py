"""The head of a run's answer: what was run, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from clustersim.core.tomls import plainly

if TYPE_CHECKING:
    from clustersim.scenario.run.running import Prepared


def head_lines(prepared: Prepared) -> Iterator[tuple[str, str]]:
    """(what, in words), for the head of a run's answer."""
    p = prepared
    file = prepared.scenario.file
    between = f"{p.mesh.nproc_per_node} {p.devices}"
    yield "machine", f"{p.topology.name}: {p.mesh.n_nodes:,} node(s) x {between} = {p.gpus:,} GPUs"
    length = file.model.seq_len or (p.model.seq_len if file.model.file is not None else 0)
    tokens = f", {length:,} tokens a sample" if length and p.model.tokens else ""
    size = f"{p.model.parameters:,} parameters in {p.model.depth}"
    if p.model.partly_frozen:
        size = f"{size}, {p.model.trained:,} trained ({p.model.trained / p.model.parameters:.2%})"
    yield "model", f"{p.model.name}: {size}, {file.model.dtype}{tokens}"
    yield "strategy", f"{_strategy(p)}; {_batch(p)}"
    if p.scenario.changes:
        yield "changed", ", ".join(f"{key} = {plainly(value)}" for key, value in p.scenario.changes.items())


def _strategy(p: Prepared) -> str:
    kind = p.scenario.strategy.name
    if p.split is None:
        return kind
    degrees = (f"{name} {p.mesh.size(name)}" for name in ("tp", "cp", "pp", "ep", "dp") if p.mesh.size(name) > 1)
    return f"{kind} beside {', '.join(degrees)}"


def _batch(p: Prepared) -> str:
    config = p.scenario.config
    passes = config.gradient_accumulation_steps
    replicas = p.mesh.size("dp")
    micro_batch = f"{config.micro_batch_size:,} sample(s) a micro-batch"
    several = f", {passes:,} micro-batches a step" if passes > 1 else ""
    return f"{micro_batch}{several}, {config.micro_batch_size * passes * replicas:,} samples a step"
