"""A scenario on its machine with the bytes each GPU holds: all that can be said of it before its step is written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from clustersim.core.device import AS_IS, Device, Speed
from clustersim.core.errors import ScenarioError
from clustersim.core.host_memory import HostMemory
from clustersim.core.memory_use import MemoryUse, Verdict
from clustersim.core.mesh import Mesh
from clustersim.core.model import Model
from clustersim.core.topology import Topology
from clustersim.scenario import Scenario
from clustersim.scenario.file.splitting import splits, with_micro_batches
from clustersim.scenario.run.hosts import host_memory
from clustersim.scenario.run.parts import cost_of, memory_of, model_of, placed, smallest_card

if TYPE_CHECKING:
    from clustersim.scenario.run.split_step import Split


@dataclass(frozen=True, eq=False)
class ScenarioParts:
    """Who holds what.

    scenario : with its number of micro-batches settled. topology, mesh, model : its parts.
    split : where ``[parallel]`` splits it. whole_use : what every rank holds where it does not.
    """

    scenario: Scenario
    topology: Topology
    mesh: Mesh
    model: Model
    split: Split | None = None
    whole_use: tuple[MemoryUse, ...] = ()

    @property
    def uses(self) -> tuple[MemoryUse, ...]:
        """Of one rank of each stage of a split model, and else of any rank."""
        return self.split.memory if self.split else self.whole_use

    @property
    def use(self) -> MemoryUse:
        """Of the rank that holds most."""
        return self.uses[self.split.worst] if self.split else self.uses[0]

    @property
    def card(self) -> Device:
        """The GPU of the ranks; the one with least memory where node types are mixed."""
        return smallest_card(self.topology, self.mesh)

    @property
    def host(self) -> HostMemory:
        """What the ranks of a node keep on its host, and what that has."""
        return self.verdict.host

    @property
    def verdict(self) -> Verdict:
        """Whether GPUs and hosts have room."""
        return self.verdict_of(self.use)

    def verdict_of(self, use: MemoryUse) -> Verdict:
        """The same of ranks that hold other bytes, as with micro-batches of another size."""
        return use.fits(self.card, host_memory(self.topology, self.mesh, use.host_bytes))

    def whole(self) -> MemoryUse:
        """What one GPU would hold if nothing were shared and nothing split."""
        return memory_of(self.scenario, self.model, self.topology, self.mesh, whole=True)

    def resized(self, size: int) -> MemoryUse:
        """``use`` with micro-batches of ``size`` samples, and everything else as it is."""
        if self.split is not None:
            resized = self.split.resized(size)
            return resized.memory[resized.worst]
        config = msgspec.structs.replace(self.scenario.config, micro_batch_size=size)
        return memory_of(replace(self.scenario, config=config), self.model, self.topology, self.mesh)


def _reads_what_is_gathered(scenario: Scenario) -> None:
    """Raise :class:`ScenarioError` where weights are gathered in 8 bits and products do not read them so: torchao's
    ``Float8LinearConfig`` asserts one scale a tensor, and linears in bf16 are none of its modules."""
    if not getattr(scenario.config, "float8_all_gather", False):
        return
    model = scenario.file.model
    if model.dtype != "fp8" or model.float8_recipe != "tensorwise":
        recipe = f' with float8_recipe = "{model.float8_recipe}"' if model.dtype == "fp8" else ""
        raise ScenarioError(
            f'float8_all_gather = true beside dtype = "{model.dtype}"{recipe}: weights are gathered in 8 bits for '
            'dtype = "fp8" with one scale a tensor (float8_recipe = "tensorwise"); leave it out, or change [model]'
        )


def held(scenario: Scenario, speed: Speed = AS_IS) -> ScenarioParts:
    """Machine, model and memory, on GPUs that are so much faster: a schedule may be found by the times of its kernels.

    Raises a :class:`ClusterSimError` naming the field.
    """
    from clustersim.scenario.run.timed import informed  # which plays what was measured

    scenario = informed(scenario)
    topology, mesh = placed(scenario)
    scenario = with_micro_batches(scenario, mesh)
    with scenario.at("$.strategy.float8_all_gather"):
        _reads_what_is_gathered(scenario)
    model = model_of(scenario)
    parallel = scenario.file.parallel
    if parallel is not None and splits(scenario):
        from clustersim.scenario.run.split_step import split_of

        gpu, _ = cost_of(scenario, topology, mesh, model, speed)
        with scenario.at("$.parallel"):
            split = split_of(scenario, parallel, mesh, model, gpu)
        return ScenarioParts(scenario, topology, mesh, model, split)
    with scenario.at("$.strategy"):
        return ScenarioParts(scenario, topology, mesh, model, whole_use=(memory_of(scenario, model, topology, mesh),))
