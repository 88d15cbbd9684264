"""Who computes: this process, processes on this machine, a Dask cluster, or whatever else has ``submit()``.

A crew hands out futures: objects with ``done()`` and ``result()``. When work is lost because a worker or a scheduler is
gone, the crew is mended and the work submitted again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from clustersim.core.crew_memo import join_folder, leave_folder
from clustersim.core.errors import ClusterSimError, needs
from clustersim.core.main_guard import check_guarded

PATIENCE = 120.0
"""Seconds to wait for a scheduler that is gone to come back."""


class Executor(Protocol):
    """Anything that takes work: ``concurrent.futures``, Dask, submitit, or ten lines around Ray."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """A future, with ``done()`` and ``result()``."""


class Crew:
    """Who computes a sweep. As it stands here: its futures are always done in the end, if only with an error, and there
    is nothing to mend or to close."""

    @property
    def ahead(self) -> int:
        """How many pieces of work it should have at a time."""
        return 1

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """A future."""
        raise NotImplementedError

    def gone(self, futures: Collection[Any]) -> list[Any]:
        """Those of these futures, of work handed out a while ago, that will never be done."""
        return []

    def mend(self) -> bool:
        """Make it work again after a loss; False where only its owner could."""
        return True

    def close(self) -> None:
        """No more work."""


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class InProcessCrew(Crew):
    """This very process, one piece at a time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """A future that is done already."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclass
class Processes(Crew):
    """``jobs`` processes of this machine, started anew (never forked), and again when one has died.

    They and this process share what is slow to work out (:mod:`clustersim.core.crew_memo`) until it is closed.
    """

    jobs: int
    pool: ProcessPoolExecutor | None = None
    shared: TemporaryDirectory[str] | None = None

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError):  # without a place for files each works out its own
            self.shared = TemporaryDirectory(prefix="clustersim-")
            join_folder(self.shared.name)

    @property
    def ahead(self) -> int:
        """One piece for each process to work on and one to go on with."""
        return 2 * self.jobs

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """A future; the processes start with the first."""
        if self.pool is None:
            from multiprocessing import get_context

            folder = "" if self.shared is None else self.shared.name
            self.pool = ProcessPoolExecutor(self.jobs, get_context("spawn"), initializer=_begin, initargs=(folder,))
        return self.pool.submit(fn, *args)

    def mend(self) -> bool:
        """One dead worker breaks the whole pool: take another."""
        self._stop()
        return True

    def close(self) -> None:
        """Stop the processes, without waiting for what they compute, and forget what they shared."""
        self._stop()
        if self.shared is not None:
            leave_folder(self.shared.name)
            self.shared.cleanup()
            self.shared = None

    def _stop(self) -> None:
        pool = self.pool
        self.pool = None
        if pool is not None:
            workers = list((getattr(pool, "_processes", None) or {}).values())
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join(timeout=5)


def _begin(folder: str) -> None:
    """In a new worker: follow the process that started it, and share answers in ``folder``, if that is one."""
    follow_parent()
    if folder:
        join_folder(folder)


def follow_parent() -> None:
    """End this worker when the process that started it is gone (nobody else would, after a ``kill -9``), and leave
    Ctrl-C, which the terminal sends to both, to that process."""
    import signal
    from multiprocessing import connection, parent_process

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()

    def watch() -> None:
        """Wait for the parent's end, then end this process at once."""
        if parent is not None:
            connection.wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass
class CallerCrew(Crew):
    """An executor of the caller's: used as it is, never closed. Work that it lost is given to it again; one that takes
    no more is its owner's to replace."""

    executor: Executor

    @property
    def ahead(self) -> int:
        """Enough for a large one: nobody says how many workers it has."""
        return 64

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """The executor's own future."""
        return self.executor.submit(fn, *args)


@dataclass
class Dask(Crew):
    """The workers of a Dask scheduler, however many there are at the moment.

    A worker that dies is Dask's own to replace. When the scheduler is gone, so is what it was told: the crew connects
    again, for :data:`PATIENCE` seconds, and the work is submitted anew. Work that was on its way to the scheduler when
    it went is known to nobody, and Dask's future of it would wait for ever: so a scheduler is asked what it knows.

    address : ``"tcp://host:8786"``. patience : [s] to wait for a scheduler at first.
    """

    address: str
    patience: float = 10.0
    client: Any = None

    def __post_init__(self) -> None:
        self._connect(self.patience)

    @property
    def ahead(self) -> int:
        """Two pieces for each thread of each worker, so that none waits for this process."""
        try:
            threads = int(sum(self.client.nthreads().values()))
        except Exception:  # between two schedulers nobody answers
            threads = 0
        return max(4, 2 * threads)

    def submit(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        """Dask's future."""
        return self.client.submit(fn, *args, pure=False)

    def gone(self, futures: Collection[Any]) -> list[Any]:
        """What the scheduler knows nothing of, though nobody has let go of it; all, where their client is another."""
        own_futures = {future.key: future for future in futures if future.client is self.client}
        try:
            unknown = set(self.client.run_on_scheduler(_unknown, list(own_futures)))
        except Exception:  # between two schedulers nobody answers
            return []
        return [future for future in futures if future.key not in own_futures or future.key in unknown]

    def mend(self) -> bool:
        """Connect again where the connection is lost."""
        if self.client is not None and self.client.status == "running":
            return True
        self.close()
        try:
            self._connect(PATIENCE)
        except ClusterSimError:
            return False
        return True

    def close(self) -> None:
        """Let go of the scheduler; it goes on."""
        client = self.client
        self.client = None
        if client is not None:
            with contextlib.suppress(Exception):
                client.close(timeout=2)

    def _connect(self, patience: float) -> None:
        try:
            import distributed
        except ImportError:
            raise ClusterSimError(needs("a Dask cluster", "dask")) from None
        client: Any = distributed.Client  # not typed
        end = time.monotonic() + patience
        while True:
            try:
                self.client = client(self.address, timeout=min(10.0, patience), set_as_default=False)
                return
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError) or time.monotonic() > end:
                    raise ClusterSimError(
                        f"no Dask scheduler at {self.address!r}: {error or type(error).__name__}; "
                        "write it like tcp://127.0.0.1:8786"
                    ) from None
                time.sleep(0.5)


def _unknown(keys: list[Any], dask_scheduler: Any = None) -> list[Any]:
    """Runs in the scheduler: the keys of which it has no task."""
    return [key for key in keys if key not in dask_scheduler.tasks]


def crew(executor: Executor | None, jobs: int | None) -> Crew:
    """The caller's executor; without one ``jobs`` processes (None: as many as cores), or this process for one.

    Raises :class:`ClusterSimError` where a script is started that processes cannot import.
    """
    if executor is not None:
        return executor if isinstance(executor, Crew) else CallerCrew(executor)
    count = cores() if jobs is None else jobs
    if count < 1:
        raise ClusterSimError(f"jobs = {count}: at least 1")
    if count == 1:
        return InProcessCrew()
    check_guarded("jobs=1")
    return Processes(count)
