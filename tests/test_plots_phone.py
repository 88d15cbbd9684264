"""Pictures for a phone: names beside each other, and room for what is drawn."""

from __future__ import annotations

import contextlib
import io
import itertools
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from player import link_use

import clustersim
from clustersim.app import plots
from clustersim.app.plots.dimensions import mesh_on_machine
from clustersim.app.plots.drawing import SEEN, narrow
from clustersim.app.plots.pipeline import shade
from clustersim.core.facts import DimensionGroups, MeshMap


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


def test_many_passes_beside_each_other_keep_their_colour():
    """Of 640 passes a row nothing but their white edges was seen."""
    run = clustersim.load("1f1b_gpt2_xl_1x8_a100", {"parallel.microbatches": 128}).run()
    with narrow():
        figure = plots.pipeline_grid(run.timeline)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=80)
    colours = np.asarray(Image.open(picture).convert("RGB"), dtype=np.int64)
    box = figure.axes[0].get_position()
    height, width, _ = colours.shape
    left, right = (int(width * (box.x0 + share * box.width)) for share in (0.4, 0.6))
    inside = colours[int(height * (1 - box.y1)) : int(height * (1 - box.y0)), left:right]
    spread = inside.max(axis=2) - inside.min(axis=2)
    assert np.percentile(spread, 75) > 40


def test_a_picture_file_has_the_colours_that_were_drawn(tmp_path):
    """Of hundreds of colours in a picture 256 were kept, and two marks of a legend became one."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(6, 3))
    axes = figure.add_subplot()
    axes.imshow(np.linspace(0, 1, 4000).reshape(40, 100), cmap="viridis", aspect="auto")
    shades = [shade(place / 4, 0.86) for place in range(5)]
    axes.legend(handles=[Patch(fc=colour, label="m") for colour in shades], loc="lower right")
    plots.save(figure, tmp_path / "many.png", dpi=180)
    kept = {colour for _, colour in Image.open(tmp_path / "many.png").convert("RGB").getcolors(2**24)}
    wanted = np.array([[round(channel * 255) for channel in colour] for colour in shades])
    nearest = [np.abs(np.array(list(kept)) - colour).max(axis=1).min() for colour in wanted]
    assert max(nearest) <= SEEN
    few = Figure(figsize=(6, 3))
    few.add_subplot().barh([0, 1], [2, 3])
    plots.save(few, tmp_path / "few.png")
    assert Image.open(tmp_path / "few.png").mode == "P"  # small where colours are few


@pytest.mark.parametrize("phone", [True, False])
def test_machines_of_a_mesh_are_named_beside_each_other_and_nothing_ends_outside(phone):
    """Names of eight machines ran into each other, and the sentence below was cut off on both sides."""
    ranks = list(range(64))
    tensor = DimensionGroups("tp", 2, ["NVSwitch"], ranks[:2], [rank // 2 for rank in ranks])
    replicas = DimensionGroups("dp", 2, ["NIC (ib)"], [0, 32], [rank % 32 for rank in ranks])
    with narrow() if phone else contextlib.nullcontext():
        figure = mesh_on_machine(MeshMap(64, 8, [tensor, replicas]))
    figure.savefig(io.BytesIO(), format="png")
    axes = figure.axes[0]
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    assert len(boxes) == 8
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    words = axes.xaxis.label.get_window_extent()
    assert 0 <= words.x0 < words.x1 <= figure.bbox.x1


@pytest.mark.parametrize("phone", [True, False])
def test_titles_of_a_large_mesh_do_not_run_into_each_other(phone):
    """Of sixteen machines each dimension has a panel: three beside each other are too many for a phone."""
    ranks = list(range(128))
    replicas = DimensionGroups("dp", 128, ["NVSwitch", "NIC (ib)"], ranks, [0] * 128)
    experts = DimensionGroups("ep", 8, ["NVSwitch"], ranks[:8], [rank // 8 for rank in ranks])
    with narrow() if phone else contextlib.nullcontext():
        figure = mesh_on_machine(MeshMap(128, 8, [replicas, experts]))
    figure.savefig(io.BytesIO(), format="png")
    titles = [text for axes in figure.axes for text in (axes.title, axes._left_title) if text.get_text()]
    boxes = [text.get_window_extent() for text in [*titles, figure._supxlabel]]
    assert len(boxes) == 3
    assert all(0 <= box.x0 < box.x1 <= figure.bbox.x1 for box in boxes)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
