"""Whether the script that is running may start processes.

A process that multiprocessing starts anew imports the script again. A call that is not under ``if __name__ ==
"__main__":`` is made there once more, and ends in tracebacks of every process.
"""

from __future__ import annotations

import ast
import sys
from types import FrameType

from clustersim.core.errors import ClusterSimError


def check_guarded(alone: str) -> None:
    """Raise :class:`ClusterSimError` where the script's own call is not under ``if __name__ == "__main__":``.

    alone : the argument with which the caller needs no processes, such as ``jobs=1``.
    """
    frame = _frame_of_script()
    if frame is None:
        return
    path = frame.f_code.co_filename
    try:
        with open(path, "rb") as script:
            tree = ast.parse(script.read())
    except (OSError, SyntaxError, ValueError):
        return
    line = frame.f_lineno
    if not any(_is_guard(node) and node.lineno <= line <= (node.end_lineno or line) for node in tree.body):
        raise ClusterSimError(
            f"{path}:{line}: this starts processes, and each of them imports the script again: put the call under "
            f'`if __name__ == "__main__":`, or give {alone}, which needs no processes'
        )


def _frame_of_script() -> FrameType | None:
    """Where the file that was started stands; None where there is none (a console, a notebook, ``python -c``)."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        of_main = frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name == "<module>"
        if of_main and path and frame.f_code.co_filename == path:
            return frame
        frame = frame.f_back
    return None


def _is_guard(node: ast.AST) -> bool:
    """Whether this is an ``if`` that asks for ``__name__``; whatever else it asks for."""
    return isinstance(node, ast.If) and any(
        isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test)
    )
