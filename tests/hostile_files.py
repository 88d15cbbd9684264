"""Files that are nearly right: of text, of tables, of columns, and those that commands leave behind."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hostile_documents import (
    CAMPAIGN,
    PLAN,
    SCENARIO,
    SWEEP,
)
from hostile_values import NASTY, damaged, documents, json_file, toml_file
from hypothesis import strategies as st

DATA = Path(__file__).parent / "data"
SLOW = 0.25
"""Share of the budget of a kind whose cases take a tenth of a second."""


@dataclass(frozen=True)
class Kind:
    """A file's ``name``, a strategy of its ``bytes``, and ``commands`` that read it.

    ``{}`` in a command stands for the file's path and ``<>`` for something drawn from ``words``. ``beside``: files that
    are there, too. ``ours``: names that a command may write over, because a command wrote them.
    ``share`` of the budget: less where a case draws pictures, or runs many scenarios.
    """

    name: str
    bytes: Any
    commands: tuple[str, ...]
    beside: Callable[[], dict[str, bytes]] = dict
    ours: frozenset[str] = frozenset()
    share: float = 1.0
    words: Any = field(default_factory=lambda: st.just(""))


def table(base: dict[str, Any]) -> Any:
    """TOML files made from one."""
    return damaged(documents(base).map(toml_file))


@st.composite
def with_table(draw: Any, base: dict[str, Any], at: str, made: Any) -> dict[str, Any]:
    """A document with what is drawn from ``made`` in the table ``at``."""
    found = draw(documents(base)) if draw(st.integers(0, 4)) == 0 else json.loads(json.dumps(base))
    *way, last = at.split(".")
    here: Any = found
    for key in way:
        here = here.get(key) if isinstance(here, dict) else None
    if isinstance(here, dict):
        table = {key: value for key, value in draw(made).items() if value is not None}
        there = here.get(last) if isinstance(here.get(last), dict) and "kind" not in table else {}
        here[last] = (there or {}) | table
    return dict(found)


@st.composite
def cells(draw: Any, text: bytes) -> bytes:
    """A CSV file with some cells replaced, a column left out, or rows doubled."""
    rows = list(csv.reader(io.StringIO(text.decode())))
    for _ in range(draw(st.integers(0, 3))):
        act = draw(st.sampled_from(["cell", "cell", "cell", "column", "row", "double"]))
        row = draw(st.sampled_from(rows))
        column = draw(st.integers(0, max(len(row) - 1, 0)))
        if act == "cell" and row:
            row[column] = str(draw(NASTY))
        elif act == "column":
            rows = [cells[:column] + cells[column + 1 :] for cells in rows]
        elif act == "row" and len(rows) > 1:
            rows.remove(row)
        elif act == "double":
            rows += [list(row)] * draw(st.integers(1, 40))
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode("utf-8", "surrogatepass")


def spreadsheet(text: bytes) -> Any:
    """CSV files made from one."""
    return damaged(cells(text))


def called(words: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, in this process; ``explore`` is asked as a browser asks it."""
    from clustersim.app.cli import main

    if words[0] == "explore":
        from hostile_launch import asked

        return asked(*words[1:])
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as left:
            return int(left.code or 0), out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


@cache
def saved() -> bytes:
    """A small run, as ``run --out`` saves it."""
    from clustersim import scenario
    from clustersim.files.traces.saved import save_run

    with TemporaryDirectory() as folder:
        run = scenario.from_table(SCENARIO, "mine.toml").run()
        save_run(run.timeline, Path(folder) / "run.npz", run.prepared.topology, run.facts())
        return (Path(folder) / "run.npz").read_bytes()


@cache
def answer(command: str) -> dict[str, bytes]:
    """The files that a command leaves in its folder."""
    files = {
        "mine.toml": toml_file(SCENARIO | {"campaign": CAMPAIGN}),
        "plan.toml": toml_file(PLAN),
        "sweep.toml": toml_file(SWEEP),
    }
    with TemporaryDirectory() as made:
        folder = Path(made)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        code, _, said = called([*command.replace("@", f"{folder}/").split(), "--out", str(folder / "out"), "--json"])
        assert code == 0, said
        return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}


@st.composite
def members(draw: Any) -> bytes:
    """A saved run with a member replaced: of another shape, type or value, or gone."""
    import numpy as np

    with np.load(io.BytesIO(saved())) as data:
        arrays = dict(data)
    name = draw(st.sampled_from(sorted(arrays)))
    act = draw(st.sampled_from(["words", "cut", "type", "drop"]))
    if act == "words":
        words = json.loads(arrays["words"].tobytes())
        arrays["words"] = np.frombuffer(json.dumps(draw(documents(words))).encode(), dtype=np.uint8)
    elif act == "drop":
        del arrays[name]
    else:
        old = arrays[name]
        arrays[name] = old.reshape(-1)[: old.size // 2] if act == "cut" else old.astype("U3")
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def nsys(name: Any, group: Any) -> bytes:
    """An Nsight Systems export of one kernel; ``name`` and ``group`` are in its words."""
    import sqlite3

    with TemporaryDirectory() as folder:
        path = Path(folder) / "p.sqlite"
        with sqlite3.connect(path) as base:
            base.execute("create table StringIds (id, value)")
            columns = "globalPid, start, end, correlationId, shortName, deviceId, streamId"
            base.execute(f"create table CUPTI_ACTIVITY_KIND_KERNEL ({columns})")
            plain = [one if isinstance(one, str | float) or one is None else str(one) for one in (name, group)]
            base.executemany("insert into StringIds values (?, ?)", [(1, "gemm"), (2, plain[0])])
            rows = [(1 << 24, 100, 200, 1, 1, 0, 7), (1 << 24, 300, plain[1], 2, 2, 0, 7)]
            base.executemany("insert into CUPTI_ACTIVITY_KIND_KERNEL values (?, ?, ?, ?, ?, ?, ?)", rows)
        base.close()
        return path.read_bytes()


def rows() -> bytes:
    """A row of a sweep."""
    result = {"step_time_s": 1.0, "samples_per_s": 2.0, "gpus": 2, "fits": True, "hottest_links": [], "mfu": 0.4}
    row = {"key": "0" * 64, "version": "0", "inputs": {}, "files": {}, "result": result}
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def lines(text: bytes) -> Any:
    """Files of JSON lines, one of them changed."""

    @st.composite
    def drawn(draw: Any) -> bytes:
        rows = [json.loads(line) for line in text.splitlines()]
        at = draw(st.integers(0, len(rows) - 1))
        rows[at] = draw(documents(rows[at]))
        return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)

    return damaged(drawn())


def answered(command: str, name: str, *read: str) -> Kind:
    """Folders that a command left, one file of them changed."""

    def changed() -> Any:
        text = answer(command)[name]
        return lines(text) if name.endswith("l") else damaged(documents(json.loads(text)).map(json_file))

    return Kind(name, st.deferred(changed), read, lambda: answer(command), share=SLOW)
