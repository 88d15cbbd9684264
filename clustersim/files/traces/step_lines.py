"""Step times of frameworks that log a step in one line, as rows of a table: which line, and what its numbers mean.

MaxText (``metric_logger.py``), LitGPT (``pretrain.py``, ``finetune/``), OpenCLIP (``training/train.py``), fairseq
(``logging/progress_bar.py``), OLMo and OLMo-core, verl, NeMo Automodel, ms-swift, LLaMA-Factory's trainer_log.jsonl,
DeepSpeed's pipeline engine (GPT-NeoX), llm.c, nanochat and their kin, timm, PyTorch's and torchvision's examples,
MMEngine, detectron2, Levanter, InternEvo, PaddleNLP, TensorFlow's Estimator and Model Garden, and of reinforcement
learning TRL, slime, NeMo RL, prime-rl (``trainer/sft/train.py``).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby, pairwise
from statistics import median

from clustersim.core.texts import Table, data_table

_NUMBER = r"\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?"
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}
LONGEST = 5_000
"""Characters of a line that may log a step: verl's have hundreds of values."""
_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)")


@dataclass(frozen=True)
class StepLine:
    """How a framework logs a step.

    word : stands in every such line. pattern : the line, with groups ``step``; ``time`` [``unit``, else s] of a step,
        ``rate`` [steps/s], ``since`` [``unit``] the run began, ``words`` and ``speed`` (words of a step, words/s), or
        none of them: the line's own time tells.
    means : what a time is, where it is not that of one step.
    rates : what else is logged, by name and unit.
    passes : whether a line is a pass of a step, the number of which is group ``update``.
    block : the line is below a line that has the step's number.
    """

    framework: str
    word: str
    pattern: re.Pattern[str]
    means: str = ""
    rates: tuple[tuple[str, re.Pattern[str]], ...] = ()
    passes: bool = False
    block: re.Pattern[str] | None = None

    def match(self, line: str) -> re.Match[str] | None:
        """The line's numbers, where it is one of these."""
        return self.pattern.search(line) if self.word in line and len(line) <= LONGEST else None


def _row(entry: Table) -> StepLine:
    """A row of ``data/step_lines.toml``, ``N`` in its patterns for a number."""
    rates = tuple((name, _numbered(rate)) for name, rate in entry.get("rates", {}).items())
    block = _numbered(entry["block"]) if "block" in entry else None
    plain = {name: entry[name] for name in ("framework", "word", "means", "passes") if name in entry}
    return StepLine(pattern=_numbered(entry["pattern"]), rates=rates, block=block, **plain)


def _numbered(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("N", _NUMBER))


WINDOW = "a mean over a window"
LINES = tuple(map(_row, data_table("step_lines")["line"]))


@dataclass
class LoggedSteps:
    """What such lines of a log say; the first framework that has one is whose log it is."""

    row: StepLine | None = None
    number: int = 0
    rows: list[tuple[int, int, float]] = field(default_factory=list)
    marks: list[tuple[int, float]] = field(default_factory=list)
    others: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    parts: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def take(self, line: str) -> None:
        """What one line says."""
        for row in LINES:
            if row.block is not None and "[step=" in line and (head := row.block.search(line)) is not None:
                self.number = int(_value(head[1]))
            if self.row is not None and row.framework != self.row.framework:
                continue
            match = row.match(line)
            if match is not None:
                self.row = row
                self._of_line(row, match, line)
                return

    def _of_line(self, row: StepLine, match: re.Match[str], line: str) -> None:
        groups = match.groupdict()
        step = int(groups["step"]) if groups.get("step") else self.number if row.block else len(self.rows) + 1
        unit = _UNITS[groups.get("unit") or ""]
        update = int(groups["update"]) if groups.get("update") else step
        rate = _value(groups["rate"]) if groups.get("rate") else 0.0
        if groups.get("time"):
            self.rows.append((step, update, _value(groups["time"]) * unit))
        elif rate > 0:
            self.rows.append((step, update, 1 / rate))
        elif groups.get("speed") and _value(groups["speed"]) > 0:
            self.rows.append((step, update, _value(groups["words"]) / _value(groups["speed"])))
        elif groups.get("since"):
            self.marks.append((step, elapsed(groups["since"]) * unit))
        elif "time" not in groups and "rate" not in groups and (clock := written_at(line)) is not None:
            self.marks.append((step, clock))
        for name, pattern in row.rates:
            if figure := pattern.search(line):
                self.others[name].append(_value(figure[1]))
        for name, seconds in re.findall(rf"\btiming_s/(\w+):({_NUMBER})", line) if row.framework == "verl" else ():
            if name != "step":
                self.parts[name].append(_value(seconds))

    def steps(self) -> list[tuple[int, float]]:
        """Seconds of steps by their numbers."""
        if self.marks:
            return _between(self.marks)
        if self.row is not None and self.row.passes:
            return _of_passes(self.rows)
        return [(step, seconds) for step, _, seconds in self.rows]

    @property
    def means(self) -> str:
        """What a time is, where it is not that of one step."""
        if self.row is None or not self.row.passes:
            return self.row.means if self.row is not None else ""
        passes = _passes(self.rows)
        if passes <= 1:
            return ""
        return f"of {passes:.3g} passes" if _is_whole(self.rows) else f"{passes:.3g} times a logged pass"


def _between(marks: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Seconds of steps between times; where times are whole seconds and steps short, the mean over all but the
    first."""
    pairs = [(old, early, new, late) for (old, early), (new, late) in pairwise(marks) if new > old and late >= early]
    if not pairs:
        return []
    apart = [(new, (late - early) / (new - old)) for old, early, new, late in pairs]
    if all(mark == int(mark) for _, mark in marks) and median(late - early for _, early, _, late in pairs) < 20:
        counted = pairs[1:] or pairs
        steps = sum(new - old for old, _, new, _ in counted)
        mean = sum(late - early for _, early, _, late in counted) / steps
        return [(counted[-1][2], mean)]
    return apart


def _passes(rows: Sequence[tuple[int, int, float]]) -> float:
    """Passes of a step: of as many lines as most steps have, or by how both numbers grow where not all are logged."""
    if _is_whole(rows):
        sizes = Counter(update for _, update, _ in rows)
        inner = list(sizes.values())[1:-1] or list(sizes.values())  # the first and the last may have lost some
        return float(Counter(inner).most_common(1)[0][0]) if inner else 1.0
    (first, first_step, _), (last, last_step, _) = rows[0], rows[-1]
    return (last - first) / (last_step - first_step) if last_step > first_step and last > first else 1.0


def _is_whole(rows: Sequence[tuple[int, int, float]]) -> bool:
    """Whether every pass is logged."""
    return all(new - old == 1 for (old, *_), (new, *_) in pairwise(rows))


def _of_passes(rows: Sequence[tuple[int, int, float]]) -> list[tuple[int, float]]:
    """Seconds of steps of several passes: their sum where every pass is logged, else passes times a logged one."""
    passes = _passes(rows) if rows else 1.0
    if passes <= 1 or not _is_whole(rows):
        return [(update, seconds * max(passes, 1.0)) for _, update, seconds in rows]
    steps = [(update, [seconds for *_, seconds in group]) for update, group in groupby(rows, key=lambda row: row[1])]
    return [(update, sum(seconds)) for update, seconds in steps if len(seconds) == passes]


def _value(word: str) -> float:
    return float(word.replace(",", ""))


def elapsed(word: str) -> float:
    """Seconds of ``"01:02"``, ``"1:02:03"`` or ``"1 day, 0:00:20"``, or a number."""
    if ":" not in word:
        return _value(word)
    days, _, clock = word.rpartition(", ")
    seconds = 0
    for piece in clock.split(":"):
        seconds = 60 * seconds + int(piece)
    return float(seconds + 86400 * int(days.split(" ")[0] if days else 0))


def written_at(line: str) -> float | None:
    """When a line was written [s since 1970]; None where it has no date and time of day."""
    match = _CLOCK.search(line)
    if match is None:
        return None
    try:
        return datetime.fromisoformat(f"{match[1]}T{match[2].replace(',', '.')}").timestamp()
    except ValueError:
        return None
