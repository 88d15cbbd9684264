"""Answers of pure functions, remembered beside the frozen object they are about.

A cluster's routes, a group's link loads, a model's cost or what an analysis finds in a run depend on nothing but their
arguments, and are asked for again and again. They are kept with the topology, model or timeline itself, so that they
are never about another one and are gone when it is; nobody who asks may change them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import lru_cache, wraps
from threading import Lock
from typing import Any, Generic, ParamSpec, TypeVar
from weakref import ref

P = ParamSpec("P")
R = TypeVar("R")


class Keeper:
    """Base of frozen classes that answers can be kept with. Copies and pickles leave the answers behind."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_answers"}


def kept_with_first(maxsize: int | None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Remember a function's answers with its first argument, a :class:`Keeper`; the others are hashed.

    Parameters
    ----------
    maxsize : answers kept for each first argument, None for all.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        """The function, with a memory at each first argument."""

        def make(owner: Any) -> Callable[..., R]:
            """The memory of one owner."""
            # The owner is no part of the key: hashing a whole model would cost more than the answer. And what it keeps
            # does not hold it: without a circle it is gone as soon as nobody uses it.
            weak = ref(owner)
            return lru_cache(maxsize)(lambda *rest, **named: function(weak(), *rest, **named))  # type: ignore[arg-type]

        def ask(owner: Any, *rest: Any, **named: Any) -> R:
            """Ask the owner's memory."""
            return _known(owner, function, make)(*rest, **named)

        return wraps(function)(ask)  # type: ignore[return-value]

    return decorate


def kept_with_topology(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Remember a function's answers with the ``topology`` of its first argument, which is hashed as the others are.

    Parameters
    ----------
    maxsize : answers kept for each topology.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        """The function, with a memory at each topology."""

        def ask(first: Any, *rest: Any, **named: Any) -> R:
            """Ask the memory of the first argument's topology."""
            return _known(first.topology, function, lambda _: lru_cache(maxsize)(function))(first, *rest, **named)

        return wraps(function)(ask)  # type: ignore[return-value]

    return decorate


def _known(owner: Any, function: Callable[P, R], make: Callable[[Any], Callable[..., R]]) -> Callable[..., R]:
    """What an owner keeps of a function's answers, made where it has none."""
    answers: dict[Callable[P, R], Callable[..., R]] = vars(owner).setdefault("_answers", {})
    stored = answers.get(function)
    if stored is None:
        stored = answers[function] = make(owner)
    return stored


class ByWeight(Generic[R]):
    """The answers used last, as many as weigh no more than ``budget`` together, and always the very last.

    Parameters
    ----------
    weigh : an answer -> its weight, in the unit of ``budget``.
    """

    def __init__(self, budget: float, weigh: Callable[[R], float]) -> None:
        self.budget = budget
        self.weigh = weigh
        self._known: OrderedDict[Hashable, R] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], R]) -> R:
        """The answer known by this key, or else what ``make()`` gives."""
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        answer = make()
        with self._lock:
            self._known[key] = answer
            while len(self._known) > 1 and sum(map(self.weigh, self._known.values())) > self.budget:
                self._known.popitem(last=False)
        return answer
