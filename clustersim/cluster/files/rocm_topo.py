"""A machine as ``rocm-smi --showtopo`` or ``amd-smi topology`` tells it, as the tree that RCCL dumps of it, so that one
reader makes the file.

They say of two GPUs whether xGMI or PCIe joins them, and the first the NUMA node of each GPU; not which GPUs these are,
which ``--gpu`` does, how many xGMI links a pair has, nor what NICs there are (``--nics``): xGMI is then that of the
shipped machine, as said.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from clustersim.cluster.files.tool_texts import AMD_SMI_TABLE
from clustersim.core import gpu_file
from clustersim.core.errors import TopologyError, few

_TYPES = re.compile(r"Link Type between two GPUs\s*=+\s*\n(.*?)(?=^=|\Z)", re.DOTALL | re.MULTILINE)
_NUMA = re.compile(r"^GPU ?\[?(\d+)\]?\s*:\s*\(Topology\) Numa Node:\s*(\d+)", re.MULTILINE)
_GENERATION_4 = ("MI1", "MI2", "MI5", "MI6", "Radeon")
"""How names begin of GPUs whose PCIe is of generation 4: data sheets of AMD Instinct MI50 to MI250X; MI300A and later
have 5."""
_WORDS = {"XGMI", "PCIE", "0", "N/A", "SELF"}


def system(text: str, path: Path, gpu: str | None, nics: int) -> ET.Element:
    """The machine as RCCL would dump it, with so many NICs, each beside a GPU.

    Raises :class:`TopologyError` for a table that is not whole, or a GPU that these tools do not see.
    """
    if gpu is None:
        raise TopologyError(f"{path}: rocm-smi --showtopo does not say which GPUs these are; say --gpu")
    kind = gpu_file.named(gpu)
    if kind.sm:
        raise TopologyError(f"{path}: rocm-smi tells of AMD's GPUs, and a {kind.name} is NVIDIA's; is it this GPU?")
    types = _types(text, path)
    numa = dict(_NUMA.findall(text))
    homeless = [f"GPU{index}" for index in range(len(types)) if numa and str(index) not in numa]
    if homeless:
        raise TopologyError(f"{path}: no NUMA node of {few(homeless, 4)}, where others have one; was the text cut off?")
    tool = "amd-smi topology" if AMD_SMI_TABLE.search(text) else "rocm-smi --showtopo"
    root = ET.Element("system", source=tool, rates="assumed")
    near = [f"which of the {nics} NICs is near which GPU: as if spread over the GPUs' PCIe switches"] if nics else []
    near += [] if numa else ["all GPUs are on one NUMA node, of which the file does not tell"]
    if near:
        root.set("near", "; ".join(near))
    pairs = [f"{a}-{b}" for a, row in enumerate(types) for b, word in enumerate(row) if word == "XGMI" and a < b]
    joined = bool(pairs)
    root.set("joins", " ".join(pairs))
    root.set("left", "does not say how many xGMI links a pair has")
    cpus: dict[str, ET.Element] = {}
    speed = "16.0" if kind.name.startswith(_GENERATION_4) else "32.0"
    link = {"link_speed": f"{speed} GT/s PCIe", "link_width": "16"}
    for index in range(len(types)):
        home = numa.get(str(index), "0")
        above = ET.SubElement(
            cpus.setdefault(home, ET.Element("cpu", numaid=home)), "pci", {"class": "0x060400", **link}
        )
        part = ET.SubElement(above, "pci", {"class": "0x120000", "vendor": "0x1002", "busid": f"gpu{index}", **link})
        if not joined:
            ET.SubElement(part, "gpu", dev=str(index))
        for number in range(nics):
            if number * len(types) // nics == index:
                nic = ET.SubElement(ET.SubElement(above, "pci", {"class": "0x02", **link}), "nic")
                ET.SubElement(nic, "net", name=f"nic{number}")
    root.extend(cpus.values())
    return root


def _types(text: str, path: Path) -> list[list[str]]:
    """What joins each GPU with each."""
    table = _TYPES.search(text) or AMD_SMI_TABLE.search(text)
    lines = [line.split() for line in table[1].splitlines() if line.strip(" *")] if table else []
    rows = [line[1:] for line in lines[1:]]
    whole = rows and all(len(row) == len(rows) == len(lines[0]) and set(row) <= _WORDS for row in rows)
    if not whole:
        raise TopologyError(f"{path}: the table of link types between two GPUs is not whole; print it again")
    return rows
