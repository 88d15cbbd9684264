"""Collectives of machines that no constant was fitted to (:mod:`tests.evidence.unseen_collectives`)."""

from __future__ import annotations

import numpy as np
import pytest

from clustersim.collectives.nccl.view import PXB, SYS, peer_level
from tests.evidence.unseen_collectives import unseen_collectives, unseen_rows

RACKS = {"CoreWeave GB200", "Oracle GB200", "Oracle GB300"}


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


@pytest.mark.parametrize(("chosen", "rows", "publishers"), [("2", 154, 29), ("3", 123, 28)])
def test_a_set_is_of_many_publishers(chosen: str, rows: int, publishers: int) -> None:
    members = [row for row in unseen_rows() if row["set"] == chosen]
    assert len(members) == rows
    assert len({row["publisher"] for row in members}) == publishers


def test_publishers_of_the_third_set_are_in_no_other() -> None:
    named = {chosen: {row["publisher"] for row in unseen_rows() if row["set"] == chosen} for chosen in "123"}
    assert not named["3"] & (named["1"] | named["2"])


@pytest.mark.parametrize(
    ("chosen", "middle", "ninth", "half", "most"),
    [("2", 0.18, 0.54, (0.55, 0.68), (0.89, 0.96)), ("3", 0.14, 0.46, (0.44, 0.55), (0.89, 0.96))],
)
def test_a_set_is_predicted_as_coarsely_as_its_ranges_say(
    chosen: str, middle: float, ninth: float, half: tuple[float, float], most: tuple[float, float]
) -> None:
    """First predictions were 23 and 16 % off in the median and 71 and 50 % at the ninth decile; ranges held 31 and 75 %
    of the second set, 44 and 93 % of the third, whose narrow ones (nodes of A100 and H100) hold too few.

    Missed most: hundreds of GB200s in twenty racks, two clouds' networks, eight RTX 5090s that read each other at the
    owner's word, K80 in a virtual machine, an instance whose EFA does without GPUDirect, alltoall over EFA.
    """
    rows = [row for row in unseen_collectives() if row.chosen == chosen]
    errors = np.array([row.error for row in rows])
    off = np.abs(errors)
    assert np.median(off) < middle
    assert np.percentile(off, 90) < ninth
    far = np.abs(1.0 / (1.0 + errors) - 1.0)
    assert half[0] < np.mean(far <= [row.p50 for row in rows]) < half[1]
    assert most[0] < np.mean(far <= [row.p90 for row in rows]) < most[1]


def test_racks_that_nics_join_take_what_three_publishers_measured() -> None:
    """1 KiB to 16 GiB on two racks of 64 or 72 GB200 and GB300 were predicted 17 to 69 % too fast, 45 in the median."""
    racks = [row for row in unseen_collectives() if row.cells["collective"] == "all_reduce" and row.chosen == "2"]
    two = [row for row in racks if row.cells["publisher"] in RACKS and row.cells["ranks"] in ("128", "144")]
    assert {row.cells["publisher"] for row in two} == RACKS
    assert len(two) == 10
    assert np.median([abs(row.error) for row in two]) < 0.16
    assert max(abs(row.error) for row in two) < 0.3


def test_peer_to_peer_through_root_ports_takes_what_a_publisher_measured() -> None:
    """1 to 256 MiB of four RTX 4090s were predicted as staged in host memory, 42 to 74 % too slow."""
    rows = [row for row in unseen_collectives() if row.cells["topology"].endswith("p2p-rtx4090.toml")]
    assert len(rows) == 5
    assert max(abs(row.error) for row in rows if int(row.cells["size_bytes"]) >= 2**20) < 0.16


@pytest.mark.parametrize(
    ("vendor", "gpus", "version", "amd", "lets"),
    [
        ("amd", 8, (2, 22), False, True),
        ("amd", 8, (2, 23), False, False),
        ("amd", 2, (2, 28), False, True),
        ("intel", 2, (2, 22), False, False),
        ("amd", 8, (2, 26), True, True),
    ],
)
def test_nccl_reads_through_a_cpu_by_its_vendor_and_its_own_version(
    vendor: str, gpus: int, version: tuple[int, int], amd: bool, lets: bool
) -> None:
    """As NCCL's paths.cc has had it, and as RCCL took the change of 2.23 back."""
    assert peer_level(vendor, gpus, version, amd) == (SYS if lets else PXB)


def test_efa_through_host_memory_takes_what_two_publishers_measured() -> None:
    """One GPU on each of two nodes: 59 and 67 us of 1 KiB were predicted as 219, and 2.6 and 3.1 GB/s as 9.3."""
    rows = [row for row in unseen_collectives() if row.net == "efa_host" and row.chosen == "2"]
    assert {row.publisher for row in rows} == {"AWS EFA guide of p3dn", "g4dn.metal with EFA"}
    assert max(abs(row.error) for row in rows) < 0.2


def test_one_process_takes_longer_the_more_gpus_it_drives() -> None:
    """Small all_reduces of two, four and eight GPUs took 12, 15 and 35 us: 6 to 4 a GPU. A fixed part of 9
    us had those of two and four 20 to 60 % too slow."""
    two = [row for row in unseen_collectives() if row.cells["notes"] == "-g 2 one process"]
    small = [row.error for row in two if row.cells["size_bytes"] == "1024"]
    assert len(small) == 5
    assert np.median(small) < 0.25
