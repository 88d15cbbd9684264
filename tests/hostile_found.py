"""What tools and jobs print, nearly right: machines, hosts and pods, and logs, profiles and traces of every reader."""

from __future__ import annotations

import json
from typing import Any

import test_chakra
import test_found_machines as found
import test_launch_idioms as idioms
import test_step_lines as step_rows
import test_step_tables as step_table_rows
import test_tensorboard as board
import test_traces_copied as copied
from hostile_files import DATA, Kind
from hostile_launch import reworded, yaml_file
from hostile_values import damaged, documents, json_file
from hypothesis import strategies as st
from test_traces_formats import OBJECTS, TEXTS
from test_traces_idioms import HEAD, OWN, ROWS, events

TRACES = ("trace {} --json", "replay {} --json")
LOGS = ("trace {} --json", "trace {} --topology dgx-h100 --json")
COMMANDS = "".join(
    f"NCCL_ALGO={algo} ./all_reduce_perf -g 4\n{HEAD}{''.join(map(' '.join, ROWS))}" for algo in ("Ring", "Tree")
)
MILLISECONDS = (
    "$ ./all_reduce_test 10000000\n#  Rank  0 uses device  0 [0x06] Tesla P100-SXM2-16GB\n"
    "#  Rank  1 uses device  1 [0x07] Tesla P100-SXM2-16GB\n#  bytes  N  type  op  time  algbw  busbw  res\n"
    "  10000000  10000000  char  sum  0.732  13.66  13.66  0e+00\n  8  8  char  sum  0.031  0.00  0.00  0e+00\n"
)
MACHINE = "new topology made.toml --from {} --gpu"


def printed(text: str) -> Any:
    """Files of words that a tool printed, some of them changed, and damaged."""
    return damaged(reworded(text))


def machines() -> dict[str, Kind]:
    """Files that ``clustersim new topology --from`` reads."""
    matrix = {"matrix.txt": found.PAIRED.encode()}
    alone = (f"{MACHINE} A100-SXM4-80GB", f"{MACHINE} H100-SXM5-80GB --nics 4x400Gb/s")
    beside = (
        "new topology made.toml --from matrix.txt --from {} --gpu A100-SXM4-80GB",
        "new topology made.toml --from {}",
    )
    own = {"mine.toml": b'[device]\nname = "mine"\nextends = "MI100"\n'}
    dump = found.amd_dump("", "906", 1)
    crowded = found.with_words_glued(found.matrix_with_far_nics(8, 1, "NV18"))
    return {
        "matrix": Kind("topo.txt", printed(found.PAIRED), alone),
        "matrix that lost spaces": Kind("topo.txt", printed(crowded), (f"{MACHINE} H100-SXM5-80GB",)),
        "dump of RCCL": Kind("topo.xml", printed(dump), (f"{MACHINE} mine.toml", f"{MACHINE} MI100"), lambda: own),
        "lstopo": Kind("topo.xml", printed(found.LSTOPO), (MACHINE.removesuffix(" --gpu"), alone[1])),
        "rocm-smi": Kind("topo.txt", printed(found.rocm("XGMI", 4)), (f"{MACHINE} MI300X --nics 4x400Gb/s", alone[0])),
        "ibstat": Kind("ib.txt", printed(found.ibstat(400, 0, 200, 100)), beside, lambda: matrix),
        "ibv_devinfo": Kind("ib.txt", printed(found.devinfo(2, 128)), beside, lambda: matrix),
        "nvlink": Kind("links.txt", printed(found.nvlinks(9)), beside, lambda: matrix),
    }


def launches() -> dict[str, Kind]:
    """Hosts and pods, which ``clustersim import`` reads."""
    script = {"run.sh": f"deepspeed --hostfile hosts {idioms.GPT}".encode()}
    job = idioms._torch_job({"command": ["torchrun"], "args": ["--nproc_per_node=8", *idioms.GPT.split()]})
    read = "import {} -o made.toml --topology dgx-h100"
    pods = st.one_of(documents(job).map(yaml_file), reworded(yaml_file(job).decode()))
    return {
        "hosts": Kind("hosts", printed("a slots=8\nb slots=8\n"), (f"{read} run.sh --json", read), lambda: script),
        "pods": Kind("job.yaml", damaged(pods), (f"{read} --json", f"{read} --nodes 2")),
    }


def traces() -> dict[str, Kind]:
    """Logs, profiles and traces."""
    wall = board.FIRST + b"".join(board.record(board.event(step / 10, step, {"loss": 1.0})) for step in range(6))
    halves = HEAD + "".join(f"{first}{OWN}\n{second}\n" for first, second in ROWS)
    dumps = (DATA / "flight_recorder" / "trace_0").read_bytes()
    chakra = "replay {} --topology dgx-1v --json", "trace {} --json"
    logs = {name: text for name, (_, text) in TEXTS.items()}
    kinds = {
        "flight recorder": Kind("trace_0", damaged(st.just(dumps)), TRACES),
        "flight recorder json": Kind(
            "trace_0", damaged(documents(OBJECTS["Flight Recorder"][1]).map(json_file)), TRACES
        ),
        "nccl-tests json": Kind("r.json", damaged(documents(OBJECTS["nccl-tests -J"][1]).map(json_file)), TRACES),
        "tensorboard": Kind("events.out.tfevents.1", damaged(st.just(wall)), TRACES),
        "list of events": Kind("rank0.json", damaged(st.just(json_file(events(8)))), TRACES),  # type: ignore[arg-type]
        "chakra 2022": Kind("p.0.et", damaged(st.just(test_chakra.of_2022())), chakra),
        "chakra 2023": Kind("p.0.et", damaged(st.just(test_chakra.of_2023())), chakra),
        "table without units": Kind("log.txt", printed(MILLISECONDS), LOGS),
        "several commands": Kind("log.txt", printed(COMMANDS), LOGS),
        "rows in halves": Kind("log.txt", printed(halves), TRACES),
    }
    steps = ["".join(line.format(i=i, s=10 + 3 * i) for i in range(1, 9)) for line, _ in step_rows.LINES.values()]
    tables = [text for text, _ in step_table_rows.TABLES.values()]
    kinds["steps of frameworks"] = Kind("log.txt", st.sampled_from(steps).flatmap(printed), LOGS)
    history = step_table_rows.TABLES["a history of Weights & Biases"][0]
    state = json.loads(step_table_rows.state([{"step": i, "step_time": 7.5} for i in range(9)]))
    kinds["steps in Parquet"] = Kind("h.parquet", damaged(st.just(step_table_rows.in_parquet(history))), TRACES)
    kinds["log in a zip"] = Kind("log.zip", damaged(st.just(copied.zipped(job=steps[0].encode()))), TRACES)
    kinds["state of a trainer"] = Kind("trainer_state.json", damaged(documents(state).map(json_file)), TRACES)
    kinds["tables of steps"] = Kind("metrics.csv", st.sampled_from(tables).flatmap(printed), TRACES)
    for name in ("old table", "NCCL_DEBUG", "Megatron-LM", "watchdog", "DeepSpeed"):
        kinds[f"log of {name}"] = Kind("log.txt", printed(logs[name]), LOGS)
    return kinds


def found_kinds() -> dict[str, Kind]:
    """All of them."""
    return {**machines(), **launches(), **traces()}
