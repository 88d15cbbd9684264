"""The measured tables that ship with the repository: whole, with their sources, and read packed as they are."""

from __future__ import annotations

import csv
import gzip
import re
from pathlib import Path

import pytest
from conftest import ROOT

from clustersim.calibrate.score import read_table
from clustersim.calibrate.validate_nccl import launch_of
from clustersim.collectives.nccl.settings import environment_of, settings_of
from clustersim.core.errors import TraceError

TABLES = sorted((Path(__file__).parent / "data" / "measurements").glob("*.csv.gz"))


OF_KERNELS = "nccl_one_node.csv.gz"
"""Taken from a database of kernels, whose rows have other columns; its source is in tests/README.md."""

SPLIT = "training_steps_hybrid.csv"
OF_THIN_STEPS = "thin_steps.csv.gz"
"""Further rows of the table of split models, which ranges alone are made of."""


@pytest.mark.parametrize("path", [path for path in TABLES if path.name != OF_KERNELS], ids=lambda path: path.name)
def test_every_row_names_its_source(path):
    rows = read_table(path, ["source"])
    assert len(rows) > 200
    assert all(row["source"].strip() for row in rows)


SIMPLE_RINGS = {"env": "NCCL_PROTO=Simple NCCL_ALGO=Ring"}
TOLD_BY_SCRIPTS: list[tuple[str, str, dict[str, str]]] = [
    ("github.com/Panlichen/nccl-tests", "", SIMPLE_RINGS),
    ("github.com/odissei-benchmarks/nccl-tests", "runs/1node/", {"notes": "-g 4 one process"}),
    ("github.com/abhivijay96/nccl-tests", "/alltoall_2", {"notes": "2 threads 1 process"}),
    ("github.com/abhivijay96/nccl-tests", "/alltoall_4", {"notes": "4 threads 1 process"}),
    ("github.com/abhivijay96/nccl-tests", "/sendrecv_2", {"notes": "-g 2 one process"}),
    ("github.com/abhivijay96/nccl-tests", "/sendrecv_4", {"notes": "-g 4 one process"}),
    ("github.com/abhivijay96/nccl-tests", "", {"nccl_version": "2.7.3"}),
    ("github.com/wohlbier/nccl-tests", "", {"notes": "-g 12 one process"}),
    ("github.com/monsieurconan/NCCL_Simgrid_simulator", "", {"notes": "-g 2 one process"}),
]
"""Repository, part of the source's path -> what the table was packed with besides, by column, and why it may.

The logs were made by scripts of their repositories, which say how: test_scripts/{v100_test_para_8card, h800_test,
a100_test, 4090_test_para_8card}.py set NCCL_PROTO and NCCL_ALGO, slurm_scripts/snellius-h100-n1.job has ``-g 4``; the
others' logs begin with ``nThread`` and ``nGpus``, and one of a folder's says which NCCL
(exps/cw/alltoall_3_cuda_version.txt).
"""


def as_told_by_scripts(row: dict[str, str]) -> dict[str, str]:
    """A row with what its source's own scripts say of how it was measured."""
    told = [add for of, part, add in TOLD_BY_SCRIPTS if of in row["source"] and part in row["source"]]
    return {**row, **{name: "; ".join(filter(None, (row[name], add[name]))) for add in told for name in add}}


def test_rows_are_played_as_their_scripts_started_them():
    (path,) = (path for path in TABLES if path.name == "nccl_tests.csv.gz")
    rows = read_table(path, ["source", "env", "notes", "nccl_version"])
    for of, part, add in TOLD_BY_SCRIPTS:
        own = [row for row in rows if of in row["source"] and part in row["source"]]
        assert own
        assert all(row[name].endswith(words) for row in own for name, words in add.items())
    ways = {row["source"].split("/")[3]: row for row in rows if row["nodes"] == "1" and "://" in row["source"]}
    rings = ways["Panlichen"]
    assert launch_of(rings) == "threads"
    settings = settings_of(environment_of(rings["env"]))
    assert (settings.algorithm, settings.protocol) == ("Ring", "Simple")
    assert {launch_of(ways[who]) for who in ("odissei-benchmarks", "wohlbier", "monsieurconan")} == {"single_process"}


@pytest.mark.parametrize("path", [path for path in TABLES if path.name != OF_KERNELS], ids=lambda path: path.name)
def test_a_packed_table_holds_rows_of_the_one_it_was_made_from(path, shared):
    name = SPLIT if path.name == OF_THIN_STEPS else path.name.removesuffix(".gz")
    with (shared / "measurements" / name).open(newline="", encoding="utf-8-sig") as lines:
        original = list(csv.DictReader(lines))
    rows = read_table(path, [])
    known = {tuple(as_told_by_scripts(row).items()) for row in original}
    # The larger table of split models has grown since the pages were printed; no row of the packed ones may differ.
    assert [row for row in rows if tuple(row.items()) not in known] == []
    assert len(rows) == len(original) or name == SPLIT


def test_steps_that_hosts_pace_are_no_rows_of_the_table_of_split_models():
    thin, split = (
        {row["case_id"] for row in read_table(path, ["case_id"])}
        for path in TABLES
        if path.name in {OF_THIN_STEPS, f"{SPLIT}.gz"}
    )
    assert not thin & split


def test_rows_of_one_node_are_those_of_the_database_of_kernels_in_its_order(shared):
    (path,) = (path for path in TABLES if path.name == OF_KERNELS)
    packed = gzip.decompress(path.read_bytes()).decode().splitlines()
    original = gzip.decompress((shared / "measurements" / "kernels" / "comm.csv.gz").read_bytes()).decode().splitlines()
    chosen = set(packed)
    assert len(chosen) == len(packed)
    assert [line for line in original if line in chosen] == packed


@pytest.mark.parametrize("damage", [lambda packed: packed[:-20], lambda packed: b"no gzip", lambda packed: b""])
def test_a_damaged_table_is_one_line(tmp_path, damage):
    file = tmp_path / "t.csv.gz"
    file.write_bytes(damage(gzip.compress(b"case_id,source\n" + b"a,b\n" * 1000)))
    with pytest.raises(TraceError, match=r"t\.csv\.gz"):
        read_table(file, ["case_id"])


def test_a_table_that_unpacks_to_more_than_any_table_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("clustersim.calibrate.score.MOST_BYTES", 100)
    file = tmp_path / "t.csv.gz"
    file.write_bytes(gzip.compress(b"case_id\n" + b"x\n" * 1000))
    with pytest.raises(TraceError, match="holds more than"):
        read_table(file, ["case_id"])


def test_the_readme_says_of_which_generations_there_are_published_steps():
    """Where rows of Blackwell's steps are shipped, the sentence at the README's head has to change."""
    said = " ".join((ROOT / "README.md").read_text().split("\n\n")[2].split())
    assert "collectives from Pascal to Blackwell, steps from Kepler to Hopper" in said
    gpus = {
        name: {row["gpu"] for row in read_table(ROOT / "tests" / "data" / "measurements" / name, ["gpu"])}
        for name in ("nccl_tests.csv.gz", "training_steps.csv.gz", "training_steps_hybrid.csv.gz")
    }
    blackwell = {name: {gpu for gpu in found if re.match(r"G?B[23]00", gpu)} for name, found in gpus.items()}
    assert blackwell.pop("nccl_tests.csv.gz")
    assert not any(blackwell.values())
