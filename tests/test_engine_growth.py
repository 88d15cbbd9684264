"""Cost grows no faster than ranks x ops; counted, so that it is the same on every machine."""

from __future__ import annotations

import growth
import pytest


@pytest.mark.parametrize("way", growth.WAYS)
def test_what_is_handled_grows_no_faster_than_ranks_times_ops(way):
    (small, cost), (large, more) = (growth.counted(way, nodes) for nodes in (4, 16))
    assert more / cost <= large / small
    assert more <= large  # an op of all its ranks is handled at once, where they do not go their own ways
