"""The parts of a machine and its links, from the tree that NCCL dumps.

NCCL writes the PCI tree under each CPU with link speeds and widths, GPUs with their NVLinks (``target`` is another GPU,
or an NVSwitch by its class 0x0680), and NICs with their rate in Mb/s. What it does not write is assumed, and said in
the topology file (:mod:`clustersim.cluster.files.machine_text`).
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from clustersim.cluster.files import boards, pci, wires
from clustersim.cluster.files.beside import Beside
from clustersim.core import errors, gpu_file, texts
from clustersim.core.errors import TopologyError
from clustersim.core.limits import counted

MOST_PARTS = 4096
"""GPUs, NICs, switches and CPUs of one node."""
_NVLINK = {60: 20.0, 70: 25.0, 75: 25.0, 80: 25.0, 86: 14.0, 90: 25.0, 100: 50.0}
"""GB/s of one NVLink and direction, by compute capability: NVIDIA's data sheets, as the shipped machines have them."""
_XGMI = {"MI1": 46.0, "MI21": 50.0, "MI25": 50.0, "MI30": 64.0, "MI32": 64.0, "MI35": 76.8}
"""GB/s of one xGMI and direction, by how a GPU's name begins: data sheets of AMD Instinct MI100 (276 GB/s over three
links), MI210 and MI250X (100 GB/s a link, both directions), MI300X and MI355X platforms."""
_SWITCH = "0x0604"
_GPU = ("0x03", "0x0b40")
_NIC = "0x02"
_OTHER = "0x12"
_MAKERS = ("0x1002", "0x10de")
"""AMD and NVIDIA, whose accelerators without a display are of class 0x12."""
_UNTOLD = "PCIe is of generation 3 with 16 lanes where the file does not say (link_speed), as NCCL takes it"


class XmlMachine:
    """Parts of one machine by name, and the links between them."""

    def __init__(
        self, root: ET.Element, path: Path, gpu: str | None, nics: tuple[int, float] | None, also: Beside
    ) -> None:
        self.path = path
        self.also = also
        self.source = f"{root.get('source', 'NCCL_TOPO_DUMP_FILE')}, {path.name}"
        self.guessed = bool(root.get("rates"))  # PCIe's too
        self.left = f"the file {root.get('left', 'has the PCI tree alone')}"
        self.joins = root.get("joins", "").split()
        self.source += f", rates {root.get('rates')}" if root.get("rates") else ""
        self.parts: dict[str, list[str]] = {"cpu": [], "pcie_switch": [], "gpu": [], "nvswitch": [], "nic": []}
        self.rates: dict[str, float] = {}
        self.links: list[tuple[str, str, str, float]] = []  # a, b, kind, GB/s
        self.gpus: dict[str, tuple[str, ET.Element]] = {}
        self.ids: set[str] = set()
        self.uneven: dict[str, str] = {}  # NICs whose ports differ: their rates
        self.nic_ids: dict[str, str] = {}
        self.labels: dict[str, str] = {}  # of NICs, as the system calls them
        self.speaks: dict[str, str] = {}  # of NICs: pci.spoken
        self.direct: dict[str, bool] = {}  # of NICs: whether they reach GPU memory, where the file says it
        self.homes: dict[str, str] = {}  # of GPUs: their CPU
        self.assumed: list[str] = root.get("near", "").splitlines()
        self.p2p = root.get("p2p", "")
        self.sources: dict[str, str] = {}  # of a kind of link or of a NIC that the file does not tell
        self.gen = 0
        self.cpu = next(iter(root.findall("cpu")), ET.Element("cpu"))
        self._walk_all(root)
        # NCCL dumps the ids of what it finds, RCCL the architecture; in a file that people write NVLink is filled in.
        dumped = any(part.get("device") for part in root.iter("pci")) or any(gpu.get("gcn") for gpu in root.iter("gpu"))
        self.written = root.get("source") is None and not dumped
        codes = {gpu.get("gcn", "").removeprefix("gfx") for _, gpu in self.gpus.values()}
        self.kind = gpu_file.named(gpu) if gpu else pci.only_gpu(self.ids, codes, path)
        self.device = self.kind.name
        self._nvlinks()
        self._board()
        self._inactive()
        self._ports()
        self._nic_rates(nics)
        self._direct()

    def _walk_all(self, root: ET.Element) -> None:
        """Every CPU and what is below it. Raises :class:`TopologyError` without a GPU, and for several hosts."""
        cpus = root.findall("cpu")
        hosts = {cpu.get("host_hash", "") for cpu in cpus}
        if len(hosts) > 1:
            raise TopologyError(
                f"{self.path}: is of {len(hosts)} hosts whose NVLinks are one domain (host_hash), and a machine is one "
                "of them; give the dump of a job on one host, or take a shipped rack, such as --topology gb200-nvl72"
            )
        for cpu in cpus:
            name = self._new("cpu", "cpu")
            had = len(self.gpus)
            for part in cpu:
                self._walk(part, name)
            self.homes |= {gpu: name for gpu, _ in list(self.gpus.values())[had:]}
        if not self.gpus:
            raise TopologyError(f"{self.path}: {self._no_gpu(root)}")

    def _no_gpu(self, root: ET.Element) -> str:
        bare = sum(not part.get("class") for part in root.iter("pci"))
        if not bare:
            return "no GPU in this dump"
        return (
            f"{errors.several(bare, 'PCI device')} without a class, so that nothing tells which are GPUs (NCCL asks "
            "the machine); give what NCCL_TOPO_DUMP_FILE writes there"
        )

    def _new(self, kind: str, word: str) -> str:
        counted(sum(map(len, self.parts.values())), MOST_PARTS, f"{self.path}: parts of the node", TopologyError)
        self.parts[kind].append(f"{word}{len(self.parts[kind])}")
        return self.parts[kind][-1]

    def _walk(self, part: ET.Element, above: str) -> None:
        """A PCI device and what is below it."""
        if part.tag == "nic":  # one that hangs off the CPU itself
            self._nic(part, above, 0.0)
        if part.tag != "pci":
            return
        kind = part.get("class", "")
        rate = self._pcie(part)
        gpu = part.find("gpu")
        nic = part.find("nic")
        if gpu is not None or kind.startswith(_GPU) or (kind.startswith(_OTHER) and part.get("vendor") in _MAKERS):
            name = self._new("gpu", "gpu")
            if part.get("busid", "").lower() in self.gpus:
                raise TopologyError(f"{self.path}: the PCI device {texts.short(part.get('busid', ''))} is there twice")
            self.gpus[part.get("busid", name).lower()] = name, gpu if gpu is not None else ET.Element("gpu")
            self.ids.add(part.get("device", ""))
            if len(part.findall("gpu")) > 1:
                ranks = len(part.findall("gpu"))
                self.assumed.append(f"{name}: {ranks} ranks share it (MPS), and it counts as one GPU")
            self.gen = max(self.gen, self._generation(part))
            self.links.append((name, above, "pcie", rate))
        elif nic is not None or kind.startswith(_NIC):
            self._nic(nic if nic is not None else ET.Element("nic"), above, rate, part)
        elif kind.startswith(_SWITCH) and len(part):
            name = self._new("pcie_switch", "pcie")
            self.links.append((name, above, "pcie", rate))
            for below in part:
                self._walk(below, name)

    def _nic(self, nic: ET.Element, above: str, rate: float, part: ET.Element | None = None) -> None:
        ports = [self.number(net, "speed") for net in nic.findall("net")]
        first = nic.find("net")
        label = first.get("name", "") if first is not None else ""
        sockets = first is not None and first.get("guid") == "0x0" and first.get("port") == "0"
        if sockets and label in self.labels.values():
            return  # an interface of no PCI device, which NCCL lists below each CPU
        name = self._new("nic", "nic")
        self.labels[name] = label
        self.rates[name] = max(sum(ports), 0) / 1000  # 0 where the file does not say
        if len(set(ports)) > 1 and min(ports) > 0:
            self.uneven[name] = " and ".join(f"{rate / 1000:g}" for rate in ports)
        self.nic_ids[name] = part.get("device", "") if part is not None else ""
        kind = part.get("class", "") if part is not None else ""
        maker = part.get("vendor", "") if part is not None else ""
        self.speaks[name] = pci.spoken(kind, self.nic_ids[name], label, sockets=sockets, maker=maker)
        if first is not None and first.get("gdr") is not None:
            self.direct[name] = any(net.get("gdr") == "1" for net in nic.findall("net"))
        self.links.append((name, above, "pcie", rate))

    def number(self, part: ET.Element, key: str) -> int:
        """A whole number of an element, 0 where it has none. Raises :class:`TopologyError` for what is no number."""
        text = part.get(key, "0")
        if not re.fullmatch(r"-?\d{1,9}", text):
            raise TopologyError(f"{self.path}: {key}={texts.shown(text)} of <{part.tag}> is no number")
        return int(text)

    def _speed(self, part: ET.Element) -> float:
        match = re.match(r"\s*(\d{1,3}(?:\.\d{1,2})?)\s*GT/s", part.get("link_speed", ""))
        if match is None and _UNTOLD not in self.assumed:
            self.assumed.append(_UNTOLD)
        return float(match[1]) if match else 8.0

    def _generation(self, part: ET.Element) -> int:
        return 1 + sum(self._speed(part) > limit for limit in (2.5, 5.0, 8.0, 16.0, 32.0))

    def _pcie(self, part: ET.Element) -> float:
        """GB/s of a direction: lanes at the link's rate, 8 of 10 bits before generation 3, 128 of 130 after."""
        lanes = min(max(self.number(part, "link_width"), 0), 32) or 16
        speed = self._speed(part)
        return lanes * speed / 8 * (128 / 130 if speed >= 8.0 else 0.8)

    def _nvlinks(self) -> None:
        """Bundles between GPUs, and to what else their NVLinks lead."""
        wiring = wires.wired(self.gpus, self.number)
        kind = "xgmi" if any(gpu.find("xgmi") is not None for _, gpu in self.gpus.values()) else "nvlink"
        rate = self._wire(kind)
        switches = {target: self._new("nvswitch", "nvswitch") for target in wiring.switches}
        self.links += [(a, b, kind, rate * count) for (a, b), count in wiring.pairs.items()]
        self.links += [(gpu, switches[target], kind, rate * count) for gpu, target, count in wiring.switched]
        self.links += [(gpu, self.homes[gpu], kind, rate * count) for gpu, count in wiring.hosted]
        self._coherent()
        self.assumed += wiring.said
        if wiring.switched and self.device.startswith(("GB200", "GB300")) and wires.TRAY not in self.assumed:
            self.assumed.append(wires.TRAY)

    def _coherent(self) -> None:
        """C2C links of GPUs to their CPU, in GB/s by ``bw`` [MB/s] of each (nccl src/graph/topo.cc); they stand for a
        PCIe link to the same CPU, as no GPU takes both."""
        for name, gpu in self.gpus.values():
            c2c = gpu.find("c2c")
            rate = self.number(c2c, "bw") * self.number(c2c, "count") / 1000 if c2c is not None else 0.0
            if rate > 0:
                self.links = [link for link in self.links if link[:3] != (name, self.homes[name], "pcie")]
                self.links.append((name, self.homes[name], "c2c", rate))

    def _wire(self, kind: str) -> float:
        """GB/s of one link and direction between these GPUs."""
        if kind == "xgmi":
            xgmi_rate = next((rate for start, rate in _XGMI.items() if self.device.startswith(start)), None)
            if xgmi_rate is None:
                self.assumed.append(f"an xGMI of {self.device} carries {_XGMI['MI30']:g} GB/s, as between MI300X")
            return xgmi_rate or _XGMI["MI30"]
        return next((_NVLINK[sm] for sm in sorted(_NVLINK, reverse=True) if sm <= self.kind.sm), 20.0)

    def _board(self) -> None:
        """What joins the GPUs where the file has no place for it; what looks wrong where it has."""
        kind = self.kind
        joined = {name for *ends, word, _ in self.links if word in boards.WIRES for name in ends}
        wire = "xGMI" if kind.amd else "NVLink"
        alone = [name for name, _ in self.gpus.values() if name not in joined]
        if joined and alone:
            self.assumed.append(
                f"{errors.few(alone, 3)}: no {wire} joins it to another GPU, as the file has it; is it down?"
            )
        if joined or len(self.gpus) < 2 or not kind.nvlink_links:
            return
        if not self.written and any(gpu.get("sm") or gpu.get("dev") for _, gpu in self.gpus.values()):
            hides = ", or is the file of nvidia-smi topo -mp, which hides it" if "nvidia-smi" in self.source else ""
            self.assumed.append(
                f"no {wire} joins the GPUs, as the file has it; a {kind.name} has {wire}: is it working{hides}?"
            )
            return
        board = boards.board(kind.name, len(self.gpus))
        if board is not None and not board.switched and {f"{a}-{b}" for a, b, _ in board.pairs} < set(self.joins):
            board = None  # joined otherwise
        if board is None:
            if "PCIe" in kind.name or "RTX" in kind.name:
                self.assumed.append(f"no {wire} bridge joins the GPUs: the file has the PCI tree alone")
                return
            raise TopologyError(
                f"{self.path}: {self.left}, and no shipped machine says how {len(self.gpus)} {kind.name} "
                f"are joined by {wire}; give what NCCL_TOPO_DUMP_FILE writes on the machine"
            )
        missing = [f"{a}-{b}" for a, b, _ in board.pairs if self.joins and f"{a}-{b}" not in self.joins]
        if missing:
            raise TopologyError(
                f"{self.path}: {wire} joins {len(board.pairs)} pairs of GPUs of {board.name}, and here not "
                f"{missing[0]} and others, {len(missing)} in all; give what NCCL_TOPO_DUMP_FILE writes on the machine"
            )
        names = [name for name, _ in self.gpus.values()]
        if board.switched:
            switch = self._new("nvswitch", "nvswitch")
            self.links += [(name, switch, board.kind, board.switched) for name in names]
        self.links += [(names[a], names[b], board.kind, rate) for a, b, rate in board.pairs]
        self.sources[board.kind] = f"assumed: {board.name}; {self.left}"
        self.assumed.append(f"{wire} between the GPUs is that of {board.name}: {self.left}")

    def _inactive(self) -> None:
        """NVLinks that nvidia-smi nvlink -s says do not work, which only the shipped board counts as working."""
        counts = dict(zip([name for name, _ in self.gpus.values()], self.also.links, strict=False))
        if len(self.also.links) != len(self.gpus) and self.also.links:
            raise TopologyError(
                f"{self.path}: has {len(self.gpus)} GPUs, and {self.also.names['nvidia-smi nvlink -s']} has "
                f"{len(self.also.links)}; are they of one machine?"
            )
        for name, (working, links) in counts.items():
            own = [i for i, (a, b, kind, _) in enumerate(self.links) if kind == "nvlink" and name in (a, b)]
            if working == links or not own:
                continue
            self.assumed.append(f"{name}: {working} of {links} NVLinks work, as nvidia-smi nvlink -s says")
            for i in own if "nvlink" in self.sources else ():
                a, b, kind, rate = self.links[i]
                self.links[i] = (a, b, kind, rate * working / links)
        self.links = [link for link in self.links if link[3] > 0 or link[2] != "nvlink"]

    def _ports(self) -> None:
        """Rates of NICs that ibstat or ibv_devinfo says, by name, or where all are alike; those that are down are
        left out."""
        ports = self.also.ports
        if not ports:
            return
        tool = " and ".join(name for name in self.also.names if name.startswith("ib"))
        rates = set(ports.values())
        layers = set(self.also.layers.values())
        for name in list(self.parts["nic"]):
            label = self.labels[name]
            rate = ports.get(label, next(iter(rates)) if len(rates) == 1 else None)
            if rate is None:
                raise TopologyError(
                    f"{self.path}: which port of {tool} its NIC {texts.shown(label or name)} is, no name tells; "
                    f"say --nics, such as --nics {len(self.parts['nic'])}x400Gb/s"
                )
            self.rates[name] = rate
            self.sources[name] = tool
            if layer := self.also.layers.get(label, next(iter(layers)) if len(layers) == 1 else ""):
                self.speaks[name] = layer if self.speaks[name] in pci.VERBS else self.speaks[name]
            if not rate:
                self.assumed.append(f"{label or name} is left out: {tool} says that it is down")
                self._without([name])

    def _nic_rates(self, nics: tuple[int, float] | None) -> None:
        """The rate of NICs that the file does not give: as asked for, or that of their kind or the machine, as said."""
        if nics is None and self.uneven:
            ports = "; ".join(dict.fromkeys(self.uneven.values()))
            names = errors.few(list(self.uneven), 3)
            self.assumed.append(f"{names}: ports of {ports} Gb/s are taken together; --nics says the rate that is used")
        if nics is not None:
            self._only(nics[0])
            for name in self.parts["nic"]:
                self.rates[name] = nics[1]
                self.sources[name] = "--nics"
            return
        self._leave_far()
        unknown = [name for name in self.parts["nic"] if not self.rates[name]]
        for device_id in sorted({self.nic_ids[name] for name in unknown}):
            alike = [name for name in unknown if self.nic_ids[name] == device_id]
            usual = boards.nic_rate(self.device, len(self.gpus), device_id, self.speaks[alike[0]])
            if usual is None or not usual.rate:
                differ = f", and shipped machines with these GPUs have {usual.why} Gb/s" if usual else ""
                raise TopologyError(
                    f"{self.path}: does not say the rate of {errors.several(len(alike), 'NIC')}{differ}; say --nics, "
                    f"such as --nics {len(self.parts['nic'])}x400Gb/s"
                )
            slot = min((rate for a, _, kind, rate in self.links if a in alike and kind == "pcie"), default=0.0)
            rate = boards.carried(usual.rate, slot) if slot and not self.guessed else usual.rate
            why = usual.why if rate == usual.rate else f"which is what a slot of {slot:.4g} GB/s carries of {usual.why}"
            for name in alike:
                self.rates[name] = rate
                self.sources[name] = f"assumed: {why}"
            self.assumed.append(
                f"{errors.few(alike, 3)}: {rate:g} Gb/s, {why}, where the file does not say; "
                f"--nics {len(self.parts['nic'])}x{rate:g}Gb/s says it"
            )

    def net(self) -> tuple[str, str]:
        """What joins the nodes, and what of it is assumed."""
        speaks = [self.speaks[name] for name in self.parts["nic"]]
        if not speaks:
            return "none", ""
        alike = boards.nic_rate(self.device, len(self.gpus), "", speaks[0])
        net_word, guess = pci.net_of(speaks, self.kind.sm, alike.net if alike else "")
        reaches_gpus = [self.direct.get(name, True) for name in self.parts["nic"]]
        if net_word == pci.GVNIC:
            return pci.of_google(any(reaches_gpus), len(reaches_gpus) < len(self.gpus))
        return (net_word, guess) if any(reaches_gpus) else pci.staged(net_word, guess)

    def _direct(self) -> None:
        """Say where NICs do not reach GPU memory (``gdr`` of a net is 0): none of them, or some."""
        without = [name for name in self.parts["nic"] if not self.direct.get(name, True)]
        if without and self.net()[0] != "tcp":
            self.assumed.append(pci.not_direct(without, len(without) == len(self.parts["nic"])))

    def _leave_far(self) -> None:
        """Leave out NICs of which nothing but a name is known and that are away from the GPUs, where others share
        their switches: they are of storage, of the host, or functions of one card, not the board's."""
        near = self._near()
        far = [n for n in self.parts["nic"] if not self.rates[n] and not self.nic_ids[n] and n not in near]
        if not self.guessed or not near or not far:
            return
        names = errors.few([self.labels[name] or name for name in far], 3)
        self.assumed.append(
            f"{names}: left out, being away from the GPUs, which share switches with {len(near)} others, and without a "
            f"rate in the file; --nics {len(self.parts['nic'])}x400Gb/s would count them"
        )
        self._without(far)

    def _without(self, gone: list[str]) -> None:
        self.links = [link for link in self.links if link[0] not in gone]
        self.parts["nic"] = [name for name in self.parts["nic"] if name not in gone]

    def _near(self) -> list[str]:
        """NICs that share a PCIe switch with a GPU; where none does, those below the same outermost switch."""
        home = {a: b for a, b, kind, _ in self.links if kind in ("pcie", "c2c")}

        def outermost(name: str) -> str:
            """The last PCIe switch on the way up from a device; the device itself where there is none."""
            while home.get(name, "").startswith("pcie"):
                name = home[name]
            return name

        for of in (home.__getitem__, outermost):
            beside = {of(name) for name, _ in self.gpus.values() if of(name).startswith("pcie")}
            if near := [name for name in self.parts["nic"] if of(name) in beside]:
                return near
        return []

    def _only(self, count: int) -> None:
        """Keep so many NICs: all, or those that share a PCIe switch with a GPU."""
        nics = self.parts["nic"]
        near = self._near()
        if count == len(nics):
            return
        if count != len(near):
            raise TopologyError(
                f"{self.path}: has {len(nics)} NICs, {len(near)} of them below a PCIe switch with a GPU; "
                f"--nics says {count}"
            )
        gone = [name for name in nics if name not in near]
        self.assumed.append(f"{len(gone)} NICs are left out, as --nics says {count}: those away from the GPUs")
        self._without(gone)
