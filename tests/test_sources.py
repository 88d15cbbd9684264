"""Every constant of a kernel, of a host and of a device says where it is from: a measurement, a fit or a prior."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from clustersim.core.texts import data_table

SECONDS = ROOT / "clustersim" / "model" / "seconds"
MODULES = (SECONDS / "host.py", *sorted((SECONDS / "kernel_law").glob("*.py")), ROOT / "clustersim/core/gpu_file.py")

ABOVE_BOOST = 1.2
"""Of a GeForce's stated rate at the most: it is stated at a boost clock that the card runs above where power allows."""


def unsourced(table: Mapping[str, Any], name: str) -> Iterator[str]:
    """Parts of a table that hold numbers, and neither they nor what they are in has a source."""
    if table.get("source"):
        return
    if any(not isinstance(value, Mapping) for value in table.values()):
        yield name
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from unsourced(value, f"{name}.{key}")


@pytest.mark.parametrize("name", ["kernel_law", "host"])
def test_every_part_of_a_table_of_constants_has_a_source(name):
    assert list(unsourced(data_table(name), name)) == []


def test_a_part_without_a_source_is_seen():
    assert list(unsourced({"a": {"source": "fit", "b": {"x": 1}}, "c": {"d": {"x": 1}}}, "t")) == ["t.c.d"]


def test_figures_of_devices_and_of_architectures_have_sources():
    table = data_table("devices")
    assert [name for name, family in table["family"].items() if not family.get("source")] == []
    for name, entry in table["device"].items():
        assert entry.get("source") or "like" in entry, name
        shares = [*entry.get("matmul", {}).values(), *([entry["stream"]] if "stream" in entry else [])]
        most = ABOVE_BOOST if entry.get("p2p") is False else 1
        assert all(0 < value <= most and source for value, source in shares), name


def test_what_is_not_fitted_is_named_as_a_prior():
    """A constant that no row moves is no fit: the source of its part says so."""
    for name, part in data_table("kernel_law")["scans"].items():
        assert "prior, in round numbers and not fitted: passes, states, norm, stream" in part["source"], name
    assert "held at their bound: reduce" in data_table("kernel_law")["products"]["all"]["source"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_constant_of_the_laws_code_has_words_behind_it(path: Path):
    body = ast.parse(path.read_text()).body
    bare = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        names = _constants(node)
        words = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and len(after.value.value) > 20
        bare += [] if words else names
    assert bare == []


def _constants(node: ast.stmt) -> list[str]:
    """Public names in capitals that a statement binds to something with a number in it."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    inside = (leaf for leaf in ast.walk(node.value) if isinstance(leaf, ast.Constant))
    numeric = any(isinstance(leaf.value, int | float) and not isinstance(leaf.value, bool) for leaf in inside)
    return [name for name in names if numeric and name.isupper() and not name.startswith("_")]
