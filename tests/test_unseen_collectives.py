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


@pytest.mark.parametrize(
    ("chosen", "rows", "publishers"), [("2", 154, 29), ("3", 123, 28), ("4", 108, 17), ("5", 30, 5)]
)
def test_a_set_is_of_many_publishers(chosen: str, rows: int, publishers: int) -> None:
    members = [row for row in unseen_rows() if row["set"] == chosen]
    assert len(members) == rows
    assert len({row["publisher"] for row in members}) == publishers


@pytest.mark.parametrize(("chosen", "earlier"), [("3", "12"), ("4", "123"), ("5", "1234")])
def test_publishers_of_a_set_are_in_no_earlier_one(chosen: str, earlier: str) -> None:
    named = {one: {row["publisher"] for row in unseen_rows() if row["set"] == one} for one in "12345"}
    assert not any(named[chosen] & named[one] for one in earlier)


def test_first_errors_of_the_fourth_set_are_kept() -> None:
    rows = [row for row in unseen_rows() if row["set"] == "4"]
    first = np.abs([float(row["first_error"]) for row in rows])
    assert round(float(np.median(first)), 2) == 0.14
    assert round(float(np.percentile(first, 90)), 2) == 0.53


def test_first_errors_of_the_fifth_set_are_kept() -> None:
    """All_to_alls over EFA by a publisher whose all_reduces EFA's constants have seen, p3dn's EFA with eight GPUs,
    A100s with four NICs and MI350X over two nodes."""
    first = np.abs([float(row["first_error"]) for row in unseen_rows() if row["set"] == "5"])
    assert round(float(np.median(first)), 2) == 0.10
    assert round(float(np.percentile(first, 90)), 2) == 0.37


@pytest.mark.parametrize(
    ("chosen", "middle", "ninth", "half", "most"),
    [
        ("2", 0.16, 0.54, (0.55, 0.68), (0.89, 0.96)),
        ("3", 0.12, 0.44, (0.52, 0.65), (0.88, 0.96)),
        ("4", 0.12, 0.46, (0.46, 0.57), (0.85, 0.93)),
        ("5", 0.11, 0.39, (0.56, 0.70), (0.89, 0.97)),
    ],
)
def test_a_set_is_predicted_as_coarsely_as_its_ranges_say(
    chosen: str, middle: float, ninth: float, half: tuple[float, float], most: tuple[float, float]
) -> None:
    """First predictions were 23, 16 and 14 % off in the median and 71, 50 and 53 % at the ninth decile; ranges held 31
    and 75 % of the second set, 44 and 93 % of the third, 44 and 84 % of the fourth, whose narrow ones (nodes of A100,
    H100 and B200) hold too few.

    Missed most: hundreds of GB200s in twenty racks, two clouds' networks, eight RTX 5090s that read each other at the
    owner's word, K80 in a virtual machine, an instance whose EFA does without GPUDirect, a poor run of A3 Mega, B200s
    whose NICs reach half of their rate.
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
    rows = [row for row in unseen_collectives() if row.publisher == "driver for RTX 4090"]
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


def test_all_to_all_over_efa_takes_what_a_publisher_measured_on_2_to_32_nodes() -> None:
    """32 MiB to 2 GiB on 16 to 256 H100s of P5: nothing was mended for them. Steps' all_to_alls over EFA are missed by
    more, which is not theirs alone."""
    errors = _chosen({"crazyguitar/aws-gpu-communication-benchmark"})
    assert len(errors) == 15
    assert np.median(np.abs(errors)) < 0.08
    assert np.abs(errors).max() < 0.4


def test_one_process_takes_longer_the_more_gpus_it_drives() -> None:
    """Small all_reduces of two, four and eight GPUs took 12, 15 and 35 us: 6 to 4 a GPU. A fixed part of 9
    us had those of two and four 20 to 60 % too slow."""
    two = [row for row in unseen_collectives() if row.cells["notes"] == "-g 2 one process"]
    small = [row.error for row in two if row.cells["size_bytes"] == "1024"]
    assert len(small) == 6
    assert np.median(small) < 0.25


def _chosen(publishers: set[str], largest: int = 2**62, kinds: tuple[str, ...] = ()) -> np.ndarray:
    """Errors of the publishers' rows up to a size, of some kinds; each publisher has one at least."""
    rows = [row for row in unseen_collectives() if row.publisher in publishers]
    rows = [row for row in rows if int(row.cells["size_bytes"]) <= largest]
    rows = [row for row in rows if not kinds or row.cells["collective"] in kinds]
    assert {row.publisher for row in rows} == publishers
    return np.array([row.error for row in rows])


def test_small_messages_over_roce_take_what_seven_publishers_measured() -> None:
    """Up to 64 KiB were 34 % too fast in the mean of publishers' logarithms: hops were InfiniBand's."""
    clouds = {"GoogleCloudPlatform/cluster-toolkit", "Oracle tutorial", "SkyPilot", "verl on GKE"}
    owners = {"RTX 6000D with ConnectX-8", "NVIDIA/dgx-spark-playbooks 103", "Dell H200"}
    errors = _chosen(clouds | owners, 2**16)
    assert np.median(np.abs(errors)) < 0.14
    assert np.abs(errors).max() < 0.3


def test_grouped_messages_over_nodes_take_what_three_publishers_measured() -> None:
    """1 KiB to 1 MiB over EFA and InfiniBand were a third too slow, a sendrecv twice: hops are as a ring's."""
    nodes = {"bottlerocket-os", "NIG supercomputer", "Vultr HGX B200"}
    rows = [row for row in unseen_collectives() if row.publisher in nodes and row.nodes > 1]
    rows = [row for row in rows if row.cells["collective"] in ("alltoall", "sendrecv")]
    small = np.abs([row.error for row in rows if int(row.cells["size_bytes"]) <= 2**20])
    assert len(small) == 11
    assert np.median(small) < 0.12
    assert small.max() < 0.5


def test_one_process_pays_for_an_alltoall_by_the_pair() -> None:
    """Two RTX 4090s took 12 us and eight H20s 58; a factor of the launches' had both told as 30 and 87."""
    assert np.abs(_chosen({"NVIDIA/nccl-tests 313", "tinygrad/open-gpu-kernel-modules 17"})).max() < 0.15


def test_one_process_launches_on_eight_amd_gpus_as_two_publishers_measured() -> None:
    """43 to 54 us up to 32 KiB, which were told 35: HIP takes longer than CUDA."""
    rows = [row for row in unseen_collectives() if row.cells["notes"] == "-g 8 one process"]
    amd = [row for row in rows if row.publisher in ("MI300X in a virtual machine", "AMD MI350X guide")]
    small = [abs(row.error) for row in amd if int(row.cells["size_bytes"]) <= 2**15]
    assert len(small) == 4
    assert max(small) < 0.16


def test_a3_mega_never_uses_ll_and_lies_between_its_publishers() -> None:
    """1 KiB took 85 us by one publisher and 236 by another: what is told of it is no nearer to either."""
    small = _chosen({"GKE A3 Mega guide in Japanese"}, 2**15)
    assert -0.45 < small.min() <= small.max() < -0.3
