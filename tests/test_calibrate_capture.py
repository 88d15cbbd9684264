"""capture -> calibrate -> validate on CPU ranks over Gloo: on committed captures, on made-up ones, and for real."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clustersim.calibrate.captured import noise, read_capture
from clustersim.calibrate.fit import fit
from clustersim.calibrate.fit.calibrated import halves, topology_text
from clustersim.calibrate.fit.device import device_times
from clustersim.calibrate.fit.host import HostRow, HostTimes, host_times
from clustersim.calibrate.fit.of_capture import calibrate_captures
from clustersim.calibrate.score import SkippedRow
from clustersim.calibrate.validate_capture import validate_capture
from clustersim.cluster import files as fabrics
from clustersim.core.costs import GLOO_COSTS, flat
from clustersim.core.device import device, of_cores, with_efficiencies
from clustersim.core.errors import TopologyError, TraceError
from clustersim.files.traces.samples import Sample

torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch (the capture extra)")
DATA = Path(__file__).parent / "data" / "gloo"
TWO = DATA / "2_ranks"
FOUR = DATA / "4_ranks"


def median(found: np.ndarray) -> float:
    return float(np.median(found))


# ---- committed captures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folders", "bound"), [((TWO,), 0.05), ((FOUR,), 0.15), ((TWO, FOUR), 0.09)], ids=["2 ranks", "4 ranks", "both"]
)
def test_half_of_the_sizes_predict_the_others(folders, bound):
    found = calibrate_captures(folders, "cpu-gloo")
    assert found.cores == 2
    assert len(found.held_out) > 80
    assert median(found.held_out) < bound
    # The captures themselves repeat no better than this.
    assert bound < found.noise


def test_gloo_measured_beside_gpus_says_nothing_of_the_cores_of_the_gpus_machine():
    found = calibrate_captures((TWO,), "hgx-h100")
    assert found.cores == 0
    assert "[node]" not in topology_text(found, "mine", "hgx-h100")
    assert [one.part for one in found.fits] == ["gloo"]


def test_the_cores_that_ranks_share_explain_four_ranks_with_two_ranks_constants():
    """Constants of two ranks on two cores, with one more for the turns, come nearer to four ranks than a machine with
    cores for all of them would."""
    four, two = (read_capture(folder).samples for folder in (FOUR, TWO))
    machine = fabrics.load("cpu-gloo")
    errors = {}
    for cores in (2, 8):
        on = replace(machine, node_types=tuple(replace(t, cores=cores) for t in machine.node_types))
        values = fit(host_times(two, on)).values
        times = host_times([s for s in four if s.ranks == 4], on)
        errors[cores] = median(np.abs(times.predict(values) / times.measured - 1))
    assert errors[2] < 0.35 < 0.5 < errors[8]


def test_a_calibrated_topology_predicts_its_capture(tmp_path, clustersim):
    before = tmp_path / "slow.toml"
    out = tmp_path / "my-cpu.toml"
    before.write_text(
        'name = "slow"\nextends = "cpu-gloo"\n[node]\ncores = 2\n[calibration.gloo]\nmessage = { value = "300 us" }\n'
    )
    done = clustersim("calibrate", TWO, "--topology", before, "-o", out)
    assert done.returncode == 0, done.stderr
    assert "every other size fitted and those between predicted" in done.stdout
    machine = fabrics.load(str(out))
    assert machine.node_types[0].cores == 2
    assert machine.calibration is not None
    assert machine.calibration.provenance.rows > 200
    errors = {}
    for path in (before, out):
        done = clustersim("validate", "capture", TWO, "--topology", path, "--json")
        assert done.returncode == 0, done.stderr
        errors[path] = json.loads(done.stdout)["by"]["part"]["collectives"]["median_abs_rel_error"]
    assert errors[out] < 0.05 < 0.5 < errors[before]


def test_steps_of_every_captured_strategy_are_played(tmp_path):
    out = tmp_path / "my-cpu.toml"
    out.write_text(topology_text(calibrate_captures([TWO], "cpu-gloo"), "my-cpu", "cpu-gloo"))
    result = validate_capture(TWO, str(out))
    steps = {row.cells["mode"]: row for row in result.rows if row.cells["part"] == "steps"}
    assert {"single", "ddp", "zero1", "fsdp2", "parameter_server"} <= set(steps)
    assert not any(isinstance(row, SkippedRow) for row in steps.values())
    # Whoever shares the machine only lengthens what was measured.
    assert all(0 < row.predicted < row.measured for row in steps.values())
    assert steps["ddp_accumulate_4"].predicted > 2 * steps["ddp"].predicted
    found = validate_capture(TWO, str(out), "single").rows
    anchored = {row.cells["mode"]: row for row in found if row.cells["part"] == "steps"}
    assert "anchor" in anchored["single"].skipped
    assert anchored["ddp"].predicted > steps["ddp"].predicted


# ---- made-up captures -----------------------------------------------------------------------------------------------


def test_repeats_that_differ_say_that_other_programs_ran(tmp_path):
    (note,) = validate_capture(TWO, str(TWO.with_suffix(".toml"))).notes
    assert note.startswith("steps: the slowest repeat of a step took 2.4 times as long")
    quiet = tmp_path / "quiet"
    shutil.copytree(TWO, quiet)
    head, *rows = [json.loads(line) for line in (quiet / "steps.jsonl").read_text().splitlines()]
    rows = [row | {"time_max": 1.1 * row["time_min"]} for row in rows if "time_min" in row]
    (quiet / "steps.jsonl").write_text("\n".join(map(json.dumps, [head, *rows])))
    assert validate_capture(quiet, str(TWO.with_suffix(".toml"))).notes == ()


def test_repeats_of_the_modes_that_have_enough_of_them_are_told_where_two_in_a_row_hide_them(tmp_path):
    """Of a short capture steps were 55 % off without a word: four of its five modes had two to four repeats, alike."""
    short = tmp_path / "short"
    shutil.copytree(TWO, short)
    head, *rows = [json.loads(line) for line in (short / "steps.jsonl").read_text().splitlines()]
    alone, *others = [row for row in rows if "time_min" in row]
    others = [row | {"time_max": 1.1 * row["time_min"], "steps": 2} for row in others]
    left_out = [{"mode": mode, "skipped": "the time budget is spent"} for mode in ("zero1", "fsdp2", "data_parallel")]
    (short / "steps.jsonl").write_text("\n".join(map(json.dumps, [head, alone, *others, *left_out])))
    busy, missing = validate_capture(short, str(TWO.with_suffix(".toml"))).notes
    assert "took 2.1 times as long as the fastest (of the one mode with 5 repeats or more)" in busy
    assert missing == "steps of zero1, fsdp2 were not captured: the time budget is spent"


def test_constants_that_made_the_times_are_found_again():
    machine = fabrics.load("cpu-gloo")
    machine = replace(machine, node_types=tuple(replace(t, cores=2) for t in machine.node_types))
    kinds = [name.split(".")[1] for name in flat(GLOO_COSTS) if name.startswith("call.")]
    samples = [
        Sample(kind, 8.0 * 4.0**k, 1.0, ranks=ranks, nodes=1, env="backend=gloo")
        for kind in kinds
        for ranks in (2, 4)
        for k in range(13)
    ]
    times = host_times(samples, machine)
    truth = {"call.broadcast": 90e-6, "message": 70e-6, "turn": 20e-6, "stream": 2.5e9, "cache": 20e6, "memory": 6e9}
    made = times.predict({**{k: v for k, v in flat(GLOO_COSTS).items() if k != "copy"}, **truth})
    rows = tuple(HostRow(row.sample, float(t), row.work) for row, t in zip(times.rows, made, strict=True))
    found = fit(HostTimes(rows))
    for name, value in truth.items():
        assert found.values[name] == pytest.approx(value, rel=0.05), name
    assert median(np.abs(found.after / found.measured - 1)) < 0.005


def test_halves_take_turns_through_the_sizes():
    machine = fabrics.load("cpu-gloo")
    samples = [Sample("broadcast", 8.0 * 2**k, 1.0, ranks=2, nodes=1, env="backend=gloo") for k in range(5)]
    times = host_times(samples, machine)
    assert halves(times.series, [row.nbytes for row in times.rows]) == ([0, 2, 4], [1, 3])


def test_of_rounds_the_fastest_counts_and_their_spread_is_the_noise():
    one = Sample("broadcast", 8.0, 1.0, ranks=2, nodes=1, env="backend=gloo")
    rounds = [replace(one, fastest=t) for t in (1e-4, 1.5e-4, 1.2e-4)]
    beside = replace(one, fastest=1e-5, at_once=2)
    times = host_times([*rounds, beside], fabrics.load("cpu-gloo"))
    assert times.measured.tolist() == [1e-4]
    assert noise([*rounds, beside]) == pytest.approx(0.2)


def test_efficiencies_that_made_the_rows_are_found_again():
    core = device("x86-core")
    truth = {"matmul.fp32": 0.4, "matmul.bf16": 0.6, "stream": 0.9, "kernel_floor": 2e-6, "launch": 7e-6}
    rows = [
        {"op": "gemm", "dtype": d, "m": s, "n": s, "k": s, "time_min": 1.0}
        for d in ("fp32", "bf16")
        for s in (64, 128, 256, 512, 1024)
    ]
    rows += [
        {"op": op, "dtype": "fp32", "elements": 2**k, "time_min": 1.0}
        for op in ("add", "copy")
        for k in (10, 14, 18, 20)
    ]
    rows += [
        {"op": "optimizer_adamw", "dtype": "fp32", "parameters": 10**5, "time_min": 1.0},
        {"op": "launch", "dtype": "fp32", "time_min": 1.0},
        {"op": "gelu", "dtype": "fp32", "time_min": 1.0},
    ]
    times = device_times(rows, core, 1.0)
    assert len(times.rows) == len(rows) - 1
    made = times.predict(truth)
    again = device_times([{**row, "time_min": t * 1e6} for row, t in zip(times.rows, made, strict=True)], core, 1.0)
    found = fit(again).values
    for name, value in truth.items():
        assert found[name] == pytest.approx(value, rel=0.05), name
    rate = of_cores(with_efficiencies(core, found), 2.0).matmul_rate("fp32")
    assert rate == pytest.approx(2 * 0.4 * core.peak["fp32"], rel=0.05)


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_what_is_no_capture_is_one_clear_error(tmp_path, clustersim):
    with pytest.raises(TraceError, match=r"no capture: it has no provenance\.json"):
        calibrate_captures([tmp_path], "cpu-gloo")
    shutil.copy(TWO / "provenance.json", tmp_path)
    with pytest.raises(TraceError, match="nothing was measured"):
        read_capture(tmp_path)
    with pytest.raises(TopologyError, match=r"\$\.node\.cores is 8; the machine of .* has 2"):
        validate_capture(TWO, "cpu-gloo")
    done = clustersim("calibrate", TWO, "--topology", "cpu-gloo", "-o", tmp_path / "x.json")
    assert (done.returncode, "ends with .toml" in done.stderr) == (2, True)
    done = clustersim("calibrate", TWO, "--topology", "cpu-glo", "-o", tmp_path / "x.toml")
    assert (done.returncode, "cpu-gloo" in done.stderr) == (2, True)
    assert not (tmp_path / "x.toml").exists()


def test_an_interrupted_capture_is_fitted_as_far_as_it_came(tmp_path):
    shutil.copytree(TWO, tmp_path / "c")
    part = tmp_path / "c" / "collectives.jsonl"
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    part.rename(f"{part}.partial")
    (tmp_path / "c" / "compute.jsonl").unlink()
    found = calibrate_captures([tmp_path / "c"], "cpu-gloo")
    assert [one.part for one in found.fits] == ["gloo"]
    assert median(found.held_out) < found.noise + 0.05


# ---- for real -------------------------------------------------------------------------------------------------------


@torch
def test_three_commands_from_a_machine_to_its_calibrated_topology(tmp_path, clustersim, captured_by):
    """As the README says, on this machine and now; other work on it is in the noise that the capture measures."""
    run = captured_by(2).folder
    out = tmp_path / "my-cpu.toml"
    done = clustersim("calibrate", run, "--topology", "cpu-gloo", "-o", out, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    captured = (run / "collectives.jsonl").read_text().count('"kind": "all_reduce"')
    assert said["errors"]["gloo"]["rows"] >= captured > 5
    assert said["held_out"] < 0.15 + said["noise"]
    assert said["errors"]["gloo"]["after"] <= said["errors"]["gloo"]["before"] + 0.02
    done = clustersim("validate", "capture", run, "--topology", out, "--json")
    assert done.returncode == 0, done.stderr
    collectives = json.loads(done.stdout)["by"]["part"]["collectives"]
    assert collectives["median_abs_rel_error"] < 0.15 + said["noise"]
