"""What is given beside the file that tells a machine: rates of its NICs, and which of its NVLinks work.

``ibstat``, ``ibstatus`` and ``ibv_devinfo`` say the rate, the state and the link layer of each port, ``nvidia-smi
nvlink -s`` which GPUs these are and the NVLinks of each. None tells how the parts hang together, so none is a machine
by itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clustersim.cluster.files import prefixed
from clustersim.cluster.files.tool_texts import is_matrix
from clustersim.core.device_names import device_from_text
from clustersim.core.errors import TopologyError

LANES = {1: 1, 2: 4, 4: 8, 8: 12, 16: 2}
"""Lanes by ``active_width`` of ibverbs (rdma-core libibverbs/verbs.h)."""
LANE = {1: 2.5, 2: 5.0, 4: 10.0, 8: 10.0, 16: 14.0, 32: 25.0, 64: 50.0, 128: 100.0, 256: 200.0}
"""Gb/s of a lane by ``active_speed`` of ibverbs, as the trade counts them: SDR to XDR."""
_IBSTAT = re.compile(r"^CA '([\w.-]+)'", re.MULTILINE)
_STATUS = re.compile(r"^Infiniband device '([\w.-]+)' port (?=\d+ status:)", re.MULTILINE)
_LAYER = re.compile(r"^\s*link[ _]layer:\s*(infiniband|ethernet)\b", re.MULTILINE | re.IGNORECASE)
_DEVINFO = re.compile(r"^hca_id:\s*([\w.-]+)", re.MULTILINE)
_GPU = re.compile(r"^\s*GPU (\d+): ([^\n(]+?) *(?:\(UUID[^\n]*)?$", re.MULTILINE)
_LINK = re.compile(r"^\s*Link \d+: (?:([\d.]+) GB/s|(<?inactive>?))", re.MULTILINE)


@dataclass
class Beside:
    """What was given beside a machine.

    ports : Gb/s of each NIC by name, 0 for one that is down. layers : whether it is of InfiniBand (``ib``) or Ethernet
    (``roce``), where told. links : working NVLinks and all of each GPU, in its order.
    gpu : which GPUs these are, where a file says it. names : of the files, by what they tell.
    """

    ports: dict[str, float] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)
    links: list[tuple[int, int]] = field(default_factory=list)
    gpu: str | None = None
    names: dict[str, str] = field(default_factory=dict)


def parted(paths: Sequence[Path]) -> tuple[Path, Beside]:
    """The file that tells the machine, and what the others say.

    Raises :class:`TopologyError` where none or several of them tell a machine.
    """
    beside = Beside()
    machines: list[Path] = []
    for path in paths:
        text = prefixed.plain_text(path)
        is_beside = _read(text, path, beside)
        if not is_beside or is_matrix(text):  # one report may hold both
            machines.append(path)
    if len(machines) == 1:
        return machines[0], beside
    if machines:
        raise TopologyError(f"{machines[1]}: tells a machine, and so does {machines[0].name}; give one of them")
    tool = " and ".join(beside.names)
    raise TopologyError(
        f"{paths[0]}: is of {tool}, which does not tell how the parts of a machine hang together; give what "
        "NCCL_TOPO_DUMP_FILE, nvidia-smi topo -m, rocm-smi --showtopo or lstopo --of xml writes, with it"
    )


def _read(text: str, path: Path, beside: Beside) -> bool:
    """Whether a file is one of these; what it says is kept."""
    tools = (("ibstat", _IBSTAT, _ibstat), ("ibstatus", _STATUS, _ibstatus), ("ibv_devinfo", _DEVINFO, _devinfo))
    for tool, head, reader in tools:
        parts = head.split(text)
        if len(parts) > 1:
            rates: dict[str, dict[str, float]] = {}  # of each NIC by port, which ibstatus names
            for name, said in zip(parts[1::2], parts[2::2], strict=True):
                port = said.split()[0] if tool == "ibstatus" and said.split() else ""
                rate = reader(said, f"{path}: {name}")
                if rates.setdefault(name, {}).setdefault(port, rate) != rate:
                    raise TopologyError(
                        f"{path}: {tool} has {name} twice, with {rates[name][port]:g} and {rate:g} Gb/s, so it is of "
                        "several machines; give what one of them prints"
                    )
                if layer := _LAYER.search(said):
                    beside.layers[name] = "ib" if layer[1].lower() == "infiniband" else "roce"
            beside.ports |= {name: sum(ports.values()) for name, ports in rates.items()}
            beside.names[tool] = path.name
            return True
    if _GPU.search(text) and _LINK.search(text):
        parts = _GPU.split(text)
        for name, said in zip(parts[2::3], parts[3::3], strict=True):
            links = _LINK.findall(said)
            beside.links.append((sum(bool(rate) for rate, _ in links), len(links)))
            beside.gpu = beside.gpu or device_from_text(name).name
        beside.names["nvidia-smi nvlink -s"] = path.name
        return True
    return False


def _ibstat(text: str, where: str) -> float:
    """Gb/s of the ports of a NIC that are up. Raises :class:`TopologyError` for a port that is cut off."""
    total = 0.0
    for port in re.split(r"^\s*Port \d+:\s*$", text, flags=re.MULTILINE)[1:]:
        state = re.search(r"^\s*State:\s*(\w+)", port, re.MULTILINE)
        rate = re.search(r"^\s*Rate:\s*([\d.]{1,9})(?:\s*\(\w+\))?\s*$", port, re.MULTILINE)
        if state is None or rate is None:
            raise TopologyError(f"{where}: a port has no State or no Rate; was the text cut off?")
        total += float(rate[1]) if state[1] == "Active" else 0.0
    return total


def _ibstatus(text: str, where: str) -> float:
    """Gb/s of a port that is up. Raises :class:`TopologyError` for one that is cut off."""
    state = re.search(r"^\s*state:\s*\d+:\s*(\w+)", text, re.MULTILINE)
    rate = re.search(r"^\s*rate:\s*([\d.]{1,9})\s*Gb/sec", text, re.MULTILINE)
    if state is None or rate is None:
        raise TopologyError(f"{where}: a port has no state or no rate; was the text cut off?")
    return float(rate[1]) if state[1] == "ACTIVE" else 0.0


def _devinfo(text: str, where: str) -> float:
    """Gb/s of the ports of a NIC that are up, of ``ibv_devinfo -v``.

    Raises :class:`TopologyError` where it was printed without ``-v``.
    """
    total = 0.0
    for port in re.split(r"^\s*port:\s*\d+\s*$", text, flags=re.MULTILINE)[1:]:
        state = re.search(r"^\s*state:\s*(?:PORT_)?(\w+)", port, re.MULTILINE)
        width = re.search(r"^\s*active_width:.*\((\d+)\)", port, re.MULTILINE)
        speed = re.search(r"^\s*active_speed:.*\((\d+)\)", port, re.MULTILINE)
        if state is not None and state[1] != "ACTIVE":
            continue
        if width is None or speed is None:
            raise TopologyError(f"{where}: has no active_width and active_speed; print it with ibv_devinfo -v")
        lanes = LANES.get(int(width[1][:9]), 0)
        lane = LANE.get(int(speed[1][:9]), 0.0)
        if not lanes or not lane:
            raise TopologyError(f"{where}: active_width {width[1]} or active_speed {speed[1]} is not known")
        total += lanes * lane
    return total
