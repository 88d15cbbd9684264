"""Step times of loops that only draw a progress bar: Hugging Face's Trainer and what is built on it (TRL, axolotl,
LLaMA-Factory), Lightning and torchtune.

tqdm writes how many steps are done and its running mean of a step's seconds; the Trainer's lines of losses have no
time, and its last line (transformers/trainer_utils.py ``speed_metrics``) has means over the whole run, its first steps,
checkpoints and evaluation included.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

_BAR = re.compile(
    r"\d{1,3}%\|[^|]*\|\s*(\d{1,12})/(\d{1,12}) \[[\d:]{4,}<[\d:?]+,\s+(\d{1,9}(?:\.\d{1,9})?)(s/it|it/s)"
)
_OTHERS = re.compile(
    r"Map|Filter|Load|Generat|Running|Tokeniz|Eval|Validat|Sanity|Predict|Download|Fetch|Sav|Cast|Pack|Truncat|Add|"
    r"Convert|Appl|Process|Capturing",
    re.IGNORECASE,
)
"""Of a bar's title, what is no training."""
_TOTAL = re.compile(r"Total optimization steps\s*=\s*([\d,]{1,15})")
_SPEED = re.compile(r"\btrain_(samples|steps|tokens)_per_second'?\s*[:=]\s*'?(\d{1,12}(?:\.\d{1,12})?)")
_NAMES = {"samples": "samples/s", "steps": "steps/s", "tokens": "tokens/s"}
LOSSES = re.compile(r"\{'loss': ")
"""A line of losses."""
HEADS = (_BAR, _SPEED, LOSSES)
"""What tells such a log."""


@dataclass
class BarSteps:
    """What bars and closing lines say.

    bars : by how many steps the bar has, the seconds of a step at each. total : steps of the run, where a line says it.
    speeds : means of the whole run, by unit. of_trainer : whether there are lines of Hugging Face's Trainer.
    """

    bars: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    total: int = 0
    speeds: dict[str, float] = field(default_factory=dict)
    of_trainer: bool = False

    def take(self, line: str) -> None:
        """What one line says."""
        match = _BAR.search(line) if "%|" in line else None
        if match and not _OTHERS.search(line[: match.start()]):
            rate = float(match[3])
            if rate > 0:
                self.bars[int(match[2])][int(match[1])] = rate if match[4] == "s/it" else 1 / rate
        if found := _TOTAL.search(line):
            self.total = int(found[1].replace(",", ""))
        for name, value in _SPEED.findall(line):
            self.speeds[_NAMES[name]] = float(value)
        self.of_trainer = self.of_trainer or bool(self.speeds) or LOSSES.search(line) is not None

    def steps(self) -> list[tuple[int, float]]:
        """Seconds of steps by their numbers: of the bar of so many as the run has, else of the first bar; or one, the
        mean of the whole run."""
        length = self.total if self.total in self.bars else next(iter(self.bars), 0)
        if length:
            return sorted((step, seconds) for step, seconds in self.bars[length].items() if step)
        mean = self.speeds.get("steps/s")
        return [(self.total, 1 / mean)] if mean else []

    def rates(self) -> dict[str, float]:
        """Means over the whole run."""
        return {f"{unit}, mean of the run": value for unit, value in self.speeds.items()}

    @property
    def framework(self) -> str:
        """Whose log it is."""
        return "Hugging Face Trainer" if self.of_trainer else "a progress bar"

    @property
    def apart(self) -> float | None:
        """By how much the run's mean is longer than a step of the bar, as a part of it; None where one is missing."""
        mean = self.speeds.get("steps/s")
        steps = self.steps() if self.bars else []
        return 1 / mean / median(seconds for _, seconds in steps) - 1 if mean and steps else None
