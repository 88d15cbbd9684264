"""Fit what a call takes the host (``clustersim/data/host.toml``) to published steps, one publisher left out.

``python tests/host_fit.py`` plays a sample of ``../shared/measurements/training_steps_hybrid.csv`` at several levels of
each stack, and prints how far each publisher's steps are off: with the level as shipped, with the one that fits all
publishers of its stack, and with the one that the *other* publishers ask for. Where no other publisher runs the stack,
the other stacks' middle is taken: what a user of an unmeasured stack gets.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import numpy.typing as npt

from clustersim import scenario
from clustersim.calibrate.score import read_table
from clustersim.core.errors import ClusterSimError
from clustersim.core.texts import data_table
from clustersim.core.units import parse_time
from clustersim.model.seconds import host
from clustersim.studies.what_if.folded import folded
from tests.evidence.hybrid_rows import measured, scenario_table
from tests.evidence.step_rows import COLUMNS, publisher

TABLE = Path(__file__).parents[2] / "shared" / "measurements" / "training_steps_hybrid.csv"
GRID = np.array([0.0, 50e-6, 100e-6, 200e-6, 400e-6])
"""Levels [s] at which rows are played; between them, steps are interpolated."""
FINE = np.linspace(0.0, GRID[-1], 161)
"""Levels [s] of which the best is taken."""
MOST_GPUS = 64
"""Larger runs take long to play, and say no more of a host."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Played:
    """A row's step at each level of :data:`GRID` [s], and what was measured [s]."""

    publisher: str
    stack: str
    measured: float
    steps: Floats

    def wrong(self, level: Floats | float) -> Floats:
        """Error of the logarithm at a level, or at many."""
        off: Floats = np.log(np.interp(level, GRID, self.steps) / self.measured)
        return off


def sample(most: int) -> list[tuple[dict[str, str], dict[str, object]]]:
    """At most so many rows of each publisher, one a set of sizes and degrees first, with their scenarios."""
    groups: dict[str, list[tuple[int, int, dict[str, str]]]] = {}
    seen: dict[tuple[str, str], int] = {}
    for row in sorted(read_table(TABLE, COLUMNS), key=lambda row: zlib.crc32(row["case_id"].encode())):
        if int(row["gpus"]) <= MOST_GPUS:
            key = (publisher(row), row["config_group"])
            seen[key] = seen.get(key, 0) + 1
            groups.setdefault(publisher(row), []).append((seen[key], len(groups), row))
    drawn = []
    for rows in groups.values():
        kept = 0
        for _, _, row in sorted(rows, key=lambda entry: entry[0]):
            try:
                table = scenario_table(row)
            except (ValueError, ClusterSimError):
                continue
            drawn.append((row, table))
            kept += 1
            if kept == most:
                break
    return drawn


def stack_of(table: Mapping[str, object]) -> str:
    """The entry of the data file that a scenario takes."""
    framework = table["parallel"]["framework"]
    implementation = table["model"].get("implementation")
    names = (f"{framework}/{implementation}", framework, "unknown")
    return next(name for name in names if name in data_table("host"))


def play(row: dict[str, str], table: dict[str, object]) -> Played | None:
    """A row at each level; None where it cannot be played, or shows no step time."""
    levels = data_table("host")
    stack = stack_of(table)
    steps = []
    try:
        seconds = measured(row, table)
        for level in GRID:
            at_level = {**levels, stack: {**levels[stack], "call": f"{level * 1e6} us"}}
            with patch.object(host, "data_table", lambda _name, at_level=at_level: at_level):
                steps.append(folded(scenario.from_table(table, "row.toml"), roughly=True).step_time_s)
    except (ValueError, ClusterSimError) as error:
        print(f"left out {row['case_id']}: {error}")
        return None
    return Played(publisher(row), stack, seconds, np.array(steps))


def best(rows: list[Played]) -> float:
    """The level [s] with the least error, every publisher counting the same."""
    each = []
    for name in sorted({row.publisher for row in rows}):
        each.append(np.median([np.abs(row.wrong(FINE)) for row in rows if row.publisher == name], axis=0))
    return float(FINE[np.argmin(np.mean(each, axis=0))])


def middle(rows: list[Played]) -> float:
    """The median over stacks of the best level [s]."""
    stacks = sorted({row.stack for row in rows})
    return float(np.median([best([row for row in rows if row.stack == stack]) for stack in stacks]))


def error(rows: list[Played], level: float) -> str:
    """Median of the error and of its sign."""
    wrong = np.expm1([float(row.wrong(level)) for row in rows])
    return f"{np.median(np.abs(wrong)):6.1%} ({np.median(wrong):+6.1%})"


def report(rows: list[Played]) -> None:
    """A line a stack and publisher."""
    print(f"{'stack':18s} {'publisher':11s} rows  {'shipped':>24s}  {'fitted':>24s}  {'left out':>24s}")
    for stack, name in sorted({(row.stack, row.publisher) for row in rows}):
        own = [row for row in rows if (row.stack, row.publisher) == (stack, name)]
        kin = [row for row in rows if row.stack == stack]
        others = [row for row in kin if row.publisher != name]
        levels = (
            parse_time(data_table("host")[stack]["call"]),
            best(kin),
            best(others) if others else middle([row for row in rows if row.stack != stack]),
        )
        cells = (f"{level * 1e6:5.0f} us {error(own, level)}" for level in levels)
        print(f"{stack:18s} {name:11s} {len(own):4d}  {'  '.join(cells)}", flush=True)


def main() -> None:
    """Play, fit and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=6, help="of each publisher")
    parser.add_argument("--publishers", help="only these, with commas between")
    parser.add_argument("--keep", type=Path, help="write the played steps to this file, or read them from it")
    chosen = parser.parse_args()
    if chosen.keep and chosen.keep.exists():
        kept = json.loads(chosen.keep.read_text("utf-8"))
        rows = [Played(*entry[:3], np.array(entry[3])) for entry in kept]
    else:
        wanted = set(chosen.publishers.split(",")) if chosen.publishers else None
        drawn = [pair for pair in sample(chosen.rows) if wanted is None or publisher(pair[0]) in wanted]
        rows = [row for pair in drawn if (row := play(*pair))]
        if chosen.keep:
            kept = [[row.publisher, row.stack, row.measured, row.steps.tolist()] for row in rows]
            chosen.keep.write_text(json.dumps(kept), encoding="utf-8")
    report(rows)


if __name__ == "__main__":
    main()
