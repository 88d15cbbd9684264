"""Memory of several runs as bars: as long as what is held, and what is too much says so."""

from __future__ import annotations

import pytest

from clustersim.app import plots
from clustersim.core.errors import ProgramError

GIB = 2**30


def test_bars_are_as_long_as_what_is_held_and_too_much_is_named():
    runs = {
        "ddp": {"parameters": 30 * GIB, "optimizer_states": 60 * GIB, "nothing": 0},
        "fsdp": {"parameters": 10 * GIB},
    }
    figure = plots.footprints(runs, 80 * GIB, "two")
    axes = figure.axes[0]
    ends = {}
    for patch in axes.patches:
        y = round(patch.get_y() + patch.get_height() / 2)
        ends[y] = max(ends.get(y, 0.0), patch.get_x() + patch.get_width())
    assert ends == {1: 90.0, 0: 10.0}
    words = [text.get_text() for text in axes.texts]
    assert words == [" 90 GiB, too much", " 10 GiB", "80 GiB of the GPU"]
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["parameters", "optimizer states"]
    assert plots.alt_text(figure) == (
        "Memory of one GPU. ddp: 90 GiB, parameters 30 GiB, optimizer states 60 GiB; fsdp: 10 GiB, parameters 10 GiB. "
        "The GPU has 80 GiB."
    )


@pytest.mark.parametrize("runs", [{}, {"a": {}}, {"a": {"parameters": 0.0}}])
def test_nothing_held_is_nothing_to_draw(runs):
    with pytest.raises(ProgramError, match="nothing holds memory"):
        plots.footprints(runs)


def test_what_holds_memory_has_colours_of_its_own():
    from clustersim.app.plots.style import kernels, palette, part_styles, series
    from clustersim.core.memory_parts import MEMORY_PARTS, part_colours

    taken = {*palette.values(), *kernels.values(), *series}
    colours = part_colours()
    assert len(set(colours.values())) == len(colours) == len(MEMORY_PARTS)
    assert not taken & set(colours.values())
    mixed = part_styles(["parameters", "anything", "activations"])
    assert (mixed["parameters"].face, mixed["activations"].face) == (colours["parameters"], colours["activations"])
    assert mixed["anything"].hatch  # a plain one would be a phase's
    assert not part_styles(["this", "that"])["this"].hatch
