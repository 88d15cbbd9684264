"""What a file may ask for: counted before it is made, and compared with what there is or what anybody means."""

from __future__ import annotations

from pathlib import Path

from clustersim.core.errors import ClusterSimError, ProgramError
from clustersim.core.units import format_bytes

MOST_NAMES = 1_000_000
"""Names that one field of a topology may stand for."""
MOST_LAYERS = 100_000
"""Layers of a model."""
MOST_EXPERTS = 100_000
"""Experts of a model, those of all its layers together: each has tensors of its own."""
MOST_VALUES = 100_000
"""Values of one axis of a sweep."""
MOST_CASES = 1_000_000
"""Scenarios of a sweep or options of a plan."""
MOST_MICROBATCHES = 10_000
"""Micro-batches of a step of a split model: a minute of work."""
MOST_RANKS = 10_000_000
"""Ranks of a run."""

SMALL = 2**28
"""What every machine has [bytes]: so little is not asked for."""

GROUPS = Path("/sys/fs/cgroup")


def counted(n: float, most: int, subject: str, error: type[ClusterSimError]) -> None:
    """Raise ``error`` where a file asks for more than ``most``; ``subject``: ``"x.toml: $.axes[0]: values"``."""
    if not n <= most:
        raise error(f"{subject}: {n:,.4g} are asked for; at most {most:,} are made")


def check(needed: float, purpose: str, instead: str, error: type[ClusterSimError] = ProgramError) -> None:
    """Raise ``error`` where ``needed`` bytes are more than this process can still get.

    ``purpose`` : ``"at chunk fidelity"``. ``instead`` : what would fit.
    """
    free = free_memory() if needed > SMALL else None
    if free is not None and needed > free:
        need_text = f"this needs about {format_bytes(needed)} {purpose}, {format_bytes(free)} are free"
        raise error(f"{need_text}; {instead}")


def free_memory() -> float | None:
    """[bytes] this process can still get: what the machine has, or its control group allows; None where unknown."""
    limits_known = [
        _meminfo(),
        _allowed(),
        _left("memory.max", "memory.current"),
        _left("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ]
    return min((value for value in limits_known if value is not None), default=None)


def _meminfo() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024.0 * float(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _allowed() -> float | None:
    """Of the process's own limit (``ulimit -v``)."""
    try:
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):  # another system
        return None
    return None if most == resource.RLIM_INFINITY else max(0.0, float(most - pages * resource.getpagesize()))


def _left(limit: str, used: str) -> float | None:
    """Of a control group's limit; what it caches of files would be given back, so it is not counted as used."""
    try:
        most = (GROUPS / limit).read_text().strip()
        now = float((GROUPS / used).read_text())
        stat = (GROUPS / limit).with_name("memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    names = "inactive_file ", "total_inactive_file "
    cached = next((float(line.split()[1]) for line in stat if line.startswith(names)), 0.0)
    return None if most == "max" else max(0.0, float(most) - now + cached)
