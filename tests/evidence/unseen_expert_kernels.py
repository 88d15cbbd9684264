"""Kernels of DeepEP and HybridEP as three publishers measured them, and what is predicted of them.

Each row of ``tests/data/unseen_expert_kernels.csv`` has the rate that its publisher gives: bytes of the copies of a
token to the nodes (``rdma``) or ranks (``nvlink``) that want it, its own among them, over the kernel's time. No
constant was fitted to them, and ``first_error`` is of the row's first prediction.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from clustersim.core.texts import Table
from clustersim.training.parallel import Routing
from clustersim.training.partition.dispatch import ExpertSpread, Mixture
from clustersim.training.partition.routing import ExpertRouter, distinct, routed
from tests.evidence.expert_score import BYTES, FULL_WIDTH, exchange_seconds, group_of
from tests.tables import table_rows

TABLE = Path(__file__).parents[1] / "data" / "unseen_expert_kernels.csv"


class UnseenExpertKernel(msgspec.Struct, frozen=True):
    """A row with what was predicted of it: ``error`` is predicted over published time minus 1, ``first_error`` that of
    the first prediction."""

    cells: Table
    publisher: str
    nodes: int
    error: float
    first_error: float


@cache
def unseen_expert_kernels() -> tuple[UnseenExpertKernel, ...]:
    """Every row, predicted."""
    return tuple(map(_predicted, table_rows(TABLE)))


def _predicted(row: Table) -> UnseenExpertKernel:
    spread = _spread(row)
    nodes = int(row["nodes"])
    group = group_of(row["topology"], nodes, spread.ep)
    width = BYTES["bf16"] if row["kind"] in FULL_WIDTH else BYTES[row["dtype"]]
    error = exchange_seconds(spread, group, row["kind"], width) / _measured(row, spread, width) - 1.0
    return UnseenExpertKernel(row, row["publisher"], nodes, error, float(row["first_error"] or error))


def _spread(row: Table) -> ExpertSpread:
    tokens, hidden, experts, chosen, ranks, nodes, groups, sms = (
        int(row[name]) for name in ("tokens", "hidden", "experts", "topk", "ranks", "nodes", "groups", "sms")
    )
    mixture = Mixture(tokens, hidden, hidden, experts, chosen, groups, min(groups, MOST_GROUPS))
    balanced = routed(ExpertRouter(Routing(kind="balanced"), experts, chosen, ranks, float(tokens)))
    return ExpertSpread(mixture, ranks, 1, float(tokens), balanced, ranks // nodes, "flex", row["library"], True, sms)


MOST_GROUPS = 4
"""Groups of experts that a token may choose of, where its choice is limited to groups at all (DeepEP's tests)."""


def _measured(row: Table, spread: ExpertSpread, width: float) -> float:
    """Seconds [s] of a row's rate."""
    mixture = spread.mixture
    parts = int(row["nodes"]) if row["counted"] == "rdma" else spread.ep
    share = mixture.group_limit / mixture.groups if mixture.groups else 1.0
    copies = distinct(round(parts * share), round(mixture.experts * share), mixture.per_token)
    return mixture.tokens * mixture.hidden * width * copies / (float(row["gb_s"]) * 1e9)
