"""A device's efficiencies with captured compute rows in hand: products, memory-bound ops, optimizers, launches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clustersim.calibrate.fit.solve import Knob
from clustersim.core.arrays import Floats, Ints
from clustersim.core.device import Device, of_cores, with_efficiencies
from clustersim.core.texts import Table
from clustersim.model.seconds.base import CONSTANTS
from clustersim.model.seconds.gemm import gemm_time
from clustersim.model.seconds.memory_bound import eager_rate
from clustersim.model.seconds.optimizer import launches_of, passes_of

STREAMING = {"add": 2.0, "copy": 2.0, "layer_norm": 2.0, "softmax": 2.0}
"""Captured ops that move their bytes and compute little -> passes over their elements."""

TENSORS = 100
"""That an optimizer of a capture steps."""

CPU = "cpu"
"""Family of devices whose ops run where they are launched."""


@dataclass(frozen=True, eq=False)
class DeviceTimes:
    """Rows of one device; see :class:`clustersim.calibrate.fit.solve.TimeModel`.

    Parameters
    ----------
    rows : of ``compute.jsonl``, those that this model can price. device : as shipped, one core of a CPU.
    cores : that the measuring process had; 0 for a GPU.
    """

    rows: tuple[Table, ...]
    device: Device
    cores: float = 0.0
    part: str = "device"

    @cached_property
    def measured(self) -> Floats:
        """(n,) seconds of the fastest loop; of a single thread its CPU time, which other processes do not lengthen."""
        return np.array([min(row["time_min"], row.get("time_cpu", np.inf)) * 1e-6 for row in self.rows])

    @cached_property
    def series(self) -> Sequence[str]:
        """(n,) the op and its element type."""
        return [
            f"{row['op']} {row.get('dtype', '')} {row.get('fused', '')}{row.get('foreach', '')}" for row in self.rows
        ]

    @cached_property
    def knobs(self) -> tuple[Knob, ...]:
        """Matmul shares of the device's own types, its bandwidth, and what an op costs to start."""
        shares = [Knob(f"matmul.{d}", figure.value, 0.7, 1.0) for d, figure in self.device.matmul.items()]
        floor = self.device.kernel_floor.value
        launch = self.device.launch.value
        return (
            *shares,
            Knob("stream", self.device.stream.value, 0.7, 1.0),
            Knob("kernel_floor", floor, 0.7),
            Knob("launch", launch, 0.7),
        )

    def predict(self, values: Mapping[str, float], rows: Ints | None = None) -> Floats:
        """(n,) seconds."""
        device = with_efficiencies(self.device, values)
        device = of_cores(device, self.cores) if self.cores else device
        chosen = self.rows if rows is None else [self.rows[i] for i in rows.tolist()]
        return np.array([_OPS[_kind(row)](row, device) for row in chosen])


def device_times(rows: Iterable[Table], device: Device, cores: float = 0.0) -> DeviceTimes:
    """The rows of a capture's compute part that the time model has a formula for; what was skipped there is no row."""
    priced = (r for r in rows if "time_min" in r and _kind(r) in _OPS)
    return DeviceTimes(tuple(r for r in priced if r["op"] != "gemm" or r["dtype"] in device.peak), device, cores)


def _kind(row: Table) -> str:
    op = str(row.get("op", ""))
    return "streaming" if op in STREAMING else "optimizer" if op.startswith("optimizer_") else op


def _host(device: Device, seconds: float, launches: int = 1) -> float:
    """On a GPU calls that queue up take the host's launches or the kernels, whichever is longer; on a CPU there is one
    thread for both."""
    return seconds if device.arch == CPU else max(seconds, launches * device.launch.value)


def _gemm(row: Table, device: Device) -> float:
    return _host(device, gemm_time(device, row["dtype"], row["m"], row["n"], row["k"]))


def _streaming(row: Table, device: Device) -> float:
    size = 4 if row["dtype"] == "fp32" else 2
    nbytes = STREAMING[row["op"]] * size * row["elements"]
    return _host(device, device.kernel_floor.value + nbytes / eager_rate(device, CONSTANTS, size))


def _optimizer(row: Table, device: Device) -> float:
    """100 tensors, as capture makes them; PyTorch's default is foreach on a GPU and for-loop on a CPU."""
    name = row["op"].removeprefix("optimizer_")
    usual = "for-loop" if device.arch == CPU else "foreach"
    how = "fused" if row.get("fused") else "foreach" if row.get("foreach") else usual
    launches = launches_of(device, name, how, TENSORS, row["parameters"])
    traffic = passes_of(name, how) * 4.0 * float(row["parameters"]) / device.stream_rate()
    if how == "for-loop":
        return max(traffic, launches * device.launch.value)
    return _host(device, traffic + launches * device.kernel_floor.value, launches)


_OPS: Mapping[str, Callable[[Table, Device], float]] = {
    "gemm": _gemm,
    "streaming": _streaming,
    "optimizer": _optimizer,
    "launch": lambda _, device: device.launch.value,
}
