"""Small all_reduces of AMD's meshes, which RCCL makes by scripts of its own in place of a ring (MSCCL)."""

from __future__ import annotations

from clustersim.collectives.base import Group
from clustersim.collectives.paths import placement

SCRIPTED_FROM = 1024.0
SCRIPTED_STEPS = 2.0
"""Steps of an all_reduce of so many bytes and more in which each of eight GPUs sends to all others at once: RCCL brings
scripts for payloads that LL carries on AMD's meshes (MSCCL, rccl tools/msccl-algorithms), in place of a ring's 14
steps. Eight MI300X take 22.9 us for 512 bytes, and 13.1 to 13.3 for 1 to 32 KiB."""
SCRIPTED_GPUS = 8


def scripted(protocol: str, nbytes: float, group: Group) -> bool:
    """Whether RCCL's scripts make an all_reduce: of all eight of AMD's GPUs of a node, each linked to each other."""
    place = placement(group)
    if protocol != "LL" or nbytes < SCRIPTED_FROM or place.age != "amd" or place.islands > 1:
        return False
    links = place.system.views[0].nvlinks
    pairs = SCRIPTED_GPUS * (SCRIPTED_GPUS - 1)
    return group.size == SCRIPTED_GPUS and sum(count > 0 for row in links for count in row) == pairs
