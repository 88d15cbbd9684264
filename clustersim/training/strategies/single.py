"""One GPU, no communication: the baseline everything else is measured against."""

from __future__ import annotations

from clustersim.core.errors import ProgramError
from clustersim.training.strategies import base
from clustersim.training.strategies.walk import WholeModelHooks, sampled, walked


class SingleConfig(base.StrategyConfig, frozen=True, tag_field="kind", tag="single"):
    """Knobs of plain training on one GPU; see :class:`clustersim.training.strategies.base.StrategyConfig`."""


class SingleHooks(WholeModelHooks[SingleConfig]):
    """Forward, backward and optimizer, in order on one stream."""

    def __post_init__(self) -> None:
        if self.mesh.world_size != 1:
            raise ProgramError(
                f"strategy 'single' uses one GPU, but the mesh has {self.mesh.world_size} ranks; "
                "use 'ddp', or one node and one process (at $.strategy.kind)"
            )

    def notes(self) -> tuple[str, ...]:
        """What there is not."""
        return ("single: one GPU, no communication",)


build = walked(SingleHooks)
STRATEGY = base.Strategy("single", SingleConfig, build, world_size=1, partly=True, sample=sampled(SingleHooks))
