"""The shape holds: layers, light imports, small modules, and the public face."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import clustersim

HEAVY = ("matplotlib", "scipy", "networkx", "simpy", "jinja2", "pandas", "torch")
SOURCES = sorted((ROOT / "clustersim").rglob("*.py"))


def loaded_by(*arguments: str) -> set[str]:
    """Top-level packages a fresh interpreter imports for these arguments."""
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:") and "|" in line]
    assert len(lines) > 10
    return {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}


def modules_of(*words: str) -> set[str]:
    """Modules that the process of a command has loaded at its end."""
    told = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    code = f"{told}; from clustersim.app.cli import main; main({list(words)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("arguments", [("-c", "import clustersim"), ("-m", "clustersim", "--help")])
def test_importing_and_helping_load_nothing_heavy(arguments):
    loaded = loaded_by(*arguments)
    assert "clustersim" in loaded or "click" in loaded
    assert not loaded & set(HEAVY)


def test_importing_the_package_loads_not_even_numpy():
    assert "numpy" not in loaded_by("-c", "import clustersim")


def test_a_run_in_which_nothing_is_split_or_shared_loads_no_clock_no_builder_and_no_other_command():
    loaded = modules_of("run", "ddp_resnet50_1x8_v100", "--json")
    assert {"clustersim.app.cli.run", "clustersim.engine.flows.clock", "clustersim.scenario.running"} <= loaded
    assert not loaded & {
        *HEAVY,
        "clustersim.training.builder",
        "clustersim.training.partition",
        "clustersim.app.cli.plan",
    }


def test_a_collective_loads_no_scenario():
    loaded = modules_of("collective", "all_reduce", "--topology", "hgx-h100", "--json")
    assert {"clustersim.app.cli.collective", "clustersim.collectives"} <= loaded
    assert not loaded & {*HEAVY, "clustersim.scenario", "clustersim.model", "clustersim.training.strategies"}


def test_every_public_name_can_be_used():
    for name in clustersim.__all__:
        assert getattr(clustersim, name) is not None
    assert set(clustersim.__all__) <= set(dir(clustersim))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = clustersim.nonsense


def test_no_public_name_hides_a_submodule():
    # ``clustersim.core.model`` must not be a function before, and a module after, someone imports
    # clustersim.core.model.
    modules = {path.stem for path in SOURCES if path.parent.name == "clustersim"}
    assert not modules & set(clustersim._HOME)


def test_the_layers_hold():
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-logo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_short_and_says_what_it_is(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_input_is_never_checked_by_assert(path):
    assert not [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
