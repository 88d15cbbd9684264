"""Capture, fit, validate."""
