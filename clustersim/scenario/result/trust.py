"""How far a predicted step is to be trusted: how far published steps of its kind were from their predictions."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from clustersim.core import ranges
from clustersim.core.device import Device, unseen_width
from clustersim.model.seconds.unstated import half_width
from clustersim.scenario.file.schema import WHOLE_STEP

if TYPE_CHECKING:
    from clustersim.core.model import Model
    from clustersim.scenario import Scenario
    from clustersim.scenario.run.running import Prepared

LEAST_LEFT = 0.5
"""Share of a range that measured steps leave at least: what other settings add (network, bubbles) was not in them."""

THIN = 2e-3
"""Seconds at a GPU's peak of a layer's forward and backward of one micro-batch, below which its host paces the step:
stacks that nobody compiles take 4 to 18 ms to call a layer, however little there is to compute. How fast hosts are
varies from cluster to cluster as kernels do not, so that such steps have ranges of their own."""
OFFLOAD = "offload"
"""The kind of steps that keep states on the host: their few published ones were chosen before any was predicted."""
THIN_KINDS = {"split": "thin split", "experts": "thin experts"}


class Trust(msgspec.Struct, frozen=True):
    """The range around a step time: ``p50`` and ``p90`` (relative), the ``rows`` and ``publishers`` they are from, and
    ``as_of``, the day of the validation; ``assumed`` : the half-width (nine in ten) of what the GPU's own file leaves
    open, which is in both; ``narrowed`` : the share of the range that measured steps left; ``unseen`` : the GPU, where
    none of the steps ran on its generation, which both are wider for, by ``unseen_width``; ``aged`` : the same for the
    libraries of an old generation; ``kind`` : which published steps it is like (:func:`step_kind`)."""

    p50: float
    p90: float
    rows: int
    publishers: int
    as_of: str
    assumed: float = 0.0
    narrowed: float = 1.0
    unseen: str = ""
    kind: str = ""
    unseen_width: float = 0.0
    aged: float = 0.0

    def __str__(self) -> str:
        if self.narrowed < 1:
            return (
                f"half within {self.p50:.0%}, nine in ten within {self.p90:.0%}: the range of steps of this kind, by "
                f"{self.rows:,} published ones, of which measured ones leave {self.narrowed:.0%}"
            )
        publishers = f"{self.publishers} publishers" if self.publishers > 1 else "one publisher"
        unseen_rows, unseen_publishers = ranges.unseen_steps()
        wider = (
            f", and as much wider as {unseen_rows} that nothing was fitted to ({unseen_publishers} publishers) were "
            "further off"
        )
        more = f", and wider by the {self.unseen_width:.0%} of kernels that none of them ran: a {self.unseen}'s"
        assumed = f"; with {self.assumed:.0%} for what is assumed of the GPU"
        more = more if self.unseen else ""
        if self.aged:
            more += f", and wider by {self.aged:.0%} for libraries as old as the GPU, which steps on such were run with"
        return (
            f"+-{self.p50:.0%}: half of steps like this are within it, and one in ten is off by more than "
            f"{self.p90:.0%}, where host, network or software are not as described; by {self.rows:,} published ones of "
            f"this kind ({publishers}){'' if self.kind == OFFLOAD else wider}{more}. Numbers of "
            "your own machine ([measured], clustersim calibrate) narrow it" + (assumed if self.assumed else "")
        )


def trust(prepared: Prepared) -> Trust:
    """How far steps of this kind were from their predictions."""
    fit = prepared.scenario.fit
    scenario = prepared.scenario
    kind = kind_in(scenario, prepared.model, prepared.peak_flops, split=prepared.split is not None)
    left = 1.0 if fit is None else max(fit.narrowed, LEAST_LEFT)
    return trust_in(kind, prepared.device, scenario.file.model.dtype, left)


def kind_in(scenario: Scenario, model: Model, peak: float, *, split: bool) -> str:
    """The :func:`step_kind` of a scenario's steps on GPUs of this dense ``peak`` [FLOP/s]."""
    work = math.inf
    parallel = scenario.file.parallel
    if split and parallel is not None:
        graphs = scenario.file.run.cuda_graph
        flops = scenario.config.micro_batch_size * block_flops(model)
        work = called_work(flops, parallel.tp * parallel.cp, peak, graphs)
    return step_kind(scenario.strategy.name, model, split=split, work=work, offloads=scenario.config.offloads)


def block_flops(model: Model) -> float:
    """FLOPs of one sample in forward and backward of a block, the mean of all; infinite of a model without blocks."""
    blocks = [layer for layer in model.layers if layer.kind == "block"]
    flops = sum(kernel.model_flops for layer in blocks for kernel in layer.kernels)
    return flops / len(blocks) if blocks else math.inf


def called_work(flops: float, ranks: int, peak: float, cuda_graph: Collection[str]) -> float:
    """Seconds at the ``peak`` [FLOP/s] of a block's pass of ``flops`` that so many ranks share and the host calls;
    infinite in a graph of the whole step, which it does not."""
    return math.inf if WHOLE_STEP in cuda_graph else flops / (ranks * peak)


def step_kind(strategy: str, model: Model, *, split: bool, work: float = math.inf, offloads: bool = False) -> str:
    """Which published steps a step is like: those of its ``strategy``, unless adapters, experts, a ``split`` or what
    it ``offloads`` tell more.

    A split tells no more of DeepSpeed's ZeRO: published split models have replicas as DDP's and FSDP's, with a
    distributed optimizer or without, but for five steps beside ZeRO-3, which took a sixth longer than predicted.

    work : seconds [s] at the GPU's peak of a block's pass, where a host calls the blocks of a split model; steps below
    :data:`THIN` are told apart.
    """
    if model.partly_frozen:
        return "adapters"
    if offloads:
        return OFFLOAD
    if strategy == "zero":
        return strategy
    experts = any(tensor.cut.startswith("expert") for layer in model.layers for tensor in layer.tensors)
    kind = "experts" if experts else "split" if split else strategy
    return THIN_KINDS.get(kind, kind) if work < THIN else kind


def trust_in(kind: str, gpu: Device, dtype: str, left: float = 1.0) -> Trust:
    """How far published steps of a :func:`step_kind` were from their predictions, on this GPU; ``left`` : the share of
    the range that measured steps left."""
    is_counted = any(item.field == "generation" for item in gpu.assumed)  # and is in what is assumed
    arch = "" if is_counted else gpu.arch
    around = ranges.of_step(kind, arch=arch, dtype=dtype)
    assumed = half_width(gpu, dtype)
    half = math.hypot(around.p50, ranges.HALF_OF_NINE * assumed)
    nearly_all = math.hypot(around.p90, assumed)
    unseen = "" if ranges.has_steps(arch) else f"{gpu.name} ({arch})"
    return Trust(
        left * half,
        left * nearly_all,
        around.rows,
        around.groups,
        ranges.as_of(),
        assumed,
        left,
        unseen,
        kind,
        unseen_width(dtype) if unseen else 0.0,
        ranges.aged_width(arch),
    )
