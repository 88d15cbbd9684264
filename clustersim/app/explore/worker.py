"""A :class:`~clustersim.app.explore.runs.RunPlayer` in a process of its own, which is killed when nobody waits for
it."""

from __future__ import annotations

import asyncio
import multiprocessing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from clustersim.app.explore.runs import PageReply, PlayRequest, RunPlayer, told

GRACE = 1.5
"""Seconds for which a change waits for the run before it; then that run is given up."""
LONGEST = 120.0
"""Seconds that any run may take."""
AHEAD = [
    "clustersim.app.explore.runs",
    "clustersim.cluster.files",
    "clustersim.engine",
    "clustersim.training.strategies",
    "jinja2",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
]
"""What a process of which all others are forked imports once."""


def play_on(asks: Connection, path: str) -> None:
    """The process: a reply for each :class:`PlayRequest`, until the other end is gone."""
    from clustersim.studies.sweep.crews import follow_parent

    follow_parent()
    player = RunPlayer(path)
    while True:
        try:
            ask = asks.recv()
        except EOFError:
            return
        asks.send(player(ask))


@dataclass(eq=False)
class RunWorker:
    """Plays the changes of the scenario at ``path``, one at a time; of several that wait only the last is played."""

    path: str
    grace: float = GRACE
    longest: float = LONGEST
    turn: int = 0
    process: Any = None
    asks: Any = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, ask: PlayRequest) -> PageReply | None:
        """The reply; None where a later change has taken this one's place."""
        self.turn += 1
        own_turn = self.turn
        try:
            await asyncio.wait_for(self.lock.acquire(), self.grace)
        except TimeoutError:
            if own_turn < self.turn:
                return None
            self.close()  # who plays finds its process gone, and lets go of the lock
            await self.lock.acquire()
        try:
            if own_turn < self.turn:
                return None
            return await asyncio.to_thread(self._play, ask)
        finally:
            self.lock.release()

    def _play(self, ask: PlayRequest) -> PageReply:
        if self.process is None or not self.process.is_alive():
            self._start()
        process = self.process
        asks = self.asks
        try:
            asks.send(ask)
            if not wait([asks, process.sentinel], self.longest):
                self.close()
                limit = f"more than {self.longest:.0f} s"
                return told(f"this takes {limit} and was stopped; `clustersim run` has no such limit")
            reply: PageReply = asks.recv()
        except (EOFError, OSError):  # killed for a later change, or by the system
            return told("the run was stopped")
        return reply

    def _start(self) -> None:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(AHEAD)
        self.asks, theirs = context.Pipe()
        self.process = context.Process(target=play_on, args=(theirs, self.path), daemon=True)
        self.process.start()
        theirs.close()

    def close(self) -> None:
        """Kill the process, whatever it does."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None
