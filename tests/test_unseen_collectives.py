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
    assert len(rows) == 154
    assert len({row["publisher"] for row in rows}) == 29


def test_a_second_set_is_predicted_as_coarsely_as_its_ranges_say() -> None:
    """First predictions were 23 % off in the median and 71 % at the ninth decile, and ranges held 31 and 75 %.

    Missed most: racks joined by NICs, a cloud's network that its own tables have five times as fast, K80 in a virtual
    machine, NVLS and NVLSTree pinned for messages that nobody would use them for.
    """
    rows = [row for row in unseen_collectives() if row.chosen == "2"]
    off = np.abs([row.error for row in rows])
    assert np.median(off) < 0.21
    assert np.percentile(off, 90) < 0.65
    far = np.abs(1.0 / (1.0 + np.array([row.error for row in rows])) - 1.0)
    assert 0.45 < np.mean(far <= [row.p50 for row in rows]) < 0.65
    assert 0.87 < np.mean(far <= [row.p90 for row in rows]) < 0.97


def test_efa_through_host_memory_takes_what_two_publishers_measured() -> None:
    """One GPU on each of two nodes: 59 and 67 us of 1 KiB were predicted as 219, and 2.6 and 3.1 GB/s as 9.3."""
    rows = [row for row in unseen_collectives() if row.net == "efa_host"]
    assert {row.publisher for row in rows} == {"AWS EFA guide of p3dn", "g4dn.metal with EFA"}
    assert max(abs(row.error) for row in rows) < 0.2


def test_one_process_takes_longer_the_more_gpus_it_drives() -> None:
    """Small all_reduces of two, four and eight GPUs took 12, 15 and 35 us: 6 to 4 a GPU. A fixed part of 9
    us had those of two and four 20 to 60 % too slow."""
    two = [row for row in unseen_collectives() if row.cells["notes"] == "-g 2 one process"]
    small = [row.error for row in two if row.cells["size_bytes"] == "1024"]
    assert len(small) == 4
    assert np.median(small) < 0.25
