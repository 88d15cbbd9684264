"""What a log may tell of how its machine is built: not constants that are a little off, but a part that is not there.

A file that describes another machine cannot be mended by its constants: they bend until the log's own rows are met, and
what is predicted of other collectives and sizes is wrong. So before they are fitted, whole structures are played with
the constants as they are shipped; one that explains the log is written to the topology file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace as altered

from clustersim.calibrate.fit.nccl import NcclTimes
from clustersim.cluster import files as fabrics
from clustersim.cluster.files import Change
from clustersim.cluster.files.changes import FIRST_NODE
from clustersim.cluster.routes import router
from clustersim.core.arrays import Floats
from clustersim.core.ranges import far_of_log, log_words, size_class
from clustersim.core.tomls import toml_value
from clustersim.core.topology import NIC, Topology
from clustersim.core.units import format_bandwidth

NOTABLE = 0.1
"""Median error of a size class from which something is the matter: of sizes above 32 MiB on machines that nobody tuned
for, half of the published tables are within 5 % (:func:`clustersim.core.ranges.log_words`)."""
GAIN = 0.5
"""A structure explains a log if it leaves no more than this of the error; two together, if of what the better of them
leaves alone."""
WIRES = 0.25
"""Or no more than this of the error of large messages, which tell what wires carry: calls that take longer than usual
(threads of one process, a slow host) hide a structure in the sizes below, and no structure mends them."""
PAIRED = 0.03
"""Error that a single structure has to leave for pairs to be played, which have to halve it: more than the 2 % by which
a log's repeats differ. A slow NIC passes for a slower one, within 5 %, where something else is unlike the file too."""
MOST_PAIRS = 3
"""Of pairs that explain a log as well as a rate that was found in it, so many are named."""
NEAR = 1.5
"""A pair is played whose parts, each alone, come within this factor of the large messages together."""
AS_WELL = 1.25
"""Errors within this factor of the least, or within 1 %, are not told apart."""
INNER_NODE = "node1/"
"""What names of parts begin with of a node that has three neighbours in NCCL's trees."""
ROUNDS = 8
"""In which a NIC's rate is found: NVLS tree between two nodes is not held up in proportion."""
LARGE = size_class(math.inf)
SMALL = size_class(0.0)
"""The class that says nothing of structure: its times are the host's."""


class Structure(msgspec.Struct, frozen=True):
    """A machine that differs from its file.

    Parameters
    ----------
    words : what is the matter. node : traits of ``[node]``. changes : as in ``[[changes]]``; of all nodes or one.
    algorithms, protocols : as in NCCL_ALGO and NCCL_PROTO, which no topology file says.
    """

    words: str
    node: dict[str, Any] = {}
    changes: tuple[Change, ...] = ()
    algorithms: str = ""
    protocols: str = ""

    @property
    def pinned(self) -> bool:
        """Whether it is a matter of the environment, and not of the machine."""
        return bool(self.algorithms or self.protocols)

    def of(self, topology: Topology) -> Topology:
        """The machine as it would be."""
        kinds = tuple(replace(kind, **self.node) for kind in topology.node_types)
        return fabrics.change(replace(topology, node_types=kinds), *self.changes)

    def lines(self) -> Iterator[str]:
        """Of a topology file that extends the machine's."""
        if self.node:
            yield "[node]"
            yield from (f"{name} = {toml_value(value)}" for name, value in self.node.items())
            yield ""
        for change in self.changes:
            yield "[[changes]]"
            yield f'match = "{change.match}"'
            if change.remove:
                yield "remove = true"
            elif change.bandwidth is not None:
                yield f'bandwidth = "{change.bandwidth / 1e9:.5g} GB/s"'
            else:
                yield f"factor = {change.factor:.4g}"
            yield f'source = "clustersim calibrate: {self.words}"'
            yield ""


AS_DESCRIBED = Structure("")
WITHOUT_NVLS = Structure("NVLS off (NCCL_NVLS_ENABLE=0, or no Fabric Manager)", {"nvls": False})


class Explained(msgspec.Struct, frozen=True):
    """A structure that explains a log.

    Parameters
    ----------
    structure : it. described, error : median |error| of rows above 64 KiB, mean of their classes: as the file
        describes the machine, and with the structure; no constant is fitted in either.
    alike : what explains it as well. times : the log's rows, played with the structure.
    written : whether a topology file can say it.
    """

    structure: Structure
    described: float
    error: float
    alike: tuple[str, ...]
    times: NcclTimes
    written: bool = True


def played_once(play: Callable[[Structure | None], NcclTimes]) -> Callable[[Structure | None], NcclTimes]:
    """The same, which plays a structure once, whoever asks for it."""
    times_of: dict[bytes, NcclTimes] = {}

    def played(structure: Structure | None) -> NcclTimes:
        """The rows on a machine of this structure."""
        key = msgspec.msgpack.encode(structure)
        if key not in times_of:
            times_of[key] = play(structure)
        return times_of[key]

    return played


def explained(described: NcclTimes, played: Callable[[Structure], NcclTimes]) -> Explained | None:
    """The structure that explains a log, None where its machine is as described, or none does.

    Parameters
    ----------
    described : the log's rows on the machine as its file has it. played : the same rows on one with a structure.

    A structure is taken if it leaves half of the error or less, or a quarter of that of large messages, and no class of
    sizes is predicted worse. Where the best leaves a notable error, what is no matter of NICs is played again with a
    slow one beside.
    """
    before = errors_by_class(described, described.predict({}))
    large = {name: error for name, error in before.items() if name != SMALL}
    bandwidth = before.get(LARGE, 0.0)
    if not large or max(large.values()) < NOTABLE:
        return None
    machine = largest(described)
    singles: list[PlayedStructure] = []
    slowest = () if bandwidth < NOTABLE else _slowest(AS_DESCRIBED, described, machine, played)
    for structure in (*candidates(machine), *slowest):
        if structure.changes and bandwidth < NOTABLE:
            continue  # what NICs carry is told by large messages
        times = played(structure)
        if len(times.rows) == len(described.rows):
            singles.append(PlayedStructure(structure, times, before))
    fitting = [single for single in singles if single.explains(_mean(before))]
    left = min((single.error for single in fitting), default=_mean(before))
    if bandwidth >= NOTABLE and left >= PAIRED:
        fitting += [pair for pair in _pairs(singles, machine, played) if pair.explains(left)]
    if not fitting:
        return None
    least = min(fit.error for fit in fitting)
    best, *alike = [fit for fit in fitting if fit.error <= max(AS_WELL * least, least + 0.01)]
    alike_texts = tuple(candidate.structure.words for candidate in alike)
    # A rate that is fitted is bound to leave less than a part that is gone, whose wires explain large messages as well.
    # One that makes a class of sizes worse is no other explanation, unless it leaves half of the error all the same.
    halved = [single for single in singles if single.worse and single.error <= GAIN * _mean(before)]
    remaining = [candidate for candidate in (*fitting, *halved) if candidate is not best and candidate not in alike]
    wired = [candidate for candidate in remaining if candidate.wires]
    if best.guessed:
        together = _told_pairs(singles, PlayedStructure(AS_DESCRIBED, described, before), played)
        close = (pair for pair in together if not pair.worse and pair.error <= least + PAIRED)
        wired += sorted(close, key=lambda pair: pair.error)[:MOST_PAIRS]
    alike_texts += tuple(f"{single.structure.words}, which leaves an error of {single.error:.0%}" for single in wired)
    return Explained(best.structure, _mean(before), best.error, alike_texts, best.times, not best.structure.pinned)


def tried_words(described: NcclTimes) -> str:
    """What :func:`explained` plays of a log's machine, whose rows are ``described`` as its file has it."""
    machine = largest(described)
    kind = machine.node_types[0]
    names = [*(["NVLS off", "trees off"] if kind.nvls else []), "rings alone", "Simple alone", "both"]
    if machine.n_nodes > 1 and _nics(machine):
        names += ["no GPUDirect"] if kind.net == "ib" else []
        bandwidth = errors_by_class(described, described.predict({})).get(LARGE, 0.0)
        names += ["fewer, slower and faster NICs", "one slow NIC"] if bandwidth >= NOTABLE else []
    return ", ".join(names)


class PlayedStructure:
    """A structure with a log's rows played on it.

    ``error`` : median |error| of rows above 64 KiB, mean of their classes. ``worse`` : whether a class is predicted
    worse than ``before``, errors by class as the file describes the machine.
    """

    def __init__(self, structure: Structure, times: NcclTimes, before: dict[str, float]) -> None:
        self.structure = structure
        self.times = times
        self.before = before
        after = errors_by_class(times, times.predict({}))
        self.error = _mean(after)
        self.guessed = any(change.factor is not None for change in structure.changes)  # a rate that was fitted to them
        wires = before.get(LARGE, 0.0)
        self.wires = not self.guessed and wires >= NOTABLE and after.get(LARGE, math.inf) <= WIRES * wires
        self.worse = any(after[name] > max(before[name], 0.01) for name in after if name != SMALL)

    @property
    def slower(self) -> float:
        """How many times as long as they were measured large messages are predicted to take."""
        large = np.array(self.times.classes) == LARGE
        return float(np.median((self.times.predict({}) / self.times.measured)[large]))

    def explains(self, left: float) -> bool:
        """Whether half of an error or less is left, or a quarter of that of large messages, and no class is worse."""
        return not self.worse and (self.error <= GAIN * left or self.wires)


def _pairs(
    singles: Sequence[PlayedStructure], machine: Topology, played: Callable[[Structure], NcclTimes]
) -> Iterator[PlayedStructure]:
    """Structures that do not say which NICs there are and what they carry, each with the slowest NIC's rate beside:
    that rate is found, not searched for, so each costs a few plays."""
    for trait in (single for single in singles if not single.structure.changes):
        for structure in _slowest(trait.structure, trait.times, machine, played):
            times = played(structure)
            if len(times.rows) == len(trait.times.rows):
                yield PlayedStructure(structure, times, trait.before)


def _told_pairs(
    singles: Sequence[PlayedStructure], described: PlayedStructure, played: Callable[[Structure], NcclTimes]
) -> Iterator[PlayedStructure]:
    """Two structures without a rate that was found, of which one says which NICs there are or what they carry: of each
    of the others the one that leaves least. Some rate is found in any log of large messages alone."""
    # Large messages go by Simple, whatever is pinned: of two that differ in it alone one is played.
    traits = [single for single in singles if not (single.structure.changes or single.structure.protocols)]
    of_nics = [single for single in singles if single.structure.changes and not single.guessed]
    for trait in traits:
        if abs(trait.slower / described.slower - 1.0) < 0.01:
            continue  # it changes nothing that large messages tell
        pairs = []
        for nics in of_nics:
            if 1 / NEAR < trait.slower * nics.slower / described.slower < NEAR:
                words = f"{trait.structure.words} and {nics.structure.words}"
                structure = altered(trait.structure, words=words, changes=nics.structure.changes)
                times = played(structure)
                if len(times.rows) == len(trait.times.rows):
                    pairs.append(PlayedStructure(structure, times, trait.before))
        yield from sorted(pairs, key=lambda pair: pair.error)[:1]


def reason_words(structure_words: str, described: float, error: float) -> str:
    """That a structure, in words, explains a log, with the errors of :class:`Explained`."""
    return (
        f"not as its file says: explained by {structure_words}, error {error:.1%} above 64 KiB where "
        f"{described:.1%} is without it"
    )


def unexplained(
    classes: Sequence[str], measured: Floats, expected: Floats, tried: str, fitted: Floats | None = None
) -> Iterator[str]:
    """Of each class of sizes above 64 KiB that is further off than nine in ten published logs, where no structure
    explains it: by how much, and what to look at. Without it a log that is 1.4 times slower than expected passes for
    one that is as described. ``tried`` : :func:`tried_words`. ``fitted`` : (n,) seconds after a fit."""
    of_row = np.array(classes)
    for name in dict.fromkeys(classes):
        ratios = (measured / expected)[of_row == name]
        error = float(np.median(np.abs(1.0 / ratios - 1.0)))
        if name != SMALL and error >= far_of_log(name):
            after = "" if fitted is None else _after_words(fitted[of_row == name] / measured[of_row == name])
            before = "" if fitted is None else "before the fit "
            yield (
                f"{name}: {before}off by {error:.0%} in the median{after}, measured times are "
                f"{np.median(ratios):.2f} times those expected, and nothing that was tried explains it ({tried}). "
                f"{log_words(name)} of what is expected: the machine may be another or busy, or the prediction wrong"
            )


def _after_words(ratios: Floats) -> str:
    """``ratios`` : (n,) times as fitted over those measured."""
    return f" (after it by {float(np.median(np.abs(ratios - 1.0))):.0%})"


def alike_words(alike: Sequence[str]) -> Iterator[str]:
    """What explains a log as well; nothing for nothing."""
    if alike:
        yield f"these rows do not tell that from: {'; '.join(alike)}"


def errors_by_class(times: NcclTimes, predicted: Floats) -> dict[str, float]:
    """Median |relative error| of each class of sizes, the smallest first."""
    classes = np.array(times.classes)
    by_size = dict.fromkeys(
        name for _, name in sorted((row.nbytes, name) for row, name in zip(times.rows, times.classes, strict=True))
    )
    errors = np.abs(predicted / times.measured - 1.0)
    return {name: float(np.median(errors[classes == name])) for name in by_size}


def _mean(errors: dict[str, float]) -> float:
    return float(np.mean([error for name, error in errors.items() if name != SMALL]))


def candidates(machine: Topology) -> Iterator[Structure]:
    """How a machine may differ from its file, the simplest first."""
    kind = machine.node_types[0]
    if kind.nvls:
        yield WITHOUT_NVLS
        yield Structure("trees off (NCCL_ALGO=^Tree)", algorithms="^Tree")
    yield Structure("rings alone (NCCL_ALGO=Ring)", algorithms="Ring")
    yield Structure("Simple alone (NCCL_PROTO=Simple)", protocols="Simple")
    yield Structure("rings of Simple alone (NCCL_ALGO=Ring NCCL_PROTO=Simple)", algorithms="Ring", protocols="Simple")
    names = [name.removeprefix(FIRST_NODE) for name in _nics(machine)]
    if machine.n_nodes == 1 or not names:
        return
    if kind.net == "ib":
        yield Structure("no GPUDirect (nvidia-peermem is not loaded)", {"net": "ib_host"})
    yield from _fewer(names)
    rate = _rate(machine)
    for factor, how_much in ((0.5, "half"), (0.25, "a quarter of"), (2.0, "twice")):
        how_much = f"every NIC at {how_much} its rate, {format_bandwidth(factor * rate)}"
        yield Structure(how_much, changes=(Change("node*/nic*", bandwidth=factor * rate),))


def _fewer(names: list[str]) -> Iterator[Structure]:
    """Every second NIC, every fourth, ... and all but one."""
    count = len(names)
    counts = [count >> k for k in range(1, count.bit_length()) if count % (1 << k) == 0]
    for n_left in dict.fromkeys([*counts, count - 1]):
        if n_left < 1:
            continue
        stay = {names[int(i)] for i in np.arange(n_left) * count // n_left}
        gone = tuple(Change(f"node*/{name}", remove=True) for name in names if name not in stay)
        yield Structure(f"{n_left} of {count} NICs a node", changes=gone)


def _slowest(
    beside: Structure, described: NcclTimes, machine: Topology, played: Callable[[Structure], NcclTimes]
) -> Iterator[Structure]:
    """A NIC that hides that it is slow, by as much as the log says: it holds up every ring that crosses it.

    ``beside`` : what else the machine is, and ``described`` the rows as they are played so.
    """
    names = _nics(machine)
    large = [i for i, name in enumerate(described.classes) if name == LARGE]
    if machine.n_nodes == 1 or not names or not large:
        return
    factor = 1.0
    times = described
    for _ in range(ROUNDS):
        if len(times.rows) != len(described.rows):
            return
        ratio = float(np.median((times.predict({}) / times.measured)[large]))
        factor *= ratio
        if not 0.02 < factor < 0.95:
            return
        slower = f"the slowest NIC at {factor:.2f} of its rate"
        structure = altered(
            beside,
            words=f"{beside.words} and {slower}" if beside.words else slower,
            changes=(*beside.changes, Change(names[0].replace(FIRST_NODE, INNER_NODE), factor=factor)),
        )
        times = played(structure)
        if abs(ratio - 1.0) < 0.01:
            break
    yield structure


def largest(times: NcclTimes) -> Topology:
    """The machine of the run on most nodes."""
    return max((row.choice.group.topology for row in times.rows), key=lambda topology: topology.n_nodes)


def _nics(machine: Topology) -> list[str]:
    """Of the first node."""
    named = zip(machine.vertex_names, machine.vertex_kinds, strict=True)
    return [name for name, kind in named if kind == NIC and name.startswith(FIRST_NODE)]


def _rate(machine: Topology) -> float:
    """Of the fastest NIC [bytes/s]."""
    rates = router(machine).reported_bandwidth
    return max(rates(machine.vertex_names.index(name)) for name in _nics(machine))
