"""``ibnetdiscover -p``: every cable of an InfiniBand network, and so which switch each NIC is on.

A line is a cable (infiniband-diags' ``ibnetdiscover``): the kind of what is at each end (CA, SW), its LID, its port and
GUID, the cable's width and speed, and both names: ``CA 4 1 0x.. 4x HDR - SW 21 5 0x.. ( 'node0 mlx5_0' - 'leaf0' )``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from clustersim.core.errors import TraceError
from clustersim.files import slices
from clustersim.files.traces import files
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.told import Cabling

_CABLE = re.compile(
    r"^\s*(?P<kind>CA|SW) +\d+ +\d+ 0x[0-9a-f]{16} \S+ \S+ - (?P<other_kind>CA|SW) +\d+ +\d+ 0x[0-9a-f]{16} "
    r"\( '(?P<name>[^'\n]{1,200})' - '(?P<other>[^'\n]{1,200})' \)\s*$",
    re.M,
)
_NUMBER = re.compile(r"(\d+)$")


def sniff(head: Head) -> Likeness:
    """Whether lines are cables."""
    return likeness(named=" 0x" in head.text and "( '" in head.text, shaped=bool(_CABLE.search(head.text)))


def read(paths: Sequence[Path]) -> Cabling:
    """Which switch each NIC is on. Raises :class:`TraceError` for a list without a cable of a NIC."""
    switches: dict[str, str] = {}
    for path in paths:
        for match in _CABLE.finditer(files.text(path)):
            ends = {match["kind"]: match["name"], match["other_kind"]: match["other"]}
            if ends.keys() == {"CA", "SW"}:
                switches[ends["CA"].strip().replace(" ", "/")] = ends["SW"].strip()
    if not switches:
        raise TraceError(f"{paths[0]}: no cable from a NIC to a switch; `ibnetdiscover -p` lists them")
    odd = odd_nics(switches)
    lines = [f"{nic} is on {switches[nic]}, where others of its number are not" for nic in odd]
    good = [f"all {len(switches)} NICs are on the switch of their number, or on one that all share"]
    return Cabling(", ".join(map(str, paths)), lines or good, switches, odd)


def odd_nics(switches: Mapping[str, str]) -> list[str]:
    """NICs on another switch than most of the same number at other machines; none where no switch has most of them."""
    by_number: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for nic, switch in switches.items():
        match = _NUMBER.search(nic)
        by_number[match[1] if match else ""][nic] = switch
    odd: list[str] = []
    for same in by_number.values():
        ((usual, times), *others) = Counter(same.values()).most_common(2)
        is_tie = any(count == times for _, count in others)
        odd += [nic for nic, switch in same.items() if switch != usual and not is_tie]
    return sorted(odd)


def write_cabling(nics: Mapping[str, str], path: Path, speed: str = "HDR") -> list[Path]:
    """Write the cables of these NICs (``"node0/mlx5_0"`` -> its switch); returns the file.

    Raises :class:`TraceError` where it cannot be written.
    """
    slices.replace_file(path, ("\n".join(_cables(nics, speed)) + "\n").encode())
    return [path]


def _cables(nics: Mapping[str, str], speed: str) -> Iterator[str]:
    lids = {name: 1 + i for i, name in enumerate(dict.fromkeys([*nics, *nics.values()]))}
    used: Counter[str] = Counter()
    for nic, switch in nics.items():
        used[switch] += 1
        ends = [("CA", nic.replace("/", " "), 1), ("SW", switch, used[switch])]
        (kind, name, port), (other_kind, other, other_port) = ends
        yield (
            f"{kind} {lids[nic]:5d} {port:2d} 0x{0xB859F00000000000 + lids[nic]:016x} 4x {speed} - {other_kind} "
            f"{lids[switch]:5d} {other_port:2d} 0x{0xB859F00000000000 + lids[switch]:016x} ( '{name}' - '{other}' )"
        )
