"""The engine: Program x Topology -> Timeline.

How a step is played, in the order to read it:

* :mod:`~clustersim.engine.meetings` (and :mod:`~clustersim.engine.pairs`): who meets whom.
  :mod:`~clustersim.engine.planning` (and :mod:`~clustersim.engine.sends`): what each transfer is, alone.
* :mod:`~clustersim.engine.order`: what waits for what. :mod:`~clustersim.engine.play`: whole columns of times ahead of
  the clock, and pieces of them where ranks go their own ways. :mod:`~clustersim.engine.bills`: what hidden
  communication costs compute. :mod:`~clustersim.engine.queues`: first come, first served.
* :mod:`~clustersim.engine.guess`: which transfers share links is guessed, and checked after the play: why the result is
  exact. :mod:`~clustersim.engine.loads`: links reduced to those that can hold somebody back.
* :mod:`~clustersim.engine.network`, :mod:`~clustersim.engine.shares`, :mod:`~clustersim.engine.fairshare`: where time
  passes, for transfers that do share. :mod:`~clustersim.engine.replay`: the exact and slow way to play a collective.
* :mod:`~clustersim.engine.run` ties them together; :mod:`~clustersim.engine.rows` makes the Timeline.

What holds at every moment:

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
