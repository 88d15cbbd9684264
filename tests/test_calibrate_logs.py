"""A user's own log becomes a topology file that predicts the log; what cannot be fitted is refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from clustersim.app.cli import main
from clustersim.app.cli.calibrate import CalibrationReport, _lines
from clustersim.calibrate.fit.of_logs import LogPlays, fit_log, nccl_times
from clustersim.calibrate.fit.solve import fit, worse_classes
from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group, Request
from clustersim.collectives.costs import costs_of
from clustersim.collectives.nccl_backend import choice, seconds
from clustersim.core.costs import overlaid
from clustersim.core.ranges import of_collective
from clustersim.files import traces
from clustersim.files.traces.samples import Samples
from tests.evidence.calibrations import logs

PLANTED = {"host_floor.intel": 48e-6, "share.nvlink/Simple": 0.72}


def log(folder: Path, planted: dict[str, float], powers: range = range(3, 33)) -> Path:
    """A log as nccl-tests prints it, of a machine with other constants than the model's."""
    machine = fabrics.load("dgx-a100")
    group = Group(machine, machine.gpus)
    costs = overlaid(costs_of(group), planted)
    rng = np.random.default_rng(0)
    lines = [
        "$ mpirun -np 8 all_gather_perf -b 8 -e 4G -f 2 -g 1",
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 4294967296 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1",
        *(f"#  Rank  {i} Group  0 Pid   100{i} on    host0 device  {i} [0x07] NVIDIA A100-SXM4-40GB" for i in range(8)),
        "#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong",
        "#   (B)  (elements)               (us) (GB/s) (GB/s)         (us) (GB/s) (GB/s)",
    ]
    for size in (2**power for power in powers):
        time = seconds(choice(Request("all_gather", float(size)), group), costs) * np.exp(0.01 * rng.standard_normal())
        rate = size / time / 1e9
        cells = f"{time * 1e6:.2f} {rate:.2f} {rate * 7 / 8:.2f} 0"
        lines.append(f"{size} {max(1, size // 32)} float none -1 {cells} {cells}")
    path = folder / "all_gather.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as done:
        main([str(a) for a in arguments])
    return int(done.value.code or 0)


def test_a_log_becomes_a_topology_that_predicts_it(tmp_path, capsys):
    data = log(tmp_path, PLANTED)
    out = tmp_path / "mine.toml"
    assert run("calibrate", data, "--topology", "dgx-a100", "-o", out, "--plots", tmp_path / "pictures", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    fitted = {c["name"]: c for c in said["constants"]}
    # dgx-a100's hosts are AMD's: the planted floor is another CPU's, so nothing of it may be found.
    assert "host_floor.intel" not in fitted
    assert fitted["share.nvlink/Simple"]["value"] == pytest.approx(0.72, rel=0.04)
    assert said["errors"]["nccl"]["after"] < 0.02
    assert said["held_out"] < 0.03
    assert (tmp_path / "pictures" / "nccl.png").stat().st_size > 10_000
    loaded = fabrics.load(str(out))
    assert loaded.calibration is not None
    assert loaded.calibration.provenance.data == (str(data),)
    assert loaded.calibration.provenance.rows == 30
    assert run("collective", "all_gather", "--topology", out, "--size", "4G", "--json") == 0
    mine = json.loads(capsys.readouterr().out)["rows"][0]["time_us"]
    measured = float(data.read_text().splitlines()[-1].split()[5])
    assert mine == pytest.approx(measured, rel=0.04)


def test_what_a_fit_leaves_of_its_own_log_is_the_least_that_predictions_are_off(tmp_path, capsys):
    """A log that no constant fits was left 42 % off, and predictions of the machine were "within 2%"."""
    data = log(tmp_path, {})
    lines = data.read_text().splitlines()
    rows = [number for number, line in enumerate(lines) if line[0].isdigit()]
    for place, number in enumerate(rows):
        times = (1.0, 2.0, 4.0)[place % 3]
        cells = lines[number].split()
        cells[5] = cells[9] = f"{times * float(cells[5]):.2f}"
        cells[6:8] = cells[10:12] = [f"{float(cell) / times:.2f}" for cell in cells[6:8]]
        lines[number] = " ".join(cells)
    data.write_text("\n".join(lines) + "\n")
    out = tmp_path / "mine.toml"
    assert run("calibrate", data, "--topology", "dgx-a100", "-o", out, "--json") == 0
    left = json.loads(capsys.readouterr().out)["by_size"][">32 MiB"]["after"]
    assert left > 0.2
    around = of_collective(fabrics.load(str(out)), float(2**30), 1, "all_gather", 8)
    assert around.p50 == pytest.approx(left, rel=0.01)
    assert around.p50 < around.p90 < 1.0
    assert "the fit leaves the machine's own rows" in around.outside


def test_a_hosts_floor_is_found_and_printed(tmp_path, capsys):
    data = log(tmp_path, {"host_floor.amd": 48e-6})
    out = tmp_path / "mine.toml"
    assert run("calibrate", data, "--topology", "dgx-a100", "-o", out) == 0
    printed = capsys.readouterr().out
    assert "host_floor.amd" in printed
    assert "constants keep their defaults, as no row uses them" in printed
    assert "<=64 KiB: 14 rows" in printed
    found = fabrics.load(str(out)).calibration
    assert found is not None
    assert found.nccl["host_floor.amd"].value == pytest.approx(48e-6, rel=0.03)
    assert found.nccl["host_floor.amd"].low < 48e-6 < found.nccl["host_floor.amd"].high


def test_too_few_rows_are_refused(tmp_path, capsys):
    data = log(tmp_path, {}, range(10, 13))
    assert run("calibrate", data, "--topology", "dgx-a100", "-o", tmp_path / "x.toml") == 2
    assert "3 row(s) to fit, at least 5 are needed" in capsys.readouterr().err
    assert not (tmp_path / "x.toml").exists()


def test_rows_that_cannot_be_true_and_rows_of_others_are_counted(tmp_path, capsys):
    path = tmp_path / "table.csv"
    out = tmp_path / "mine.toml"
    lines = ["case_id,topology,nodes,ranks,collective,size_bytes,time_us,busbw_GBps"]
    lines += [f"a,dgx-a100,1,8,all_gather,{2**k},{30 + 2**k / 2.2e5:.3f},0" for k in range(10, 30)]
    lines += ["a,dgx-a100,1,8,all_gather,1073741824,1.0,0", "b,dgx-2,1,16,all_gather,1024,60,0"]
    lines += ["a,dgx-a100,1,9,all_gather,1024,60,0"]
    path.write_text("\n".join(lines) + "\n")
    assert run("calibrate", path, "--topology", "dgx-a100", "-o", out) == 0
    printed = capsys.readouterr().out
    assert "nccl: 20 rows" in printed
    assert "skipped 1: an impossible bus bandwidth" in printed
    assert "skipped 1: a row of a machine other than dgx-a100" in printed
    assert "skipped 1: 9 ranks on 1 node(s) of 8 GPUs" in printed


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--topology", "dgx-a10"), "did you mean 'dgx-a100'"),
        (("--topology", "dgx-a100", "--nodes", "3"), None),
    ],
)
def test_a_wrong_machine_is_told(arguments, says, tmp_path, capsys):
    data = log(tmp_path, {}, range(10, 20))
    code = run("calibrate", data, *arguments, "-o", tmp_path / "x.toml")
    # The log itself says one node, whatever --nodes says.
    assert code == (0 if says is None else 2)
    assert says is None or says in capsys.readouterr().err


def test_a_file_that_is_no_benchmark_is_told(tmp_path, capsys):
    path = tmp_path / "x.log"
    path.write_text("hello\n")
    assert run("calibrate", path, "--topology", "dgx-a100", "-o", tmp_path / "x.toml") == 2
    assert "no format that is known by its content" in capsys.readouterr().err


def capture(folder: Path, planted: dict[str, float], **about: object) -> Path:
    """A capture over NCCL of eight ranks, as its folder holds it."""
    path = log(folder, planted)
    folder.mkdir(exist_ok=True)
    rows: list[dict[str, object]] = [{"clustersim_capture": 1, "part": "collectives", "backend": "nccl"}]
    for line in path.read_text().splitlines():
        cells = line.split()
        if cells[0].isdigit():
            rows.append(
                {
                    "kind": "all_gather",
                    "size": int(cells[0]),
                    "time": float(cells[5]),
                    "ranks": 8,
                    "nodes": 1,
                    "time_min": float(cells[5]),
                    "type": "float",
                    "redop": "none",
                    "layout": "world",
                    "groups_at_once": 1,
                    "iterations": 20,
                }
            )
    (folder / "run").mkdir()
    (folder / "run" / "collectives.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = {"clustersim_capture": 1, "backend": "nccl", "device": "cuda", "ranks": 8, "nodes": 1, **about}
    told["machines"] = [{"versions": {"nccl": "2.28.3", "torch": "2.13"}, "cores": 64, "gpus": ["A100"]}]
    (folder / "run" / "provenance.json").write_text(json.dumps(told))
    return folder / "run"


def test_a_capture_over_nccl_is_fitted_like_a_log(tmp_path, capsys):
    folder = capture(tmp_path, {"host_floor.amd": 48e-6})
    out = tmp_path / "mine.toml"
    assert run("calibrate", folder, "--topology", "dgx-a100", "-o", out) == 0
    assert "nccl: 30 rows" in capsys.readouterr().out
    found = fabrics.load(str(out)).calibration
    assert found is not None
    assert found.nccl["host_floor.amd"].value == pytest.approx(48e-6, rel=0.03)


def test_ranks_that_shared_a_card_say_nothing_of_a_machine(tmp_path, capsys):
    folder = capture(tmp_path, {}, share_gpu=True)
    assert run("calibrate", folder, "--topology", "dgx-a100", "-o", tmp_path / "x.toml") == 2
    assert "no collective and no compute row to fit" in capsys.readouterr().err


def bent(folder: Path, slower: float) -> Path:
    """A log whose sizes above 32 MiB are as shipped, and whose others no constant explains: slower, by turns."""
    path = log(folder, {}, range(10, 33))
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines):
        cells = line.split()
        if cells[0].isdigit() and int(cells[0]) <= 2**25:
            cells[5] = cells[9] = f"{float(cells[5]) * (1 + slower * (i % 3)):.2f}"
            cells[6] = cells[10] = f"{int(cells[0]) / float(cells[5]) / 1e3:.3f}"
            cells[7] = cells[11] = f"{float(cells[6]) * 7 / 8:.3f}"
            lines[i] = " ".join(cells)
    path.write_text("\n".join(lines) + "\n")
    return path


def test_no_size_class_is_predicted_worse_than_before(tmp_path):
    worse = {}
    for slower in (0.3, 0.6):
        times, _ = nccl_times(traces.read(bent(tmp_path, slower)), "dgx-a100")
        worse[slower] = worse_classes(fit(times), times.classes)
        guarded = fit(times, times.classes)
        assert worse_classes(guarded, times.classes) == []
        assert np.median(np.abs(guarded.after / guarded.measured - 1)) <= np.median(
            np.abs(guarded.before / guarded.measured - 1)
        )
    assert any(worse.values())


@pytest.mark.parametrize(("share", "words"), [(0.3, "moved 30% of the way"), (0.0, "left as they are"), (1.0, "")])
def test_where_constants_went_a_part_of_the_way_it_is_said(share, words):
    report = CalibrationReport([], {}, {}, "nccl", 0.05, float("nan"), {}, share)
    lines = [line for line in _lines(report) if "a size class would be predicted worse" in line]
    assert bool(lines) is (share < 1)
    assert all(words in line for line in lines)


def test_large_messages_alone_leave_small_ones_as_expected():
    """The law is a few percent off on a published log (6.2 in the median), by size: a floor's constant would hide it,
    and no floor was measured."""
    table = ROOT / "tests" / "data" / "measurements" / "nccl_tests.csv.gz"
    published = next(log for key, log in logs(table).items() if "microsoft" in key[0] and key[2] == "reduce_scatter")
    large, small = (
        LogPlays(Samples(tuple(row for row in published.rows if (row.nbytes < 2**22) is is_small), ""), "hgx-a100")
        for is_small in (False, True)
    )
    unseen, times = small.described()[0], large.described()[0]
    moved = {}
    for name, fitted in (("alone", fit(times, times.classes)), ("guarded", fit_log(large).fitted)):
        moved[name] = float(np.median(np.abs(unseen.predict(fitted.values) / unseen.measured - 1)))
    assert moved["guarded"] < 0.063 < 0.3 < moved["alone"]
