"""The search: bounds prune, simulation decides.

Every candidate is looked at by its memory, which is exact, and by bounds on its step. An option whose *bounds* are
already beaten in everything by a simulated one cannot be on the front, so it need not be simulated: the front is the
one an exhaustive search finds. Candidates are simulated in rounds of a fixed size, the most promising first, so that
what is pruned does not depend on how many processes there are.

An option with a split model is first sketched (:mod:`clustersim.studies.what_if.sketch`), or run roughly folded where
parameters are shared out; that is taken to be within :data:`~clustersim.studies.plan.seen.ROUGH` of the whole run, as
it was wherever that was looked at: what is beaten by more is not run again. What is left is run whole, or, where that
has more than :data:`~clustersim.studies.plan.rounds.MOST_PASSES`, roughly folded.

An option with a whole model is told by a few passes of one node, where passes and ranks are alike
(:mod:`clustersim.studies.what_if.folded_passes`), which is the whole run's step to rounding, with all that is told of
it: of all numbers of passes one run tells. An exhaustive search plays it whole.

Of a space of more than :data:`~clustersim.studies.plan.spec.EXACT` options only so many are run as the plan says, and
of each machine and number of nodes the :data:`~clustersim.studies.plan.seen.FINALISTS` best ones twice; what the others
could have given by their bounds is told.

What is worth having is decided with the errors of predictions: every option is as good as it is at the worse end of
what half of published steps lay within. One that would be worth having if its prediction held is *tempting*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from clustersim.core.outputs import Folder
from clustersim.scenario.file.plan_option import FILE
from clustersim.studies.plan.options import PlanOption, SearchResult
from clustersim.studies.plan.robust import at_corners
from clustersim.studies.plan.rounds import Runner
from clustersim.studies.plan.seen import FINALISTS, KnownCandidates
from clustersim.studies.plan.sieve import SIEVED
from clustersim.studies.plan.sites import machines_of
from clustersim.studies.plan.spec import PlanFile
from clustersim.studies.plan.work_left import FIRST_RUNS, LAST_RUNS, LOOKS, WorkLeft
from clustersim.studies.sweep.crews import Executor, crew
from clustersim.studies.sweep.store import Store

FILES = (FILE, "front.png", SIEVED)
"""What a plan leaves beside its rows."""
ROUND = 8
"""Candidates simulated between two looks at what they prune."""


@dataclass(frozen=True)
class SearchOptions:
    """How a plan is searched.

    Parameters
    ----------
    executor, jobs : as for :func:`clustersim.studies.sweep.sweep`. exhaustive : simulate also what bounds rule out; the
        answer is the same. robust : run the rivals of the fastest again at the ends of what is uncertain
        (:mod:`clustersim.studies.plan.robust`).
    """

    executor: Executor | None = None
    jobs: int | None = None
    exhaustive: bool = False
    robust: bool = False


def search(
    plan: PlanFile,
    path: str | Path,
    out: str | Path,
    how: SearchOptions = SearchOptions(),
    *,
    progress: Callable[[int, int], None] | None = None,
    told: Callable[[str], None] | None = None,
) -> SearchResult:
    """Every option of a plan, as far as it had to be looked at.

    Parameters
    ----------
    path : the plan's file. out : folder of ``results.jsonl``; rows that are there are not simulated again.
    progress : called with (work done, all work), by the time it is likely to take
        (:mod:`clustersim.studies.plan.work_left`). told : called with the size of the space, in words,
        before anything is looked at.

    Raises :class:`ClusterSimError` where no option can be read, or the folder cannot be written.
    """
    store = Store(Path(out))
    folder = folder_for(plan, path, out)
    folder.check()
    seen = KnownCandidates(plan, path, *machines_of(plan, path), told=told)
    with closing(crew(how.executor, how.jobs)) as team, store.writing(folder) as writer:
        left = WorkLeft(progress)
        best = _looked_at(seen, store.path, left)

        def took(lines: Sequence[bytes]) -> None:
            """Write rows, and count them."""
            writer.append(lines)
            left.ended(sum(units.pop(0) for _ in lines[: len(units)]))

        units: list[float] = []
        runner = Runner(plan, path, store, took, team)
        for rough in (False,) if how.exhaustive else (True, False):
            waiting = seen.waiting(best, rough=rough)
            work = {number: runner.work(seen.options[number].candidate, rough=rough) for number in waiting}
            left.begin(FIRST_RUNS if rough else LAST_RUNS, sum(work.values()))
            while waiting:
                turn, waiting = _next_round(waiting, seen, how.exhaustive, rough)
                units[:] = [work[option.candidate.number] for option in turn]
                left.running(sum(work[number] for number in waiting), sum(units))
                seen.take(runner.run([option.candidate for option in turn], rough=rough), rough=rough)
                left.round_over()
        searched = seen.done()
        return replace(searched, turned=at_corners(searched, seen, runner)) if how.robust else searched


def _looked_at(seen: KnownCandidates, folder: Path, left: WorkLeft) -> list[int]:
    """Numbers of the options that fit, the most promising first."""
    count = len(seen.options)
    split = any(option.candidate.form.split for option in seen.options)
    left.begin(LOOKS, count)
    left.expect(LAST_RUNS, FINALISTS * len(seen.sieve.machines) if split else 0)

    def looked(looks: int, fit: int) -> None:
        """So many that were looked at fit, and so many of all will."""
        left.expect(FIRST_RUNS, min(count * fit / looks, seen.plan.tried.simulations))
        left.ended(1)

    return seen.open(folder, looked)


def folder_for(plan: PlanFile, path: str | Path, out: str | Path) -> Folder:
    """Where a plan of this file goes."""
    name = plan.title or Path(path).stem
    return Folder(Path(out), "plan", name, FILES, (name, plan.model))


def _next_round(
    waiting: Sequence[int], seen: KnownCandidates, exhaustive: bool, rough: bool
) -> tuple[list[PlanOption], list[int]]:
    """The next candidates to simulate, and numbers of the rest; what is ruled out on the way is noted."""
    turn: list[PlanOption] = []
    for i, number in enumerate(waiting):
        option = seen.options[number]
        if len(turn) == ROUND:
            return turn, list(waiting[i:])
        by = None if exhaustive else seen.beaten_by(option, rough=rough)
        if by is not None:
            seen.rule_out(option, by)
        elif seen.spent(option, rough) and not exhaustive:
            seen.leave(option)
        else:
            seen.hand_out(option, rough=rough)
            turn.append(option)
    return turn, []
