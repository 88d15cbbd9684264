"""All strategies side by side on one scenario's machine and model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from clustersim.errors import ClusterSimError
from clustersim.scenario import Scenario, load
from clustersim.scenario.parts import machine
from clustersim.strategies import STRATEGIES

COMMON = ("micro_batch_size", "gradient_accumulation_steps", "param_dtype")
"""Knobs of the scenario's own strategy that every other is given too."""

VARIANTS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "sgd_steps": {"gather": {}, "all_reduce": {"exchange": "all_reduce"}},
    "parameter_server": {
        "on a CPU": {},
        "a GPU each": {"server": "worker", "servers": 0, "sharding": "even"},
        "async, staleness 2": {"mode": "async", "staleness": 2},
    },
    "fsdp": {"": {}, "SHARD_GRAD_OP": {"version": 1, "sharding_strategy": "SHARD_GRAD_OP"}},
    "zero": {f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in (1, 2, 3)},
}
"""Kinds of which more than one form is worth a row; every other kind has one, with its defaults."""

STEPS = 3
"""Steps of a row at most: enough for a steady one."""


def compare(
    path: str, changes: Mapping[str, object] | None = None, progress: Callable[[int, int], None] | None = None
) -> list[dict[str, Any]]:
    """A row per strategy, the scenario's own as it is written.

    Parameters
    ----------
    path, changes : as for :func:`clustersim.scenario.load`. progress : called with (rows done, rows in all).

    Returns
    -------
    list of dict: ``strategy``, ``variant``, ``own`` (it is the scenario's), ``step_time_s``, ``samples_per_s``,
    ``exposed_communication_s``, ``peak_memory_bytes``, ``bytes_sent_per_gpu``, ``fits``, and ``reason``: why it cannot
    be run, or does not fit; empty otherwise. What could not be run has None for its figures.

    Raises :class:`ScenarioError` for a scenario that cannot be read.
    """
    own = load(path, changes)
    all_forms = forms(own)
    rows = []
    for done, (kind, variant, table) in enumerate(all_forms):
        rows.append(_row(own, kind, variant, table))
        if progress:
            progress(done + 1, len(all_forms))
    return rows


def forms(own: Scenario) -> list[tuple[str, str, dict[str, Any]]]:
    """(kind, variant, its [strategy] table) of every row."""
    written = own.file.strategy
    common = {name: written[name] for name in COMMON if name in written}
    found: list[tuple[str, str, dict[str, Any]]] = []
    for kind in STRATEGIES:
        if kind == written["kind"]:
            found.append((kind, "as written", dict(written)))
        for variant, knobs in VARIANTS.get(kind, {"": {}}).items():
            table: dict[str, Any] = {**common, "kind": kind, **knobs}
            if table.get("servers") == 0:
                table["servers"] = _gpus(own)
            if table != written:
                found.append((kind, variant, table))
    return found


def _gpus(own: Scenario) -> int:
    """GPUs of the scenario's machine, as many as can be told."""
    try:
        return machine(own)[1].world_size
    except ClusterSimError:
        return 1


def _row(own: Scenario, kind: str, variant: str, table: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(
        ("step_time_s", "samples_per_s", "exposed_communication_s", "peak_memory_bytes", "bytes_sent_per_gpu", "fits")
    )
    row = {"strategy": kind, "variant": variant, "own": variant == "as written"} | row | {"reason": ""}
    changes = dict(own.changes) | {"strategy": table, "run.steps": min(own.file.run.steps, STEPS)}
    if STRATEGIES[kind].world_size == 1:
        changes |= {"cluster.nodes": 1, "cluster.gpus_per_node": 1}
    try:
        result = load(own.path, changes).run()
        row |= {name: result.summary[name] for name in row if name in result.summary}
        row |= {"peak_memory_bytes": result.memory.total, "fits": result.fits}
        row["reason"] = "" if result.fits else str(result.verdict)
    except ClusterSimError as error:
        row["reason"] = _told(str(error))
    return row


def _told(text: str) -> str:
    """An error without the file and option it names: nobody wrote them."""
    for start in ("--set strategy: ", "--set cluster.nodes: ", "--set cluster.gpus_per_node: "):
        text = text.removeprefix(start)
    return text
