"""How long a measured hybrid-parallel step takes, from runs smaller than it: fewer micro-batches, fewer replicas.

Nothing in these runs is random, so two things are exact or nearly so, and tables of hundreds of steps take minutes:

* Past its warm-up a pipeline repeats: each further micro-batch adds what the one before it added. Two numbers of
  micro-batches are played, and the others follow on the line through them.
* Replicas do the same at the same time; only their exchanges differ with their number. A step of all replicas takes
  what a step of a few takes, and on top what *all* of them add to a step of the least micro-batches. The few fill
  whole nodes, so that every other exchange uses the links it used before.

Rows that differ in their numbers of micro-batches or replicas alone share the smaller runs, which are played once.
"""

from __future__ import annotations

import json
from functools import lru_cache
from math import lcm
from typing import Any

from clustersim import scenario

Table = dict[str, Any]


def step_time(table: Table) -> float:
    """Seconds of one optimizer step of a scenario's tables (:func:`clustersim.calibration.hybrid_rows.scenario_table`).

    Raises a clustersim error where it cannot be played.
    """
    count, least = table["parallel"]["microbatches"], _least(table)
    whole, few = _replicas(table)
    some = _line(table, few, count)
    if few == whole:
        return some
    return some + max(0.0, _played(table, whole, least) - _played(table, few, least))


def _line(table: Table, replicas: int, count: int) -> float:
    """The step of ``replicas`` with ``count`` micro-batches, played with fewer where its steady state allows."""
    stages, interleaved = table["parallel"]["pp"], table["parallel"].get("vpp", 1) > 1
    if table["parallel"].get("schedule", "1f1b") not in {"1f1b", "interleaved_1f1b"}:
        return _played(table, replicas, count)
    short, long = (2, 3) if stages == 1 else (stages, 2 * stages)
    if interleaved and count % stages:
        return _played(table, replicas, count)
    if count <= long:
        return _played(table, replicas, count)
    one, other = _played(table, replicas, short), _played(table, replicas, long)
    return other + (count - long) * (other - one) / (long - short)


def _least(table: Table) -> int:
    """The fewest micro-batches that the schedule takes."""
    parallel = table["parallel"]
    plain = parallel.get("schedule", "1f1b") == "1f1b"
    return 1 if parallel["pp"] == 1 or plain else min(int(parallel["pp"]), int(parallel["microbatches"]))


def _replicas(table: Table) -> tuple[int, int]:
    """How many replicas there are, and how few of them fill whole nodes and hold every expert.

    Shards that every micro-batch gathers (FSDP without a pipeline) leave no replica out.
    """
    parallel, cluster = table["parallel"], table["cluster"]
    inside = parallel["tp"] * parallel["cp"]
    whole = cluster["nodes"] * cluster["gpus_per_node"] // (inside * parallel["pp"])
    if table["strategy"]["kind"] == "fsdp" and parallel["pp"] == 1:
        return whole, whole
    unit = lcm(inside, cluster["gpus_per_node"], parallel["ep"] * parallel.get("etp", 1))
    few = unit // inside
    return whole, few if whole % few == 0 else whole


def _played(table: Table, replicas: int, microbatches: int) -> float:
    parallel, cluster = table["parallel"], table["cluster"]
    ranks = replicas * parallel["tp"] * parallel["cp"] * parallel["pp"]
    # Parameters gathered beside the next forward need a next forward to be seen; else a step is like the one before.
    # So must a step that the next one does not wait for.
    follows = parallel.get("overlap_param_gather") or parallel.get("optimizer_post_validation")
    steps = table["run"]["steps"] if follows or table["strategy"]["kind"] == "fsdp" else 1
    changed = {
        **table,
        "cluster": cluster | {"nodes": max(1, ranks // cluster["gpus_per_node"])},
        "parallel": parallel | {"microbatches": microbatches},
        "run": table["run"] | {"steps": steps},
    }
    return _known(json.dumps(changed, sort_keys=True))


@lru_cache(maxsize=4096)
def _known(text: str) -> float:
    return float(scenario.from_table(json.loads(text), "row.toml").run().summary["step_time_s"])
