"""Transfers as fluid flows on links that they share, in simulated time.

In the order to read it: :mod:`~clustersim.engine.flows.loads`, which links a byte of payload crosses, reduced to the
*slots* where somebody can be held back; :mod:`~clustersim.engine.flows.fairshare`, who gets how much of a slot;
:mod:`~clustersim.engine.flows.classes`, flows that always have one rate as one object;
:mod:`~clustersim.engine.flows.joining`, whom a change of rates may concern; :mod:`~clustersim.engine.flows.clock`, when
things happen; and :mod:`~clustersim.engine.flows.network`, which brings the rates up to date as flows begin and end.
"""
