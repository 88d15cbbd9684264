"""What a run says of constants that are fitted to a log: where it differs from what the log measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clustersim.core.measured_spans import NOT_RECORDED, MeasuredSpan, launches_of, outside
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective, Program
from clustersim.core.topology import Topology

SIZES = 2
"""Reasons that are told of one collective: it may be called with a hundred sizes."""


def fitted_notes(program: Program, topology: Topology, mesh: Mesh, launch: str) -> Iterator[str]:
    """How the log was started, where the run is not, and which of the run's collectives were not in it."""
    calibration = topology.calibration
    if calibration is None or not calibration.nccl or topology.measured:
        return
    spans = calibration.provenance.spans
    if not spans:
        yield f"calibration: {NOT_RECORDED}, so that how far its constants hold of this run is not known"
        return
    launches = launches_of(spans)
    if not launches:
        yield f"calibration: its log does not say how it was started; {launch} is played"
    elif launch not in launches:
        yield (
            f"calibration: its constants are of a log of another launch ({', '.join(launches)}); this run plays "
            f"{launch}, whose small collectives take another time"
        )
    reasons = list(dict.fromkeys(_reasons(program, topology, mesh, spans)))
    if reasons:
        yield f"calibration: {'; '.join(reasons)}: as unsure there as a machine's that nobody calibrated"


def _reasons(program: Program, topology: Topology, mesh: Mesh, spans: Sequence[MeasuredSpan]) -> Iterator[str]:
    """Of each collective of the program at most :data:`SIZES`."""
    nodes_of: dict[bytes, int] = {}
    calls: dict[str, dict[tuple[float, int, int], None]] = {}
    for op in (op for role in program.roles for op in role.ops if isinstance(op, Collective)):
        size = op.groups.shape[1]
        if op.nbytes and size > 1 and op.kernel is None:
            members = op.groups[0].tobytes()
            if members not in nodes_of:
                nodes_of[members] = len(set(topology.vertex_node[mesh.gpus[op.groups[0]]].tolist()))
            calls.setdefault(op.kind, {})[op.nbytes, nodes_of[members], size] = None
    for kind, sizes in calls.items():
        reasons = dict.fromkeys(outside(spans, kind, *call) for call in sizes)
        yield from [reason for reason in reasons if reason][:SIZES]
