"""A plan's options as a picture of money against days."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from clustersim.app import plots
from clustersim.core.errors import ProgramError

OPTIONS = [
    SimpleNamespace(option="1 x a", machine="a", gpus=8, days=8.0, usd=100.0),
    SimpleNamespace(option="2 x a", machine="a", gpus=16, days=4.0, usd=110.0),
    SimpleNamespace(option="2 x a, slow", machine="a", gpus=16, days=5.0, usd=130.0),
    SimpleNamespace(option="1 x b", machine="b", gpus=8, days=2.0, usd=150.0),
    SimpleNamespace(option="too large", machine="b", gpus=8, days=None, usd=None),
]


def test_the_front_is_full_and_numbered_and_the_rest_is_faint():
    said = SimpleNamespace(options=OPTIONS, front=[OPTIONS[3], OPTIONS[1], OPTIONS[0]])
    figure = plots.tradeoff(said, deadline=6.0, budget=140.0, title="plan")
    axes = figure.axes[0]
    points = [tuple(map(tuple, some.get_offsets().tolist())) for some in axes.collections]
    assert points == [((5.0, 130.0),), ((8.0, 100.0), (4.0, 110.0)), (), ((2.0, 150.0),)]
    assert [text.get_text().strip() for text in axes.texts] == ["8", "16", "8", "deadline", "budget"]
    assert [line.get_xdata()[0] for line in axes.lines][:1] == [6.0]
    alt = plots.alt_text(figure)
    assert alt.startswith(
        "Cost against days of 4 options. On the front, fastest first: 1 x b: 2.00 days, 150 USD; 2 x a"
    )


def test_options_without_a_price_cannot_be_drawn():
    with pytest.raises(ProgramError, match="no option has both days and a price"):
        plots.tradeoff(SimpleNamespace(options=OPTIONS[-1:], front=[]))
