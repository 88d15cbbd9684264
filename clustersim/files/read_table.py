"""What is read, by framework and version: one table of the tables that the readers go by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clustersim.cluster.files.nccl_xml import TOOLS
from clustersim.files.launch import pods
from clustersim.files.launch.chakra_earlier import ABOUT
from clustersim.files.launch.chakra_schema import VERSION
from clustersim.files.launch.table import NAMES, load
from clustersim.files.traces import FORMATS


@dataclass(frozen=True)
class ReadKind:
    """Files that a command reads.

    name : as ``--format`` takes it, or of the tool that prints them. about : whose, and which releases.
    """

    command: str
    name: str
    about: str


def kinds() -> Iterator[ReadKind]:
    """Every kind of file of others that is read, by the command that reads it."""
    for row in FORMATS.values():
        if row.read is not None:
            yield ReadKind("trace, report, replay", row.name, f"{row.what}: {row.of}")
    years = ", ".join(map(str, ABOUT))
    yield ReadKind(
        "replay", "chakra", f"Chakra execution traces of {years} and {VERSION}, a file a rank or one for all"
    )
    for name in NAMES:
        table = load(name)
        yield ReadKind("import", name, f"{table.title}: {table.version}")
    jobs = f"beside any of them: {', '.join(pods.KINDS)} of Kubernetes, hostfiles, config.json"
    yield ReadKind("import", "jobs", jobs)
    for tool, about in TOOLS.items():
        yield ReadKind("new topology --from", tool, about)
