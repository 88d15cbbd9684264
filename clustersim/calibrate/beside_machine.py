"""A benchmark's log beside what its machine should do: each size, and how the machine differs from its file."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from clustersim.calibrate.fit.of_logs import nccl_times, skipped_words
from clustersim.calibrate.fit.structures import (
    alike_words,
    errors_by_class,
    explained,
    played_once,
    reason_words,
    tried_words,
    unexplained,
)
from clustersim.calibrate.fit.undecided import undecided
from clustersim.calibrate.fit.untold import contradictions, taken_for_granted
from clustersim.collectives import fitted as fitting
from clustersim.core.errors import TraceError
from clustersim.core.units import format_bytes, format_time
from clustersim.files.traces.samples import Samples


class ExpectedRow(msgspec.Struct, frozen=True):
    """A timed collective: its size, both times [s], and what NCCL is expected to run."""

    kind: str
    ranks: int
    bytes: float
    measured_s: float
    expected_s: float
    algorithm: str
    protocol: str


class BesideMachine(msgspec.Struct, frozen=True):
    """A log beside a machine.

    Parameters
    ----------
    topology : the machine. rows : in the log's order. errors : median |relative error| by class of sizes. constants :
        whether those of the time model are as shipped, or fitted to the machine, and when.
    explained : what the machine is, if not as its file says; with it and without, ``error`` and ``described`` are the
        median error above 64 KiB. alike : what explains the log as well. unexplained : sentences on classes that are
        far off, and why is not known. skipped : rows left out, by reason. doubts : what the log does not say and what
        is taken instead, and where logs contradict each other. library : NCCL, or AMD's RCCL.
    """

    topology: str
    rows: list[ExpectedRow]
    errors: dict[str, float]
    constants: str
    explained: str = ""
    described: float = 0.0
    error: float = 0.0
    alike: tuple[str, ...] = ()
    unexplained: tuple[str, ...] = ()
    skipped: dict[str, int] = {}
    doubts: tuple[str, ...] = ()
    library: str = "NCCL"


def beside_machine(samples: Samples, topology: str) -> BesideMachine:
    """The rows of a log beside what NCCL would take on a machine, with constants fitted to it where its file has them.

    Raises :class:`TraceError` where no row can be played there, with the reasons.
    """
    machine = fitting.load(topology)
    fitted = machine.calibration
    times, skipped = nccl_times(samples, topology, as_shipped=False)
    if not times.rows:
        raise TraceError(f"{samples.source}: no row that can be played on {topology}; {skipped_words(skipped)}")
    expected = times.predict({})
    rows = []
    for row, seconds in zip(times.rows, expected.tolist(), strict=True):
        pick = row.choice
        request = pick.request
        size = pick.group.size
        rows.append(ExpectedRow(request.kind, size, row.nbytes, row.seconds, seconds, pick.algorithm, pick.protocol))
    played = played_once(lambda structure: nccl_times(samples, topology, None, structure, as_shipped=False)[0])
    reason = explained(times, played)
    constants = "as shipped" if fitted is None else f"as fitted {fitted.provenance.date}".rstrip()
    doubts = (*taken_for_granted(samples, machine), *contradictions(times.rows))
    errors = errors_by_class(times, expected)
    library = machine.collective_library
    beside = BesideMachine(topology, rows, errors, constants, skipped=skipped, doubts=doubts, library=library)
    if reason is None:
        sentences = tuple(unexplained(times.classes, times.measured, expected, tried_words(times)))
        doubts = (*doubts, *undecided(times, played))
        return msgspec.structs.replace(beside, unexplained=sentences, doubts=doubts)
    return msgspec.structs.replace(
        beside,
        explained=reason.structure.words,
        described=reason.described,
        error=reason.error,
        alike=reason.alike,
    )


def lines(beside: BesideMachine) -> Iterator[str]:
    """For people."""
    yield f"expected on {beside.topology}, with constants {beside.constants}, beside measured"
    heads = f"{'collective':16s} {'ranks':>5s} {'size':>10s} {'measured':>10s} {'expected':>10s} {'ratio':>6s}"
    yield f"{heads}  {beside.library} runs"
    for row in beside.rows:
        times = f"{format_time(row.measured_s):>10s} {format_time(row.expected_s):>10s}"
        ratio = f"{row.measured_s / row.expected_s:>6.2f}"
        runs = f"{row.algorithm} {row.protocol}"
        yield f"{row.kind:16s} {row.ranks:>5d} {format_bytes(row.bytes):>10s} {times} {ratio}  {runs}"
    errors = "; ".join(f"{name} {error:.1%}" for name, error in beside.errors.items())
    yield f"median |error|: {errors}"
    yield from (f"note: {sentence}" for sentence in beside.doubts)
    if beside.explained:
        yield reason_words(beside.explained, beside.described, beside.error)
    yield from alike_words(beside.alike)
    yield from beside.unexplained
    yield from (f"skipped {count}: {why}" for why, count in beside.skipped.items())
