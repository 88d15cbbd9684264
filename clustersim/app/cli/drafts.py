"""Files that ``clustersim new`` writes: a draft, filled in for a machine and a model."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, NamedTuple

from clustersim.app.cli.machines import MachineChoice, as_written
from clustersim.app.cli.recipes import (
    MOST_MICRO_BATCH,
    RECIPES,
    USUAL,
    RecipePlace,
    batch_of,
    batch_rule,
    degrees_tried,
    kernels,
    offload_tried,
    offloading_settings,
    own_tables,
    recipe_text,
    settings,
    tokens_of,
)
from clustersim.core.errors import ClusterSimError
from clustersim.core.paths import data_path
from clustersim.core.texts import short

if TYPE_CHECKING:
    from clustersim.training.parallel import ModelShape

COMMENTS = 28
"""Characters of a line before the blank and the comment behind its value, where the value is shorter."""
NO_DEVICE = '# device = "..."             # another GPU in the same sockets; `clustersim list devices`\n'
"""The line of ``[cluster]`` where the machine keeps its own GPUs."""


class RecipeText(NamedTuple):
    """A scenario's text, and the recipe whose setting it is."""

    recipe: str
    text: str


@dataclass(frozen=True)
class ScenarioDraft:
    """A scenario that is to be written: where, on what, and of which model."""

    file: Path
    machine: MachineChoice
    nodes: int
    model: str
    tokens: float | None
    seq_len: int | None = None

    def texts(self, recipes: Sequence[str]) -> Iterator[RecipeText]:
        """The settings of these recipes, in turn, the fastest first.

        Plain data parallelism keeps no recomputation in reserve where another recipe follows.
        """
        place = self._place()
        for recipe in recipes:
            if recipe == "megatron" != recipes[0] and place.shape is None:
                continue  # which has nothing to split
            for values in settings(recipe, place):
                if recipe == USUAL[0] != recipes[-1] and values["kept"] != "none":
                    break
                yield RecipeText(recipe, self._filled(recipe, recipe_text(recipe, place, values)))

    def offloading_texts(self, recipes: Sequence[str]) -> Iterator[RecipeText]:
        """The settings of these recipes that leave a part to the host, for models that fit in no other way."""
        place = self._place()
        for recipe in recipes:
            for values in offloading_settings(recipe, place):
                yield RecipeText(recipe, self._filled(recipe, recipe_text(recipe, place, values)))

    def _place(self) -> RecipePlace:
        shape = shape_of_model(self.model, self.file, self.seq_len) if has_tokens(self.model) else None
        return place_of(self.machine, self.nodes, shape)

    def _filled(self, recipe: str, tables: str) -> str:
        return filled(
            "scenario",
            file=short(self.file.name),
            title=RECIPES[recipe],
            machine=self.machine.label,
            topology=as_written(self.machine.topology, self.file),
            device=self.machine.device_line(self.file) or NO_DEVICE,
            nodes=self.nodes,
            model=self.model,
            model_line=model_line(self.model, self.file),
            length=length_line(self.model, self.file, self.seq_len),
            recipe=tables,
            campaign="" if self.tokens is None else filled("campaign", tokens=f"{self.tokens:g}"),
        )


@dataclass(frozen=True)
class PlanDraft:
    """A plan that is to be written: of which model, on which machines and how many nodes of each."""

    file: Path
    model: str
    machines: Sequence[MachineChoice]
    nodes: Sequence[int]
    seq_len: int | None = None

    def values(self) -> dict[str, str]:
        """What depends on model and machines: numbers, kernels, the batch, and degrees."""
        shape = shape_of_model(self.model, self.file, self.seq_len) if has_tokens(self.model) else None
        dtype = "bf16" if all(machine.dtype == "bf16" for machine in self.machines) else "fp16"
        places = [place_of(machine, max(self.nodes), shape) for machine in self.machines]
        context = max(max(place.contexts) for place in places)
        least, most = batch_of(shape, max(place.nodes * place.per_node for place in places), context)
        eight = shape is not None and any(machine.has_fp8 for machine in self.machines)
        tried = degrees_tried(places)
        micro = [size for size in places[0].micro_batches[::-1] if size <= MOST_MICRO_BATCH]
        return {
            "dtype": dtype,
            "dtypes": json.dumps([dtype, "fp8"] if eight else [dtype]),
            "kernels": kernels(shape),
            "least": str(least),
            "most": str(most),
            "batch": tokens_of(least, most, shape),
            "rule": batch_rule(shape, context),
            "micro": str(sorted({*micro[-3:]} if shape is None else {*micro[-2:], 1, 2})),
            "parallel": tried,
            "offload": self._offload(dtype, min(self.nodes) * min(place.per_node for place in places)),
            **own_tables(tried),
        }

    def _offload(self, dtype: str, gpus: int) -> str:
        """The strategy with the optimizer on the host, where the fewest GPUs are small for the model."""
        from clustersim.scenario import from_table
        from clustersim.scenario.run.parts import model_of
        from clustersim.studies.plan.untried import BYTES_A_PARAMETER

        table = tomllib.loads(model_line(self.model, self.file))
        tables = {"cluster": {"topology": "hgx-h100"}, "model": table, "strategy": {"kind": "ddp"}}
        states_bytes = BYTES_A_PARAMETER * model_of(from_table(tables, self.file)).parameters
        memory_bytes = min(gpu.memory_bytes for machine in self.machines for gpu in machine.gpus)
        return offload_tried(states_bytes / gpus, memory_bytes, dtype)


def place_of(machine: MachineChoice, nodes: int, shape: ModelShape | None) -> RecipePlace:
    """A machine of so many nodes, for a model of this shape."""
    from clustersim.cluster import files as fabrics

    topology = fabrics.load(machine.topology)
    per_node = max(1, sum(kind == "gpu" for kind in topology.vertex_kinds))
    shared = len(topology.gpus) and fabrics.mesh(topology).nproc_per_domain
    per_domain = fabrics.mesh(fabrics.load(machine.topology, nodes)).nproc_per_domain if shared else 0
    return RecipePlace(shape, machine.dtype, nodes, per_node, per_domain)


def shape_of_model(name: str, file: Path, seq_len: int | None = None) -> ModelShape:
    """A model's sizes, with samples of the length that :func:`length_line` writes."""
    from clustersim.scenario import from_table
    from clustersim.scenario.run.parts import shape_of

    table = tomllib.loads(f"{model_line(name, file)}\n{length_line(name, file, seq_len)}")
    tables = {"cluster": {"topology": "hgx-h100"}, "model": table, "strategy": {"kind": "ddp"}}
    return shape_of(from_table(tables, file))


def length_line(name: str, file: Path, seq_len: int | None = None) -> str:
    """The line of ``[model]`` with tokens of a sample, ``seq_len`` where that is asked for; nothing for what reads
    none, or whose length is its own. Raises :class:`ClusterSimError` where a length is asked of those."""
    from clustersim.scenario import from_table
    from clustersim.scenario.run.parts import model_of

    if not has_tokens(name):
        if seq_len is not None:
            raise ClusterSimError(f"--seq-len {seq_len}: {name} has no length of its own to choose; leave it out")
        return ""
    if seq_len is not None:
        return f"seq_len = {seq_len}             # tokens of a sample\n"
    table = tomllib.loads(model_line(name, file))
    tables = {"cluster": {"topology": "hgx-h100"}, "model": table, "strategy": {"kind": "ddp"}}
    longest = model_of(from_table(tables, file)).seq_len
    return (
        f"seq_len = {longest}               # the config's longest, at most 8192: long contexts (--seq-len) come last\n"
    )


def filled(draft: str, /, **values: object) -> str:
    """A shipped draft of a file, with these values in it."""
    text = (data_path("data") / "new" / f"{draft}.txt").read_text("utf-8")
    return _aligned(Template(text).substitute(values).rstrip()) + "\n"


def _aligned(text: str) -> str:
    """A file's lines with the comments behind short values one below the other, however long the values are."""
    short_value = rf"^(\w[^#\n]{{0,{COMMENTS - 1}}}?) {{2,}}# "
    return re.sub(short_value, lambda line: f"{line[1]:<{COMMENTS}} # ", text, flags=re.MULTILINE)


def model_line(name: str, file: Path) -> str:
    """The line of ``[model]`` that names it; a path is written relative to the file."""
    from clustersim.model.named_models import is_model_file, model

    path = Path(name)
    if is_model_file(path):
        return f'file = "{os.path.relpath(path, file.parent)}"'
    if not name or (path.suffix != ".json" and not path.is_dir()):
        return f'name = "{model(name).name}"'
    return f'hf_config = "{os.path.relpath(path, file.parent)}"'


def has_tokens(name: str) -> bool:
    """Whether a model reads text."""
    from clustersim.model.named_models import file, is_model_file

    return not is_model_file(Path(name)) and file(name) is not None
