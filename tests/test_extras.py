"""Extras say what they bring before they are installed, wherever they are named."""

from __future__ import annotations

import re
import sys
import tomllib

import pytest
from conftest import ROOT

import clustersim
from clustersim.core.errors import EXTRAS, ClusterSimError, needs

DECLARED = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]) - {"test"}


def test_every_extra_says_what_it_brings():
    assert set(EXTRAS) == DECLARED


def test_pages_name_every_extra():
    text = "".join(page.read_text() for page in (ROOT / "README.md", *ROOT.glob("*/README.md")))
    assert {name for name in DECLARED if f"`{name}`" in text} == DECLARED


def test_a_gpu_is_not_what_capture_installs_first():
    assert needs("capture", "capture").index("whl/cpu") < needs("capture", "capture").index("else")


def test_what_needs_a_package_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    with pytest.raises(ClusterSimError, match=re.escape("clustersim[notebooks]")):
        clustersim.load("dp_torch_1x8").run().to_pandas()
