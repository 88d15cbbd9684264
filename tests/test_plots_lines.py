"""Curves named at their ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.app import plots
from clustersim.app.plots.lines import GAP, _apart, _far_enough
from clustersim.core.errors import ProgramError


def test_curves_hold_their_points_in_order_and_are_named_where_they_end():
    devices = plots.Axis("devices", log=True)
    figure = plots.lines({"a": ([4, 2, 8], [1.0, 0.5, 2.0]), "b": ([2, 8], [0.25, 0.125])}, x=devices)
    axes = figure.axes[0]
    assert [line.get_xdata().tolist() for line in axes.lines] == [[2, 4, 8], [2, 8]]
    assert axes.lines[0].get_ydata().tolist() == [0.5, 1.0, 2.0]
    assert sorted(text.get_text() for text in axes.texts) == ["a  2 s", "b  125 ms"]
    assert plots.alt_text(figure) == ("Time over devices. a: 500 ms at 2, 2 s at 8; b: 250 ms at 2, 125 ms at 8.")


def test_units_are_those_people_use():
    figure = plots.lines(
        {"a": ([2**20, 2**30], [1e9, 2.5e11])},
        x=plots.Axis("message [bytes]", log=True),
        y=plots.Axis("bus bandwidth [bytes/s]", log=True),
    )
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "bus bandwidth [GB/s]"
    assert axes.get_xlabel() == "message"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1 MiB", "1 GiB"]
    assert axes.texts[0].get_text() == "a  250 GB/s"
    share = plots.lines({"a": ([1, 2], [10, 12.5])}, y="error [%]").axes[0]
    assert (share.get_title(loc="left"), share.texts[0].get_text()) == ("error [%]", "a  12.5 %")


def test_large_counts_are_written_out():
    axes = plots.lines({"a": ([64, 1024, 16384], [1.0, 1.0, 1.0])}, x=plots.Axis("GPUs", log=True)).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["64", "1,024", "16,384"]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_names_never_run_into_each_other(heights):
    spread = _apart(np.sort(np.array(heights)))
    assert (np.diff(spread) >= GAP * 0.999).all()
    assert spread[-1] <= 1.0


@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=60, unique=True))
def test_ticks_are_places_of_points_and_the_last_is_one(places):
    at = np.sort(np.array(places))
    shown = _far_enough(at, logarithmic=True)
    assert set(shown) <= set(at.tolist())
    assert shown[-1] == at[-1]
    assert len(shown) <= 10


@pytest.mark.parametrize(
    ("curves", "log", "said"),
    [
        ({}, False, "no curves"),
        ({"a": ([1, 2], [1])}, False, "curve 'a' needs as many values as places"),
        ({"a": ([1, 2], [1, float("nan")])}, False, "all of them numbers"),
        ({"a": ([0, 2], [1, 1])}, True, "not above zero"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(curves, log, said):
    with pytest.raises(ProgramError, match=said):
        plots.lines(curves, x=plots.Axis("devices", log))
