"""What commands offer as choices, and the files of a kind, are what the tables have: a row that is added is offered."""

from __future__ import annotations

from typing import get_args

import pytest
from conftest import ROOT

from clustersim.app.cli.collective import collective
from clustersim.app.cli.exchange import export_config, import_
from clustersim.app.cli.replay import replay
from clustersim.app.cli.validate import nccl
from clustersim.calibrate.cross_validate import HOLDOUTS
from clustersim.collectives import BACKENDS
from clustersim.files import frameworks
from clustersim.files.launch.table import load
from clustersim.scenario.file.incident_table import KINDS, KindName


def offered(command, name):
    """The choices of an option of a command."""
    return tuple(next(option.type.choices for option in command.params if option.name == name))


@pytest.mark.parametrize(
    ("command", "name", "table"),
    [
        (collective, "backend", BACKENDS),
        (replay, "backend", BACKENDS),
        (nccl, "holdout", HOLDOUTS),
        (import_, "framework", frameworks.NAMES),
        (export_config, "to", frameworks.WRITTEN),
    ],
)
def test_an_option_offers_every_row_of_its_table(command, name, table):
    assert offered(command, name) == tuple(table)


def test_every_framework_has_a_table_and_every_table_is_a_frameworks():
    tables = {path.stem for path in (ROOT / "clustersim" / "data" / "exchange").glob("*.toml")}
    assert tables == set(frameworks.NAMES)
    assert set(frameworks.WRITTEN) == {name for name in frameworks.NAMES if load(name).writes}


def test_every_fault_that_a_file_can_name_is_a_row():
    assert get_args(KindName) == tuple(KINDS)
