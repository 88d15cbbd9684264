"""``python -m clustersim``, and the ``clustersim`` command."""

import gc
import os
import signal
import sys
from types import FrameType


def interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C: leave at once with 130, and leave no temporary file, worker process or hidden cursor behind.

    Not by an exception: one that comes up inside a C++ library that calls Python (matplotlib's fonts) aborts.
    """
    # The module may be half imported just now: it is looked at, not imported.
    for path in list(getattr(sys.modules.get("clustersim.core.outputs"), "UNFINISHED", ())):
        path.unlink(missing_ok=True)
    if "multiprocessing" in sys.modules:
        from multiprocessing import active_children

        for child in active_children():
            child.terminate()
        _unlink_semaphores()
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")
    os._exit(130)


def _unlink_semaphores() -> None:
    """Give back what the pool's queues have named in the system; else its watchdog prints that they leaked."""
    registry = getattr(sys.modules.get("multiprocessing.util"), "_finalizer_registry", {})
    for finalizer in list(registry.values()):
        if getattr(getattr(finalizer, "_callback", None), "__qualname__", "") == "SemLock._cleanup":
            finalizer()


def main() -> None:
    """The command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody wants it otherwise, as nohup does
        signal.signal(signal.SIGINT, interrupted)
    # No product of matrices here is worth a thread, and starting them is a third of what importing numpy takes.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # A run makes objects by the million and hardly a circle of them: looking for circles took a sixth of its time.
    gc.set_threshold(200_000, 20, 20)
    from clustersim.app.cli import main as command

    try:
        command()
    finally:
        gc.freeze()  # on its way out the interpreter would look again, at all that is left


if __name__ == "__main__":
    main()
