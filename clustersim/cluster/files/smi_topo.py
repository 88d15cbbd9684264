"""A machine as ``nvidia-smi topo -m`` draws it, as the tree that NCCL dumps of it, so that one reader makes the file.

The matrix says how many NVLinks join two GPUs, and how near a GPU and a NIC are: PIX and PXB below the same PCIe
switches, NODE and PHB on one NUMA node, SYS across. It does not say which GPU it is, nor any rate: ``--gpu`` does, or
what nvidia-smi printed beside it; PCIe is of the GPU's generation with 16 lanes; rates of NICs are asked for, or those
of the shipped machine, as said.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from clustersim.cluster.files import wires
from clustersim.cluster.files.matrix_tables import WORD
from clustersim.cluster.files.tool_texts import MATRIX_HEAD, unstyled
from clustersim.core import gpu_file
from clustersim.core.device import Device, device
from clustersim.core.errors import TopologyError, few
from clustersim.core.texts import short

_LEGEND = re.compile(r"^[ \t]*(NIC\d+):[ \t]*([\w.-]+)[ \t]*$", re.MULTILINE)
_NAMED = re.compile(
    r"^[ \t]*\|[ \t]+\d+[ \t]+((?:NVIDIA|Tesla|Quadro|GeForce|TITAN) [^|\n]{1,60}?)[ \t]+(?:On|Off|N/A)[ \t]*\|"
    r"|^[ \t]*GPU \d+:[ \t]*((?:NVIDIA|Tesla|Quadro|GeForce|TITAN) [^(\n]{1,60}?)[ \t]*(?:\(UUID|$)"
    r"|^[ \t]*\d+, ((?:NVIDIA|Tesla|Quadro|GeForce|TITAN) [^,\n]{1,60})(?:,|$)",
    re.MULTILINE,
)
"""A GPU's name in nvidia-smi's table, in its list (-L, collect_env of PyTorch and vLLM), and in its CSV."""
_NEAR = ({"PIX"}, {"PIX", "PXB"})
"""Below one switch; below switches that one above them joins."""
_GLUED = re.compile(rf"(?:GPU\d+|NIC\d+){{2,}}|(?:{WORD.pattern}){{2,}}")
_GLUED_PART = re.compile(rf"GPU\d+|NIC\d+|{WORD.pattern}")
"""Columns between which reports of many NICs (collect_env of PyTorch and vLLM) lose the space."""
_SPEEDS = ((104, "32.0"), (103, "64.0"), (90, "32.0"), (80, "16.0"), (0, "8.0"))
"""GT/s of a lane, by compute capability from there on."""
RACKS = ("GB200", "GB300")
"""GPUs whose trays share NVSwitches in a rack."""
_PCI_ALONE = re.compile(r"nvidia-smi[ \t]+topo[ \t]+-mp\b")
"""The command whose matrix leaves NVLink out."""
_PEERS = ("OK", "CNS", "GNS", "TNS", "NS", "DR", "U")
"""Words of nvidia-smi topo -p2p."""
_READS = re.compile(r"\btopo[ \t]+-p2p[ \t]+(?:r|w|rw)\b")
"""The command whose words say whether GPUs read and write each other's memory; others of its are of NVLink."""
_INSTANCE = re.compile(r"^[ \t]*MIG[ \t]+\d+g\.\d+gb", re.MULTILINE)
"""A part of a GPU, as nvidia-smi -L lists it."""
Matrix = Mapping[str, Mapping[str, str]]
_Rows = tuple[list[str], dict[str, dict[str, str]], dict[str, str]]


def system(text: str, path: Path, gpu: str) -> ET.Element:
    """The machine as NCCL would dump it. Raises :class:`TopologyError` for a matrix that is not whole."""
    matrix, numa = _matrix(text, path)
    names = dict(_LEGEND.findall(unstyled(text)))
    kind = gpu_file.named(gpu)
    if not kind.sm:
        raise TopologyError(f"{path}: nvidia-smi tells of NVIDIA's GPUs, and a {kind.name} is none; is it this GPU?")
    _counted(matrix, kind, path)
    root = ET.Element("system", source="nvidia-smi topo -m", rates="assumed")
    hidden = _PCI_ALONE.search(unstyled(text)) is not None
    _reach(root, unstyled(text))
    if hidden:
        root.set("left", "is of nvidia-smi topo -mp, which shows PCIe alone")
    if _INSTANCE.search(unstyled(text)):
        raise TopologyError(
            f"{path}: GPUs are cut into MIG instances, which are no whole GPUs and which no NVLink joins; give the "
            "matrix with MIG off, or describe an instance as a GPU of its own (clustersim new device)"
        )
    if kind.name.startswith(RACKS):
        root.set("near", wires.TRAY)
    elif "SXM" in kind.name and _in_pairs(matrix):
        root.set("near", f"NVLinks join pairs, as bridges join cards, and {kind.name} is no card: is it this GPU?")
    homes = _homes(matrix, numa, root)
    if kind.name.startswith(RACKS):
        _say(
            root, "GPUs reach their Grace by PCIe, as the file names no NVLink-C2C; --topology of a shipped rack has it"
        )
    cpus = _cpus(matrix, homes, kind, names)
    root.extend(cpus)
    for cpu in cpus if kind.name.startswith(RACKS) else ():
        cpu.set("arch", "aarch64")
    for part in root.iter("gpu") if hidden else ():
        del part.attrib["sm"]  # as in a file of the PCI tree alone: NVLink is the board's
    return root


def _cpus(matrix: Matrix, homes: Mapping[str, str], kind: Device, names: Mapping[str, str]) -> list[ET.Element]:
    """A CPU for each NUMA node of ``homes``, with the switches, GPUs and NICs below it."""
    cpus: dict[str, ET.Element] = {}
    under = [_together(matrix, near) for near in _NEAR]
    switches: dict[tuple[int, str], ET.Element] = {}
    for name, row in matrix.items():
        above = cpus.setdefault(homes[name], ET.Element("cpu", numaid=homes[name]))
        inner, outer = (joined[name] for joined in under)
        for level, members in ((1, outer), (0, inner)):
            if len(members) > 1 and (level or members != outer):
                key = level, min(members)
                if key not in switches:
                    switches[key] = ET.SubElement(above, "pci", {"class": "0x060400", **_link(kind)})
                above = switches[key]
        _part(above, name, row, kind, names.get(name, name))
    return list(cpus.values())


def _say(root: ET.Element, assumed: str) -> None:
    """Add a line of what is assumed."""
    root.set("near", "\n".join(filter(None, (root.get("near", ""), assumed))))


def _homes(matrix: Matrix, numa: Mapping[str, str], root: ET.Element) -> dict[str, str]:
    """The NUMA node of each part: a NIC's is that of a GPU that it is not far from. NICs that are far from every GPU
    hang off another CPU where one has all GPUs, else off any of theirs, which is said."""
    sockets = list(dict.fromkeys(numa.values()))
    homes: dict[str, str] = {}
    for name, row in matrix.items():
        near = (numa[peer] for peer in matrix if peer in numa and row[peer] not in ("SYS", "SOC"))
        homes[name] = numa.get(name) or next(near, "")
    far = [name for name, home in homes.items() if not home]
    for i, name in enumerate(far):
        homes[name] = sockets[i * len(sockets) // len(far)] if len(sockets) > 1 else "0"
    if far and len(sockets) > 1:
        _say(root, f"{few(far, 3)}: as if spread over the CPUs, being far (SYS) from every GPU in the file")
    return homes


def named_gpu(text: str, path: Path) -> str:
    """The GPU that nvidia-smi's table or list, printed beside the matrix, names. Raises :class:`TopologyError`."""
    gpu_names = list(
        dict.fromkeys(name.strip() for match in _NAMED.finditer(unstyled(text)) for name in match.groups() if name)
    )
    if not gpu_names:
        raise TopologyError(f"{path}: nvidia-smi topo -m does not say which GPUs these are; say --gpu")
    if len(gpu_names) > 1 or gpu_names[0].endswith("..."):
        raise TopologyError(f"{path}: beside the matrix stand the GPUs {few(map(short, gpu_names), 3)}; say --gpu")
    try:
        return device(gpu_names[0]).name
    except TopologyError:
        raise TopologyError(
            f"{path}: the GPU named beside the matrix, {gpu_names[0]!r}, is not known; say --gpu"
        ) from None


def _together(matrix: Matrix, near: set[str]) -> dict[str, frozenset[str]]:
    """Of each part, those that are so near to it, and near to those: two GPUs that NVLinks join share a switch where
    they share a NIC."""
    groups = {name: frozenset([name]) for name in matrix}
    for name, row in matrix.items():
        for peer, word in row.items():
            if word in near and groups[peer] is not groups[name]:
                both = groups[name] | groups[peer]
                groups |= dict.fromkeys(both, both)
    return groups


def _matrix(text: str, path: Path) -> tuple[Matrix, dict[str, str]]:
    """Words by row and column, and the NUMA node of each GPU, or its CPU's cores."""
    plain = unstyled(text)
    starts = [head.start() for head in MATRIX_HEAD.finditer(plain)] or [0]
    machines = [_rows(plain[start:end]) for start, end in pairwise([*starts, len(plain)])]
    machines = [rows for rows in machines if not _of_peers(rows)] or machines
    if any(rows != machines[0] for rows in machines[1:]):
        raise TopologyError(f"{path}: holds the matrices of {len(machines)} machines that differ; give one of them")
    names, matrix, numa = machines[0]
    missing = [name for name in names if name not in matrix]
    if missing:
        raise TopologyError(
            f"{path}: the matrix has columns of {few(map(short, missing), 4)} and no rows of them; give it whole"
        )
    for name in names:
        row = matrix[name]
        wrong = next((short(row.get(name, "")) for name in names if not WORD.fullmatch(row.get(name, ""))), None)
        if wrong in _PEERS:
            raise TopologyError(
                f"{path}: says which GPUs may reach each other ({wrong!r}), as nvidia-smi topo -p2p does, and not what "
                "joins them; give nvidia-smi topo -m"
            )
        if wrong is not None:
            raise TopologyError(f"{path}: the matrix's row {short(name)} is not whole: {wrong!r} is no word of it")
    return matrix, numa


def _of_peers(rows: _Rows) -> bool:
    """Whether a matrix is of ``nvidia-smi topo -p2p``."""
    return not {word for row in rows[1].values() for word in row.values()}.isdisjoint(_PEERS)


def _reach(root: ET.Element, plain: str) -> None:
    """Take whether GPUs reach each other's memory, where nvidia-smi topo -p2p stands beside and says it of all."""
    starts = [head.start() for head in MATRIX_HEAD.finditer(plain)]
    matrices = [_rows(plain[start:end]) for start, end in pairwise([*starts, len(plain)])]
    words = {word for rows in filter(_of_peers, matrices) for row in rows[1].values() for word in row.values()} - {"X"}
    if _READS.search(plain) and (words == {"OK"} or (words and words.isdisjoint({"OK", "U"}))):
        root.set("p2p", str(words == {"OK"}).lower())
    elif words:
        _say(
            root,
            "whether GPUs reach each other's memory is not taken from nvidia-smi topo -p2p: of its matrices r and w",
        )


def _rows(text: str) -> _Rows:
    """Names of a matrix's columns, its words by row and column, and the NUMA node of each GPU."""
    lines = [[part for word in line.split() for part in _parted(word)] for line in text.splitlines()]
    first = lines[0]
    names = first[: first.index("CPU")] if "CPU" in first else first
    matrix: dict[str, dict[str, str]] = {}
    numa: dict[str, str] = {}
    for line in lines[1:]:
        if line and line[0] in names and line[0] not in matrix:
            matrix[line[0]] = dict(zip(names, line[1:], strict=False))
            affinity = [word for word in line[len(names) + 1 : len(names) + 3] if word != "N/A"]
            if line[0].startswith("GPU") and affinity:
                numa[line[0]] = affinity[-1]  # of old drivers the CPU's cores alone
    return names, matrix, numa


def _parted(word: str) -> list[str]:
    return _GLUED_PART.findall(word) if _GLUED.fullmatch(word) else [word]


def _counted(matrix: Matrix, kind: Device, path: Path) -> None:
    """Raise :class:`TopologyError` for GPUs with fewer NVLinks than the matrix counts: other ones were named."""
    for name, row in matrix.items():
        counts = [int(word[2:]) for word in row.values() if word.startswith("NV")]
        every = len(counts) == sum(peer.startswith("GPU") for peer in row) - 1
        switched = every or set(counts) == {kind.nvlink_links}  # a switch has every pair, but of a GPU that is down
        needs = max(counts, default=0) if switched else sum(counts)
        if 0 < kind.nvlink_links < needs:  # of a card that bridges may join, none is counted
            raise TopologyError(
                f"{path}: {short(name)} has {needs} NVLinks to other GPUs, and a {kind.name} has "
                f"{kind.nvlink_links}; is it this GPU?"
            )


def _in_pairs(matrix: Matrix) -> bool:
    """Whether there are more than two GPUs, and NVLinks join each to one other at most."""
    gpus = [row for name, row in matrix.items() if name.startswith("GPU")]
    peers = [sum(word.startswith("NV") for word in row.values()) for row in gpus]
    return len(gpus) > 2 and set(peers) <= {0, 1} and 1 in peers


def _link(kind: Device) -> dict[str, str]:
    speed = next(rate for since, rate in _SPEEDS if kind.sm >= since)
    return {"link_speed": f"{speed} GT/s PCIe", "link_width": "16"}


def _part(above: ET.Element, name: str, row: Mapping[str, str], kind: Device, label: str) -> None:
    """A GPU with its NVLinks, through a switch where it has not so many as the matrix counts; or a NIC."""
    if not name.startswith("GPU"):
        nic = ET.SubElement(ET.SubElement(above, "pci", {"class": "0x02", **_link(kind)}), "nic")
        ET.SubElement(nic, "net", name=label)
        return
    gpu = ET.SubElement(
        ET.SubElement(above, "pci", {"class": "0x030200", "busid": name, **_link(kind)}), "gpu", sm=str(kind.sm)
    )
    links = {peer: int(word[2:]) for peer, word in row.items() if word.startswith("NV")}
    if 0 < kind.nvlink_links < sum(links.values()):
        ET.SubElement(gpu, "nvlink", target="nvswitch", count=str(max(links.values())), tclass="0x068000")
        return
    for peer, count in links.items():
        ET.SubElement(gpu, "nvlink", target=peer, count=str(count))
