"""Timeline -> tables."""
