"""What is worked out once of a timeline and kept with it: every table of an explanation asks for some of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from clustersim.timeline import Timeline

P = ParamSpec("P")
T = TypeVar("T")


def once(make: Callable[Concatenate[Timeline, P], T]) -> Callable[Concatenate[Timeline, P], T]:
    """Keep what ``make`` finds of a timeline, by its other arguments. Who asks must not change it."""

    @wraps(make)
    def found(timeline: Timeline, /, *args: P.args, **kwargs: P.kwargs) -> T:
        kept = vars(timeline).setdefault("_kept", {})
        key = make, args, tuple(sorted(kwargs.items()))
        if key not in kept:
            kept[key] = make(timeline, *args, **kwargs)
        value: T = kept[key]
        return value

    return found
