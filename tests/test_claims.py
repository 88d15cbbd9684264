"""Every claim of ``clustersim claims`` holds, and the command says so."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from test_fitting import fits

from clustersim.app.cli import cli
from tests.evidence.claims import Claim, claims


def test_a_claim_holds_within_its_tolerance_only():
    near = Claim("", "", "", says=100.0, found=100.4, within=0.005)
    assert near.holds
    assert not Claim("", "", "", says=100.0, found=100.6, within=0.005).holds


@pytest.fixture(scope="module")
def rows():
    return claims()


def test_every_claim_holds_in_a_run(rows):
    assert [row.what for row in rows if not row.holds] == []
    assert len({row.what for row in rows}) == len(rows) >= 24


def test_the_command_prints_them_and_fails_when_one_does_not_hold(rows, monkeypatch):
    monkeypatch.setattr("tests.evidence.claims.claims", lambda progress=None: rows)
    printed = CliRunner().invoke(cli, ["claims", "--json"])
    assert printed.exit_code == 0
    assert len(json.loads(printed.stdout)["claims"]) == len(rows)
    for width in (80, 100, 160):
        assert fits(CliRunner().invoke(cli, ["claims"], env={"COLUMNS": str(width)}).stdout, width)
    wrong = [Claim("sky is green", "", "", 1.0, 2.0, "x")]
    monkeypatch.setattr("tests.evidence.claims.claims", lambda progress=None: wrong)
    printed = CliRunner().invoke(cli, ["claims"])
    assert printed.exit_code == 1
    assert "NO" in printed.stdout
