"""Ranks that all do the same at the same time: what one of them spends is what each does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.op_infos import of_each
from clustersim.core.program import PHASES
from clustersim.core.timeline import Timeline
from clustersim.explain.occupancy import covered, holds_kernels, is_kernel
from clustersim.studies.what_if.amounts import StepAmounts
from clustersim.studies.what_if.folded_layers import AddedTime

EVEN = 1e-9
"""How far an op's times on two ranks may differ, relatively."""


@dataclass(frozen=True, eq=False)
class AlikeRanks:
    """The ranks of a Timeline, so many ``workers``, with what is ``added`` by layers that were left out."""

    timeline: Timeline
    workers: int
    added: Sequence[AddedTime] = ()

    @cached_property
    def alike(self) -> bool:
        """Whether every rank does every op from the same time to the same time."""
        ops = self.timeline.per_op()
        took = self.workers * (ops["end"] - ops["start"])
        even = np.abs(took - ops["seconds"]) <= EVEN * (took + ops["end"])
        return bool((ops["ranks"] == self.workers).all() and even.all())

    @cached_property
    def _start(self) -> Floats:
        return self.timeline.per_op()["start"]

    @cached_property
    def _ready(self) -> Floats:
        """From when on an op holds its stream: a transfer from when it waits for others."""
        ops = self.timeline.per_op()
        return np.where(self._talks, ops["ready"], ops["start"])

    @cached_property
    def _end(self) -> Floats:
        return self.timeline.per_op()["end"]

    @cached_property
    def _kernels(self) -> Bools:
        return is_kernel(self.timeline)

    @cached_property
    def _loads(self) -> Bools:
        return holds_kernels(self.timeline)

    @cached_property
    def _talks(self) -> Bools:
        return of_each(self.timeline.ops, lambda op: op.kind != "compute", bool)

    @cached_property
    def _phase(self) -> Ints:
        """(ops,) phase of a kernel, by number; one more for what is none."""
        number = {phase: i for i, phase in enumerate(PHASES)}
        phases = of_each(self.timeline.ops, lambda op: number.get(op.phase, number["other"]), np.int64)
        return np.where(self._kernels & ~self._loads, phases, len(PHASES))

    @cached_property
    def _flops(self) -> Floats:
        """(ops,) FLOPs in a second of it."""
        flops = of_each(self.timeline.ops, lambda op: op.flops, np.float64)
        took = self._end - self._start
        rate: Floats = np.divide(flops, took, out=np.zeros(len(flops)), where=took > 0)
        return rate

    def amounts(self, begin: float, end: float) -> StepAmounts:
        """Between two times of what was played [s], with what is added there."""
        total = self._played(begin, end)
        for layers in self.added:
            if begin <= layers.begin < end:
                total = total.with_more(layers.left_out, self._played(layers.begin, layers.end))
        return total

    def _played(self, begin: float, end: float) -> StepAmounts:
        start = np.clip(self._start, begin, end)
        ready = np.clip(self._ready, begin, end)
        stop = np.clip(self._end, begin, end)
        inside = stop > ready
        kernels = self._kernels
        talks = self._talks

        def union(since: Floats, chosen: Bools) -> float:
            """Seconds in which any of some ops is open."""
            chosen = chosen & inside
            return float(covered(since[chosen][None], stop[chosen][None])[0])

        computing = union(start, kernels)
        on_stream = kernels | talks
        host = 0.0 if on_stream.all() else union(ready, np.ones(len(inside), dtype=bool)) - union(ready, on_stream)
        moving = max(union(start, on_stream) - computing, 0.0)
        seconds = stop - start
        phases = np.bincount(self._phase, seconds, len(PHASES) + 1)[:-1]
        return StepAmounts(
            end - begin,
            computing - union(start, self._loads),
            max(end - begin - computing - max(host, 0.0), moving),
            float(seconds @ self._flops),
            {name: float(spent) for name, spent in zip(PHASES, phases, strict=True) if spent > 0},
        )

    def line_seconds(self, begin: float, end: float) -> Floats:
        """(links,) between two times [s], what is added there with it: what each link carries, by the seconds that
        takes at its line rate."""
        total = self._carried(begin, end)
        for layers in self.added:
            if begin <= layers.begin < end:
                total = total + layers.left_out * self._carried(layers.begin, layers.end)
        return total

    def _carried(self, begin: float, end: float) -> Floats:
        use = self.timeline.links
        if use is None or not len(use.segment_start):
            return np.zeros(0)
        inside = (use.segment_start < end) & (use.segment_end > begin)
        within = replace(
            use,
            segment_transfer=use.segment_transfer[inside],
            segment_start=np.maximum(use.segment_start[inside], begin),
            segment_end=np.minimum(use.segment_end[inside], end),
            segment_rate=use.segment_rate[inside],
        )
        carried: Floats = within.bytes_per_link() / use.link_bandwidth
        return carried
