"""What PCI ids and names of network devices tell: which GPU it is, and what a NIC speaks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path

from clustersim.core.device import Device, device
from clustersim.core.errors import TopologyError, few
from clustersim.core.texts import data_table, short

_ARCHITECTURES = {"908": ["MI100"], "910": ["MI210", "MI250-GCD", "MI250X-GCD"]}
"""Shipped GPUs of AMD's architectures, as old dumps call them (910: gfx90a): LLVM, "User Guide for AMDGPU Backend"."""
_OWN = "--gpu, with a file of `clustersim new device` where no shipped one is it"
_SOCKETS = "tcp"
_BY_NAME = (
    (r"rdmap\d|efa_\d", "efa"),
    (r"(?:cxi|hsn)\d", "slingshot"),
    (r"hfi1_\d|opap\d", "opa"),
    (r"ib[pP]\d", "ib"),
    (r"roce|bnxt_re|irdma|ionic", "roce"),
)
"""Names that drivers and rdma-core's rename rules give: providers of libfabric, verbs of Ethernet or of InfiniBand."""
_BY_CLASS = {"0x0207": "ib", "0x0208": "opa"}
_ETHERNET = "0x0200"
VERBS = ("", "verbs", "ib", "roce")
"""What a NIC speaks of which ibstat's link layer tells more."""
GVNIC = "gvnic"
"""What Google's virtual NICs are, of which GPUDirect-TCPX and TCPXO are plug-ins."""
_GOOGLE = "0x1ae0"
FAMILIES = {
    GVNIC: ("tcp", "tcpx", "tcpxo"),
    "ib": ("ib", "ib_host"),
    "roce": ("roce", "ib", "ib_host"),
    "verbs": ("ib", "ib_host", "roce"),
    "efa": ("efa", "efa_sendrecv", "efa_host"),
    "slingshot": ("slingshot",),
    "opa": ("opa",),
    _SOCKETS: (_SOCKETS,),
}
"""Of what a NIC speaks, the ``net`` of machines whose NICs are alike."""


@lru_cache(maxsize=1)
def _ids() -> dict[str, list[str]]:
    tables = data_table("pci_ids")
    ids: dict[str, list[str]] = tables["nvidia"] | tables["amd"]
    return ids


def nic_port(device_id: str) -> tuple[str, float] | None:
    """The NIC that a PCI device id names, and Gb/s of its fastest port; None of an id that is not known.

    >>> nic_port("0x1021"), nic_port("")
    (('ConnectX-7', 400.0), None)
    """
    nic = data_table("pci_ids")["nics"].get(device_id.lower())
    return None if nic is None else (nic["name"], nic["port"])


def gpus_of(device_id: str) -> list[str]:
    """GPUs that a PCI device id names: one, several that share it, or none.

    >>> gpus_of("0x2330"), gpus_of("0x740c"), gpus_of("")
    (['H100-SXM5-80GB'], ['MI250-GCD', 'MI250X-GCD'], [])
    """
    return _ids().get(device_id.lower(), [])


def only_gpu(ids: Collection[str], codes: Collection[str], path: Path) -> Device:
    """The GPU that all ids of a machine's GPUs name.

    Parameters
    ----------
    ids : PCI device ids, "" for none. codes : AMD's architectures without ``gfx``, which old dumps have in their place.

    Raises :class:`TopologyError` where they name none, several, or not the same.
    """
    gpus_by_sign = {f"the PCI device id {short(device_id) or 'none'}": gpus_of(device_id) for device_id in sorted(ids)}
    if set(ids) == {""}:
        gpus_by_sign = {
            f"AMD's architecture {short(code)}": _ARCHITECTURES.get(code, []) for code in sorted(codes) if code
        }
    names = sorted({name for several in gpus_by_sign.values() for name in several})
    if len(names) == 1 and all(gpus_by_sign.values()):
        return device(names[0])
    if not gpus_by_sign:
        raise TopologyError(f"{path}: does not say which GPUs these are; say --gpu")
    ambiguous = len(gpus_by_sign) == 1 and names
    why = f"which is of {few(names, 3)}" if ambiguous else "which they are is not known"
    ask = " or ".join(f"--gpu {name}" for name in names) if ambiguous else _OWN
    raise TopologyError(f"{path}: GPUs of {' and '.join(gpus_by_sign)}: {why}; say {ask}")


def of_google(direct: bool, few: bool) -> tuple[str, str]:
    """The ``net`` of a node with Google's virtual NICs, and what of it is assumed; ``few`` : than GPUs.

    >>> of_google(False, True), of_google(True, True)[0], of_google(True, False)[0]
    (('tcp', ''), 'tcpx', 'tcpxo')
    """
    if not direct:
        return "tcp", ""
    return ("tcpx", "GPUDirect-TCPX, as of A3 High") if few else ("tcpxo", "GPUDirect-TCPXO, as of A3 Mega")


def not_direct(without: Sequence[str], every: bool) -> str:
    """What to say of NICs that do not reach GPU memory."""
    taken = "bytes pass host memory" if every else "they are taken as if they did, as the others do"
    return f"{few(without, 3)}: GPUDirect RDMA is off, as the file has it (gdr 0): {taken}; is nvidia-peermem loaded?"


def staged(net: str, guess: str) -> tuple[str, str]:
    """The ``net`` of NICs that do not reach GPU memory, and what of it is assumed.

    >>> staged("ib", ""), staged("roce", ""), staged("efa", ""), staged("tcp", "")
    (('ib_host', ''), ('ib_host', "RoCE's is taken as InfiniBand's"), ('efa_host', ''), ('tcp', ''))
    """
    if net == "roce":
        return "ib_host", "RoCE's is taken as InfiniBand's"
    return {"ib": "ib_host", "efa": "efa_host", "efa_sendrecv": "efa_host"}.get(net, net), guess


def spoken(kind: str, device_id: str, name: str, *, sockets: bool, maker: str = "") -> str:
    """What a NIC speaks: a key of :data:`FAMILIES`, or nothing where neither id nor name tells.

    kind : its PCI class. name : of its network device. sockets : NCCL lists it as a plain interface. maker : its PCI
        vendor.

    >>> spoken("0x020700", "", "mlx5_0", sockets=False), spoken("0x020000", "0x1021", "mlx5_0", sockets=False)
    ('ib', 'roce')
    >>> spoken("", "", "eth0", sockets=True), spoken("0x020000", "", "", sockets=False)
    ('tcp', '')
    """
    if sockets:
        return _SOCKETS
    if device_id.lower().startswith("0xefa"):
        return "efa"
    if maker.lower() == _GOOGLE:
        return GVNIC
    protocol = next((word for pattern, word in _BY_NAME if re.match(pattern, name)), "") or _BY_CLASS.get(kind[:6], "")
    if protocol or (not name.startswith("mlx5") and not device_id):
        return protocol
    return "roce" if kind.startswith(_ETHERNET) else "verbs" if name.startswith("mlx5") else ""


def net_of(speaks: Collection[str], sm: int, board: str) -> tuple[str, str]:
    """The ``net`` of a node with NICs that speak so, and what of it is assumed.

    sm : compute capability of its GPUs, times ten. board : the ``net`` of the shipped machine with these GPUs and such
    NICs, or nothing.

    >>> net_of(["efa"], 90, ""), net_of(["tcp"], 80, ""), net_of(["verbs"], 90, "")[0]
    (('efa', ''), ('tcp', ''), 'ib')
    """
    words = Counter(word for word in speaks if word)
    net_word, count = words.most_common(1)[0] if words else ("", 0)
    if net_word == "efa":
        return "efa" if sm >= 90 else "efa_sendrecv" if sm == 80 else "efa_host", ""
    if net_word in ("", "verbs"):
        return (board, "as in a shipped machine with these GPUs") if board else ("ib", "InfiniBand; nothing says it")
    return net_word, "" if count == len(speaks) else "as most of the NICs"
