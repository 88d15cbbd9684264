"""NCCL's environment: which of its variables are played, and a sentence for each that changes times and is not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import takewhile

import msgspec

from clustersim.core.errors import ProgramError, nearest
from clustersim.core.texts import data_table, short
from clustersim.core.topology import PATH_CLASSES, Topology

_TABLE = data_table("nccl_settings")
PLAYED: frozenset[str] = frozenset(_TABLE["played"])
"""Variables that are played."""
UNPLAYED: dict[str, tuple[str, list[str]]] = {
    name: (row["instead"], usual) for row in _TABLE["unplayed"] for name, usual in row["usual"].items()
}
"""Variables that change times and are not played: what is played instead, and the values that ask for that."""
_OLD_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")
"""Levels that were numbers, the last for all above (nccl src/graph/paths.cc, ncclGetLevel)."""
_SETTING = re.compile(r"\b([NR]CCL_[A-Z][A-Z0-9_]*)=(\"[^\"]*\"|'[^']*'|(?:(?![,;]+[NR]CCL_)[^\s\"'])*)")
"""One of several that spaces, commas or lines part; a list has commas too."""


NVLS_ALONE = "NVLink SHARP is used though GPUs do not read each other (NCCL_P2P_DISABLE), which nobody measured"


class NcclSettings(msgspec.Struct, frozen=True):
    """What an environment has NCCL do.

    Parameters
    ----------
    p2p_level : of :class:`clustersim.core.topology.NodeType`; empty where nothing says it. nvls : False where NVLink
        SHARP is off. algorithm, protocol : as in NCCL_ALGO and NCCL_PROTO.
    notes : a sentence for each variable that is not played as it is set.
    """

    p2p_level: str = ""
    nvls: bool = True
    algorithm: str | None = None
    protocol: str | None = None
    notes: tuple[str, ...] = ()

    def on(self, machine: Topology) -> Topology:
        """The machine as NCCL is let use it; itself where nothing changes."""
        if not self.p2p_level and self.nvls:
            return machine
        types = {
            id(kind): replace(kind, p2p_level=self.p2p_level or kind.p2p_level, nvls=kind.nvls and self.nvls)
            for kind in machine.node_types
        }
        assumed = machine.assumed
        if self.p2p_level == "LOC" and any(kind.nvls for kind in types.values()):
            assumed = (*assumed, NVLS_ALONE)
        return replace(machine, node_types=tuple(types[id(kind)] for kind in machine.node_types), assumed=assumed)


def settings_of(environment: Mapping[str, str]) -> NcclSettings:
    """What variables have NCCL do.

    >>> told = settings_of({"NCCL_P2P_LEVEL": "4", "NCCL_ALGO": "^Tree", "NCCL_BUFFSIZE": "8388608", "HOME": "/root"})
    >>> told.p2p_level, told.algorithm, told.notes  # doctest: +ELLIPSIS
    ('SYS', '^Tree', ('NCCL_BUFFSIZE=8388608 is not played: buffers and thresholds are those that NCCL has...',))
    """
    disabled = environment.get("NCCL_P2P_DISABLE", "").strip() == "1"
    return NcclSettings(
        p2p_level="LOC" if disabled else level_of(environment.get("NCCL_P2P_LEVEL", "")) or "",
        nvls=environment.get("NCCL_NVLS_ENABLE", "").strip() != "0",
        algorithm=environment.get("NCCL_ALGO", "").strip() or None,
        protocol=environment.get("NCCL_PROTO", "").strip() or None,
        notes=tuple(_unplayed(environment)),
    )


def level_of(text: str) -> str | None:
    """A level as its path class, as NCCL reads it: a name, or a number of old; None for another word, which it ignores.

    >>> level_of("PHB"), level_of("5"), level_of("phb")
    ('PHB', 'SYS', None)
    """
    word = text.strip()
    if digits := "".join(takewhile(str.isdecimal, word)):
        return _OLD_LEVELS[min(int(digits), len(_OLD_LEVELS) - 1)]
    return word if word in PATH_CLASSES[: PATH_CLASSES.index("SYS") + 1] else None


def environment_of(text: str) -> dict[str, str]:
    """NCCL's variables in a line of ``NAME=VALUE``.

    >>> environment_of('NCCL_ALGO="allreduce:tree;ring" NCCL_P2P_LEVEL=SYS,NCCL_PROTO=LL,Simple -x HOME=/root')
    {'NCCL_ALGO': 'allreduce:tree;ring', 'NCCL_P2P_LEVEL': 'SYS', 'NCCL_PROTO': 'LL,Simple'}
    """
    return {name: value.rstrip(",;").strip("\"'") for name, value in _SETTING.findall(text)}


def that_matter(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change times, whether they are played or not."""
    return {name: value for name, value in environment.items() if name in PLAYED or name in UNPLAYED}


def checked(environment: Mapping[str, str]) -> NcclSettings:
    """What a person asks for. Raises :class:`ProgramError` for a variable that is not known, and a level that is none:
    NCCL would pass both over in silence."""
    for name, value in environment.items():
        if not _is_known(name):
            raise ProgramError(f"no variable of NCCL is {short(name)!r}; {nearest(name, [*PLAYED, *UNPLAYED])}")
        if name == "NCCL_P2P_LEVEL" and value and level_of(value) is None:
            raise ProgramError(f"NCCL_P2P_LEVEL is no {short(value)!r}; write LOC, NVL, PIX, PXB, PHB or SYS")
    return settings_of(environment)


def _is_known(name: str) -> bool:
    return name in PLAYED or name in UNPLAYED or any(fnmatchcase(name, glob) for glob in _TABLE["silent"])


def _unplayed(environment: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(environment):
        value = environment[name]
        if name in UNPLAYED:
            instead, usual = UNPLAYED[name]
            if value not in usual:
                yield f"{name}={short(value)} is not played: {instead}"
        elif name == "NCCL_P2P_LEVEL" and value and level_of(value) is None:
            yield f"NCCL_P2P_LEVEL={short(value)} is no path class (LOC, NVL, PIX, PXB, PHB, SYS): NCCL ignores it"
        elif name.startswith(("NCCL_", "RCCL_")) and not _is_known(name):
            yield f"{name}={short(value)} is not known, and not played"
