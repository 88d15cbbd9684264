"""Collectives: what a library would do for (kind, group, bytes, machine), and what that asks of the links.

:func:`plan` is the front door; a library is a row of :data:`BACKENDS`, an algorithm a row of :data:`ALGORITHMS`.

Names are looked up when first used: who looks at what NCCL sees of a machine needs no Gloo and no Open MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clustersim.core.lookup import looked_up

if TYPE_CHECKING:
    from clustersim.collectives.backends import BACKENDS, plan, usual_backend
    from clustersim.collectives.base import Group, Plan, Request
    from clustersim.collectives.registry import ALGORITHMS

__all__ = ["ALGORITHMS", "BACKENDS", "Group", "Plan", "Request", "plan", "usual_backend"]

__getattr__ = looked_up(
    __name__,
    {
        "backends": "BACKENDS plan usual_backend",
        "base": "Group Plan Request",
        "registry": "ALGORITHMS",
    },
)
