"""What NCCL warns of (``NCCL WARN``) where no line of its transports tells more: what failed, and what to look at.

Words of NCCL 2.8 to 2.29 (src/misc/ibvwrap.cc, shmutils.cc, socket.cc; src/init.cc, bootstrap.cc, transport/net_ib).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from clustersim.core.texts import short
from clustersim.files.traces.told import Cause

SHOWN = 3
"""Warnings that nobody explains, named in a conclusion each."""
_LINE = re.compile(r"NCCL WARN (.+)$")
_KNOWN = (
    (r"/dev/shm|shared memory segment", "shared memory could not be made", "it is too small: --shm-size or --ipc=host"),
    (
        r"libnvidia-ml|nvml\w*\(\) failed",
        "the driver's library of management could not be used",
        "the container lacks it: --gpus, NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    (r"Duplicate GPU detected", "two ranks use one GPU", "see LOCAL_RANK, CUDA_VISIBLE_DEVICES and ranks a node"),
    (
        r"ibv_(?:modify_qp|create_qp)\w* failed",
        "a queue pair of InfiniBand or RoCE could not be connected",
        "no way to the other end's port: NCCL_IB_GID_INDEX of RoCE, NCCL_IB_HCA, another subnet",
    ),
    (
        r"ibv_reg_\w+ failed|ibv_create_cq\w* failed",
        "a NIC could not register memory",
        "raise the limit of locked memory (ulimit -l unlimited, --ulimit memlock=-1)",
    ),
    (
        r"[Nn]o (?:socket )?interface found",
        "no network interface was found",
        "see NCCL_SOCKET_IFNAME and what the container is given",
    ),
    (
        r"completed with error\b.*(?:[Uu]nresponsive receiver|handshake failed)",
        "the EFA of a peer does not answer",
        "its process ended (see its own log), or its security group does not let all traffic between its members "
        "through, in and out",
    ),
    (
        r"NET/OFI Request \S+ completed with error",
        "a message over libfabric did not arrive",
        "what stands behind RC is libfabric's reason; see the log of the peer that it names",
    ),
    (
        r"Connect to .*failed|[Cc]onnection (?:refused|reset|timed out|closed)|[Nn]o route to host",
        "a peer could not be reached",
        "its process ended (see its own log), a firewall, or another interface (NCCL_SOCKET_IFNAME)",
    ),
    (
        r"Message truncated",
        "ranks sent messages of different sizes",
        "compare the sizes that ranks give one collective",
    ),
    (r"[Mm]ismatch.*version|version.*[Mm]ismatch", "ranks have different versions of NCCL", "install one everywhere"),
    (
        r"peer access is not supported",
        "P2P between two GPUs is not possible",
        "the driver forbids it (nvidia-smi topo -p2p r), a container sees one GPU each, or NCCL_P2P_LEVEL forces it",
    ),
    (
        r"[Mm]issing .*(?:iommu|HSA_FORCE_FINE_GRAIN_PCIE)",
        "RCCL misses a setting of the machine",
        "set it: iommu=pt on the kernel's command line, HSA_FORCE_FINE_GRAIN_PCIE=1 for P2P over PCIe",
    ),
    (
        r"NUMA auto balancing enabled",
        "Linux moves pages between CPUs while RCCL uses them",
        "switch it off: sysctl kernel.numa_balancing=0",
    ),
    (r"[Cc]uda failure", "CUDA failed", "see dmesg for Xid errors, and the memory that is free"),
)


def warning(line: str) -> str:
    """What a line warns of; empty for another line."""
    match = _LINE.search(line)
    return short(match[1].strip()) if match else ""


def warned(warnings: Iterable[str]) -> Iterator[Cause]:
    """A cause of each kind of warning, and of the first of those that are of none."""
    explained: set[str] = set()
    unknown = 0
    for text in warnings:
        known = next((row for row in _KNOWN if re.search(row[0], text)), None)
        if known is None and unknown < SHOWN:
            unknown += 1
            yield Cause("warned", f"NCCL warned: {text}", "the line is NCCL's own; what comes before it says more")
        elif known is not None and known[1] not in explained:
            explained.add(known[1])
            yield Cause("warned", f"{known[1]}: {text}", known[2])
