"""What the report of a plan, a sweep or a sensitivity study says: sections of words, pictures and one table each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from clustersim import plots, sweeps
from clustersim.errors import ClusterSimError
from clustersim.planner import of_sweep
from clustersim.plots.curves import MARKERS
from clustersim.report.figures import markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Said = Mapping[str, Any]
MOST_ROWS = 2000
"""Rows of a table in a page; a browser is slow with more."""


@dataclass(frozen=True)
class Grid:
    """A table. head : (name, whether its cells are numbers). best : numbers of the rows that stand out.
    folded : what opens it, where it is closed at first."""

    head: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[str]]
    best: frozenset[int] = frozenset()
    folded: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page. items : (what in bold, text)."""

    id: str
    heading: str
    words: Sequence[str] = ()
    svgs: Sequence[Any] = ()
    items: Sequence[tuple[str, str]] = ()
    grid: Grid | None = None


@dataclass(frozen=True)
class Page:
    """A whole page. figures : (name, value)."""

    title: str
    verdict: str
    sections: Sequence[Section]
    figures: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = field(default=())


def page_of(folder: Path) -> Page:
    """The page of whatever a folder holds: a plan or a sweep. Raises :class:`ClusterSimError` for neither."""
    if (folder / "plan.json").is_file():
        return plan_page(_read(folder / "plan.json"))
    return sweep_page(folder)


def holds_study(folder: Path) -> bool:
    """Whether a folder holds a plan or a sweep."""
    return (folder / "plan.json").is_file() or sweeps.is_sweep(folder)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ClusterSimError(f"{path}: cannot be read: {error}") from None
    return found


# ---- a plan ----------------------------------------------------------------------------------------------------------


def plan_page(said: Said) -> Page:
    """The page of a plan's answer, as of :func:`clustersim.planner.told`."""
    unit = str(said["unit"])
    counts = [(f"options that {words}" if words != "simulated" else "options simulated", f"{n:,}")
              for words, n in said["counts"].items() if n]  # fmt: skip
    head = ["option", "GPUs", f"{unit}/s", "+-", f"USD/1e9 {unit}", f"kWh/1e9 {unit}", "days", "USD"]
    front = Grid([(name, i > 0) for i, name in enumerate(head)], [_plan_cells(row) for row in said["front"]])
    sections = [
        Section(
            "front", "Worth having",
            [f"No option beats one of these in {unit}/s, cost, GPUs and energy at once."] if front.rows else [],
            _plan_front(said), [(row["option"], row["why"]) for row in said["front"]], front,
        ),
        Section("scaling", "More GPUs", ["The fastest option of each strategy on each number of GPUs."], _scaled(said)),
        Section("not", "Why not the others", [], [], [(row["option"], row["why"]) for row in said["alternatives"]]),
        Section("assumed", "Assumptions", [], [], [("", text) for text in said["assumptions"]]),
        Section("all", "All options", grid=_plan_options(said)),
    ]  # fmt: skip
    kept = [part for part in sections if part.svgs or part.items or (part.grid and part.grid.rows)]
    return Page(str(said["title"]) or "A plan", str(said["verdict"]), kept, counts, list(said["warnings"]))


def _plan_cells(row: Said) -> list[str]:
    numbers = [_number(row[name], form) for name, form in (
        ("gpus", ",.0f"), ("rate", ",.0f"), ("error", ".0%"), ("usd_per_1e9", ",.0f"), ("kwh_per_1e9", ",.0f"),
        ("days", ",.1f"), ("usd", ",.0f"),
    )]  # fmt: skip
    return [str(row["option"]), *numbers]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _plan_front(said: Said) -> list[Any]:
    best = {row["option"] for row in said["front"]}
    rows = [row for row in said["options"] if row["state"] == "simulated" and not row["reason"]]
    priced = all(row["usd_per_1e9"] is not None for row in rows)
    dots = [
        plots.Dot(row["family"], f"{row['gpus']:,}", row["rate"], _cost(row, priced), row["option"] in best)
        for row in rows
    ]
    cost = "USD" if priced else "GPU-hours"
    unit = said["unit"]
    return _drawn(
        plots.front(dots, x=f"{unit}/s", y=f"{cost} per 1e9 {unit}; numbers are GPUs") if dots else None, "front"
    )


def _cost(row: Said, priced: bool) -> float:
    return float(row["usd_per_1e9"]) if priced else row["gpus"] / 3600 / row["rate"] * 1e9


def _scaled(said: Said) -> list[Any]:
    best: dict[tuple[str, int], float] = {}
    for row in said["options"]:
        if row["state"] == "simulated" and not row["reason"]:
            key = row["family"], int(row["gpus"])
            best[key] = max(best.get(key, 0.0), float(row["rate"]))
    if len({gpus for _, gpus in best}) < 2:
        return []
    families = sorted({family for family, _ in best}, key=lambda name: -max(v for k, v in best.items() if k[0] == name))
    curves = {
        name: ([gpus for family, gpus in best if family == name], [v for k, v in best.items() if k[0] == name])
        for name in families[: len(MARKERS)]
    }
    return _drawn(plots.scaling(curves, unit=f"{said['unit']}/s"), "scaling")


def _plan_options(said: Said) -> Grid:
    rows = [[row["option"], _number(row["gpus"], ",.0f"), _number(row["rate"], ",.0f"), row["state"], row["reason"]]
            for row in said["options"][:MOST_ROWS]]  # fmt: skip
    more = f" (the first {MOST_ROWS:,})" if len(said["options"]) > MOST_ROWS else ""
    head = [("option", False), ("GPUs", True), (f"{said['unit']}/s", True), ("became", False), ("because", False)]
    best = {row["option"] for row in said["front"]}
    numbers = frozenset(i for i, row in enumerate(rows) if row[0] in best)
    return Grid(head, rows, numbers, f"All {len(said['options']):,} options and what became of them{more}")


# ---- a sweep ---------------------------------------------------------------------------------------------------------


def sweep_page(folder: Path) -> Page:
    """The page of the sweep in a folder. Raises :class:`ClusterSimError` where there is none."""
    swept = of_sweep.load(folder)
    said = of_sweep.answer(swept)
    figures = [("scenarios", f"{len(swept.rate) + swept.failed:,}"), ("with a result", f"{len(swept.rate):,}"),
               ("fastest", f"{swept.rate.max():,.0f} {swept.unit}/s")]  # fmt: skip
    sections = [
        Section("cases", "Case by case", _cases_words(swept), [], [], _cases(said)),
        Section("curves", "Curves", [], _curves(folder, swept)),
        Section("front", "Speed and cost", _front_words(said), _sweep_front(said), [], _front_grid(said)),
        Section("assumed", "Assumptions", [], [], [("", text) for text in said["assumptions"]]),
        Section("all", "All scenarios", grid=_all_rows(folder)),
    ]
    kept = [part for part in sections if part.svgs or part.items or (part.grid and part.grid.rows)]
    return Page(str(said["title"]), str(said["verdict"]), kept, figures, list(said["warnings"]))


def _cases_words(swept: of_sweep.Swept) -> list[str]:
    asked = swept.question or {}
    if asked.get("value") is None:
        return [f"In each case the fastest choice of {swept.axis}, and how much throughput the others lose against it."]
    other = of_sweep.worded(str(swept.axis), asked["against"])
    return [f"Throughput against {other}; + is faster."]


def _cases(said: Said) -> Grid | None:
    if not said["cases"]:
        return None
    numeric = [all(_looks_numeric(row[i]) for row in said["cases"]) for i in range(len(said["head"]))]
    return Grid(list(zip(said["head"], numeric, strict=True)), said["cases"])


def _looks_numeric(cell: str) -> bool:
    return not cell.strip("0123456789.,%+-")


def _curves(folder: Path, swept: of_sweep.Swept) -> list[Any]:
    about = sweeps.about(folder)
    try:
        return _drawn(plots.sweep_curves(sweeps.read(folder), about["axes"]), "curves")
    except ClusterSimError:  # too many curves to tell apart
        return []


def _front_words(said: Said) -> list[str]:
    return [f"Of {len(said['front']):,} scenarios that fit, those that no other beats in speed, cost and GPUs at once."]


def _sweep_front(said: Said) -> list[Any]:
    rows = said["front"]
    if len({row["rate"] for row in rows}) < 2:
        return []
    priced = all(row["usd_per_1e9"] is not None for row in rows)
    dots = [plots.Dot(row["family"], f"{row['gpus']:,}", row["rate"], _cost(row, priced), row["best"]) for row in rows]
    cost = "USD" if priced else "GPU-hours"
    unit = said["unit"]
    return _drawn(plots.front(dots, x=f"{unit}/s", y=f"{cost} per 1e9 {unit}; numbers are GPUs"), "front")


def _front_grid(said: Said) -> Grid:
    unit = said["unit"]
    head = ["scenario", "GPUs", f"{unit}/s", "+-", f"USD/1e9 {unit}", f"kWh/1e9 {unit}"]
    rows = [
        [row["option"], *(_number(row[name], form) for name, form in (
            ("gpus", ",.0f"), ("rate", ",.0f"), ("error", ".0%"), ("usd_per_1e9", ",.0f"), ("kwh_per_1e9", ",.0f")))]
        for row in said["front"] if row["best"]
    ]  # fmt: skip
    return Grid([(name, i > 0) for i, name in enumerate(head)], rows)


SHOWN = ("gpus", "step_time_s", "samples_per_s", "tokens_per_s", "mfu", "share_exposed_communication", "share_idle",
         "bytes_sent_per_gpu", "peak_memory_bytes", "busiest_link", "busiest_link_utilisation", "error")  # fmt: skip
"""Columns of a sweep's table that the page has; the CSV has all."""


def _all_rows(folder: Path) -> Grid:
    from clustersim.units import format_bytes, format_time

    table, axes = sweeps.read(folder), sweeps.about(folder)["axes"]
    forms: dict[str, Any] = {"step_time_s": format_time, "bytes_sent_per_gpu": format_bytes,
                             "peak_memory_bytes": format_bytes}  # fmt: skip
    shares = ("mfu", "busiest_link_utilisation")

    def text(name: str, value: Any) -> str:
        if isinstance(value, float) and np.isnan(value):
            return ""
        if name in forms:
            return str(forms[name](float(value)))
        if name.startswith("share_") or name in shares:
            return f"{value:.1%}"
        return f"{value:,.6g}" if isinstance(value, int | float) else str(value)

    names = [*axes, *(name for name in SHOWN if name not in axes and _worth_a_column(table[name]))]
    rows = [[text(name, table[name][i].item()) for name in names] for i in range(min(MOST_ROWS, len(table["key"])))]
    head = [(_heading(name), table[name].dtype.kind != "U") for name in names]
    more = f" (the first {MOST_ROWS:,})" if len(table["key"]) > MOST_ROWS else ""
    return Grid(head, rows, folded=f"All {len(table['key']):,} rows{more}; table.csv has every column")


def _worth_a_column(column: Any) -> bool:
    return bool((column != "").any() if column.dtype.kind == "U" else (column == column).any())


def _heading(name: str) -> str:
    plain = {"step_time_s": "step time", "share_exposed_communication": "exposed", "share_idle": "idle", "mfu": "MFU",
             "gpus": "GPUs", "bytes_sent_per_gpu": "sent per GPU", "busiest_link_utilisation": "its use",
             "peak_memory_bytes": "memory", "samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}  # fmt: skip
    return plain.get(name, name.replace("_", " "))


def _drawn(figure: Figure | None, name: str) -> list[Any]:
    """A figure as markup; nothing for nothing."""
    return [markup(figure, name)] if figure else []
