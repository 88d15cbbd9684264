"""What a scenario is, before it runs: every field with its default, and the content of the files that it names.

Its ``key`` is the SHA-256 of everything that decides the outcome: these, clustersim's version and the rows' own format.
Two scenarios with one key have one outcome; a folder of runs, and every row of a study, is known by it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec

from clustersim.cluster import files as fabrics
from clustersim.core import gpu_file
from clustersim.core.errors import ClusterSimError
from clustersim.core.texts import Table, plain_file
from clustersim.model import named_models as models
from clustersim.model.named_models import config_of
from clustersim.scenario import Scenario
from clustersim.scenario.run.own_parts import own_parts
from clustersim.scenario.run.parts import located

FORMAT = 1
"""Of a row of a study; a new one makes every key new."""


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
    files : name -> SHA-256 of the files it reads: topologies, the model's config.json, a schedule, a routing table; and
        the code of parts that another package, or this program, added.
    """

    key: str
    inputs: Table
    files: Mapping[str, str]


@dataclass
class Fingerprints:
    """Identities of many scenarios; each file is read once."""

    digests: dict[Path, str] = field(default_factory=dict)
    chains: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    model_types: dict[str, str] = field(default_factory=dict)

    def __call__(self, scenario: Scenario) -> Identity:
        """The identity of a scenario; a file that cannot be read is the run's error, not this one's."""
        inputs = scenario.inputs()
        file = scenario.file
        split = scenario.file.parallel
        digests = self._of("topology", scenario, "cluster.topology", file.cluster.topology)
        config = file.model.hf_config
        traced = file.model.file
        if (gpu := file.cluster.device) and gpu_file.is_own(gpu):
            digests |= self._of("device", scenario, "cluster.device", gpu)
        if traced is not None:
            digests |= self._of("traced", scenario, "model.file", traced)
        else:
            digests |= self._of("model", scenario, "model.hf_config" if config else "", config or str(file.model.name))
        if split is not None:
            digests |= self._of("schedule", scenario, "parallel.schedule_csv", split.schedule_csv)
            digests |= self._of("routing", scenario, "parallel.routing.file", split.routing.file)
        return identity(inputs, digests | own_parts(inputs, self._model_type(scenario)))

    def _model_type(self, scenario: Scenario) -> str:
        """The ``model_type`` of the model's config.json; nothing where none can be read."""
        spec = scenario.file.model
        if spec.file is not None:
            return ""
        try:
            path = located(scenario, "model.hf_config", spec.hf_config) if spec.hf_config else str(spec.name)
            if path not in self.model_types:
                self.model_types[path] = str(config_of(path).get("model_type", ""))
            return self.model_types[path]
        except (ClusterSimError, OSError):
            return ""

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

    if kind == "topology":
        return fabrics.files(given)
    if kind != "model":
        return (Path(given),)
    model_file = models.file(given)
    return () if model_file is None else (model_file,)
