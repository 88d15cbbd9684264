"""The time law of libraries that run on hosts, Gloo and Open MPI, with captured rows in hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from clustersim.calibrate.captured import asked, fastest, least
from clustersim.calibrate.fit.solve import Knob
from clustersim.cluster import files as fabrics
from clustersim.collectives import gloo, mpi
from clustersim.collectives.base import Group, Request
from clustersim.collectives.host_law import HostWork, seconds
from clustersim.core.arrays import Floats, Ints
from clustersim.core.costs import GLOO_COSTS, MPI_COSTS, GlooCosts, MpiCosts, flat, overlaid
from clustersim.core.errors import ClusterSimError
from clustersim.core.topology import Topology
from clustersim.files.traces.samples import Sample

SPREADS = dict.fromkeys(("call", "message", "turn", "memory", "cache", "reduce", "fault"), 0.7)
SPREADS |= {"post": 0.5, "stream": 0.5}
"""Standard deviation of ln(value) among hosts, before anything is measured: a server and a shared VM differ by two."""


@dataclass(frozen=True, eq=False)
class HostRow:
    """A measured collective: its fastest repeat, and what it asks of the host."""

    sample: Sample
    seconds: float
    work: HostWork

    @property
    def nbytes(self) -> float:
        """S [bytes]."""
        return self.sample.nbytes


LIBRARIES: dict[str, tuple[GlooCosts | MpiCosts, Callable[[Request, Group], HostWork]]] = {
    "gloo": (GLOO_COSTS, gloo.work),
    "mpi": (MPI_COSTS, mpi.work),
}
"""Default constants, and what a collective asks of the hosts, by backend."""


@dataclass(frozen=True, eq=False)
class HostTimes:
    """Rows of one machine; see :class:`clustersim.calibrate.fit.solve.TimeModel`."""

    rows: tuple[HostRow, ...]
    part: str = "gloo"

    @cached_property
    def measured(self) -> Floats:
        """(n,) seconds."""
        return np.array([row.seconds for row in self.rows])

    @cached_property
    def series(self) -> Sequence[str]:
        """(n,) kind, ranks and settings."""
        return [f"{row.sample.kind} {row.sample.ranks} {row.sample.env}" for row in self.rows]

    @cached_property
    def knobs(self) -> tuple[Knob, ...]:
        """All constants of the library but those of a GPU's copies, and of paths that no row took."""
        values = flat(LIBRARIES[self.part][0])
        taken = {leg.path for row in self.rows for leg in row.work.legs}
        kinds = {name: name.split(".", 1)[0] for name in values if name != "copy"}
        return tuple(
            Knob(name, values[name], SPREADS[kind])
            for name, kind in kinds.items()
            if kind in {"call", name} or any(path.startswith(name.split(".", 1)[1]) for path in taken)
        )

    def predict(self, values: Mapping[str, float], rows: Ints | None = None) -> Floats:
        """(n,) seconds."""
        costs = overlaid(LIBRARIES[self.part][0], values)
        chosen = self.rows if rows is None else [self.rows[i] for i in rows.tolist()]
        return np.array([seconds(row.work, costs) for row in chosen])


def host_times(samples: Sequence[Sample], machine: Topology, part: str = "gloo") -> HostTimes:
    """Rows of a machine's CPU ranks, one of each kind, size, group and setting: the fastest of all repeats.

    A rank's CPU belongs to whoever runs, so what a machine with other work on it measures is its collectives and that
    work; the fastest repeat is the one that was disturbed least. Groups that ran beside others are left out.
    """
    best = fastest([s for s in samples if s.env.split()[:1] == [f"backend={part}"]])
    return HostTimes(tuple(_rows(best.values(), machine, LIBRARIES[part][1])), part)


def _rows(best: Iterable[Sample], machine: Topology, work: Callable[[Request, Group], HostWork]) -> Iterator[HostRow]:
    groups: dict[tuple[int, int], Group] = {}
    for sample in best:
        nodes = max(1, sample.nodes)
        if (nodes, sample.ranks) not in groups:
            if sample.ranks % nodes or nodes > machine.n_nodes:
                raise ClusterSimError(f"{sample.source}: {sample.ranks} ranks on {nodes} of {machine.n_nodes} node(s)")
            mesh = fabrics.mesh(machine, nodes, sample.ranks // nodes)
            groups[nodes, sample.ranks] = Group(machine, mesh.gpus)
        yield HostRow(sample, least(sample), work(asked(sample), groups[nodes, sample.ranks]))
