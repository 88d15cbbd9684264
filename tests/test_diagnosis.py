"""One answer over all files: it names cause and place, says how sure it is, and what evidence would decide."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import ROOT
from evidence.incidents import FORMAT_OF

from clustersim import scenario as scenarios
from clustersim.app.cli import cli
from clustersim.core.errors import TraceError
from clustersim.core.timeline import Timeline
from clustersim.files import traces
from clustersim.files.traces.profiled import BACKEND
from clustersim.scenario.file.incident_table import KINDS
from clustersim.studies.diagnosis import Site, Suspect, diagnose, profile_findings
from clustersim.studies.diagnosis.answer import (
    ALONE,
    CONFIDENT,
    NEXT,
    NEXT_ON_CPU,
    SOURCES,
    TELLS,
    _decides,
    _job,
    _told,
    judged,
)
from clustersim.studies.diagnosis.courses import AGAIN, GROWS, ONCE, STAYS, course_of
from clustersim.studies.diagnosis.profile_findings import ProfiledSteps
from clustersim.studies.diagnosis.suspects import ANOTHER, LINKS_SLOW, NOTHING, by_kind, finding, ranked
from clustersim.studies.exam import PlantedIncident, write_traces
from clustersim.studies.exam.drawing import JOBS, SPINE
from clustersim.studies.exam.evidence import TracesByKind
from clustersim.studies.exam.sealing import answer_of

BASE = "ddp_gpt2_medium_2x4_v100"
PLACES: dict[str, dict[str, Any]] = {
    "rank": {"rank": 6},
    "node": {"node": 1},
    "link": {"link": "node1/nic2"},
    "": {},
}
MEASURES = {"slowdown": 1.5, "pause": "25 ms", "left": 0.2, "lasts": "8 ms", "every": "60 ms", "interval": 2}
OTHER_JOBS = {
    "wrong_rail": "rails",
    "other_rack": "rails",
    "congestion": "racks",
    "stuck_message": "pipeline",
}
"""Kinds that need rails, a spine between machines, or messages between stages."""


def plant(kind: str, seed: int = 0) -> PlantedIncident:
    row = KINDS[kind]
    incident = {"kind": kind, **PLACES[row.where], **{name: MEASURES.get(name) for name in row.measures}}
    name, changes = JOBS[OTHER_JOBS[kind]] if kind in OTHER_JOBS else (BASE, {})
    incident |= {"at": "2.5 s" if kind == "congestion" else "0.25 s"} if row.does != "start" else {}
    incident |= {"congestion": {"link": SPINE}, "hot_gpu": {"lasts": "0.12 s"}}.get(kind, {})
    incident |= {"other": "node1/nic3"} if kind == "wrong_rail" else {}
    changes = {**changes, "model.options": {"layers": 8}, "run.steps": 7, "run.seed": seed, "incident": [incident]}
    prepared = scenarios.load(name, changes).prepare()
    timeline = prepared.play()
    return PlantedIncident(seed, "easy", incident, prepared, timeline, prepared.hang(timeline))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory):
    """The files of an incident of each kind, written once."""
    kept: dict[str, tuple[PlantedIncident, TracesByKind]] = {}

    def files(kind: str) -> tuple[PlantedIncident, TracesByKind]:
        if kind not in kept:
            exam = plant(kind)
            kept[kind] = exam, write_traces(exam, tmp_path_factory.mktemp(kind))
        return kept[kind]

    return files


def without(kept: TracesByKind, *kinds: str) -> list[Path]:
    return [path for kind, paths in kept.items() if kind not in kinds for path in paths]


@pytest.mark.parametrize("kind", KINDS)
def test_with_all_files_cause_and_place_are_right_and_sure(written, kind):
    exam, kept = written(kind)
    answer = diagnose(without(kept))
    right = answer_of(exam)
    first = answer.suspects[0]
    assert (first.kind, first.rank, first.host, first.port) == (right.kind, right.rank, right.host, right.port)
    assert answer.confident
    assert first.look_at == NEXT[kind]
    assert answer.ranks == len(exam.hosts)


@pytest.mark.parametrize("kind", KINDS)
def test_generated_files_are_known_by_their_content_and_read_whole(written, kind):
    """The contract of readers, on what every kind of fault leaves."""
    _, kept = written(kind)
    assert "steps" in kept or kind == "uneven_batches"
    for source, paths in kept.items():
        assert {traces.sniff(path).name for path in paths} == {FORMAT_OF[source]}
        for group in [[path] for path in paths] if FORMAT_OF[source] in ALONE else [paths]:
            answer = traces.read(group, format=FORMAT_OF[source])
            skipped = answer.stats.get("skipped", {}) if isinstance(answer, Timeline) else answer.skipped
            assert not skipped


@pytest.mark.parametrize("kind", KINDS)
def test_a_generated_file_that_is_cut_is_read_as_far_as_it_goes_or_is_one_error(written, kind, tmp_path):
    _, kept = written(kind)
    errors: dict[str, str] = {}
    for i, (source, paths) in enumerate(kept.items()):
        data = paths[0].read_bytes()
        share = (0.3, 0.6, 0.95)[(i + list(KINDS).index(kind)) % 3]
        path = tmp_path / paths[0].name
        path.write_bytes(data[: int(len(data) * share)])
        try:
            traces.read(path, format=FORMAT_OF[source])
        except TraceError as error:
            errors[path.name] = str(error)
    assert all(name in error for name, error in errors.items())


def test_confidences_are_shares_of_one(written):
    _, kept = written("stuck_kernel")
    shares = [suspect.confidence for suspect in diagnose(without(kept)).suspects]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) <= 1 - ANOTHER + 1e-3


def test_without_dumps_a_stuck_kernel_cannot_be_placed_and_dumps_would_decide(written):
    _, kept = written("stuck_kernel")
    answer = diagnose(without(kept, "dumps"))
    assert not answer.confident
    assert "Flight Recorder dumps" in answer.decides
    assert "not sure" in answer.verdict


def test_without_counters_a_slow_link_has_no_place(written):
    _, kept = written("slow_link")
    answer = diagnose(without(kept, "counters"))
    assert answer.suspects[0].kind in ("slow_link", "congestion")
    assert not answer.confident


def test_a_dead_rank_needs_its_launcher_and_a_stopped_one_a_dump_that_is_missing(written):
    _, dead = written("dead_rank")
    first = diagnose(without(dead, "launcher")).suspects[0]
    assert first.kind in ("dead_rank", "stopped_rank")
    assert first.rank in (4, 5, 6, 7)
    assert first.confidence < CONFIDENT


@pytest.mark.parametrize("kind", ["missing_call", "other_size", "slow_gpu"])
def test_files_may_come_in_any_order_and_as_a_folder(written, kind):
    _, kept = written(kind)
    paths = without(kept)
    answer = diagnose(paths)
    assert diagnose([paths[0].parent]).suspects == answer.suspects
    assert diagnose(reversed(paths)).suspects[0] == answer.suspects[0]


def test_a_run_in_which_nothing_goes_wrong_has_nothing_as_its_first_suspect(tmp_path):
    prepared = scenarios.load(BASE, {"run.steps": 7}).prepare()
    well = PlantedIncident(0, "easy", {"kind": NOTHING}, prepared, prepared.play(), None)
    answer = diagnose(without(write_traces(well, tmp_path)))
    assert answer.suspects[0].kind == NOTHING
    assert answer.confident


def test_files_that_say_nothing_of_a_fault_are_an_error(tmp_path):
    path = tmp_path / "all_reduce.csv"
    path.write_text("collective,size_bytes,time_us,ranks\nall_reduce,1024,10,4\n")
    with pytest.raises(TraceError, match="none of these files says anything of a fault; what does: Flight Recorder"):
        diagnose([path])
    with pytest.raises(TraceError, match="no such file"):
        diagnose([tmp_path / "none"])


def test_two_findings_are_multiplied_and_one_in_a_hundred_is_left():
    suspects = [Suspect(NOTHING), Suspect("slow_gpu", rank=0), Suspect("slow_gpu", rank=1)]
    first = finding("steps", "", suspects, by_kind({"slow_gpu": 0.8}, 0.2))
    second = finding("profiles", "", suspects, lambda s: 0.5 if s.rank == 1 else 0.25)
    shares = dict(ranked(suspects, [first, second]))
    whole = 0.2 * 0.25 + 0.5 * 0.8 * (0.25 + 0.5)  # kinds begin alike, and places of a kind
    assert shares[suspects[2]] == pytest.approx(0.99 * 0.5 * 0.8 * 0.5 / whole)
    assert sum(shares.values()) == pytest.approx(0.99)


@pytest.mark.parametrize(
    ("excess", "course"),
    [
        ([0, 0, 0.1, 0.3, 0.3, 0.3], STAYS),  # a fault that begins within a step
        ([0, 0, 0.05, 0.1, 0.2, 0.3], GROWS),
        ([0, 0, 0.3, 0, 0.3, 0], AGAIN),
        ([0, 0, 0.3, 0, 0, 0], ONCE),
        ([0, 0, 0, 0, 0, 0.3], STAYS),  # nobody knows how it would have gone on
    ],
)
def test_the_course_of_a_fault_is_which_steps_are_slow(excess, course):
    assert course_of(excess, 0.03) == course


def test_every_cause_has_something_to_look_at_and_some_evidence_that_tells_it():
    assert set(NEXT) == {*KINDS, NOTHING}
    assert set(TELLS) == set(SOURCES)
    assert set().union(*TELLS.values()) == set(KINDS)


def profiled(folder, samples, device=None):
    """Profiles of two ranks, four steps of one product and an all_reduce; of rank 1 so many ``samples``, where rank 0
    has four, and as much longer."""
    folder.mkdir()
    for rank, rows in enumerate((4, samples)):
        events = []
        for step in range(4):
            begin = step * 10_000.0
            span = {"ph": "X", "pid": 1, "tid": 1}
            mm = {"Input Dims": [[rows, 64], [64, 64]]}
            note = {"Input Dims": [[4096]], "Input type": ["float"]}
            annotation = span | {"cat": "user_annotation"}
            events += [
                annotation | {"name": f"ProfilerStep#{step}", "ts": begin, "dur": 9_900.0},
                span | {"cat": "cpu_op", "name": "aten::mm", "ts": begin + 10, "dur": 500.0 * rows, "args": mm},
                annotation | {"name": "gloo:all_reduce", "ts": begin + 9000, "dur": 100.0, "args": note},
            ]
        info = {"rank": rank, "world_size": 2, "backend": "gloo"}
        devices = [{"id": 0, "name": device}] if device else []
        profile = {"distributedInfo": info, "deviceProperties": devices, "traceEvents": events}
        (folder / f"rank{rank}.json").write_text(json.dumps(profile))
    return traces.read([folder / f"rank{rank}.json" for rank in range(2)])


def test_a_rank_that_is_given_more_samples_is_no_slow_cpu(tmp_path):
    """Twice the samples were told as "slow_cpu of rank 1", with its governor and threads to look at."""
    profiled(tmp_path / "more", 8)
    given = diagnose([tmp_path / "more"])
    assert given.suspects[0].words == "more_work of rank 1"
    assert given.suspects[0].look_at.startswith("how many samples and tokens")
    assert "the matrix products of rank(s) 1 have up to 2.00 times the FLOPs of others'" in given.findings[0]


def test_what_to_look_at_on_amd_s_gpus_are_amd_s_own_tools(tmp_path):
    job = _job([("kineto", profiled(tmp_path / "amd", 4, device="AMD Instinct MI300X"))], on_cpu=False, beside=False)
    assert job.on_amd
    told = [_told(Suspect(kind, rank=1), 0.5, job).look_at for kind in NEXT]
    assert not [text for text in told if re.search("nvidia|Xid|cuda|nccl-tests", text, re.IGNORECASE)]


def test_suspects_are_every_kind_at_every_place():
    site = Site(2, {0: "a", 1: "b"}, ("a/mlx5_0",))
    of_kind = {kind: [s for s in site.suspects() if s.kind == kind] for kind in KINDS}
    assert {kind: len(found) for kind, found in of_kind.items()} == {
        kind: 1 if row.where == "link" or row.widely else 2 for kind, row in KINDS.items()
    }


def test_the_diagnosis_knows_neither_scenarios_nor_answers():
    """Of the scenario's room it takes the table of kinds alone, and of exams nothing."""
    for path in (ROOT / "clustersim" / "studies" / "diagnosis").glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        assert {name for name in names if "scenario" in name} <= {"clustersim.scenario.file.incident_table"}
        assert not [name for name in names if "exam" in name or "engine" in name]


def test_the_command_says_it_in_lines_and_in_json(written):
    _, kept = written("missing_call")
    folder = str(kept["watchdog"][0].parent)
    said = CliRunner().invoke(cli, ["diagnose", folder], catch_exceptions=False)
    assert said.output.startswith("diagnosis: missing_call of rank 6 (94% sure)\nlook at: py-spy dump of it")
    assert '"confident": true' in CliRunner().invoke(cli, ["diagnose", folder, "--json"]).output


def steps_of(busy, idle, transfers):
    """Profiles of ranks of a CPU."""
    busy, idle = np.array(busy), np.array(idle)
    seconds = [[(("all_reduce", 1e6), took)] for took in transfers]
    ranks, loading = np.arange(busy.shape[1]), np.zeros(busy.shape)
    return ProfiledSteps(ranks, busy, idle, loading, seconds, whole=True, on_cpu=True)


def test_what_is_less_than_steps_differ_by_anyway_is_no_fault_of_a_rank():
    """Of a machine that others use, too: a rank that once stood still 3 ms where its steps differ by tens of them."""
    busy = [[0.170, 0.248, 0.135], [0.216, 0.225, 0.171], [0.212, 0.332, 0.190]]
    idle = [[0.0006, 0.0007, 0.0007], [0.0034, 0.0005, 0.0007], [0.0007, 0.0007, 0.0010]]
    assert profile_findings._late_ranks(steps_of(busy, idle, [1e-3] * 3)) == {}
    steady = np.tile([0.2, 0.2, 0.2], (3, 1))
    assert list(profile_findings._late_ranks(steps_of(steady, idle, [1e-3] * 3))) == [0]


@pytest.mark.parametrize("hosts", [{}, {0: "a", 1: "a"}, {0: "a", 1: "b"}])
def test_of_two_ranks_the_slower_is_told_and_not_that_it_once_began_later(hosts):
    """A profile of two ranks of a busy machine: one took twice as long in every step, and once stood still 2 ms."""
    busy = [[0.0102, 0.0211], [0.0096, 0.0199], [0.0100, 0.0204]]
    steps = steps_of(busy, [[1e-4, 1e-4], [1e-4, 2.1e-3], [1e-4, 1e-4]], [1e-3] * 3)
    slow = profile_findings._slow_ranks(steps, Site(ranks=2, hosts=hosts))
    assert list(slow) == [1]
    assert slow[1] == pytest.approx([1.07, 1.07, 1.04], abs=0.01)
    late = profile_findings._late_ranks(steps)
    assert profile_findings._behind(slow, steps) > sum(by.clip(0).sum() for by in late.values())
    alike = steps_of([[0.010, 0.0102], [0.0103, 0.010], [0.010, 0.0101]], np.zeros((3, 2)), [1e-3] * 3)
    assert profile_findings._slow_ranks(alike, Site(ranks=2, hosts=hosts)) == {}


def test_transfers_inside_one_machine_blame_no_nic_and_a_cpu_no_gpu():
    steady = np.tile([0.2, 0.2], (3, 1))
    for hosts, blamed in (({0: "a", 1: "a"}, False), ({0: "a", 1: "b"}, True)):
        site = Site(ranks=2, hosts=hosts)
        steps = steps_of(steady, 0 * steady, [1e-3, 1e-3, 3e-3])
        told = profile_findings._of_transfers(steps, site.suspects(), site)
        most = max(told.likelihood, key=told.likelihood.__getitem__)
        assert (most.kind in LINKS_SLOW) is blamed
        assert "GPU" not in told.text


SPLIT = ("tp8_pp4_llama3_70b_32x8_h100", {"cluster.nodes": 2, "parallel.pp": 1, "parallel.vpp": None})
SPLIT[1].update(dict.fromkeys(("parallel.layers_per_virtual_stage",)))
SPLIT[1].update({"parallel.global_batch_size": 8, "parallel.overlap_p2p_communication_warmup_flush": False})
SLOW_LINKS = [{"match": "node1/gpu3 -> node1/nvswitch*", "factor": 0.5}]
SLOW_LINKS += [{"match": "node1/nvswitch* -> node1/gpu3", "factor": 0.5}]


def hidden(tmp_path, job, changes, kinds=()):
    """The answer over files of a job with something slow from its start; ``kinds`` : of files, all of them if empty."""
    name, edits = job
    made = scenarios.load(name, {**edits, **changes, "model.options": {"layers": 4}, "run.steps": 5})
    prepared = made.prepare()
    tmp_path.mkdir(exist_ok=True)
    kept = write_traces(PlantedIncident(0, "easy", {"kind": NOTHING}, prepared, prepared.play(), None), tmp_path)
    return diagnose([path for kind, paths in kept.items() if not kinds or kind in kinds for path in paths])


@pytest.mark.parametrize("kinds", [("profiles",), ("profiles", "nccl"), ()])
def test_a_nic_that_is_slow_from_the_start_is_seen_where_groups_differ(tmp_path, kinds):
    """Of eight groups of replicas, each over a NIC of its own, one takes twice as long in every step."""
    answer = hidden(tmp_path, SPLIT, {"cluster.changes": [{"match": "node1/nic3", "factor": 0.5}]}, kinds)
    first = answer.suspects[0]
    assert first.kind == "slow_link"
    assert any("among ranks 3, 11 take" in text for text in answer.findings)
    if "nccl" in kinds:
        assert first.port in ("node0/mlx5_3", "node1/mlx5_3")
    if not kinds:
        assert (first.port, answer.confident) == ("node1/mlx5_3", True)


def test_a_slow_nvlink_is_its_machines(tmp_path):
    answer = hidden(tmp_path, SPLIT, {"cluster.changes": SLOW_LINKS}, ("profiles",))
    assert (answer.suspects[0].kind, answer.suspects[0].host) == ("slow_host", "node1")
    assert any("NVLink" in text for text in answer.findings)


def test_a_gpu_that_is_slow_from_the_start_is_found(tmp_path):
    answer = hidden(tmp_path, SPLIT, {"cluster.slow": [{"ranks": [11], "speed": 0.8}]}, ("profiles", "steps"))
    assert (answer.suspects[0].kind, answer.suspects[0].rank) == ("slow_gpu", 11)


def test_a_lost_rail_is_found_by_the_log_of_nccl(tmp_path):
    lost = {"cluster.changes": [{"match": "node1/nic3", "remove": True}]}
    answer = hidden(tmp_path, SPLIT, lost, ("profiles", "nccl"))
    assert (answer.suspects[0].kind, answer.suspects[0].port) == ("lost_nic", "node1/mlx5_3")


FLAPS = {"match": "node1/nic3", "factor": 0.001, "from": "0.1 s", "until": "0.13 s", "every": "0.4 s"}


def test_profiles_alone_do_not_tell_a_lost_rail_from_a_link_that_flaps_and_say_so(tmp_path):
    """Of a lost rail they named a flapping link, more than half sure."""
    lost = {"cluster.changes": [{"match": "node1/nic3", "remove": True}]}
    answer = hidden(tmp_path / "lost", SPLIT, lost, ("profiles",))
    shares = {suspect.kind: suspect.confidence for suspect in answer.suspects}
    assert not answer.confident
    assert shares["lost_nic"] == pytest.approx(shares["flapping_link"])
    assert any("profiles do not tell these apart" in text for text in answer.findings)
    answer = hidden(tmp_path / "flaps", SPLIT, {"cluster.changes": [FLAPS]}, ("profiles",))
    assert answer.suspects[0].kind == "flapping_link"
    assert not any("do not tell these apart" in text for text in answer.findings)


def test_what_all_ranks_wait_for_alike_does_not_show_in_profiles_and_counters_tell(tmp_path):
    job = ("ddp_gpt2_xl_2x8_a100", {})
    slow = {"cluster.changes": [{"match": "node1/nic3", "factor": 0.5}]}
    answer = hidden(tmp_path / "a", job, slow, ("profiles",))
    assert not answer.confident
    assert any("does not show in profiles alone: counters of the NICs" in text for text in answer.findings)
    answer = hidden(tmp_path / "b", job, slow)
    assert (answer.suspects[0].kind, answer.suspects[0].port) == ("slow_link", "node1/mlx5_3")


def test_a_job_over_gloo_is_asked_for_no_file_of_nccl():
    run = scenarios.load("ddp_resnet50_1x8_v100").run().timeline
    asked = {}
    for library in ("nccl", "gloo"):
        profiled = replace(run, source="measured", stats={**run.stats, f"{BACKEND}cpu:{library}": 1.0})
        asked[library] = judged([("kineto", profiled)]).decides
    assert "nccl" in asked["nccl"].lower()
    assert asked["gloo"]
    assert "nccl" not in asked["gloo"].lower()


def test_where_every_file_is_given_what_is_next_on_a_cpu_names_no_tool_of_gpus():
    """Of ranks without a GPU it said "nvidia-smi ... swap the GPU" where no further file would tell two apart."""
    slow = Suspect("slow_gpu", rank=1)
    late = Suspect("slow_host", host="a")
    jobs = (_job([], without, beside=False) for without in (True, False))
    on_cpu, on_gpu = ((_told(slow, 0.5, job), _told(late, 0.4, job)) for job in jobs)
    text = _decides(*on_cpu, list(SOURCES))
    assert text.startswith("slow_cpu of rank 1 or slow_host of machine a: ")
    assert "OMP_NUM_THREADS" in text
    assert "nvidia-smi" not in text
    assert "nvidia-smi" in _decides(*on_gpu, list(SOURCES))


def test_who_blames_a_slow_rank_is_sent_to_its_batches_too():
    """A rank with twice the samples was a slow CPU (95 %), and no word sent anybody to its batches: times alone do not
    tell them apart."""
    for table in (NEXT, NEXT_ON_CPU):
        assert "whether its batches are as large as others'" in table["slow_gpu"]
