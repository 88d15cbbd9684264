"""Timeline -> figures, causes, the critical path, and what would help."""
