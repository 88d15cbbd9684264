"""Writes ``clustersim/data/ranges.toml``: the ranges that predictions carry, from the errors of validation.

    python tests/ranges.py                # everything
    python tests/ranges.py collectives    # these alone; the ranges of steps and memory stay as they are
    python tests/ranges.py steps          # the other way round

Reads the tables in tests/data/measurements, and the published steps and collectives that no constant was fitted to
(:mod:`tests.evidence.unseen_steps`, :mod:`tests.evidence.unseen_collectives`); takes minutes, since each machine is
predicted by constants fitted to the others. Prints each range beside the share of measurements that it holds of a
publisher (a machine) left out of it.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import msgspec
import numpy as np

from clustersim.calibrate.cross_validate import cross_validations
from clustersim.calibrate.score import PredictedRow, grouped, predicted, statistics
from clustersim.cluster import files as fabrics
from clustersim.core.device import UNSEEN
from clustersim.core.ranges import MANY, size_class, traits
from clustersim.scenario.result.trust import THIN_KINDS
from tests.evidence.adapter_rows import adapter_rows
from tests.evidence.evidence import SHARES, Groups, coverage, distances, operator, quantile, widening
from tests.evidence.offload_rows import errors_of_steps
from tests.evidence.step_rows import origin, publisher
from tests.evidence.unseen_collectives import UnseenCollective, unseen_collectives
from tests.evidence.unseen_steps import (
    UnseenStep,
    first_errors,
    unseen_distances,
    unseen_memory_distances,
    unseen_steps,
)
from tests.evidence.validate_steps import strategy_kind, validate_memory, validate_steps

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "tests" / "data" / "measurements"
COLLECTIVES = ("nccl_tests.csv.gz", "nccl_one_node.csv.gz")
STEPS = ("training_steps.csv.gz", "training_steps_hybrid.csv.gz", "thin_steps.csv.gz")
DATA = ROOT / "clustersim" / "data" / "ranges.toml"
FEWEST = 8
"""Measurements that a publisher must have for a range of its own."""
SIZES = (2.0**16, 2.0**25, 2.0**26)
"""One of each class."""
FEW_OPERATORS = 4
"""Operators that a transport must have to be told apart from the others."""
DOUBT = 2.0
"""Operators that a trait's factor has against it where it narrows."""
ROUNDS = 5
ADAPTERS = "adapters"
"""The kind of steps that train adapters, whose fitted rows are in a table of their own."""


@dataclass(frozen=True)
class Held:
    """A range, and how often it holds of a group left out (NaN where there is one group only)."""

    p50: float
    p90: float
    rows: int
    groups: int
    held_p50: float
    held_p90: float


def held(groups: Groups, full: int = 1) -> Held:
    """The range of some groups of measurements; those of fewer than ``full`` weigh as much less."""
    p50, p90 = (_width(groups, share, full) for share in SHARES)
    return Held(p50, p90, sum(map(len, groups.values())), len(groups), *coverage(groups, full))


def _width(groups: Groups, share: float, full: int = 1) -> float:
    """The quantile of all, widened for whoever is left out, but not beyond what the worst of them needs."""
    most = max(quantile([mine], share) for mine in groups.values())
    of_all = quantile(groups.values(), share, full)
    return max(of_all, min(of_all * widening(groups, share, full), most))


def of_each(groups: Groups, fewest: int) -> dict[str, Held]:
    """The range of each group alone that has at least so many measurements."""
    return {name: held({name: values}) for name, values in groups.items() if len(values) >= fewest}


def origin_of(row: PredictedRow) -> str:
    """Who measured a row."""
    return origin(row.cells)


@dataclass(frozen=True)
class CollectiveRanges:
    """Ranges of collectives by size class, and by how much a trait (:func:`clustersim.core.ranges.traits`) widens each
    of :data:`SHARES`."""

    sizes: dict[str, Held]
    times: tuple[dict[str, float], ...]


def collectives(rows: Sequence[PredictedRow], well_known: Collection[str]) -> CollectiveRanges:
    """Ranges by size class and trait, every operator's machine weighing the same.

    A width is that of its size times what its traits widen it by. What few operators show says little, so a
    trait's factor that narrows is drawn to 1 by :data:`DOUBT` operators that would show nothing; one that widens is
    not, since a range must not be narrower than what was seen. The width of a size is what holds its share of one
    operator more: the k-th smallest of n holds k / (n + 1) of others, and stands at (k - 1/2) / n of its own kind.
    ``well_known`` : transports apart.
    """
    of_rows = [traits_of(row, well_known) for row in rows]
    far = [(operator(row), abs(1.0 / (1.0 + row.rel_error) - 1.0)) for row in rows]
    sizes_of = [size_class(float(row.cells["size_bytes"])) for row in rows]
    times = tuple(_widened(far, sizes_of, of_rows, share) for share in SHARES)
    sizes = {}
    for size in map(size_class, SIZES):
        own = [i for i, other in enumerate(sizes_of) if other == size]
        scaled = [_scaled(far, own, [_product(of_rows[i], by) for i in own]) for by in times]
        levels = (share + (share - 0.5) / len(groups) for groups, share in zip(scaled, SHARES, strict=True))
        widths = (_width(groups, level) for groups, level in zip(scaled, levels, strict=True))
        shares = (coverage(groups)[i] for i, groups in enumerate(scaled))
        sizes[size] = Held(*widths, len(own), len(scaled[0]), *shares)
    return CollectiveRanges(sizes, times)


def widths_of(made: CollectiveRanges, size: str, names: Sequence[str]) -> list[float]:
    """Half-widths of a size class and of traits, of each of :data:`SHARES`."""
    held = made.sizes[size]
    return [width * _product(names, by) for width, by in zip((held.p50, held.p90), made.times, strict=True)]


def collectives_beyond(
    made: Mapping[str, CollectiveRanges], unseen: Sequence[UnseenCollective], well_known: Collection[str]
) -> dict[str, tuple[float, ...]]:
    """How many times as wide, by size class and for each of :data:`SHARES`, the ranges of strange machines must be for
    publishers that nothing was fitted to: as :func:`beyond`, each row in widths of its own range, and every publisher
    weighing the same."""
    sizes = [size_class(float(row.cells["size_bytes"])) for row in unseen]
    far = [(row.publisher, abs(1.0 / (1.0 + row.first_error) - 1.0)) for row in unseen]
    widths = [_widths_of_unseen(made, row, size, well_known) for row, size in zip(unseen, sizes, strict=True)]
    times = []
    for i, share in enumerate(SHARES):
        needed: dict[str, float] = {}
        publishers: dict[str, int] = {}
        for size in map(size_class, SIZES):
            own = [place for place, other in enumerate(sizes) if other == size]
            groups = _scaled(far, own, [widths[place][i] for place in own])
            needed[size], publishers[size] = quantile(groups.values(), share), len(groups)
        times.append(drawn(needed, publishers))
    return {size: tuple(of_share[size] for of_share in times) for size in map(size_class, SIZES)}


def _widths_of_unseen(
    made: Mapping[str, CollectiveRanges], row: UnseenCollective, size: str, well_known: Collection[str]
) -> list[float]:
    """Half-widths that an unseen row has by what is known of its machine, of each of :data:`SHARES`."""
    of_row = traits(row.cells["collective"], float(row.cells["size_bytes"]), row.nodes, row.net, well_known)
    by_known = [widths_of(made[known], size, of_row) for known in row.closeness]
    return [max(of_share) for of_share in zip(*by_known, strict=True)]


def traits_of(row: PredictedRow, well_known: Collection[str]) -> tuple[str, ...]:
    """Of a row of a table."""
    net = fabrics.load(row.cells["topology"], nodes=1).node_types[0].net
    cells = row.cells
    return traits(cells["collective"], float(cells["size_bytes"]), int(cells["nodes"]), net, well_known)


def _scaled(far: Sequence[tuple[str, float]], chosen: Sequence[int], by: Sequence[float]) -> dict[str, np.ndarray]:
    """Distances of the chosen rows by operator, each divided; ``far`` : operator and distance of every row."""
    groups: dict[str, list[float]] = {}
    for i, width in zip(chosen, by, strict=True):
        name, distance = far[i]
        groups.setdefault(name, []).append(distance / width)
    return {name: np.array(values) for name, values in groups.items()}


def _product(names: Sequence[str], by: Mapping[str, float]) -> float:
    return math.prod(by.get(name, 1.0) for name in names)


def _widened(
    far: Sequence[tuple[str, float]], sizes: Sequence[str], of_rows: Sequence[tuple[str, ...]], share: float
) -> dict[str, float]:
    """By how much each trait widens the range of a share, all others known: one after another, in rounds."""
    by: dict[str, float] = {}
    names = sorted({name for names in of_rows for name in names})
    of_size = {size: [i for i, other in enumerate(sizes) if other == size] for size in set(sizes)}
    of_name = {name: [i for i, traits_here in enumerate(of_rows) if name in traits_here] for name in names}
    for _ in range(ROUNDS):
        width = {
            size: quantile(_scaled(far, chosen, [_product(of_rows[i], by) for i in chosen]).values(), share)
            for size, chosen in of_size.items()
        }
        for name, chosen in of_name.items():
            others = [width[sizes[i]] * _product([t for t in of_rows[i] if t != name], by) for i in chosen]
            groups = _scaled(far, chosen, others)
            factor = float(quantile(groups.values(), share))
            sure = len(groups) / (len(groups) + DOUBT)
            by[name] = factor if factor > 1.0 else factor**sure
        by[MANY] = max(by.get(MANY, 1.0), 1.0)
    return by


def wider(one: Held, other: Held) -> Held:
    """A range at least as wide as another."""
    return replace(one, p50=max(one.p50, other.p50), p90=max(one.p90, other.p90))


def steps(rows: Sequence[PredictedRow], unseen: Sequence[UnseenStep]) -> dict[str, Held]:
    """Ranges by kind of strategy, every publisher of :data:`FEWEST` steps weighing the same, and of each publisher.

    The code was written with these rows at hand, so that steps which it was not (``unseen``) are further off, and the
    ranges as much wider as those showed (:func:`beyond`). A kind that one publisher alone measured is no better known
    than all are but those that a host paces, and steps over a network that nobody states count for none."""
    rows = [row for row in rows if "network not stated" not in row.cells["notes"]]
    by_kind = grouped(rows, lambda row: strategy_kind(row.cells))
    thin = set(THIN_KINDS.values())
    everything = held(distances([row for row in rows if strategy_kind(row.cells) not in thin], origin_of), FEWEST)
    fitted = {"all": everything, ADAPTERS: wider(adapters(), everything)}
    published: dict[str, Held] = {}
    for kind, of_kind in sorted(by_kind.items()):
        groups = distances(of_kind, origin_of)
        if len(of_kind) >= FEWEST:
            own = held(groups, FEWEST)
            fitted[kind] = wider(own, everything) if len(groups) == 1 else own
            published |= {
                f'steps.published."{kind}/{name}"': around for name, around in of_each(groups, FEWEST).items()
            }
    apart = {kind: unseen_distances([step for step in unseen if step.kind == kind]) for kind in fitted}
    times = beyond(fitted, apart)
    similar = {f'steps.similar."{kind}"': times_as_wide(around, times[kind]) for kind, around in fitted.items()}
    for kind, thin in THIN_KINDS.items():  # a host's pace makes no step surer
        of_thin = f'steps.similar."{thin}"'
        similar[of_thin] = wider(similar[of_thin], similar[f'steps.similar."{kind}"'])
    similar['steps.similar."offload"'] = offloads()
    return similar | published


def adapters() -> Held:
    """The range of steps that train adapters, which one publisher measured."""
    rows = [(row.seconds, float(row.scenario().run().summary["step_time_s"])) for row in adapter_rows()]
    return held({"QwenLM": np.array([abs(seconds / predicted - 1.0) for seconds, predicted in rows])})


def offloads() -> Held:
    """The range of steps that keep states on the host: of rows chosen before any was predicted, wide as it is."""
    return held(errors_of_steps(), FEWEST)


def beyond(fitted: Mapping[str, Held], unseen: Mapping[str, Groups]) -> dict[str, tuple[float, ...]]:
    """How many times as wide as the range of fitted rows that of each kind must be for publishers that nothing was
    fitted to, for each of :data:`SHARES`: as wide as its own showed, drawn by :data:`DOUBT` publishers to the
    geometric mean of what kinds showed, each by how sure it is; never below 1. ``unseen`` : distances by kind and
    publisher."""
    publishers = {kind: len(groups) for kind, groups in unseen.items()}
    times = []
    for i, share in enumerate(SHARES):
        needed = {
            kind: quantile(groups.values(), share, FEWEST) / (fitted[kind].p50, fitted[kind].p90)[i]
            for kind, groups in unseen.items()
            if groups
        }
        times.append(drawn(needed, publishers))
    return {kind: tuple(of_share[kind] for of_share in times) for kind in fitted}


def drawn(needed: Mapping[str, float], publishers: Mapping[str, int]) -> dict[str, float]:
    """Factors of kinds, each drawn by :data:`DOUBT` publishers to the geometric mean of those that are ``needed``."""
    sure = {kind: count / (count + DOUBT) for kind, count in publishers.items()}
    weights = [sure[kind] for kind in needed]
    usual = math.exp(np.average(np.log(list(needed.values())), weights=weights)) if needed else 1.0
    return {kind: max(1.0, needed.get(kind, 1.0) ** sure[kind] * usual ** (1.0 - sure[kind])) for kind in sure}


def times_as_wide(around: Held, times: Sequence[float]) -> Held:
    """A range with its half-widths so many times as wide."""
    return replace(around, p50=around.p50 * times[0], p90=around.p90 * times[1])


def memory(rows: Sequence[PredictedRow], unseen: Sequence[UnseenStep]) -> dict[str, Held]:
    """One range, and of each publisher; the former as much wider as figures that nothing was fitted to showed."""
    groups = distances(rows, lambda row: publisher(row.cells))
    own = {f"memory.published.{name}": one for name, one in of_each(groups, FEWEST).items()}
    fitted = held(groups, FEWEST)
    times = beyond({"all": fitted}, {"all": unseen_memory_distances(unseen)})
    return {"memory.similar.all": times_as_wide(fitted, times["all"])} | own


def written(ranges: Mapping[str, Held]) -> Iterator[str]:
    """The lines of some ranges."""
    for name, around in ranges.items():
        yield from ("", f"[{name}]", f"p50 = {around.p50:.3g}", f"p90 = {around.p90:.3g}")
        yield from (f"rows = {around.rows}", f"groups = {around.groups}")


def of_collectives() -> tuple[dict[str, CollectiveRanges], dict[str, Sequence[str]], list[str]]:
    """Ranges of collectives by what is known; which platforms and transports have rows; and lines of how far logs are
    off, the publisher left out."""
    nccl = [TABLES / name for name in COLLECTIVES]
    held_out = cross_validations(nccl, ("publisher", "transport", "three-numbers"))
    publishers = predicted(held_out["publisher"].rows)
    measured_by = Counter(name for _, name in {(operator(row), row.cells["topology"]) for row in publishers})
    known = [row for row in publishers if measured_by[row.cells["topology"]] > 1]
    far = [row for row in predicted(held_out["transport"].rows) if int(row.cells["nodes"]) > 1]
    well_known = _well_known(publishers)
    by_known = {
        "published": collectives(known, well_known),
        "similar": collectives(publishers, well_known),
        "new": collectives(far, ()),
        "calibrated": collectives(predicted(held_out["three-numbers"].rows), well_known),
    }
    transports = sorted({fabrics.load(name, nodes=1).node_types[0].net for name in measured_by})
    platforms = sorted(name for name, operators in measured_by.items() if operators > 1)
    names = {"platforms": platforms, "transports": transports, "well_known": well_known}
    return by_known, names, list(of_logs(publishers))


def of_logs(rows: Sequence[PredictedRow]) -> Iterator[str]:
    """The lines of the file that say how far logs are off by class of sizes: a log's median error, and half and nine in
    ten of logs, as in the table of `validate all`. Not widened: these say what was seen, and are no range."""
    yield from ("", "[collectives.logs]")
    by_size = grouped(rows, lambda row: size_class(float(row.cells["size_bytes"])))
    for size in map(size_class, SIZES):
        far = statistics(by_size[size])
        p50, p90 = far.median_abs_rel_error, far.p90_abs_rel_error
        yield f'"{size}" = {{p50 = {p50:.3g}, p90 = {p90:.3g}, logs = {far.n_cases}}}'


def _well_known(rows: Sequence[PredictedRow]) -> list[str]:
    """Transports between nodes that several operators measured."""
    over = [row for row in rows if int(row.cells["nodes"]) > 1]
    pairs = {(fabrics.load(row.cells["topology"], nodes=1).node_types[0].net, operator(row)) for row in over}
    counts = Counter(net for net, _ in pairs)
    return sorted(net for net, count in counts.items() if count >= FEW_OPERATORS)


def lines_of(found: Mapping[str, CollectiveRanges]) -> tuple[dict[str, Held], list[str]]:
    """Ranges by their names in the file, and its lines of what widens them."""
    ranges = {f'collectives.{known}."{size}"': one for known, of in found.items() for size, one in of.sizes.items()}
    lines: list[str] = []
    for known, of in found.items():
        lines += ["", f"[collectives.{known}.times]"]
        for share, by in zip(("p50", "p90"), of.times, strict=True):
            pairs = ", ".join(f'"{name}" = {times:.3g}' for name, times in by.items())
            lines.append(f"{share} = {{{pairs}}}")
    return ranges, lines


def generations(rows: Sequence[PredictedRow]) -> str:
    """The line of the file that says on which generations of GPUs steps are published: :data:`FEWEST` at the least.
    Mixtures and steps that a host paces say little of kernels, and do not count."""
    others = {"experts", *THIN_KINDS.values()}
    fitted = Counter(
        fabrics.load(row.cells["topology"], nodes=1).node_types[0].gpu.arch
        for row in rows
        if row.cells["topology"] and strategy_kind(row.cells) not in others
    )
    strangers = ((arch, error) for arch, kind, error in first_errors() if kind not in others)
    archs = known_generations(fitted, strangers)
    return f"[steps]\ngenerations = {msgspec.json.encode(archs).decode().replace(',', ', ')}"


def known_generations(fitted: Counter[str], strangers: Iterable[tuple[str, float | None]]) -> list[str]:
    """Generations of GPUs that have steps enough, in order.

    ``fitted`` : how many each has in the tables. ``strangers`` : of steps that nothing was fitted to, generation and
    first error (None: nobody wrote it down); they count unless those of the generation are off, in the median, by more
    than a range is wider on a generation that has none.
    """
    count: Counter[str] = Counter()
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for arch, error in strangers:
        count[arch] += 1
        if error is not None:
            errors[arch].append(abs(error))
    for arch, own in errors.items():
        if np.median(own) > UNSEEN:
            del count[arch]
    return sorted(arch for arch, steps_of in (fitted + count).items() if steps_of >= FEWEST)


def counted(unseen: Sequence[UnseenStep]) -> str:
    """The line of the file that says how many steps nothing was fitted to, and of how many publishers."""
    timed = [step for step in unseen if step.first_error is not None]
    return f"unseen = {{rows = {len(timed)}, publishers = {len({step.publisher for step in timed})}}}"


def as_written(*, of_steps: bool) -> list[str]:
    """The lines of the file that are of steps and memory, or those that are of collectives."""
    sections = DATA.read_text().removesuffix("\n").split("\n\n")[1:]
    chosen = [text for text in sections if text.startswith(("[steps", "[memory")) == of_steps]
    return [line for text in chosen for line in ("", *text.split("\n"))]


def lines_beyond(found: Mapping[str, CollectiveRanges], well_known: Collection[str]) -> Iterator[str]:
    """The lines of the file that say how much wider ranges are for what nothing was fitted to, and of how many rows."""
    unseen = unseen_collectives()
    yield from ("", "[collectives.beyond]", f"rows = {len(unseen)}")
    yield f"publishers = {len({row.publisher for row in unseen})}"
    for size, (p50, p90) in collectives_beyond(found, unseen, well_known).items():
        yield f'"{size}" = {{p50 = {p50:.3g}, p90 = {p90:.3g}}}'


def made_collectives() -> tuple[dict[str, Held], list[str]]:
    """Ranges of collectives, and the file's lines of them."""
    found, known, logs = of_collectives()
    ranges, times = lines_of(found)
    beyond_lines = lines_beyond(found, known["well_known"])
    names = [
        f"{what} = [{', '.join(f'{chr(34)}{name}{chr(34)}' for name in of_what)}]" for what, of_what in known.items()
    ]
    return ranges, ["", "[collectives]", *names, *written(ranges), *times, *beyond_lines, *logs]


def made_steps() -> tuple[dict[str, Held], list[str]]:
    """Ranges of steps and memory, and the file's lines of them."""
    rows = [row for name in STEPS for row in predicted(validate_steps(TABLES / name).rows)]
    unseen = unseen_steps()
    ranges = steps(rows, unseen)
    ranges |= memory([row for name in STEPS for row in predicted(validate_memory(TABLES / name).rows)], unseen)
    return ranges, ["", generations(rows), counted(unseen), *written(ranges)]


def main(only: str = "") -> None:
    """Measure, write and print."""
    if only not in {"", "collectives", "steps"}:
        sys.exit(f"ranges.py: {only!r} is neither collectives nor steps")
    nothing: dict[str, Held] = {}
    of_collective, collective_lines = (nothing, as_written(of_steps=False)) if only == "steps" else made_collectives()
    of_step, step_lines = (nothing, as_written(of_steps=True)) if only == "collectives" else made_steps()
    head = [
        "# Half-widths of ranges around predictions: written by `python tests/ranges.py`.",
        f'date = "{date.today().isoformat()}"',
    ]
    DATA.write_text("\n".join([*head, *collective_lines, *step_lines]) + "\n")
    print(f"{'range':40s} {'p50':>7s} {'p90':>7s} {'rows':>6s} {'groups':>6s}  held of one left out")
    for name, around in (of_collective | of_step).items():
        shares = "" if around.groups < 2 else f"  {around.held_p50:.0%} {around.held_p90:.0%}"
        print(f"{name:40s} {around.p50:7.1%} {around.p90:7.1%} {around.rows:6d} {around.groups:6d}{shares}")


if __name__ == "__main__":
    main(*sys.argv[1:])
