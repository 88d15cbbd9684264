"""Hostile input: cases of every kind of file a person may give, and what each command must then do.

``python tests/fuzz.py --fuzz-budget 500`` plays so many cases of each kind (:mod:`hostile_files`) and prints a table by
kind; ``--physics 1000`` plays so many random scenarios instead and prints a table by law (:mod:`metamorphic`). The test
command plays a few. A command must leave with 0, or with 2 and one line on stderr; within 10 CPU seconds and 1 GiB; no
file that was there changes, and a command that fails leaves none behind; what ``--json`` prints is strict JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import metamorphic
from hostile_documents import CONFIG, GPT, MOE_CONFIG, SCENARIO, SPLIT, SWEEP
from hostile_files import Kind, called
from hostile_kinds import kinds
from hostile_values import json_file, toml_file
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

SECONDS = 10.0
BYTES = 2**30
SHOWN = 2000
"""Characters of a file that a wrong answer is printed with."""
LEFT_HALF = re.compile(r"\.\d+-")
"""How a temporary file's name begins."""


class TooLong(BaseException):
    """A case took more CPU time than :data:`SECONDS`."""


@dataclass
class Tally:
    """How many cases of a kind ended how, and what went wrong: the first of each, in full."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)

    def add(self, end: str, told: str) -> None:
        """Count a case; ``told`` is empty where it is as it must be."""
        self.ends[end] += 1
        if told:
            self.ends["wrong"] += 1
            self.wrong.setdefault(told.strip().splitlines()[-1][:160], told)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, byte for byte."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _stop(*_: Any) -> None:
    raise TooLong


@contextlib.contextmanager
def confined() -> Iterator[None]:
    """At most :data:`SECONDS` more of CPU time and :data:`BYTES` more of memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def judge(words: list[str], folder: Path, ours: frozenset[str] = frozenset()) -> tuple[str, str]:
    """(how it ended, what is wrong with that) of a command in a folder; ``ours`` : files it may change."""
    before = contents(folder)
    try:
        with confined():
            code, out, err = called(words)
    except TooLong:
        return "hang", f"{words}: more than {SECONDS:g} s"
    except BaseException:
        return "traceback", f"{words}\n{traceback.format_exc()}"
    return f"exit {code}", "".join(f"{words}: {wrong}" for wrong in _wrong(words, code, out, err, before, folder, ours))


def _wrong(
    words: list[str], code: int, out: str, err: str, before: dict[str, bytes], folder: Path, ours: frozenset[str]
) -> Iterator[str]:
    """The first thing that a command must not do, if it did any."""
    lines = err.strip().splitlines()
    after = contents(folder)
    changed = sorted(name for name, data in before.items() if after.get(name) != data and name not in ours)
    left = sorted(name for name in after if LEFT_HALF.match(Path(name).name))
    if code not in (0, 2):
        yield f"exit {code}: {err[-300:]}"
    elif code == 2 and (len(lines) != 1 or len(lines[0]) > 2000):
        yield f"{len(lines)} lines on stderr, {len(err)} characters: {err[:200]!r}"
    elif "more memory than there is" in err:
        yield f"more than {BYTES / 2**30:g} GiB, and not refused before: {err}"
    elif changed or left:
        yield f"files changed or left half written: {changed + left}"
    elif code == 2 and "out" not in words and set(after) - set(before) - ours:
        yield f"failed, and left {sorted(set(after) - set(before))}"
    elif code == 0 and "--json" in words:
        try:
            json.loads(out, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))
        except ValueError as error:
            yield f"stdout is not strict JSON: {error}"


BESIDE = {
    "mine.toml": toml_file(SCENARIO),
    "gpt.toml": toml_file(GPT),
    "config.json": json_file(CONFIG),
    "moe.json": json_file(MOE_CONFIG),
    "split.toml": toml_file(SPLIT),
    "sweep.toml": toml_file(SWEEP),
}
"""Files in every folder."""


def play(kind: Kind, budget: int, tally: Tally, first: int = 0) -> None:
    """Play ``budget`` cases of a kind, other ones for each ``first``."""

    @seed(first)
    @settings(
        max_examples=max(1, round(budget * kind.share)),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=False,
    )
    @given(kind.bytes, st.sampled_from(kind.commands), kind.words)
    def case(data: bytes, command: str, word: str) -> None:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            home = Path.cwd()
            for name, text in (BESIDE | kind.beside() | {kind.name: data}).items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(text)
            os.chdir(folder)
            try:
                words = [one.replace("{}", kind.name).replace("<>", word) for one in command.split()]
                end, told = judge(words, folder, kind.ours)
                tally.add(end, told and f"{kind.name}: {data[:SHOWN]!r}\n{told}")
            finally:
                os.chdir(home)

    case()


HEAD = f"{'kind':<15}{'cases':>8}{'exit 0':>8}{'exit 2':>8}{'wrong':>8}"


def line(name: str, ends: Counter[str]) -> str:
    """A row of the table by kind."""
    wrong = ends["wrong"]
    return f"{name:<15}{ends.total() - wrong:>8}{ends['exit 0']:>8}{ends['exit 2']:>8}{wrong:>8}"


def main(words: list[str] | None = None, say: Callable[[str], None] = print) -> int:
    """The table by kind; 1 where anything went wrong."""
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("--fuzz-budget", type=int, default=100, help="cases of each kind")
    read.add_argument("--kinds", default="", help="only these, commas between")
    read.add_argument("--seed", type=int, default=0, help="other cases")
    read.add_argument("--physics", type=int, default=0, help="random scenarios through the metamorphic checks, instead")
    read.add_argument("--jobs", type=int, default=1, help="processes")
    asked = read.parse_args(words)
    if asked.physics:
        return metamorphic.main(asked.physics, asked.seed, asked.jobs, say)
    names = [name for name in kinds() if not asked.kinds or name in asked.kinds.split(",")]
    say(HEAD)
    every: Counter[str] = Counter()
    with ProcessPoolExecutor(asked.jobs, max_tasks_per_child=1) as pool:
        for name, tally in zip(names, pool.map(partial(played, asked.fuzz_budget, asked.seed), names), strict=True):
            every += tally.ends
            say(line(name, tally.ends))
            for told in tally.wrong.values():
                say(f"    {told[-2 * SHOWN :]}")
    say(line("all", every))
    return int(every["wrong"] > 0)


def played(budget: int, first: int, name: str) -> Tally:
    """What came of a kind's cases, for a process of its own."""
    tally = Tally()
    play(kinds()[name], budget, tally, first)
    return tally


if __name__ == "__main__":
    sys.exit(main())
