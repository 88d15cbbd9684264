"""Open MPI: its decision rules, its algorithms' closed forms, forced algorithms, transports, staged and direct GPUs."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustersim.calibrate.capture import mpi as capturing
from clustersim.calibrate.captured import asked, fastest, least, read_capture
from clustersim.calibrate.fit.of_capture import calibrate_captures
from clustersim.cluster import files as fabrics
from clustersim.collectives import plan
from clustersim.collectives.algorithm_contract import check_data
from clustersim.collectives.base import Group, Plan, Request
from clustersim.collectives.host_law import BOX
from clustersim.collectives.mpi import asked_of, parts_of
from clustersim.collectives.mpi_rules import chosen, forced, kinds
from clustersim.collectives.registry import ALGORITHMS
from clustersim.core.costs import MPI_COSTS as COSTS
from clustersim.core.errors import ProgramError
from clustersim.core.topology import CPU
from clustersim.scenario import from_table

KINDS = sorted(COSTS.call)
MEASURED = Path(__file__).parent / "data" / "mpi"


def on_one_cpu(n: int, cores: int = 0) -> Group:
    machine = fabrics.load("dgx-1v", nodes=1)
    if cores:
        machine = replace(machine, node_types=(replace(machine.node_types[0], cores=cores),))
    return Group(machine, np.full(n, machine.vertex_kinds.index(CPU), dtype=np.int64))


def gpus(nodes: int, each: int) -> Group:
    machine = fabrics.load("hgx-h100", nodes=nodes)
    return Group(machine, fabrics.mesh(machine, nodes, each).gpus)


def planned(kind: str, size: float, group: Group, backend: str = "mpi", **pins: str) -> Plan:
    return plan(Request(kind, 0.0 if kind == "barrier" else size, **pins), group, backend)


def seconds(kind: str, size: float, group: Group, **pins: str) -> float:
    return planned(kind, size, group, **pins).time(group.topology.link_bandwidth)


# ---- what Open MPI chooses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "n", "nbytes", "name"),
    [  # as coll_tuned_decision_fixed.c of v4.1.4 says
        ("all_reduce", 3, 4, "ring"),
        ("all_reduce", 3, 65536, "segmented_ring"),
        ("all_reduce", 8, 8191, "recursive_doubling"),
        ("all_reduce", 8, 8192, "rabenseifner"),
        ("all_reduce", 200, 4096, "nonoverlapping"),
        ("all_gather", 2, 1e9, "two_proc"),
        ("all_gather", 40, 40 * 1024, "neighbor"),  # a process's part counts
        ("all_to_all", 64, 64 * 100, "modified_bruck"),
        ("broadcast", 20, 2**20, "scatter_allgather"),
        ("broadcast", 10, 2**20, "basic_linear"),
        ("reduce", 2, 2**20, "pipeline"),
        ("reduce_scatter", 4, 4 * 100, "butterfly"),
        ("gather", 300, 300 * 4096, "basic_linear"),
        ("scatter", 2, 2 * 2**18, "basic_linear"),
        ("barrier", 7, 0, "linear"),
        ("barrier", 8, 0, "recursive_doubling"),
        ("barrier", 300, 0, "tree"),
    ],
)
def test_the_fixed_rules_are_open_mpis(kind, n, nbytes, name):
    assert chosen(kind, n, float(nbytes)) == name


@pytest.mark.parametrize("kind", sorted(kinds()))
def test_every_rule_names_an_algorithm_and_grows_in_processes_and_bytes(kind):
    *sizes, last = kinds()[kind].below
    assert last == "more"
    assert [int(size) for size in sizes] == sorted(int(size) for size in sizes)
    for row in kinds()[kind].below.values():
        words = row.split()
        bounds = [int(word[1:]) for word in words[1::2]]
        assert bounds == sorted(bounds)
        assert len(words) % 2, "the last algorithm has no bound"
        assert {int(number) for number in words[::2]} <= set(range(1, len(kinds()[kind].names) + 1))


def test_too_few_elements_for_a_ring_or_halves_take_another_way():
    assert parts_of(Request("all_reduce", 8.0, algorithm="ring"), 4)[0].name == "recursive_doubling"
    assert [part.kind for part in parts_of(Request("all_reduce", 8.0, algorithm="rabenseifner"), 4)] == [
        "reduce",
        "broadcast",
    ]
    assert parts_of(Request("broadcast", 8.0, algorithm="scatter_allgather"), 4)[0].name == "basic_linear"


@pytest.mark.parametrize("kind", sorted(kinds()))
@pytest.mark.parametrize("n", [2, 4, 5])
def test_a_forced_algorithm_is_taken_by_name_by_number_and_by_its_mca_variable(kind, n):
    for number, name in enumerate(kinds()[kind].names, 1):
        if name == "two_proc" and n != 2:
            continue
        for pin in (name, str(number), f"coll_tuned_{kinds()[kind].variable}_algorithm={number}"):
            assert forced(kind, n, pin) == name
        found = planned(kind, 2.0**20, on_one_cpu(n), algorithm=name)
        assert found.time(np.ones(0)) > 0


def test_settings_of_other_kinds_and_zero_force_nothing():
    for pin in ("coll_tuned_bcast_algorithm=1", "coll_tuned_allreduce_algorithm=0", "0", "ignore"):
        assert forced("all_reduce", 4, pin) is None
        assert seconds("all_reduce", 64.0, on_one_cpu(4), algorithm=pin) == seconds("all_reduce", 64.0, on_one_cpu(4))


@pytest.mark.parametrize(
    ("kind", "pins", "message"),
    [
        ("all_reduce", {"algorithm": "tree"}, "by no algorithm 'tree'; it has 1 basic_linear, 2 nonoverlapping"),
        ("all_reduce", {"algorithm": "7"}, "by no algorithm '7'"),
        ("all_gather", {"algorithm": "two_proc"}, "is for 2 processes, not 4"),
        ("sendrecv", {"algorithm": "ring"}, "it has one way, which has no name"),
        ("broadcast", {"algorithm": "coll_tuned_broadcast_algorithm=1"}, "did you mean 'coll_tuned_bcast_algorithm'"),
        ("broadcast", {"protocol": "LL"}, "no transport 'LL'"),
    ],
)
def test_a_pin_that_open_mpi_does_not_have_says_what_it_has(kind, pins, message):
    with pytest.raises(ProgramError, match=message):
        planned(kind, 64.0, on_one_cpu(4), **pins)


# ---- closed forms ---------------------------------------------------------------------------------------------------


def test_a_message_between_two_processes_takes_a_call_and_its_ways_latency_and_copies():
    group = on_one_cpu(2)
    call = COSTS.call["sendrecv"]
    for size, protocol, path in (
        (1024.0, "vader", "vader/eager"),
        (2.0**16, "vader", "vader/single"),
        (2.0**16, "vader/none", "vader/fragments"),
        (2.0**16, "tcp", "tcp/eager"),
        (2.0**17, "tcp", "tcp/rendezvous"),
    ):
        expected = call + COSTS.message[path] + 2 * size / COSTS.stream[path]
        assert seconds("sendrecv", size, group, protocol=protocol) == pytest.approx(expected), path


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_recursive_doubling_takes_log2_n_rounds_of_whole_messages_which_it_adds(n):
    group = on_one_cpu(n)
    size = 1024.0
    rounds = math.log2(n)
    each = COSTS.message["vader/eager"] + 2 * size / COSTS.stream["vader/eager"] + size / COSTS.reduce
    expected = COSTS.call["all_reduce"] + rounds * each + size / COSTS.reduce  # and one copy to begin with
    assert seconds("all_reduce", size, group, algorithm="recursive_doubling") == pytest.approx(expected)


@pytest.mark.parametrize(("n", "sent"), [(4, 240.0), (5, 540.0)])
def test_small_blocks_are_scattered_by_recursive_doubling_as_open_mpi_counts_them(n, sent):
    """540 bytes of 5 ranks are what Open MPI's own monitoring of messages counts: 192 and 144 in two rounds of four,
    12 and 48 to and from the fifth, and its 48 handed on to the three that have no partner."""
    (part,) = parts_of(Request("reduce_scatter", 12.0 * n, algorithm="recursive_doubling"), n)
    assert chosen("reduce_scatter", 5, 60.0) == part.name == "recursive_doubling"
    each, _ = ALGORITHMS[part.name].sends("reduce_scatter", n, 1)
    assert each * n * 12 * n == pytest.approx(sent)


@pytest.mark.parametrize("n", [6, 7, 11, 13])
def test_who_has_no_partner_is_handed_what_his_neighbours_received(n):
    machine = fabrics.load("hgx-h100", nodes=2)
    check_data(ALGORITHMS["recursive_doubling"], "reduce_scatter", Group(machine, machine.gpus[:n]))


def test_ranks_that_share_a_core_take_turns():
    alone = on_one_cpu(4)
    shared = on_one_cpu(4, cores=2)
    for kind in KINDS:
        assert seconds(kind, 64.0, shared) > seconds(kind, 64.0, alone)
    boxes = 2 * 2 * 64 / BOX  # the bytes of both ranks of a core pass boxes that are emptied in turns
    doubled = 2 * seconds("sendrecv", 64.0, alone) + (2 + boxes) * COSTS.turn["vader"]
    assert seconds("sendrecv", 64.0, shared) == pytest.approx(doubled)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(KINDS), st.integers(2, 24), st.floats(8, 1e9), st.integers(0, 23))
def test_everything_open_mpi_chooses_can_be_priced_and_longer_is_slower(kind, n, size, root):
    group = on_one_cpu(n)
    request = Request(kind, size, root=root % n)
    parts = parts_of(request, n)
    assert all(part.kind in kinds() or part.kind.startswith("send") for part in parts)
    asked = asked_of(request, group)
    assert all(np.isfinite([leg.link, leg.moved, leg.messages, leg.posts]).all() for leg in asked.work.legs)
    pins = {"algorithm": parts[0].name} if len(parts) == 1 and kind in kinds() else {}
    if kind != "barrier" and pins and parts[0].name != "two_proc":
        longer = replace(request, nbytes=4 * size, **pins)
        assert plan(longer, group, "mpi").time(np.ones(0)) > plan(request, group, "mpi").time(np.ones(0)) * (1 - 1e-9)


@pytest.mark.parametrize("backend", ["mpi", "mpi_cuda"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_plan_beats_the_lower_bound(kind, backend):
    for group in (gpus(1, 8), gpus(2, 8), gpus(3, 5)):
        for size in (8.0, 2.0**16, 2.0**26):
            found = planned(kind, size, group, backend)
            assert found.time(group.topology.link_bandwidth) >= found.lower_bound * (1 - 1e-9)


# ---- GPUs -----------------------------------------------------------------------------------------------------------


def test_cuda_support_sends_from_gpu_to_gpu_but_adds_on_the_host():
    group = gpus(1, 8)
    for kind, direct in (("all_gather", True), ("all_to_all", True), ("all_reduce", False), ("reduce_scatter", False)):
        staged = planned(kind, 2.0**26, group)
        aware = planned(kind, 2.0**26, group, "mpi_cuda")
        bandwidth = group.topology.link_bandwidth
        assert (aware.time(bandwidth) < 0.5 * staged.time(bandwidth)) == direct
        kinds = {group.topology.link_kinds[link] for link in aware.links.tolist()}
        assert (kinds == {"nvlink"}) == direct


def table(**run: object) -> dict[str, object]:
    return {
        "cluster": {"topology": "hgx-h100", "nodes": 2},
        "model": {"name": "gpt2", "seq_len": 64, "options": {"layers": 2}},
        "strategy": {"kind": "ddp", "micro_batch_size": 1},
        "run": {"steps": 1, "jitter": 0.0, **run},
    }


def test_a_scenario_names_the_backend_and_its_cuda_support():
    staged = from_table(table(backend="mpi")).run()
    aware = from_table(table(backend="mpi", opal_cuda_support=True)).run()
    assert (staged.prepared.backend, aware.prepared.backend) == ("mpi", "mpi_cuda")
    assert staged.summary["step_time_s"] >= aware.summary["step_time_s"]
    with pytest.raises(Exception, match="opal_cuda_support is Open MPI's"):
        from_table(table(opal_cuda_support=True))


def test_chunk_fidelity_replays_what_a_row_of_the_registry_does():
    found = planned("all_gather", 2.0**20, gpus(1, 8), "mpi_cuda")
    assert ALGORITHMS[found.algorithm].schedule is not None


# ---- measured -------------------------------------------------------------------------------------------------------


def test_half_of_the_measured_sizes_predict_the_others():
    found = calibrate_captures([MEASURED], "cpu-gloo")
    assert [one.part for one in found.fits] == ["mpi"]
    assert len(found.held_out) > 1500
    assert float(np.median(found.held_out)) < 0.26
    assert found.noise > 0.1, "repeats of a row differ by that"


def test_the_rules_choose_what_was_measured_to_take_the_defaults_time():
    """Forced by name, the algorithm that the rules name takes nearer to what the default took than the others do."""
    times = {
        (case[1], case[3], one.nbytes, asked(one).protocol, asked(one).algorithm): least(one)
        for case, one in fastest(read_capture(MEASURED).samples).items()
    }
    named = []
    others = []
    for (kind, n, nbytes, way, pin), seconds_ in times.items():
        if pin is None and kind in kinds():
            for number, name in enumerate(kinds()[kind].names, 1):
                if (kind, n, nbytes, way, str(number)) in times:
                    apart = abs(math.log(seconds_ / times[kind, n, nbytes, way, str(number)]))
                    (named if name == chosen(kind, n, nbytes) else others).append(apart)
    assert len(named) > 150
    assert float(np.median(named)) < 0.7 * float(np.median(others))


def test_settings_of_mpirun_are_read_from_the_environment():
    assert capturing.forced({"OMPI_MCA_coll_tuned_bcast_algorithm": "6"}) == {}, "dynamic rules are off"
    none = {"OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
    assert [capturing.transport(one) for one in ({"OMPI_MCA_btl": "tcp,self"}, none, {})] == [
        "tcp",
        "vader/none",
        "vader",
    ]


@pytest.mark.skipif(
    find_spec("mpi4py") is None or shutil.which("mpirun") is None, reason="needs Open MPI and mpi4py to measure with"
)
def test_two_real_ranks_are_captured_with_their_settings(tmp_path):
    words = [
        "--mca",
        "btl",
        "tcp,self",
        "--mca",
        "coll_tuned_use_dynamic_rules",
        "1",
        "--mca",
        "coll_tuned_bcast_algorithm",
        "6",
    ]
    run = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *words, sys.executable, "-m"]
    asks = [
        "--backend",
        "mpi",
        "--device",
        "cpu",
        "--parts",
        "collectives",
        "--budget",
        "3s",
        "--largest",
        "64",
        "--quiet",
        "--out",
    ]
    subprocess.run([*run, "clustersim.calibrate.capture", *asks, tmp_path / "c"], check=True, timeout=120)
    rows = [json.loads(line) for line in (tmp_path / "c" / "collectives.jsonl").read_text().splitlines()[1:]]
    measured = [row for row in rows if "time" in row]
    assert {(row["kind"], row["transport"], row["algorithm"]) for row in measured} == {("broadcast", "tcp", "6")}
    assert not any(row["#wrong"] for row in measured)


@pytest.mark.skipif(find_spec("mpi4py") is not None, reason="mpi4py is here")
def test_without_mpi4py_the_command_says_what_it_needs(tmp_path):
    words = ["capture", "--backend", "mpi", "--device", "cpu", "--parts", "collectives", "--out", str(tmp_path / "c")]
    done = subprocess.run([sys.executable, "-m", "clustersim", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install mpi4py" in done.stderr
