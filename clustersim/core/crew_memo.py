"""Answers of slow pure functions, shared by the processes of one crew: whoever needs one first works it out for all.

A crew of processes that play options of one machine would each search the machine's channels anew. While it is there
it has a folder; an answer is a file in it, and who looks for one that another process is working out waits for it.
Without a crew, or where the folder cannot be written, each process works out its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

try:
    import fcntl
except ImportError:  # Windows: two processes may work out the same at once
    fcntl = None  # type: ignore[assignment]

P = ParamSpec("P")
R = TypeVar("R")

_FOLDERS: list[str] = []
"""Of the crews that this process is in, or has; the last one is used."""


def join_folder(folder: str) -> None:
    """Share answers with whoever else has joined this folder, from now on."""
    _FOLDERS.append(folder)


def leave_folder(folder: str) -> None:
    """Share no more there."""
    if folder in _FOLDERS:
        _FOLDERS.remove(folder)


def shared_by_crew(function: Callable[P, R]) -> Callable[P, R]:
    """Work out a function's answers once for all processes of a crew.

    Its arguments are told apart by their ``repr``, which must say all of them; its answers are pickled.
    """

    @wraps(function)
    def ask(*args: P.args, **named: P.kwargs) -> R:
        """The crew's answer, or a new one, which it then has."""
        if not _FOLDERS:
            return function(*args, **named)
        text = f"{function.__module__}.{function.__qualname__} {args!r} {sorted(named.items())!r}"
        path = Path(_FOLDERS[-1], hashlib.sha256(text.encode()).hexdigest())
        with contextlib.ExitStack() as turn:
            with contextlib.suppress(OSError):
                turn.enter_context(_alone(path.with_suffix(".lock")))
            with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
                return cast(R, pickle.loads(path.read_bytes()))
            answer = function(*args, **named)
            with contextlib.suppress(OSError):
                unfinished = path.with_suffix(f".{os.getpid()}")
                unfinished.write_bytes(pickle.dumps(answer))
                os.replace(unfinished, path)
        return answer

    return ask


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process that has it. Raises :class:`OSError` where it cannot be made."""
    with path.open("w") as lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
