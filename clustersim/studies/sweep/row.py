"""A row: one scenario's inputs, the version that simulated it, and what came out. Two runs of it give the same bytes.

Its ``key`` says which scenario it is of (:mod:`clustersim.scenario.run.identity`): rows with one key are one scenario.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from clustersim.core import figures as figure_table
from clustersim.core.errors import ClusterSimError
from clustersim.core.host_memory import HostMemory, either, worse
from clustersim.core.memory_states import DOES_NOT_FIT, FITS, likelihood, verdict_of
from clustersim.core.paths import data_path, plain
from clustersim.core.texts import Table, decoded
from clustersim.core.topology import LINE_RATE
from clustersim.scenario.run.identity import Identity, version
from clustersim.studies.what_if.amounts import StepAmounts

if TYPE_CHECKING:
    from clustersim.scenario import Scenario
    from clustersim.scenario.result import Result

LINKS = 3
"""How many of the busiest links a row keeps."""


NotNegative = Annotated[float, Meta(ge=0)]


class HotLink(msgspec.Struct, frozen=True):
    """A busy link: its name, how much a step uses, and ``of`` what: its line rate, or the less that it delivers."""

    link: str
    utilisation: NotNegative
    of: str = LINE_RATE


class FullestMemory(msgspec.Struct, frozen=True):
    """Of the fullest GPU: its memory, and what the step cannot do without of it, with the least and the most [bytes];
    and the memory of a node's ``host``."""

    device_bytes: float = 0.0
    needed_bytes: float = 0.0
    needed_range_bytes: tuple[float, float] = (0.0, 0.0)
    host: HostMemory = HostMemory()


class StepTrust(msgspec.Struct, frozen=True):
    """Which published steps a step is like, and within what share of its prediction half of them lay
    (:func:`clustersim.scenario.result.trust.trust`)."""

    kind: str = ""
    p50: NotNegative = 0.0


class FewPasses(msgspec.Struct, frozen=True):
    """Of a step that was told by one of so many ``passes``: what that comes to, and what ``each`` pass more adds, None
    where that is not known (:mod:`clustersim.studies.what_if.folded_passes`)."""

    passes: int
    step: StepAmounts
    each: StepAmounts | None


class SweepFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is read of a row's result: the figures of ``clustersim run --json`` by their names there, the busiest of
    ``hottest_links`` first. ``tokens_per_s`` is of the whole machine; ``more`` has figures that follow from the others
    (:func:`clustersim.core.figures.computed`). ``few_passes`` : where it was told so."""

    step_time_s: NotNegative
    samples_per_s: NotNegative
    compute_s: NotNegative
    exposed_communication_s: NotNegative
    peak_memory_bytes: NotNegative
    gpus: Annotated[int, Meta(ge=0)]
    fits: bool
    phase_shares: dict[str, float]
    hottest_links: list[HotLink]
    tokens_per_s: NotNegative | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    strategy: str = ""
    model: str = ""
    topology: str = ""
    device: str = ""
    nodes: int | None = None
    parameters: int | None = None
    communication_s: float | None = None
    peer_wait_s: float | None = None
    idle_s: float | None = None
    bytes_sent_per_gpu: float | None = None
    memory: FullestMemory = FullestMemory()
    trust: StepTrust = StepTrust()
    more: dict[str, float] = {}
    few_passes: FewPasses | None = None

    @property
    def state(self) -> str:
        """Of GPU and host, what :func:`clustersim.core.memory_states.verdict_of` says; of a run that did not say how
        full GPUs are, whether it fits."""
        memory = self.memory
        if not memory.device_bytes:
            return FITS if self.fits else DOES_NOT_FIT
        return worse(verdict_of(self.peak_memory_bytes, memory.device_bytes, self.gpu_runs_out), memory.host)

    @property
    def gpu_runs_out(self) -> float:
        """How likely it takes more memory than a GPU has; 0 where nobody said how full it is."""
        memory = self.memory
        if not memory.device_bytes:
            return 0.0
        return likelihood(memory.needed_range_bytes, memory.needed_bytes, memory.device_bytes)

    @property
    def runs_out(self) -> float:
        """The same of GPU or host."""
        return either(self.gpu_runs_out, self.memory.host)


class Failure(msgspec.Struct, frozen=True, rename={"kind": "class"}):
    """Why a scenario has no result: the error's class, and its message."""

    kind: str
    message: str


class SweepRow(msgspec.Struct, frozen=True):
    """A row as it is read: the scenario's ``key``, and a ``result`` or an ``error``."""

    key: str
    result: SweepFigures | None = None
    error: Failure | None = None


def row_of(text: bytes, where: str) -> SweepRow:
    """A row from its line. Raises :class:`ClusterSimError` for one that is damaged: no result, a figure missing or
    negative; ``where`` is the error's beginning."""
    damaged = f"{where} is damaged; take it out, and it is simulated again"
    row = decoded(text, SweepRow, damaged, ClusterSimError)
    if (row.result is None) == (row.error is None):
        raise ClusterSimError(f"{damaged}: it has no result and no error, or both")
    return row


def line_of(scenario: Scenario, identity: Identity) -> bytes:
    """Run a scenario; its row as one line of JSON. What cannot run is a row with its error."""
    try:
        return line(identity, figures(scenario.run()))
    except MemoryError:
        raise  # of this machine, not of the scenario
    except Exception as error:
        return line(identity, failure(error, scenario.path.parent))


def line(identity: Identity, outcome: object) -> bytes:
    """A row as one line of JSON; ``outcome`` is its result, or a :class:`Failure`."""
    column = "error" if isinstance(outcome, Failure) else "result"
    contents = {
        "key": identity.key,
        "version": version(),
        "inputs": identity.inputs,
        "files": identity.files,
        column: outcome,
    }
    return msgspec.json.encode(plain(contents)) + b"\n"


def failure(error: Exception, folder: Path) -> Failure:
    """An error's class and message, without the folders that differ from one machine to the next."""
    text = " ".join(str(error).split())
    for place in (folder, data_path("topologies"), data_path("data")):
        text = text.replace(f"{place}/", "")
    return Failure(type(error).__name__, text)


def figures(result: Result) -> Table:
    """What a row keeps of a result: the figures of ``clustersim run --json`` that do not grow with the ranks."""
    document = result.to_dict()
    for name in ("scenario", "changes", "per_rank", "steady_steps"):
        document.pop(name, None)
    document["hottest_links"] = document["hottest_links"][:LINKS]
    tokens = document["tokens_per_s_per_gpu"]
    document["tokens_per_s"] = None if tokens is None else tokens * result.prepared.mesh.workers
    more = {
        figure.key: document.pop(figure.key)
        for figure in figure_table.FIGURES
        if figure.value and figure.key in document
    }
    if more:
        document["more"] = more
    return document
