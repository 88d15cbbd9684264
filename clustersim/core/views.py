"""Who shows a result: the rooms above say so here, so that a result can be shown and knows no picture and no page.

The package's own views are registered by its door, ``clustersim/__init__.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from clustersim.core.errors import ClusterSimError, nearest

_HOMES: dict[str, str] = {}


def register_view(name: str, home: str) -> None:
    """Say who shows results by this name.

    home : ``"package.module:function"``; it is imported when the view is first asked for.
    """
    _HOMES[name] = home


def view(name: str) -> Callable[..., Any]:
    """The function registered by this name. Raises :class:`ClusterSimError` where nobody registered one."""
    if name not in _HOMES:
        raise ClusterSimError(f"no view {name!r} of a result; {nearest(name, _HOMES)}")
    module, _, function = _HOMES[name].partition(":")
    show: Callable[..., Any] = getattr(import_module(module), function)
    return show
