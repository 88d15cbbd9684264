"""The first two sieves over options with a split model: what is possible and fits, and the least a step takes.

Options that differ in machine, micro-batch and passes alone share their stages, so a form is looked at once: what
``[parallel]`` refuses, what each stage holds, and what a micro-batch takes at least. The rest is arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from clustersim.core.errors import ClusterSimError
from clustersim.core.outputs import output_folder, together
from clustersim.scenario.run.held import held
from clustersim.scenario.run.identity import Fingerprints, identity
from clustersim.scenario.run.parts import model_of, shape_of
from clustersim.studies.plan.candidates import PlanCandidate, scenario_of
from clustersim.studies.plan.form import BESIDE_STAGES, FormFamily, RefusedOption
from clustersim.studies.plan.known import KnownMachines
from clustersim.studies.plan.limits import Bound, SampledSteps, too_much
from clustersim.studies.what_if.folded_passes import can_fold

SIEVED = "sieve.msgpack"
"""What the sieve says, beside the rows of what was simulated."""


@dataclass(eq=False)
class OptionSieve(KnownMachines):
    """Forms and their options, one after the other; ``steps`` : of whole models, which options share that differ in
    passes alone."""

    steps: SampledSteps = field(default_factory=SampledSteps)

    def look(self, options: Sequence[PlanCandidate]) -> Iterator[tuple[int, Bound | RefusedOption]]:
        """Number of each option, with its bound or why it is out."""
        recipes: defaultdict[str, list[PlanCandidate]] = defaultdict(list)
        for option in options:
            recipes[repr(option.form.recipe)].append(option)
        for alike in recipes.values():
            # Stages and times are shared among options that are computed alike, and only among those.
            yield from OptionSieve(self.plan, self.path, self.machines)._computed_alike(alike)

    def _computed_alike(self, options: Sequence[PlanCandidate]) -> Iterator[tuple[int, Bound | RefusedOption]]:
        """Of options of one recipe."""
        forms: defaultdict[tuple[int, str], list[PlanCandidate]] = defaultdict(list)
        for option in options:
            missing = self._lacks(option)
            if missing:
                yield option.number, RefusedOption("error", missing)
            elif option.form.split:
                forms[option.form.number, option.kept].append(option)
            else:
                yield option.number, self._whole(option)
        shape = None
        model = None
        for same_form in sorted(forms.values(), key=_alike):
            try:
                scenario = scenario_of(self.plan, self.path, same_form[0])
                if shape is None or model is None:
                    shape = shape_of(scenario)
                    model = model_of(scenario)
                form = FormFamily(self, scenario, model, shape)
            except ClusterSimError as error:
                yield from ((option.number, RefusedOption("error", str(error))) for option in same_form)
                continue
            for option in same_form:
                try:
                    yield option.number, form.look(option)
                except ClusterSimError as error:
                    yield option.number, RefusedOption("error", str(error))

    def _lacks(self, option: PlanCandidate) -> str:
        """That the GPU has no units for what a recipe computes in; empty where it has.

        Who has units for 8 bits has frameworks that train in them, with one scale a tensor: Transformer Engine, below
        Megatron-LM and DeepSpeed, from sm89 on (``check_fp8_support``) and ROCm's of it on gfx94x and gfx95x; torchao,
        below torchtitan, from sm89 and gfx942 on (torchtitan pull request 3760).
        """
        dtype = option.form.recipe.get("dtype")
        topology, mesh = self.machines[self.place(option)]
        for kind in np.unique(topology.vertex_node[mesh.gpus]).tolist():
            gpu = topology.node_types[kind].gpu
            if dtype is not None and gpu.runs_as(dtype) != dtype:
                return f"{gpu.name} has no {dtype}"
        return ""

    def _whole(self, option: PlanCandidate) -> Bound | RefusedOption:
        """Of an option with a whole model on every rank, from its Program."""
        try:
            parts = held(scenario_of(self.plan, self.path, option))
            reason = too_much(parts, self.plan.limits.memory_margin)
            if reason:
                return RefusedOption("memory", reason, parts.verdict.use.total)
            bound = self.steps.bound(parts, (option.form.number, self.place(option), option.played[0], option.kept))
            return replace(bound, runs_out=parts.verdict.runs_out, folds=can_fold(parts.scenario))
        except ClusterSimError as error:
            return RefusedOption("error", str(error))


def kept(
    sieve: OptionSieve, options: Sequence[PlanCandidate], folder: Path
) -> Iterator[tuple[int, Bound | RefusedOption]]:
    """What the sieve says of these options, from its file in ``folder`` where that is of this plan and version."""
    plain = {"title": "", "campaign": None, "tried": msgspec.structs.replace(sieve.plan.tried, simulations=1)}
    plan = msgspec.to_builtins(msgspec.structs.replace(sieve.plan, **plain), enc_hook=str)
    prints = Fingerprints()
    first = {option.machine.label: option for option in reversed(options)}
    files: dict[str, str] = {}
    for option in first.values():
        with suppress(ClusterSimError):
            files |= prints(scenario_of(sieve.plan, sieve.path, option)).files
    key = identity({"plan": plan, "sieve": 3}, files).key
    path = folder / SIEVED
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        stored = msgspec.msgpack.decode(path.read_bytes(), type=_SieveFile)
        if stored.key == key:
            yield from stored.bounds.items()
            yield from stored.refused.items()
            return
    bounds: dict[int, Bound] = {}
    refused: dict[int, RefusedOption] = {}
    for number, outcome in sieve.look(options):
        if isinstance(outcome, RefusedOption):
            refused[number] = outcome
        else:
            bounds[number] = outcome
        yield number, outcome
    with output_folder(folder) as written_folder, together(written_folder) as path_of:
        path_of(SIEVED).write_bytes(msgspec.msgpack.encode(_SieveFile(key, bounds, refused)))


class _SieveFile(msgspec.Struct, array_like=True):
    """A sieve's file: of which plan, and what it says of every option."""

    key: str
    bounds: dict[int, Bound]
    refused: dict[int, RefusedOption]


def _alike(options: Sequence[PlanCandidate]) -> str:
    """Forms with the same stages behind each other."""
    first = options[0]
    table = {name: value for name, value in first.form.parallel.items() if name not in BESIDE_STAGES}
    return f"{first.kept} {sorted(table.items())}"
