"""A page on localhost whose form fields are a scenario's knobs: each change shows what it does, before beside now.

:mod:`~clustersim.app.explore.fields` makes the form from the scenario's JSON Schema,
:mod:`~clustersim.app.explore.runs` plays a change and draws what differs, :mod:`~clustersim.app.explore.worker` does so
in a process that can be killed, and :mod:`~clustersim.app.explore.server` answers the browser, and nobody else.
"""

from __future__ import annotations
