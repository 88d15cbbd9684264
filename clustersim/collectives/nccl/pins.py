"""Pins of algorithm and protocol, read as NCCL_ALGO and NCCL_PROTO are."""

from __future__ import annotations

from clustersim.collectives.nccl.constants import PROTOCOLS
from clustersim.errors import ProgramError, nearest

_SPELT = {
    "Tree": "tree",
    "Ring": "ring",
    "CollNetDirect": "collnet_direct",
    "CollNetChain": "collnet_chain",
    "NVLS": "nvls",
    "NVLSTree": "nvls_tree",
    "PAT": "pat",
}


def _plain(word: str) -> str:
    return word.strip().lower().replace("_", "").replace("-", "")


def _read(pin: str | None, known: dict[str, str], what: str) -> tuple[str, ...] | None:
    """Names of a comma list; ``^`` in front means all but those."""
    if pin is None or not pin.strip():
        return None
    plain = {_plain(name): value for name, value in known.items()}
    refuse = pin.strip().startswith("^")
    named = []
    for word in pin.strip().lstrip("^").split(","):
        if _plain(word) not in plain:
            raise ProgramError(f"no {what} {word.strip()!r}; {nearest(word.strip(), known)}")
        named.append(plain[_plain(word)])
    everything = dict.fromkeys(known.values())
    return tuple(name for name in everything if (name in named) != refuse)


def pinned_algorithms(pin: str | None) -> tuple[str, ...] | None:
    """Algorithms a pin leaves, by the names used here; None without a pin.

    >>> pinned_algorithms("NVLSTree,ring")
    ('ring', 'nvls_tree')

    Raises
    ------
    ProgramError : an unknown name, with the nearest known one.
    """
    return _read(pin, _SPELT, "NCCL algorithm")


def pinned_protocols(pin: str | None) -> tuple[str, ...] | None:
    """Protocols a pin leaves; None without a pin.

    >>> pinned_protocols("^LL128")
    ('LL', 'Simple')

    Raises
    ------
    ProgramError : an unknown name, with the nearest known one.
    """
    return _read(pin, {name: name for name in PROTOCOLS}, "NCCL protocol")
