"""What an ``NCCL_DEBUG=INFO`` log says is slower than it need be, and why: the conclusion that its lines lead to.

The lines themselves are read by :mod:`clustersim.files.traces.nccl_evidence`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from clustersim.core.errors import few
from clustersim.files.traces.nccl_evidence import DISTANCE, Evidence
from clustersim.files.traces.nccl_warnings import warned
from clustersim.files.traces.told import Cause

SHOWN = 6
"""Devices or pairs named in a line."""
_TCP = ("tcp", "sockets", "udp")
"""Providers of libfabric that use the kernel's network, as they begin."""
_SOFT = ("rxe", "siw")
"""Devices of Soft-RoCE and Soft-iWARP, as Linux names them."""
_ABSENT = re.compile(
    r"Could not find|No plugin found|not found|cannot open shared object|Failed to find nccl\w+ symbol"
)
_SYMBOL = re.compile(r"Failed to find nccl\w+ symbol")
"""Of the interfaces that a library may have, one that is asked for before an older one; none is no failure, either."""
_NEEDED = re.compile(r"(?<![^\s=:])([^\s=:]+\.so[\w.]*): cannot open shared object")
_FAR = ("SYS", "NODE")
"""Types of a path that leaves the CPU that the GPU hangs on."""


@dataclass(frozen=True)
class _Pairs:
    """Channels by transport, within a machine and between machines."""

    inside: Counter[str]
    between: Counter[str]


def causes(evidence: Evidence, nodes: int, channels: Mapping[str, int]) -> list[Cause]:
    """What is slower than it need be, the most costly first; ``nodes`` 0: not known."""
    pairs = _sorted(evidence, nodes)
    return [
        *_lost_ports(evidence),
        *_sockets(evidence, pairs),
        *_no_p2p(evidence, pairs, nodes),
        *_network_inside(evidence, pairs),
        *_soft_nics(evidence),
        *_no_gdr(evidence, pairs),
        *_gdr_off_somewhere(evidence),
        *_far_nics(evidence, nodes),
        *_plugins(evidence),
        *_few_channels(evidence, channels),
        *_no_nvls(evidence),
        *_pinned_protocol(evidence),
        *warned(evidence.warnings),
    ]


def _lost_ports(evidence: Evidence) -> Iterator[Cause]:
    """Ports that went down; and where none says so, NICs whose messages nobody acknowledged."""
    for place in evidence.ports_down:
        why = "the NIC reports a port error: its cable, its switch port, or the NIC (ibstat, dmesg)"
        yield Cause("port_down", f"port {place} went down", why, place)
    if evidence.given_up and not evidence.ports_down:
        names = few(list(evidence.given_up), SHOWN)
        why = "no acknowledgement came (status 12): a port at the other end is down, or a switch between drops"
        yield Cause("peer_lost", f"NICs {names} gave up sending", why)


def _sorted(evidence: Evidence, nodes: int) -> _Pairs:
    """Channels of ranks on one machine, and others. Where places are not known a network joins machines, and shared
    memory and P2P do not."""
    inside = Counter[str]()
    between = Counter[str]()
    told = evidence.hosts if evidence.alone else {}
    places = told if evidence.sizes else evidence.places
    for (source, target), vias in evidence.by_pair.items():
        hosts = places.get(source), places.get(target)
        known = None not in hosts and len(places) > 1
        local = hosts[0] == hosts[1] if known else None
        for via, count in vias.items():
            same = local if local is not None else (nodes == 1 or not via.startswith("NET"))
            (inside if same else between)[via] += count
    return _Pairs(inside, between)


def _count(vias: Mapping[str, int], *begins: str) -> int:
    return sum(count for via, count in vias.items() if via.startswith(begins))


def _pinned(evidence: Evidence, *names: str) -> str:
    """Settings of the environment that are named, as ``NAME=VALUE``."""
    return ", ".join(f"{name}={evidence.env[name]}" for name in names if name in evidence.env)


def _is_on(value: str | None) -> bool:
    return value not in (None, "", "0")


# ---- within a machine ------------------------------------------------------------------------------------------------

_SHARED = ("SHM", "direct shared memory")
_NO_LEVEL = ("LOC", "0")


def _no_p2p(evidence: Evidence, pairs: _Pairs, nodes: int) -> Iterator[Cause]:
    shared = _count(pairs.inside, *_SHARED)
    direct = _count(pairs.inside, "P2P")
    off = _is_on(evidence.env.get("NCCL_P2P_DISABLE")) or evidence.env.get("NCCL_P2P_LEVEL") in _NO_LEVEL
    networked = _count(pairs.inside, "NET")  # which has a cause of its own
    if not shared and not (off and not direct and not networked):
        return
    text = f"P2P is off: {shared} channels within a machine go through host memory (SHM), not from GPU to GPU"
    if direct:
        text = (
            f"P2P is off for some pairs: {shared} channels within a machine go through host memory (SHM), {direct} P2P"
        )
    nvlink = any(intra in ("NVL", "NVB") for intra, _ in evidence.graph_types) or any(evidence.p2p_off.values())
    text += (
        ", though its GPUs have NVLink" if nvlink else "; where its GPUs have NVLink, that is what should carry them"
    )
    if off:
        why = f"the environment says so: {_pinned(evidence, 'NCCL_P2P_DISABLE', 'NCCL_P2P_LEVEL')}; unset it"
    elif evidence.p2p_off:
        names = few(list(evidence.p2p_off), SHOWN)
        why = f"the driver forbids P2P between GPUs {names}: ACS or IOMMU, a virtual machine, or hardware "
        why += "(nvidia-smi topo -p2p r)"
    elif "NCCL_P2P_LEVEL" in evidence.env:
        why = f"the environment limits it: {_pinned(evidence, 'NCCL_P2P_LEVEL')}"
    else:
        why = "the log does not say; look at nvidia-smi topo -m and -p2p r, ACS and IOMMU, and containers that see one "
        why += "GPU each"
    yield Cause("p2p_off", text, why)


def _network_inside(evidence: Evidence, pairs: _Pairs) -> Iterator[Cause]:
    network = _count(pairs.inside, "NET")
    if not network:
        return
    named = _pinned(evidence, "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_P2P_LEVEL", "NCCL_NET_DISABLE_INTRA")
    why = named or "the log does not say; containers that share no /dev/shm and no IPC, or other host names, do this"
    yield Cause(
        "net_inside", f"{network} channels within a machine go through the network ({_names(pairs.inside, 'NET')})", why
    )


def _no_nvls(evidence: Evidence) -> Iterator[Cause]:
    value = evidence.env.get("NCCL_NVLS_ENABLE")
    if value == "0":
        yield Cause("nvls_off", "NVLink SHARP (NVLS) is off", "the environment says so: NCCL_NVLS_ENABLE=0")


# ---- between machines ------------------------------------------------------------------------------------------------


def _names(vias: Mapping[str, int], begin: str) -> str:
    kinds = dict.fromkeys("/".join(via.split("/")[:2]) for via in vias if via.startswith(begin))
    return few(list(kinds), SHOWN)


def _sockets(evidence: Evidence, pairs: _Pairs) -> Iterator[Cause]:
    if evidence.provider.startswith(_TCP):
        fabric = sum(count for via, count in (pairs.between + pairs.inside).items() if "ibfabric" in via)
        why = _pinned(evidence, "FI_PROVIDER", "NCCL_NET") or "libfabric found no faster one; see fi_info -p efa"
        yield Cause("sockets", f"TCP carries {fabric} channels: libfabric's provider is {evidence.provider}", why)
    between = _count(pairs.between, "NET/Socket")
    used = between + _count(pairs.inside, "NET/Socket")
    chosen = list(evidence.networks)[-1:] == ["Socket"]
    if not used and not (chosen and not pairs.between and not pairs.inside):
        return
    carried = f"{used} channels" if used else "what leaves a machine"
    text = f"TCP sockets carry {carried}"
    named = _pinned(evidence, "NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA", "NCCL_NET_PLUGIN")
    asked = evidence.env.get("NCCL_NET", "").lower() == "socket"
    without_ib = _is_on(evidence.env.get("NCCL_IB_DISABLE"))
    if evidence.hcas:
        text += f", though InfiniBand or RoCE devices are there: {few(list(evidence.hcas), SHOWN)}"
    local = _pinned(evidence, "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
    networks = [line for line in evidence.plugins if "NET plugin" in line or line.startswith("NET/")]
    broken = [line for line in networks if not _is_absent(line)]
    if not asked and broken and without_ib:
        why = f"a plugin failed: {broken[-1]}; NCCL's own InfiniBand is not tried beside it, as {named} says"
    elif asked or without_ib:
        why = f"the environment says so: {named}; unset it"
    elif used and not between and local:
        why = f"they are within a machine, and the environment forbids P2P or shared memory: {local}"
    elif evidence.no_verbs:
        why = f"{evidence.no_verbs} could not be opened: install rdma-core in the container"
    elif broken:
        why = f"a plugin failed: {broken[-1]}"
    elif evidence.no_device:
        why = "NCCL found no InfiniBand device: /dev/infiniband in the container, ibstat, ulimit -l"
        why += f"; {named}" if named else ""
    else:
        why = f"{named or 'the log does not say'}; look for NET/IB and NET/Plugin with NCCL_DEBUG_SUBSYS=INIT,NET"
        if networks:
            why += f"; a cloud's network that is no InfiniBand needs its plugin, and none is there: {networks[-1]}"
    yield Cause("sockets", text, why)


def _soft_nics(evidence: Evidence) -> Iterator[Cause]:
    soft = [name for name in evidence.hcas if name.startswith(_SOFT)]
    if soft and not any(line.startswith("Socket") for line in evidence.networks):
        why = "the kernel's rdma_rxe or siw, and no NIC, makes the packets, and GPUDirect is not to be had; use a NIC "
        why += "that has RDMA (NCCL_IB_HCA), or sockets (NCCL_IB_DISABLE=1)"
        yield Cause("soft_rdma", f"RDMA is in software: the CPU sends for {few(soft, SHOWN)}", why)


def _no_gdr(evidence: Evidence, pairs: _Pairs) -> Iterator[Cause]:
    everywhere = pairs.between + pairs.inside
    network = {via: n for via, n in everywhere.items() if via.startswith("NET/") and not via.startswith("NET/Socket")}
    without = sum(count for via, count in network.items() if "GDRDMA" not in via)
    if evidence.hcas and all(name.startswith(_SOFT) for name in evidence.hcas):
        return  # which has none
    off = evidence.no_gdr or evidence.no_efa_gdr
    if not without and not (off and not network and not evidence.gdr_on):
        return
    whole = f"all {without}" if without == sum(network.values()) else f"{without} of {sum(network.values())}"
    text = (
        f"GPUDirect RDMA is off: {whole} network channels go through host memory"
        if network
        else "GPUDirect RDMA is off"
    )
    yield Cause("gdr_off", text, _why_no_gdr(evidence))


def _gdr_off_somewhere(evidence: Evidence) -> Iterator[Cause]:
    """Machines and NICs without GPUDirect where others have it."""
    if not evidence.gdr_on:
        return
    for host in evidence.no_gdr_hosts:
        why = "nvidia-peermem is not loaded there (lsmod), or its driver is another one"
        yield Cause("gdr_off", f"GPUDirect RDMA is off on {host}, and on for others", why, host)
    for nic in evidence.far_nics:
        why = "it hangs from another socket than the GPU that sends by it (nvidia-smi topo -m); move it, or its GPU"
        yield Cause("far_nic", f"GPUDirect RDMA is off for {nic}, which is too far from its GPU", why, nic)


def _why_no_gdr(evidence: Evidence) -> str:
    named = _pinned(
        evidence, "NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_DISABLE", "NCCL_DMABUF_ENABLE", "NCCL_IB_CUDA_SUPPORT"
    )
    which = few(list(evidence.no_gdr), 2)
    if evidence.no_peer:
        return f"NCCL says {evidence.no_peer}: load nvidia-peermem, or use DMA-BUF (open kernel modules, Linux 5.12)"
    if evidence.no_efa_gdr:
        return (
            f"the plugin for EFA says {evidence.no_efa_gdr}: it needs a machine whose NICs reach its GPUs (of AWS P4d "
            "and later), the EFA installer's kernel module and its libfabric (fi_info -p efa; FI_EFA_USE_DEVICE_RDMA "
            "is not 0)"
        )
    if named:
        return f"the environment says so: {named}" + (f"; NCCL says Disabled for {which}" if which else "")
    if match := next((found for text in evidence.no_gdr if (found := DISTANCE.search(text))), None):
        return (
            f"the NIC is too far from the GPU, behind the CPU or at another NUMA node (distance {match[1]}, up to "
            f"{match[2]} is used): GPU Direct RDMA Disabled for {which}; use a NIC on the GPU's PCIe switch, or raise "
            "NCCL_NET_GDR_LEVEL"
        )
    if which:
        return (
            f"NCCL says GPU Direct RDMA Disabled for {which}: load nvidia-peermem, or use DMA-BUF (open kernel "
            "modules, Linux 5.12 and later)"
        )
    return "the log does not say; NCCL_DEBUG_SUBSYS=INIT,NET,GRAPH does (nvidia-peermem, DMA-BUF, or a NIC that is far)"


def _far_nics(evidence: Evidence, nodes: int) -> Iterator[Cause]:
    far = [gpu for gpu, kinds in evidence.nic_paths.items() if kinds and kinds.issubset(_FAR)]
    total = len(evidence.nic_paths)
    if far:
        text = f"NICs are at another NUMA node for {len(far)} of {total} GPUs: {few(far, SHOWN)}"
        yield Cause(
            "far_nic",
            text,
            "every path from them to a NIC crosses the link between CPUs (SYS); " + _place_nics(evidence),
        )
    elif nodes != 1 and any(between in _FAR for _, between in evidence.graph_types):
        text = "NICs are at another NUMA node than GPUs that use them"
        yield Cause(
            "far_nic", text, "the ring found goes over the link between CPUs (type SYS); " + _place_nics(evidence)
        )


def _place_nics(evidence: Evidence) -> str:
    named = _pinned(evidence, "NCCL_IB_HCA", "NCCL_CROSS_NIC")
    return f"let each GPU use a NIC of its own CPU{f' (now {named})' if named else ''}, see nvidia-smi topo -m"


def _is_broken(line: str) -> bool:
    """Whether a plugin is there and cannot be loaded: it needs a symbol or another library that is not."""
    needed = _NEEDED.findall(line)
    others = [name for name in needed if not Path(name).name.startswith(("libnccl-", "librccl-"))]
    return bool(others) or "undefined symbol" in line or "version `" in line


def _is_absent(line: str) -> bool:
    """Whether a plugin is not there, which is usual and no failure."""
    return _ABSENT.search(line) is not None and not _is_broken(line)


def _plugins(evidence: Evidence) -> Iterator[Cause]:
    """Plugins that were asked for or found and did not work; that none is there is usual."""
    asked = [name for name in ("NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_NET") if name in evidence.env]
    for line in evidence.plugins:
        if _SYMBOL.search(line) and evidence.loaded:
            continue  # it has an older interface
        builtin = re.search(r"Failed to initialize NET plugin (?:IB|Socket)$", line)
        wanted = any(evidence.env[name].lower() not in ("none", "ib", "socket") for name in asked)
        if builtin or (_is_absent(line) and not wanted):
            continue
        why = _pinned(evidence, *asked) or "check its path (LD_LIBRARY_PATH), its version and what it needs"
        yield Cause("plugin_failed", f"a plugin failed: {line}", why)


# ---- channels --------------------------------------------------------------------------------------------------------


def _few_channels(evidence: Evidence, channels: Mapping[str, int]) -> Iterator[Cause]:
    limits = _pinned(evidence, "NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS", "NCCL_MAX_CTAS", "NCCL_NCHANNELS_PER_NET_PEER")
    if limits and channels.get("coll"):
        yield Cause(
            "few_channels", f"collectives have {channels['coll']} channels", f"the environment limits them: {limits}"
        )


def _pinned_protocol(evidence: Evidence) -> Iterator[Cause]:
    """Protocols of small messages for all of them: each 8 bytes of LL carry 4 of data."""
    value = evidence.env.get("NCCL_PROTO", "")
    names = set(re.split(r"[,;:]", value.lower().lstrip("^")))
    allowed = {"ll", "ll128", "simple"} - names if value.startswith("^") else names
    if allowed == {"ll"}:
        text = "large messages are sent by LL, at half the rate of the links or less"
        yield Cause("pinned_protocol", text, f"the environment says so: NCCL_PROTO={value}; unset it")


NOTHING = "conclusion: nothing here says that a transport is slower than it need be"
UNTOLD = "conclusion: none; no line here tells what transports are used (NCCL_DEBUG_SUBSYS=INIT,GRAPH,NET writes them)"
"""Where a log holds no line of the search for paths, such as one that begins after it."""


def conclusion(found: Iterable[Cause]) -> list[str]:
    """The causes as lines."""
    lines = [f"conclusion: {cause.text}. Why: {cause.why}" for cause in found]
    return lines or [NOTHING]
