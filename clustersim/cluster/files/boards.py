"""What a machine's file leaves out, from the shipped machine with the same GPUs: NVLink, and the rate of NICs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from clustersim.cluster.files import pci
from clustersim.cluster.files.load import files, load
from clustersim.cluster.files.reading import read
from clustersim.core.errors import ClusterSimError
from clustersim.core.paths import shipped
from clustersim.core.topology import GPU, NIC, NVSWITCH, Topology
from clustersim.core.units import parse_bandwidth

WIRES = ("nvlink", "xgmi")
"""Links between the GPUs of a board."""
FIRST = ("hgx", "dgx")
"""Machines that are as the maker of the GPU builds them, before those of clouds."""
USUAL = 100.0
"""Gb/s of a port where nobody says more: of ConnectX-5 and -6 Dx, which most servers with cards have."""
PORTS = (25.0, 40.0, 50.0, 100.0, 200.0, 400.0, 800.0)
"""Gb/s of ports there are."""


@dataclass(frozen=True)
class Board:
    """What joins the GPUs of a node.

    name : of the shipped machine. kind : ``nvlink`` or ``xgmi``. switched : [GB/s] of a GPU into NVSwitches, else 0.
    pairs : (GPU, GPU, GB/s) of direct links.
    """

    name: str
    kind: str
    switched: float
    pairs: tuple[tuple[int, int, float], ...] = ()


def board(device: str, gpus: int) -> Board | None:
    """What joins so many GPUs; None where no shipped machine tells.

    The machine with as many GPUs, or one with NVSwitches, or one whose GPUs are all joined alike.
    """
    candidates = [machine for machine in _machines(device) if any(kind in WIRES for kind in machine.link_kinds)]
    for machine in sorted(candidates, key=lambda candidate: candidate.node_types[0].n_gpus != gpus):
        joined = _joined(machine, gpus)
        if joined is not None:
            return joined
    return None


@dataclass(frozen=True)
class NicRate:
    """Gb/s of a NIC (0 where machines disagree), what says so, and the ``net`` of the machine that does."""

    rate: float
    why: str
    net: str = ""


def nic_rate(device: str, gpus: int, device_id: str, speaks: str) -> NicRate | None:
    """What a NIC of such a machine has: its PCI device id says so, or the machine; None where neither does.

    speaks : a key of :data:`pci.FAMILIES`, or nothing. A machine whose NICs are of another kind tells nothing of their
    rate; where it alone has as many GPUs, and another rate, none is told.
    """
    port = pci.nic_port(device_id)
    if port is not None:
        return NicRate(port[1], f"the fastest port of a {port[0]}")
    machines = _machines(device)
    board_rates = [(machine, rate) for machine in machines if _tells_nics(machine) for rate in _port_rates(machine)]
    alike = [(m, rate) for m, rate in board_rates if not speaks or m.node_types[0].net in pci.FAMILIES[speaks]]
    as_many = [(m, rate) for m, rate in board_rates if m.node_types[0].n_gpus == gpus]
    best = [pair for pair in as_many if pair in alike] or alike
    rates = sorted({rate for _, rate in as_many + alike})
    if board_rates and not (best and best[0] in as_many) and len(rates) > 1 and as_many:
        return NicRate(0.0, " and ".join(f"{rate:g}" for rate in rates))
    if best:
        machine, rate = best[0]
        return NicRate(rate, f"as in {machine.name}", machine.node_types[0].net)
    return NicRate(USUAL, "the usual port of a server whose maker names none") if machines else None


def _port_rates(machine: Topology) -> list[float]:
    """Gb/s of the NICs of a machine where they are all alike."""
    is_nic = np.array([kind == NIC for kind in machine.vertex_kinds])
    ports = np.array([kind == "net" for kind in machine.link_kinds]) & is_nic[machine.link_src]
    rates = np.unique(machine.link_bandwidth[ports])
    return [float(rates[0]) * 8 / 1e9] if len(rates) == 1 else []


def _tells_nics(machine: Topology) -> bool:
    """Whether a shipped machine has its maker's NICs, and none that are assumed there too."""
    nodes = [spec.node for spec in map(read, files(machine.name)) if spec.node is not None]
    return not any(part.kind == "nic" and part.source.startswith("assumed") for node in nodes for part in node.vertices)


def carried(rate: float, slot: float) -> float:
    """Gb/s of a port that a slot of so many GB/s does not slow down, where ``rate`` would be more."""
    ports = [port for port in PORTS if port <= slot * 8]
    return min(rate, max(ports, default=rate))


@lru_cache(maxsize=64)
def _machines(device: str) -> tuple[Topology, ...]:
    """Shipped machines with this GPU, the plainest first."""
    names = sorted(shipped("topologies"), key=lambda name: (not name.startswith(FIRST), len(name), name))
    loaded = (load(name, nodes=2) for name in names)
    return tuple(machine for machine in loaded if {kind.device for kind in machine.node_types} == {device})


def _joined(machine: Topology, gpus: int) -> Board | None:
    first = machine.gpus[machine.vertex_node[machine.gpus] == 0].tolist()
    rates: dict[tuple[int, int], float] = {}
    switched = 0.0
    kind = ""
    for src, dst, rate, word in zip(
        machine.link_src.tolist(),
        machine.link_dst.tolist(),
        machine.link_bandwidth.tolist(),
        machine.link_kinds,
        strict=True,
    ):
        if word not in WIRES or src not in first:
            continue
        kind = word
        if machine.vertex_kinds[dst] == NVSWITCH:
            switched += rate / 1e9 if src == first[0] else 0.0
        elif machine.vertex_kinds[dst] == GPU and dst in first:
            rates[first.index(src), first.index(dst)] = rate / 1e9
    pairs = tuple((a, b, rate) for (a, b), rate in sorted(rates.items()) if a < b)
    if switched:
        return Board(machine.name, kind, switched)
    whole = len(pairs) == len(first) * (len(first) - 1) // 2 and len({rate for *_, rate in pairs}) == 1
    if len(first) == gpus or (whole and gpus < len(first)):
        return Board(machine.name, kind, 0.0, tuple(pair for pair in pairs if pair[1] < gpus))
    return None


def nics_asked(text: str) -> tuple[int, float]:
    """``8x400Gb/s``: how many NICs, and the rate of each [Gb/s]. Raises :class:`ClusterSimError`."""
    count, rate = nics_in_words(text)
    if count < 1:
        raise ClusterSimError(_no_nics(text))
    return count, parse_bandwidth(rate) * 8 / 1e9


def nics_in_words(text: str) -> tuple[int, str]:
    """How many NICs, and the rate of each as a topology file writes it. Raises :class:`ClusterSimError`.

    >>> nics_in_words("8x400Gb/s")
    (8, '400 Gb/s')
    """
    match = re.fullmatch(r"(\d+)\s*x\s*(.+)", text.strip())
    if match is None:
        raise ClusterSimError(_no_nics(text))
    return int(match[1]), re.sub(r"(?<=\d)(?=[A-Za-z])", " ", match[2].strip())


def _no_nics(text: str) -> str:
    return f"--nics {text!r}: write a number and a rate, such as 8x400Gb/s"
