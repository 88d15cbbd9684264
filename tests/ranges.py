"""Writes ``clustersim/data/ranges.toml``: the ranges that predictions carry, from the errors of validation.

    python tests/ranges.py                # everything
    python tests/ranges.py collectives    # these alone; the ranges of steps and memory stay as they are

Reads the tables in tests/data/measurements; takes minutes, since each machine is predicted by constants fitted to the
others. Prints each range beside the share of measurements that it holds of a publisher (a machine) left out of it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import msgspec
import numpy as np

from clustersim.calibrate.cross_validate import cross_validations
from clustersim.calibrate.score import PredictedRow, predicted
from clustersim.cluster import files as fabrics
from clustersim.core.ranges import scale_class, size_class
from tests.evidence.adapter_rows import adapter_rows
from tests.evidence.evidence import SHARES, Groups, coverage, distances, operator, quantile, widening
from tests.evidence.validate_steps import publisher, strategy_kind, validate_memory, validate_steps

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "tests" / "data" / "measurements"
COLLECTIVES = ("nccl_tests.csv.gz", "nccl_one_node.csv.gz")
STEPS = ("training_steps.csv.gz", "training_steps_hybrid.csv.gz")
DATA = ROOT / "clustersim" / "data" / "ranges.toml"
FEWEST = 8
"""Measurements that a publisher must have for a range of its own."""
SIZES = (2.0**16, 2.0**25, 2.0**26)
"""One of each class."""
SCALES = ("one node", "few nodes", "many nodes")
FEW_OPERATORS = 4
"""Operators below which a scale's own rows do not make its range."""


@dataclass(frozen=True)
class Held:
    """A range, and how often it holds of a group left out (NaN where there is one group only)."""

    p50: float
    p90: float
    rows: int
    groups: int
    held_p50: float
    held_p90: float


def held(groups: Groups) -> Held:
    """The range of some groups of measurements."""
    p50, p90 = (_width(groups, share) for share in SHARES)
    return Held(p50, p90, sum(map(len, groups.values())), len(groups), *coverage(groups))


def _width(groups: Groups, share: float) -> float:
    """The quantile of all, widened for whoever is left out, but not beyond what the worst of them needs."""
    most = max(quantile([mine], share) for mine in groups.values())
    of_all = quantile(groups.values(), share)
    return max(of_all, min(of_all * widening(groups, share), most))


def of_each(groups: Groups, fewest: int) -> dict[str, Held]:
    """The range of each group alone that has at least so many measurements."""
    return {name: held({name: values}) for name, values in groups.items() if len(values) >= fewest}


def publisher_of(row: PredictedRow) -> str:
    """Whose table a row is from."""
    return publisher(row.cells)


Ranges = dict[tuple[str, str], Held]
"""By size class and scale."""


def collectives(rows: Sequence[PredictedRow]) -> Ranges:
    """Ranges by size class and scale, every operator's machine weighing the same; more nodes are never surer.

    A scale that few operators measured has the range of its sizes on all scales, with their tail where that is longer.
    """
    found: Ranges = {}
    for size in map(size_class, SIZES):
        mine = [row for row in rows if size_class(float(row.cells["size_bytes"])) == size]
        every, before = held(distances(mine, operator)), None
        for scale in SCALES:
            groups = distances([row for row in mine if scale_class(int(row.cells["nodes"])) == scale], operator)
            one = held(groups) if len(groups) >= FEW_OPERATORS else with_tail(every, groups)
            before = found[size, scale] = wider(one, before)
    return found


def with_tail(every: Held, groups: Groups) -> Held:
    """The range of all, whose tail is that of the few there are where theirs is longer."""
    tail = quantile(groups.values(), SHARES[1]) if groups else 0.0
    return replace(every, p90=max(every.p90, tail))


def wider(one: Held, other: Held | None) -> Held:
    """A range at least as wide as another."""
    return one if other is None else replace(one, p50=max(one.p50, other.p50), p90=max(one.p90, other.p90))


def named(known: str, one: Ranges, surer: Ranges | None = None) -> tuple[Ranges, dict[str, Held]]:
    """Ranges of what is less known than what others are of, and with their names in the file."""
    found = {key: wider(held, surer[key]) if surer else held for key, held in one.items()}
    return found, {f'collectives.{known}."{size}, {scale}"': held for (size, scale), held in found.items()}


def steps(rows: Sequence[PredictedRow]) -> dict[str, Held]:
    """Ranges by kind of strategy, every publisher weighing the same, and of each publisher. A kind that one publisher
    alone measured is no better known than all are, and steps over a network that nobody states count for none."""
    rows = [row for row in rows if "network not stated" not in row.cells["notes"]]
    kinds = sorted({strategy_kind(row.cells) for row in rows})
    everything = held(distances(rows, publisher_of))
    found = {"steps.similar.all": everything}
    for kind in kinds:
        groups = distances([row for row in rows if strategy_kind(row.cells) == kind], publisher_of)
        if sum(map(len, groups.values())) >= FEWEST:
            one = held(groups)
            if len(groups) == 1:
                one = replace(one, p50=max(one.p50, everything.p50), p90=max(one.p90, everything.p90))
            found[f"steps.similar.{kind}"] = one
            own = of_each(groups, FEWEST)
            found |= {f'steps.published."{kind}/{name}"': one for name, one in own.items()}
    return found


def adapters(everything: Held) -> dict[str, Held]:
    """The range of steps that train adapters, which one publisher measured: no better known than all steps are."""
    rows = [(row.seconds, float(row.scenario().run().summary["step_time_s"])) for row in adapter_rows()]
    own = held({"QwenLM": np.array([abs(seconds / predicted - 1.0) for seconds, predicted in rows])})
    return {"steps.similar.adapters": wider(own, everything)}


def memory(rows: Sequence[PredictedRow]) -> dict[str, Held]:
    """One range, and of each publisher."""
    groups = distances(rows, publisher_of)
    own = {f"memory.published.{name}": one for name, one in of_each(groups, FEWEST).items()}
    return {"memory.similar.all": held(groups)} | own


def written(ranges: Mapping[str, Held], known: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The lines of the file."""
    yield "# Half-widths of ranges around predictions: written by `python tests/ranges.py`."
    yield f'date = "{date.today().isoformat()}"'
    yield from ("", "[collectives]")
    for what, names in known.items():
        yield f"{what} = [{', '.join(f'{chr(34)}{name}{chr(34)}' for name in names)}]"
    for name, one in ranges.items():
        yield from ("", f"[{name}]", f"p50 = {one.p50:.3g}", f"p90 = {one.p90:.3g}")
        yield from (f"rows = {one.rows}", f"groups = {one.groups}")


def of_collectives() -> tuple[dict[str, Held], dict[str, Sequence[str]]]:
    """Ranges of collectives, and which platforms and transports have rows."""
    nccl = [TABLES / name for name in COLLECTIVES]
    held_out = cross_validations(nccl, ("publisher", "transport", "three-numbers"))
    publishers = predicted(held_out["publisher"].rows)
    measured_by = Counter(name for _, name in {(operator(row), row.cells["topology"]) for row in publishers})
    known = [row for row in publishers if measured_by[row.cells["topology"]] > 1]
    far = [row for row in predicted(held_out["transport"].rows) if int(row.cells["nodes"]) > 1]
    surest, published = named("published", collectives(known))
    others, similar = named("similar", collectives(publishers), surest)
    _, new = named("new", collectives(far), others)
    _, calibrated = named("calibrated", collectives(predicted(held_out["three-numbers"].rows)))
    platforms = sorted({row.cells["topology"] for row in publishers})
    transports = sorted({fabrics.load(name, nodes=1).node_types[0].net for name in platforms})
    return {**published, **similar, **new, **calibrated}, {"platforms": platforms, "transports": transports}


def generations(rows: Sequence[PredictedRow]) -> str:
    """The line of the file that says on which generations of GPUs steps are published."""
    names = {row.cells["topology"] for row in rows} - {""}
    archs = sorted({fabrics.load(name, nodes=1).node_types[0].gpu.arch for name in names})
    return f"[steps]\ngenerations = {msgspec.json.encode(archs).decode().replace(',', ', ')}"


def others_as_written() -> str:
    """The sections of the file that are not about collectives."""
    sections = DATA.read_text().split("\n\n")
    return "\n\n".join(one for one in sections if one.startswith(("[steps", "[memory")))


def main(only: str = "") -> None:
    """Measure, write and print."""
    ranges, known = of_collectives()
    rest = others_as_written() if only == "collectives" else ""
    if not only:
        stepped = [row for name in STEPS for row in predicted(validate_steps(TABLES / name).rows)]
        ranges |= steps(stepped)
        ranges |= adapters(ranges["steps.similar.all"])
        rest = generations(stepped)
        ranges |= memory([row for name in STEPS for row in predicted(validate_memory(TABLES / name).rows)])
    text = "\n".join(written(ranges, known)) + "\n"
    DATA.write_text(f"{text}\n{rest}" if rest else text)
    print(f"{'range':40s} {'p50':>7s} {'p90':>7s} {'rows':>6s} {'groups':>6s}  held of one left out")
    for name, one in ranges.items():
        shares = "" if one.groups < 2 else f"  {one.held_p50:.0%} {one.held_p90:.0%}"
        print(f"{name:40s} {one.p50:7.1%} {one.p90:7.1%} {one.rows:6d} {one.groups:6d}{shares}")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
