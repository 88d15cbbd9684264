"""The step of a whole model with many passes, from a run of few: every pass between the first and the last is alike.

Replicas of a whole model do the same at the same time, so that the ranks of one node stand for all
(:mod:`clustersim.training.builder.representative`). Of a step's passes four are played: where everything that the third
one does, on every stream, ends as long after the same of the second, the run repeats itself from there on, and each
further pass adds as much again. That is looked at, op by op; where it is not so, everything is played. Of a pass
through many equal layers few are played, as far as that tells the same
(:mod:`clustersim.studies.what_if.folded_layers`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from clustersim.cluster.files.leaves import spread
from clustersim.core.arrays import Ints
from clustersim.core.errors import ClusterSimError, ProgramError
from clustersim.core.program import Collective, Program
from clustersim.core.timeline import Timeline
from clustersim.explain.metrics import steady_window
from clustersim.scenario import Scenario
from clustersim.scenario.run.held import ScenarioParts
from clustersim.scenario.run.played import play
from clustersim.scenario.run.running import Prepared, prepare_held
from clustersim.studies.what_if.alike_ranks import AlikeRanks
from clustersim.studies.what_if.amounts import StepAmounts, may_be_busiest
from clustersim.studies.what_if.folded_layers import KeptRepeats, added_times, with_few_layers
from clustersim.training.builder.representative import Representative, representative

PLAYED = 4
"""Passes of a step: the first, two that are compared, and the last."""
STEADY = 2
"""Steps until one is like the one before, of strategies that do in their first what they do in each."""
EVEN = 1e-9
"""How far intervals between two passes may differ, relatively: they are sums of thousands of times."""
KINDS = frozenset({"fsdp", "zero"})
"""Strategies of which each step is like the first."""


@dataclass(frozen=True)
class FoldedPasses:
    """A whole model's step of so many ``passes``, on so many ``ranks`` that were played; and what ``each`` pass more
    adds, None where passes do not repeat, or are too few to tell. ``peak_flops`` : as of
    :class:`clustersim.scenario.run.running.Prepared` [FLOP/s]."""

    step: StepAmounts
    each: StepAmounts | None
    ranks: int
    passes: int
    peak_flops: float

    def of(self, passes: int) -> StepAmounts:
        """Of a step with so many passes. Raises :class:`PassesDiffer` where nothing tells."""
        if passes == self.passes:
            return self.step
        if self.each is None or passes < self.passes:
            raise PassesDiffer(f"a step of {passes} passes is not told by one of {self.passes}")
        return self.step.with_more(passes - self.passes, self.each)


def can_fold(scenario: Scenario) -> bool:
    """Whether a scenario's ranks, steps and passes may be alike: nothing of it is random, slow, changed or to fail."""
    file = scenario.file
    cluster = file.cluster
    run = file.run
    differ = cluster.slow or cluster.changes or cluster.measured or file.incident or run.tells_nccl or run.variation
    plain = run.fidelity == "flow" and not run.op_by_op and not run.jitter
    return scenario.strategy.name in KINDS and file.parallel is None and plain and not differ


class PassesDiffer(ClusterSimError):
    """A few passes of one node do not tell a step: it has to be played."""


def folded_passes(parts: ScenarioParts, *, all_layers: bool = False) -> FoldedPasses:
    """The step of a scenario that :func:`can_fold`, with as many passes, or :data:`PLAYED`.

    ``all_layers`` : play every layer of a pass, though few of them tell the same to rounding.

    Raises :class:`PassesDiffer` where its ranks are not alike, and else as a run does.
    """
    scenario = parts.scenario
    if len({kind.device for kind in parts.topology.node_types}) > 1:
        raise PassesDiffer(f"{scenario.path}: its nodes have GPUs of several kinds")
    played = min(scenario.config.gradient_accumulation_steps, PLAYED)
    config = msgspec.structs.replace(scenario.config, gradient_accumulation_steps=played)
    few = replace(parts, scenario=replace(scenario, config=config))
    prepared = prepare_held(few, steps=min(scenario.steps, STEADY))
    program = prepared.program
    short, repeats = (program, ()) if all_layers else with_few_layers(program)
    ranks = (_played(prepared, short, repeats) if repeats else None) or _played(prepared, program, ())
    if ranks is None or not ranks.alike:
        raise PassesDiffer(f"{scenario.path}: its ranks differ, so that none stands for another")
    window = steady_window(ranks.timeline)
    between = _between_passes(ranks.timeline, int(window.steps[-1])) if played == PLAYED else None
    step, each = _amounts(ranks, (window.begin, window.end), between)
    return FoldedPasses(step, each, ranks.workers, played, prepared.peak_flops)


def _played(prepared: Prepared, program: Program, repeats: Sequence[KeptRepeats]) -> AlikeRanks | None:
    """Ranks that have run a Program; None where some of its ``repeats`` do not stand for those that are left out."""
    part = _standing_for_all(prepared, program)
    timeline = play(prepared.scenario, part.program, prepared.topology, part.mesh, whole=part.whole)
    added = added_times(timeline, repeats)
    return None if added is None else AlikeRanks(timeline, part.mesh.workers, added)


def _amounts(
    ranks: AlikeRanks, step: tuple[float, float], each: tuple[float, float] | None
) -> tuple[StepAmounts, StepAmounts | None]:
    """Of a step and of a pass, by when they begin and end [s]; of links those of which one is the busiest."""
    carried = ranks.line_seconds(*step)
    more = np.zeros_like(carried) if each is None else ranks.line_seconds(*each)
    busiest = may_be_busiest(carried, more)
    names = [] if ranks.timeline.links is None else [ranks.timeline.links.link_names[i] for i in busiest]
    of_step, of_pass = (dict(zip(names, column[busiest].tolist(), strict=True)) for column in (carried, more))
    a_step = msgspec.structs.replace(ranks.amounts(*step), links=of_step)
    return a_step, None if each is None else msgspec.structs.replace(ranks.amounts(*each), links=of_pass)


def _standing_for_all(parts: ScenarioParts, program: Program) -> Representative:
    """The ranks of the first node, where all nodes' do the same: each is joined to the others alike, and no collective
    has a rank of its own to go to. Else all ranks."""
    everybody: Ints = np.arange(program.world_size, dtype=np.int64)
    rooted = any(isinstance(op, Collective) and op.root for role in program.roles for op in role.ops)
    if not rooted and len(program.roles) == 1 and len(spread(parts.topology)) < 2:
        try:
            return representative(program, parts.mesh, everybody[: parts.mesh.nproc_per_node])
        except ProgramError:
            pass  # groups are not alike in how many ranks of a node they have
    return Representative(program, parts.mesh, {})


def _between_passes(timeline: Timeline, step: int) -> tuple[float, float] | None:
    """The end of the second pass of a step of :data:`PLAYED`, and of the third, where each op of the one ends as long
    after the op of the other in its place; None where some do not."""
    own = [i for i, op in enumerate(timeline.ops) if op.step == step]
    kinds = [(timeline.ops[i].kind, timeline.ops[i].stream) for i in own]
    ends = timeline.per_op()["end"][own]
    times = Counter(timeline.ops[i].name for i in own)
    name = next((name for name, count in times.items() if count == PLAYED), None)
    first, second, third, last = (k for k, i in enumerate(own) if timeline.ops[i].name == name) if name else [0] * 4
    size = last - third
    if not size or kinds[second:third] != kinds[third:last]:
        return None
    later = ends[third:last] - ends[second:third]
    if np.ptp(later) > EVEN * float(later.max()):
        return None
    # What is in no pass: transfers may pile up in it.
    begin, middle, end = (float(ends[a:b].max()) for a, b in ((first, second), (second, third), (third, last)))
    others = np.concatenate([ends[:first], ends[last + size :]])
    if np.any((others > begin) & (others <= end)):
        return None
    return middle, end
