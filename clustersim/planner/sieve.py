"""The first two sieves over options with a split model: what is possible and fits, and the least a step takes.

Options that differ in machine, micro-batch and passes alone share their stages, so a form is looked at once: what
``[parallel]`` refuses, what each stage holds, and what a micro-batch takes at least. The rest is arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clustersim.errors import ClusterSimError
from clustersim.planner.candidates import Candidate, scenario_of
from clustersim.planner.form import OF_REPLICAS, Form, Refused
from clustersim.planner.known import Known
from clustersim.planner.limits import Bound
from clustersim.scenario.parts import model_of, shape_of


@dataclass(eq=False)
class Sieve(Known):
    """Forms and their options, one after the other."""

    def look(self, options: Sequence[Candidate]) -> Iterator[tuple[Candidate, Bound | Refused]]:
        """Each option that splits the model with its bound, or why it is out."""
        forms: defaultdict[int, list[Candidate]] = defaultdict(list)
        for option in options:
            forms[option.form].append(option)
        shape, model = None, None
        for mine in sorted(forms.values(), key=_alike):
            try:
                scenario = scenario_of(self.plan, self.path, mine[0])
                if shape is None or model is None:
                    shape, model = shape_of(scenario), model_of(scenario)
                form = Form(self, scenario, model, shape)
            except ClusterSimError as error:
                yield from ((option, Refused("error", str(error))) for option in mine)
                continue
            for option in mine:
                try:
                    yield option, form.look(option)
                except ClusterSimError as error:
                    yield option, Refused("error", str(error))


def _alike(options: Sequence[Candidate]) -> str:
    """Forms with the same stages behind each other."""
    changes = options[0].changes
    table = {name: value for name, value in changes.get("parallel", {}).items() if name not in OF_REPLICAS}
    return f"{changes['model.activation_checkpointing']} {sorted(table.items())}"
