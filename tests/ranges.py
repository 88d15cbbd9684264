"""Writes ``clustersim/data/ranges.toml``: the ranges that predictions carry, from the errors of validation.

    python tests/ranges.py

Reads the tables in tests/data/measurements; takes minutes, since each machine is predicted by constants fitted to the
others. Prints each range beside the share of measurements that it holds of a publisher (a machine) left out of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from clustersim.calibrate.cross_validate import cross_validate
from clustersim.calibrate.score import PredictedRow, predicted
from clustersim.calibrate.validate_nccl import validate_nccl
from clustersim.cluster import files as fabrics
from clustersim.core.ranges import size_class
from tests.evidence.evidence import SHARES, Groups, coverage, distances, quantile, widening
from tests.evidence.validate_steps import publisher, strategy_kind, validate_memory, validate_steps

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "tests" / "data" / "measurements"
STEPS = ("training_steps.csv.gz", "training_steps_hybrid.csv.gz")
DATA = ROOT / "clustersim" / "data" / "ranges.toml"
FEWEST = 8
"""Measurements that a publisher must have for a range of its own."""
SIZES = (2.0**16, 2.0**25, 2.0**26)
"""One of each class."""


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


def collectives(known: str, rows: Sequence[PredictedRow]) -> dict[str, Held]:
    """Ranges by size class, every machine weighing the same."""
    return {
        f'collectives.{known}."{name}"': held(
            distances(
                (r for r in rows if size_class(float(r.cells["size_bytes"])) == name), lambda r: r.cells["topology"]
            )
        )
        for name in map(size_class, SIZES)
    }


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


def main() -> None:
    """Measure, write and print."""
    nccl = TABLES / "nccl_tests.csv.gz"
    shipped = predicted(validate_nccl(nccl).rows)
    stepped = [row for name in STEPS for row in predicted(validate_steps(TABLES / name).rows)]
    ranges = {
        **collectives("published", shipped),
        **collectives("similar", predicted(cross_validate(nccl, "platform").rows)),
        **collectives("new", predicted(cross_validate(nccl, "transport").rows)),
        **collectives("calibrated", predicted(cross_validate(nccl, "three-numbers").rows)),
        **steps(stepped),
        **memory([row for name in STEPS for row in predicted(validate_memory(TABLES / name).rows)]),
    }
    platforms = sorted({row.cells["topology"] for row in shipped})
    transports = sorted({fabrics.load(name, nodes=1).node_types[0].net for name in platforms})
    DATA.write_text("\n".join(written(ranges, {"platforms": platforms, "transports": transports})) + "\n")
    print(f"{'range':40s} {'p50':>7s} {'p90':>7s} {'rows':>6s} {'groups':>6s}  held of one left out")
    for name, one in ranges.items():
        shares = "" if one.groups < 2 else f"  {one.held_p50:.0%} {one.held_p90:.0%}"
        print(f"{name:40s} {one.p50:7.1%} {one.p90:7.1%} {one.rows:6d} {one.groups:6d}{shares}")


if __name__ == "__main__":
    sys.exit(main())
