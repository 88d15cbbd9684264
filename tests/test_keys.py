"""The reference of keys: what is shipped uses no other, each has a meaning, and editors' schemas say the same."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator

import pytest
from conftest import ROOT

from clustersim.app.cli.keys import KINDS, keys, said, schema
from clustersim.app.cli.listing import LISTS

FILES = {
    "topology": sorted((ROOT / "topologies").glob("*.toml")),
    "device": [ROOT / "tests" / "data" / "gpu.toml"],
    "plan": sorted((ROOT / "scenarios").glob("plan_*.toml")),
    "sweep": sorted((ROOT / "scenarios").glob("sweep_*.toml")),
    "scenario": sorted(p for p in (ROOT / "scenarios").glob("*.toml") if not p.name.startswith(("plan_", "sweep_"))),
}


def paths(table: dict, prefix: str = "") -> Iterator[str]:
    """Every key of a file, as the reference writes it."""
    for name, value in table.items():
        here = f"{prefix}.{name}" if prefix else name
        yield here
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                yield from paths(one, here + "[]" if isinstance(value, list) else here)


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_of_every_shipped_file_is_in_the_reference(kind):
    known = {re.sub(r"\[\w+=\w+\]", "", key.path): key for key in keys(kind)}
    assert FILES[kind]
    for path in FILES[kind]:
        for used in paths(tomllib.loads(path.read_text())):
            above = [used.rsplit(".", n)[0] for n in range(1, used.count(".") + 1)]
            free = any(known[one].type.endswith(("table", "any")) for one in above if one in known)
            assert used in known or free or used.endswith("kind"), f"{path.name}: {used}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_meaning(kind):
    assert [key.path for key in keys(kind) if not key.meaning] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_for_editors_has_every_field_of_the_reference(kind):
    definitions = schema(kind)["$defs"]
    fields = {name for one in definitions.values() for name in one.get("properties", {})}
    assert {re.split(r"[.\]]", key.path)[-1].rstrip("[]") for key in keys(kind)} <= fields | {"strategy"}
    assert all(one["description"] for one in definitions.values())


def test_a_docstring_says_what_several_fields_mean_and_what_the_rest_do():
    class Doc:
        """A thing.

        Parameters
        ----------
        one, two : of both, as :class:`x.Y` says. three :
            on the next line. others : left alone, with ``four``.
        """

    meanings = said(Doc, ["one", "two", "three", "five"])
    assert meanings["one"] == meanings["two"] == "of both, as x.Y says."
    assert meanings["three"] == "on the next line."
    assert meanings["five"].startswith("left alone")


@pytest.mark.parametrize("what", LISTS)
def test_what_is_listed_has_names_and_something_to_say(what):
    rows = LISTS[what]()
    assert len({(row.get("command"), row["name"]) for row in rows}) == len(rows) > 3
    assert all(value not in ("", None) for row in rows for value in row.values())


def test_keys_are_printed_without_a_scenario(clustersim):
    done = clustersim("schema", "plan", "--markdown")
    assert done.returncode == 0
    assert "| `limits.deadline` | time with unit |" in done.stdout
    assert "limits.deadline" in clustersim("describe", "--keys", "plan").stdout
    assert clustersim("describe").returncode == 2


def test_what_a_router_s_mask_costs_the_host_is_said_where_fusion_is_switched(clustersim):
    """Without ``permute_fusion`` a step has waits of the host (tests/test_expert_parallel.py) that no page spoke of."""
    rows = clustersim("schema", "scenario", "--markdown").stdout.splitlines()
    (row,) = (row for row in rows if row.startswith("| `parallel.permute_fusion` |"))
    for words in ("host waits for the mask's sum", "ahead of `alltoall`'s permutation", "behind DeepEP's dispatch"):
        assert words in row
    assert row in (ROOT / "scenarios" / "README.md").read_text().splitlines()
