"""Faults planted into logs with noise: calibrate names them, or says between which its rows do not tell."""

from __future__ import annotations

import json

import numpy as np
import pytest

from clustersim.app.cli import main
from clustersim.calibrate.fit.of_logs import LogPlays
from clustersim.calibrate.fit.structures import Structure, explained
from clustersim.calibrate.fit.undecided import undecided
from clustersim.cluster import files as fabrics
from clustersim.cluster.files import Change
from clustersim.collectives.base import Group, Request
from clustersim.collectives.costs import costs_of
from clustersim.collectives.nccl_backend import choice, seconds
from clustersim.collectives.started import usual_launch, usual_version
from clustersim.files.traces.samples import Sample, Samples

SIZES = [2.0**power for power in range(12, 33)]
NOISE = 0.02
AS_DESCRIBED = Structure("")
RINGS = Structure("", algorithms="Ring")
NO_TREES = Structure("", algorithms="^Tree")
SIMPLE = Structure("", protocols="Simple")
SIMPLE_RINGS = Structure("", algorithms="Ring", protocols="Simple")
NO_NVLS = Structure("", {"nvls": False})
STAGED = Structure("", {"net": "ib_host"})
SLOW_NIC = Structure("", changes=(Change("node1/nic2", factor=0.5),))
HALF = Structure("", changes=tuple(Change(f"node*/nic{i}", remove=True) for i in (1, 3, 5, 7)))


def planted(name: str, nodes: int, structure: Structure) -> LogPlays:
    """A log of a machine with a structure, its times 2 % apart from those predicted."""
    machine = structure.of(fabrics.load(name, nodes=nodes))
    gpus = fabrics.mesh(machine).gpus
    # As a log that does not say how it was started, nor with which NCCL, is taken.
    group = Group(machine, gpus, usual_launch(machine, nodes), usual_version(machine))
    costs = costs_of(group)
    algorithm = structure.algorithms or None
    protocol = structure.protocols or None
    noise = np.exp(NOISE * np.random.default_rng(7).standard_normal(len(SIZES))).tolist()
    rows = []
    for size, factor in zip(SIZES, noise, strict=True):
        request = Request("all_reduce", size, algorithm=algorithm, protocol=protocol)
        taken = factor * seconds(choice(request, group), costs)
        rows.append(Sample("all_reduce", size, taken, ranks=group.size, nodes=nodes, launch=group.launch))
    return LogPlays(Samples(tuple(rows), ""), name)


def answer(log_plays: LogPlays) -> tuple[list[str], list[str]]:
    """What is said to explain a log, the first first; and what is said of what it does not tell."""
    described, _ = log_plays.described()
    reason = explained(described, log_plays.played)
    if reason is not None:
        return [reason.structure.words, *reason.alike], []
    return [], list(undecided(described, log_plays.played))


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("name", ["hgx-a100", "hgx-h100"])
@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (RINGS, "rings alone"),
        (STAGED, "no GPUDirect"),
        (SLOW_NIC, "the slowest NIC at 0.5"),
        (HALF, "4 of 8 NICs"),
    ],
)
def test_a_planted_fault_is_named(name, nodes, structure, words):
    explanations, _ = answer(planted(name, nodes, structure))
    assert any(words in text for text in explanations)


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("name", ["hgx-a100", "hgx-h100", "pcie-a100"])
@pytest.mark.parametrize(
    ("structure", "words"), [(SIMPLE, "Simple alone (NCCL_PROTO=Simple)"), (SIMPLE_RINGS, "rings of Simple alone")]
)
def test_a_protocol_that_a_script_pins_is_named(name, nodes, structure, words):
    """NCCL_PROTO=Simple in a script, which no log prints: constants bent to it, or rings alone were blamed."""
    explanations, sentences = answer(planted(name, nodes, structure))
    assert any(words in text for text in (*explanations, *sentences))


@pytest.mark.parametrize(("name", "nodes"), [("hgx-h100", 2), ("hgx-h100", 4), ("hgx-a100", 4)])
def test_staged_nics_are_no_other_fault(name, nodes):
    """Its law was so wrong that a log without GPUDirect was taken for one with a slow NIC, or the other way round."""
    explanations, _ = answer(planted(name, nodes, STAGED))
    assert "no GPUDirect" in explanations[0]
    for other in (SLOW_NIC, HALF, RINGS):
        assert not any("GPUDirect" in text for text in answer(planted(name, nodes, other))[0])


def test_a_rate_found_in_large_messages_alone_stands_beside_two_parts_that_explain_them_as_well(monkeypatch):
    """Of rings over half the NICs, a published 195 GB/s on two nodes of H100s from 512 MiB on, one NIC at 0.28 of its
    rate was all that was said."""
    monkeypatch.setattr("test_planted_structures.SIZES", [2.0**power for power in range(29, 34)])
    both = Structure("", changes=HALF.changes, algorithms="Ring")
    found, _ = answer(planted("hgx-h100", 2, both))
    assert "the slowest NIC at" in found[0]
    assert any(words.startswith("rings alone (NCCL_ALGO=Ring) and ") for words in found[1:]), found


def test_nvls_off_is_named_where_it_shows_and_left_open_where_it_does_not():
    """Over four nodes rings carry large messages with NVLS and without: calibrate said nothing of it."""
    explanations, _ = answer(planted("hgx-h100", 2, NO_NVLS))
    assert "NVLS off" in explanations[0]
    explanations, (sentence,) = answer(planted("hgx-h100", 4, NO_NVLS))
    assert not explanations
    assert sentence.startswith("as its file says, or NVLS off")
    assert sentence.endswith("these rows do not tell which")


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_trees_off_are_told_apart_from_a_slow_host_only_over_many_nodes(nodes):
    """NVLS carries all but small messages: nothing was said of small ones that take 2.8 times as long."""
    explanations, sentences = answer(planted("hgx-h100", nodes, NO_TREES))
    if nodes == 8:
        assert explanations[0] == "trees off (NCCL_ALGO=^Tree)"
    else:
        assert not explanations
        assert "a slow host, or trees off (NCCL_ALGO=^Tree)" in sentences[0]


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("name", ["hgx-a100", "hgx-h100", "pcie-a100", "hgx-mi300x"])
def test_a_sound_machine_is_asked_nothing(name, nodes):
    assert answer(planted(name, nodes, AS_DESCRIBED)) == ([], [])


def test_what_is_left_open_is_printed(tmp_path, capsys):
    lines = ["case_id,nodes,ranks,collective,dtype,size_bytes,time_us"]
    for row in planted("hgx-h100", 4, NO_NVLS).samples.rows:
        lines.append(f"one,4,32,all_reduce,float,{int(row.nbytes)},{row.seconds * 1e6:.3f}")
    table = tmp_path / "all_reduce.csv"
    table.write_text("\n".join(lines) + "\n")
    out = tmp_path / "mine.toml"
    for command in (["calibrate", str(table), "--topology", "hgx-h100", "-o", str(out)], ["trace", str(table)]):
        options = ["--json"] if command[0] == "calibrate" else ["--topology", "hgx-h100", "--json"]
        with pytest.raises(SystemExit) as done:
            main([*command, *options])
        assert not done.value.code
        doubts = json.loads(capsys.readouterr().out)["doubts"]
        assert any("NVLS off" in sentence for sentence in doubts)
