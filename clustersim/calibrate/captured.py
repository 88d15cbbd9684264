"""A capture's folder as what can be fitted and validated: its collectives, compute rows, steps, and the machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clustersim.calibrate.score import grouped
from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Request
from clustersim.core.errors import TopologyError, TraceError
from clustersim.core.texts import Table
from clustersim.core.topology import Topology
from clustersim.files.traces import captured
from clustersim.files.traces.samples import Sample


@dataclass(frozen=True, eq=False)
class Capture:
    """What ``clustersim capture`` measured in one run.

    Parameters
    ----------
    path : its folder. backend : ``"gloo"``, ``"mpi"`` or ``"nccl"``. on_gpu : whether ranks drove GPUs.
    shares_gpu : whether several ranks shared a card, so that they talked as no machine's do.
    ranks, nodes, cores : of the world; cores of a node. threads : of one rank.
    samples : its collectives. compute, steps : rows of those parts, without the header. versions : by program.
    """

    path: Path
    backend: str
    on_gpu: bool
    ranks: int
    nodes: int
    cores: int
    threads: int
    samples: tuple[Sample, ...]
    compute: tuple[Table, ...]
    steps: tuple[Table, ...]
    versions: Mapping[str, str]
    shares_gpu: bool = False


def read_capture(path: str | Path) -> Capture:
    """A capture's folder; parts that were interrupted count as far as they came. Raises :class:`TraceError`."""
    folder = Path(path)
    if not (folder / "provenance.json").is_file():
        raise TraceError(f"{folder}: no capture: it has no provenance.json; give the folder that capture --out wrote")
    about = captured.provenance(folder / "provenance.json")
    parts = {name: _part(folder, name) for name in ("collectives", "compute", "steps")}
    if not any(parts.values()):
        raise TraceError(f"{folder}: nothing was measured in this capture")
    samples = captured.read([folder / "provenance.json", parts["collectives"]]).rows if parts["collectives"] else ()
    rows = {name: tuple(captured.lines(file)[0][1:]) if file else () for name, file in parts.items()}
    machine: Table = next(iter(about.get("machines", [])), {})
    return Capture(
        path=folder,
        backend=str(about.get("backend", "")),
        on_gpu=about.get("device") == "cuda",
        ranks=int(about.get("ranks", 1)),
        nodes=int(about.get("nodes", 1)),
        cores=int(machine.get("cores", 0)),
        threads=int(machine.get("threads", 1)),
        samples=samples,
        compute=rows["compute"],
        steps=rows["steps"],
        versions=machine.get("versions", {}),
        shares_gpu=bool(about.get("share_gpu", False)),
    )


def _part(folder: Path, name: str) -> Path | None:
    for ending in (".jsonl", ".jsonl.gz", ".jsonl.partial"):
        file = folder / f"{name}{ending}"
        if file.is_file() and file.stat().st_size:
            return file
    return None


def machine_for(captures: Sequence[Capture], topology: str) -> Topology:
    """The topology with as many nodes as the captures used.

    Raises :class:`TopologyError` where ranks ran on CPU cores and the topology has another number of them.
    """
    machine = fabrics.load(topology, nodes=max(c.nodes for c in captures))
    for c in captures:
        says = machine.node_types[0].cores
        if not c.on_gpu and c.cores and not len(machine.gpus) and says != c.cores:
            raise TopologyError(
                f"{topology}: $.node.cores is {says}; the machine of {c.path} has {c.cores} (calibrate writes that)"
            )
    return machine


Case = tuple[str, str, int, int, float]
"""Library and settings, kind, nodes, ranks and bytes: what rounds repeat."""


def _case(sample: Sample) -> Case:
    return sample.env, sample.kind, sample.nodes, sample.ranks, sample.nbytes


def fastest(samples: Sequence[Sample]) -> dict[Case, Sample]:
    """Of the rounds of one case, the one whose fastest loop was least disturbed."""
    alone = (sample for sample in samples if sample.at_once == 1 and sample.ranks > 1)
    return {case: min(rounds, key=least) for case, rounds in grouped(alone, _case).items()}


def asked(sample: Sample) -> Request:
    """The collective that was measured, with what was pinned of it (``env``: ``"backend=mpi transport=tcp"``)."""
    set_to = dict(word.split("=", 1) for word in sample.env.split() if "=" in word)
    return Request(sample.kind, sample.nbytes, algorithm=set_to.get("algorithm"), protocol=set_to.get("transport"))


def least(sample: Sample) -> float:
    """Seconds of a sample's fastest loop, or what it has."""
    return sample.fastest if np.isfinite(sample.fastest) else sample.seconds


def noise(samples: Sequence[Sample]) -> float:
    """Median, over rows measured in several rounds, of how far the rounds' fastest loops lie above the least; nan
    where nothing was repeated. A law of kind, size and ranks cannot be nearer to single rounds than about this."""
    seen = grouped((sample for sample in samples if sample.at_once == 1), _case).values()
    times = [list(map(least, rounds)) for rounds in seen if len(rounds) > 1]
    apart = [float(np.median(repeats)) / min(repeats) - 1.0 for repeats in times]
    return float(np.median(apart)) if apart else float("nan")
