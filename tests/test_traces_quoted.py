"""What a program printed, inside strings of the JSON or YAML that another reports."""

from __future__ import annotations

import json

import pytest
import test_traces_samples as tables
from test_traces_told import LOG

from clustersim.files import traces
from clustersim.files.traces import quoted

PRINTED = tables.NEW.rstrip("\n")
REPORT = {
    "changed": True,
    "cmd": "mpirun -np 4 ./all_gather_perf -b 8M",
    "rc": 0,
    "stdout": PRINTED,
    "stdout_lines": PRINTED.split("\n"),
}
JSON = {
    "a module's result": json.dumps(REPORT),
    "indented": json.dumps(REPORT, indent=4),
    "a debug task": "TASK [debug] ****\nok: [n1] => " + json.dumps({"out": REPORT}, indent=4) + "\nPLAY RECAP ****\n",
    "an ad-hoc command": "n1 | CHANGED => " + json.dumps(REPORT),
    "lines alone": json.dumps({"stdout_lines": PRINTED.split("\n")}),
    "lines alone, indented": json.dumps({"stdout_lines": PRINTED.split("\n")}, indent=1),
}


def same(tmp_path, text):
    plain = tables.read(tmp_path / "plain", tables.NEW)
    rows = tables.read(tmp_path / "quoted", text)
    assert not rows.skipped
    about = ("kind", "nbytes", "seconds", "seconds_in_place", "ranks", "nodes", "version", "launch", "device")
    assert [[getattr(row, name) for name in about] for row in rows.rows] == [
        [getattr(row, name) for name in about] for row in plain.rows
    ]


@pytest.mark.parametrize("text", JSON.values(), ids=JSON)
def test_a_table_inside_json_is_that_table_once(tmp_path, text):
    same(tmp_path, text)


@pytest.mark.parametrize("width", [60, 80, 1000])
@pytest.mark.parametrize("style", [None, "'", '"'])
@pytest.mark.parametrize("names", [("stdout",), ("stdout_lines",), ("cmd", "stdout", "stdout_lines")])
def test_a_table_inside_yaml_is_that_table_once_however_it_is_folded(tmp_path, width, style, names):
    yaml = pytest.importorskip("yaml", reason="needs pyyaml (the exchange extra)")
    report = {"n1": {name: REPORT[name] for name in names}}
    same(tmp_path, yaml.safe_dump(report, width=width, default_style=style))


def test_an_nccl_log_inside_json_tells_what_it_tells(tmp_path):
    (tmp_path / "log").write_text(LOG)
    plain = traces.read(tmp_path / "log")
    for indent in (None, 4):
        report = {"stdout": LOG, "stdout_lines": LOG.splitlines()}
        (tmp_path / "log").write_text(json.dumps(report, indent=indent))
        assert traces.read(tmp_path / "log") == plain


@pytest.mark.parametrize(
    "text", ["don't know: 'abc\nfoo: \"bar\n  baz\nqux 'it\n\nend", 'error: "a\\nb"', '"', "'\n '", '"\\', "- 'it's'"]
)
def test_lines_that_are_no_such_strings_stay_as_they_are(text):
    assert list(quoted.taken_out(iter(text.splitlines()))) == text.splitlines()
