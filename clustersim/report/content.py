"""What a report says: figures, tables and sentences, from a saved run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from clustersim import plots
from clustersim.analysis.explain import explain
from clustersim.analysis.hotspots import hotspots
from clustersim.analysis.pipeline import has_pipeline
from clustersim.analysis.waterfall import Waterfall
from clustersim.analysis.waterfall import table as percent
from clustersim.facts import Facts
from clustersim.plots.shares import STATE_STYLE
from clustersim.plots.style import palette
from clustersim.report.figures import markup, trusted
from clustersim.report.hover import gantt_svg, legend
from clustersim.scenario.otherwise import otherwise
from clustersim.scenario.turned import short
from clustersim.texts import Plain, Table, headline
from clustersim.timeline import Timeline
from clustersim.traces.saved import SavedRun
from clustersim.units import format_bandwidth, format_bytes, format_time

if TYPE_CHECKING:
    from clustersim.scenario.running import Prepared

PATH_ROWS = 12
"""Longest pieces of the critical path that are listed."""


def content(run: SavedRun, title: str | None, prepared: Prepared | None = None) -> dict[str, Any]:
    """Everything the template prints, all of it plain text but for the ``svg`` values, which are markup.

    ``prepared`` : what was run, where it can be run again with one thing changed.
    """
    timeline, facts = run.timeline, run.facts
    rerun = prepared is not None and short(timeline)
    found = explain(timeline, facts, bounded=rerun)
    table, lost = found.tables["breakdown"], found.tables["stalls"]
    window = float(table["begin"]), float(table["end"])
    title = title or facts.title or f"a run of {timeline.world_size} ranks ({timeline.source})"
    return {
        "title": title,
        "headline": headline(title),
        "verdict": found.verdict,
        "figures": list(_figures(facts, table)),
        "breakdown": _breakdown(table),
        "waterfall": _waterfall(found.waterfall),
        "ranks": found.ranks,
        "drawn": _drawn(timeline),
        "split": _split(run),
        "gantts": _gantts(run),
        "legend": legend(),
        "stalls": _stalls(lost),
        "hotspots": _hotspots(run, window),
        "path": _path(found.tables["critical_path"]),
        "otherwise": otherwise(prepared, timeline, found).ran,
        "warnings": found.warnings,
        "memory": _memory(run),
        "inputs": list(_flat(facts.inputs)),
        "notes": facts.notes,
        "run": _run(run),
        "palette": palette,
    }


def _figures(facts: Facts, table: Plain) -> Iterator[tuple[str, str]]:
    """The figures that say most, (name, value)."""
    yield "step time", format_time(float(table["step_time_s"]))
    for name, value, form in (
        ("samples per second", facts.samples_per_s, ",.1f"),
        ("tokens per second and GPU", facts.tokens_per_s_per_gpu, ",.0f"),
        ("MFU", facts.mfu, ".1%"),
    ):
        if value is not None:
            yield name, format(value, form)
    for state in ("exposed transfer", "waiting for a peer", "bubble"):
        share = float(table["mean"][list(table["states"]).index(state)])
        if share or state == "exposed transfer":
            yield state, f"{share:.1%}"
    for name, value in (("sent per GPU and step", facts.bytes_sent_per_gpu),
                        ("memory per GPU", facts.peak_memory_bytes)):  # fmt: skip
        if value is not None:
            yield name, format_bytes(value)


def _breakdown(table: Plain) -> dict[str, Any]:
    states = [str(s) for s in table["states"]]
    seconds = np.asarray(table["seconds"])
    rows = []
    for k, state in enumerate(states):
        if seconds[:, k].max(initial=0.0) > 0:
            low, high = float(seconds[:, k].min()), float(seconds[:, k].max())
            spread = format_time(low) if low == high else f"{format_time(low)} to {format_time(high)}"
            colour = STATE_STYLE[state].colour if state in STATE_STYLE else palette["other"]
            rows.append(
                (
                    colour,
                    state,
                    f"{float(table['mean'][k]):.1%}",
                    format_time(seconds[:, k].mean()),
                    spread,
                )
            )
    hidden = float(np.mean(table["hidden_communication_s"]))
    return {
        "svg": markup(plots.breakdown(table), "shares"),
        "rows": rows,
        "hidden": format_time(hidden),
        "hidden_share": f"{hidden / (float(table['step_time_s']) or 1.0):.1%}",
    }


def _waterfall(rows: Sequence[Waterfall]) -> dict[str, Any] | None:
    """The picture, and of a pipeline the table of its stages."""
    heads, lines = percent(rows)
    if not heads:
        return None
    return {
        "svg": markup(plots.waterfall(rows), "waterfall"),
        "heads": [f"stage {head}" if head.isdigit() else head for head in heads],
        "rows": lines if len(heads) > 1 else [],
    }


SPLIT = {
    "stages": "What each stage does with a step",
    "pipeline": "Passes of the micro-batches",
    "stage-memory": "Memory of each stage",
    "traffic": "What each dimension moves",
    "mesh": "Who is in a group with whom",
}
"""Pictures that only a split model has, and their headings."""


def _split(run: SavedRun) -> list[dict[str, str]]:
    if run.facts.mesh is None:
        return []
    chosen = SPLIT if has_pipeline(run.timeline) else ("traffic", "mesh")
    return [
        {"name": SPLIT[kind], "svg": markup(plots.picture(kind, run, plots.View(title="")), kind)} for kind in chosen
    ]


def _drawn(timeline: Timeline) -> str:
    """Which ranks the charts show."""
    shown = plots.representatives(timeline)
    words = [f"{rank} ({remark})" if remark else f"{rank}" for rank, remark in shown.items()]
    more = f" of {timeline.world_size:,}" if timeline.world_size > len(shown) else ""
    return f"{'Ranks' if len(shown) > 1 else 'Rank'} {', '.join(words)}{more}."


def _gantts(run: SavedRun) -> list[dict[str, Any]]:
    """The last step, and the whole run."""
    timeline = run.timeline
    begin, end = plots.last_step(timeline)
    windows = [("The last step", begin, end)]
    if begin > 0.01 * end:
        windows.append(("The whole run", 0.0, timeline.makespan))
    return [
        {"name": name, "svg": trusted(gantt_svg(timeline, a, b, f"Gantt chart: {name.lower()}"))}
        for name, a, b in windows
    ]


def _stalls(lost: Plain) -> list[dict[str, str]]:
    rows = zip(lost["cause"], lost["cost_s"], lost["share"], lost["text"], strict=True)
    return [
        {
            "cause": str(cause),
            "cost": format_time(float(cost)),
            "share": f"{float(share):.1%}",
            "text": str(text).split(" Cost: ")[0],
        }
        for cause, cost, share, text in rows
    ]


def _hotspots(run: SavedRun, window: tuple[float, float]) -> dict[str, Any] | None:
    use = run.timeline.links
    if use is None or not len(use.segment_start):
        return None
    spots = hotspots(run.timeline, distinct=True)
    rows = []
    for i in range(len(spots["name"])):
        users = zip(spots["users"][i], spots["user_share"][i], strict=True)
        used = ", ".join(f"{name} {share:.0%}" for name, share in users if name)
        rows.append(
            (
                str(spots["name"][i]),
                format_bandwidth(float(spots["bandwidth"][i])),
                f"{float(spots['utilisation'][i]):.1%}",
                f"{float(spots['peak'][i]):.0%}",
                f"{int(spots['alike'][i]):,}",
                used,
            )
        )
    svgs = []
    if run.topology is not None:
        loads = np.asarray(spots["all_utilisation"], dtype=np.float64)
        svgs.append(markup(plots.loaded_topology(run.topology, loads), "machine"))
    if rows:
        svgs.append(markup(plots.link_heat(use, window, n_links=16), "heat"))
    return {"rows": rows, "svgs": svgs}


def _path(found: Plain) -> dict[str, Any]:
    steps = max(int(found["steps"]), 1)
    whole = float(found["length_s"]) / steps or 1.0

    def shares(parts: Mapping[str, float]) -> list[tuple[str, str, str]]:
        return [(str(k), format_time(v), f"{v / whole:.1%}") for k, v in list(parts.items())[:PATH_ROWS] if v > 0]

    took = np.asarray(found["end"]) - np.asarray(found["begin"])
    longest = np.argsort(-took, kind="stable")[:PATH_ROWS]
    pieces = [
        (str(found["name"][i]), str(found["kind"][i]), f"{int(found['rank'][i])}", format_time(float(took[i])))
        for i in sorted(longest.tolist(), key=lambda i: float(found["begin"][i]))
    ]
    return {"kinds": shares(found["by_kind"]), "links": shares(found["by_link"]), "pieces": pieces, "n": len(took)}


def _memory(run: SavedRun) -> dict[str, Any] | None:
    memory = run.facts.memory
    if not memory.by:
        return None
    parts = {name: held for name, held in memory.by.items() if held}
    figure = plots.picture("memory", run, plots.View(title=""))
    rows = [(name.replace("_", " "), format_bytes(n)) for name, n in parts.items()]
    rows.append(("total", format_bytes(sum(parts.values()))))
    return {"svg": markup(figure, "memory"), "rows": rows, "message": memory.message}


def _flat(table: Table, prefix: str = "") -> Iterator[tuple[str, str]]:
    """A scenario's fields as dotted names; what was left out stays out."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None and (not isinstance(value, str | list | tuple) or len(value)):
            yield f"{prefix}{key}", str(value)


def _run(run: SavedRun) -> list[tuple[str, str]]:
    """What was played, and by what."""
    from importlib.metadata import version

    timeline = run.timeline
    spans = int(sum(timeline.per_op()["ranks"].tolist()))
    rows = [("source", timeline.source), ("ranks", f"{timeline.world_size:,}"), ("spans", f"{spans:,}")]
    if run.topology is not None:
        rows.append(("machine", f"{run.topology.name}: {run.topology.n_nodes} node(s), {run.topology.n_links:,} links"))
    rows += [(name, f"{count:,.0f}") for name, count in timeline.stats.items()]
    return [*rows, ("clustersim", version("clustersim"))]
