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
    found = ""
    for part in pin.split(";"):
        named, colon, words = part.rpartition(":")
        if not colon:
            found = found or words.strip()
        elif _plain(named) not in _KINDS:
            raise ProgramError(f"no NCCL function {named.strip()!r}; {nearest(_plain(named), _KINDS)}")
        elif _KINDS[_plain(named)] == kind:
            return words.strip()
    return found


def _read(
    pin: str | None, kind: str, known: dict[str, str], what: str, others: Iterable[str] = ()
) -> tuple[str, ...] | None:
    """Names of a comma list; ``^`` in front means all but those. ``others`` are names that the field takes besides."""
    listed = _for_kind(pin or "", kind)
    if not listed:
        return None
    plain = {_plain(name): value for name, value in known.items()}
    refuse = listed.startswith("^")
    named = []
    for word in filter(str.strip, listed.lstrip("^").split(",")):
        if _plain(word) not in plain:
            more = [name for name in others if _plain(name) not in plain]
            raise ProgramError(f"no {what} {word.strip()!r}; {nearest(word.strip(), [*known, *more])}")
        named.append(plain[_plain(word)])
    everything = dict.fromkeys(known.values())
    return tuple(name for name in everything if (name in named) != refuse)


def pinned_algorithms(pin: str | None, kind: str = "all_reduce", others: Iterable[str] = ()) -> tuple[str, ...] | None:
    """Algorithms a pin leaves for a kind, by the names used here; None without a pin.

    >>> pinned_algorithms("NVLSTree,ring"), pinned_algorithms("ring;allreduce:^tree,collnet", "broadcast")
    (('ring', 'nvls_tree'), ('ring',))

    ``others`` : further names that the field takes, for the error. Raises :class:`ProgramError` for an unknown name,
    with the nearest known one.
    """
    return _read(pin, kind, _SPELT, "NCCL algorithm", others)


def pinned_protocols(pin: str | None, kind: str = "all_reduce") -> tuple[str, ...] | None:
    """Protocols a pin leaves for a kind; None without a pin.

    >>> pinned_protocols("^LL128")
    ('LL', 'Simple')

    Raises :class:`ProgramError` for an unknown name, with the nearest known one.
    """
    return _read(pin, kind, {name: name for name in PROTOCOLS}, "NCCL protocol")
