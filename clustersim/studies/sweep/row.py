"""A row: one scenario's inputs, the version that simulated it, and what came out. Two runs of it give the same bytes.

Its ``key`` is the SHA-256 of everything that decides the outcome: every field with its default, the content of the
topology and model files it names, clustersim's version and the rows' own format. Rows with one key are one scenario.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from clustersim.core import figures as figure_table
from clustersim.core.errors import ClusterSimError
from clustersim.core.paths import data_path, plain
from clustersim.core.texts import Table, decoded, plain_file
from clustersim.scenario.parts import located

if TYPE_CHECKING:
    from clustersim.scenario import Scenario
    from clustersim.scenario.result import Result

FORMAT = 1
"""Of a row; a new one makes every key new."""

LINKS = 3
"""How many of the busiest links a row keeps."""


NotNegative = Annotated[float, Meta(ge=0)]


class HotLink(msgspec.Struct, frozen=True):
    """A busy link: its name, and how much of its line rate a step uses."""

    link: str
    utilisation: NotNegative


class FullestMemory(msgspec.Struct, frozen=True):
    """Of the fullest GPU: its memory, and what nvidia-smi would show of it, with the least and the most [bytes]."""

    device_bytes: float = 0.0
    shown_bytes: float = 0.0
    shown_range_bytes: tuple[float, float] = (0.0, 0.0)


class StepTrust(msgspec.Struct, frozen=True):
    """Which published steps a step is like, and within what share of its prediction half of them lay
    (:func:`clustersim.scenario.ran.trust`)."""

    kind: str = ""
    p50: NotNegative = 0.0


class SweepFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is read of a row's result: the figures of ``clustersim run --json`` by their names there, the busiest of
    ``hottest_links`` first. ``tokens_per_s`` is of the whole machine; ``more`` has figures that follow from the others
    (:func:`clustersim.core.figures.computed`)."""

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


@cache
def version() -> str:
    """clustersim's own, as installed; in a checkout that is not, as its package says."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("clustersim")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class Identity:
    """What a scenario is, before it runs.

    Parameters
    ----------
    key : SHA-256, 64 hexadecimal digits. inputs : every field of the scenario, in plain values.
    files : name -> SHA-256 of the files it reads: topologies, the model's config.json, a schedule, a routing table.
    """

    key: str
    inputs: Table
    files: Mapping[str, str]


@dataclass
class Fingerprints:
    """Identities of many scenarios; each file is read once."""

    digests: dict[Path, str] = field(default_factory=dict)
    chains: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)

    def __call__(self, scenario: Scenario) -> Identity:
        """The identity of a scenario; a file that cannot be read is the run's error, not this one's."""
        inputs = scenario.inputs()
        file = scenario.file
        split = scenario.file.parallel
        digests = self._of("topology", scenario, "cluster.topology", file.cluster.topology)
        config = file.model.hf_config
        traced = file.model.file
        if (gpu := file.cluster.device) and gpu.endswith(".toml"):
            digests |= self._of("device", scenario, "cluster.device", gpu)
        if traced is not None:
            digests |= self._of("traced", scenario, "model.file", traced)
        else:
            digests |= self._of("model", scenario, "model.hf_config" if config else "", config or str(file.model.name))
        if split is not None:
            digests |= self._of("schedule", scenario, "parallel.schedule_csv", split.schedule_csv)
            digests |= self._of("routing", scenario, "parallel.routing.file", split.routing.file)
        return identity(inputs, digests)

    def _of(self, kind: str, scenario: Scenario, field: str, name: str | None) -> dict[str, str]:
        """Digests of what a field names; nothing where it names nothing."""
        if not name:
            return {}
        try:
            given = located(scenario, field, name) if field else name
        except ClusterSimError:
            return {}
        if (kind, given) not in self.chains:
            try:
                self.chains[kind, given] = {f"{kind}/{path.name}": self._digest(path) for path in _paths(kind, given)}
            except (ClusterSimError, OSError):
                self.chains[kind, given] = {}
        return self.chains[kind, given]

    def _digest(self, path: Path) -> str:
        if path not in self.digests:
            plain_file(path, ClusterSimError)  # a pipe has no end
            self.digests[path] = hashlib.sha256(path.read_bytes()).hexdigest()
        return self.digests[path]


def identity(inputs: Table, files: Mapping[str, str]) -> Identity:
    """The identity of these inputs and contents of files."""
    contents = {"format": FORMAT, "version": version(), "inputs": inputs, "files": files}
    text = msgspec.json.encode(contents, order="sorted", enc_hook=str)
    return Identity(hashlib.sha256(text).hexdigest(), inputs, files)


def _paths(kind: str, given: str) -> tuple[Path, ...]:
    from clustersim import model as models
    from clustersim.cluster import files as fabrics

    if kind == "topology":
        return fabrics.files(given)
    if kind != "model":
        return (Path(given),)
    model_file = models.file(given)
    return () if model_file is None else (model_file,)


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
