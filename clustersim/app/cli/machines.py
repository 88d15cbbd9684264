"""The machine of a file that ``clustersim new`` writes, from ``--gpu`` and ``--topology``."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clustersim.core import gpu_file
from clustersim.core.device import device
from clustersim.core.device_names import device_from_text, other_parts
from clustersim.core.errors import ClusterSimError
from clustersim.core.paths import shipped

if TYPE_CHECKING:
    from clustersim.core.device import Device


@dataclass(frozen=True)
class MachineChoice:
    """A machine that was asked for.

    topology : a shipped one's name, or a file. gpu : what stands in its sockets, a shipped GPU's name or a file of one;
    empty for the machine's own.
    """

    topology: str
    gpu: str = ""

    @property
    def label(self) -> str:
        """In sentences."""
        return f"{self.topology} with {self.gpu}" if self.gpu else self.topology

    @property
    def gpus(self) -> list[Device]:
        """The kinds of GPU that it has."""
        from clustersim.cluster import files as fabrics

        if gpu_file.is_own(self.gpu):
            return [gpu_file.load(self.gpu)]
        return [device(self.gpu)] if self.gpu else [kind.gpu for kind in fabrics.load(self.topology).node_types]

    @property
    def dtype(self) -> str:
        """bf16, or fp16 on GPUs without it."""
        return "bf16" if all("bf16" in gpu.peak for gpu in self.gpus) else "fp16"

    @property
    def has_fp8(self) -> bool:
        """Whether its GPUs have units for 8-bit products."""
        return all("fp8" in gpu.peak for gpu in self.gpus)

    def device_line(self, file: Path) -> str:
        """``device = "..."`` of a table in this file; empty where the machine keeps its own."""
        return f'device = "{as_written(self.gpu, file)}"\n' if self.gpu else ""

    def node_lines(self) -> list[str]:
        """Of ``[node]`` of a topology whose sockets have another shipped GPU."""
        return [f'device = "{self.gpu}"'] if self.gpu and not gpu_file.is_own(self.gpu) else []

    def device_table(self) -> list[str]:
        """``[device]`` of a topology that carries the GPU of a file, as that file has it; none for others."""
        if not gpu_file.is_own(self.gpu):
            return []
        text = Path(self.gpu).read_text("utf-8")
        head = re.search(r"^\[device\]", text, re.MULTILINE)
        return ["", text[head.start() if head else 0 :].rstrip()]


def taken_for(gpu: str | None, choice: MachineChoice) -> str:
    """Which GPU and machine ``--gpu`` was taken for, and what it could mean besides; empty where nothing is open."""
    if gpu is None or gpu_file.is_own(gpu):
        return ""
    taken = choice.gpus[0]
    others = other_parts(gpu, taken)
    carrying = [] if choice.gpu else [name for name in shipped("topologies") if devices(name) == {taken.name}]
    carrying = [name for name in carrying if name != choice.topology]
    shared = _domain_of(choice.topology)
    counts = {name: _gpus_a_node(name) for name in (choice.topology, *carrying)}
    differ = len(set(counts.values())) > 1  # whoever asks for one node means one of them
    if differ and not shared:
        shared = f", {counts[choice.topology]} GPUs a node"
    if not others and not carrying and not shared:
        return ""
    also = f"; {gpu} is also {', '.join(others)}" if others else ""
    if carrying:
        more = ", ..." if len(carrying) > 3 else ""
        sized = [f"{name} ({counts[name]} a node)" if differ else name for name in carrying[:3]]
        also += f"; it is in {', '.join(sized)}{more} as well (--topology)"
    return f"--gpu {gpu}: taken for {taken.name} of {choice.topology}{shared}{also}"


def _gpus_a_node(topology: str) -> int:
    """Of a shipped machine, or of a file."""
    from clustersim.cluster import files as fabrics
    from clustersim.core.topology import GPU

    return sum(kind == GPU for kind in fabrics.node(topology).kinds.values())


def _domain_of(topology: str) -> str:
    """Of a shipped machine whose nodes share an NVLink domain, as trays of a rack do: how many, and what a node is."""
    from clustersim.cluster import files as fabrics
    from clustersim.core.topology import GPU

    node = fabrics.node(topology) if topology in shipped("topologies") else None
    if node is None or node.domain is None:
        return ""
    gpus = sum(kind == GPU for kind in node.kinds.values())
    return f", whose nodes are trays of {gpus} GPUs, up to {node.domain.nodes} in one NVLink domain (--nodes)"


def machine_of(gpu: str | None, topology: str | None) -> MachineChoice:
    """The machine asked for.

    Of a GPU alone, the plainest shipped machine that carries it, or that carries what the GPU of a file extends; beside
    a topology the GPU stands in its sockets. Raises :class:`ClusterSimError` where nothing shipped carries it.
    """
    from clustersim.cluster import files as fabrics

    if topology is not None:
        fabrics.load(topology)
        if gpu is None:
            return MachineChoice(topology)
        if gpu and all(name.lower().startswith(gpu.lower()) for name in devices(topology)):
            return MachineChoice(topology)  # A100 is the A100 that it has, of 40 GB or of 80
        return MachineChoice(topology, gpu if gpu_file.is_own(gpu) else device_from_text(gpu).name)
    if gpu is None or not gpu_file.is_own(gpu):
        return MachineChoice(_carrier("H100" if gpu is None else gpu))
    base = gpu_file.base_of(gpu)
    if base is None:
        raise ClusterSimError(f"--gpu {gpu}: it extends no shipped GPU, so no machine is known for it: give --topology")
    return MachineChoice(_carrier(base), gpu)


def _carrier(gpu: str) -> str:
    """The plainest shipped machine that carries a GPU."""
    shipped_names = shipped("topologies")
    if (plain := f"hgx-{gpu.lower()}") in shipped_names:
        return plain  # A100 alone is the 80 GB one there, and the 40 GB one elsewhere
    wanted = device_from_text(gpu).name
    carry = [name for name in shipped_names if devices(name) == {wanted}]
    if not carry:
        raise ClusterSimError(f"--gpu {gpu}: no shipped machine carries {wanted}; clustersim list topologies")
    own = f"{wanted.partition('-')[0].lower()}-"  # gb200-nvl72, before a cloud's name for the same racks
    plain_names = ("dgx", "hgx", "pcie", own)
    return min(carry, key=lambda name: (not name.startswith(plain_names), len(name), name[:3] != "hgx"))


def devices(topology: str) -> set[str]:
    """GPUs of a machine, by name."""
    from clustersim.cluster import files as fabrics

    return {kind.device for kind in fabrics.load(topology).node_types}


def as_written(machine: str, file: Path) -> str:
    """A machine's or a GPU's name, or its path from the folder of the file that names it."""
    return os.path.relpath(machine, file.parent) if machine.endswith(".toml") else machine
