"""What both of nccl-tests' outputs say of their run: its table's lines above, and its ``-J`` report's settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from clustersim.collectives.nccl.settings import that_matter

LOGGED_SETTING = re.compile(r"\b((?:R|N)CCL_\w+) set (?:by environment )?to (\S+?)\.?(?=\s|$)")
"""A variable that the library found set, in its own line (NCCL's src/misc/param.cc, src/graph/tuning.cc)."""
LOGGED_CHANNELS = re.compile(
    r"(?<!\d)(\d+) coll channels(?:, (\d+) collnet channels)?(?:, (\d+) nvls channels)?, (\d+) p2p channels"
)
"""How many channels a communicator has of each kind, in the library's own line (NCCL's src/init.cc)."""
PROGRAM = re.compile(r"\b([a-z_]+)_(?:perf(?:_mpi)?|test)\b")
"""Programs, of NCCL 1 ``_test``."""
OF_CPU = "a time of the CPU (-C), not of the collective"
"""Why a row is left out."""


def version_text(code: int) -> str:
    """NCCL's version from its number.

    >>> version_text(22809), version_text(2708)
    ('2.28.9', '2.7.8')
    """
    big = 10000 if code >= 10000 else 1000
    return f"{code // big}.{code % big // 100}.{code % 100}"


@dataclass
class NcclTestsRun:
    """What the lines above a table, or a report's settings, said of it."""

    kind: str | None = None
    threads: int = 1
    gpus: int = 1
    version: str = ""
    env: dict[str, str] = field(default_factory=dict)
    own: dict[str, str] = field(default_factory=dict)  # of its command line
    hosts: dict[str, str] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    started: bool = False  # its threads and GPUs were said
    no_nvls: bool = False  # its communicators have no channels of NVLink SHARP
    milliseconds: bool = False  # of a table without units, as NCCL 1 and the first nccl-tests print it

    @property
    def launch(self) -> str:
        """How ranks were started; empty where it does not say."""
        if not self.gpus:  # of rows without the lines above them
            return ""
        return "threads" if self.threads > 1 else "single_process" if self.gpus > 1 else "process_per_gpu"

    @property
    def settings(self) -> str:
        """NCCL's variables that change times, NAME=VALUE, each once: those of the command before those that were set
        above it. Without channels of NVLink SHARP, whatever took them away, the run was as with NCCL_NVLS_ENABLE=0."""
        known = that_matter(self.env | self.own)
        if self.no_nvls:
            known["NCCL_NVLS_ENABLE"] = "0"
        return " ".join(f"{name}={value}" for name, value in known.items())

    def pasted(self) -> None:
        """Take it that rows were copied alone: nothing says how ranks were started, unless lines above them did."""
        self.gpus = self.gpus if self.started else 0

    def members(self) -> tuple[int, int]:
        """Ranks and nodes of the first group (NCCL_TESTS_SPLIT runs several at once); 0 where the log lists none, or
        not all that there must be."""
        if len(self.hosts) <= max(map(int, self.hosts), default=0):
            return 0, 0
        first = min(self.groups.values(), default="0")
        group_ranks = [rank for rank, group in self.groups.items() if group == first]
        return len(group_ranks), len({self.hosts[rank].split("\t")[0] for rank in group_ranks})

    @property
    def device(self) -> str:
        """The first rank's GPU; empty where it does not say."""
        return next(iter(self.hosts.values()), "\t").split("\t")[1].strip()


def number_of(word: str) -> float:
    """A cell's number; NaN where it is none."""
    try:
        return float(word)
    except ValueError:
        return float("nan")
