"""Constants of a machine from what ``clustersim capture`` measured on it: Gloo's, Open MPI's, its device's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from clustersim.calibrate.captured import Capture, noise, read_capture
from clustersim.calibrate.fit.calibrated import Calibrated, held_out
from clustersim.calibrate.fit.device import DeviceTimes, device_times
from clustersim.calibrate.fit.host import LIBRARIES, host_times
from clustersim.calibrate.fit.of_logs import LogPlays, errors_left, fit_log, measured_spans
from clustersim.calibrate.fit.solve import fit
from clustersim.cluster import files as fabrics
from clustersim.core.calibrated import Calibration, Provenance
from clustersim.core.errors import TraceError
from clustersim.core.topology import Topology
from clustersim.files.traces.samples import Samples


def calibrate_captures(paths: Sequence[str | Path], topology: str, date: str = "") -> Calibrated:
    """Fit a machine's constants to captures of it.

    Parameters
    ----------
    paths : folders of captures, of one machine. topology : what it is built like: a shipped name or a file.
    date : to be written with the constants.

    Raises :class:`TraceError` for nothing there that can be fitted, or captures of several machines.
    """
    captures = [read_capture(path) for path in paths]
    cores = _cores(captures)
    machine = _machine(captures, topology, cores)
    samples = [sample for c in captures if not c.on_gpu for sample in c.samples]
    hosts = [host_times(samples, machine, part) for part in LIBRARIES]
    of_device = _device_times(captures, machine)
    log_plays = LogPlays(_nccl_samples(captures), topology)
    described, skipped = log_plays.described()
    of_nccl = fit_log(log_plays) if described.rows else None
    fits = [fit(host) for host in hosts if host.rows]
    fits += [of_nccl.fitted] if of_nccl is not None else []
    fits += [fit(device) for device in of_device if device.rows]
    if not fits:
        raise TraceError(f"{captures[0].path}: no collective and no compute row to fit")
    provenance = Provenance(
        date=date,
        data=tuple(str(c.path) for c in captures),
        versions=tuple(dict.fromkeys(f"torch {c.versions['torch']}" for c in captures if c.versions.get("torch"))),
        rows=sum(len(part_fit.measured) for part_fit in fits),
        refused={name: why for part_fit in fits for name, why in part_fit.refused.items()},
        spans=tuple(measured_spans(described)),
        errors={} if of_nccl is None else errors_left(of_nccl.fitted, of_nccl.times),
    )
    parts = {part_fit.part: part_fit.told for part_fit in fits}
    library = next((host for host in hosts if host.rows), hosts[0])
    rest = held_out(library, library.series)
    ranks_cores = 0 if len(machine.gpus) else cores  # what a machine's ranks run on; a process beside GPUs is no rank
    return Calibrated(
        tuple(fits),
        ranks_cores,
        Calibration(**parts, provenance=provenance),
        rest,
        noise(samples),
        np.array([row.nbytes for row in described.rows]),
        skipped,
        of_nccl.explained if of_nccl is not None else None,
    )


def _nccl_samples(captures: Sequence[Capture]) -> Samples:
    """Collectives over NCCL by ranks with a card each."""
    rows = [s for c in captures if c.on_gpu and c.backend == "nccl" and not c.shares_gpu for s in c.samples]
    return Samples(tuple(rows), "captures")


def _cores(captures: Sequence[Capture]) -> int:
    core_counts = {c.cores for c in captures if not c.on_gpu and c.cores}
    if len(core_counts) > 1:
        raise TraceError(
            f"{captures[0].path}: captures of machines with {sorted(core_counts)} cores; calibrate one at a time"
        )
    return core_counts.pop() if core_counts else 0


def _machine(captures: Sequence[Capture], topology: str, cores: int) -> Topology:
    """The topology with the captures' nodes and cores, as shipped: without constants fitted before."""
    machine = fabrics.uncalibrated(fabrics.load(topology, nodes=max(c.nodes for c in captures)))
    if cores and not len(machine.gpus):
        machine = replace(machine, node_types=tuple(replace(t, cores=cores) for t in machine.node_types))
    return machine


def _device_times(captures: Sequence[Capture], machine: Topology) -> list[DeviceTimes]:
    """Compute rows that ran on the topology's device: a GPU's, or a core's where the machine has none."""
    named = machine.node_types[0].gpu
    fitting = [c for c in captures if c.compute and c.on_gpu == bool(len(machine.gpus))]
    if not fitting:
        return []
    threads = {c.threads for c in fitting}
    if len(threads) > 1 and not fitting[0].on_gpu:
        fitting = [c for c in fitting if c.threads == min(threads)]
    rows = [row for c in fitting for row in c.compute]
    return [device_times(rows, named, 0.0 if fitting[0].on_gpu else float(fitting[0].threads))]
