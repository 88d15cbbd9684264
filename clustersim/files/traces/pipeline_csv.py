"""A folder of a pipeline's recorded operations: ``ops.csv`` (or ``.csv.gz``) and ``steps.csv`` -> Timeline.

``ops.csv`` has a line per operation and rank: ``step, rank``, what it was (``op`` or ``optype``), its micro-batch
(``microbatch`` or ``mb_id``), ``start`` and ``end`` or ``duration`` with their unit (``start_s``, ``end_ms``), and
where it is told ``stage``. ``steps.csv`` says how long each step took, for each rank (``rank, schedule_ms``) or for all
(``step_s``). Every step is recorded from its own zero; here they stand one after another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from clustersim.core.errors import TraceError, few
from clustersim.core.label import Label
from clustersim.core.limits import MOST_RANKS, counted
from clustersim.core.op_infos import OpDetail
from clustersim.core.paths import data_path
from clustersim.core.program import COMM_STREAM, COMPUTE_STREAM
from clustersim.core.texts import toml
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.files.traces.csv_table import CsvTable, header, read_table
from clustersim.files.traces.heads import Head, Likeness, likeness

STEPS_APART = "steps_apart"
"""In :attr:`Timeline.stats` where every step was recorded by a clock of its own: nothing is known across them."""
SLACK = 1e-3
"""Share of a step by which its operations may end after it: tables are rounded."""


@dataclass(frozen=True)
class OperationWord:
    """What an operation is called in a table: its name here, kind and phase, the action of a schedule it is (part of),
    and who meets in it: ``dp``, the ranks of a stage; ``embd``, first and last stage of a replica; ``world``."""

    name: str
    kind: str = "compute"
    phase: str = "other"
    action: str = ""
    dim: str = ""


@lru_cache(maxsize=1)
def words() -> dict[str, OperationWord]:
    """Operations by the words of tables that are known (``data/pipeline_words.toml``); others keep their own."""
    path = data_path("data") / "pipeline_words.toml"
    return msgspec.convert(toml(path.read_text("utf-8"), str(path), TraceError), dict[str, OperationWord])


@dataclass(frozen=True)
class OpsLine:
    """A line of ``ops.csv``: times [s] from the step's own zero, ``replica`` the rank's place within its stage."""

    step: int
    rank: int
    stage: int
    replica: int
    word: OperationWord
    seq: int
    microbatch: int
    start: float
    end: float
    where: str


TOLD = 6
"""Ranks or steps that a message names."""
Lengths = Mapping[tuple[int, int], float]
"""(step, rank) -> seconds; rank -1 for all ranks."""


def sniff(head: Head) -> Likeness:
    """Whether this is one of the two tables, whole or not."""
    names = set(header(head.data))
    lengths = any(name.startswith(("step_", "schedule_")) for name in names)
    return likeness(named=False, shaped="step" in names and (lengths or bool(names & {"op", "optype"})))


def read(paths: Sequence[Path]) -> Timeline:
    """The run of one folder. Raises :class:`TraceError` for half of one, and for tables that contradict each other."""
    tables = [read_table(path) for path in paths]
    ops = [table for table in tables if table.has("op", "optype")]
    steps = [table for table in tables if not table.has("op", "optype")]
    if len(ops) != 1 or len(steps) != 1:
        missing = "ops.csv" if not ops else "steps.csv"
        problem = "holds several runs; read one at a time" if ops and steps else f"has no {missing} beside it"
        raise TraceError(f"{paths[0]}: {problem}; a pipeline's folder holds one ops.csv and one steps.csv")
    lines = _lines(ops[0])
    lengths = _lengths(steps[0])
    _check(lines, lengths, ops[0], steps[0])
    return _timeline(_with_microbatches(lines), lengths, str(ops[0].path.parent))


# ---- rows ------------------------------------------------------------------------------------------------------------


def _lines(table: CsvTable) -> list[OpsLine]:
    """The lines in the table's order, on stages: those named, else each rank is one."""
    word = table.text("op", "optype")
    micro = table.whole("microbatch", "mb_id")
    step = table.whole("step")
    rank = table.whole("rank")
    start = table.seconds("start")
    end = table.seconds("end") if table.timed("end") else start + table.seconds("duration")
    stage = _stages(table, rank)
    ranks_of = {s: sorted(r for r, rank_stage in stage.items() if rank_stage == s) for s in set(stage.values())}
    place = {r: i for ranks in ranks_of.values() for i, r in enumerate(ranks)}
    seen: Counter[tuple[int, int, str]] = Counter()
    lines = []
    for i, text in enumerate(word):
        s = int(step[i])
        r = int(rank[i])
        line_place = f"{table.path}:{i + 2}"
        if end[i] < start[i]:
            raise TraceError(
                f"{line_place}: {text} of rank {r} ends at {end[i]:g} s, before it starts at {start[i]:g} s"
            )
        action_word = words().get(text, OperationWord(text))
        seq = seen[s, r, text]
        seen[s, r, text] += 1
        lines.append(
            OpsLine(
                s, r, stage[r], place[r], action_word, seq, int(micro[i]), float(start[i]), float(end[i]), line_place
            )
        )
    return lines


def _stages(table: CsvTable, rank: Iterable[int]) -> dict[int, int]:
    ranks = [int(r) for r in rank]
    if not table.has("stage"):
        return {r: i for i, r in enumerate(sorted(set(ranks)))}
    stage_of: dict[int, int] = {}
    for i, (r, s) in enumerate(zip(ranks, table.whole("stage").tolist(), strict=True)):
        if stage_of.setdefault(r, s) != s:
            raise TraceError(f"{table.path}:{i + 2}: rank {r} is at stage {s} here, and at stage {stage_of[r]} above")
    return stage_of


def _lengths(table: CsvTable) -> dict[tuple[int, int], float]:
    seconds = table.seconds("schedule" if table.timed("schedule") else "step")
    ranks = table.whole("rank").tolist() if table.has("rank") else [-1] * len(seconds)
    keys = zip(table.whole("step").tolist(), ranks, strict=True)
    return dict(zip(keys, map(float, seconds.tolist()), strict=True))


# ---- what must hold --------------------------------------------------------------------------------------------------


def _check(lines: list[OpsLine], lengths: Lengths, ops: CsvTable, steps: CsvTable) -> None:
    """Raise :class:`TraceError` where a step lacks ranks, or a rank actions, or the two tables disagree."""
    ranks = sorted({line.rank for line in lines})
    if ranks != list(range(len(ranks))):
        world = max(ranks) + 1
        counted(world, MOST_RANKS, f"{ops.path}: ranks of the run", TraceError)
        gone = np.setdiff1d(np.arange(world), ranks).tolist()
        raise TraceError(f"{ops.path}: no operation of rank(s) {few(gone, TOLD)} of {world}; every rank is needed")
    per_stage = Counter({line.rank: line.stage for line in lines}.values())
    if len(set(per_stage.values())) > 1:
        stages_text = ", ".join(f"{n} at stage {s}" for s, n in sorted(per_stage.items()))
        raise TraceError(f"{ops.path}: stages hold different numbers of ranks: {stages_text}")
    op_steps = {line.step for line in lines}
    length_steps = {step for step, _ in lengths}
    if op_steps != length_steps:
        path, other_file = (steps.path, ops.path) if op_steps - length_steps else (ops.path, steps.path)
        raise TraceError(
            f"{path}: no step(s) {few(sorted(op_steps ^ length_steps), TOLD)}, which {other_file.name} has"
        )
    for step, step_lines in _by_step(lines).items():
        _check_step(step, step_lines, len(ranks), lengths, ops)


def _check_step(step: int, lines: list[OpsLine], world: int, lengths: Lengths, ops: CsvTable) -> None:
    gone = sorted(set(range(world)) - {line.rank for line in lines})
    if gone:
        raise TraceError(f"{ops.path}: step {step} has no operation of rank(s) {few(gone, TOLD)}; every rank is needed")
    done: dict[tuple[int, str, int], OpsLine] = {}
    for line in lines:
        if line.word.action and line.word.kind == "compute":
            first = done.setdefault((line.rank, line.word.action, line.microbatch), line)
            if first is not line:
                line_text = f"{line.word.name} of micro-batch {line.microbatch} of rank {line.rank} in step {step}"
                raise TraceError(f"{line.where}: {line_text} is there twice, first at {first.where}")
        limit = lengths.get((step, line.rank), lengths.get((step, -1)))
        if limit is None:
            raise TraceError(f"{line.where}: rank {line.rank} has no length of step {step} in the table of steps")
        if line.end > limit * (1 + SLACK):
            raise TraceError(f"{line.where}: ends at {line.end:g} s, but step {step} took {limit:g} s")
    _check_pairs(step, done, ops)


def _check_pairs(step: int, done: Mapping[tuple[int, str, int], OpsLine], ops: CsvTable) -> None:
    """Every micro-batch goes forward and back, the same ones on every rank."""
    if not done:
        raise TraceError(f"{ops.path}: step {step} has no forward and no backward; known: {', '.join(words())}")
    forward, back = ({(r, m) for r, action, m in done if action in letters} for letters in ("F", "BI"))
    if forward != back:
        rank, micro = min(forward ^ back)
        have, lack = ("forward", "backward") if (rank, micro) in forward else ("backward", "forward")
        raise TraceError(f"{ops.path}: step {step}, rank {rank}: micro-batch {micro} has a {have} and no {lack}")


def _by_step(lines: Iterable[OpsLine]) -> dict[int, list[OpsLine]]:
    by_step: defaultdict[int, list[OpsLine]] = defaultdict(list)
    for line in lines:
        by_step[line.step].append(line)
    return dict(by_step)


# ---- spans -----------------------------------------------------------------------------------------------------------


def _with_microbatches(lines: list[OpsLine]) -> list[OpsLine]:
    """Messages are of the micro-batches that the rank's actions are of, in order."""
    order: defaultdict[tuple[int, int, str], list[tuple[float, int]]] = defaultdict(list)
    for line in lines:
        if line.word.kind == "compute" and line.word.action in {"F", "B", "I"}:
            order[line.step, line.rank, "F" if line.word.action == "F" else "B"].append((line.start, line.microbatch))
    for done in order.values():
        done.sort()

    def told(line: OpsLine) -> OpsLine:
        """A line with the micro-batch of its action."""
        done = order[line.step, line.rank, line.word.action]
        return replace(line, microbatch=done[line.seq][1]) if line.seq < len(done) else line

    return [told(line) if line.word.dim == "pp" and line.microbatch < 0 else line for line in lines]


def _meeting(line: OpsLine) -> tuple[object, ...] | None:
    """Lines of one communication have the same; None for work of the rank's own."""
    word = line.word
    step = line.step
    if word.dim == "pp":
        down = (word.kind == "send") == (word.action == "F")  # the peer is at the next stage
        return step, word.action, line.microbatch, line.replica, line.stage if down else line.stage - 1
    meeting_place = {"dp": line.stage, "embd": line.replica, "world": 0}
    return (step, word.name, line.seq, meeting_place[word.dim]) if word.dim else None


def _timeline(lines: list[OpsLine], lengths: Lengths, source: str) -> Timeline:
    """Steps one after another, each as long as the table says."""
    world = 1 + max(line.rank for line in lines)
    together: defaultdict[tuple[object, ...], list[OpsLine]] = defaultdict(list)
    for line in lines:
        together[_meeting(line) or ()].append(line)
    ops: dict[tuple[object, ...], int] = {}
    infos: list[OpInfo] = []
    rows: list[tuple[int, int, float, float, float]] = []
    begin = 0.0
    for step, step_lines in _by_step(lines).items():
        for line in [*step_lines, *_rests(step_lines, lengths)]:
            met = _meeting(line)
            collective = met is not None and line.word.dim != "pp"
            key = met if collective and met else (step, line.stage, line.word, line.seq, line.microbatch)
            if key not in ops:
                ops[key] = len(infos)
                infos.append(_info(line, together[met] if met and collective else []))
            began = line.start if met is None else max(met_line.start for met_line in together[met])
            rows.append((ops[key], line.rank, begin + line.start, begin + min(began, line.end), begin + line.end))
        begin += max(length for (s, _), length in lengths.items() if s == step)
    op, rank, ready, start, end = (np.array(column) for column in zip(*rows, strict=True))
    sets = tuple(np.array([r], dtype=np.int64) for r in range(world))
    stats = {STEPS_APART: 1.0}
    return Timeline(world, tuple(infos), sets, op, rank, ready, start, end, source=source, stats=stats)


def _rests(lines: list[OpsLine], lengths: Lengths) -> list[OpsLine]:
    """What a rank's schedule took after its last operation, or a step after the last of all."""
    last = {line.rank: line for line in sorted(lines, key=lambda line: line.end)}
    latest = max(last.values(), key=lambda line: line.end)
    ends = {r: lengths[latest.step, r] for r in last if (latest.step, r) in lengths}
    ends = ends or {latest.rank: lengths[latest.step, -1]}
    return [
        replace(last[r], word=OperationWord("end of the schedule"), seq=0, microbatch=-1, start=last[r].end, end=end)
        for r, end in ends.items()
        if end > last[r].end
    ]


def _info(line: OpsLine, met: list[OpsLine]) -> OpInfo:
    """The op of a line; ``met`` are all lines of a collective."""
    word = line.word
    label = Label(action=word.action, microbatch=line.microbatch, chunk=0 if word.action else -1, dim=word.dim)
    name = f"{word.name} {line.microbatch}" if word.action else word.name
    stream = {"pp": f"{COMM_STREAM} pp", "": COMPUTE_STREAM}.get(word.dim, COMM_STREAM)
    bound = "communication" if word.dim else "compute" if word.phase != "other" else "host"
    detail: OpDetail = {}
    if met:
        starts = [met_line.start for met_line in met]
        members = tuple(sorted(met_line.rank for met_line in met))
        detail = {"group_size": len(met), "members": members, "skew_s": max(starts) - min(starts)}
        # A member's time includes waiting for the others: the shortest is from last start to last end.
        detail |= {"transfer_s": min(o.end - o.start for o in met), "communicator": word.dim}
    return OpInfo(
        name, word.kind, stream, word.phase, bound, step=line.step, detail=detail, label=label, stage=line.stage
    )
