"""The shape holds: layers, light imports, small modules, and the public face."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import house
import pytest
from conftest import ROOT

import clustersim
from clustersim.old_paths import OLD_PATHS

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
    assert {"clustersim.app.cli.run", "clustersim.engine.flows.clock", "clustersim.scenario.run.running"} <= loaded
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


def test_what_completion_offers_is_public():
    """It offered Any, OldPaths, TYPE_CHECKING and import_module too."""
    offered = {name for name in dir(clustersim) if not name.startswith("__")}
    assert offered == {*clustersim.__all__, "testing"}


def test_no_public_name_hides_a_submodule():
    # ``clustersim.core.model`` must not be a function before, and a module after, someone imports
    # clustersim.core.model.
    modules = {path.stem for path in SOURCES if path.parent.name == "clustersim"}
    assert not modules & set(clustersim._HOME)


@pytest.mark.parametrize("package", ["clustersim.collectives", "clustersim.model", "clustersim.model.seconds"])
def test_a_package_gives_every_name_that_it_looks_up_and_hides_no_module_by_one(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert not (Path(module.__file__).parent / f"{name}.py").exists()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = module.nonsense


def test_checking_a_machine_loads_no_library_of_hosts():
    loaded = modules_of("check", "hgx-h100", "--nodes", "2", "--json")
    assert "clustersim.collectives.nccl.search" in loaded
    assert not loaded & {"clustersim.collectives.gloo", "clustersim.collectives.mpi"}


def test_what_a_kernel_takes_loads_no_model():
    code = "import sys, clustersim.model.seconds.unstated; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "clustersim.model.named_models" not in done.stdout.split()


ORDER = (
    "core",
    "cluster",
    "collectives",
    "model",
    "training",
    "engine",
    "explain",
    "scenario",
    "files",
    "studies",
    "calibrate",
    "app",
)
"""Rooms, from the lowest; pyproject.toml has them for the import contract."""


def test_the_rooms_are_those_of_the_contract():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    named = [room for layer in reversed(contract["layers"]) for room in layer.split(" | ")]
    assert [room for room in named if room in ORDER] == list(ORDER)
    assert {path.name for path in (ROOT / "clustersim").iterdir() if (path / "__init__.py").exists()} == set(ORDER)


def test_no_room_names_a_module_of_a_higher_room_by_a_string():
    files = house.sources()
    modules = {source.name for source in files}
    upward = [
        f"{source.path}:{node.lineno} {node.value}"
        for source in files
        if source.room in ORDER
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and (named := node.value.partition(":")[0]) in modules - {"clustersim"}
        and ORDER.index(named.split(".")[1]) > ORDER.index(source.room)
    ]
    assert upward == []


ROOMS_OF = {
    "check": {"app", "core", "cluster", "collectives", "model"},  # the kernels' law says what of a GPU is assumed
    "collective": {"app", "core", "cluster", "collectives", "engine"},
    "memory": set(ORDER) - {"files", "calibrate"},
}
"""Rooms that a command can reach by any import; none of these draws a picture or a page."""


@pytest.mark.parametrize("command", sorted(ROOMS_OF))
def test_a_command_reaches_only_the_rooms_that_it_needs(command):
    reached = house.reached(house.sources(), f"clustersim.app.cli.{command}")
    assert {name.split(".")[1] for name in reached} <= ROOMS_OF[command]
    assert not [name for name in reached if name.startswith(("clustersim.app.plots", "clustersim.app.report"))]


def test_a_run_reaches_no_picture_no_page_no_reader_of_traces_and_no_search():
    reached = house.reached(house.sources(), "clustersim.app.cli.run")
    needless = ("app.plots", "app.report", "files.traces", "studies")
    assert not [name for name in reached if name.startswith(tuple(f"clustersim.{room}" for room in needless))]


def test_no_module_takes_a_name_from_a_package_that_looks_it_up():
    # Reach is counted by imports: what is looked up when used would not be seen.
    files = house.sources()
    modules = {source.name for source in files}
    looking = {source.name for source in files if source.path.name == "__init__.py" and "looked_up(" in source.text}
    assert {"clustersim.collectives", "clustersim.model", "clustersim.model.seconds"} <= looking
    hidden = []
    for source in files:
        skipped = house.for_types(source.tree)
        for node in ast.walk(source.tree):
            if id(node) in skipped or not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            module = getattr(node, "module", None)
            full = {alias.name if module is None else f"{module}.{alias.name}" for alias in node.names}
            hidden += [f"{source.path}: {name}" for name in full & looking]
            hidden += [f"{source.path}: {name}" for name in full - modules if module in looking]
    assert hidden == []


@pytest.mark.parametrize("old", sorted(OLD_PATHS))
def test_an_old_import_path_answers_with_the_new_module_and_one_warning(old, monkeypatch):
    monkeypatch.delitem(sys.modules, f"clustersim.{old}", raising=False)
    monkeypatch.setattr("clustersim.old_paths._warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(f"clustersim.{old}")
        importlib.import_module(f"clustersim.{old}")
    assert module is importlib.import_module(f"clustersim.{OLD_PATHS[old]}")
    assert [str(w.message) for w in caught if f"clustersim.{old} is now" in str(w.message)] == [
        f"clustersim.{old} is now clustersim.{OLD_PATHS[old]}"
    ]


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
    assert len(text.splitlines()) <= 500  # tests/house.py lists those over 400: a warning
    assert ast.get_docstring(ast.parse(text))


def test_every_public_definition_says_what_it_is_inner_ones_too():
    assert [place for source in house.sources() for place in house.undocumented(source)] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_input_is_never_checked_by_assert(path):
    assert not [node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]
