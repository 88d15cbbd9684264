"""Hostile input: hypothesis strategies for every kind of file a person may give, and what each command must then do.

``python tests/fuzz.py --fuzz-budget 2000`` plays so many cases of each kind and prints a table by kind; the test
command plays a few. A command must leave with 0, or with 2 and one line on stderr; within 10 CPU seconds and 4 GiB; a
command that fails leaves every file as it was; and what ``--json`` prints is strict JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import math
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

SECONDS, BYTES = 10.0, 2**30

SCENARIO: dict[str, Any] = {
    "cluster": {"topology": "dgx-1v", "nodes": 1, "gpus_per_node": 2,
                "changes": [{"match": "node0/gpu0", "factor": 0.5}], "slow": [{"ranks": [1], "speed": 0.9}]},
    "model": {"name": "resnet18", "dtype": "fp32"},
    "strategy": {"kind": "ddp", "micro_batch_size": 2, "bucket_cap_mb": 25},
    "run": {"steps": 1, "seed": 0, "jitter": 0.01, "fidelity": "flow", "optimizer": "sgd"},
}  # fmt: skip
GPT = {**SCENARIO, "model": {"hf_config": "config.json"}, "cluster": {"topology": "dgx-1v", "gpus_per_node": 2}}
TOPOLOGY: dict[str, Any] = {
    "name": "mine",
    "title": "two GPUs",
    "node": {"device": "A100-SXM4-80GB",
             "vertices": [{"names": "gpu[0-1]", "kind": "gpu"},
                          {"names": "nic[0-1]", "kind": "nic", "bandwidth": "25 GB/s", "source": "made"}],
             "links": [{"a": "gpu[0-1]", "b": "nic[0-1]", "pattern": "zip", "kind": "pcie", "bandwidth": "25 GB/s",
                        "latency": "500 ns", "source": "made"},
                       {"a": "gpu0", "b": "gpu1", "kind": "nvlink", "bandwidth": "50 GB/s", "latency": "500 ns",
                        "source": "made"}]},
    "fabric": {"kind": "one_switch", "port_latency": "1 us", "switch_latency": "300 ns", "source": "made"},
}  # fmt: skip
SWEEP: dict[str, Any] = {
    "base": "mine.toml",
    "set": {"run.steps": 1},
    "axes": [{"key": "strategy.micro_batch_size", "values": [1, 2]},
             {"key": "run.seed", "range": {"start": 0, "stop": 2, "step": 1}}],
    "sample": 2,
}  # fmt: skip
PLAN: dict[str, Any] = {
    "model": {"name": "resnet18"},
    "machines": [{"topology": "dgx-1v", "nodes": [1], "usd_per_gpu_hour": 2.0}],
    "batch": {"samples": [16, 32]},
    "limits": {"gpus": 8, "tokens": 1e9, "deadline": "60 d"},
    "try": {"micro_batch_size": [2], "activation_checkpointing": ["none"], "strategies": [{"kind": "ddp"}]},
}
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 100,
    "max_position_embeddings": 128, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
TRACE: dict[str, Any] = {
    "schemaVersion": 1,
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
    "traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1, "ts": 0.0, "dur": 90.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1.0, "dur": 40.0,
         "args": {"stream": 7, "device": 0, "correlation": 3}},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "pid": 0, "tid": 20, "ts": 50.0,
         "dur": 30.0, "args": {"stream": 20, "Collective name": "allreduce", "In msg nelems": 1024, "Group size": 1,
                               "dtype": "Float", "correlation": 4}},
    ],
}  # fmt: skip
LOG = (
    "# nThread 1 nGpus 8 minBytes 8 maxBytes 1024\n# Rank 0 Pid 1 on host device 0 [0x07] NVIDIA A100-SXM4-80GB\n"
    "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong\n"
    "8 2 float sum -1 20.51 0.00 0.00 0 20.02 0.00 0.00 0\n1024 256 float sum -1 21.51 0.05 0.08 0 21.02 0.05 0.09 0\n"
)

# ---- what people, disks and other programs make of a value -----------------------------------------------------------

NASTY = st.one_of(
    st.sampled_from(
        [None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 0.0, -0.5, 1e-300, 1e300, math.inf, -math.inf,
         math.nan, "", " ", "\0", "\r", "🙂", "a" * 5000, "x/" * 2000, "$\\frac{1}{$", "[bold]", "<script>", "../../..",
         "/dev/zero", "/", "gpu[0-99999999]", "gpu[0-9]" * 9, "1e400 GB/s", "-1 GB/s", "400 Gigs", [], {}, [[]],
         [1] * 300, {"a": {}}, ["a"], [None], "node*", "ddp", "fsdp", "pipeline", "nan", "inf"]
    ),
    st.integers(-100, 10**7),
    st.floats(allow_nan=True),
    st.text(max_size=20),
)  # fmt: skip


def deep(depth: int) -> list[Any]:
    """Lists inside each other."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*here, key)
        yield from places(item, (*here, key))


@st.composite
def documents(draw: Any, base: dict[str, Any]) -> dict[str, Any]:
    """A document with some values replaced, left out, misspelt or doubled."""
    found = json.loads(json.dumps(base))
    for _ in range(draw(st.integers(0, 3))):
        way = draw(st.sampled_from(list(places(found)) or [()]))
        if not way:
            break
        holder: Any = found
        for key in way[:-1]:
            holder = holder[key]
        act = draw(st.sampled_from(["set", "set", "set", "drop", "rename", "double"]))
        if act == "set":
            holder[way[-1]] = draw(NASTY)
        elif act == "drop":
            del holder[way[-1]]
        elif act == "rename" and isinstance(holder, dict):
            holder[draw(st.sampled_from([f"{way[-1]}s", "", "\0", "a.b", "x" * 300]))] = holder.pop(way[-1])
        elif act == "double" and isinstance(holder, list):
            holder += [holder[way[-1]]] * draw(st.integers(1, 40))
    return dict(found)


def toml(value: Any) -> str:
    """TOML of a document, tables inline; what TOML cannot hold is left to the reader to refuse."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    return "null" if value is None else json.dumps(value)


def toml_file(table: dict[str, Any]) -> bytes:
    """A TOML file."""
    return "".join(f"{json.dumps(str(k))} = {toml(v)}\n" for k, v in table.items()).encode("utf-8", "surrogatepass")


def json_file(value: Any) -> bytes:
    """A JSON file, with NaN and Infinity as Python writes them."""
    return json.dumps(value).encode()


INSERTED = (
    b"\0", b"\r", b"\xff\xfe", b"[" * 3000, b"{" * 3000, b"9" * 6000, b'{"a":' * 2000,
    b"\na = 0x" + b"f" * 5000 + b"\n",
    b"\n\n", b"#", b'"', b"\xef\xbb\xbf", b"\nx = " + b"[" * 2000 + b"]" * 2000 + b"\n",
    b'"a": ' + b"[" * 500 + b"]" * 500 + b", ",
)  # fmt: skip
"""Bytes that no parser likes in the wrong place."""


@st.composite
def damaged(draw: Any, whole: Any) -> bytes:
    """A file's bytes, sometimes cut, with bytes changed, or with something no parser likes inside."""
    text = bytearray(draw(whole))
    act = draw(st.sampled_from(["whole"] * 6 + ["cut", "bytes", "insert", "twice", "gzip", "empty"]))
    at = draw(st.integers(0, max(len(text) - 1, 0)))
    if act == "cut":
        del text[at:]
    elif act == "bytes" and text:
        text[at] = draw(st.integers(0, 255))
    elif act == "insert":
        text[at:at] = draw(st.sampled_from(INSERTED))
    elif act == "twice":
        text += bytes(text)
    elif act == "gzip":
        return gzip.compress(bytes(text), mtime=0)[: draw(st.integers(1, 4000))]
    elif act == "empty":
        return b""
    return bytes(text)


# ---- kinds: a file, and the commands that read it --------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A file's ``name``, its strategy, and commands that read it; ``{}`` stands for its path."""

    name: str
    bytes: Any
    commands: tuple[tuple[str, ...], ...]


def table(base: dict[str, Any]) -> Any:
    """TOML files made from one."""
    return damaged(documents(base).map(toml_file))


def saved() -> bytes:
    """A small run, as ``run --out`` saves it."""
    from clustersim import scenario
    from clustersim.traces.saved import save_run

    with tempfile.TemporaryDirectory() as folder:
        run = scenario.from_table(SCENARIO, "mine.toml").run()
        save_run(run.timeline, Path(folder) / "run.npz", run.prepared.topology, run.facts())
        return (Path(folder) / "run.npz").read_bytes()


def rows() -> bytes:
    """A table of a sweep."""
    key = "0" * 64
    result = {"step_time_s": 1.0, "samples_per_s": 2.0, "gpus": 2, "fits": True, "hottest_links": [], "mfu": 0.4}
    row = {"key": key, "version": "0", "inputs": {}, "files": {}, "result": result}
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def kinds() -> dict[str, Kind]:
    """Every kind of file."""
    run, log = saved(), LOG.encode()
    return {
        "scenario": Kind("mine.toml", table(SCENARIO), (("run", "{}", "--json"), ("memory", "{}"), ("explain", "{}"))),
        "topology": Kind("mine.toml", table(TOPOLOGY), (
            ("check", "{}"), ("run", "gpt.toml", "--json", "--set", "cluster.topology=mine.toml"))),
        "sweep": Kind("sweep.toml", table(SWEEP), (("sweep", "{}", "--out", "out", "--jobs", "1"),)),
        "plan": Kind("plan.toml", table(PLAN), (("plan", "{}", "--out", "out", "--jobs", "1"),)),
        "config": Kind("config.json", damaged(documents(CONFIG).map(json_file)), (
            ("run", "gpt.toml", "--json"), ("memory", "gpt.toml"))),
        "trace": Kind("trace.json", damaged(documents(TRACE).map(json_file)), (
            ("trace", "{}", "--json"), ("replay", "{}", "--json"))),
        "log": Kind("nccl.log", damaged(st.just(log)), (("trace", "{}", "--json"), ("validate", "nccl", "{}"))),
        "table": Kind("spans.csv", damaged(st.just(b"rank,op,name\n0,1,x\n" + log)), (("trace", "{}"),)),
        "run": Kind("run.npz", damaged(st.just(run)), (("report", "{}"), ("explain", "{}"), ("trace", "{}"))),
        "rows": Kind("results.jsonl", damaged(st.just(rows() * 2)), (
            ("sweep", "sweep.toml", "--out", ".", "--jobs", "1"), ("export", ".", "t.csv"))),
        "set": Kind("mine.toml", st.just(toml_file(SCENARIO)), (("run", "{}", "--json", "--set", "<>"),)),
    }  # fmt: skip


# ---- playing ---------------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """A case took more CPU time than :data:`SECONDS`."""


@dataclass
class Tally:
    """How many cases of a kind ended how, and what went wrong: the first few, in full."""

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


def called(words: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, in this process."""
    from clustersim.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as left:
            return int(left.code or 0), out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


def _stop(*_: Any) -> None:
    raise TooLong


def judge(words: list[str], folder: Path) -> tuple[str, str]:
    """(how it ended, what is wrong with that) of a command in a folder."""
    before = contents(folder)
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        code, out, err = called(words)
    except TooLong:
        return "hang", f"{words}: more than {SECONDS:g} s"
    except BaseException:
        return "traceback", f"{words}\n{traceback.format_exc()}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    lines = err.strip().splitlines()
    if code not in (0, 2):
        return f"exit {code}", f"{words}: exit {code}: {err[-300:]}"
    if code == 2 and (len(lines) != 1 or len(lines[0]) > 2000):
        return "exit 2", f"{words}: {len(lines)} lines on stderr, {len(err)} characters: {err[:200]!r}"
    if code == 2 and contents(folder) != before:
        return "exit 2", f"{words}: files changed: {set(contents(folder)) ^ set(before)}"
    if code == 0 and "--json" in words:
        try:
            json.loads(out, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))
        except ValueError as error:
            return "exit 0", f"{words}: stdout is not strict JSON: {error}"
    return f"exit {code}", ""


SETS = st.tuples(
    st.sampled_from(
        [f"{a}.{b}" for a, t in SCENARIO.items() for b in t] + ["a.b", "run", "", "x" * 3000, "run.steps.x"]
    ),
    st.one_of(NASTY.map(str), st.sampled_from(["[", "{", '"', "'''", "[[[[" * 1000, "9" * 6000, "1\n2", "0xfg"])),
).map("=".join)


def play(name: str, kind: Kind, budget: int, tally: Tally) -> None:
    """Play ``budget`` cases of a kind."""

    @settings(max_examples=budget, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(kind.bytes, st.sampled_from(kind.commands), SETS)
    def case(data: bytes, words: tuple[str, ...], change: str) -> None:
        with tempfile.TemporaryDirectory() as made:
            folder, home = Path(made), Path.cwd()
            (folder / "mine.toml").write_bytes(toml_file(SCENARIO))
            (folder / "gpt.toml").write_bytes(toml_file(GPT))
            (folder / "config.json").write_bytes(json_file(CONFIG))
            (folder / "sweep.toml").write_bytes(toml_file(SWEEP))
            (folder / kind.name).write_bytes(data)
            os.chdir(folder)
            try:
                tally.add(*judge([w.replace("{}", kind.name).replace("<>", change) for w in words], folder))
            finally:
                os.chdir(home)
                shutil.rmtree(folder / "out", ignore_errors=True)

    case()


def main(words: list[str] | None = None, say: Callable[[str], None] = print) -> int:
    """The table by kind; 1 where anything went wrong."""
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("--fuzz-budget", type=int, default=100, help="cases of each kind")
    read.add_argument("--kinds", default="", help="only these, commas between")
    asked = read.parse_args(words)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 4 * BYTES, resource.RLIM_INFINITY))
    say(f"{'kind':<10}{'cases':>8}{'exit 0':>8}{'exit 2':>8}{'wrong':>8}")
    failed = 0
    for name, kind in kinds().items():
        if asked.kinds and name not in asked.kinds.split(","):
            continue
        tally = Tally()
        play(name, kind, asked.fuzz_budget, tally)
        wrong = tally.ends.pop("wrong", 0)
        failed += wrong
        say(f"{name:<10}{tally.ends.total():>8}{tally.ends['exit 0']:>8}{tally.ends['exit 2']:>8}{wrong:>8}")
        for told in tally.wrong.values():
            say(f"    {told[:1500]}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
