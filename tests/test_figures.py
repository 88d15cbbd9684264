"""The table of figures: what is added to it is shown everywhere, and what is shown is in it."""

from __future__ import annotations

import csv
import json

import msgspec
import pytest
from click.testing import CliRunner
from conftest import ROOT

from clustersim import load
from clustersim.app.cli import cli
from clustersim.core import figures
from clustersim.core.facts import UNKNOWN
from clustersim.core.figures import FIGURES, Figure, value_text
from clustersim.explain.verdict import came_to

SMALL = "ddp_resnet50_1x8_v100"
HIDDEN = Figure(
    key="hidden_communication_s",
    label="communication hidden",
    unit="time",
    better=1,
    shown=frozenset({"run", "report", "sweep", "rows"}),
    value=lambda values: max(values["communication_s"] - values["exposed_transfer_s"], 0.0),
)


@pytest.fixture
def with_hidden(monkeypatch):
    """The table with one figure more."""
    monkeypatch.setattr(figures, "FIGURES", (*FIGURES, HIDDEN))


@pytest.fixture
def expected(with_hidden):
    """The new figure of the small run."""
    summary = load(SMALL).run().summary
    value = summary["communication_s"] - summary["exposed_transfer_s"]
    assert value > 0
    return value


def printed(*words):
    """What a command prints."""
    done = CliRunner().invoke(cli, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_new_figure_is_in_the_table_of_a_run_and_in_its_json(expected):
    line = next(line for line in printed("run", SMALL).splitlines() if "communication hidden" in line)
    assert HIDDEN.text(expected) in line
    assert json.loads(printed("run", SMALL, "--json"))["hidden_communication_s"] == pytest.approx(expected)


def test_a_new_figure_is_in_explain_s_json(expected):
    assert json.loads(printed("explain", SMALL, "--json"))["figures"]["hidden_communication_s"] == pytest.approx(
        expected
    )


def test_a_new_figure_is_a_tile_of_a_run_s_page(expected, tmp_path):
    load(SMALL).run().report(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "communication hidden" in page
    assert HIDDEN.text(expected) in page


def test_a_new_figure_is_in_a_sweep_s_table_and_page(expected, tmp_path):
    (tmp_path / "s.toml").write_text(f'base = "{SMALL}"\n[[axes]]\nkey = "run.steps"\nvalues = [3, 4]\n')
    printed(
        "sweep",
        str(tmp_path / "s.toml"),
        "--out",
        str(tmp_path / "out"),
        "--jobs",
        "1",
        "--report",
        str(tmp_path / "page.html"),
    )
    with (tmp_path / "out" / "table.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert float(rows[1]["hidden_communication_s"]) == pytest.approx(expected, rel=0.2)
    assert "communication hidden" in (tmp_path / "page.html").read_text()


def test_a_new_figure_is_in_explore(expected):
    from clustersim.app.explore.runs import PlayRequest, RunPlayer

    reply = RunPlayer(ROOT / "scenarios" / f"{SMALL}.toml")(PlayRequest())
    assert reply.figures["hidden_communication_s"] == pytest.approx(expected)
    assert "communication hidden" in reply.html


def test_the_readme_names_every_figure_of_a_run():
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Read the answer") : text.index("## Your case")]
    assert [figure.label for figure in figures.shown_in("run") if figure.label not in section] == []


def test_no_two_figures_share_a_key_or_a_label():
    assert len({figure.key for figure in FIGURES}) == len({figure.label for figure in FIGURES}) == len(FIGURES)


@pytest.mark.parametrize("name", ["ddp_resnet50_1x8_v100", "1f1b_gpt2_xl_1x8_a100"])
def test_where_a_step_goes_adds_up_to_it_in_the_table_of_a_run(name):
    """Host time once had no row, though the explanation named it."""
    values = load(name).run().figures
    shown = {figure.key for figure in figures.shown_in("run")}
    parts = {"compute_s", "exposed_transfer_s", "waiting_for_peer_s", "bubble_s", "idle_s"}
    assert parts <= shown
    assert sum(values.get(key, 0.0) for key in parts) == pytest.approx(values["step_time_s"], rel=1e-9)


def test_a_rate_of_long_steps_is_never_told_as_none():
    """A million tokens a sample: a step of minutes was told as 0.0 samples per second."""
    facts = msgspec.structs.replace(UNKNOWN, samples_per_s=0.004697)
    assert value_text(0.004697, "number") == "0.0047"
    assert came_to(facts, 212.9) == "212.9 s a step, 0.0047 samples per second"
