"""``NCCL_DEBUG=INFO`` logs: the version, who runs on how many nodes, channels, transports, and what the tuner chose.

Lines as NCCL 2.8 and later write them (src/init.cc, src/enqueue.cc): algorithms and protocols as names, or as their
numbers before 2.24 (src/include/nccl_common.h). A choice is told with ``NCCL_DEBUG_SUBSYS=INIT,TUNING``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clustersim.errors import TraceError
from clustersim.texts import short
from clustersim.traces import files
from clustersim.traces.samples import kind_of
from clustersim.traces.told import Told
from clustersim.units import format_bytes

ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
_VERSION = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)")
_COMM = re.compile(r"nranks (\d{1,8})(?: nNodes (\d{1,8}))?", re.I)
_CHANNELS = re.compile(
    r"(\d+) coll channels(?:, (\d+) collnet channels)?(?:, (\d+) nvls channels)?, (\d+) p2p channels"
)
_VIA = re.compile(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[(?:send|receive)\])? via (\w+(?:/\w+)?)")
_CHOICE = re.compile(r"(?:(\w+): )?(\d{1,18}) Bytes -> Algo (\w+) proto (\w+)(?:.*?\{(\d+)\.\.(\d+)\})?", re.I)
_SET = re.compile(r"\b(NCCL_\w+) set by environment to ([^\s.]+)")


def sniff(head: bytes) -> bool:
    """Whether this is a log with NCCL's own lines, and no table of nccl-tests, which is read as such."""
    return b" NCCL INFO " in head and b"out-of-place" not in head


def read(paths: Sequence[Path]) -> Told:
    """What NCCL said of itself. Raises :class:`TraceError` for a log without anything known."""
    facts: dict[str, Any] = {"versions": [], "ranks": 0, "nodes": 0, "channels": {}, "set": {}}
    via: Counter[str] = Counter()
    choices: Counter[tuple[str, int, str, str, int]] = Counter()
    for line in (line for path in paths for line in files.text(path).splitlines()):
        if found := _VERSION.search(line):
            facts["versions"] = sorted({*facts["versions"], found[1]})
        if "NCCL INFO" not in line:
            continue
        if (found := _COMM.search(line)) and int(found[1]) > facts["ranks"]:
            facts["ranks"], facts["nodes"] = int(found[1]), int(found[2] or 0)
        if found := _CHANNELS.search(line):
            named = dict(zip(("coll", "collnet", "nvls", "p2p"), found.groups(), strict=True))
            facts["channels"] = {name: int(n) for name, n in named.items() if n}
        if found := _VIA.search(line):
            via[found[1]] += 1
        if found := _SET.search(line):
            facts["set"][found[1]] = short(found[2])
        if found := _CHOICE.search(line):
            channels = int(found[6]) - int(found[5]) + 1 if found[5] else 0
            kind = kind_of(found[1] or "") or (found[1] or "a collective")
            choices[kind, int(found[2]), _name(found[3], ALGORITHMS), _name(found[4], PROTOCOLS), channels] += 1
    facts |= {"transports": dict(via), "choices": [
        {"kind": kind, "nbytes": nbytes, "algorithm": algorithm, "protocol": protocol, "channels": n, "count": count}
        for (kind, nbytes, algorithm, protocol, n), count in sorted(choices.items())
    ]}  # fmt: skip
    if not (facts["ranks"] or facts["channels"] or via or choices):
        raise TraceError(
            f"{paths[0]}: no communicator in this log; NCCL_DEBUG=INFO writes one (NCCL_DEBUG_SUBSYS=INIT)"
        )
    return Told(", ".join(map(str, paths)), tuple(_lines(facts)), facts)


def _name(word: str, known: Sequence[str]) -> str:
    """A name as this program writes it, from a name or a number."""
    if word.isdecimal():
        return known[int(word)] if len(word) < 3 and int(word) < len(known) else word
    same = (name for name in known if name.lower() == word.lower().replace("_", ""))
    return next(same, word)


def _lines(facts: dict[str, Any]) -> list[str]:
    version = f"NCCL {', '.join(facts['versions'])}: " if facts["versions"] else ""
    lines = [f"{version}{facts['ranks'] or '?'} ranks on {facts['nodes'] or '?'} nodes"]
    if facts["channels"]:
        lines.append("channels: " + ", ".join(f"{n} {name}" for name, n in facts["channels"].items()))
    if facts["transports"]:
        lines.append("transports: " + ", ".join(f"{n} via {name}" for name, n in sorted(facts["transports"].items())))
    lines += [f"pinned by the environment: {name}={value}" for name, value in facts["set"].items()]
    for row in facts["choices"]:
        on = f" on {row['channels']} channels" if row["channels"] else ""
        size = format_bytes(row["nbytes"])
        lines.append(f"{row['kind']} {size}: {row['algorithm']} {row['protocol']}{on}, {row['count']} x")
    if not facts["choices"]:
        lines.append("no choice of an algorithm is told; NCCL_DEBUG_SUBSYS=INIT,TUNING writes them")
    return lines
