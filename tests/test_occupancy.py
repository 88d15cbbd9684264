"""How long some of many spans are open, span by span over all ranks and over a table of both: the same length."""

from __future__ import annotations

import numpy as np
import pytest

from clustersim.core.blocks import Block, columns
from clustersim.core.sheets import BlockColumns, ColumnGlance
from clustersim.explain import occupancy
from clustersim.explain.occupancy import SWEPT, _union, covered


def spans(rng, ranks, count, shuffled):
    """(count, ranks) begins and ends; each rank has them in an order of its own where ``shuffled``."""
    begin = np.sort(rng.random((count, ranks)), axis=0)
    begin = rng.permuted(begin, axis=0) if shuffled else begin + 0.02 * rng.random(begin.shape)
    return begin, begin + rng.random(begin.shape) * 2.0 / count


def held_spans(begin, end):
    """Each span as that of an op."""
    count, ranks = begin.shape
    made = columns([*begin, *end], [None] * (2 * count))
    of_ops = zip(made[:count], made[count:], strict=True)
    blocks = [Block(op, np.arange(ranks), (left, left, right)) for op, (left, right) in enumerate(of_ops)]
    all_columns = BlockColumns(blocks, np.arange(count))
    return [(ColumnGlance(np.arange(ranks), all_columns), tuple(all_columns.which[1:]))]


def lengths(begin, end, window):
    held = held_spans(begin, end)
    return _union(begin.shape[1], None, held, *window)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("window", [(-np.inf, np.inf), (0.2, 0.7)])
def test_many_ranks_are_covered_as_long_as_a_few_of_them_are(shuffled, window):
    begin, end = spans(np.random.default_rng(0), SWEPT, 40, shuffled)
    many = lengths(begin, end, window)
    few = np.concatenate([lengths(begin[:, at : at + 64], end[:, at : at + 64], window) for at in range(0, SWEPT, 64)])
    assert many == pytest.approx(few, rel=1e-12)
    assert many == pytest.approx(covered(np.clip(begin.T, *window), np.clip(end.T, *window)), rel=1e-12)


def test_spans_nearly_in_order_need_no_table(monkeypatch):
    monkeypatch.setattr(BlockColumns, "stacked", None)
    begin, end = spans(np.random.default_rng(1), SWEPT, 40, False)
    assert (begin[1:] < begin[:-1]).any()
    assert lengths(begin, end, (0.0, 3.0)) == pytest.approx(covered(begin.T, end.T), rel=1e-12)


def test_the_length_is_that_of_the_points_inside_some_span():
    begin = np.tile([[0.0], [1.0], [5.0]], SWEPT)
    end = np.tile([[2.0], [3.0], [6.0]], SWEPT)
    assert lengths(begin, end, (-1.0, 9.0)) == pytest.approx(np.full(SWEPT, 4.0))
    assert lengths(begin, end, (2.5, 5.5)) == pytest.approx(np.full(SWEPT, 1.0))


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_table_of_all_ranks_gives_the_bits_that_tables_of_a_few_give(shuffled, monkeypatch):
    begin, end = spans(np.random.default_rng(2), 48, 40, shuffled)
    window = None, held_spans(begin, end), 0.1, 0.9
    asked = []
    plain = BlockColumns.stacked
    monkeypatch.setattr(
        BlockColumns, "stacked", lambda self, numbers, places: asked.extend(numbers) or plain(self, numbers, places)
    )
    whole = [occupancy._tabled(slice(0, 48), *window) for _ in range(3)]
    assert len(asked) == len(set(asked)) == 80  # once, however often they are asked for
    few = [occupancy._tabled(slice(first, first + 16), *window) for first in (0, 16, 32)]
    assert all(lengths_of.tobytes() == np.concatenate(few).tobytes() for lengths_of in whole)
