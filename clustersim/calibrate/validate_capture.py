"""Predict what ``clustersim capture`` measured, on a topology (its own calibrated one, or any other).

Collectives are compared one kind, size and group at a time, by the fastest loop of all rounds on CPU ranks, whose cores
other processes may share, and by the median on GPUs. Training steps are played from the shape the capture trained:
each strategy's program on the topology's device. A step's fastest repeat is compared for the same reason; of a rank
that trains alone on one thread, its CPU time, which other processes do not lengthen.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from clustersim.calibrate.captured import Capture, asked, fastest, least, machine_for, read_capture
from clustersim.calibrate.score import Dimension, Score, evaluate, score
from clustersim.calibrate.validate_nccl import nccl_version
from clustersim.cluster import files as fabrics
from clustersim.collectives import backends
from clustersim.collectives.base import Group, Request
from clustersim.collectives.started import usual_version
from clustersim.core.errors import ScenarioError
from clustersim.core.ranges import size_class
from clustersim.core.texts import Table
from clustersim.core.topology import Topology
from clustersim.scenario import Scenario, from_table

DIMENSIONS: dict[str, Dimension] = {
    "part": lambda row: str(row.cells["part"]),
    "size_class": lambda row: size_class(row.cells["nbytes"]) if row.cells["part"] == "collectives" else "steps",
    "collective": lambda row: str(row.cells.get("kind", "steps")),
    "ranks": lambda row: f"{row.cells['ranks']} ranks",
    "strategy": lambda row: str(row.cells.get("mode", "collectives")),
    "case": lambda row: str(row.cells["case_id"]),
}
"""What the error is split by."""

STRATEGIES: dict[str, Table] = {
    "ddp": {"kind": "ddp", "bucket_cap_mb": 25},
    "ddp_bucket_1MiB": {"kind": "ddp", "bucket_cap_mb": 1},
    "ddp_bucket_100MiB": {"kind": "ddp", "bucket_cap_mb": 100},
    "ddp_accumulate_4": {"kind": "ddp", "bucket_cap_mb": 25, "gradient_accumulation_steps": 4},
    "zero1": {"kind": "zero", "zero_optimization": {"stage": 1}},
    "fsdp2": {"kind": "fsdp"},
    "parameter_server": {"kind": "parameter_server"},
}
"""What a capture's mode is called here. DeepSpeed's stage 1 stands for PyTorch's ZeroRedundancyOptimizer."""

BUSY = 1.5
"""Repeats of a step that differ by this factor were measured beside other programs."""
REPEATS = 5
"""So many repeats of a step meet whatever else runs; two or three in a row often are alike."""
STEPS = 4
"""Played of each mode; the first is special."""


def validate_capture(path: str | Path, topology: str, anchor: str | None = None) -> Score:
    """Predict every row.

    Parameters
    ----------
    path : a capture's folder. topology : a shipped name or a file.
    anchor : ``"single"`` to scale the compute of steps by the measured step of a rank that trains alone.

    Raises :class:`TraceError` for no capture there; :class:`TopologyError` for no such topology.
    """
    capture = read_capture(path)
    machine = machine_for([capture], topology)
    played = _CapturedSteps(capture, topology, machine)
    if anchor:
        played.pace = played.measured_over_predicted()
    rows = [*_collective_rows(capture), *_step_rows(capture)]
    evaluated = evaluate(rows, lambda row: _predict(row, capture, machine, played))
    return score(evaluated, DIMENSIONS, (*_shared_cores(capture), *_not_captured(capture)))


def _shared_cores(capture: Capture) -> Iterator[str]:
    """That the cores were not the capture's own, where its repeats of one step tell so: those of all modes, or of the
    modes that were repeated often."""
    modes = [row for row in capture.steps if row.get("time_min")]
    often = [row for row in modes if row.get("steps", 0) >= REPEATS]
    for rows in (modes, often):
        spread = [row["time_max"] / row["time_min"] for row in rows]
        if capture.on_gpu or not spread or np.median(spread) < BUSY:
            continue
        yield (
            f"steps: the slowest repeat of a step took {np.median(spread):.1f} times as long as the fastest "
            f"({_of_modes(len(spread))}): {capture.ranks} ranks, the threads of autograd and of Gloo beside each, and "
            f"whatever else ran shared {capture.cores} cores. What they waited for is in the measured steps and not in "
            "the predictions, so the error of steps tells of it too; capture with fewer ranks than cores, nothing else "
            "running"
        )
        return


def _of_modes(count: int) -> str:
    return f"median of {count} modes" if count > 1 else f"of the one mode with {REPEATS} repeats or more"


def _not_captured(capture: Capture) -> Iterator[str]:
    """Which modes that could be predicted the capture left out: no row tells of them."""
    left_out = defaultdict[str, list[str]](list)
    for row in capture.steps:
        if "skipped" in row and row["mode"] in {"single", *STRATEGIES}:
            left_out[str(row["skipped"])].append(str(row["mode"]))
    yield from (f"steps of {', '.join(modes)} were not captured: {why}" for why, modes in left_out.items())


def _collective_rows(capture: Capture) -> Iterator[Table]:
    for (setting, kind, nodes, ranks, nbytes), sample in fastest(capture.samples).items():
        seconds = sample.seconds if capture.on_gpu else least(sample)
        pinned = asked(sample)
        case = ", ".join((kind, f"{ranks} ranks", *setting.split()[1:]))
        yield {
            "part": "collectives",
            "case_id": case,
            "kind": kind,
            "nbytes": nbytes,
            "algorithm": pinned.algorithm,
            "protocol": pinned.protocol,
            "ranks": ranks,
            "nodes": max(1, nodes),
            "seconds": seconds,
            "version": sample.version,
        }


def _step_rows(capture: Capture) -> Iterator[Table]:
    for row in capture.steps:
        if "step_time" in row:
            seconds = row["step_time" if capture.on_gpu else "time_min"] * 1e-6
            if row["mode"] == "single" and not capture.on_gpu and capture.threads == 1:
                seconds = min(seconds, row.get("time_cpu", math.inf) * 1e-6)
            yield {
                **row,
                "part": "steps",
                "case_id": f"step, {row['mode']}",
                "ranks": capture.ranks,
                "seconds": seconds,
            }


def _predict(row: Table, capture: Capture, machine: Topology, played: _CapturedSteps) -> tuple[float, float]:
    if row["part"] == "steps":
        return float(row["seconds"]), played.step(row)
    if row["ranks"] % row["nodes"]:
        raise ValueError(f"{row['ranks']} ranks do not divide over {row['nodes']} nodes")
    mesh = fabrics.mesh(machine, row["nodes"], row["ranks"] // row["nodes"])
    group = Group(machine, mesh.gpus, nccl_version=nccl_version(row["version"]) or usual_version(machine))
    request = Request(row["kind"], row["nbytes"], algorithm=row["algorithm"], protocol=row["protocol"])
    plan = backends.plan(request, group, backend=capture.backend)
    return float(row["seconds"]), plan.time(machine.link_bandwidth)


class _CapturedSteps:
    """The captured steps as scenarios. ``pace``: how many times as long compute takes as the device's figures say."""

    def __init__(self, capture: Capture, topology: str, machine: Topology) -> None:
        self.capture = capture
        self.machine = machine
        self.topology = str(Path(topology).resolve()) if Path(topology).is_file() else topology
        self.pace = 1.0

    def step(self, row: Table) -> float:
        """Seconds of one step of a mode. Raises ValueError for a mode that is not played."""
        if row["mode"] == "single":
            if self.pace != 1.0:
                raise ValueError("is the anchor, not a prediction")
            return self.alone(row)
        if row["mode"] not in STRATEGIES:
            raise ValueError(f"mode {row['mode']!r} is not played")
        return float(self.scenario(row, STRATEGIES[row["mode"]]).run().summary["step_time_s"])

    def alone(self, row: Table) -> float:
        """A rank's own compute, while the others compute as well."""
        cost = self.scenario(row, STRATEGIES["ddp"]).prepare().cost
        return float(cost.forward.sum() + cost.backward.sum() + cost.optimizer + cost.step_overhead)

    def measured_over_predicted(self) -> float:
        """Of the step of a rank alone. Raises ValueError where the capture has none."""
        row = next((row for row in _step_rows(self.capture) if row["mode"] == "single"), None)
        if row is None:
            raise ScenarioError(f"{self.capture.path}: --anchor single: no step of the mode 'single' was captured")
        return float(row["seconds"]) / self.alone(row)

    def scenario(self, row: Table, strategy: Table) -> Scenario:
        """A mode as a scenario, on as many ranks of the machine."""
        c = self.capture
        per_node = c.ranks // c.nodes
        serves = strategy["kind"] == "parameter_server"
        knobs = {**strategy, "micro_batch_size": row["batch"]}
        if serves:
            knobs["server"] = "gpu" if c.on_gpu else "cpu"
        workers = per_node - 1 if serves and not c.on_gpu else per_node
        slow = {"ranks": list(range(workers * c.nodes)), "speed": 1 / self.pace}
        table = {
            "cluster": {
                "topology": self.topology,
                "nodes": c.nodes,
                "gpus_per_node": workers,
                **({"slow": [slow]} if self.pace != 1.0 else {}),
            },
            "model": {
                "name": "gpt2",
                "seq_len": row["tokens"],
                "dtype": "fp32",
                "attention": "flash",
                "options": shape_of(row),
            },
            "strategy": knobs,
            "run": {
                "steps": STEPS,
                "jitter": 0.0,
                "backend": c.backend,
                "optimizer": "adamw",
                "optimizer_impl": "foreach" if c.on_gpu else "for-loop",
            },
        }
        return from_table(table, f"{c.path}/{row['mode']}")


def shape_of(row: Table) -> Table:
    """The captured GPT as changes to GPT-2's shape: its own sizes, an output projection of its own, no dropout."""
    width = row["width"]
    heads = row["heads"]
    return {
        "layers": row["layers"],
        "d_model": width,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": width // heads,
        "d_ff": 4 * width,
        "vocab": row["vocabulary"],
        "n_positions": row["tokens"],
        "tied": False,
        "attn_dropout": False,
        "hidden_dropout": False,
    }
