"""Constants of a machine from what others' benchmarks measured on it: nccl-tests logs, tables, captures over NCCL."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import permutations
from pathlib import Path

import numpy as np
from msgspec.structs import replace as altered

from clustersim.calibrate.fit.calibrated import Calibrated, halves
from clustersim.calibrate.fit.nccl import MeasuredCollective, NcclTimes
from clustersim.calibrate.fit.solve import UNUSED, FitResult, fit, worse_classes
from clustersim.calibrate.fit.structures import (
    AS_DESCRIBED,
    SMALL,
    Explained,
    Structure,
    explained,
    played_once,
    tried_words,
)
from clustersim.calibrate.fit.undecided import undecided
from clustersim.calibrate.fit.untold import contradictions, nodes_of, taken_for_granted
from clustersim.calibrate.validate_nccl import nccl_version
from clustersim.cluster import files as fabrics
from clustersim.collectives import fitted as fitting
from clustersim.collectives.base import Group, Request
from clustersim.collectives.fitted.trusted import beyond_reason
from clustersim.collectives.nccl.settings import NcclSettings, environment_of, settings_of
from clustersim.collectives.nccl_backend import NcclChoice, choice
from clustersim.collectives.started import usual_launch, usual_version
from clustersim.core.arrays import Floats
from clustersim.core.calibrated import Calibration, Provenance
from clustersim.core.errors import ClusterSimError, TraceError
from clustersim.core.measured_spans import MeasuredSpan, stretches
from clustersim.core.ranges import size_class, spread_of_log
from clustersim.files import traces
from clustersim.files.traces.samples import Sample, Samples, joined

FEWEST = 5
"""Rows that say anything of a machine: fewer are a point or two, which any constant can be bent through."""


GRID = tuple(4.0**k for k in range(4, 17))
"""Bytes of calls that a log may leave out: 256 B to 4 GiB."""


def calibrate_logs(
    paths: Sequence[str | Path],
    topology: str,
    date: str = "",
    nodes: int | None = None,
    format: str | None = None,
) -> Calibrated:
    """Fit NCCL's constants to benchmarks of a machine.

    Parameters
    ----------
    paths : nccl-tests logs (text or JSON), tables in the columns of ``nccl_tests.csv``.
    topology : what the machine is built like: a shipped name or a file. date : to be written with the constants.
    nodes : int, of a run whose log does not say; None: as many as its ranks need.
    format : of the logs, a name in :data:`clustersim.files.traces.FORMATS`; None: found by their content.

    Raises :class:`TraceError` for a file that cannot be read, or fewer than :data:`FEWEST` rows that can be fitted,
    with the reasons.
    """
    traces.files.files_of(paths)  # a log that is given twice would count twice
    samples = joined([_samples(path, format) for path in paths])
    log_plays = LogPlays(samples, topology, nodes)
    described, skipped = log_plays.described()
    if len(described.rows) < FEWEST:
        reasons = skipped_words(skipped) or "time more sizes, from 1 KiB to 1 GiB"
        raise TraceError(
            f"{samples.source}: {len(described.rows)} row(s) to fit, at least {FEWEST} are needed; {reasons}"
        )
    log_fit = fit_log(log_plays)
    times = log_fit.times
    fitted = log_fit.fitted
    provenance = Provenance(
        date=date,
        data=tuple(str(path) for path in paths),
        versions=tuple(sorted({f"NCCL {row.version}" for row in times.rows if row.version})),
        rows=len(times.rows),
        refused={name: why for name, why in fitted.refused.items() if why != UNUSED},
        spans=tuple(measured_spans(times)),
        errors=errors_left(fitted, times),
    )
    return Calibrated(
        fits=(fitted,),
        cores=0,
        calibration=Calibration(nccl=fitted.told, provenance=provenance),
        held_out=held_out_rows(log_plays).after,
        noise=float("nan"),
        sizes=np.array([row.nbytes for row in times.rows]),
        skipped=skipped,
        explained=log_fit.explained,
        tried=tried_words(described),
        doubts=(
            *taken_for_granted(samples, fabrics.load(topology), nodes),
            *contradictions(described.rows),
            *(undecided(described, log_plays.played) if log_fit.explained is None else ()),
        ),
    )


def errors_left(fitted: FitResult, times: NcclTimes) -> dict[str, float]:
    """By class of sizes, the median |relative error| of its own rows after a fit of NCCL's."""
    classes = np.array(times.classes)
    errors = np.abs(fitted.after / fitted.measured - 1.0)
    return {name: float(np.median(errors[classes == name])) for name in dict.fromkeys(times.classes)}


@dataclass(frozen=True, eq=False)
class LogPlays:
    """A log's rows, to be played on its machine.

    Parameters
    ----------
    samples : the rows. topology, nodes : as of :func:`calibrate_logs`.
    """

    samples: Samples
    topology: str
    nodes: int | None = None

    def described(self) -> tuple[NcclTimes, dict[str, int]]:
        """On the machine as its file has it, and how many rows are left out, by reason."""
        return nccl_times(self.samples, self.topology, self.nodes)

    @cached_property
    def played(self) -> Callable[[Structure | None], NcclTimes]:
        """On one that differs from its file: a function of how."""
        return played_once(lambda structure: nccl_times(self.samples, self.topology, self.nodes, structure)[0])

    def halves(self) -> tuple[LogPlays, LogPlays]:
        """Every second size of each case, and the others."""
        rows = self.samples.rows
        parts = halves([row.case for row in rows], [row.nbytes for row in rows])
        first, second = (replace(self.samples, rows=tuple(rows[i] for i in part)) for part in parts)
        return replace(self, samples=first), replace(self, samples=second)


@dataclass(frozen=True, eq=False)
class LogFit:
    """What a log says of its machine.

    Parameters
    ----------
    times : its rows on the machine that is written. explained : how that differs from the file, if it does.
    fitted : the constants beside; ``before`` are the rows' times on the machine as its file has it.
    """

    times: NcclTimes
    explained: Explained | None
    fitted: FitResult

    @property
    def structure(self) -> Structure | None:
        """What the topology file says of it, beside constants."""
        return self.explained.structure if self.explained is not None and self.explained.written else None


def fit_log(log_plays: LogPlays) -> LogFit:
    """The structure and the constants that a log tells: no class of sizes is predicted worse with them than without.

    A structure with which that cannot be is told and not written.
    """
    described, _ = log_plays.described()
    reason = explained(described, log_plays.played)
    classes = described.classes
    if reason is not None and reason.written:
        as_described = described.predict({})
        # Constants must not undo what the structure explains; of small sizes, which tell none, nothing is explained.
        stated_times = np.where(np.array(classes) == SMALL, as_described, reason.times.predict({}))
        for before in (stated_times, as_described):
            compared = replace(_fit(reason.times, before), before=as_described)
            if not worse_classes(compared, classes):
                return LogFit(reason.times, reason, compared)
        reason = altered(reason, written=False)
    return LogFit(described, reason, _fit(described))


def _fit(times: NcclTimes, before: Floats | None = None) -> FitResult:
    """The constants that rows tell. What is expected of sizes that a log leaves out is left only for a reason: a
    floor's constant would else be moved anywhere by the last percents of large messages."""
    others = unmeasured(times)
    expected = NcclTimes((*times.rows, *others))
    spreads = np.array([spread_of_log(size_class(row.nbytes)) for row in others])
    return fit(expected, times.classes, before, spreads)


def unmeasured(times: NcclTimes) -> tuple[MeasuredCollective, ...]:
    """Each case's calls of sizes that no span of it holds, which take what is expected of the machine."""
    rows_of: dict[tuple[str, str, int], list[MeasuredCollective]] = {}
    choices: dict[tuple[str, str, int], NcclChoice] = {}
    for row in times.rows:
        case = row.case, row.choice.request.kind, id(row.choice.group)
        rows_of.setdefault(case, []).append(row)
        choices[case] = row.choice
    rows = []
    for case, case_rows in rows_of.items():
        spans = list(measured_spans(NcclTimes(tuple(case_rows))))
        for nbytes in GRID:
            if not any(span.holds(nbytes) for span in spans):
                other = choice(replace(choices[case].request, nbytes=nbytes), choices[case].group)
                rows.append(MeasuredCollective(math.nan, other, f"{case[0]}, {size_class(nbytes)}"))
    expected = NcclTimes(tuple(rows)).predict({}).tolist()
    return tuple(replace(row, seconds=seconds) for row, seconds in zip(rows, expected, strict=True))


def measured_spans(times: NcclTimes) -> Iterator[MeasuredSpan]:
    """What rows measured, by collective, ranks and how the job was started, the smallest first."""
    sizes_of: dict[tuple[str, int, int, str, tuple[int, int] | None], list[float]] = {}
    for row in times.rows:
        group = row.choice.group
        key = row.choice.request.kind, group.n_nodes, group.size, row.launch, nccl_version(row.version)
        sizes_of.setdefault(key, []).append(row.nbytes)
    for (kind, nodes, ranks, launch, version), sizes in sizes_of.items():
        for stretch in stretches(sizes):
            yield MeasuredSpan(kind, nodes, ranks, stretch[0], stretch[-1], len(stretch), launch, version)


@dataclass(frozen=True, eq=False)
class HeldOutRows:
    """(n,) rows predicted by what the other half of their case's sizes tells.

    Parameters
    ----------
    before, after : |relative error| with the machine as its file has it, and as it is calibrated.
    classes : of each size.
    """

    before: Floats
    after: Floats
    classes: Sequence[str]


def held_out_rows(log_plays: LogPlays) -> HeldOutRows:
    """Every row of a log that can be played; none where its cases have one size each.

    A structure that one half tells and the other refutes is left out, and constants stand alone.
    """
    before = [np.empty(0)]
    after = [np.empty(0)]
    classes: list[str] = []
    for fitted_half, rest in permutations(log_plays.halves()):
        half, _ = fitted_half.described()
        described, _ = rest.described()
        if not described.rows or not half.rows:
            continue
        log_fit = fit_log(fitted_half)
        times = rest.played(log_fit.structure)
        values = log_fit.fitted.values
        if len(times.rows) != len(described.rows):
            times = described
            values = _fit(half).values
        before.append(np.abs(described.predict({}) / described.measured - 1.0))
        after.append(np.abs(times.predict(values) / described.measured - 1.0))
        classes += described.classes
    return HeldOutRows(np.concatenate(before), np.concatenate(after), classes)


def skipped_words(skipped: Mapping[str, int]) -> str:
    """Rows that were left out, by reason."""
    return "; ".join(f"{count} skipped: {reason}" for reason, count in skipped.items())


def nccl_times(
    samples: Samples,
    topology: str,
    nodes: int | None = None,
    structure: Structure | None = None,
    *,
    as_shipped: bool = True,
) -> tuple[NcclTimes, dict[str, int]]:
    """The rows of a machine that NCCL's time model can predict, and how many others were left out, by reason.

    ``structure`` : how the machine differs from its file; None: it does not. ``as_shipped`` : without constants that
    were fitted before, which have no say in a new fit.
    """
    skipped = Counter(samples.skipped)
    rows = []
    groups = _LogGroups(topology, structure, as_shipped=as_shipped)
    for sample in samples.rows:
        try:
            rows.append(_measured(sample, groups, nodes))
        except ClusterSimError as error:
            skipped[str(error)] += 1
    return NcclTimes(tuple(rows)), dict(skipped)


def _samples(path: str | Path, format: str | None) -> Samples:
    samples = traces.read(path, format)
    if not isinstance(samples, Samples):
        raise TraceError(f"{path}: a trace of a program, not a benchmark's table; calibrate reads measured collectives")
    return samples


class _LogGroups:
    """Communicators on the machine, one object each; a topology is laid out once for each number of nodes."""

    def __init__(self, topology: str, structure: Structure | None, *, as_shipped: bool) -> None:
        self.topology = topology
        self.as_shipped = as_shipped
        self.structure = structure
        self.pins = structure or AS_DESCRIBED
        self.machine = fabrics.load(topology)
        self.gpus_per_node = len(self.machine.node_gpus(0))
        self.of = cache(self._of)

    def _of(self, ranks: int, nodes: int, launch: str, version: tuple[int, int], settings: NcclSettings) -> Group:
        """``settings`` : what the log says of NCCL's variables. Raises :class:`TraceError` for ranks that do not
        fit."""
        if ranks % nodes or ranks // nodes > self.gpus_per_node:
            raise TraceError(f"{ranks} ranks on {nodes} node(s) of {self.gpus_per_node} GPUs")
        if self.as_shipped:
            machine = fabrics.uncalibrated(fabrics.load(self.topology, nodes=nodes))
        else:
            machine = fitting.load(self.topology, nodes=nodes)
        machine = machine if self.structure is None else self.structure.of(machine)
        machine = settings.on(machine)
        return Group(machine, fabrics.mesh(machine, nodes, ranks // nodes).gpus, launch, version)


def _measured(sample: Sample, groups: _LogGroups, nodes: int | None) -> MeasuredCollective:
    """A sample on the machine. Raises :class:`ClusterSimError` with the reason why it is none."""
    if sample.topology and sample.topology != Path(groups.topology).stem:
        raise TraceError(f"a row of a machine other than {Path(groups.topology).stem}")
    if sample.kind in {"barrier", "recv"}:
        raise TraceError(f"{sample.kind} is not timed by bytes")
    if sample.ranks < 2:
        raise TraceError("a row that does not say how many ranks, or has one")
    if sample.at_once > 1:
        raise TraceError("a row of several groups at once")
    count = nodes_of(sample, groups.machine, nodes)
    version = nccl_version(sample.version) or usual_version(groups.machine)
    launch = sample.launch or usual_launch(groups.machine, count)
    settings = settings_of(environment_of(sample.env))
    group = groups.of(sample.ranks, count, launch, version, settings)
    request = Request(
        sample.kind,
        sample.nbytes,
        dtype=sample.dtype,
        algorithm=settings.algorithm or groups.pins.algorithms or None,
        protocol=settings.protocol or groups.pins.protocols or None,
    )
    chosen = choice(request, group)
    reason = beyond_reason(chosen, sample.seconds)
    if reason:
        raise TraceError(f"a row that {reason}")
    return MeasuredCollective(sample.seconds, chosen, sample.case, sample.version, sample.launch)
