"""Validation's picture and its worst cases."""

from __future__ import annotations

import io

import numpy as np
import pytest
from click.testing import CliRunner

from clustersim.app import plots
from clustersim.app.cli import cli
from clustersim.calibrate.score import PredictedRow, scored
from clustersim.calibrate.worst import spreads, worst
from clustersim.core.errors import ProgramError

TABLE = "case_id,topology,nodes,ranks,collective,size_bytes,time_us,notes\n"
ROWS = """a,hgx-h100,1,8,all_reduce,1048576,40,
a,hgx-h100,1,8,all_reduce,1073741824,4500,
b,dgx-a100,1,8,all_gather,1024,9,
"""


def row(case: str, size: float, measured: float, predicted: float) -> PredictedRow:
    return scored({"case_id": case, "size": size}, measured, predicted)


def test_the_worst_case_comes_first_with_the_part_and_factor_that_miss():
    small = [row("slow host", 8 * 2**i, 40e-6, 10e-6) for i in range(6)]
    large = [row("slow host", 2**30, 1e-3, 0.99e-3)]
    good = [row("good", 8 * 2**i, 10e-6, 10.1e-6) for i in range(6)]
    found = worst([*good, *small, *large], 2, lambda r: "<=64 KiB" if r.cells["size"] < 2**16 else ">32 MiB")
    assert [case.case for case in found] == ["slow host", "good"]
    assert found[0].signed == pytest.approx(-0.75)
    assert found[0].reason.startswith("<=64 KiB: predicted too short by one factor, 4.00: a launch mode or host")


def test_errors_that_vary_are_not_called_one_factor():
    rows = [row("a", 8.0, 1e-5, 1e-5 * f) for f in (1.1, 1.6, 2.9, 1.2)]
    assert "by factors that vary" in worst(rows, 1, lambda r: "")[0].reason


def test_repeats_tell_how_far_the_data_are_from_each_other():
    rows = [row("a", 8.0, 1.0, 1.0), row("b", 8.0, 4.0, 1.0), row("c", 16.0, 1.0, 1.0)]
    apart = spreads(rows, lambda r: (r["size"],))
    assert apart == {"a": pytest.approx(0.5), "b": pytest.approx(1.0)}  # half of, and twice, their geometric mean
    assert worst(rows, 1, lambda r: "", lambda r: (r["size"],))[0].case == "b"


def test_logarithmic_axes_are_labelled_in_plain_numbers():
    """Pictures do not read ``$`` as mathematics, which matplotlib's own labels of such axes are written in."""
    measured = np.geomspace(1e-3, 3e3, 40)
    figure = plots.accuracy(measured, measured * 1.1, ["x"] * 40)
    figure.savefig(io.BytesIO())
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        labels = [label.get_text() for label in axis.get_ticklabels(which="both")]
        assert {"0.01", "1", "1,000"} <= set(labels)
        assert not any("$" in label for label in labels)


def test_the_picture_says_in_words_how_far_rows_are():
    measured = np.geomspace(1e-5, 1.0, 50)
    figure = plots.accuracy(measured, measured * 1.1, ["x", "y"] * 25, part_name="platform")
    assert "50 rows in 2 parts (x, y): half of the rows are within 10.0%" in plots.alt_text(figure)
    left, right = figure.axes
    assert left.get_xlim() == left.get_ylim()
    assert [tick.get_text() for tick in right.get_yticklabels()] == ["x", "y"]


@pytest.mark.parametrize(("measured", "predicted"), [([], []), ([1.0, 0.0], [1.0, 1.0]), ([1.0], [-1.0])])
def test_what_cannot_be_drawn_is_an_error(measured, predicted):
    with pytest.raises(ProgramError, match="nothing to draw"):
        plots.accuracy(measured, predicted, ["a"] * len(measured))


def test_validate_draws_and_lists_the_worst(tmp_path):
    table = tmp_path / "table.csv"
    table.write_text(TABLE + ROWS)
    done = CliRunner().invoke(
        cli, ["validate", "nccl", str(table), "--worst", "1", "--plot", str(tmp_path / "x.png"), "--by", "platform"]
    )
    assert done.exit_code == 0, done.output
    assert "likely reason" in done.stdout
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.csv", "x.png"]


def test_a_picture_of_an_unknown_suffix_is_refused_before_the_work(tmp_path):
    table = tmp_path / "missing.csv"
    done = CliRunner().invoke(cli, ["validate", "steps", str(table), "--plot", str(tmp_path / "x.gif")])
    assert "is to end with .png, .svg or .pdf" in str(done.exception)
