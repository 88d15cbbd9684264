"""Work handed to a crew piece by piece, until all of it is done, whatever dies on the way.

A piece is some scenarios in a row, so that what they share stays warm in its worker; its size follows how long they
take. A piece that is lost (its worker died, its scheduler is gone) is handed out again; lost twice, its scenarios are
handed out one by one, alone, so that one that kills its worker is found, and costs no other.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from clustersim.core.errors import ClusterSimError
from clustersim.studies.sweep.crews import Crew

T = TypeVar("T")

PIECE_SECONDS = 1.0
"""How long a piece should take: a kill costs as much, and a message is cheap beside it."""
MOST = 64
"""Scenarios of a piece at most."""
LOSSES = 2
"""How often a piece may be lost before its scenarios are tried alone, and then how often one may be lost alone."""
HOPELESS = 10
"""Losses, with nothing ever done, after which the crew is given up."""
REFUSALS = 3
"""How often in a row a crew may refuse work."""
SILENCE = 5.0
"""Seconds without anything done after which the crew is asked what it has lost."""
POLL = 0.2
"""Seconds between two looks at futures that do not tell when they are done."""


@dataclass(eq=False)
class WorkPiece(Generic[T]):
    """Scenarios computed together. lost : how often it was. alone : nothing else may run beside it."""

    items: Sequence[T]
    lost: int = 0
    alone: bool = False


@dataclass
class Driver(Generic[T]):
    """What is under way.

    Parameters
    ----------
    work : takes a list of items, returns (seconds, output). It raises only for what is no item's own fault.
    took : is given every output. given_up : items that killed their worker each time, and the last error.
    """

    crew: Crew
    work: Callable[[list[T]], tuple[float, Any]]
    took: Callable[[Any], None]
    waiting: dict[Any, WorkPiece[T]] = field(default_factory=dict)
    again: deque[WorkPiece[T]] = field(default_factory=deque)
    finished: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    given_up: list[tuple[T, str]] = field(default_factory=list)
    seconds: float = 0.0
    done: int = 0
    losses: int = 0
    refused: int = 0

    def run(self, items: Iterator[T]) -> None:
        """All of it. Raises :class:`ClusterSimError` where the crew finishes nothing any more."""
        while True:
            self._fill(items)
            if self.waiting:
                future = self._next()
                if future is not None:
                    self._finish(future)
            elif not self.again:
                return

    def _finish(self, future: Any) -> None:
        piece = self.waiting.pop(future)
        try:
            seconds, output = future.result()
        except (Exception, asyncio.CancelledError) as error:
            self._lose([piece], f"{type(error).__name__}: {error}")
        else:
            self.seconds, self.done = self.seconds + seconds, self.done + len(piece.items)
            self.took(output)

    def _fill(self, items: Iterator[T]) -> None:
        """Hand out as much as the crew should have."""
        ahead = self.crew.ahead
        while len(self.waiting) < ahead:
            if any(piece.alone for piece in self.waiting.values()):
                return
            piece = self._another(items)
            if piece is None or not self._submit(piece):
                return

    def _another(self, items: Iterator[T]) -> WorkPiece[T] | None:
        if self.again and not self.again[0].alone:
            return self.again.popleft()
        if self.again:
            return None if self.waiting else self.again.popleft()
        size = 1 if not self.done else int(min(max(PIECE_SECONDS * self.done / max(self.seconds, 1e-9), 1), MOST))
        chosen = [item for _, item in zip(range(size), items, strict=False)]
        return WorkPiece(chosen) if chosen else None

    def _submit(self, piece: WorkPiece[T]) -> bool:
        try:
            future = self.crew.submit(self.work, list(piece.items))
        except Exception as error:
            self.again.appendleft(piece)
            self.refused += 1
            self._mend(f"{type(error).__name__}: {error}", self.refused > REFUSALS)
            return False
        self.refused = 0
        self.waiting[future] = piece
        tell = getattr(future, "add_done_callback", None)
        if tell is not None:
            tell(self.finished.put)
        return True

    def _next(self) -> Any:
        """A future that is done; None once the crew was asked, after a long silence, for those that never will be."""
        for _ in range(max(1, round(SILENCE / POLL))):
            try:
                future = self.finished.get(timeout=POLL)
                if future in self.waiting:
                    return future
            except queue.Empty:
                pass
            for future in self.waiting:
                if future.done():
                    return future
        gone = [future for future in self.crew.gone(list(self.waiting)) if not future.done()]
        if gone:
            self._lose([self.waiting.pop(future) for future in gone], "who was given the work knows nothing of it")
        return None

    def _lose(self, pieces: Sequence[WorkPiece[T]], message: str) -> None:
        for piece in pieces:
            piece.lost += 1
            if piece.lost < LOSSES:
                self.again.appendleft(piece)
            elif not piece.alone:
                self.again.extend(WorkPiece([item], alone=True) for item in piece.items)
            else:
                self.given_up.append((piece.items[0], " ".join(message.split())))
        # What breaks a crew loses all of its futures; mend once for all of them.
        if not any(future.done() for future in self.waiting):
            self.losses += 1
            self._mend(message, not self.done and self.losses >= HOPELESS)

    def _mend(self, message: str, hopeless: bool) -> None:
        if hopeless or not self.crew.mend():
            raise ClusterSimError(
                f"the workers finish nothing any more ({' '.join(message.split())}); rows so far are kept"
            )
