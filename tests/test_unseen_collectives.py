"""Collectives of machines that no constant was fitted to (:mod:`tests.evidence.unseen_collectives`)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.evidence.unseen_collectives import unseen_collectives, unseen_rows


@pytest.mark.parametrize(
    ("topology", "middle", "largest"),
    [("hgx-b300", 0.08, 0.6), ("hgx-b200", 0.02, 0.05)],
)
def test_a_machine_that_nobody_tuned_for_is_predicted(topology: str, middle: float, largest: float) -> None:
    """Half of the rows within the first figure, all within the second: 8 MiB of four B300 is what is missed most."""
    rows = [row for row in unseen_collectives() if row.chosen == "1" and row.cells["topology"] == topology]
    off = np.abs([row.error for row in rows])
    assert np.median(off) < middle
    assert off.max() < largest


def test_the_second_set_is_of_many_publishers() -> None:
    rows = [row for row in unseen_rows() if row["set"] == "2"]
    assert len(rows) == 162
    assert len({row["publisher"] for row in rows}) == 31
