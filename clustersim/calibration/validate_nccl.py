"""Predict every row of a table of nccl-tests results, and say how far off we are.

The table has the columns of nccl-tests plus the machine: ``topology`` names a shipped file, ``nodes`` and ``ranks`` say
how much of it ran, ``env`` may pin NCCL_ALGO or NCCL_PROTO, ``notes`` may tell the launch mode.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from clustersim import collectives, fabrics
from clustersim.calibration.score import Row, evaluate, number, read_table, score, with_ranges
from clustersim.collectives.base import Group, Request
from clustersim.errors import nearest
from clustersim.ranges import Range, of_collective, size_class
from clustersim.traces.samples import launch_mode

COLUMNS = ("case_id", "topology", "nodes", "ranks", "collective", "size_bytes", "time_us")
KINDS = {
    **{k: k for k in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "scatter", "gather")},
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "sendrecv": "send",
    "send": "send",
}
DTYPES = {"double": "fp64", "float": "fp32", "half": "fp16", "bfloat16": "bf16", "int8": "uint8", "uint8": "uint8"}


def validate_nccl(path: str | Path) -> dict[str, Any]:
    """Predict the out-of-place time of every row. See :func:`clustersim.calibration.score.score` for the result."""
    return score(with_ranges(evaluate(read_table(path, COLUMNS), _predict), _range), DIMENSIONS)


def _range(row: Row) -> Range:
    return of_collective(row["topology"], float(row["size_bytes"]))


DIMENSIONS: dict[str, Callable[[Row], str]] = {
    "case": lambda row: row["case_id"],
    "source": lambda row: row.get("source", "") or row["case_id"].split("_")[0],
    "size_class": lambda row: size_class(float(row["size_bytes"])) if "skipped" not in row else "skipped",
    "platform": lambda row: row["topology"],
    "collective": lambda row: row["collective"],
}
"""What the error is split by."""


def identity(row: Row) -> tuple[object, ...]:
    """Rows for which this is equal measure the same thing."""
    columns = ("topology", "nodes", "ranks", "collective", "size_bytes", "env", "nccl_version")
    return (*(row.get(column, "") for column in columns), launch_mode(row.get("notes", "")))


def nccl_version(text: str) -> tuple[int, int]:
    """(major, minor) from ``"2.22.3+cuda12.6"``; the newest known model where the log does not say."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else (2, 28)


def pin(env: str, variable: str) -> str | None:
    """What a setting of the environment pins, ``"RING"`` in ``"NCCL_ALGO=RING"``; None where it does not."""
    found = re.search(rf"\b{variable}=(\w+)", env)
    return found.group(1) if found else None


@lru_cache(maxsize=256)
def _group(topology: str, nodes: int, ranks: int, launch: str, version: tuple[int, int]) -> Group:
    if ranks % nodes:
        raise ValueError(f"{ranks} ranks do not divide over {nodes} nodes")
    machine = fabrics.load(topology, nodes=nodes)
    mesh = fabrics.mesh(machine, nodes=nodes, nproc_per_node=ranks // nodes)
    return Group(machine, mesh.gpus, launch=launch, nccl_version=version)


def measured(row: dict[str, str]) -> tuple[float, Request, Group]:
    """What a row measured: seconds, and the collective on its machine. Raises ValueError for a row that cannot be."""
    seconds = number(row, "time_us") * 1e-6
    if not row["topology"]:
        raise ValueError("the row does not say which topology")
    kind = KINDS.get(row["collective"])
    if kind is None:
        raise ValueError(f"collective {row['collective']!r} is not known; {nearest(row['collective'], KINDS)}")
    group = _group(
        row["topology"],
        int(number(row, "nodes")),
        int(number(row, "ranks")),
        launch_mode(row.get("notes", "")),
        nccl_version(row.get("nccl_version", "")),
    )
    env = row.get("env", "")
    request = Request(
        kind,
        number(row, "size_bytes"),
        dtype=DTYPES.get(row.get("dtype", ""), "fp32"),
        algorithm=pin(env, "NCCL_ALGO"),
        protocol=pin(env, "NCCL_PROTO"),
    )
    return seconds, request, group


def _predict(row: dict[str, str]) -> tuple[float, float]:
    seconds, request, group = measured(row)
    plan = collectives.plan(request, group, backend="nccl")
    predicted = plan.time(group.topology.link_bandwidth)
    if not np.isfinite(predicted) or predicted <= 0:
        raise ValueError(f"the model gives {predicted} s, which is no time")
    return seconds, predicted
