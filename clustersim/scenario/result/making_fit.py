"""What of a recipe would make a step fit that does not, without another run: the memory of a change is laid out anew
where its field alone says it, and bounded by the parts of memory where more would change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clustersim.core.errors import ClusterSimError
from clustersim.core.tomls import plainly
from clustersim.core.units import format_bytes
from clustersim.scenario.run.held import held as held_by

if TYPE_CHECKING:
    from clustersim.scenario.result import Result

OF_SAMPLES = ("activations", "logits")
"""Parts that grow with the samples of a micro-batch."""
OF_OPTIMIZER = ("master_weights", "optimizer_states")
"""Parts that a sharded optimizer (ZeRO-1, Megatron's distributed optimizer) cuts over data-parallel ranks."""
OF_STATES = ("parameters", "gradients", *OF_OPTIMIZER)
"""Parts that FSDP cuts over data-parallel ranks, and a further split over the stages or ranks of it."""


@dataclass(frozen=True)
class Relief:
    """A change of the recipe, in words of its fields, and the bytes of the fullest GPU that it frees ``at_most``; or
    exactly, where those were laid out (``exact``)."""

    what: str
    at_most: float
    exact: bool = False

    def __str__(self) -> str:
        return f"{self.what} frees {'' if self.exact else 'up to '}{format_bytes(self.at_most)}"


def making_fit(result: Result) -> Iterator[str]:
    """What would make room, the most first, and whether one of them cannot be enough; nothing of a step that may fit.

    Changes are bounded one by one: the same bytes may be freed by two of them.
    """
    missing = -result.verdict.spare
    if missing <= 0:
        return
    reliefs = sorted((relief for relief in _reliefs(result) if relief.at_most > 0), key=lambda relief: -relief.at_most)
    if not reliefs:
        return
    listed = ", ".join(map(str, reliefs))
    enough = "" if reliefs[0].at_most >= missing else "; none of them is enough alone"
    advice = "(`clustersim memory --set` says what each leaves)"
    yield f"to make room for {format_bytes(missing)}: {listed}{enough} {advice}"


def _reliefs(result: Result) -> Iterator[Relief]:
    """Every change that applies to this recipe."""
    at_peak = result.memory.at_peak()
    file = result.scenario.file
    config = result.scenario.config
    samples = config.micro_batch_size
    if samples > 1:
        fewer = samples // 2
        freed = _sum(at_peak, OF_SAMPLES) * (1.0 - fewer / samples)
        yield _laid_out(result, "strategy.micro_batch_size", fewer, freed)
    recomputes = file.model.activation_checkpointing != "none"
    if file.parallel is not None:
        recomputes = recomputes or file.parallel.recompute_granularity is not None
    if not recomputes:
        yield _laid_out(result, "model.activation_checkpointing", "full", at_peak.get("activations", 0.0))
    yield from _of_split(result, at_peak)


def _of_split(result: Result, at_peak: Mapping[str, float]) -> Iterator[Relief]:
    """What sharding over data-parallel ranks, sequence parallelism and a further split free."""
    parallel = result.scenario.file.parallel
    kind = result.scenario.strategy.name
    ranks = result.prepared.mesh.size("dp")
    if parallel is not None and parallel.tp > 1 and not parallel.sequence_parallel:
        freed = at_peak.get("activations", 0.0) * (1.0 - 1.0 / parallel.tp)
        yield _laid_out(result, "parallel.sequence_parallel", True, freed)
    if kind == "ddp" and ranks > 1:
        if parallel is None:
            yield Relief(f"strategy.kind = 'fsdp' over {ranks} ranks", _sum(at_peak, OF_STATES) * (1.0 - 1.0 / ranks))
        elif not parallel.use_distributed_optimizer:
            freed = _sum(at_peak, OF_OPTIMIZER) * (1.0 - 1.0 / ranks)
            yield _laid_out(result, "parallel.use_distributed_optimizer", True, freed, f" over {ranks} ranks")
    if parallel is not None:
        gpus = "" if ranks % 2 == 0 else " on twice the GPUs"
        yield Relief(f"parallel.pp = {2 * parallel.pp}{gpus}", 0.5 * _sum(at_peak, OF_STATES))


def _laid_out(result: Result, field: str, value: str | float, bound: float, suffix: str = "") -> Relief:
    """A change of one field with the bytes that it frees; at most ``bound`` where the recipe refuses it so."""
    change = f"{field} = {repr(value) if isinstance(value, str) else plainly(value)}{suffix}"
    try:
        after = held_by(result.scenario.changed({field: value})).use.total
    except ClusterSimError:
        return Relief(change, bound)
    return Relief(change, result.memory.total - after, exact=True)


def _sum(at_peak: Mapping[str, float], parts: tuple[str, ...]) -> float:
    """Bytes of some parts together."""
    return sum(at_peak.get(part, 0.0) for part in parts)
