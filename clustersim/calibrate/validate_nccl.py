"""Predict every row of a table of nccl-tests results, and say how far off we are.

The table has the columns of nccl-tests plus the machine: ``topology`` names a shipped file, ``nodes`` and ``ranks`` say
how much of it ran, ``env`` may pin NCCL_ALGO or NCCL_PROTO, ``notes`` may tell the launch mode.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from clustersim.calibrate.nccl_tables import measured_rows
from clustersim.calibrate.score import (
    Dimension,
    Score,
    SkippedRow,
    evaluate,
    number,
    score,
    with_ranges,
)
from clustersim.cluster import files as fabrics
from clustersim.cluster.routes import router
from clustersim.collectives import backends
from clustersim.collectives import fitted as fitting
from clustersim.collectives.base import Group, Request
from clustersim.collectives.nccl.settings import NcclSettings, environment_of, settings_of
from clustersim.collectives.nccl_backend import choice
from clustersim.collectives.started import usual_launch, usual_version
from clustersim.core.errors import ProgramError, nearest
from clustersim.core.ranges import PredictionRange, of_collective, size_class
from clustersim.core.texts import Table
from clustersim.files.traces.samples import launch_mode, told_launch

KINDS = {
    **{k: k for k in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "scatter", "gather")},
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "sendrecv": "sendrecv",
    "send": "send",
}
DTYPES = {"double": "fp64", "float": "fp32", "half": "fp16", "bfloat16": "bf16", "int8": "uint8", "uint8": "uint8"}


def validate_nccl(*paths: str | Path) -> Score:
    """Predict the out-of-place time of every row of tables."""
    return validate_rows(measured_rows(paths))


def validate_rows(rows: Sequence[Table]) -> Score:
    """:func:`validate_nccl` of rows that are read already (:func:`clustersim.calibrate.nccl_tables.measured_rows`)."""
    return score(with_ranges(evaluate(rows, _predict), _range), DIMENSIONS)


def _range(row: Table) -> PredictionRange:
    group = measured(row)[2]
    kind = KINDS[row["collective"]]
    return of_collective(group.topology, float(row["size_bytes"]), group.n_nodes, kind, group.size)


DIMENSIONS: dict[str, Dimension] = {
    "case": lambda row: str(row.cells["case_id"]),
    "source": lambda row: row.cells.get("source", "") or row.cells["case_id"].split("_")[0],
    "publisher": lambda row: publisher(row.cells),
    "size_class": lambda row: "skipped" if isinstance(row, SkippedRow) else size_class(float(row.cells["size_bytes"])),
    "platform": lambda row: str(row.cells["topology"]),
    "collective": lambda row: str(row.cells["collective"]),
}
"""What the error is split by."""


def publisher(row: Table) -> str:
    """Whose log a row is from: the host and first two folders of its address, or all that the row says."""
    source = str(row.get("source", ""))
    address = source.split("://", 1)[-1]
    return "/".join(address.split("/")[:3]) if "://" in source else source


def identity(row: Table) -> tuple[object, ...]:
    """Rows for which this is equal measure the same thing."""
    columns = ("topology", "nodes", "ranks", "collective", "size_bytes", "env", "nccl_version")
    return (*(row.get(column, "") for column in columns), launch_mode(row.get("notes", "")))


def nccl_version(text: str) -> tuple[int, int] | None:
    """(major, minor) from ``"2.22.3+cuda12.6"``; None where the log does not say."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else None


def launch_of(row: dict[str, str]) -> str:
    """How a row's run was started, as its notes and settings say; empty where they do not."""
    return told_launch(row.get("notes", ""), row.get("env", ""))


def _machines(topology: str, nodes: int, ranks: int) -> int:
    """Machines that hold a row's ranks: its nodes, or the trays of the NVLink racks that it counts as nodes.

    Raises ValueError for ranks that do not fit.
    """
    most = len(fabrics.load(topology).node_gpus(0))
    trays = math.ceil(ranks / most)
    if ranks < nodes:
        raise ValueError(f"{ranks} ranks are fewer than {nodes} nodes")
    if trays > nodes:
        domains = router(fabrics.load(topology, nodes=trays)).islands.of
        if len(set(domains[fabrics.load(topology, nodes=trays).gpus].tolist())) > nodes:
            raise ValueError(f"{ranks} ranks do not fit on {nodes} node(s) of {most} GPUs")
    return max(nodes, trays)


@lru_cache(maxsize=256)
def _group(
    topology: str, nodes: int, ranks: int, launch: str, version: tuple[int, int] | None, settings: NcclSettings
) -> Group:
    machine = settings.on(fitting.load(topology, nodes=_machines(topology, nodes, ranks)))
    nodes = machine.n_nodes
    counts = [ranks // nodes + (node < ranks % nodes) for node in range(nodes)]
    gpus = np.concatenate([machine.node_gpus(node)[:count] for node, count in enumerate(counts)])
    return Group(machine, gpus, launch or usual_launch(machine, nodes), nccl_version=version or usual_version(machine))


def measured(row: dict[str, str]) -> tuple[float, Request, Group]:
    """What a row measured: seconds, and the collective on its machine. Raises ValueError for a row that cannot be."""
    seconds = number(row, "time_us") * 1e-6
    if not row["topology"]:
        raise ValueError("the row does not say which topology")
    kind = KINDS.get(row["collective"])
    if kind is None:
        raise ValueError(f"collective {row['collective']!r} is not known; {nearest(row['collective'], KINDS)}")
    settings = settings_of(environment_of(row.get("env", "")))
    group = _group(
        row["topology"],
        int(number(row, "nodes")),
        int(number(row, "ranks")),
        launch_of(row),
        nccl_version(row.get("nccl_version", "")),
        settings,
    )
    request = Request(
        kind,
        number(row, "size_bytes"),
        dtype=DTYPES.get(row.get("dtype", ""), "fp32"),
        algorithm=settings.algorithm,
        protocol=settings.protocol,
    )
    return seconds, _as_it_ran(request, group), group


def _as_it_ran(request: Request, group: Group) -> Request:
    """A request as asked for, or without its pins where they leave nothing: it was measured, so NCCL fell back."""
    try:
        choice(request, group)
    except ProgramError:
        return replace(request, algorithm=None, protocol=None)
    return request


def _predict(row: dict[str, str]) -> tuple[float, float]:
    seconds, request, group = measured(row)
    plan = backends.plan(request, group, backend="nccl")
    predicted = plan.time(group.topology.link_bandwidth)
    if not np.isfinite(predicted) or predicted <= 0:
        raise ValueError(f"the model gives {predicted} s, which is no time")
    return seconds, predicted
