"""Into how many parts NCCL splits a peer's bytes, by machine, ranks and version."""

import pytest

from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group
from clustersim.collectives.nccl.p2p_parts import p2p_channels, parts_of
from clustersim.collectives.paths import placement

MIB = 2.0**20


def system(name, ranks):
    machine = fabrics.load(name, nodes=1)
    return placement(Group(machine, machine.node_gpus(0)[:ranks])).system


@pytest.mark.parametrize(
    ("name", "ranks", "channels"),
    [
        ("hgx-a100", 8, (32, 32)),  # 24 for collectives, and for the 12 links of a peer
        ("hgx-h100", 8, (32, 32)),
        ("hgx-h100", 2, (32, 32)),
        ("polaris-a100", 4, (32, 8)),  # four links to each peer
        ("alps-gh200", 4, (32, 16)),  # six, of which a power of two is made
        ("dgx-1v", 8, (16, 2)),  # some peers have no link
        ("pcie-a100", 8, (2, 2)),
    ],
)
def test_channels_are_laid_by_links_and_are_powers_of_two(name, ranks, channels):
    assert p2p_channels(system(name, ranks)) == channels


@pytest.mark.parametrize(
    ("version", "ranks", "nbytes", "expected"),
    [
        ((2, 29), 8, 2.0**14, ("LL", 1, 2.0**14)),
        ((2, 29), 8, 2.0**14 + 1, ("Simple", 1, 2.0**14 + 1)),
        ((2, 29), 8, 2.0**17, ("Simple", 2, 2.0**16)),
        ((2, 29), 8, 64 * MIB, ("Simple", 4, 16 * MIB)),  # four of 32 channels, as others have theirs
        ((2, 29), 8, 128 * MIB, ("Simple", 8, 16 * MIB)),
        ((2, 29), 8, 2048 * MIB, ("Simple", 32, 64 * MIB)),
        ((2, 29), 2, 2 * MIB, ("Simple", 16, 2.0**17)),
        ((2, 27), 8, 2.0**18, ("LL", 4, 2.0**16)),  # 32 channels times 16 KiB go by LL
        ((2, 27), 8, 2.0**19 + 4, ("Simple", 4, 2.0**17 + 1)),
        ((2, 14), 8, 2.0**17, ("Simple", 2, 2.0**16)),
        ((2, 14), 8, 1.5 * 2**16, ("Simple", 2, 2.0**16)),  # the second is of 32 KiB
        ((2, 12), 8, 2.0**10, ("Simple", 1, 2.0**10)),  # no LL yet
        ((2, 12), 8, 2 * MIB, ("Simple", 4, 2.0**19)),
        ((2, 7), 2, 3 * MIB, ("Simple", 2, 2 * MIB)),
        ((2, 7), 8, 32 * MIB, ("Simple", 16, 2 * MIB)),
    ],
)
def test_a_peers_bytes_are_split_as_each_version_does(version, ranks, nbytes, expected):
    parts = parts_of(nbytes, ranks, system("hgx-h100", ranks), version)
    assert (parts.protocol, parts.channels, parts.nbytes) == expected


def test_parts_are_a_quarter_where_a_peer_is_reached_over_pcie():
    assert parts_of(2.0**16, 8, system("pcie-a100", 8), (2, 29)).channels == 1
    assert parts_of(2.0**16, 2, system("pcie-a100", 2), (2, 29)).nbytes == 2.0**15
