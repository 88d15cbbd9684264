"""The topology file of a machine that was read from the tree that NCCL dumps.

What the tree does not hold is assumed, and said in the file: latencies, the links between CPUs, and what joins the
nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from clustersim.cluster.files.xml_machine import XmlMachine
from clustersim.core.tomls import toml_value

_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}
_MODELS = {79: "bdw", 85: "skl", 143: "spr", 207: "emr"}
"""Intel's generations as NCCL has them, by the number of the model."""


def machine_text(machine: XmlMachine) -> str:
    """The file (TOML)."""
    return "\n".join(_lines(machine)) + "\n"


def _lines(machine: XmlMachine) -> Iterator[str]:
    source = machine.source
    vendor = _VENDORS.get(machine.cpu.get("vendor", ""))
    model = _MODELS.get(machine.number(machine.cpu, "modelid"))
    nics = machine.parts["nic"]
    yield f'name = "{re.sub(r"[^a-z0-9-]+", "-", machine.path.stem.lower()).strip("-") or "machine"}"'
    yield f'title = "{len(machine.gpus)} GPUs and {len(nics)} NICs, as they were found"'
    if machine.assumed:
        yield f"assumed = {toml_value(machine.assumed)}"
    yield from ("", "[node]", f'device = "{machine.device}"')
    arm = machine.cpu.get("arch", "").startswith(("arm", "aarch64"))
    yield f'cpu_vendor = "{"arm" if arm else vendor or "intel"}"'
    yield from ([f'cpu_model = "{model}"'] if model and vendor == "intel" else [])
    net, guess = machine.net()
    yield from (f'net = "{net}"', f"pcie_gen = {machine.gen}")
    yield f"nvls = {str(bool(machine.parts['nvswitch']) and machine.kind.sm >= 90).lower()}"
    yield from ([f"p2p = {machine.p2p}"] if machine.p2p else [])
    yield from ("", "[node.sources]", f'device = "{source}"')
    yield from (['p2p = "nvidia-smi topo -p2p"'] if machine.p2p else [])
    yield from ([f'net = "assumed: {guess}"'] if guess else [])
    yield from ([] if arm or vendor else ['cpu_vendor = "assumed: the file does not name it"'])
    for part, names in machine.parts.items():
        for rate in sorted({machine.rates.get(name, 0.0) for name in names}):
            alike = [name for name in names if machine.rates.get(name, 0.0) == rate]
            origin = machine.sources.get(alike[0], source)
            yield from ("", "[[node.vertices]]", f'names = "{", ".join(alike)}"', f'kind = "{part}"')
            yield from ([f'bandwidth = "{rate:g} Gb/s"', f'source = "{origin}"'] if rate else [])
    cpus = machine.parts["cpu"]
    pairs = [(a, b, "cpu", 40.0) for i, a in enumerate(cpus) for b in cpus[i + 1 :]]
    hops = {"c2c": "50 ns", "nvlink": "25 ns", "xgmi": "25 ns", "pcie": "150 ns", "cpu": "100 ns"}
    # A NIC that hangs off the CPU has no link of its own in the dump: as fast as its port.
    links = [(a, b, kind, rate or machine.rates.get(a, 0.0) / 8) for a, b, kind, rate in machine.links] + pairs
    for word, rate in dict.fromkeys((word, rate) for *_, word, rate in links):
        ends = [(a, b) for a, b, *link_kind in links if link_kind == [word, rate]]
        origin = machine.sources.get(word, source if word != "cpu" else "assumed: the dump does not tell it")
        yield from ("", "[[node.links]]", f'a = "{", ".join(a for a, _ in ends)}"')
        yield from (f'b = "{", ".join(b for _, b in ends)}"', 'pattern = "zip"', f'kind = "{word}"')
        yield from (f'bandwidth = "{rate:.6g} GB/s"', f'latency = "{hops[word]}"')
        yield f'source = "{origin}; latency assumed"'
    yield from ("", "[fabric]", f'kind = "{"rail_optimised" if nics else "none"}"')
    yield 'source = "assumed: the dump does not tell what joins the nodes"'
