"""What every test may use: the measurement tables beside the checkout, and the program as a person runs it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_server import command_server
from hypothesis import settings

# Processes side by side have a core each: threads of linear algebra would only wait for one another, at full speed.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from clustersim.calibrate.capture.parts import write_whole

# As in the command: a process holds tens of thousands of tests, which the collector would walk again and again.
gc.set_threshold(200_000, 20, 20)

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"

# Claims of the notebooks run behind a notebook's last cell; a package among the data must not be importable everywhere.
collect_ignore_glob = ["lessons/*", "evidence/*", "data/*"]

# A loaded machine must not turn a slow example into a failure, nor two runs into different examples.
settings.register_profile("repo", deadline=None, derandomize=True)
settings.load_profile("repo")

SLOW = frozenset(
    (
        "calibrate_capture",
        "capture",
        "claims",
        "cli",
        "cross_validate",
        "engine_async",
        "engine_reference",
        "equality",
        "explain",
        "explore",
        "fitting",
        "flow_and_chunk",
        "fuzz",
        "hybrid_rows",
        "interrupt",
        "launch",
        "launch_said",
        "lessons",
        "measured",
        "measured_spans",
        "need",
        "new",
        "partition_kept",
        "physics_slips",
        "pipeline_traces",
        "plan",
        "plots_figures",
        "readme",
        "repeated",
        "same_bytes",
        "schedules_torch",
        "sharded_rows",
        "step_cross_validation",
        "trace_figures_agree",
        "trace_replay",
        "unseen_steps",
        "validate_steps",
    )
)
"""Files of tests that take ten CPU seconds and more; ``tests/run.py --quick`` leaves them out."""

SAME_STEPS = frozenset(("sharded_rows", "step_cross_validation", "unseen_steps", "validate_steps"))
"""Files that play the same published steps, which a process remembers: side by side they run in one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--fuzz-budget N``: cases of each kind of file that tests/test_fuzz.py plays; ``--every-peak`` of tracing."""
    parser.addoption("--fuzz-budget", type=int, default=6, help="cases of each kind of file in tests/test_fuzz.py")
    parser.addoption("--every-peak", action="store_true", help="trace every case in tests/test_tracing.py")


def pytest_collection_finish() -> None:
    """The tests themselves are no garbage: the collector need not look at them again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that says it needs ../shared, so that a run can tell how many there were, and the slow ones,
    which begin: of parallel processes none is left alone with one at the end."""
    for item in items:
        if _subject(item) in SLOW:
            item.add_marker(pytest.mark.slow)
        reasons = (str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skipif"))
        if "shared" in getattr(item, "fixturenames", ()) or any("shared" in reason for reason in reasons):
            item.add_marker(pytest.mark.shared)
    items.sort(key=lambda item: (item.get_closest_marker("slow") is None, _subject(item) not in SAME_STEPS))


def _subject(item: pytest.Item) -> str:
    """What the file of a test is about."""
    return item.path.stem.removeprefix("test_")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests that need ../shared ran."""
    shared = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if "shared" in getattr(report, "keywords", {})
    ]
    terminalreporter.write_line(f"tests that read ../shared and ran: {len(shared)}")


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test prints into the width of the terminal that it is started from."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of facts and measurements beside the checkout; the test is skipped where there is none."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared")
    return SHARED


def exit_code(*words: object) -> int | str | None:
    """What a command line, run in this process, leaves with."""
    from clustersim.app.cli import main

    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return left.value.code


Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def clustersim() -> Iterator[Command]:
    """Run ``clustersim ARGS...`` in a process of its own, as a person does, whose imports are made already."""
    with command_server() as start:

        def run(*args: str | Path, cwd: Path | None = None, columns: int = 160) -> subprocess.CompletedProcess[str]:
            env = {**os.environ, "NO_COLOR": "1", "COLUMNS": str(columns)}
            return start([*map(str, args)], cwd or ROOT, env)

        yield run


CAPTURE_SECONDS = {2: 25, 4: 15}
"""Budget of a capture of so many ranks: every kind of collective, and the first steps, on two busy cores."""


@dataclass(frozen=True)
class Captured:
    """A capture of this machine: its folder, and what the command wrote on stderr."""

    folder: Path
    ranks: int
    said: str


@pytest.fixture(scope="session")
def captured_by(tmp_path_factory: pytest.TempPathFactory, clustersim: Command) -> Callable[[int], Captured]:
    """A whole capture by 2 ranks of this machine, or the collectives of 4; parallel test processes share each."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def capture(ranks: int) -> Captured:
        folder = base / f"capture{ranks}"
        told = base / f"capture{ranks}.json"
        try:
            (base / f"capture{ranks}.mine").mkdir()
        except FileExistsError:
            until = time.monotonic() + 300
            while not told.exists() and time.monotonic() < until:
                time.sleep(0.5)
        else:
            parts = ("--parts", "collectives") if ranks == 4 else ()
            done = clustersim(
                "capture",
                "--out",
                folder,
                "--nproc-per-node",
                str(ranks),
                "--device",
                "cpu",
                "--budget",
                f"{CAPTURE_SECONDS[ranks]}s",
                "--largest",
                "1M",
                *parts,
            )
            write_whole(told, json.dumps([done.returncode, done.stderr]).encode())
        code, said = json.loads(told.read_text())
        assert code == 0, said[-2000:]
        return Captured(folder, ranks, said)

    return capture
