"""A machine as ``lstopo --of xml`` writes it (hwloc 1.11 to 2.x), as the tree that NCCL dumps of it.

hwloc tells the PCI tree with the rate of each link [GB/s], the CPUs, and which devices are GPUs and NICs; not NVLink,
nor the rate of a NIC's ports. Bridges with one device below are a slot's ports, and no switch.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from clustersim.core import texts
from clustersim.core.errors import TopologyError

_DOCTYPE = re.compile(r'<!DOCTYPE topology SYSTEM "hwloc2?\.dtd">')
_GPU = re.compile(r"03\w\w \[(?:10de|1002)|12\w\w \[(?:10de|1002)")
_LINKS = [(speed, width) for width in (16, 8, 4, 2, 1) for speed in (2.5, 5.0, 8.0, 16.0, 32.0, 64.0)]
"""GT/s of a lane, and lanes."""


def system(text: str, path: Path) -> ET.Element:
    """The machine as NCCL would dump it. Raises :class:`TopologyError` for what is printed, or not whole."""
    if "<topology" not in text[:2000]:
        raise TopologyError(f"{path}: is what lstopo prints, without the rates of links; give lstopo --of xml FILE")
    plain = _DOCTYPE.sub("", text, count=1)
    if "<!" in re.sub(r"<!--.*?-->", "", plain, flags=re.DOTALL):
        raise TopologyError(f"{path}: declares a type or entities, which hwloc's XML does not")
    try:
        tree = ET.fromstring(plain)
    except (ET.ParseError, ValueError, RecursionError) as error:
        raise TopologyError(f"{path}: is not whole XML: {error}") from None
    version = tree.get("version", "1")
    if version.partition(".")[0] not in ("1", "2"):
        raise TopologyError(
            f"{path}: is of hwloc's XML {texts.short(version)}, and 1.x and 2.x are read, as kinds of devices are "
            "numbered otherwise since; give nvidia-smi topo -m, or what NCCL_TOPO_DUMP_FILE writes"
        )
    root = ET.Element("system", source="lstopo")
    cpus: dict[str, ET.Element] = {}
    for home, model, bridge in _bridges(tree, "0", {}):
        cpu = cpus.setdefault(home, ET.Element("cpu", {"numaid": home, **model}))
        for part in bridge:
            _copied(part, cpu)
    root.extend(cpus.values())
    return root


def _bridges(above: ET.Element, home: str, model: dict[str, str]) -> Iterator[tuple[str, dict[str, str], ET.Element]]:
    """(NUMA node, what CPU it is, host bridge) of every host bridge."""
    info_values = {info.get("name"): info.get("value", "") for info in above.findall("info")}
    if "CPUVendor" in info_values:
        number = info_values.get("CPUModelNumber", "")
        model = {
            **model,
            "vendor": info_values["CPUVendor"],
            "modelid": number if number.isdecimal() and len(number) < 6 else "0",
        }
    if "Architecture" in info_values:
        model = {**model, "arch": info_values["Architecture"]}
    nodes = [part.get("os_index", "0") for part in above.iter("object") if part.get("type") == "NUMANode"]
    home = min(nodes, key=lambda node: (len(node), node)) if nodes else home
    for part in above.findall("object"):
        if part.get("type") == "Bridge" and part.get("bridge_type", "").startswith("0-"):
            yield home, model, part
        else:
            yield from _bridges(part, home, model)


def _copied(part: ET.Element, above: ET.Element) -> None:
    """A PCI device, or a bridge that joins several, as NCCL writes them."""
    kind = part.get("type")
    if kind == "Bridge":
        below = [inner for inner in part.findall("object") if _matters(inner)]
        if len(below) > 1:
            above = ET.SubElement(above, "pci", {"class": "0x060400", **_link(part)})
        for inner in below:
            _copied(inner, above)
    elif kind == "PCIDev" and _matters(part):
        described = part.get("pci_type", "")
        maker = re.search(r"\[(\w{4}):(\w{4})\]", described)
        ids = {"vendor": f"0x{maker[1]}", "device": f"0x{maker[2]}"} if maker else {}
        place = {"busid": part.get("pci_busid", ""), "class": f"0x{described[:4]}00", **ids, **_link(part)}
        copy = ET.SubElement(above, "pci", place)
        ports = _ports(part)
        if ports:
            ET.SubElement(ET.SubElement(copy, "nic"), "net", name=ports[0])


def _matters(part: ET.Element) -> bool:
    """Whether it is a GPU, or a NIC that NCCL would use, or has one below."""
    if part.get("type") == "Bridge":
        return any(_matters(inner) for inner in part.findall("object"))
    return _GPU.match(part.get("pci_type", "")) is not None or bool(_ports(part))


def _ports(part: ET.Element) -> list[str]:
    """OpenFabrics devices of a NIC."""
    return [
        inner.get("name", "")
        for inner in part.findall("object")
        if inner.get("type") == "OSDev" and inner.get("osdev_type") in ("3", "OpenFabrics")
    ]


def _link(part: ET.Element) -> dict[str, str]:
    """GT/s and lanes of the rate [GB/s] that hwloc says; nothing where it says none."""
    try:
        rate = float(part.get("pci_link_speed", "0"))
    except ValueError:
        rate = 0.0
    if not 0 < rate < 1000:
        return {}
    speed, width = min(_LINKS, key=lambda link: abs(_rate(*link) - rate))
    return {"link_speed": f"{speed} GT/s PCIe", "link_width": str(width)}


def _rate(speed: float, width: int) -> float:
    return width * speed / 8 * (128 / 130 if speed >= 8.0 else 0.8)
