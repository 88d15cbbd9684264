"""A profile of a CPU run is told in words of ranks: there is no GPU, and its critical path is a part of a step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from clustersim.app.cli import cli
from clustersim.core.timeline import WITHOUT_GPU
from clustersim.files import traces

GLOO = Path(__file__).parent / "data" / "traces" / "gloo_2_ranks"
STEP = 1.5e6
"""Microseconds, of which operators take a small part."""


def profile(path: Path, ranks: int = 1, rank: int = 0) -> Path:
    """Three steps of a few operators on two threads, with Gloo's all-reduces where there are several ranks."""
    events: list[dict[str, Any]] = []
    for step in range(3):
        begin = 1e6 + step * STEP
        about = {"ph": "X", "pid": 1, "tid": 1}
        events.append(about | {"cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": begin, "dur": STEP})
        for k in range(8):
            at = begin + 1e4 + k * 1.5e5 * (1 + 0.2 * rank)
            events.append(about | {"cat": "cpu_op", "name": "aten::mm", "ts": at, "dur": 2e4, "tid": 1 + k % 2})
        if ranks > 1:
            args = {"Input Dims": [[1000, 1000]], "Input type": ["float"]}
            note = {"cat": "user_annotation", "name": "gloo:all_reduce", "ts": begin + 1.41e6, "dur": 5e4, "args": args}
            events.append(about | note)
    info = {"backend": "gloo", "rank": rank, "world_size": ranks}
    path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}))
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_word_of_gpus_where_there_is_none(tmp_path: Path, ranks: int):
    for rank in range(ranks):
        profile(tmp_path / f"rank{rank}.json", ranks, rank)
    assert traces.read(tmp_path).stats[WITHOUT_GPU] == ranks
    said = CliRunner().invoke(cli, ["explain", str(tmp_path)]).output
    assert "GPU" not in said
    assert "aunch" not in said
    page = tmp_path / "page.html"
    assert CliRunner().invoke(cli, ["report", str(tmp_path), "-o", str(page)]).exit_code == 0
    text = re.sub(r"<[^>]+>", " ", page.read_text().partition('<h2 id="time">')[2])
    assert not re.search(r"GPUs? (?:have|idle|wait|compute)|Launch-bound", text)


@pytest.mark.parametrize(("recorded", "partly"), [(True, True), (False, False)])
def test_the_page_says_where_the_critical_path_is_a_part_of_a_step(tmp_path: Path, recorded: bool, partly: bool):
    path = GLOO if recorded else profile(tmp_path / "rank0.json")
    page = tmp_path / "page.html"
    said = CliRunner().invoke(cli, ["explain", str(path)]).output
    assert CliRunner().invoke(cli, ["report", str(path), "-o", str(page)]).exit_code == 0
    assert ("as far back as it can be followed" in said) is partly
    assert ("as far back as it can be followed" in page.read_text()) is partly


def test_profiles_of_gpus_keep_their_words(tmp_path: Path):
    from test_traces_kineto import gemm, save

    events = [event for k in range(6) for event in gemm(1000 + 500 * k, 20, 995 + 500 * k, k)]
    path = save(tmp_path / "rank0.json", events, world=1)
    assert WITHOUT_GPU not in traces.read(path).stats
    assert "GPU" in CliRunner().invoke(cli, ["explain", str(path)]).output


def crossed(path: Path, rank: int) -> Path:
    """Steps of a rank whose two threads of Gloo begin two broadcasts in an order of the rank's own, and one of whose
    ranks is late: what one thread begins first, another rank's begins second."""
    about = {"ph": "X", "pid": 1, "tid": 1}
    events: list[dict[str, Any]] = []
    for step in range(4):
        begin = 1e6 + step * 1e5 - 3e4 * rank
        events.append(about | {"cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": begin, "dur": 1e5})
        events += [about | {"cat": "cpu_op", "name": "aten::mm", "ts": begin + 2e4 * k, "dur": 1e4} for k in range(5)]
        for thread, elements in enumerate((64, 256)):
            at = begin + 1.5e4 + 10 * (thread if rank else 1 - thread)
            note = {
                "cat": "user_annotation",
                "name": "gloo:broadcast",
                "ts": at,
                "dur": 2e4 + 3e4 * rank,
                "tid": 2 + thread,
            }
            events.append(about | note | {"args": {"Input Dims": [[elements]], "Input type": ["float"]}})
    info = {"backend": "gloo", "rank": rank, "world_size": 2}
    text = {"schemaVersion": 1, "distributedInfo": info, "host_name": "box", "traceEvents": events}
    path.write_text(json.dumps(text))
    return path


def test_collectives_that_threads_begin_in_orders_of_their_own_are_replayed(tmp_path: Path):
    for rank in range(2):
        crossed(tmp_path / f"rank{rank}.json", rank)
    said = CliRunner().invoke(cli, ["replay", str(tmp_path)])
    assert said.exit_code == 0, said.output
    assert "first span to last" in said.output


def test_every_command_says_the_same_step_of_ranks_that_begin_it_apart(tmp_path: Path):
    for rank in range(2):
        crossed(tmp_path / f"rank{rank}.json", rank)
    told = CliRunner().invoke(cli, ["trace", str(tmp_path)]).output
    explained = CliRunner().invoke(cli, ["explain", str(tmp_path)]).output
    replayed = CliRunner().invoke(cli, ["replay", str(tmp_path)]).output
    (step,) = re.findall(r"step time +(\S+ ms), mean of 4", told)
    assert f"{step} a step" in explained
    assert "rank 0 is the last to 8 of 8 that waited" in told
    (window,) = re.findall(r"first span to last (\S+ ms)", told)
    assert re.search(rf"first span to last, warm-up left out *│ *{re.escape(window)} ", replayed)


def test_operators_of_before_1_11_and_their_steps_are_told(tmp_path: Path):
    old = profile(tmp_path / "rank0.json").read_text().replace('"cpu_op"', '"Operator"')
    new = traces.read(profile(tmp_path / "rank0.json"))
    (tmp_path / "rank0.json").write_text(old.replace('"user_annotation"', '"Operator"'))
    told = traces.read(tmp_path / "rank0.json")
    assert list(told.spans()["start"]) == list(new.spans()["start"])
    said = json.loads(CliRunner().invoke(cli, ["trace", str(tmp_path / "rank0.json"), "--json"]).output)
    assert said["steps"] == [0, 1, 2]


def test_gloos_calls_are_collectives_of_gpus_that_have_no_other(tmp_path: Path):
    events = json.loads(profile(tmp_path / "rank0.json", ranks=2).read_text())
    about = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7, "dur": 9e4}
    work = [about | {"name": "gemm", "ts": 1.2e6 + step * STEP, "args": {"stream": 7}} for step in range(3)]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(events | {"traceEvents": [*events["traceEvents"], *work]}))
    (told,) = json.loads(CliRunner().invoke(cli, ["trace", str(path), "--json"]).output)["collectives"]
    assert (told["kind"], told["count"]) == ("all_reduce", 3)
    sent = {
        "Collective name": "allreduce",
        "In msg nelems": 1000,
        "Out msg nelems": 1000,
        "dtype": "Float",
        "Group size": 2,
    }
    nccl = about | {"name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ts": 1.1e6, "args": sent | {"stream": 9}}
    path.write_text(json.dumps(events | {"traceEvents": [*events["traceEvents"], *work, nccl]}))
    assert (
        "3: a call of Gloo, beside the collectives of the GPUs" in CliRunner().invoke(cli, ["trace", str(path)]).output
    )


def test_a_trace_of_collectives_alone_says_why_nothing_is_told(tmp_path: Path):
    note = {"ph": "X", "cat": "user_annotation", "name": "nccl:all_reduce", "pid": 1, "tid": 1, "ts": 1, "dur": 7}
    (tmp_path / "rank0.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": [note]}))
    said = CliRunner().invoke(cli, ["trace", str(tmp_path / "rank0.json")])
    assert "1 x a collective without shapes (nccl:all_reduce" in str(said.exception)


def test_a_diagnosis_without_a_gpu_blames_none_and_names_no_tool_of_gpus(tmp_path: Path):
    """It said "slow_gpu of rank 1 ... nvidia-smi" of two processes on a laptop's CPU."""
    for rank in range(2):
        file = profile(tmp_path / f"rank{rank}.json", 2, rank)
        if rank:
            file.write_text(file.read_text().replace('"dur": 20000.0', '"dur": 45000.0'))
    said = CliRunner().invoke(cli, ["diagnose", str(tmp_path)]).output
    assert said.startswith(("diagnosis: not sure: slow_cpu of rank 1", "diagnosis: slow_cpu of rank 1"))
    assert "OMP_NUM_THREADS" in said
    assert not re.search(r"nvidia-smi|gpu|GPU|Xid|dcgm|kernels", said)


def loading(folder: Path, waits: dict[int, list[float]]) -> Path:
    """Steps of ranks that wait so long [ms] for a batch, as PyTorch's loader annotates it, compute for 40 ms, and meet
    in an all-reduce."""
    folder.mkdir()
    begin = dict.fromkeys(waits, 1e6)
    files: dict[int, list[dict[str, Any]]] = {rank: [] for rank in waits}
    for step in range(len(waits[0])):
        meet = max(begin[rank] + 1e3 * waits[rank][step] for rank in waits) + 6e4
        for rank, events in files.items():
            first = begin[rank]
            trained = first + 1e3 * waits[rank][step]
            about = {"ph": "X", "pid": 1, "tid": 1}
            note = about | {"cat": "user_annotation"}
            loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
            events.append(note | {"name": f"ProfilerStep#{step}", "ts": first, "dur": meet + 1e4 - first})
            events.append(note | {"name": loader, "ts": first, "dur": trained - first})
            for k in range(8):
                at = trained + 6e3 * k
                events.append(about | {"cat": "cpu_op", "name": "aten::mm", "ts": at, "dur": 5e3 * (1 + 0.1 * rank)})
            args = {"Input Dims": [[1000, 1000]], "Input type": ["float"]}
            sent = trained + 5e4
            events.append(note | {"name": "gloo:all_reduce", "ts": sent, "dur": meet + 1e4 - sent, "args": args})
            begin[rank] = meet + 1e4
    for rank, events in files.items():
        info = {"backend": "gloo", "rank": rank, "world_size": len(waits)}
        kept = {"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}
        (folder / f"rank{rank}.json").write_text(json.dumps(kept))
    return folder


def lines_of(*words: str) -> list[str]:
    """What a command prints."""
    return CliRunner().invoke(cli, [*words], catch_exceptions=False).output.splitlines()


def test_what_all_ranks_wait_for_their_data_loaders_is_no_slow_cpu(tmp_path: Path):
    """A rank that is a tenth slower was blamed for steps of which all ranks waited 150 ms for a batch."""
    folder = loading(tmp_path / "all", {0: [150.0] * 5, 1: [150.0] * 5})
    first, why, *_ = lines_of("diagnose", str(folder))
    said = "diagnosis: the whole job is slower than it need be: every rank waits 150 ms of a step of 220 ms for its"
    assert first == f"{said} data loader; beside that, slow_cpu of rank 1 (95% sure)"
    assert "num_workers" in why
    headline, *lines = lines_of("explain", str(folder))
    assert "68.2% of the step is lost because ranks wait for the host (data loader)" in headline
    assert any("The rank waits for its data loader, 150 ms on rank" in line for line in lines)


def test_a_loader_with_workers_is_no_garbage_collection_nor_a_checkpoint(tmp_path: Path):
    """It is late every few batches, as these are; but the profile names it."""
    waits = [5.0, 5.0, 240.0, 5.0, 240.0]
    folder = loading(tmp_path / "rank1", {0: [5.0] * 5, 1: waits})
    first, *_, finding = lines_of("diagnose", str(folder))
    assert first.startswith("diagnosis: slow_data of rank 1 (9")
    assert finding == "- profiles: rank(s) 1 waits for its data loader 235 ms before a step, now and then"
    folder = loading(tmp_path / "both", {0: waits, 1: waits})
    assert "every rank waits 122.5 ms of a step" in lines_of("diagnose", str(folder))[0]


def test_a_loader_that_hardly_takes_time_is_not_told(tmp_path: Path):
    folder = loading(tmp_path / "none", {0: [2.0] * 5, 1: [2.0] * 5})
    assert not any("data loader" in line for line in lines_of("diagnose", str(folder)))


def test_a_digest_says_what_of_the_window_goes_to_the_loader(tmp_path: Path):
    folder = loading(tmp_path / "all", {0: [150.0] * 5, 1: [150.0] * 5})
    lines = lines_of("trace", str(folder))
    assert "hint: ranks wait for their data loaders 68 % of the window: more workers, cheaper samples" in lines
    assert "hint: the compute stream is busy 18 to 20 % of the window only" in lines
    folder = loading(tmp_path / "one", {0: [150.0] * 5})
    assert "hint: the compute stream is busy 18 % of the window only" in lines_of("trace", str(folder))


def test_of_gpus_too_a_loader_that_is_named_is_to_blame(tmp_path: Path):
    """Its span, in the step that it delays, made the GPU begin that step in time: nothing was wrong."""
    from test_traces_kineto import gemm, kernel, save

    loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    for rank in range(2):
        events: list[dict[str, Any]] = []
        for step in range(6):
            begin = 1e6 + 1.5e5 * step
            waits = 1e5 if rank and step % 2 else 1e3
            note = {"ph": "X", "cat": "user_annotation", "pid": 1, "tid": 1}
            events.append(note | {"name": f"ProfilerStep#{step}", "ts": begin, "dur": 1.5e5})
            events.append(note | {"name": loader, "ts": begin + 1, "dur": waits - 2})
            events += gemm(begin + waits, 3e4, begin + waits - 5, 10 * step + 1)
            sent = begin + waits + 3e4
            events.append(kernel(sent, begin + 1.45e5 - sent if step % 2 else 5e3, step, rank))
        save(tmp_path / f"rank{rank}.json", events, rank)
    first, *_, finding = lines_of("diagnose", str(tmp_path))
    assert first.startswith("diagnosis: slow_data of rank 1 (9")
    assert "the GPU of rank(s) 1 waits for its data loader 99 ms before a step, now and then" in finding
