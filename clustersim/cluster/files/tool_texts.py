"""Which tool told of a machine, by its text; so a reader of topology files names it, and loads no reader of machines.

The readers are :mod:`~clustersim.cluster.files.smi_topo`, :mod:`~clustersim.cluster.files.rocm_topo` and
:mod:`~clustersim.cluster.files.lstopo`.
"""

from __future__ import annotations

import re

_STYLE = re.compile(r"\x1b?\[\d{1,2}(?:;\d{1,2})*m")
"""A terminal's marks; where a page was copied from, without their first character."""
MATRIX_HEAD = re.compile(r"^[ \t]*GPU0[ \t]+(?=[^\n]*(?:\bCPU[ \t]+Affinity|\n[ \t]*GPU0[ \t]+X\b))", re.MULTILINE)
"""Of ``nvidia-smi topo -m``, in a text that is :func:`unstyled`."""
AMD_SMI_TABLE = re.compile(r"^LINK TYPE TABLE:\s*\n(.*?)(?=^[A-Z][A-Z ]+TABLE:|^\s*$|\Z)", re.DOTALL | re.MULTILINE)
"""Of amd-smi, whose rows and columns are PCI addresses, and which tells no NUMA nodes."""
_PRINTED_TREE = re.compile(r"^\s*(?:Machine \(|HostBridge|Package L#\d|Package P#\d)", re.MULTILINE)


def unstyled(text: str) -> str:
    """A text without a terminal's marks and carriage returns."""
    return _STYLE.sub("", text).replace("\r", "")


def is_matrix(text: str) -> bool:
    """Whether a text holds the head of ``nvidia-smi topo -m``, whatever was printed before it."""
    return MATRIX_HEAD.search(unstyled(text)) is not None


def is_amd_report(text: str) -> bool:
    """Whether a text is of ``rocm-smi --showtopo`` or ``amd-smi topology``."""
    return (
        "Link Type between two GPUs" in text
        or "ROCm System Management Interface" in text
        or AMD_SMI_TABLE.search(text) is not None
    )


def is_hwloc_tree(text: str) -> bool:
    """Whether a text is of hwloc, as XML or as it prints."""
    return "<topology" in text[:2000] or _PRINTED_TREE.match(text) is not None
