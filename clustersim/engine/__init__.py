"""The engine: Program x Topology -> Timeline.

How a step is played, in the order to read it:

* :mod:`~clustersim.engine.meetings` (and :mod:`~clustersim.engine.pairs`): who meets whom, as the columns of
  :mod:`~clustersim.engine.sites`. :mod:`~clustersim.engine.planning`: what each transfer is, alone; and
  :mod:`~clustersim.engine.images`: which groups are so alike that one plan serves them all.
* :mod:`~clustersim.engine.order`: what waits for what. :mod:`~clustersim.engine.play`: whole
  :mod:`~clustersim.engine.columns` of times ahead of the clock, and pieces of them where ranks go their own ways;
  :mod:`~clustersim.engine.chains` of kernels at once. :mod:`~clustersim.engine.bills`: what hidden communication costs
  compute. :mod:`~clustersim.engine.agenda`: what waits for its turn in time.
* :mod:`~clustersim.engine.guess`: which transfers share links is guessed, and checked after the play: why the result is
  exact. :mod:`~clustersim.engine.players`: those that do take time on the clock, as flows that share
  (:mod:`clustersim.engine.flows`), or transfer by transfer, the exact and slow way (:mod:`~clustersim.engine.chunk`).
* :mod:`~clustersim.engine.run` ties them together, where :mod:`~clustersim.engine.need` says that there is memory for
  it; :mod:`~clustersim.engine.finished` lets go of what is over, :mod:`~clustersim.engine.rows` makes the Timeline, and
  :mod:`~clustersim.engine.op_facts` says what each of its ops was. Where nothing more can happen
  :mod:`~clustersim.engine.deadlock` says who waits for whom.

A step of hybrid sharding, for example: shards of 256 ranks, each at its own pace, gather a layer's parameters, compute,
and scatter its gradients, while each rank's 64 replicas average what was scattered before. *Forward*, gathers of
different shards cross different links, so they are free: an op is handled once for all 16,384 ranks, a gather's start
is the maximum over its shard, its end a number later, and no time passes. *Backward*, averages cross the links of
gathers and scatters. Neither waits for the other, so these sites are guessed to need the clock (where a guess is too
small, a check finds links that were asked for more than they have, and the program is played again with the sites of
those flows on the clock, too). A scatter's flows begin and end as events, at
max-min rates, and where a shard's has ended, its 256 ranks go on as a piece. A kernel may only begin when it is known
what ended before it, since it pays for what ran beside it: so pieces come in the order of time, several of a kernel at
once where nothing unknown can end before any of them. The check finds nothing, and then the play is the exact
one: free flows had the rate they take alone, clocked flows shared among themselves, no link carried more than it can,
and a run has only one such history (:mod:`~clustersim.engine.guess`).

What holds at every moment (``tests/test_engine_invariants.py`` has a test of each):

1. Nothing unknown happens before the clock's next event and the first piece that waits.
2. A column once made is never written to.
3. A free transfer's end depends on its start alone.
4. Every flow has a holder: a full slot where nobody is faster, or its ceiling.
5. A guess may cost time, never truth: every play ends with a check.
6. All ends of an instant are known before any kernel of it starts.
7. Ids of transfers follow role, op and meeting, whatever was guessed.
"""

from clustersim.engine.run import simulate

__all__ = ["simulate"]
