"""Strategies: (model, costs, mesh, knobs) -> Program."""
