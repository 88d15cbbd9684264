"""Pins of algorithm and protocol, read as NCCL_ALGO and NCCL_PROTO are."""

from __future__ import annotations

from collections.abc import Iterable

from clustersim.collectives.nccl.constants import PROTOCOLS
from clustersim.core.errors import ProgramError, nearest

_SPELT = {
    "Tree": "tree",
    "Ring": "ring",
    "CollNet": "collnet_direct",
    "CollNetDirect": "collnet_direct",
    "CollNetChain": "collnet_chain",
    "NVLS": "nvls",
    "NVLSTree": "nvls_tree",
    "PAT": "pat",
}


def _plain(word: str) -> str:
    return word.strip().lower().replace("_", "").replace("-", "")


_KINDS = {
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
}


def _for_kind(pin: str, kind: str) -> str:
    """The list that holds for a kind: its own, else that without a kind (since NCCL 2.24, ``ring;allreduce:tree``).

    Raises :class:`ProgramError` for an unknown kind.
    """
    general = ""
    for part in pin.split(";"):
        named, colon, names_text = part.rpartition(":")
        if not colon:
            general = general or names_text.strip()
        elif _plain(named) not in _KINDS:
            raise ProgramError(f"no NCCL function {named.strip()!r}; {nearest(_plain(named), _KINDS)}")
        elif _KINDS[_plain(named)] == kind:
            return names_text.strip()
    return general


def _read(
    pin: str | None, kind: str, spellings: dict[str, str], subject: str, more_names: Iterable[str] = ()
) -> tuple[str, ...] | None:
    """Names of a comma list; ``^`` in front means all but those. ``more_names`` are names that the field takes
    besides."""
    listed = _for_kind(pin or "", kind)
    if not listed:
        return None
    plain = {_plain(name): value for name, value in spellings.items()}
    refuse = listed.startswith("^")
    named = []
    for word in filter(str.strip, listed.lstrip("^").split(",")):
        if _plain(word) not in plain:
            more = [name for name in more_names if _plain(name) not in plain]
            raise ProgramError(f"no {subject} {word.strip()!r}; {nearest(word.strip(), [*spellings, *more])}")
        named.append(plain[_plain(word)])
    everything = dict.fromkeys(spellings.values())
    return tuple(name for name in everything if (name in named) != refuse)


def pinned_algorithms(
    pin: str | None, kind: str = "all_reduce", more_names: Iterable[str] = ()
) -> tuple[str, ...] | None:
    """Algorithms a pin leaves for a kind, by the names used here; None without a pin.

    >>> pinned_algorithms("NVLSTree,ring"), pinned_algorithms("ring;allreduce:^tree,collnet", "broadcast")
    (('ring', 'nvls_tree'), ('ring',))

    ``more_names`` : further names that the field takes, for the error. Raises :class:`ProgramError` for an unknown
    name, with the nearest known one.
    """
    return _read(pin, kind, _SPELT, "NCCL algorithm", more_names)


def pinned_protocols(pin: str | None, kind: str = "all_reduce") -> tuple[str, ...] | None:
    """Protocols a pin leaves for a kind; None without a pin.

    >>> pinned_protocols("^LL128")
    ('LL', 'Simple')

    Raises :class:`ProgramError` for an unknown name, with the nearest known one.
    """
    return _read(pin, kind, {name: name for name in PROTOCOLS}, "NCCL protocol")
