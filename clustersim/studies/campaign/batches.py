"""Replicas in batches, over a crew and kept in a folder: what was played before is not played again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from clustersim.core.errors import ClusterSimError
from clustersim.core.outputs import Folder
from clustersim.core.texts import decoded
from clustersim.scenario.run.identity import Identity, identity
from clustersim.studies.campaign.job import Campaign
from clustersim.studies.campaign.ledger import PARTS, ReplicaRuns, joined
from clustersim.studies.campaign.many import play
from clustersim.studies.sweep.crews import Executor, crew
from clustersim.studies.sweep.driving import Driver
from clustersim.studies.sweep.row import line
from clustersim.studies.sweep.store import Store

Told = Callable[[int, int], None]
BATCH = 500
"""Replicas of a batch: it has its own seed, so that the replicas of a campaign do not depend on how many are asked for
or who plays them."""


class _ReplicaColumns(msgspec.Struct):
    elapsed: list[float]
    ledger: list[list[float]]
    failures: list[int]
    finished: list[bool]


class _ReplicaRow(msgspec.Struct):
    result: _ReplicaColumns


def batches(replicas: int) -> list[tuple[int, int]]:
    """(number, replicas) of each batch."""
    return [(i, min(BATCH, replicas - i * BATCH)) for i in range(-(-replicas // BATCH))]


@dataclass(frozen=True)
class CampaignOptions:
    """How a campaign is played: replicas, seed, processes, and whether questions are asked beside it."""

    replicas: int = 1000
    seed: int = 0
    jobs: int = 1
    what_if: bool = False


def played(
    campaign: Campaign,
    asked: CampaignOptions,
    folder: Folder | None = None,
    *,
    executor: Executor | None = None,
    told: Told = lambda done, total: None,
) -> ReplicaRuns:
    """Play a campaign.

    folder : where batches are kept and found again. executor : as of :func:`clustersim.studies.sweep.sweep`.
    told : called with (batches there, batches in all).

    Raises :class:`ClusterSimError` where the folder cannot be written or is of another campaign.
    """
    wanted = batches(asked.replicas)
    seed = asked.seed
    if folder is None:
        return joined([play(campaign, n, seed, batch) for batch, n in wanted])
    store = Store(folder.path)
    keys = {_identity(folder.manifest.digest, seed, *batch).key: batch for batch in wanted}
    with closing(crew(executor, asked.jobs)) as team, store.writing(folder) as writer:
        stored_keys = store.keys()
        left = [(key, *batch) for key, batch in keys.items() if key not in stored_keys]
        done = len(keys) - len(left)

        def took(lines: Sequence[bytes]) -> None:
            """Write lines, and tell how far it is."""
            nonlocal done
            writer.append(lines)
            done += len(lines)
            told(done, len(keys))

        Driver(team, partial(_batch, campaign, folder.manifest.digest, seed), took).run(iter(left))
    return _kept(store, keys)


def _identity(digest: str, seed: int, batch: int, n: int) -> Identity:
    return identity({"seed": seed, "batch": batch, "replicas": n}, {"campaign": digest})


def _batch(
    campaign: Campaign, digest: str, seed: int, left: Sequence[tuple[str, int, int]]
) -> tuple[float, list[bytes]]:
    """In a worker: (seconds, a line for each batch)."""
    begin = time.perf_counter()
    lines = []
    for _, batch, n in left:
        runs = play(campaign, n, seed, batch)
        columns = {name: getattr(runs, name) for name in ReplicaRuns.__dataclass_fields__}
        lines.append(line(_identity(digest, seed, batch, n), columns))
    return time.perf_counter() - begin, lines


def _kept(store: Store, keys: dict[str, tuple[int, int]]) -> ReplicaRuns:
    """All batches in their order. Raises :class:`ClusterSimError` for one that is damaged."""
    batches: dict[int, ReplicaRuns] = {}
    for key, text in store.lines():
        if key in keys:
            damaged = f"{store.file}: a batch is damaged; take it out, and it is played again"
            row = decoded(text, _ReplicaRow, damaged, ClusterSimError).result
            ledger = np.array(row.ledger).reshape(-1, len(PARTS))
            batches[keys[key][0]] = ReplicaRuns(
                np.array(row.elapsed), ledger, np.array(row.failures), np.array(row.finished, dtype=np.bool_)
            )
            if len(batches[keys[key][0]]) != keys[key][1] or len(ledger) != keys[key][1]:
                raise ClusterSimError(damaged)
    return joined([batches[i] for i in sorted(batches)])
