"""How much of what people have is read: inputs of our own writing, in the style of each kind, beside what is right.

``python tests/people.py`` prints the share. Each folder of ``tests/data/people`` holds the files, and ``right.toml``:
their ``kind``, their order, what is asked for beside them (``[machine]``), and what is right: fields of the scenario
(``[right]``), or the words of a refusal that tells what to add (``asks``).
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustersim.cluster import files as fabrics
from clustersim.cluster.files.boards import WIRES
from clustersim.cluster.files.nccl_xml import topology_text
from clustersim.core.errors import ClusterSimError
from clustersim.core.tomls import flat
from clustersim.core.topology import NIC
from clustersim.files import launch as exchange

FOLDER = Path(__file__).parent / "data" / "people"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/right.toml"))
VERDICTS = ("read right", "asked for", "wrong")


@dataclass(frozen=True)
class Reading:
    """What came of one input: a verdict, and why it is wrong."""

    kind: str
    verdict: str
    why: str = ""


def case(name: str) -> dict[str, Any]:
    """What ``right.toml`` of a folder says."""
    return tomllib.loads((FOLDER / name / "right.toml").read_text("utf-8"))


def judged(name: str) -> Reading:
    """Read one folder's files, and compare."""
    stated = case(name)
    kind = stated["kind"]
    paths = [FOLDER / name / file for file in stated["files"]]
    try:
        fields = _machine(paths, stated) if "gpu" in stated else _launch(paths, stated)
    except ClusterSimError as refusal:
        asked = stated.get("asks", "")
        if asked and asked in str(refusal):
            return Reading(kind, "asked for")
        return Reading(kind, "wrong", f"refused: {refusal}")
    if "asks" in stated:
        return Reading(kind, "wrong", f"read, where {stated['asks']!r} is to be asked")
    right = stated["right"]
    apart = [f"{key} is {fields.get(key)!r}, not {right[key]!r}" for key in right if fields.get(key) != right[key]]
    return Reading(kind, "wrong", "; ".join(apart)) if apart else Reading(kind, "read right")


def _launch(paths: list[Path], stated: dict[str, Any]) -> dict[str, Any]:
    """Fields as the scenario has them, and as its defaults fill them in."""
    scenario = exchange.read(paths, stated["machine"], model=stated.get("model")).scenario
    fields = {**exchange.canonical(scenario), **flat(scenario.inputs())}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}


def _machine(paths: list[Path], stated: dict[str, Any]) -> dict[str, Any]:
    """GPUs and NICs of a node, GB/s of a NIC, GB/s that wires carry out of a GPU, and what is assumed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.toml"
        file.write_text(topology_text(paths, stated["gpu"] or None), "utf-8")
        told = tomllib.loads(file.read_text("utf-8"))
        made = fabrics.load(str(file), nodes=1)
    links = list(zip(made.link_src.tolist(), made.link_bandwidth.tolist(), made.link_kinds, strict=True))
    nics = {at for at, kind in enumerate(made.vertex_kinds) if kind == NIC}
    return {
        "device": made.node_types[0].device,
        "gpus": len(made.gpus),
        "nics": len(nics),
        "nic_rate": max((rate / 1e9 for at, rate, kind in links if at in nics and kind == "net"), default=0.0),
        "wires": round(sum(rate / 1e9 for at, rate, kind in links if at == made.gpus[0] and kind in WIRES)),
        "assumed": len(told.get("node", {}).get("assumed", told.get("assumed", []))),
    }


def main() -> int:
    """Print the share of each kind, and what is wrong."""
    readings = {name: judged(name) for name in NAMES}
    kinds = dict.fromkeys(reading.kind for reading in readings.values())
    print(f"{'kind':20} {'inputs':>7}" + "".join(f"{verdict:>12}" for verdict in VERDICTS))
    for kind in (*kinds, "all"):
        counts = Counter(reading.verdict for reading in readings.values() if kind in (reading.kind, "all"))
        print(f"{kind:20} {counts.total():>7}" + "".join(f"{counts[verdict]:>12}" for verdict in VERDICTS))
    wrong = {name: reading.why for name, reading in readings.items() if reading.verdict == "wrong"}
    for name, why in wrong.items():
        print(f"wrong: {name}: {why}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
