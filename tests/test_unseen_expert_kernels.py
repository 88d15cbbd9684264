"""Kernels of DeepEP and HybridEP that no constant was fitted to (:mod:`tests.evidence.unseen_expert_kernels`)."""

from __future__ import annotations

import numpy as np

from tests.evidence.unseen_expert_kernels import unseen_expert_kernels


def test_the_table_is_of_three_publishers() -> None:
    rows = unseen_expert_kernels()
    assert len(rows) == 86
    assert len({row.publisher for row in rows}) == 3


def test_first_errors_are_kept() -> None:
    first = np.abs([row.first_error for row in unseen_expert_kernels()])
    assert round(float(np.median(first)), 3) == 0.073
    assert round(float(np.percentile(first, 90)), 2) == 0.38
