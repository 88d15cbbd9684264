"""The engine: Program x Topology -> Timeline."""
