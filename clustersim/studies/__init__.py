"""Questions that take many runs: ``sweep``, ``plan``, ``campaign``, ``sensitivity``, ``what_if`` and ``replay``."""
