"""Step times that training frameworks log: Megatron-LM's iterations and timers, torchtitan's steps, nanotron's and
nanoGPT's iterations, NeMo's timing, Composer's means, DeepSpeed's wall clock and flops profiler; and loops that only
draw a bar.

Megatron-LM (``megatron/training/training.py``, ``timers.py``) logs a mean over its log interval and timers as the least
and the most over ranks, or one of them; torchtitan (``components/metrics.py``) logs tokens a second, and its lines'
times tell a step's; nanotron (``logging/base.py``) logs numbers of three digits with a letter behind; NeMo 1 and 2 log
a step's seconds in Lightning's progress line; DeepSpeed (``utils/timer.py``, ``profiling/flops_profiler``) logs
milliseconds of each part, or samples a second alone, whose lines' times tell a step's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median

from clustersim.core.errors import TraceError
from clustersim.core.texts import short
from clustersim.core.units import format_time
from clustersim.files.traces import composer_log, prefixes, progress_bars, step_lines
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.told import LoggedPart, TrainingLog

_NUMBER = r"[-+]?\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?"
_ITERATION = re.compile(r"\biteration\s+(\d{1,12})\s*/\s*\d+\s*\|(.*)")
_FIELD = re.compile(rf"\s*([^|:]+?(?:\([^)]*\))?)\s*:\s*({_NUMBER})(?:/{_NUMBER})?\s*$")
"""A name and a number; behind a stroke, in Primus, the mean of the run."""
_ELAPSED = re.compile(rf"elapsed time per iteration \((ms|s)\)\s*:\s*({_NUMBER})")
_TIMERS = re.compile(r"(?:\(min, max\) |max |min |)times? across ranks \((ms|s)\)\s*:")
_TIMER = re.compile(rf"^\s*([A-Za-z][\w/ -]*?)\s*\.{{2,}}\s*:\s*(?:\(({_NUMBER}),\s*({_NUMBER})\)|({_NUMBER}))\s*$")
_OF_RANK = re.compile(rf"^\s+rank\s+\d+\s*:\s*({_NUMBER})\s*$")
_WALL_CLOCK = re.compile(r"\btime \(ms\)\s*\|(.*)")
_PAINT = r"(?:\b|\[\d{1,2}m)"
"""Where a word begins, or a terminal's colour stands that has lost its first character."""
_TITAN = re.compile(rf"{_PAINT}step:\s*(\d{{1,12}})\s+.*?{_PAINT}(?:tps|wps):\s*({_NUMBER})")
_TITAN_SAVED = re.compile(rf"\bFinished saving the checkpoint(?: \([^)]*\))? ?in ({_NUMBER}) seconds")
_NANOTRON = re.compile(r"\biteration:\s*(\d{1,12})\s*/\s*\d+\s*\|(.*\belapsed_time_per_iteration_ms:.*)")
_SCALED = re.compile(rf"([a-z_]+):\s*({_NUMBER})([KMBT]?)(?=\s|\||$)")
_NEMO = re.compile(rf"\btrain_step_timing in s\s*[=:]\s*({_NUMBER})")
_GLOBAL_STEP = re.compile(rf"\bglobal_step\s*[=:]\s*({_NUMBER})")
_RATE = re.compile(rf"{_PAINT}(tflops|mfu|CurrSamplesPerSec|RunningAvgSamplesPerSec)\s*[:=]\s*({_NUMBER})")
_PARTS = re.compile(r"\btime \(ms\) \| \w+[\w-]*: \d")
_SAMPLES = re.compile(rf"\bglobal_step=(\d{{1,12}}), RunningAvgSamplesPerSec={_NUMBER}")
_SAMPLES_BEFORE = re.compile(rf"(?<![A-Za-z])SamplesPerSec=({_NUMBER})")
"""A mean of the run, of DeepSpeed before 0.6.6, beside a count of passes."""
_STEP_LOGGED = re.compile(r"\bstep=(\d{1,12}), skipped=\d+, lr=\[")
_NANOGPT = re.compile(rf"\biter (\d{{1,12}}): loss (?:nan|inf|{_NUMBER}), time ({_NUMBER})ms(?:, mfu ({_NUMBER})%)?")
_LATENCY = re.compile(rf"^\s*(fwd|bwd|fwd\+bwd|step|iter) latency:\s*({_NUMBER})\s*(us|ms|s)\b")
_PROFILED = re.compile(rf"^\s*(samples/second|[A-Za-z+ ]*FLOPS per GPU[^:]*):\s*({_NUMBER})\s*([KMGTP]?FLOPS)?", re.I)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_LETTERS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_SCALES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_OF_A_STEP = ({"fwd", "bwd", "step"}, {"forward", "backward", "step"})
"""DeepSpeed's parts that make a step, by their names since 0.9.3 and before."""
_WANTED = (
    r"\s{2,}[A-Za-z](?:[\w/-]| (?! ))*\.{2,}\s*:"
    r"|\s*(?:rank\s+\d+\s*:|(?:fwd|bwd|fwd\+bwd|step|iter) latency:|samples/second:)"
)
"""How lines begin that must be read from their first letter: Megatron-LM's timers, the flops profiler's figures."""
SLOWER = 0.05
"""By how much the mean of a run may be longer than its steps without a word."""
LONGEST = 64 * 1024
"""Characters of a line beyond which it is no step's; a state of Hugging Face's Trainer may be one line."""
MOST = 1e7
"""Seconds that no step takes."""


@dataclass
class Collected:
    """What the lines of a log say, in seconds, in their order."""

    framework: str = ""
    steps: list[tuple[int, float]] = field(default_factory=list)
    marks: list[tuple[int, float]] = field(default_factory=list)
    parts: defaultdict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    rates: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    block: float = 0.0
    timer: str = ""
    means: str = ""
    bars: progress_bars.BarSteps = field(default_factory=progress_bars.BarSteps)
    blocks: composer_log.ComposerBlocks = field(default_factory=composer_log.ComposerBlocks)
    logged: step_lines.LoggedSteps = field(default_factory=step_lines.LoggedSteps)


def sniff(head: Head) -> Likeness:
    """Whether a log has lines of one of these frameworks; NCCL's own lines in it are asked first."""
    shaped = any(
        pattern.search(head.text)
        for pattern in (
            *(_ELAPSED, _TIMERS, _TITAN, _NANOTRON, _NANOGPT, _NEMO, _PARTS, composer_log.SHAPE),
            *(_SAMPLES, _SAMPLES_BEFORE),
        )
    ) or any(_starts(line) for line in head.text.splitlines())
    return Likeness.AMONG if shaped or "DeepSpeed Flops Profiler" in head.text else likeness(named=False, shaped=False)


def _starts(line: str) -> bool:
    """Whether a line is a bar, a closing line, or a step of a framework that logs it in one line."""
    return any(pattern.search(line) for pattern in progress_bars.HEADS) or any(
        row.match(line) for row in step_lines.LINES
    )


def read(paths: Sequence[Path]) -> TrainingLog:
    """The step times of these logs. Raises :class:`TraceError` where none has any."""
    collected = Collected()
    for path in paths:
        for line in prefixes.lines(path, _WANTED):
            collected.bars.take(line)
            if len(line) > LONGEST:
                continue
            _take(line, collected)
            collected.blocks.take(line)
            collected.logged.take(line)
    steps = _steps(collected)
    if not steps and not collected.parts and not collected.rates:
        losses = "; lines of losses have no time: the progress bar or the last line, train_runtime, has"
        raise TraceError(
            f"{paths[0]}: no step time of Megatron-LM, torchtitan, nanotron, NeMo, Composer, DeepSpeed or the "
            f"Trainer in it, nor of another framework whose steps are read{losses if collected.bars.of_trainer else ''}"
        )
    return told_of(", ".join(map(str, paths)), collected, steps)


def _take(line: str, collected: Collected) -> None:
    if match := _NEMO.search(line):
        collected.framework = "NeMo"
        step = _GLOBAL_STEP.search(line)
        collected.steps.append((int(_number(step[1])) if step else len(collected.steps), _number(match[1])))
    elif match := _ITERATION.search(line):
        _iteration(int(match[1]), match[2], collected)
    elif match := _NANOTRON.search(line):
        _of_nanotron(int(match[1]), match[2], collected)
    elif match := _WALL_CLOCK.search(line):
        _wall_clock(match[1], collected)
    elif match := _TIMERS.search(line):
        collected.block = _UNITS[match[1]]
    elif match := _TITAN.search(line):
        collected.framework = "torchtitan"
        collected.rates["tokens/s per GPU"].append(_number(match[2]))
        _rates(line, collected)
        _mark(int(match[1]), line, collected)
    elif match := _TITAN_SAVED.search(line):
        collected.parts["save-checkpoint"].append((_number(match[1]), _number(match[1])))
    elif match := _NANOGPT.search(line):
        _of_nanogpt(match, collected)
    elif match := _STEP_LOGGED.search(line):
        _mark(int(match[1]), line, collected)
    elif "SamplesPerSec" in line:
        _of_deepspeed(line, collected)
    elif match := _LATENCY.match(line):
        _latency(match, collected)
    elif "Flops Profiler" in line or (collected.framework.endswith("profiler") and _PROFILED.match(line)):
        _profiled(line, collected)
    elif collected.block:
        _timer(line, collected)


def _mark(step: int, line: str, collected: Collected) -> None:
    """When a step was over, where its line says when it was written."""
    if (clock := step_lines.written_at(line)) is not None:
        collected.marks.append((step, clock))


def _of_deepspeed(line: str, collected: Collected) -> None:
    """A line of DeepSpeed's throughput timer."""
    collected.framework = collected.framework or "DeepSpeed"
    _rates(line, collected)
    if match := _SAMPLES_BEFORE.search(line):
        collected.rates["samples/s, mean of the run"].append(_number(match[1]))
    if match := _SAMPLES.search(line):
        _mark(int(match[1]), line, collected)


def _latency(match: re.Match[str], collected: Collected) -> None:
    """A latency of DeepSpeed's flops profiler."""
    collected.framework = "DeepSpeed flops profiler"
    seconds = _number(match[2]) * _UNITS[match[3]]
    collected.parts[f"{match[1]} latency"].append((seconds, seconds))
    if match[1] == "iter":
        collected.steps.append((len(collected.steps), seconds))


def _iteration(number: int, rest: str, collected: Collected) -> None:
    """A line of Megatron-LM, or of Megatron-DeepSpeed."""
    collected.framework = "Megatron-LM"
    collected.block = 0.0
    if match := _ELAPSED.search(rest):
        collected.steps.append((number, _number(match[2]) * _UNITS[match[1]]))
    for part in rest.split("|"):
        match = _FIELD.match(part)
        if match and re.search(r"throughput|TFLOP|samples per second|tokens per gpu", match[1], re.I):
            collected.rates[match[1].strip()].append(_number(match[2]))


def _of_nanotron(number: int, rest: str, collected: Collected) -> None:
    """A line of nanotron, whose numbers may have a letter behind."""
    collected.framework = "nanotron"
    values = {name: _number(word) * _LETTERS[letter] for name, word, letter in _SCALED.findall(rest)}
    if "elapsed_time_per_iteration_ms" in values:
        collected.steps.append((number, values["elapsed_time_per_iteration_ms"] * 1e-3))
    for name, means in (("tokens_per_sec_per_gpu", "tokens/s per GPU"), ("model_tflops_per_gpu", "TFLOP/s per GPU")):
        if name in values:
            collected.rates[means].append(values[name])


def _of_nanogpt(match: re.Match[str], collected: Collected) -> None:
    """A line of nanoGPT's train.py: an iteration is a step, however many passes it has; its first MFU is -100 %."""
    collected.framework = "nanoGPT"
    collected.steps.append((int(match[1]), _number(match[2]) * 1e-3))
    if match[3] and _number(match[3]) > 0:
        collected.rates["MFU (%)"].append(_number(match[3]))


def _wall_clock(rest: str, collected: Collected) -> None:
    """Milliseconds of parts on one line: DeepSpeed's, and those of older releases of Megatron-LM."""
    parts = {m[1].strip(): _number(m[2]) * 1e-3 for m in map(_FIELD.match, rest.split("|")) if m}
    whole = next((names for names in _OF_A_STEP if parts.keys() >= names), None)
    if whole and not collected.framework.startswith("Megatron"):
        collected.framework = "DeepSpeed"
        collected.steps.append((len(collected.steps), sum(parts[name] for name in whole)))
    for name, seconds in parts.items():
        collected.parts[name].append((seconds, seconds))


def _timer(line: str, collected: Collected) -> None:
    """A line of a block of Megatron-LM's timers; the block ends at the first line that is none."""
    if match := _TIMER.match(line):
        ends = [_number(word) * collected.block for word in match.groups()[1:] if word]
        collected.timer = match[1].strip()
        collected.parts[collected.timer].append((min(ends), max(ends)))
    elif match := _OF_RANK.match(line):
        seconds = _number(match[1]) * collected.block
        last = collected.parts[collected.timer or "timers"]
        last.append((seconds, seconds))
    elif re.fullmatch(r"\s+[\w/ -]+:\s*", line):
        collected.timer = line.strip().rstrip(":")
    elif line.strip():
        collected.block = 0.0


def _rates(line: str, collected: Collected) -> None:
    names = {"tflops": "TFLOP/s per GPU", "mfu": "MFU (%)", "CurrSamplesPerSec": "samples/s"}
    for name, word in _RATE.findall(line):
        if name in names:
            collected.rates[names[name]].append(_number(word))


def _profiled(line: str, collected: Collected) -> None:
    collected.framework = "DeepSpeed flops profiler"
    if match := _PROFILED.match(line):
        scale = _SCALES.get((match[3] or " ")[0].upper(), 1.0) if match[3] else 1.0
        name = match[1].split("=")[0].strip()
        collected.rates[f"{name} (TFLOP/s)" if match[3] else name].append(
            _number(match[2]) * (scale / 1e12 if match[3] else 1.0)
        )


def _number(word: str) -> float:
    return float(word.replace(",", ""))


def _steps(collected: Collected) -> list[tuple[int, float]]:
    """Steps with their seconds: as logged, else between the times of lines."""
    if collected.steps:
        return [(step, seconds) for step, seconds in _once(collected.steps) if 0 < seconds < MOST]
    pairs = zip(collected.marks, collected.marks[1:], strict=False)
    if not collected.framework and (means := collected.blocks.steps()):
        collected.framework = "Composer"
        collected.means = step_lines.WINDOW
        for name, values in collected.blocks.rates().items():
            collected.rates[name] += values
        return [(step, seconds) for step, seconds in means if 0 < seconds < MOST]
    if not collected.framework and collected.logged.row is not None:
        return _of_lines(collected)
    if not collected.marks and not collected.framework:
        collected.framework = collected.bars.framework
        for name, value in collected.bars.rates().items():
            collected.rates[name].append(value)
        return [(step, seconds) for step, seconds in collected.bars.steps() if 0 < seconds < MOST]
    apart = [(new, (late - early) / (new - old)) for (old, early), (new, late) in pairs if new > old]
    return [(step, seconds) for step, seconds in apart if 0 < seconds < MOST]


def _of_lines(collected: Collected) -> list[tuple[int, float]]:
    """Steps of a framework that logs each in one line, with what else those lines say."""
    logged = collected.logged
    collected.framework = logged.row.framework if logged.row else ""
    collected.means = logged.means
    for name, values in logged.others.items():
        collected.rates[name] += values
    for name, values in logged.parts.items():
        collected.parts[name] += [(seconds, seconds) for seconds in values]
    return [(step, seconds) for step, seconds in _once(logged.steps()) if 0 < seconds < MOST]


def _once(steps: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Steps that several ranks log one after another, or a bar that is drawn again, once: as long as the longest."""
    runs = (list(run) for _, run in groupby(steps, key=lambda logged: logged[0]))
    return [max(run, key=lambda logged: logged[1]) for run in runs]


def told_of(source: str, collected: Collected, steps: list[tuple[int, float]]) -> TrainingLog:
    """What a log says, for people and as figures, of steps and their seconds."""
    steady = [seconds for _, seconds in steps[1:]] or [seconds for _, seconds in steps]
    step = median(steady) if steady else None
    parts = [
        LoggedPart(
            name,
            median(low for low, _ in values),
            median(high for _, high in values),
            len(values),
            values,
        )
        for name, values in collected.parts.items()
    ]
    rates = {name: median(values) for name, values in collected.rates.items()}
    name = collected.framework or "a training framework"
    lines = list(_lines(name, steps, step, parts, rates, collected.means))
    apart = collected.bars.apart if name == collected.bars.framework else None
    if apart is not None and apart > SLOWER:
        lines.append(f"the whole run took {apart:.0%} more a step: first steps, checkpoints and evaluation are in it")
    if apart is not None and apart < -SLOWER:
        lines.append(f"the whole run took {-apart:.0%} less a step: the bars in this log are of slower steps than most")
    return TrainingLog(source, lines, name, len(steps), step, parts, rates, times=steps)


def _lines(
    framework: str,
    steps: list[tuple[int, float]],
    step: float | None,
    parts: Iterable[LoggedPart],
    rates: dict[str, float],
    means: str,
) -> Iterator[str]:
    if step is None:
        yield f"{framework}: no step time is logged; parts and rates are"
    else:
        left = ", the first left out as warm-up" if len(steps) > 1 else ""
        each = f"each {means}, " if means else ""
        yield f"{framework}: {format_time(step)} a step, {each}median of {max(len(steps) - 1, 1)} logged{left}"
    for part in parts:
        low = format_time(part.least_s)
        high = format_time(part.most_s)
        yield f"  {short(part.name):32s} {low if low == high else f'{low} to {high}'}"
    for name, value in rates.items():
        yield f"  {short(name):32s} {value:,.4g}"
