"""Nouns and helpers: topology, model, program, mesh and timeline; devices and costs; units, errors and files."""
