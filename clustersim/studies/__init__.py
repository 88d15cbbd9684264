"""Questions that take many runs: ``sweep``, ``plan``, ``campaign``, ``sensitivity``, ``what_if`` and ``replay``; and
``diagnosis`` of a job by the files that it left, with the ``exam`` that it is held by."""
