"""What each dimension moves: a bar for each kind of link, and a legend of what can be seen in them."""

from __future__ import annotations

import numpy as np

from clustersim.app.plots.dimensions import traffic


def legend_of(**sent: float) -> list[str]:
    table = {
        "dimension": np.array([name.replace("_", " ") for name in sent]),
        "sent_per_gpu": np.array(list(sent.values())),
        "link_nvlink": np.array(list(sent.values())),
    }
    figure = traffic(table)
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_legend_names_no_dimension_whose_bar_is_under_a_pixel():
    """Eight bytes of the gradient norm had a colour in the legend beside 78 GiB, and none in a bar."""
    assert legend_of(EP=42e9, DP=36e9, step_end=8.0) == ["EP", "DP"]


def test_a_legend_names_every_dimension_that_is_seen():
    assert legend_of(TP=42e9, DP=36e9, step_end=1e9) == ["TP", "DP", "step end"]
