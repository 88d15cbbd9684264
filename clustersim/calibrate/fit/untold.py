"""What a log leaves to be taken for granted, and where logs that are given together contradict each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from clustersim.calibrate.fit.nccl import MeasuredCollective
from clustersim.calibrate.fit.structures import SMALL
from clustersim.calibrate.validate_nccl import nccl_version
from clustersim.collectives.nccl.settings import environment_of, settings_of
from clustersim.collectives.started import usual_launch, usual_version
from clustersim.core.device_names import may_be
from clustersim.core.errors import several
from clustersim.core.ranges import far_of_log, size_class
from clustersim.core.topology import Topology
from clustersim.files.traces.samples import Sample, Samples

FEWEST_SIZES = 3
"""Sizes of a class that two logs must share: one odd size is no contradiction."""


def nodes_of(sample: Sample, machine: Topology, nodes: int | None) -> int:
    """How many nodes a run had: as its log says, else as asked for, else as few as hold its ranks."""
    return sample.nodes or nodes or math.ceil(sample.ranks / len(machine.node_gpus(0)))


def taken_for_granted(samples: Samples, machine: Topology, nodes: int | None = None) -> Iterator[str]:
    """A sentence on each thing that rows of a log do not say and that times depend on: what is taken instead.

    Parameters
    ----------
    samples : the rows. machine : one node of it or more. nodes : as of
        :func:`clustersim.calibrate.fit.of_logs.calibrate_logs`.
    """
    yield from samples.notes
    rows = [row for row in samples.rows if row.ranks > 1]
    library = machine.collective_library
    yield from _of_gpus(rows, machine)
    gpus = len(machine.node_gpus(0))
    for ranks in sorted({row.ranks for row in rows if not row.nodes}):
        if nodes is None:
            count = math.ceil(ranks / gpus)
            yield (
                f"the log does not say how many nodes its {ranks} ranks were on: {count} of {several(gpus, 'GPU')} are "
                "assumed (calibrate has --nodes)"
            )
    if nodes is not None and rows and all(row.nodes for row in rows):
        node_counts = ", ".join(str(count) for count in sorted({row.nodes for row in rows}))
        if node_counts != str(nodes):
            yield f"--nodes {nodes} is not used: the log itself says {node_counts}"
    if any(not row.launch for row in rows):
        modes = sorted({usual_launch(machine, nodes_of(row, machine, nodes)) for row in rows if not row.launch})
        yield f"the log does not say how it was started: {', '.join(modes)} is assumed"
    # That NVLS is off may be read from channels, which say nothing of what the script set.
    if rows and all(row.env in {"", "NCCL_NVLS_ENABLE=0"} for row in rows):
        yield f"the log does not say what its script set (NCCL_ALGO, NCCL_PROTO): {library}'s own choice is assumed"
    yield from _of_settings(rows, machine)
    if any(nccl_version(row.version) is None for row in rows):
        version = ".".join(map(str, usual_version(machine)))
        yield f"the log does not say its {library}: {version} is assumed"


def _of_gpus(rows: Sequence[Sample], machine: Topology) -> Iterator[str]:
    """What GPUs a log names that the machine has none of."""
    own = {node.gpu.name: node.gpu for node in machine.node_types}
    for named in sorted({row.device for row in rows if row.device}):
        if not any(may_be(named, gpu) for gpu in own.values()):
            yield (
                f"the log's GPUs are {named}, and {machine.name} has {', '.join(own)}: the log is of another machine "
                "(--topology), and constants that are fitted to it are that machine's"
            )


def _of_settings(rows: Sequence[Sample], machine: Topology) -> Iterator[str]:
    """What of a log's settings is not as the machine's file has it, and which of them are not played."""
    environments = [environment_of(row.env) for row in rows]
    settings = settings_of({name: value for variables in environments for name, value in variables.items()})
    without = sum(not settings_of(variables).nvls for variables in environments)
    if without and machine.node_types[0].nvls:
        which = "" if without == len(rows) else f" in {without} of its {len(rows)} rows"
        always = "(a machine that never has it says nvls = false in [node])"
        yield f"the log says that NVLink SHARP (NVLS) is off{which}: played so {always}"
    if settings.p2p_level:
        yield f"the log says that GPUs read each other over paths up to {settings.p2p_level} alone: played so"
    yield from (f"the log: {note}" for note in settings.notes)


def contradictions(rows: Sequence[MeasuredCollective]) -> Iterator[str]:
    """A sentence for each class of sizes above 64 KiB in which two logs time the same collectives further apart than
    nine in ten published logs are from what is expected: constants between them fit neither."""
    tables: dict[tuple[object, ...], dict[str, dict[float, float]]] = {}
    for row in rows:
        request = row.choice.request
        group = row.choice.group
        case_key = request.kind, group.size, group.n_nodes, group.launch, request.algorithm, request.protocol
        sizes = tables.setdefault((*case_key, size_class(row.nbytes)), {}).setdefault(row.case, {})
        sizes.setdefault(row.nbytes, row.seconds)
    for (kind, ranks, *_, name), cases in tables.items():
        if name != SMALL and len(cases) > 1:
            named = {case.removesuffix(f" {kind}"): times for case, times in cases.items()}
            yield from _contradiction(f"{kind} of {ranks} ranks", str(name), named)


def _contradiction(what: str, name: str, cases: Mapping[str, Mapping[float, float]]) -> Iterator[str]:
    """Of the two logs that are furthest apart; ``cases`` : seconds by size, of each."""
    worst = 1.0
    pair = ("", "")
    names = list(cases)
    for first in names:
        for second in names:
            shared = [size for size in cases[first] if size in cases[second]]
            if len(shared) < FEWEST_SIZES:
                continue
            ratio = float(np.median([cases[first][size] / cases[second][size] for size in shared]))
            if ratio > worst:
                worst = ratio
                pair = (first, second)
    if worst - 1.0 > far_of_log(name):
        yield (
            f"logs contradict each other: {what}, {name}, takes {worst:.2f} times as long in {pair[0]} as in "
            f"{pair[1]}; of two machines, or of one that changed, constants between them fit neither: one at a time"
        )
