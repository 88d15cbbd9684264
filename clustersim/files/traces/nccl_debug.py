"""``NCCL_DEBUG=INFO`` logs: the version, who runs on how many nodes, channels, transports, and what the tuner chose.

Lines as NCCL 2.8 and later write them (src/init.cc, src/enqueue.cc): algorithms and protocols as names, or as their
numbers before 2.24 (src/include/nccl_common.h). A choice is told with ``NCCL_DEBUG_SUBSYS=INIT,TUNING``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from clustersim.collectives.base import Group, Request
from clustersim.collectives.nccl.constants import ALGORITHMS, PROTOCOLS
from clustersim.collectives.nccl.settings import settings_of
from clustersim.core.errors import TraceError, few, several
from clustersim.core.program import COLLECTIVES
from clustersim.core.texts import short
from clustersim.core.tomls import toml_value
from clustersim.core.topology import NIC, Topology
from clustersim.core.units import format_bytes
from clustersim.files.traces import files, prefixes
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.nccl_causes import NOTHING, SHOWN, UNTOLD, causes, conclusion
from clustersim.files.traces.nccl_evidence import Evidence
from clustersim.files.traces.nccl_tests_run import LOGGED_CHANNELS, LOGGED_SETTING
from clustersim.files.traces.samples import kind_of
from clustersim.files.traces.told import Cause, ChoiceComparison, LoggedChoice, NcclLog, SimulatedChoice

if TYPE_CHECKING:
    from clustersim.collectives.base import Group

_OWN_LINE = re.compile(r":\d+:\d+ \[\w+\] NCCL (?:INFO|WARN|TRACE|VERSION) ")
_NAMED = re.compile(r"(?m)(?:^|\s)NCCL (?:INFO|WARN) ")
_NEXT = re.compile(r"(?<![\w.-])(?=[\w.-]+:\d+:\d+ \[\w+\] NCCL (?:INFO|WARN|TRACE) )")
"""Where a line begins: those of several ranks may stand in one, whose ends were lost."""
_VERSION = re.compile(r"[RN]CCL version\s*:?\s*(\d+\.\d+(?:\.\d+)?)")
_COMM = re.compile(r"nranks (\d{1,8})(?: nNodes (\d{1,8}))?", re.I)
_VIA = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : \d+(?:\[\w+\])? -> \d+(?:\[\w+\])?(?: \[(?:send|receive)\])? via "
    r"(direct shared memory|\w+(?:/\w+(?: Libfabric)?)?)"
)
"""Before 2.8 rings were what channels are, and ranks on other machines had no GPU beside them."""
_CHOICE = re.compile(r"(?:\b(\w+): )?(\d{1,18}) Bytes -> Algo (\w+) proto (\w+)(?:.*?\{(\d+)\.\.(\d+)\})?", re.I)


def sniff(head: Head) -> Likeness:
    """Whether this is a log with NCCL's own lines; logs of benchmarks, which may have some too, are asked first."""
    if _OWN_LINE.search(head.text):
        return Likeness.AMONG
    return likeness(named=_NAMED.search(head.text) is not None, shaped=False)


def read(paths: Sequence[Path]) -> NcclLog:
    """What NCCL said of itself. Raises :class:`TraceError` for a log without anything known."""
    versions: set[str] = set()
    ranks = 0
    nodes = 0
    channels = dict[str, int]()
    evidence = Evidence()
    pinned: dict[str, str] = {}
    via: Counter[str] = Counter()
    choices: Counter[tuple[str, int, str, str, int]] = Counter()
    for line in _lines_of(paths):
        evidence.add(line)
        if match := _VERSION.search(line):
            versions.add(match[1])
        if "NCCL INFO" not in line:
            continue
        if (match := _COMM.search(line)) and int(match[1]) >= ranks:
            nodes = max(int(match[2] or 0), nodes if int(match[1]) == ranks else 0)
            ranks = int(match[1])
        if match := LOGGED_CHANNELS.search(line):
            named = dict(zip(("coll", "collnet", "nvls", "p2p"), match.groups(), strict=True))
            channels = {name: int(n) for name, n in named.items() if n}
        if match := _VIA.search(line):
            via[match[1]] += 1
        if match := LOGGED_SETTING.search(line):
            pinned[match[1]] = evidence.env[match[1]] = short(match[2])
        if match := _CHOICE.search(line):
            choices[_choice(match)] += 1
    nodes = max(nodes, evidence.machines)  # NCCL takes machines that NVLink joins for one node
    reasons = causes(evidence, nodes, channels)
    if not (ranks or channels or via or choices or reasons):
        raise TraceError(
            f"{paths[0]}: no communicator in this log; NCCL_DEBUG=INFO writes one (NCCL_DEBUG_SUBSYS=INIT)"
        )
    rows = [LoggedChoice(*choice, count) for choice, count in sorted(choices.items())]
    source = ", ".join(map(str, paths))
    log = NcclLog(
        source, [], sorted(versions), ranks, nodes, channels, pinned, via, rows, causes=reasons, hosts=evidence.hosts
    )
    ending = conclusion(reasons) if reasons or via or channels else [UNTOLD]
    return msgspec.structs.replace(log, nics=evidence.nics, lines=[*_lines(log), *ending])


def _choice(match: re.Match[str]) -> tuple[str, int, str, str, int]:
    """What a line says was chosen: collective, bytes, algorithm, protocol, and channels, 0 where it names none."""
    n_channels = int(match[6]) - int(match[5]) + 1 if match[5] else 0
    kind = kind_of(match[1] or "") or (match[1] or "a collective")
    return kind, int(match[2]), _name(match[3], ALGORITHMS), _name(match[4], PROTOCOLS), n_channels


def _lines_of(paths: Sequence[Path]) -> Iterator[str]:
    """Each of NCCL's own lines; others as they stand."""
    for path in paths:
        for line in prefixes.unpacked(files.log(path)):
            if line.count(" NCCL ") > 1:
                yield from _NEXT.split(line)
            else:
                yield line


def nodes_needed(told: NcclLog, topology: Topology) -> int:
    """Nodes of a machine that the ranks of a log which names none fill."""
    return max(1, -(-told.ranks // len(topology.node_gpus(0))))


def beside(log: NcclLog, topology: Topology) -> NcclLog:
    """The log's choices beside what this program would choose on a topology of as many nodes.

    Raises :class:`TraceError` where the log does not say how many ranks there are on how many nodes.
    """
    from clustersim.collectives import backends  # most who read a log do not need them

    ranks = log.ranks
    nodes = log.nodes or topology.n_nodes
    if not ranks or nodes != topology.n_nodes or ranks % nodes or ranks // nodes > len(topology.node_gpus(0)):
        raise TraceError(
            f"{log.source}: {several(ranks, 'rank')} on {several(nodes, 'node')} do not fit {topology.n_nodes} x "
            f"{topology.name}"
        )
    gpus = np.concatenate([topology.node_gpus(node)[: ranks // nodes] for node in range(nodes)])
    version = [int(part) for part in (log.versions or ["2.28"])[-1].split(".")[:2]]
    group = Group(topology, gpus, nccl_version=(version[0], version[1]))
    as_set = Group(settings_of(log.set).on(topology), gpus, nccl_version=group.nccl_version)
    rows: list[LoggedChoice] = []
    lines = list(log.lines)
    if not log.nodes:
        lines.append(f"the log does not say on how many nodes: taken as {nodes} x {topology.name}, full of ranks")
    alike = 0
    for row in log.choices:
        if row.kind not in COLLECTIVES or not row.nbytes:
            continue
        plan = backends.plan(Request(row.kind, float(row.nbytes)), as_set)
        same = (row.algorithm, row.protocol) == (plan.algorithm, plan.protocol)
        alike += same
        ours = SimulatedChoice(plan.algorithm, plan.protocol, plan.n_channels)
        rows.append(ChoiceComparison(**msgspec.structs.asdict(row), ours=ours, same=same))
        choice_text = f"{row.kind} {format_bytes(row.nbytes)}: here {plan.algorithm} {plan.protocol}"
        lines.append(f"{choice_text} on {plan.n_channels} channels, {'as' if same else 'not as'} NCCL chose")
    if rows:
        lines.append(f"{alike} of {len(rows)} choices are NCCL's, on {topology.name}")
    reasons = list(_on_machine(log, topology, group))
    if reasons:
        lines = [line for line in lines if line not in {NOTHING, UNTOLD}] + conclusion(reasons)
    return msgspec.structs.replace(log, lines=lines, choices=rows, causes=[*log.causes, *reasons])


LARGE = float(1 << 30)
"""Bytes of a collective that uses every channel there is."""
NVLS = ("nvls", "nvls_tree")
"""Algorithms that reduce in the NVLink switches."""


def _on_machine(told: NcclLog, topology: Topology, group: Group) -> Iterator[Cause]:
    """What the log shows to be slower than on the machine that is named."""
    from clustersim.collectives import backends

    kinds = {cause.kind for cause in told.causes}
    joined_by = {"nvlink", "xgmi"} & set(topology.link_kinds)
    if "p2p_off" in kinds and joined_by:
        link = "NVLink" if "nvlink" in joined_by else "xGMI"
        text = f"host memory is used where {topology.name} has {link} between its GPUs"
        yield Cause("slower_than_machine", text, "P2P is off, as said above")
    there = sum(
        kind == NIC for kind, node in zip(topology.vertex_kinds, topology.vertex_node, strict=True) if node == 0
    )
    fewer = {host: used for host, used in told.nics.items() if told.nodes > 1 and 0 < len(used) < there}
    if fewer:
        why = f"NCCL_IB_HCA={told.set['NCCL_IB_HCA']}" if "NCCL_IB_HCA" in told.set else "NCCL found no more"
        least = min(fewer, key=lambda host: len(fewer[host]))
        rest = len(fewer) - 1
        others = f"; {rest} more {'machines use' if rest > 1 else 'machine uses'} fewer, too" if rest else ""
        text = f"{least} uses {len(fewer[least])} of the {there} NICs that a node of {topology.name} has"
        yield Cause("few_nics", f"{text}: {few(fewer[least], SHOWN)}{others}", why)
    large = backends.plan(Request("all_reduce", LARGE), group)
    if large.algorithm in NVLS and told.channels.get("nvls") == 0 and "nvls_off" not in kinds:
        text = f"NVLink SHARP (NVLS) has no channels, and all_reduce runs {large.algorithm} on {topology.name}"
        yield Cause("nvls_off", text, "the log does not say; NCCL_DEBUG_SUBSYS=INIT,NVLS,TUNING does")
    usual = large.n_channels
    channels = told.channels.get("coll", 0)
    if 0 < channels < usual:
        text = f"collectives have {channels} channels, and up to {usual} on {topology.name}"
        why = (
            "the environment limits them"
            if "few_channels" in kinds
            else "NCCL found fewer or slower paths than the machine has"
        )
        why = "P2P is off" if "p2p_off" in kinds else why
        yield Cause("few_channels", text, why)


class _LoggedPin(msgspec.Struct, omit_defaults=True):
    kind: str
    algorithm: str
    protocol: str
    least: str
    most: str
    ranks: int = 0


def pins(log: NcclLog) -> str:
    """The log's choices as ``[[run.pins]]`` of a scenario: neighbouring sizes of one choice are one, and between sizes
    of different ones nothing is pinned. Raises :class:`TraceError` where it tells none that can be played.
    """
    from clustersim.collectives.nccl_backend import TUNED

    pins: list[_LoggedPin] = []
    often = sorted(log.choices, key=lambda row: -row.count)
    chosen = {(row.kind, row.nbytes): row for row in reversed(often)}  # the most frequent of a size
    for (kind, nbytes), row in sorted(chosen.items()):
        last = pins[-1] if pins else None
        size = f"{nbytes} B"
        if kind not in TUNED or row.algorithm.startswith("collnet"):
            continue
        if last and (last.kind, last.algorithm, last.protocol) == (kind, row.algorithm, row.protocol):
            last.most = size
        else:
            pins.append(_LoggedPin(kind, row.algorithm, row.protocol, size, size, log.ranks))
    if not pins:
        raise TraceError(f"{log.source}: no choice that can be pinned; NCCL_DEBUG_SUBSYS=INIT,TUNING writes them")
    tables = (msgspec.to_builtins(pin).items() for pin in pins)
    lines = (["[[run.pins]]", *(f"{name} = {toml_value(value)}" for name, value in pin)] for pin in tables)
    return "".join("\n" + "\n".join(pin) + "\n" for pin in lines)


def _name(word: str, names: Sequence[str]) -> str:
    """A name as this program writes it, from a name or a number."""
    if word.isdecimal():
        return names[int(word)] if len(word) < 3 and int(word) < len(names) else word
    same = (name for name in names if name.lower().replace("_", "") == word.lower().replace("_", ""))
    return next(same, word)


def _lines(log: NcclLog) -> list[str]:
    version = f"NCCL {', '.join(log.versions)}: " if log.versions else ""
    ranks = several(log.ranks, "rank") if log.ranks else "? ranks"
    nodes = several(log.nodes, "node") if log.nodes else "? nodes"
    lines = [f"{version}{ranks} on {nodes}"]
    if log.channels:
        lines.append("channels: " + ", ".join(f"{n} {name}" for name, n in log.channels.items()))
    if log.transports:
        lines.append("transports: " + ", ".join(f"{n} via {name}" for name, n in sorted(log.transports.items())))
    lines += [f"pinned by the environment: {name}={value}" for name, value in log.set.items()]
    for row in log.choices:
        on = f" on {row.channels} channels" if row.channels else ""
        lines.append(f"{row.kind} {format_bytes(row.nbytes)}: {row.algorithm} {row.protocol}{on}, {row.count} x")
    if not log.choices:
        lines.append("no choice of an algorithm is told; NCCL_DEBUG_SUBSYS=INIT,TUNING writes them")
    return lines
