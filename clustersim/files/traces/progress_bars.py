"""Step times of loops that only draw a progress bar: Hugging Face's Trainer and what is built on it (TRL, axolotl,
LLaMA-Factory), Lightning and torchtune.

tqdm writes how many steps are done and its running mean of a step's seconds, which Lightning makes the mean since the
start (``smoothing=0``): then the time between two bars says what a step took. The Trainer's lines of losses have no
time, and its last line (transformers/trainer_utils.py ``speed_metrics``) has means over the whole run, its first steps,
checkpoints and evaluation included.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from clustersim.files.traces.step_lines import elapsed

_BAR = re.compile(
    r"\d{1,3}%\|[^|]*\|\s*(?P<done>\d{1,12})/(?P<all>\d{1,12}) \[(?P<since>\d{1,4}(?::\d\d){1,2})<[\d:?]+,\s+"
    r"(?P<rate>\d{1,9}(?:\.\d{1,9})?)(?P<unit>s/it|it/s)"
)
_OTHERS = re.compile(
    r"Map|Filter|Load|Generat|Running|Tokeniz|Eval|Validat|Sanity|Predict|Download|Fetch|Sav|Cast|Pack|Truncat|Add|"
    r"Convert|Appl|Process|Capturing",
    re.IGNORECASE,
)
"""Of a bar's title, what is no training."""
_TOTAL = re.compile(r"Total optimization steps\s*=\s*([\d,]{1,15})")
_RESUMED = re.compile(r"Continuing training from global step (\d{1,12})")
_SPEED = re.compile(r"\btrain_(samples|steps|tokens)_per_second['\"]?\s*[:=]\s*['\"]?(\d{1,12}(?:\.\d{1,12})?)")
_NAMES = {"samples": "samples/s", "steps": "steps/s", "tokens": "tokens/s"}
LOSSES = re.compile(r"\{'loss': ")
"""A line of losses."""
HEADS = (_BAR, _SPEED, LOSSES)
"""What tells such a log."""


LEAST = 1e-4
"""Seconds below which no step is: what a run that was resumed at its end takes for all its steps."""
APART = 10.0
"""Seconds between two bars from which on what tqdm leaves off, parts of a second, is little."""
CUT = 1.0
"""Seconds that the time on a bar leaves off, at most: tqdm cuts parts of a second."""
ROUNDED = 0.005
"""By how much the rate on a bar may be off, in its unit."""
FINE = 0.05
"""By how much a step between two bars may be off."""
_OF_EPOCH = re.compile(r"\bEpoch \d+:\s+\d{0,3}$")
"""A title of Lightning's bar of an epoch, whose rates are means since its start."""


@dataclass(frozen=True)
class ProgressBar:
    """What a bar says: steps done, seconds since the start, and seconds of a step, which may be ``off`` by so many;
    ``of_epoch`` : whether it is one of Lightning's."""

    done: int
    since: float
    seconds: float
    off: float = 0.0
    of_epoch: bool = False

    @property
    def is_mean(self) -> bool:
        """Whether the rate is that of all steps so far."""
        off = abs(self.since / self.done - self.seconds) if self.done else 0.0
        return off <= CUT / max(self.done, 1) + 0.01 * self.seconds


@dataclass
class BarSteps:
    """What bars and closing lines say.

    bars : by how many steps the whole bar has, what it says at each. total : steps of the run, where a line says it.
    resumed : those of them that were done before, in a run that was resumed. speeds : means of the whole run, by unit.
    of_trainer : whether there are lines of Hugging Face's Trainer.
    """

    bars: dict[int, dict[int, ProgressBar]] = field(default_factory=lambda: defaultdict(dict))
    total: int = 0
    resumed: int = 0
    speeds: dict[str, float] = field(default_factory=dict)
    of_trainer: bool = False

    def take(self, line: str) -> None:
        """What one line says."""
        behind = 0
        for match in _BAR.finditer(line) if "%|" in line else ():
            rate = float(match["rate"])
            if rate > 0 and not _OTHERS.search(line[behind : match.start()]):
                seconds = rate if match["unit"] == "s/it" else 1 / rate
                off = ROUNDED if match["unit"] == "s/it" else ROUNDED * seconds**2
                done = int(match["done"])
                of_epoch = _OF_EPOCH.search(line[behind : match.start()]) is not None
                self.bars[int(match["all"])][done] = ProgressBar(done, elapsed(match["since"]), seconds, off, of_epoch)
            behind = match.end()
        if found := _TOTAL.search(line):
            self.total = int(found[1].replace(",", ""))
        if found := _RESUMED.search(line):
            self.resumed = int(found[1])
        for name, value in _SPEED.findall(line) if "_per_second" in line else ():
            self.speeds[_NAMES[name]] = float(value)
        self.of_trainer = self.of_trainer or bool(self.speeds) or LOSSES.search(line) is not None

    def steps(self) -> list[tuple[int, float]]:
        """Seconds of steps by their numbers: of the bar of so many as the run has, else of the first bar; or one, the
        mean of the whole run."""
        length = self.total if self.total in self.bars else next(iter(self.bars), 0)
        if length:
            drawn = [bar for done, bar in sorted(self.bars[length].items()) if done]
            return list(_between(drawn)) or [(bar.done, bar.seconds) for bar in drawn]
        mean = self._mean()
        return [(self.total, mean)] if mean else []

    def _mean(self) -> float | None:
        """Seconds of a step by the whole run's mean; None where it is not known. A Trainer that says
        "Continuing training from global step" divides all steps, those before too, by the time since then; later ones
        say "Resuming" and count right (huggingface/optimum-graphcore issue 89; ``trainer.py`` of transformers 5)."""
        speed = self.speeds.get("steps/s")
        if not speed or (self.resumed and self.total <= self.resumed):
            return None
        seconds = 1 / speed
        if self.resumed:
            seconds *= self.total / (self.total - self.resumed)
        return seconds if seconds >= LEAST else None

    def rates(self) -> dict[str, float]:
        """Means over the whole run; none of one that was resumed, which count what was done before."""
        speed = self.speeds.get("steps/s", 0.0)
        if self.resumed or speed > 1 / LEAST:
            return {}
        return {f"{unit}, mean of the run": value for unit, value in self.speeds.items()}

    @property
    def framework(self) -> str:
        """Whose log it is."""
        return "Hugging Face Trainer" if self.of_trainer else "a progress bar"

    @property
    def apart(self) -> float | None:
        """By how much the run's mean is longer than a step of the bar, as a part of it; None where one is missing."""
        mean = self._mean()
        steps = self.steps() if self.bars else []
        return mean / median(seconds for _, seconds in steps) - 1 if mean and steps else None


def _between(drawn: Sequence[ProgressBar]) -> Iterator[tuple[int, float]]:
    """Seconds of steps between bars, where rates are means since the start and bars lie far enough apart; of bars of an
    epoch that lie nearer, those between the first and the last, by their means."""
    if not all(bar.is_mean for bar in drawn):
        return
    if len(drawn) > 1 and drawn[-1].since - drawn[0].since < APART and all(bar.of_epoch for bar in drawn):
        first, end = drawn[0], drawn[-1]
        took = end.done * end.seconds - first.done * first.seconds
        if end.done * end.off + first.done * first.off <= FINE * took:
            yield end.done, took / (end.done - first.done)
        return
    last = drawn[0] if drawn else None
    for bar in drawn:
        if last is not None and bar.since - last.since >= APART:
            yield bar.done, (bar.since - last.since) / (bar.done - last.done)
            last = bar
