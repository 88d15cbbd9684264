"""How a collective is started on a calibrated machine: as the log that its constants are fitted to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias, cast

import msgspec

from clustersim.cluster.routes import router
from clustersim.collectives.base import Group
from clustersim.core.costs import generation
from clustersim.core.measured_spans import LogLaunch, MeasuredSpan, launches_of, usual_launch_of, version_words
from clustersim.core.topology import Topology

LaunchMode: TypeAlias = Literal["process_per_gpu", "single_process", "threads"]
USUAL: LaunchMode = "process_per_gpu"
"""Of a machine of which no log is known."""


USUAL_VERSION = ((100, (2, 28)), (89, (2, 22)), (0, (2, 14)))
"""NCCL of the days in which most runs on a GPU were published, from its compute capability on.

Of Hopper the oldest that a published log names, 2.22 (Snellius); others name 2.23 to 2.30. Two that name none (NVIDIA's
and AWS's eight H100s) keep LL up to 1 MiB, which 2.19 and 2.20 do not: their rings of LL count for half as much."""


def usual_version(machine: Topology) -> tuple[int, int]:
    """The version a log that does not say had, most likely; RCCL goes by the newest."""
    sm = machine.node_types[0].gpu.sm
    return next(version for since, version in USUAL_VERSION if (sm or 100) >= since)


def usual_launch(machine: Topology, nodes: int) -> str:
    """How a run was started whose log does not say.

    On a lone box without NVLink, and before Ampere, nccl-tests is usually run as its README does first, one process for
    all GPUs of the node (``-g 8``); clusters have a launcher that starts one process a GPU.
    """
    old = generation(machine.node_types[0].gpu.sm) in {"pascal", "volta"}
    lone = not router(machine).nvlink_egress(int(machine.gpus[0]))
    return "single_process" if nodes == 1 and (old or lone) else "process_per_gpu"


class StartedCollective(msgspec.Struct, frozen=True):
    """``launch`` and ``version`` of NCCL, as of :class:`clustersim.collectives.base.Group`; ``words`` : what is to be
    said of them, empty where nothing was measured."""

    launch: LaunchMode
    version: tuple[int, int]
    words: str


def started_as_measured(
    machine: Topology, kind: str, nodes: int, launch: str = "", version: tuple[int, int] | None = None
) -> StartedCollective:
    """How a collective over some nodes of a machine is started.

    ``launch``, ``version`` : where they are chosen; else the log's, and what its fit took for them where it does not
    say.
    """
    newest = Group(machine, machine.gpus).nccl_version
    library = machine.collective_library
    spans = () if machine.calibration is None else machine.calibration.provenance.spans
    log = usual_launch_of(spans, kind, nodes, launch)
    if log is None:
        start = StartedCollective(cast(LaunchMode, launch or USUAL), version or newest, "")
        unknown = machine.calibration is not None and machine.calibration.nccl and not machine.measured
        if not unknown or (launch and version):
            return start
        return msgspec.structs.replace(start, words=_unrecorded(start, library))
    mode = launch or log.launch or usual_launch(machine, nodes)
    played = StartedCollective(cast(LaunchMode, mode), version or log.version or usual_version(machine), "")
    sentences = "; ".join(_sentences(played, log, spans, launch, version, library))
    return msgspec.structs.replace(played, words=sentences)


def _unrecorded(start: StartedCollective, library: str) -> str:
    return (
        f"played: {start.launch}, {version_words(start.version, library)}; how the log was started that the constants "
        "are fitted to is not recorded (--launch, --nccl-version)"
    )


def _sentences(
    played: StartedCollective,
    log: LogLaunch,
    spans: tuple[MeasuredSpan, ...],
    launch: str,
    version: tuple[int, int] | None,
    library: str,
) -> Iterator[str]:
    """``library`` : NCCL, or AMD's RCCL."""
    played_version = version_words(played.version, library)
    own = [word for word, logged in ((played.launch, log.launch), (played_version, log.version)) if logged]
    if not launch and not version and own:
        yield f"played as the log of the calibration was started: {', '.join(own)}"
    else:
        yield f"played: {played.launch}, {played_version}"
    if log.other_modes and not launch:
        yield f"other rows of the log were started as {', '.join(log.other_modes)} (--launch)"
    if not log.launch and not launch:
        yield f"the log does not say how it was started: {played.launch} is assumed, as the fit did (--launch)"
    if log.version is None and version is None:
        yield f"the log does not say its {library}: {played_version} is assumed, as the fit did (--nccl-version)"
    log_modes = launches_of(spans)
    if launch and log_modes and launch not in log_modes:
        yield f"the constants are of a log of another launch, {', '.join(log_modes)}"
    if version and log.version and version != log.version:
        yield f"the constants are of a log of {version_words(log.version, library)}"
