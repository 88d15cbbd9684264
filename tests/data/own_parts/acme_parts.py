"""Parts of one's own: a strategy, a schedule, an algorithm, an optimizer, a model family and two logs."""

import math

import numpy as np

from clustersim.collectives.rounds import Round, RoundSteps, rounds_algorithm
from clustersim.core.errors import TraceError
from clustersim.core.optimizers import OptimizerRow
from clustersim.core.program import DTYPE_BYTES
from clustersim.files.traces import Format, Sample, Samples
from clustersim.files.traces.heads import Likeness
from clustersim.files.traces.joining import join
from clustersim.files.traces.profiled import ProfiledWork, RankCollective, RankTrace
from clustersim.model.families import FamilyTable
from clustersim.training.schedules import Action, Schedule
from clustersim.training.strategies import AtLeastOne, Strategy, StrategyConfig
from clustersim.training.strategies.primitives import collective, wait
from clustersim.training.strategies.walk import WholeModelHooks, walked


class LocalConfig(StrategyConfig, frozen=True, tag_field="kind", tag="local_sgd"):
    """Knobs of local SGD.

    Parameters
    ----------
    every : steps of its own that a rank takes between two averages of the parameters.
    """

    every: AtLeastOne = 4


class LocalSGD(WholeModelHooks[LocalConfig]):
    """Every rank trains by itself; behind each ``every``-th update parameters are averaged, beside nothing."""

    def finish(self) -> None:
        super().finish()
        if (self.ops.step + 1) % self.config.every == 0:
            nbytes = float(self.model.parameters * DTYPE_BYTES[self.config.param_dtype])
            mean = collective(self.ops, "all_reduce", "parameters", nbytes, self.mesh.world_group(), self.ops.here)
            wait(self.ops, "average", (mean,))

    def notes(self) -> tuple[str, ...]:
        return (f"local SGD: parameters are averaged every {self.config.every} steps",)


LOCAL_SGD = Strategy("local_sgd", LocalConfig, walked(LocalSGD), period=lambda config: config.every)


def fill_drain(p, chunks, m):
    """Every forward, then every backward, the last micro-batch first."""
    forward = tuple((Action("F", k),) for k in range(m))
    return (forward + tuple((Action("B", k),) for k in reversed(range(m))),) * p


FILL_DRAIN = Schedule("acme_fill_drain", fill_drain, aliases=("AcmeLIFO",), peak=lambda rank, p, chunks, m: m)


def star(kind, n, root=0):
    """Everybody sends to member 0, which adds and sends back."""
    others = np.arange(1, n)
    hub = np.zeros(n - 1, dtype=np.int64)
    return RoundSteps(
        (Round(others, hub, 1.0, lambda _: [0], True), Round(hub, others, 1.0, lambda _: [0])), np.ones(1)
    )


STAR = rounds_algorithm("acme_star", frozenset({"all_reduce"}), star)

# A step reads parameter, gradient and momentum, and writes parameter and momentum (Bernstein et al., arXiv 1802.04434).
SIGNUM = OptimizerRow(name="signum", passes=(5, 12), ops=5, states=1)

FAMILY = FamilyTable("acme_llama", {"like": "llama", "note": "Acme's blocks are Llama's"})


def sniff(head):
    return Likeness.SHAPED if head.text.startswith("# acme timings") else Likeness.NONE


def read(paths):
    rows = []
    for path in paths:
        for number, line in enumerate(path.read_text(errors="replace").splitlines()[1:], start=2):
            try:
                kind, nbytes, microseconds, ranks = line.split()
                rows.append(Sample(kind, float(nbytes), float(microseconds) * 1e-6, int(ranks)))
            except ValueError:
                raise TraceError(f"{path}:{number}: {line!r} is not kind, bytes, microseconds and ranks") from None
    if not rows:
        raise TraceError(f"{paths[0]}: no timings")
    return Samples(tuple(rows), str(paths[0]))


LOG = Format("acme_log", "log of Acme's benchmark", "Acme's benchmark 1.0", sniff=sniff, read=read)


def sniff_events(head):
    return Likeness.SHAPED if head.text.startswith("# acme events") else Likeness.NONE


def read_events(paths):
    """A run: what each rank's profile saw, put together by ``join``, which finds the ranks of a collective."""
    ranks = {}
    for path in paths:
        for number, line in enumerate(path.read_text(errors="replace").splitlines()[1:], start=2):
            try:
                rank, of, step, kind, name, nbytes, start, end = line.split()
                trace = ranks.setdefault(int(rank), RankTrace(int(rank), int(of), str(path)))
                start, end, step = float(start) * 1e-6, float(end) * 1e-6, int(step)
                if not 0 <= trace.rank < trace.world or not 0 <= start <= end < math.inf or step < 0:
                    raise ValueError
                if kind == "kernel":
                    trace.work.append(ProfiledWork(name, "compute", start, end, math.nan, step))
                else:
                    group = "world", trace.world, tuple(range(trace.world))
                    trace.seen.append(RankCollective(kind, start, end, float(nbytes), *group, step=step))
            except ValueError:
                raise TraceError(f"{path}:{number}: {line!r} is no event of a rank") from None
    if not ranks:
        raise TraceError(f"{paths[0]}: no events")
    return join(list(ranks.values()), str(paths[0]))


EVENTS = Format("acme_events", "events of Acme's profiler", "Acme 1.0", sniff=sniff_events, read=read_events)
