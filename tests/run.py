"""The one test command: style, formatting, types, layers, then the tests.

    python tests/run.py [--quick] [arguments for pytest ...]

Runs every check even when an earlier one fails, and exits with 1 if any did. ``--quick`` leaves the slow tests out, for
the time between two edits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def workers() -> str:
    """One pytest process per core this process may use, eight at most: a worker costs a second to start."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return str(min(cores, 8))


def checks(pytest_arguments: list[str]) -> dict[str, list[str]]:
    """Every check by name, as a command line of this very environment."""
    python = [sys.executable, "-m"]
    return {
        "ruff check": [*python, "ruff", "check", "."],
        "ruff format": [*python, "ruff", "format", "--check", "."],
        "mypy --strict": [*python, "mypy"],
        "import-linter": [str(BIN / "lint-imports")],
        "pytest": [*python, "pytest", "-n", workers(), "--dist", "worksteal", *pytest_arguments],
    }


def main() -> int:
    failed = []
    words = sys.argv[1:]
    if "--quick" in words:
        words.remove("--quick")
        words += ["-m", "not slow"]
    # Tests start hundreds of commands: each would compile the whole package again where Python may keep no bytecode.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for name, command in checks(words).items():
        print(f"== {name}", flush=True)
        if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(name)
    print("failed: " + ", ".join(failed) if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
