"""The engine: Program x Topology -> Timeline.

Read :mod:`~clustersim.engine.executor` first: it is the whole idea. Then :mod:`~clustersim.engine.tasks` (ops in play),
:mod:`~clustersim.engine.meetings` (who meets whom), :mod:`~clustersim.engine.planning` (what a transfer is),
:mod:`~clustersim.engine.players` and :mod:`~clustersim.engine.network` (how long it takes),
:mod:`~clustersim.engine.fairshare` (who gets how much of a link), :mod:`~clustersim.engine.queues` (first come, first
served), and :mod:`~clustersim.engine.replay`, the exact and slow way to play a collective that the quick one is tested
against.
"""

from clustersim.engine.run import simulate

__all__ = ["simulate"]
