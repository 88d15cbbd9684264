"""The command line: what is on stdout, what is on stderr, the exit code, and the files."""

from __future__ import annotations

import gzip
import json
import re

import click
import pytest
from conftest import ROOT

from clustersim import scenario
from clustersim.app.cli import cli
from clustersim.app.cli.common import ProgressLine
from clustersim.app.cli.run import FILES, _write
from clustersim.collectives.registry import ALGORITHMS
from clustersim.core.outputs import Folder

RUN = ("run", "ddp_resnet50_1x8_v100", "--set", "run.steps=3")
REQUIRED = {
    "step_time_s",
    "samples_per_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "hfu",
    "compute_s",
    "communication_s",
    "exposed_communication_s",
    "bytes_sent_per_gpu",
    "peak_memory_bytes",
    "hottest_links",
}
COLLECTIVE = ("collective", "all_reduce", "--topology", "hgx-h100", "--nodes", "2")


def said(done):
    """Lines on stderr."""
    return done.stderr.splitlines()


def answer(done):
    """The JSON on stdout of a command that went well and said nothing else."""
    assert (done.returncode, said(done)) == (0, [])
    return json.loads(done.stdout)


def refusal(done):
    """The one line on stderr of a command that refused its input."""
    assert (done.returncode, done.stdout, len(said(done))) == (2, "", 1)
    assert said(done)[0].startswith("error: ")
    return said(done)[0]


@pytest.fixture(scope="module")
def resnet(clustersim, tmp_path_factory):
    """One run with every output: (its JSON, the folder of its files)."""
    folder = tmp_path_factory.mktemp("out") / "deep" / "result"
    return answer(clustersim(*RUN, "--out", folder, "--json")), folder


def test_run_json_has_every_promised_figure(resnet):
    values, _ = resnet
    assert set(values) >= REQUIRED
    assert 0 < values["communication_s"] < values["step_time_s"]
    # Waiting for a slower peer counts as exposed, so it may exceed the transfers themselves.
    assert 0 < values["exposed_communication_s"] <= values["communication_s"] + values["peer_wait_s"]
    assert values["mfu"] == pytest.approx(values["hfu"])
    assert 0 < values["mfu"] < 1
    assert values["tokens_per_s_per_gpu"] is None
    assert values["samples_per_s"] == pytest.approx(8 * 64 / values["step_time_s"])
    # A ring or a tree sends 2 (n - 1) / n of 25,557,032 fp32 gradients; buffers add less than a percent.
    assert values["bytes_sent_per_gpu"] == pytest.approx(2 * 7 / 8 * 25_557_032 * 4, rel=0.01)
    assert values["hottest_links"][0]["utilisation"] <= 1


def test_run_writes_its_files_whole_and_nothing_else(resnet):
    values, folder = resnet
    assert sorted(path.name for path in folder.iterdir()) == [
        "clustersim.json",
        "gantt.png",
        "result.json",
        "run.npz",
        "trace.json.gz",
        "waterfall.png",
    ]
    assert json.loads((folder / "result.json").read_text()) == values
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        assert len(json.load(file)["traceEvents"]) > 100
    assert (folder / "gantt.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_scenario_and_seed_give_the_same_bytes(clustersim, resnet):
    values, _ = resnet
    again = answer(clustersim(*RUN, "--json"))
    assert again == values


def test_run_tells_people_the_same_step_time(clustersim, resnet):
    from clustersim.core.units import format_time

    done = clustersim(*RUN)
    assert done.returncode == 0
    assert format_time(resnet[0]["step_time_s"]) in done.stdout


def test_a_changed_knob_changes_the_answer(clustersim, resnet):
    slower = answer(clustersim(*RUN, "--set", "strategy.micro_batch_size=32", "--json"))
    assert slower["step_time_s"] < resnet[0]["step_time_s"]
    assert slower["samples_per_s"] < resnet[0]["samples_per_s"]


def test_a_model_that_does_not_fit_is_an_answer(clustersim):
    values = answer(
        clustersim("run", "ddp_llama3_8b_128x8_h100", "--set", "cluster.nodes=2", "--set", "run.steps=2", "--json")
    )
    assert values["fits"] is False
    # Adam in fp32: parameters, gradients and two moments are 16 bytes each of 8,030,261,248.
    assert values["peak_memory_bytes"] > 16 * 8_030_261_248
    assert values["memory"]["missing_bytes"] == values["peak_memory_bytes"] - values["memory"]["device_bytes"]
    assert "does not fit" in values["memory"]["message"]
    assert values["step_time_s"] > 0
    assert values["tokens_per_s_per_gpu"] > 0


def test_describe_lists_streams_buckets_and_waits_before_the_run(clustersim):
    done = clustersim("describe", "ddp_resnet50_1x8_v100", "--rank", "7")
    assert done.returncode == 0
    assert "25,557,032 parameters" in done.stdout
    assert re.search(r"^ +\d+ +comm +.*all_reduce .*MiB", done.stdout, re.M)


def test_collective_prints_the_header_and_units_of_nccl_tests(clustersim):
    done = clustersim(*COLLECTIVE, "-b", "1M", "-e", "64M", "-f", "4")
    assert (done.returncode, said(done)) == (0, [])
    lines = done.stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.split()[1:4] == ["size", "count", "type"])
    assert lines[header].split()[1:9] == ["size", "count", "type", "redop", "root", "time", "algbw", "busbw"]
    assert lines[header + 1].split()[1:6] == ["(B)", "(elements)", "(us)", "(GB/s)", "(GB/s)"]
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    assert [int(row[0]) for row in rows] == [2**20, 2**22, 2**24, 2**26]
    assert all(int(row[1]) * 4 == int(row[0]) and row[2:5] == ["float", "sum", "-1"] for row in rows)


def test_collective_json_obeys_the_factors_of_nccl_tests_and_the_lower_bound(clustersim):
    for kind, factor in (("all_reduce", 2 * 15 / 16), ("all_gather", 15 / 16), ("broadcast", 1.0)):
        command = ("collective", kind, *COLLECTIVE[2:], "--size", "1GiB", "--json")
        (row,) = answer(clustersim(*command))["rows"]
        assert row["algbw_GBps"] == pytest.approx(2**30 / row["time_us"] / 1e3)
        assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"] * factor)
        assert 0 < row["lower_bound_us"] < row["time_us"]


def test_collective_counts_the_share_of_one_rank_where_nccl_tests_does(clustersim):
    (row,) = answer(clustersim("collective", "all_gather", *COLLECTIVE[2:], "--size", "1GiB", "--json"))["rows"]
    assert row["count"] == 2**30 / 4 / 16


def test_a_pinned_algorithm_and_protocol_are_used(clustersim):
    pins = ("--algorithm", "Ring", "--protocol", "LL", "--size", "1M", "--json")
    (row,) = answer(clustersim(*COLLECTIVE, *pins))["rows"]
    assert (row["algorithm"].lower(), row["protocol"]) == ("ring", "LL")


def test_check_counts_what_a_topology_has(clustersim):
    done = clustersim("check", "hgx-h100", "--nodes", "2")
    assert done.returncode == 0
    assert "bisection" in done.stdout.lower()
    assert "16 x H100-SXM5-80GB" in done.stdout
    assert "16 x 400 Gb/s; 8 rails" in done.stdout
    assert isinstance(answer(clustersim("check", "hgx-h100", "--nodes", "2", "--json")), dict)


def test_a_machine_is_drawn_by_its_name_or_file(clustersim, tmp_path):
    done = clustersim("plot", "topology", "hgx-h100", "m.png", "--nodes", "2", cwd=tmp_path)
    assert (done.returncode, "2 node(s) with 16 GPUs in all" in done.stdout) == (0, True)
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    wrong = clustersim("plot", "topology", "hgx-h101", "n.png", cwd=tmp_path)
    assert (wrong.returncode, "did you mean 'hgx-h100'" in wrong.stderr) == (2, True)


NCCL_HEADER = "case_id,topology,nodes,ranks,collective,dtype,size_bytes,time_us,nccl_version,env,source,notes\n"
NCCL_ROWS = (
    "a,hgx-h100,1,8,all_reduce,float,1048576,40,2.22,,x,\n"
    "a,hgx-h100,1,8,all_reduce,float,1073741824,4000,2.22,,x,\n"
    "b,hgx-h101,1,8,all_reduce,float,1048576,40,2.22,,x,\n"
)


def test_validate_nccl_predicts_every_row_or_says_why_not(clustersim, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text(NCCL_HEADER + NCCL_ROWS)
    values = answer(clustersim("validate", "nccl", table, "--json"))
    assert [values["overall"][key] for key in ("n_rows", "n_cases", "n_skipped")] == [3, 1, 1]
    assert values["rows"][0]["rel_error"] == values["rows"][0]["predicted"] / values["rows"][0]["measured"] - 1
    assert "hgx-h101" in values["rows"][2]["skipped"]
    assert {"case", "source", "size_class", "platform"} <= set(values["by"])
    shown = clustersim("validate", "nccl", table)
    assert shown.returncode == 0
    assert "hgx-h101" in shown.stdout


def test_validate_prints_a_markdown_table_for_the_readme(clustersim, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text(NCCL_HEADER + NCCL_ROWS)
    lines = clustersim("validate", "nccl", table, "--markdown").stdout.splitlines()
    columns = len(re.findall(r"(?<!\\)\|", lines[0]))
    assert columns == 9
    assert all(len(re.findall(r"(?<!\\)\|", line)) == columns for line in lines)
    assert any(line.startswith("| platform | hgx-h100 | 2 | 1 | 0 |") for line in lines)


def test_a_table_that_is_not_text_is_named(clustersim, tmp_path):
    table = tmp_path / "table.csv"
    table.write_bytes(b"\xff\xfe\x00")
    done = clustersim("validate", "nccl", table)
    assert str(table) in refusal(done)


CUTS = {
    "no NIC left on a node": ("ddp_gpt2_xl_2x8_a100", "node0/nic*", ["no NIC"]),
    "no leaf switch left": ("ddp_gpt2_xl_2x8_a100", "leaf*", ["no NIC"]),
    "a GPU without links": ("ddp_resnet50_1x8_v100", "node0/gpu0 -> *", ["no route", "node0/gpu0"]),
}


@pytest.mark.parametrize("case", CUTS)
def test_ranks_that_cannot_reach_each_other_are_an_error_and_no_crash(clustersim, case):
    name, match, parts = CUTS[case]
    done = clustersim("run", name, "--set", f'cluster.changes=[{{match="{match}", remove=true}}]')
    for part in [name, "(at $.cluster)", *parts]:
        assert part in refusal(done)


def test_a_barrier_has_no_bytes(clustersim):
    (row,) = answer(clustersim("collective", "barrier", *COLLECTIVE[2:], "--json"))["rows"]
    assert (row["size_bytes"], row["algbw_GBps"]) == (0, 0)
    assert row["time_us"] > 0


REFUSED = {
    "command": (["runn"], ["did you mean 'run'?"]),
    "option": (["run", "ddp_resnet50_1x8_v100", "--jsn"], ["--json"]),
    "scenario": (["run", "ddp_resnet50_1x8_v10"], ["did you mean 'ddp_resnet50_1x8_v100'?"]),
    "file": (["run", "nowhere.toml"], ["nowhere.toml"]),
    "set": (["run", "ddp_resnet50_1x8_v100", "--set", "cluster.nods=2"], ["--set cluster.nods", "'nodes'"]),
    "world": (["run", "ddp_resnet50_1x8_v100", "--set", "cluster.gpus_per_node=9"], ["9 GPUs"]),
    "rank": (["describe", "ddp_resnet50_1x8_v100", "--rank", "8"], ["8"]),
    "collective": (["collective", "all_reduc", "--topology", "hgx-h100"], ["did you mean 'all_reduce'?"]),
    "topology": (["collective", "all_reduce", "--topology", "hgx-h1000"], ["did you mean 'hgx-h100'?"]),
    "no size": ([*COLLECTIVE, "--size", "many"], ["'many'", "1GiB"]),
    "sizes": ([*COLLECTIVE, "-b", "1G", "-e", "1M"], ["below"]),
    "algorithm": ([*COLLECTIVE, "--algorithm", "rign"], ["rign"]),
    "protocol": ([*COLLECTIVE, "--protocol", "LL129"], ["LL129"]),
    "root": (["collective", "broadcast", *COLLECTIVE[2:], "--root", "16"], ["16"]),
    "check": (["check", "nowhere.toml"], ["nowhere.toml"]),
    "table": (["validate", "nccl", "nowhere.csv"], ["nowhere.csv"]),
    "table of steps": (["validate", "steps", "nowhere.csv"], ["nowhere.csv"]),
    "columns": (["validate", "nccl", "pyproject.toml"], ["pyproject.toml", "case_id"]),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("as_json", [False, True])
def test_bad_input_gives_one_line_on_stderr_and_exit_code_2(clustersim, case, as_json):
    arguments, parts = REFUSED[case]
    done = clustersim(*arguments, *(["--json"] if as_json and arguments[0] not in {"describe", "runn"} else []))
    for part in parts:
        assert part in refusal(done)


def test_a_folder_that_cannot_be_written_is_named(clustersim, tmp_path):
    (tmp_path / "taken").write_text("a file")
    done = clustersim(*RUN, "--out", tmp_path / "taken" / "out")
    assert "taken" in said(done)[-1]
    assert (done.returncode, len(said(done))) == (2, 1)


def test_the_readme_s_first_two_blocks_are_the_two_commands():
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert "clustersim run" in blocks[0]
    assert "tests/run.py" in blocks[1]


def test_links_that_are_alike_are_told_once(clustersim):
    # Rings of 39 MiB by LL128 take more of a port than they carry: 2.877 GiB at a share of 0.984, 3.038 at 0.929.
    busy = [line for line in clustersim("run", "ddp_gpt2_xl_2x8_a100").stdout.splitlines() if "busy link" in line]
    assert busy == ["busy link: node0/nic0 -> leaf0 and others like it, 19.4% of its line rate (1.519 GiB a step)"]


def every_command(group=None, name="clustersim"):
    """Every command that can be typed, by its name."""
    group = cli if group is None else group
    for one in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), one)
        yield f"{name} {one}", command
        if isinstance(command, click.Group):
            yield from every_command(command, f"{name} {one}")


@pytest.mark.parametrize("name", dict(every_command()))
def test_every_option_says_in_a_sentence_what_it_is(name):
    command = dict(every_command())[name]
    assert len((command.help or "").split()) > 4
    for option in (one for one in command.params if isinstance(one, click.Option)):
        words = re.sub(r"\s*\[[^]]*\]$", "", option.help or "")
        assert re.fullmatch(r"\S+ \S+ .*\.", words), f"{name} {option.opts[0]}: {words!r}"
        assert not re.search(r"\bhangs? on\b", f"{words} {command.help}")


def test_what_is_written_goes_to_out_in_every_command():
    for name, command in every_command():
        visible = [option for option in command.params if not getattr(option, "hidden", False)]
        assert "--output" not in {word for option in visible for word in option.opts}, name


@pytest.mark.parametrize("word", ["--out", "-o", "--output"])
def test_a_report_is_written_where_out_or_its_old_name_says(clustersim, tmp_path, word):
    page = tmp_path / "page.html"
    done = clustersim("report", ROOT / "tests" / "data" / "traces" / "pipeline_2x2", word, page)
    assert done.returncode == 0, done.stderr[-1800:]
    assert "<html" in page.read_text()


def test_list_names_every_algorithm_of_collectives(clustersim):
    rows = {row["name"]: row for row in answer(clustersim("list", "algorithms", "--json"))}
    assert set(rows) == set(ALGORITHMS)
    assert rows["bruck"]["kinds"] == ["all_gather", "all_to_all"]
    assert not rows["nvls"]["steps_can_be_played"]


def test_the_line_of_progress_names_what_comes_after_the_last_step_and_counts_steps_that_are_done_again():
    line = ProgressLine("simulating a run", "summing up a run")
    assert line.stage == ("simulating a run", 0, 0)
    line(3, 4)
    assert line.stage == ("simulating a run", 3, 4)
    line(4, 4)
    assert line.stage == ("summing up a run", 0, 0)
    line(1, 4)
    assert line.stage == ("simulating a run", 1, 4)
    without = ProgressLine("comparing")
    without(4, 4)
    assert without.stage == ("comparing", 4, 4)


def test_what_writes_a_run_names_each_file_that_it_writes(tmp_path):
    result = scenario.load("why_launch_bound").run()
    stages = []
    folder = Folder(tmp_path / "out", "run", "a run", FILES, ())
    _write(result, b"{}", folder, None, stages.append)
    assert [text.partition(" ")[0] for text in stages] == ["writing", "writing", "drawing", "drawing"]
    assert [text.rpartition("/")[2] for text in stages] == ["run.npz", "trace.json.gz", "gantt.png", "waterfall.png"]
    assert {path.name for path in (tmp_path / "out").iterdir()} >= set(FILES)


def test_what_does_not_fit_is_told_before_its_times(clustersim, tmp_path):
    """describe printed "18.36 TiB of 80 GiB" without a verdict, and run a step's time before what is lacking."""
    file = tmp_path / "large.toml"
    file.write_text(
        '[cluster]\ntopology = "hgx-h100"\n[model]\nname = "gpt3-175b"\ndtype = "bf16"\n[strategy]\nkind = "ddp"\n'
        'micro_batch_size = 1\n[run]\nsteps = 2\noptimizer = "adam"\n'
    )
    assert "memory    does not fit on H100-SXM5-80GB: " in clustersim("describe", file).stdout
    assert answer(clustersim("describe", file, "--json"))["memory_verdict"] == "does not fit"
    run = answer(clustersim("run", file, "--json"))["verdict"]
    assert run.startswith("gpt3-175b on 8 H100-SXM5-80GB (ddp): does not fit, it needs ")


def test_check_says_how_many_nodes_stay_on_one_set_of_leaves(clustersim):
    told = clustersim("check", "hgx-h100", "--nodes", "40").stdout
    assert "40 nodes on 2 sets of leaf switches (32 + 8): a job of up to 32 stays on one" in told
