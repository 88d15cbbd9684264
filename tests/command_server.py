"""``python -m clustersim ARGS...`` in a process of its own, without the second that imports of libraries take.

A server imports libraries once and forks for each command: the child has its own memory, folder, environment, output
and exit code, imports the program, runs ``clustersim.__main__`` under the name ``__main__``, and ends as the
interpreter ends.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

LIBRARIES = (
    "click",
    "jinja2",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "matplotlib.patches",
    "msgspec",
    "networkx",
    "numpy",
    "rich.console",
    "rich.progress",
    "rich.table",
    "scipy.optimize",
    "scipy.sparse.csgraph",
    "simpy",
)
"""What commands import of others, once; of the program itself each imports what it needs."""

CAN_FORK = sys.platform == "linux"
"""Libraries of other systems do not outlive a fork."""

Start = Callable[[list[str], Path, dict[str, str]], "subprocess.CompletedProcess[str]"]


def settings_of_python(env: Mapping[str, str]) -> dict[str, str]:
    """What an interpreter looks at as it starts, such as the seed of its hashes."""
    return {name: value for name, value in env.items() if name.startswith("PYTHON")}


@contextmanager
def command_server() -> Iterator[Start]:
    """Start commands: words, folder, environment -> exit code and what was written; the server ends with the block."""
    settings = settings_of_python(os.environ)
    ours, theirs = socket.socketpair()
    command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
    server = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
    theirs.close()
    replies = ours.makefile("r")

    def start(words: list[str], folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        command = [sys.executable, "-m", "clustersim", *words]
        if not CAN_FORK or settings_of_python(env) != settings:
            return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        with tempfile.TemporaryDirectory() as written:
            files = [f"{written}/{name}" for name in ("stdout", "stderr")]
            ours.sendall(json.dumps([words, str(folder), env, files]).encode() + b"\n")
            code = int(replies.readline())
            said = [Path(file).read_text() for file in files]
        return subprocess.CompletedProcess(command, code, *said)

    try:
        yield start
    finally:
        ours.close()
        replies.close()
        server.wait()


def serve(line: socket.socket) -> None:
    """Fork for each line, until there are no more; returns in the child alone, which is the command by then."""
    asked = line.makefile("r")
    for request in asked:
        words, folder, env, files = json.loads(request)
        child = os.fork()
        if child == 0:
            become(words, folder, env, files)
            line.close()
            return
        _, status = os.waitpid(child, 0)
        line.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    sys.exit()


def become(words: list[str], folder: str, env: dict[str, Any], files: list[str]) -> None:
    """Take a command's words, folder, environment, stdout and stderr."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for number, path in enumerate(files, 1):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = ["clustersim", *words]


def import_libraries() -> None:
    """Import what children then have."""
    for name in LIBRARIES:
        import_module(name)


if __name__ == "__main__":
    sys.path[0] = ""  # as of `python -m`
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # no thread may run where a process forks
    import_libraries()
    with socket.socket(fileno=int(sys.argv[1])) as line:
        serve(line)
    runpy.run_module("clustersim", run_name="__main__", alter_sys=True)
