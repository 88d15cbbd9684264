"""A machine as NCCL found it (``NCCL_TOPO_DUMP_FILE``'s XML), or as other tools print it -> a topology file."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

from clustersim.cluster.files import beside, lstopo, prefixed, rocm_topo, smi_topo
from clustersim.cluster.files.machine_text import machine_text
from clustersim.cluster.files.tool_texts import is_amd_report, is_hwloc_tree, is_matrix
from clustersim.cluster.files.xml_machine import XmlMachine
from clustersim.core import texts
from clustersim.core.errors import TopologyError

TOOLS = {
    "NCCL_TOPO_DUMP_FILE, NCCL_TOPO_FILE": "of NCCL and RCCL; with the PCI tree alone NVLink is the board's",
    "nvidia-smi topo -m": "with or without NUMA nodes and NICs, in a page's table too; --gpu or nvlink -s says which",
    "lstopo --of xml": "hwloc 1.11 to 2.x",
    "rocm-smi --showtopo": "its table of link types, with --gpu and --nics",
    "ibstat, ibstatus, ibv_devinfo -v, nvidia-smi nvlink -s": "beside one of the others: rates, and what is down",
}
"""What tells a machine, and of which releases it is read."""


def topology_text(path: Path | Sequence[Path], gpu: str | None = None, nics: tuple[int, float] | None = None) -> str:
    """The topology file (TOML) of a machine; ``gpu`` names its device where the PCI id is not known.

    path : what NCCL, ``nvidia-smi topo -m``, ``rocm-smi --showtopo`` or ``lstopo --of xml`` wrote, and beside it what
        ``ibstat``, ``ibv_devinfo -v`` and ``nvidia-smi nvlink -s`` print. nics : how many NICs of a node join it to
        others, and their rate [Gb/s], where the files do not say.

    Files for ``NCCL_TOPO_FILE`` are read as well, which hold the PCI tree alone: NVLink and rates of NICs are then
    those of the shipped machine with these GPUs, and the file that is written says so in ``assumed``. Raises
    :class:`TopologyError` for a text that is no dump, or one without GPUs.
    """
    machine, also = beside.parted([path] if isinstance(path, Path) else path)
    text = prefixed.plain_text(machine)
    gpu = gpu or also.gpu
    if is_matrix(text):
        gpu = gpu or smi_topo.named_gpu(text, machine)
        document = smi_topo.system(text, machine, gpu)
    elif is_amd_report(text):
        document = rocm_topo.system(text, machine, gpu, nics[0] if nics else 0)
    else:
        document = lstopo.system(text, machine) if is_hwloc_tree(text) else _system(text, machine)
    return machine_text(XmlMachine(document, machine, gpu, nics, also))


_FABRIC = {
    "ibnetdiscover": re.compile(r"^# Topology file: generated on|^switchguid=0x", re.MULTILINE),
    "iblinkinfo": re.compile(r"^(?:CA|Switch): .*:$\n.*==\(\s*\d+X\s", re.MULTILINE),
    "Slurm's topology": re.compile(r"^(?:SwitchName|BlockName)=|^- topology: ", re.MULTILINE | re.IGNORECASE),
    "LLDP": re.compile(r"^\{\s*\"lldp\"|^LLDP neighbors:", re.MULTILINE),
}
"""Of tools and files that tell which switches machines hang off."""
_PASSED_OVER = re.compile(r"<!--.*?-->|<\?xml\b.*?\?>", re.DOTALL)


def _system(text: str, path: Path) -> ET.Element:
    if tool := next((name for name, pattern in _FABRIC.items() if pattern.search(text)), ""):
        raise TopologyError(
            f"{path}: is of {tool}, which tells the network between machines and nothing inside of one; give "
            "nvidia-smi topo -m or NCCL_TOPO_DUMP_FILE of a node, and say the network in [fabric] of what is written"
        )
    # NCCL's own reader passes over comments that XML forbids: a line of dashes, or one before the declaration.
    if not text.lstrip("\ufeff \t\r\n").startswith("<"):
        text = _inside(text, path)
    plain = _PASSED_OVER.sub(lambda passed: "\n" * passed[0].count("\n"), text)
    if "<!" in plain:
        raise TopologyError(f"{path}: declares a type or entities, which NCCL's dumps do not")
    try:
        root = ET.fromstring(plain)
    except (ET.ParseError, ValueError, RecursionError) as error:
        raise TopologyError(f"{path}: is not XML: {error}") from None
    if root.tag == "graphs":
        raise TopologyError(
            f"{path}: is of NCCL_GRAPH_DUMP_FILE, the channels that NCCL chose and not the machine; give what "
            "NCCL_TOPO_DUMP_FILE writes in the same run"
        )
    if root.tag != "system":
        raise TopologyError(f"{path}: holds <{texts.short(root.tag)}>, not the <system> of NCCL_TOPO_DUMP_FILE")
    _part_merged(root)
    return root


def _inside(text: str, path: Path) -> str:
    """The dump that stands in a page or behind a command. Raises :class:`TopologyError` where there is none, or two."""
    dumps = re.findall(r"<system\b.*?(?:</system>|\Z)", text, re.DOTALL)
    if len(dumps) == 1:
        return str(dumps[0])
    if dumps:
        raise TopologyError(f"{path}: holds {len(dumps)} dumps of NCCL; give one of them")
    if re.search(r"^\s*GPU0GPU1", text, re.MULTILINE):
        raise TopologyError(
            f"{path}: the columns of nvidia-smi topo -m are run together ('GPU0GPU1'), so that a GPU's cores and its "
            "NUMA node cannot be told apart; give the matrix with the blanks between them"
        )
    raise TopologyError(f"{path}: tells no machine in a way that is read; what does: {', '.join(TOOLS)}")


def _part_merged(root: ET.Element) -> None:
    """Leave out what NCCL merges of NICs that are there themselves (``mlx5_0+mlx5_1``, since 2.23): the same ports."""
    names = {net.get("name", "") for net in root.iter("net")}
    for above in list(root.iter()):
        for nic in above.findall("nic"):
            ports = nic.findall("net")
            for net in ports:
                parts = net.get("name", "").split("+")
                if len(parts) > 1 and names.issuperset(parts):
                    nic.remove(net)
            if ports and not nic.findall("net"):
                above.remove(nic)
