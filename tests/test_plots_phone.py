"""Pictures for a phone: names beside each other, and room for what is drawn."""

from __future__ import annotations

import contextlib
import io
import itertools
from dataclasses import replace

import numpy as np
import pytest
from player import link_use

from clustersim.app import plots
from clustersim.app.plots.drawing import narrow


def pipeline_memory():
    """Memory over the actions of a stage of 1F1B, whose forwards and backwards alternate."""
    middle = [name for i in range(16) for name in (f"B {i}.0", f"F {i + 8}.0")]
    moments = ["start", *(f"F {i}.0" for i in range(8)), *middle, *(f"B {i}.0" for i in range(16, 24)), "optimizer"]
    held = np.linspace(1.0, 2.0, len(moments)) * 2.0**30
    return plots.memory_over_time(moments, {"parameters": held, "gradients": held, "activations": held}, 2.0**36)


@pytest.mark.parametrize("phone", [True, False])
def test_names_of_phases_are_beside_each_other_and_areas_have_the_width_of_the_picture(phone):
    with narrow() if phone else contextlib.nullcontext():
        figure = pipeline_memory()
    figure.savefig(io.BytesIO(), format="png")
    axes = figure.axes[0]
    assert axes.get_position().width > (0.8 if phone else 0.7)
    boxes = sorted((text.get_window_extent() for text in axes.texts if text.get_va() == "top"), key=lambda box: box.x0)
    assert len(boxes) > 2
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    # The peak is the last moment: the words over it end there, and begin behind the axis.
    peak = next(text for text in axes.texts if text.get_text().startswith("peak"))
    assert axes.get_window_extent().x0 < peak.get_window_extent().x0
    assert peak.get_window_extent().x1 < axes.get_window_extent().x1


def test_a_heat_map_of_a_phone_has_more_room_for_times_than_for_names():
    use = link_use([(0, 0.0, 4.0, 5.0), (1, 3.0, 5.0, 4.0)])
    use = replace(use, link_names=("node0/nvswitch0 -> node0/gpu0 of a", "node0/nvswitch0 -> node0/gpu1 of b"))
    with narrow():
        figure = plots.link_heat(use)
    figure.savefig(io.BytesIO(), format="png")
    assert figure.axes[0].get_position().width > 0.55
    assert figure.axes[1].get_position().y1 < figure.axes[0].get_position().y0  # the scale is below


def test_entries_of_a_legend_are_read_row_by_row_on_a_phone_as_on_a_desk():
    from clustersim.app.plots.drawing import in_rows

    def read(ncols, shown):
        """Matplotlib fills columns from the top, the first ones with one entry more."""
        rows, longer = divmod(len(shown), ncols)
        heights = [rows + (column < longer) for column in range(ncols)]
        begins = [sum(heights[:column]) for column in range(ncols)]
        places = [(row, column) for row in range(rows + 1) for column in range(ncols) if row < heights[column]]
        return [shown[begins[column] + row] for row, column in places]

    for count in range(2, 12):
        for ncols in range(1, count + 1):
            assert read(ncols, in_rows(range(count), ncols)) == list(range(count))
