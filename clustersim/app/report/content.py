"""What a report says: figures, tables and sentences, from a saved run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from clustersim.app import plots
from clustersim.app.plots.shares import STATE_STYLE
from clustersim.app.plots.style import palette
from clustersim.app.report.hover import gantt_pair, legend
from clustersim.app.report.pages import PageChart, PagePart, both, rendered
from clustersim.core.arrays import Columns, Floats, Ints
from clustersim.core.facts import RunFacts
from clustersim.core.figures import shown_in
from clustersim.core.memory_parts import part_label
from clustersim.core.op_infos import each_kind, kinds
from clustersim.core.saved_run import SavedRun
from clustersim.core.texts import headline
from clustersim.core.timeline import OWN_PACES, Timeline
from clustersim.core.tomls import flat, plainly
from clustersim.core.units import format_bandwidth, format_bytes, format_time
from clustersim.explain.bounds import transfers_unknown
from clustersim.explain.breakdown import Breakdown
from clustersim.explain.critical_path import CriticalPath
from clustersim.explain.explain import KNOWN, NOTHING, explain, late_words, reach, weighed_again
from clustersim.explain.hotspots import hotspots
from clustersim.explain.metrics import a_step, has_steps, step_word
from clustersim.explain.pieces import servers, workers
from clustersim.explain.pipeline import has_pipeline
from clustersim.explain.stalls import costliest
from clustersim.explain.waterfall import Waterfall, pace_note
from clustersim.explain.waterfall import table as percent
from clustersim.files.traces.profiled import BACKEND
from clustersim.studies.what_if.otherwise import each_change, otherwise
from clustersim.studies.what_if.turned import short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from clustersim.explain.stalls import Causes
    from clustersim.scenario.run.running import Prepared

PATH_ROWS = 12
"""Longest pieces of the critical path that are listed."""
WINDOW = "first span to last"
"""What the length of a trace without steps is called, here and by ``clustersim trace``."""
STATS = {
    "waiting_for_launch_share": "waiting for launches",
    "clock_offset_s": "clocks of ranks differ by up to",
    "ranks_measured": "ranks measured",
    "events": "events played",
    "solves": "times that links were shared out",
    "flows": "flows over links",
    "overlap_slowdown": "kernels beside transfers take longer by",
    OWN_PACES: "each rank steps at its own pace",
}
"""What numbers of a trace are called, as ``clustersim trace`` has them, and those of a simulated run; others have names
that people read."""
SHOWN = 5e-4
"""Shares below this print as 0.0 %."""


def page(run: SavedRun, title: str | None = None, prepared: Prepared | None = None) -> str:
    """The page of a run; ``prepared`` : what was run, where it can be run again with one thing changed."""
    timeline = run.timeline
    facts = run.facts
    rerun = prepared is not None and short(timeline)
    explanation = explain(timeline, facts, bounded=rerun)
    reruns = otherwise(prepared, timeline, explanation)
    did, idle = each_change(prepared.scenario, timeline) if prepared is not None and rerun else ([], [])
    explanation = weighed_again(explanation, facts, reruns.again, reruns.remedies)
    table = explanation.breakdown
    late = "" if explanation.charged is None else late_words(explanation.charged)
    gantts = _gantts(run)
    title = title or facts.title or f"a run of {timeline.world_size} ranks ({timeline.source})"
    given = flat(facts.inputs).items()
    inputs = {name: plainly(value) for name, value in given if value not in (None, "", [], (), {})}
    return rendered(
        "report.html.j2",
        title=title,
        headline=headline(title),
        found=explanation,
        facts=facts,
        figures=list(_figures(timeline, facts, table)),
        word=step_word(timeline),
        per=a_step(timeline),
        breakdown=_breakdown(timeline, table, late),
        waterfall=_waterfall(explanation.waterfall),
        drawn=_drawn(timeline),
        split=_split(run),
        gantts=gantts,
        legend=legend([chart.svg for chart in gantts]),
        stalls=_stalls(explanation.stalls, explanation.charged, step_word(timeline)),
        hotspots=_hotspots(run, (table.begin, table.end)),
        **_path(timeline, explanation.critical_path),
        reach=_reach(timeline, explanation.critical_path, table.step_time_s),
        otherwise=[*did, *idle, *reruns.ran],
        memory=_memory(run),
        inputs=list(inputs.items()),
        run=_run(run),
        palette=palette,
    )


def _figures(timeline: Timeline, facts: RunFacts, table: Breakdown) -> Iterator[tuple[str, str]]:
    """The figures that say most, (name, value); of a step's states, their shares of it."""
    mean = table.over(workers(timeline))
    figures = {**facts.figures, "step_time_s": table.step_time_s}
    for figure in shown_in("report"):
        if figure.key == "bytes_sent_per_gpu" and not transfers_unknown(timeline):
            yield from _states(table, mean)
        if figure.key in figures:
            whole = figure.key == "step_time_s" and not has_steps(timeline)
            yield WINDOW if whole else figure.label, figure.text(figures[figure.key])


def _states(table: Breakdown, mean: Floats) -> Iterator[tuple[str, str]]:
    for state in ("exposed transfer", "waiting for a peer", "bubble"):
        share = float(mean[table.states.index(state)])
        if share or state == "exposed transfer":
            yield state, f"{share:.1%}"


def _breakdown(timeline: Timeline, table: Breakdown, late: str) -> PagePart:
    """Means over the ranks that train; servers have a sentence of their own, and so has what is ``late``."""
    ranks = workers(timeline)
    rows = []
    for state, seconds, mean in zip(table.states, table.seconds[ranks].T, table.over(ranks).tolist(), strict=True):
        if seconds.max(initial=0.0) > 0:
            low = float(seconds.min())
            high = float(seconds.max())
            spread = format_time(low) if low == high else f"{format_time(low)} to {format_time(high)}"
            look = STATE_STYLE[state]
            rows.append((look.colour, look.mark, state, f"{mean:.1%}", format_time(float(seconds.mean())), spread))
    hidden = table.hidden_over(ranks)
    share = f"{hidden / (table.step_time_s or 1.0):.1%}"
    groups = plots.working_groups(timeline, table)
    svgs = both(lambda: plots.breakdown(table, groups=groups, word=step_word(timeline)), "shares")
    apart = [_servers(table, servers(timeline)), f"{late[0].upper()}{late[1:]}." if late else ""]
    took = f"{format_time(hidden)} of communication{a_step(timeline)} ({share})"
    talks = any(op.kind != "compute" for op in kinds(timeline.ops))
    told = f"Beside the states: {took} is hidden behind kernels." if talks else ""
    unknown = "What is transferred, and who waits for it, is not known: the collectives were left out."
    return PagePart(rows, svgs, [unknown if transfers_unknown(timeline) else told, " ".join(filter(None, apart))])


def _servers(table: Breakdown, ranks: Ints) -> str:
    """What servers do with a step, who are in no mean; empty where nobody serves."""
    if not len(ranks):
        return ""
    who = f"the server, rank {ranks[0]}," if len(ranks) == 1 else f"the {len(ranks):,} servers"
    shares = zip(table.states, table.over(ranks).tolist(), strict=True)
    parts = ", ".join(f"{state} {share:.1%}" for state, share in shares if share >= SHOWN)
    return f"Not in these means, {who} of a step: {parts}."


def _waterfall(rows: Sequence[Waterfall]) -> PagePart | None:
    """The picture, of a pipeline the table of its stages, and why kernels take less here than where the time goes."""
    heads, lines = percent(rows)
    if not heads:
        return None
    named = [f"stage {head}" if head.isdigit() else head for head in heads]
    svgs = both(lambda: plots.waterfall(rows), "waterfall")
    return PagePart(lines if len(heads) > 1 else [], svgs, named, pace_note(lines))


SPLIT = {
    "stages": "What each stage does with a step",
    "pipeline": "Passes of the micro-batches",
    "stage-memory": "Memory of each stage",
    "traffic": "What each dimension moves",
    "mesh": "Who is in a group with whom",
}
"""Pictures that only a split model has, and their headings."""


def _split(run: SavedRun) -> list[PageChart]:
    if run.facts.mesh is None:
        return []
    chosen = SPLIT if has_pipeline(run.timeline) else ("traffic", "mesh")
    return [PageChart(SPLIT[kind], svg) for kind in chosen for svg in both(partial(_picture, kind, run), kind)]


def _picture(kind: str, run: SavedRun) -> Figure:
    """A picture under the page's own heading."""
    return plots.picture(kind, run, plots.View(title=""))


def _drawn(timeline: Timeline) -> str:
    shown = plots.representatives(timeline)
    rank_texts = [f"{rank} ({remark})" if remark else f"{rank}" for rank, remark in shown.items()]
    more = f" of {timeline.world_size:,}" if timeline.world_size > len(shown) else ""
    return f"{'Ranks' if len(shown) > 1 else 'Rank'} {', '.join(rank_texts)}{more}."


def _gantts(run: SavedRun) -> list[PageChart]:
    timeline = run.timeline
    begin, end = plots.last_step(timeline)
    windows = [("The last step" if has_steps(timeline) else "The window of the trace", begin, end)]
    if begin > 0.01 * end:
        windows.append(("The whole run", 0.0, timeline.makespan))
    return [PageChart(name, gantt_pair(timeline, a, b, f"Gantt chart: {name.lower()}")) for name, a, b in windows]


def _stalls(lost: Columns, charged: Causes | None, word: str) -> PagePart:
    """The causes that cost most, none that reads as nothing; the note says how many are left out, and their cost."""
    rows = zip(*(lost[name].tolist() for name in ("cause", "cost_s", "share", "text")), strict=True)
    told = [
        (cause, format_time(cost), f"{share:.1%}", text.split(" Cost: ")[0])
        for cause, cost, share, text in rows
        if share >= SHOWN
    ]
    others = [] if charged is None else costliest(charged)[len(told) :]
    if charged is None or not others:
        return PagePart(told)
    cost = sum(charged.share(charge) for charge in others)
    sum_text = f"{cost:.1%}" if cost >= SHOWN else "less than 0.05%"
    count_text = f"{len(others):,} {'cause' if len(others) == 1 else 'causes'} {'more ' if told else ''}"
    return PagePart(told, note=f"Left out: {count_text}of {sum_text} of the {word}{' together' if others[1:] else ''}.")


def _hotspots(run: SavedRun, window: tuple[float, float]) -> PagePart | None:
    use = run.timeline.links
    if use is None or not len(use.segment_start):
        return None
    spots = hotspots(run.timeline)
    rows = []
    for i in range(len(spots["name"])):
        users = zip(spots["users"][i], spots["user_share"][i], strict=True)
        used = ", ".join(f"{name} {share:.0%}" for name, share in users if name)
        rate, mean, peak = (float(spots[name][i]) for name in ("bandwidth", "utilisation", "peak"))
        alike = f"{int(spots['alike'][i]):,}"
        rows.append((str(spots["name"][i]), format_bandwidth(rate), f"{mean:.1%}", f"{peak:.0%}", alike, used))
    svgs = []
    if run.topology is not None:
        loads = np.asarray(spots["all_utilisation"], dtype=np.float64)
        svgs += both(partial(plots.loaded_topology, run.topology, loads), "machine")
    if rows:
        svgs += both(lambda: plots.link_heat(use, window, n_links=16), "heat")
    return PagePart(rows, svgs)


def _reach(timeline: Timeline, path: CriticalPath, step: float) -> str:
    """A sentence where the path is a part of a step; else empty: it is all of it."""
    if sum(path.by_kind.values()) >= KNOWN * step:
        return ""
    reach_text = f"Here it is {reach(path, step, a_step(timeline))}, of a {step_word(timeline)} of {format_time(step)}"
    return f"{reach_text}: a trace does not say what all work waits for."


def _path(timeline: Timeline, critical: CriticalPath) -> dict[str, list[tuple[str, ...]]]:
    """By kind and by link (name, seconds, share), and its longest pieces (name, kind, rank, seconds)."""
    step_length = critical.length_s / critical.steps or 1.0

    def shares(parts: Mapping[str, float]) -> list[tuple[str, ...]]:
        """The largest shares of the path: (name, seconds, percent of the step); none that reads as nothing."""
        largest = [(k, v, v / step_length) for k, v in list(parts.items())[:PATH_ROWS]]
        return [(k, format_time(v), f"{share:.1%}") for k, v, share in largest if share >= NOTHING]

    names = {-1: "nothing queued"} | {i: op.name for i, op in each_kind(timeline.ops)}
    longest = sorted(critical.pieces, key=lambda piece: piece.begin - piece.end)[:PATH_ROWS]
    pieces: list[tuple[str, ...]] = [
        (names[path_piece.op], path_piece.kind, f"{path_piece.rank}", format_time(path_piece.end - path_piece.begin))
        for path_piece in sorted(longest, key=lambda piece: piece.begin)
    ]
    return {"kinds": shares(critical.by_kind), "links": shares(critical.by_link), "pieces": pieces}


def _memory(run: SavedRun) -> PagePart | None:
    memory = run.facts.memory
    if not memory.by:
        return None
    parts = {name: nbytes for name, nbytes in memory.by.items() if nbytes}
    rows = [(part_label(name), format_bytes(n)) for name, n in parts.items()]
    rows.append(("total", format_bytes(sum(parts.values()))))
    return PagePart(rows, both(partial(_picture, "memory", run), "memory"), [memory.message] if memory.message else [])


def _run(run: SavedRun) -> list[tuple[str, str]]:
    from importlib.metadata import version

    timeline = run.timeline
    spans = int(sum(timeline.per_op()["ranks"].tolist()))
    rows = [("source", timeline.source), ("ranks", f"{timeline.world_size:,}"), ("spans", f"{spans:,}")]
    if run.topology is not None:
        rows.append(("machine", f"{run.topology.name}: {run.topology.n_nodes} node(s), {run.topology.n_links:,} links"))
    for name, value in timeline.stats.items():
        if name.startswith(BACKEND):
            rows.append((BACKEND.rstrip(": "), name.removeprefix(BACKEND)))
        else:
            rows.append((STATS.get(name, name), _stat(name, value)))
    return [*rows, ("clustersim", version("clustersim"))]


def _stat(name: str, value: float) -> str:
    """A number of the run's as people read it, by its name."""
    if name == OWN_PACES:
        return "yes"
    if name.endswith(("_share", "_slowdown")):
        return f"{value:.1%}"
    return format_time(value) if name.endswith("_s") else f"{value:,.0f}"
