"""What should happen: ``parallel``, ``partition``, ``schedules``, ``strategies``, the ``builder`` of steps, and
memory."""
