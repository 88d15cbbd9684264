"""Where the NVLinks and xGMIs of a dump lead: to GPUs, NVSwitches, the CPU, or to nothing that the file has."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from clustersim.core import errors

_NVSWITCH = ("0x068000", "0x0680")
_CPU = "0x068001"
"""Classes of what is at a link's other end: an NVSwitch, the bridge of a POWER9 (nccl src/graph/topo.cc)."""
TRAY = "NVLink ends at this tray, as the file has it; in an NVL72 rack it joins the trays too"


@dataclass
class Wired:
    """Links by number.

    pairs : of two GPUs. switched : (GPU, bus id of an NVSwitch, links). hosted : (GPU, links to its CPU). said : what
    the file has and no machine can be.
    """

    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    switched: list[tuple[str, str, int]] = field(default_factory=list)
    hosted: list[tuple[str, int]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def switches(self) -> list[str]:
        """Bus ids of NVSwitches, in the order of the file."""
        return list(dict.fromkeys(target for _, target, _ in self.switched))


def wired(gpus: Mapping[str, tuple[str, ET.Element]], number: Callable[[ET.Element, str], int]) -> Wired:
    """What joins GPUs, which are (name, part) by bus id. number : reads an attribute."""
    wiring = Wired()
    to_itself: list[str] = []
    missing: dict[str, None] = {}
    for bus, (name, gpu) in gpus.items():
        for link in [*gpu.findall("nvlink"), *gpu.findall("xgmi")]:
            target = link.get("target", "").lower()
            kind = link.get("tclass", "")
            count = number(link, "count")
            if count <= 0:
                continue
            if target == bus:
                to_itself.append(name)
            elif target in gpus:  # told by both ends
                a, b = sorted((name, gpus[target][0]))
                wiring.pairs[a, b] = max(wiring.pairs[a, b], count)
            elif kind in _NVSWITCH:
                wiring.switched.append((name, target, count))
            elif kind == _CPU:
                wiring.hosted.append((name, count))
            else:
                missing[target] = None
    if to_itself:
        wiring.said.append(
            f"NVLinks of {errors.few(to_itself, 3)} lead to the GPU itself in the file, so that they join no two GPUs "
            "here; where a bridge joins two, give nvidia-smi topo -m"
        )
    if missing:
        wiring.said.append(
            f"NVLinks lead to {errors.few(missing, 3)}, which the file does not have, and are left out: did the job "
            "see all GPUs (CUDA_VISIBLE_DEVICES)?"
        )
    return wiring
