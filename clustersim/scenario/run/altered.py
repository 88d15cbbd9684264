"""What a machine and its software do to a Program: slow GPUs, several kinds of them, pinned choices of NCCL, and
``[run.variation]``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import get_args

import msgspec
import numpy as np

from clustersim.collectives.nccl.pins import pinned_algorithms, pinned_protocols
from clustersim.collectives.nccl.ratings import KINDS
from clustersim.collectives.nccl.settings import NcclSettings
from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ScenarioError
from clustersim.core.mesh import Mesh
from clustersim.core.mix import Mix, total
from clustersim.core.program import GPU_BOUNDS, Collective, Compute, Op, Program, Role
from clustersim.core.repeated import lasting, written
from clustersim.core.topology import Topology
from clustersim.core.variation import DrawnVariation, RankPlaces, Variation, drawn
from clustersim.scenario import Scenario
from clustersim.scenario.file.schema import CollectiveKind, Pin, Slow
from clustersim.scenario.run.parts import DeviceKind

PASSES = ("forward", "backward")


def altered(program: Program, change_op: Callable[[Op, Role], Op]) -> Program:
    """The Program with each op changed."""
    roles = tuple(replace(role, ops=tuple(change_op(op, role) for op in role.ops)) for role in program.roles)
    return replace(program, roles=roles)


def slowed(program: Program, slow: Sequence[Slow], workers: int) -> Program:
    """The Program on a machine with slow GPUs: what their kernels bound takes ``1 / speed`` times as long.

    Raises :class:`ScenarioError` for a rank beyond the ``workers`` that drive a GPU.
    """
    factor = np.ones(program.world_size)
    for i, slow_gpus in enumerate(slow):
        for rank in slow_gpus.ranks:
            if not 0 <= rank < workers:
                raise ScenarioError(
                    f"no rank {rank}: the run has ranks 0..{workers - 1} (at $.cluster.slow[{i}].ranks)"
                )
            factor[rank] /= slow_gpus.speed
    if np.all(factor == 1):
        return program

    def stretched(op: Op, role: Role) -> Op:
        """An op, as long as its ranks' GPUs make it."""
        if not isinstance(op, Compute) or op.bound not in GPU_BOUNDS or np.all(factor[role.ranks] == 1):
            return op
        return msgspec.structs.replace(op, duration=np.asarray(op.duration, dtype=np.float64) * factor[role.ranks])

    return altered(program, stretched)


def pinned(program: Program, pins: Sequence[Pin]) -> Program:
    """The Program with the first pin that fits each collective which its strategy does not pin itself.

    Raises :class:`ProgramError` for an algorithm or a protocol that NCCL has not.
    """
    for pin in pins:
        pinned_algorithms(pin.algorithm, pin.kind)
        pinned_protocols(pin.protocol, pin.kind)
    if not pins:
        return program

    def chosen(op: Op, role: Role) -> Op:
        """A collective with the pin that fits it; any other op as it is."""
        if not isinstance(op, Collective) or op.algorithm or op.protocol:
            return op
        pin = next((pin for pin in pins if pin.fits(op.kind, op.nbytes, op.groups.shape[1])), None)
        if pin is None:
            return op
        return msgspec.structs.replace(op, algorithm=pin.algorithm or None, protocol=pin.protocol)

    return altered(program, chosen)


def pins_of(settings: NcclSettings) -> tuple[tuple[Pin, ...], tuple[str, ...]]:
    """What NCCL_ALGO and NCCL_PROTO pin of each kind, and a sentence where a list has nothing that does a kind.

    Raises :class:`ProgramError` for an algorithm or a protocol that NCCL has not.
    """
    pins: list[Pin] = []
    bare: list[str] = []
    for kind in get_args(CollectiveKind):
        algorithms = pinned_algorithms(settings.algorithm, kind)
        protocols = pinned_protocols(settings.protocol, kind)
        if algorithms is not None and not set(algorithms) & set(KINDS[kind]):
            bare.append(kind)
            algorithms = None
        if algorithms is not None or protocols is not None:
            protocol = ",".join(protocols) if protocols else None
            pins.append(Pin(kind=kind, algorithm=",".join(algorithms or ()), protocol=protocol))
    if not bare:
        return tuple(pins), ()
    return tuple(pins), (f"NCCL_ALGO={settings.algorithm} has no algorithm for {', '.join(bare)}: NCCL's is played",)


def draw(
    scenario: Scenario, topology: Topology, mesh: Mesh, *, steps: int | None = None, machine: int = 0, best: float = 0.0
) -> DrawnVariation:
    """The scenario's steps on one machine, as of :func:`clustersim.core.variation.drawn`; ``steps`` : its own when
    None."""
    run = scenario.file.run
    _, host = np.unique(topology.vertex_node[mesh.gpus[: mesh.workers]], return_inverse=True)
    count = scenario.config.gradient_accumulation_steps
    rank_places = RankPlaces(host.ravel().astype(np.int64), mesh.coordinates("dp"), count)
    return drawn(
        run.variation or Variation(), steps or scenario.steps, rank_places, run.seed, machine=machine, best=best
    )


def varied(program: Program, variation: DrawnVariation, mesh: Mesh) -> Program:
    """The Program at these paces, with micro-batches of these lengths and these pauses."""
    if variation.pace is None and variation.lengths is None and variation.pauses is None:
        return program
    replica = mesh.coordinates("dp")
    return replace(program, roles=tuple(_varied(role, variation, replica) for role in program.roles))


def _varied(role: Role, variation: DrawnVariation, replica: Ints) -> Role:
    ops = list(written(role.ops))
    paced = [i for i, op in enumerate(ops) if isinstance(op, Compute) and op.paced]
    if not paced:  # servers that compute no layers
        return role
    if variation.lengths is not None:
        for i, number in micro_batches(role):
            _longer(ops, i, variation.lengths[ops[i].step, number, replica[role.ranks]], 0.0)
    pace = None if variation.pace is None else variation.pace[:, role.ranks]
    if variation.pauses is not None and variation.places is not None:
        _pause(ops, paced, variation.pauses[:, role.ranks], variation.places[:, role.ranks], pace)
    return replace(role, ops=lasting(role.ops, ops), pace=pace)


def micro_batches(role: Role) -> Iterator[tuple[int, int]]:
    """(place in the op list, micro-batch) of every op that computes one. Ops that do not say which they are of belong
    to ranks that take one after the other, forward and backward."""
    step = -1
    number = 0
    back = False
    for i, op in enumerate(role.ops):
        if not isinstance(op, Compute) or not op.paced or op.phase not in PASSES:
            continue
        if op.label is not None and op.label.microbatch >= 0:
            yield i, op.label.microbatch
            continue
        if op.step != step:
            step = op.step
            number = 0
            back = False
        number += back and op.phase == "forward"
        back = op.phase == "backward"
        yield i, number


def _longer(ops: list[Op], i: int, factor: Floats, more: Floats | float) -> None:
    op = ops[i]
    if isinstance(op, Compute):
        ops[i] = msgspec.structs.replace(op, duration=np.asarray(op.duration) * factor + more)


def _pause(ops: list[Op], paced: list[int], pauses: Floats, places: Floats, pace: Floats | None) -> None:
    """Pauses of each step lengthen the op that is at their place of the step; a pace does not lengthen a pause."""
    of_step = np.array([ops[i].step for i in paced])
    for step in np.flatnonzero(pauses.any(axis=1)).tolist():
        paced_ops = np.array(paced)[of_step == step]
        if not len(paced_ops):
            continue
        struck = np.minimum((places[step] * len(paced_ops)).astype(int), len(paced_ops) - 1)
        seconds = pauses[step] if pace is None else pauses[step] / pace[step]
        for k in np.unique(struck[pauses[step] > 0]).tolist():
            unit_pace = np.ones(pauses.shape[1])
            _longer(ops, int(paced_ops[k]), unit_pace, np.where(struck == k, seconds, 0.0))


def mean_peak(kinds: Sequence[DeviceKind], dtype: str) -> float:
    """Dense peak [FLOP/s] of a GPU, mean over ranks: what the MFU of a mixed machine is of."""
    peaks = np.array([kind.device.peak[kind.device.runs_as(dtype)] for kind in kinds])
    return float(np.average(peaks, weights=[len(kind.ranks) for kind in kinds]))


def joined(programs: Sequence[Program], kinds: Sequence[DeviceKind], peak: float) -> Program:
    """One Program for machines of several kinds of GPU, from one for each kind as if all ranks had it: what happens is
    the same each time, and each rank's times are taken from the Program of its own kind, kernel by kernel.

    ``programs`` : in the order of ``kinds``. ``peak`` : of :func:`mean_peak`.

    Raises :class:`ScenarioError` where what happens, not only how long it takes, depends on the kind.
    """
    first, *rest = programs
    kind_of = np.zeros(first.world_size, dtype=np.int64)
    for number, kind in enumerate(kinds):
        kind_of[kind.ranks] = number
    roles = []
    for n, role in enumerate(first.roles):
        alike = [program.roles[n].ops for program in rest if len(program.roles) == len(first.roles)]
        if any(len(ops) != len(role.ops) for ops in alike) or len(alike) < len(rest):
            raise ScenarioError("kinds of GPU that are mixed need the same schedule; name one that no times decide")
        rank_kinds = kind_of[role.ranks]
        ops = tuple(_of_kinds(same_ops, rank_kinds, peak) for same_ops in zip(role.ops, *alike, strict=True))
        roles.append(replace(role, ops=ops))
    return replace(first, roles=tuple(roles))


def _of_kinds(same_ops: Sequence[Op], kind_of: Ints, peak: float) -> Op:
    """An op with each rank's time from its own kind's."""
    first = same_ops[0]
    if not isinstance(first, Compute) or len(set(kind_of.tolist())) == 1:
        return same_ops[int(kind_of[0])] if len(kind_of) else first
    columns = [np.broadcast_to(np.asarray(op.duration, dtype=np.float64), kind_of.shape) for op in same_ops]  # type: ignore[union-attr]
    seconds: Floats = np.choose(kind_of, columns)
    mixes = [op.mix for op in same_ops if isinstance(op, Compute) and op.mix is not None]
    mix = _mean_mix(mixes, kind_of, first.flops / peak) if len(mixes) == len(same_ops) else None
    return msgspec.structs.replace(first, duration=seconds, mix=mix)


def _mean_mix(mixes: Sequence[Mix], kind_of: Ints, executed: float) -> Mix:
    """What a rank spends its time on, in the mean; its FLOPs are at the mean peak, as the MFU has them."""
    share = np.bincount(kind_of, minlength=len(mixes)) / len(kind_of)
    mean = total(mix.times(part) for mix, part in zip(mixes, share.tolist(), strict=True))
    at_peak = min(executed, mean.peak) if mean.again else executed
    return msgspec.structs.replace(mean, peak=at_peak, products=mean.products + mean.peak - at_peak)
