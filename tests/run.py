"""The one test command: the tests, and beside them style, formatting, types and layers.

    python tests/run.py [--quick] [arguments for pytest ...]

Runs every check even when an earlier one fails, and exits with 1 if any did. ``--quick`` leaves the slow tests out, for
the time between two edits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def workers() -> str:
    """One pytest process per core this process may use, eight at most: a worker costs a second to start."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return str(min(cores, 8))


def style_checks() -> dict[str, list[str]]:
    """Style, types and layers by name, each a command line of this very environment."""
    python = [sys.executable, "-m"]
    return {
        "ruff check": [*python, "ruff", "check", "."],
        "ruff format": [*python, "ruff", "format", "--check", "."],
        "mypy --strict": [*python, "mypy"],
        "import-linter": [str(BIN / "lint-imports")],
    }


def main() -> int:
    words = sys.argv[1:]
    if "--quick" in words:
        words.remove("--quick")
        words += ["-m", "not slow"]
    # Tests start hundreds of commands: each would compile the whole package again where Python may keep no bytecode.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    # There is a process per core: more threads in each would wait for one another.
    environment.setdefault("OMP_NUM_THREADS", "1")
    with ThreadPoolExecutor(1) as beside:
        # One after the other, beside the tests: mypy alone would leave all cores but one idle.
        style = {name: beside.submit(_captured, command, environment) for name, command in style_checks().items()}
        print("== pytest", flush=True)
        tests = [sys.executable, "-m", "pytest", "-n", workers(), "--dist", "worksteal", "--durations=25", *words]
        failed = ["pytest"] if subprocess.run(tests, cwd=ROOT, env=environment, check=False).returncode else []
    for name, outcome in style.items():
        code, text = outcome.result()
        print(f"== {name}\n{text}", end="", flush=True)
        if code:
            failed.append(name)
    print("failed: " + ", ".join(failed) if failed else "all checks passed")
    return 1 if failed else 0


def _captured(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """The exit code of a command, and what it printed."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
