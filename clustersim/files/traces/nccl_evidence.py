"""What the lines of an ``NCCL_DEBUG=INFO`` log say of transports, ranks, devices and plugins, in NCCL's own words.

Of the lines of NCCL 2.8 to 2.29 and RCCL (src/transport/net.cc and net_ib, src/graph/paths.cc and topo.cc, src/plugin):
which transport each pair of ranks has, on which machine each rank is, what the environment pins, which devices and
plugins were found, and how far GPUs and NICs are apart.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from clustersim.core.texts import short
from clustersim.files.traces.nccl_warnings import warning

_HOST = re.compile(r"(?<![\w.-])([\w.-]+):\d+:\d+ \[\w+\] ")
_RANK = re.compile(r"\brank (\d{1,8}) nranks (\d{1,8})\b", re.I)
_ID = re.compile(r"\bcommId (0x\w+)")
_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (\d+)(?:\[(\w+)\])? -> (\d+)(?:\[(\w+)\])?(?: \[(send|receive)\])? via "
    r"(.+?)(?: comm 0x\w+.*)?$"
)
_NO_GDR = re.compile(r"^(?!.*NET/Socket\b).*GPU Direct RDMA Disabled for (.+)$")
_NO_PEER = re.compile(
    r"No GDR support: (.+)$|\b((?:nv_peer_mem|nvidia[-_]peermem)\b.*(?:not (?:loaded|found)|missing).*)$"
)
_NO_EFA_GDR = re.compile(r"NET/OFI (GDR disabled on GDR-supported instance type \S+|.*\bdisabling GDR\b)")
_PROVIDER = re.compile(r"NET/OFI (?:Selected [Pp]rovider is|Using) ([\w;-]+)")
DISTANCE = re.compile(r"distance (\d+) >=? (\d+)")
_HCA_NUMBER = re.compile(r"HCA (\d{1,4})\b")
_HCAS = re.compile(r"\[\d+\]([\w.-]+:\d+)/(?:IB|RoCE|OPA)")
_P2P_OFF = re.compile(r"P2P is disabled between (NVLINK )?connected GPUs (\d+) and (\d+)")
_PATH = re.compile(r"(GPU/\S+) :")
_TO_NIC = re.compile(r"NET/\S+ \([\d.]+/[\d.]+/([A-Z]+\d?)\)")
_GRAPH = re.compile(r"Pattern \d+, crossNic \d+, nChannels \d+, (?:bw|speed) [\d.]+/[\d.]+, type (\w+)/(\w+)")
_PLUGIN = re.compile(
    r"Failed to initialize NET plugin (\S+)|(NET/OFI|TUNER/Plugin|NET/Plugin|COLLNET/Plugin)\b.*?"
    r"(?:[Ff]ailed|[Uu]nable|[Ee]rror|not found|Could not find|No plugin found|undefined symbol|cannot open|Only EFA|"
    r"No eligible providers)"
)
_FAILED_MESSAGE = re.compile(r"NET/OFI Request \S+ completed with error")
"""Of a plugin that works: what was sent did not arrive."""
_LOADED = re.compile(r"Loaded (?:net|coll(?:net)?|tuner) plugin|[RP]2P plugin (?:v\d+ )?\w+")
_NET = re.compile(r"Using network (.+?)\s*$|Initialized NET plugin (\S+)|Assigned NET plugin (\S+) to comm")
_VERBS = re.compile(r"(?:Could not open|Failed to open|[Uu]nable to open) (libibverbs\S*)")
_PORT_DOWN = re.compile(r"NET/IB : ([\w.-]{1,80}):\d+ Got async event ?: port error")
_GIVEN_UP = re.compile(
    r"NET/IB ?: Got completion from peer .*?status=(?:IBV_WC_RETRY_EXC_ERR\(12\)|12\b).*?(?: hca (\S+))?$"
)

_EXPLAINED = (_P2P_OFF, _PLUGIN, _VERBS, _NO_GDR, _NO_EFA_GDR, _PORT_DOWN, _GIVEN_UP)
"""Lines that a conclusion explains, so that they are no warnings beside it."""


@dataclass
class Evidence:
    """What the lines of a log say, in NCCL's words; ``hosts`` : of each rank of the largest communicator."""

    ranks: int = 0
    sizes: set[int] = field(default_factory=set)
    ids: set[str] = field(default_factory=set)
    hosts: dict[int, str] = field(default_factory=dict)
    seats: dict[int, set[tuple[str, str]]] = field(default_factory=dict)
    by_pair: dict[tuple[int, int], Counter[str]] = field(default_factory=dict)
    no_gdr: Counter[str] = field(default_factory=Counter)
    nics: dict[str, list[str]] = field(default_factory=dict)
    far_nics: dict[str, None] = field(default_factory=dict)
    no_gdr_hosts: dict[str, None] = field(default_factory=dict)
    gdr_on: int = 0
    hcas: dict[str, None] = field(default_factory=dict)
    no_peer: str = ""
    no_efa_gdr: str = ""
    provider: str = ""
    no_device: bool = False
    no_verbs: str = ""
    p2p_off: dict[str, bool] = field(default_factory=dict)
    nic_paths: dict[str, set[str]] = field(default_factory=dict)
    graph_types: set[tuple[str, str]] = field(default_factory=set)
    plugins: dict[str, None] = field(default_factory=dict)
    networks: dict[str, None] = field(default_factory=dict)
    no_nvls: bool = False
    loaded: bool = False
    ports_down: dict[str, None] = field(default_factory=dict)
    given_up: dict[str, None] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    warnings: dict[str, None] = field(default_factory=dict)

    def add(self, line: str) -> None:
        """Take what one line says."""
        self._add_places(line)
        self._add_network(line)
        if match := _P2P_OFF.search(line):
            self.p2p_off[f"{match[2]} and {match[3]}"] = bool(match[1])
        if match := _GRAPH.search(line):
            self.graph_types.add((match[1], match[2]))
        if (match := _PATH.search(line)) and (kinds := _TO_NIC.findall(line)):
            host = _HOST.search(line)
            self.nic_paths[f"{host[1] if host else ''} {match[1]}".strip()] = set(kinds)
        self.no_nvls = self.no_nvls or "NVLS multicast support is not available" in line
        told = any(words.search(line) for words in _EXPLAINED) and not _FAILED_MESSAGE.search(line)
        if not told and (text := warning(line)):
            self.warnings[text] = None

    def _add_places(self, line: str) -> None:
        host = _HOST.search(line)
        if match := _RANK.search(line):
            self.sizes.add(int(match[2]))
            self.ids |= set(_ID.findall(line))
        if match and int(match[2]) >= self.ranks:
            if int(match[2]) > self.ranks:
                self.ranks, self.hosts = int(match[2]), {}
            if host:
                self.hosts[int(match[1])] = host[1]
        if match := _CHANNEL.search(line):
            pair = int(match[1]), int(match[3])
            self.by_pair.setdefault(pair, Counter())[match[6].strip()] += 1
            own = 1 if match[5] == "receive" else 0  # who receives writes so; all else is written by who sends
            if host and (gpu := (match[2], match[4])[own]):
                self.seats.setdefault(pair[own], set()).add((host[1], gpu))

    def _add_network(self, line: str) -> None:
        host = _HOST.search(line)
        name = host[1] if host else "?"
        if match := _NO_GDR.search(line):
            self.no_gdr[short(match[1].strip())] += 1
            self._add_distance(name, match[1])
        if match := _NO_PEER.search(line):
            self.no_peer = short(match[1] or match[2])
        if match := _NO_EFA_GDR.search(line):
            self.no_efa_gdr = short(match[1])
        if match := _PROVIDER.search(line):
            self.provider = match[1]
        self.gdr_on += "GPU Direct RDMA Enabled" in line
        if "NET/IB : Using" in line:
            self.hcas |= dict.fromkeys(_HCAS.findall(line))
            self.nics[name] = [hca.partition(":")[0] for hca in _HCAS.findall(line)]
        if match := _PORT_DOWN.search(line):
            self.ports_down[f"{name}/{match[1]}"] = None
        if match := _GIVEN_UP.search(line):
            self.given_up[f"{name}/{match[1] or '?'}"] = None
        self.no_device = self.no_device or "NET/IB : No device found" in line
        if match := _VERBS.search(line):
            self.no_verbs = short(match[1])
        self.loaded = self.loaded or _LOADED.search(line) is not None
        if _PLUGIN.search(line) and not _FAILED_MESSAGE.search(line):
            self.plugins[short(line.partition(" NCCL ")[2].partition(" ")[2].strip())] = None
        if match := _NET.search(line):
            self.networks[next(name for name in match.groups() if name)] = None

    def _add_distance(self, host: str, which: str) -> None:
        """Which NIC is too far from a GPU; where a line names no distance, no NIC of the machine has GPUDirect."""
        number = _HCA_NUMBER.search(which)
        if DISTANCE.search(which):
            own = self.nics.get(host, [])
            at = int(number[1]) if number else -1
            self.far_nics[f"{host}/{own[at] if 0 <= at < len(own) else at}"] = None
        else:
            self.no_gdr_hosts[host] = None

    @property
    def machines(self) -> int:
        """How many machines the ranks of the largest communicator are on, by the names before its lines; 0: unknown."""
        return len(set(self.hosts.values())) if self.hosts and len(self.hosts) == self.ranks else 0

    @property
    def places(self) -> dict[int, str]:
        """The machine of each rank, by whose channels it writes; where communicators number ranks otherwise, or a name
        stands for several machines (two ranks on one GPU of it), the ranks are left out."""
        places: dict[int, str] = {}
        ranks_on = Counter(seat for seats in self.seats.values() for seat in seats)
        for rank, seats in self.seats.items():
            seat = next(iter(seats))
            if len(seats) == 1 and ranks_on[seat] == 1:
                places[rank] = seat[0]
        return places

    @property
    def alone(self) -> bool:
        """Whether there is one communicator, so that a channel's ranks are those whose machines are known."""
        return max(len(self.sizes), len(self.ids)) == 1
