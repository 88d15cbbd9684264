"""Step times that frameworks log: Megatron-LM, torchtitan and DeepSpeed, of several releases, behind any prefix."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from clustersim.app.cli import cli
from clustersim.core.errors import TraceError
from clustersim.files import traces
from clustersim.files.traces.told import TrainingLog


def megatron(timers: str = "") -> str:
    lines = ["training ...\n"]
    for i, ms in enumerate((9000.0, 1234.5, 1230.5, 1232.5), start=1):
        lines.append(
            f" [2024-07-18 15:41:0{i}] iteration {10 * i:8d}/     100 | consumed samples: {1024 * i:12d} | elapsed "
            f"time per iteration (ms): {ms} | throughput per GPU (TFLOP/s/GPU): {400.0 + i} | learning rate: 1.0E-05 | "
            "global batch size:  1024 | lm loss: 1.0E+01 | loss scale: 1.0 | grad norm: 1.2 |\n"
        )
        lines.append(timers)
    return "".join(lines)


RANGES = """(min, max) time across ranks (ms):
    forward-backward ...............................: (800.12, 805.34)
    optimizer ......................................: (10.10, 10.50)
"""
HIGHEST = """max time across ranks (ms):
    forward-backward ...............................: 805.34
    optimizer ......................................: 10.50
"""
EARLIER = "time (ms) | forward-backward: 805.34 | optimizer: 10.50\n"


def told(path: Path, text: str) -> TrainingLog:
    path.write_text(text)
    read = traces.read(path)
    assert isinstance(read, TrainingLog)
    return read


@pytest.mark.parametrize(("timers", "least"), [(RANGES, 0.80012), (HIGHEST, 0.80534), (EARLIER, 0.80534)])
@pytest.mark.parametrize("prefix", ["", "[default7]:", "0: ", "worker-3: ", "2024-07-18T15:41:05.1Z stdout F "])
def test_megatrons_iterations_and_timers(tmp_path: Path, timers: str, least: float, prefix: str):
    text = "".join(prefix + line for line in megatron(timers).splitlines(keepends=True))
    read = told(tmp_path / "log", text)
    assert (read.framework, read.steps) == ("Megatron-LM", 4)
    assert read.step_time_s == pytest.approx(1.2325)
    parts = {part.name: part for part in read.parts}
    assert parts["forward-backward"].least_s == pytest.approx(least)
    assert parts["forward-backward"].most_s == pytest.approx(0.80534)
    assert parts["optimizer"].count == 4
    assert read.rates["throughput per GPU (TFLOP/s/GPU)"] == pytest.approx(402.5)


def test_megatron_deepspeeds_seconds(tmp_path: Path):
    text = "".join(
        f" iteration {i:8d}/ 100 | consumed samples: 512 | elapsed time per iteration (s): {s} | samples per second: "
        f"41.5 | TFLOPs: 120.5 |\n"
        for i, s in enumerate((20.0, 12.3, 12.5, 12.4), start=1)
    )
    read = told(tmp_path / "log", text)
    assert read.step_time_s == pytest.approx(12.4)
    assert read.rates == {"samples per second": 41.5, "TFLOPs": 120.5}


@pytest.mark.parametrize("speed", ["tps: 3,120  tflops: 190.12  mfu: 45.30%", "wps: 3,120  mfu: 45.30%"])
def test_torchtitans_steps_are_timed_by_their_lines(tmp_path: Path, speed: str):
    text = "".join(
        f"[rank0]:[titan] 2024-07-18 15:41:{second:02d},500 - root - INFO - \x1b[31mstep: {step:2d}  \x1b[32m"
        f"loss:  7.85  \x1b[33mmemory: 30.10GiB(38.00%)  \x1b[34m{speed}\x1b[0m\n"
        for step, second in ((1, 0), (10, 30), (20, 40), (30, 50))
    )
    read = told(tmp_path / "log", text)
    assert (read.framework, read.step_time_s) == ("torchtitan", pytest.approx(1.0))
    assert read.rates["tokens/s per GPU"] == 3120.0
    assert read.rates["MFU (%)"] == pytest.approx(45.3)


@pytest.mark.parametrize("prefix", ["", "[default0]:", "2024-07-18 15:41:05,123 [INFO|DP=0|PP=0|TP=0|node1]: "])
def test_nanotrons_numbers_have_letters(tmp_path: Path, prefix: str):
    lines = [
        f"{prefix}iteration: {i} / 100 | consumed_tokens: 1.05M | elapsed_time_per_iteration_ms: {ms} | "
        "tokens_per_sec: 852K | tokens_per_sec_per_gpu: 13.3K | lm_loss: 11.3 | model_tflops_per_gpu: 192\n"
        for i, ms in enumerate(("9.8K", "1.23K", "998", "1.1e+03"), start=1)
    ]
    log = told(tmp_path / "n.log", "".join(lines))
    assert (log.framework, log.steps, log.step_time_s) == ("nanotron", 4, pytest.approx(1.1))
    assert log.rates == {"tokens/s per GPU": pytest.approx(13300), "TFLOP/s per GPU": pytest.approx(192)}


@pytest.mark.parametrize(
    "line",
    [
        "Epoch 0: :   0%|   | {i}/10000 [01:02<17:10:12, v_num=0, global_step={i}.000, train_step_timing in s={s}]\r",
        "Training epoch 0, iteration {i}/99 | lr: 1.7e-06 | global_step: {i} | train_step_timing in s: {s} | loss: 2\n",
    ],
)
def test_nemos_progress_lines(tmp_path: Path, line: str):
    text = "".join(line.format(i=i, s=s) for i, s in enumerate((60.0, 5.91, 5.9, 5.92), start=9))
    log = told(tmp_path / "n.log", text)
    assert (log.framework, log.steps, log.step_time_s) == ("NeMo", 4, pytest.approx(5.91))


def test_deepspeeds_wall_clock(tmp_path: Path):
    head = "[2024-07-18 15:41:05,123] [INFO] [logging.py:96:log_dist] [Rank 0] "
    text = ""
    for step in (99.0, 12.0, 14.0, 13.0):
        text += f"{head}time (ms) | fwd_microstep: 50.5 | bwd_microstep: 100.5 | step_microstep: {step}\n"
        text += f"{head}time (ms) | fwd: 100.0 | bwd: 200.0 | bwd_inner: 150.0 | bwd_allreduce: 50.0 | step: {step}\n"
    text += f"{head}epoch=0/micro_step=4/global_step=4, RunningAvgSamplesPerSec=12.3, CurrSamplesPerSec=12.5, "
    text += "MemAllocated=1GB\n"
    read = told(tmp_path / "log", text)
    assert (read.framework, read.steps) == ("DeepSpeed", 4)
    assert read.step_time_s == pytest.approx(0.313)
    assert {part.name: part.most_s for part in read.parts}["bwd_allreduce"] == pytest.approx(0.05)
    assert read.rates == {"samples/s": 12.5}


def test_deepspeeds_samples_a_second_alone_have_a_step_by_their_lines_times(tmp_path: Path):
    line = (
        "[2024-03-01 10:00:{at:02d},500] [INFO] [timer.py:260:stop] epoch=0/micro_step={n}/global_step={n}, "
        "RunningAvgSamplesPerSec=58.2, CurrSamplesPerSec={rate}, MemAllocated=12.1GB, MaxMemAllocated=40.2GB\n"
    )
    text = "".join(line.format(at=at, n=n, rate=rate) for at, n, rate in ((0, 10, 57), (20, 20, 64), (28, 30, 64)))
    read = told(tmp_path / "log", text)
    assert (read.framework, read.steps) == ("DeepSpeed", 2)
    assert read.step_time_s == pytest.approx(0.8)  # the first stretch is warm-up
    assert read.rates == {"samples/s": 64}


def test_deepspeeds_wall_clock_of_before_its_parts_were_shortened(tmp_path: Path):
    """Behind a progress bar, whose own rate says something else."""
    bar = "  3%|#    | {i}/345 [00:07<06:50,  1.23s/it][2023-06-21 07:39:09,625] [INFO] [Rank 0] "
    line = "rank=0 time (ms) | forward: {f} | backward: 70.0 | backward_inner: 50.0 | step: 60.0"
    text = "".join(bar.format(i=i) + line.format(f=f) + "\n" for i, f in enumerate((99.0, 30.0, 31.0, 32.0)))
    read = told(tmp_path / "log", text)
    assert (read.framework, read.steps, read.step_time_s) == ("DeepSpeed", 4, pytest.approx(0.161))


def test_numbers_with_the_mean_of_the_run_behind_a_stroke(tmp_path: Path):
    line = " iteration {i}/ 50 | elapsed time per iteration (ms): {ms}/1200.0 |"
    line += " throughput per GPU (TFLOP/s/GPU): 600.0/590.0 |"
    line += " tokens per GPU (tokens/s/GPU): 11000.0/10900.0 | lm loss: 1.1E+01 |\n"
    text = "".join(line.format(i=i, ms=ms) for i, ms in ((4, 1500.0), (5, 1100.0), (6, 1100.0)))
    read = told(tmp_path / "log", text)
    assert read.step_time_s == pytest.approx(1.1)
    assert read.rates["throughput per GPU (TFLOP/s/GPU)"] == 600.0
    assert read.rates["tokens per GPU (tokens/s/GPU)"] == 11000.0


def test_deepspeeds_flops_profiler(tmp_path: Path):
    text = """
-------------------------- DeepSpeed Flops Profiler --------------------------
Profile Summary at step 10:
world size:                                                             8
fwd MACs per GPU:                                                       2.1 TMACs
fwd latency:                                                            100.5 ms
fwd FLOPS per GPU = fwd flops per GPU / fwd latency:                    41.8 TFLOPS
bwd latency:                                                            210.5 ms
step latency:                                                           900 us
iter latency:                                                           311.9 ms
FLOPS per GPU = 3 * fwd flops per GPU / iter latency:                   40.4 TFLOPS
samples/second:                                                         25.6
"""
    read = told(tmp_path / "log", text)
    assert read.framework == "DeepSpeed flops profiler"
    assert read.step_time_s == pytest.approx(0.3119)
    assert {part.name: part.most_s for part in read.parts}["step latency"] == pytest.approx(900e-6)
    assert read.rates["fwd FLOPS per GPU (TFLOP/s)"] == pytest.approx(41.8)
    assert read.rates["samples/second"] == pytest.approx(25.6)


def test_the_command_prints_the_step_time_first(tmp_path: Path):
    path = tmp_path / "log"
    path.write_text(megatron(RANGES))
    done = CliRunner().invoke(cli, ["trace", str(path)])
    assert done.output.splitlines()[0].startswith("Megatron-LM: 1.23")
    assert "800.1 ms to 805.3 ms" in done.output


def test_a_log_without_a_step_is_one_error(tmp_path: Path):
    path = tmp_path / "log"
    path.write_text("(min, max) time across ranks (ms):\nnothing\n")
    with pytest.raises(
        TraceError, match="no step time of Megatron-LM, torchtitan, nanotron, NeMo, Composer, DeepSpeed or the Trainer"
    ):
        traces.read(path)


def bar(done: int, total: int, rate: str, title: str = "") -> str:
    return f"\r{title}{100 * done // total:3d}%|{'#' * 4}      | {done}/{total} [00:{done:02d}<16:30, {rate}]"


END = "\n{'train_runtime': '1000.0', 'train_tokens_per_second': '6.6', 'train_steps_per_second': '0.4'}\n"


def test_the_trainers_progress_bar_has_its_steps(tmp_path: Path):
    text = "  Total optimization steps = 500\n" + bar(3, 4, " 9.00s/it", "Loading checkpoint shards: ")
    text += "".join(bar(n, 500, f" {2 + 1 / n:.2f}s/it") + "\n{'loss': 1.2, 'epoch': 0.1}\n" for n in range(1, 40))
    text += "".join(bar(n, 60, "10.00it/s") for n in range(1, 50))  # of evaluation
    read = told(tmp_path / "log", text + END)
    assert (read.framework, read.steps) == ("Hugging Face Trainer", 39)
    assert read.step_time_s == pytest.approx(2.05, abs=0.01)
    assert read.rates["steps/s, mean of the run"] == 0.4
    assert any("22% more a step" in line for line in read.lines)


def test_the_trainers_last_line_is_the_mean_of_its_run(tmp_path: Path):
    read = told(tmp_path / "log", "{'loss': '1.2', 'epoch': '0.1'}" + END)
    assert read.step_time_s == pytest.approx(2.5)


def test_bars_of_one_line_are_each_read(tmp_path: Path):
    """As a terminal's page is copied: no line ends where tqdm draws anew."""
    line = "".join(
        f"  0%|          | {n}/1218 [00:{8 * n + 5:02d}<4:10:55, {rate:5.2f}s/it]"
        for n, rate in enumerate((12.37, 9.87, 8.99, 8.5), start=1)
    )
    read = told(tmp_path / "log", line + "\n{'loss': 1.2, 'epoch': 0.01}\n")
    assert (read.steps, read.step_time_s) == (4, pytest.approx(8.99))
    faster = told(tmp_path / "log", line + "\n{'loss': 1.2}\n{'train_steps_per_second': 0.2, 'epoch': 3.0}\n")
    assert "less a step" in faster.lines[-1]


def test_a_bars_mean_since_the_start_is_not_a_steps_time(tmp_path: Path):
    """Lightning's: ten steps of a second after a warm-up of six."""
    text = "".join(
        f"Epoch 0:  1%|#  | {n}/1000 [00:{n + 5:02d}<25:12,  {n / (n + 5):.2f}it/s, v_num=0]\n"
        for n in (10, 20, 30, 40)
    )
    assert told(tmp_path / "log", text).step_time_s == pytest.approx(1.0)


def test_lightnings_bars_of_a_few_seconds_do_not_count_the_warm_up_in_every_step(tmp_path: Path):
    """Steps of 3 s after a first of 8.9, whose seconds tqdm cuts; and fast ones, whose seconds are all 0."""
    slow = "".join(
        f"Epoch 0:  {n}%|#  | {n}/18 [00:{int(3 * n + 5.9):02d}<01:13, {(3 * n + 5.9) / n:5.2f}s/it, v_num=1]\n"
        for n in range(1, 4)
    )
    assert told(tmp_path / "slow", slow).step_time_s == pytest.approx(3.0, rel=0.01)
    fast = "".join(
        f"Epoch 0:  {n}%|#  | {n}/32 [00:00<00:00, {n / (0.13 + 0.004 * n):5.2f}it/s, v_num=15]\n" for n in range(8, 13)
    )
    assert told(tmp_path / "fast", fast).step_time_s == pytest.approx(0.004, rel=0.02)


@pytest.mark.parametrize("title", ["Epoch 0: ", "1|20|Loss: 0.88: "])
def test_progress_bars_of_lightning_and_torchtune(tmp_path: Path, title: str):
    read = told(tmp_path / "log", "".join(bar(n, 200, " 2.00it/s", title) for n in range(1, 30)))
    assert (read.steps, read.step_time_s) == (29, pytest.approx(0.5))


def test_lines_of_losses_alone_have_no_time(tmp_path: Path):
    path = tmp_path / "log"
    path.write_text("{'loss': 1.2, 'grad_norm': 0.3, 'epoch': 0.1}\n" * 3)
    with pytest.raises(TraceError, match="lines of losses have no time"):
        traces.read(path)


def composer(batch: int, rate: float, samples: int = 64) -> str:
    """A block as Composer's ConsoleLogger writes it."""
    values = {
        "time/batch": batch - 1,
        "time/sample": (batch - 1) * samples,
        "loss/train/total": 2.5,
        "throughput/batches_per_sec": rate,
        "throughput/samples_per_sec": rate * samples,
        "throughput/device/batches_per_sec": rate / 8,
        "throughput/device/samples_per_sec": rate * samples / 8,
        "throughput/device/tokens_per_sec": 2048 * rate * samples / 8,
    }
    shown = (f"{value}" if isinstance(value, int) else f"{value:.4f}" for value in values.values())
    lines = "".join(f"\t Train {name}: {word}\n" for name, word in zip(values, shown, strict=True))
    return f"[epoch=1][batch={batch}/400]:\n{lines}"


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "worker-0: "])
@pytest.mark.parametrize("step", [0.25, 5.0, 375.0])
def test_composers_blocks_tell_a_batch_of_all_gpus_however_long(tmp_path: Path, prefix: str, step: float):
    text = "".join(composer(batch, 1 / step) for batch in (100, 200, 300))
    read = told(tmp_path / "log", "".join(prefix + line for line in text.splitlines(keepends=True)))
    assert (read.framework, read.steps) == ("Composer", 3)
    assert read.step_time_s == pytest.approx(step, rel=1e-3)
    assert read.rates["samples/s"] == pytest.approx(64 / step, rel=1e-3)
    assert "each a mean over a window" in read.lines[0]


def test_torchtitans_colours_may_have_lost_their_first_character(tmp_path: Path):
    text = "".join(
        f"[rank0]:2024-07-12 22:10:{at},123 - root - INFO - [36mstep: {step:2d}  [32mloss: 12.27  [33mmemory: "
        f"27.11GiB(28.54%)  [34mwps: 7,234  [35mmfu: 33.51%[39m\n"
        for step, at in ((1, 10), (10, 30), (20, 50))
    )
    read = told(tmp_path / "log", text)
    assert (read.framework, read.step_time_s) == ("torchtitan", pytest.approx(2.0))
    assert read.rates == {"tokens/s per GPU": 7234.0, "MFU (%)": pytest.approx(33.51)}


def test_deepspeeds_steps_of_before_it_told_samples_of_now(tmp_path: Path):
    """The count beside SamplesPerSec is of passes: a step has two here."""
    line = (
        "[2022-03-11 02:0{at},985] [INFO] [logging.py:69:log_dist] [Rank 0] step={step}, skipped=2, lr=[5e-05], m=[]\n"
        "[2022-03-11 02:0{at},985] [INFO] [timer.py:189:stop] 0/{passes}, SamplesPerSec=83.5, MemAllocated=0.26GB\n"
    )
    rows = (("6:50", 40), ("7:05", 50), ("7:20", 60))
    read = told(tmp_path / "log", "".join(line.format(at=at, step=step, passes=2 * step) for at, step in rows))
    assert (read.framework, read.step_time_s) == ("DeepSpeed", pytest.approx(1.5))
    assert read.rates == {"samples/s, mean of the run": 83.5}
    bare = told(tmp_path / "bare", "[INFO 2020-06-08 05:26:19] 0/2650, SamplesPerSec=13.197\n")
    assert (bare.step_time_s, bare.rates) == (None, {"samples/s, mean of the run": 13.197})


@pytest.mark.parametrize("prefix", ["", "[1,0]<stdout>:", "0: "])
def test_nanogpts_iterations_are_steps(tmp_path: Path, prefix: str):
    lines = ("iter 0: loss 10.9, time 9000.0ms, mfu -100.00%", "iter 1: loss nan, time 500.5ms, mfu 31.20%")
    lines += ("iter 2: loss 3.9, time 499.5ms", "step 2: train loss 3.8, val loss 3.9")
    lines += ("iter 3: loss 3.9, time 501.5ms",)
    read = told(tmp_path / "log", "".join(f"{prefix}{line}\n" for line in lines))
    assert (read.framework, read.steps, read.step_time_s) == ("nanoGPT", 4, pytest.approx(0.5005))
    assert read.rates == {"MFU (%)": pytest.approx(31.2)}


def test_a_step_that_several_ranks_log_counts_once(tmp_path: Path):
    """The slow first step stood twice, and only one of it was left out."""
    line = "{at} [INFO|DP={rank}|PP=0|TP=0]: iteration: {i} / 9 | elapsed_time_per_iteration_ms: {ms} | lm_loss: 11.3\n"
    text = "".join(
        line.format(at="07/18/2024 15:41:05", rank=rank, i=i, ms=ms)
        for i, ms in ((1, "9.8K"), (2, "1.2K"))
        for rank in (0, 1)
    )
    read = told(tmp_path / "log", text)
    assert (read.steps, read.step_time_s) == (2, pytest.approx(1.2))
