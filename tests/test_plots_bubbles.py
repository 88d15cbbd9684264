"""The parts of a bubble in pictures."""

from __future__ import annotations

from clustersim.app.plots.stages import bubble_style
from clustersim.explain.where import BUBBLES


def test_parts_of_a_bubble_differ_by_more_than_a_shade_of_grey() -> None:
    """Fill, drain and tail were three greys without a hatch."""
    hatches = [bubble_style(part).hatch for part in BUBBLES]
    assert len(set(hatches)) == len(BUBBLES)
