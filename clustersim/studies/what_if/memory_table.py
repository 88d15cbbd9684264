"""Who keeps what in memory: one scenario part by part and stage by stage, or every strategy beside it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import msgspec

from clustersim.core.device import Device
from clustersim.core.errors import ClusterSimError
from clustersim.core.host_memory import HostMemory
from clustersim.core.memory_use import MemoryUse, Verdict
from clustersim.scenario import Scenario, load
from clustersim.scenario.file.reading import Changes
from clustersim.scenario.run.held import ScenarioParts, held
from clustersim.studies.what_if.comparison import OWN, bytes_a_parameter, forms, scenario_of, told

MOST = 1 << 20
"""Micro-batches beyond this are not looked for."""


class FullestGpu(msgspec.Struct, frozen=True):
    """A GPU at its fullest moment, ``peak``: parts [bytes], the largest first, and their sum with the driver's
    context; what is said of it, and how likely it runs out of memory (of GPU or host)."""

    peak: str
    at_peak: dict[str, float]
    total_bytes: float
    fits: bool
    verdict: str
    runs_out: float


class MemoryRow(msgspec.Struct, frozen=True):
    """What one GPU keeps under a strategy; of a split model, a GPU of the stage that holds most.

    Parameters
    ----------
    strategy, variant : as in :class:`~clustersim.studies.what_if.comparison.ComparisonRow`. device, device_bytes : the
    GPU. largest : each part's own maximum [bytes]. peak, at_peak, total_bytes, fits : as in :class:`FullestGpu`.
    allocated_bytes : by the framework; reserved_bytes (by its allocator), shown_bytes (by ``smi``) and needed_bytes
        (that a step cannot do without) roughly, with the least and the most. smi : nvidia-smi, or AMD's amd-smi.
    verdict : one of fits, may run out and does not fit; ``fits`` is true of the first. runs_out : how likely it runs
        out.
    model_states_bytes : parameters, gradients and optimizer. bytes_per_parameter : of these, unsplit.
    saving : one GPU's model states over these.
    largest_micro_batch : that fits, 0 if not even one sample does. largest_that_may_fit : whose step may run out of
        memory, and may not; 0 if not even one sample's may.
    stage : which holds most, None of a model that is not split. stages : each of them.
    host : what a node keeps in its host's memory for its ranks, and what that has. host_verdict : as ``verdict``, or
        unknown; empty where nothing is on the host.
    parameters, trained_parameters : of the model, and of these, those that have gradients and states.
    """

    strategy: str
    variant: str
    device: str
    device_bytes: float
    largest: dict[str, float]
    peak: str
    at_peak: dict[str, float]
    total_bytes: float
    allocated_bytes: float
    reserved_bytes: float
    reserved_range_bytes: tuple[float, float]
    shown_bytes: float
    shown_range_bytes: tuple[float, float]
    needed_bytes: float
    needed_range_bytes: tuple[float, float]
    model_states_bytes: float
    bytes_per_parameter: float
    saving: float | None
    fits: bool
    verdict: str
    runs_out: float
    largest_micro_batch: int
    largest_that_may_fit: int
    stage: int | None
    stages: list[FullestGpu]
    parameters: int
    trained_parameters: int
    host: HostMemory = HostMemory()
    host_verdict: str = ""
    reason: str = ""
    smi: str = "nvidia-smi"


class RefusedStrategy(msgspec.Struct, frozen=True):
    """A strategy that cannot run, and why; its figures are None."""

    strategy: str
    variant: str
    reason: str
    peak: None = None
    allocated_bytes: None = None
    reserved_bytes: None = None
    shown_bytes: None = None
    total_bytes: None = None
    model_states_bytes: None = None
    bytes_per_parameter: None = None
    saving: None = None
    fits: None = None
    verdict: None = None
    largest_micro_batch: None = None


def table(
    own: Scenario | str, changes: Changes | None = None, *, every: bool = False
) -> list[MemoryRow | RefusedStrategy]:
    """The scenario as it is written, and with ``every`` each other strategy, or way to split it.

    ``own`` : the scenario, or with ``changes`` what :func:`clustersim.scenario.load` takes. Raises
    :class:`ScenarioError` for a scenario that cannot be read, or held.
    """
    if isinstance(own, str):
        own = load(own, changes)
    rows: list[MemoryRow | RefusedStrategy] = [_row(held(own), own.strategy.name, OWN)]
    for form in forms(own, on_the_host=True) if every else ():
        if form.own:
            continue
        try:
            rows.append(_row(held(scenario_of(own, form)), form.kind, form.variant))
        except ClusterSimError as error:
            rows.append(RefusedStrategy(form.kind, form.variant, told(str(error))))
    return rows


def _row(parts: ScenarioParts, kind: str, variant: str) -> MemoryRow:
    use = parts.use
    card = parts.card
    host = parts.host
    verdict = use.fits(card, host)
    split = parts.split
    return MemoryRow(
        strategy=kind,
        variant=variant,
        device=card.name,
        device_bytes=card.memory_bytes,
        smi=card.smi,
        largest=use.parts(),
        allocated_bytes=use.allocated,
        reserved_bytes=verdict.reserved[1],
        reserved_range_bytes=verdict.reserved[::2],
        shown_bytes=verdict.shown[1],
        shown_range_bytes=verdict.shown[::2],
        needed_bytes=use.needed,
        needed_range_bytes=use.needed_range,
        model_states_bytes=use.model_states,
        bytes_per_parameter=bytes_a_parameter(parts),
        saving=parts.whole().model_states / use.model_states if use.model_states else None,
        largest_micro_batch=largest_micro_batch(parts),
        largest_that_may_fit=largest_micro_batch(parts, lambda verdict: verdict.possible),
        stage=None if split is None else split.worst,
        stages=[] if split is None else [_fullest(stage_use, card, host) for stage_use in split.memory],
        parameters=parts.model.parameters,
        trained_parameters=parts.model.trained,
        host=host,
        host_verdict=host.state,
        **msgspec.structs.asdict(_fullest(use, card, host)),
    )


def _fullest(use: MemoryUse, card: Device, host: HostMemory) -> FullestGpu:
    verdict = use.fits(card, host)
    return FullestGpu(use.peak, use.at_peak(), use.total, verdict.ok, verdict.state, verdict.runs_out)


def largest_micro_batch(parts: ScenarioParts, rule: Callable[[Verdict], bool] = lambda verdict: verdict.ok) -> int:
    """The largest ``micro_batch_size`` whose step fits, everything else as written; 0 if none does.

    rule : of a verdict whether it counts as fitting; that it says so, by default.
    """

    def fits(size: int) -> bool:
        """Whether the rule holds at this size."""
        return rule(parts.verdict_of(parts.resized(size)))

    if not fits(1):
        return 0
    high = 2
    while high < MOST and fits(high):
        high *= 2
    return bisect_left(range(high), True, high // 2 + 1, key=lambda size: not fits(size)) - 1
