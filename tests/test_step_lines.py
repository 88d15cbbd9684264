"""Frameworks that log a step in one line: what its numbers mean, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_step_timers import told

from clustersim.core.errors import TraceError
from clustersim.files.traces import step_lines
from clustersim.files.traces.heads import LONGEST_END, Head

BATCHES = "2024-02-01 10:00:{s} node0:0 olmo.train:900 INFO [step={i}/739,epoch=0]\n    {key}={bps}\n"
LINES = {
    "MaxText": (
        "completed step: {i}, seconds: 5.6{i}, TFLOP/s/device: 134.9, Tokens/s/device: 8672.7, loss: 1\n",
        5.655,
    ),
    "LitGPT": ("[rank: 0] iter {i} step {i}: loss 10.8, iter time: 33{i}.20ms (optimizer.step)\n", 0.3357),
    "OpenCLIP": (
        "2024-11-28,04:39:18 | INFO | Train Epoch: 0 [{i}64/5120 (78%)] Data (t): 0.7 Batch (t): 4.6{i}, 1781.0/s, "
        "222.6/s/gpu LR: 0.000057 Loss: 0.6 (1.6)\n",
        4.655,
    ),
    "fairseq": ("epoch 001:  {i}00 / 160 loss=9.2, wps=5000, ups=0.01, wpb=3{i}00, bsz=80, train_wall=24\n", 0.71),
    "OLMo": (BATCHES.replace("{key}", "throughput/device/batches_per_second").replace("{bps}", "0.2{i}"), 3.923),
    "OLMo-core": (BATCHES.replace("{key}", "throughput/device/BPS").replace("{bps}", "0.2{i}"), 3.923),
    "verl": (
        "(Task pid=1) step:{i} - actor/loss:0.3 - timing_s/gen:20.5 - timing_s/step:42.{i} - perf/mfu:0.3\n",
        42.55,
    ),
    "NeMo Automodel": (
        "2026-08-10 15:55:{s} | INFO | root | step {i} | epoch 0 | loss 0.6 | mem 24.9 GiB | tps 8.0(1.0/gpu) | "
        "num_label_tokens 33\n",
        3.0,
    ),
    "ms-swift": ("{{'loss': 1.2, 'train_speed(iter/s)': 0.2{i}, 'global_step/max_steps': '{i}/100'}}\n", 3.923),
    "LLaMA-Factory": (
        '{{"current_steps": {i}0, "total_steps": 100, "loss": 1.2, "elapsed_time": "0:00:{s}"}}\n',
        0.3,
    ),
    "DeepSpeed's pipeline engine": ("steps: {i} loss: 9.8 iter time (s): 1.2{i} samples/sec: 26.1\n", 1.255),
    "llm.c": (
        "step {i}/19560 | loss 11.0 (+nanz)| norm 1 | lr 9.9e-07 | 11{i}.10 ms | 37.9% bf16 MFU | 4 tok/s\n",
        0.1156,
    ),
    "modded-nanoGPT": ("step:{i}/1750 train_time:{s}00ms step_avg:80.1ms\n", 0.3),
    "nanochat": ("step 0000{i}/21400 (0.1%) | loss: 11.0 | dt: 46{i}.00ms | tok/sec: 1,143 | mfu: 48.1\n", 0.4655),
    "Keras": ("{i}/500 [==>....] - ETA: 2:10 - 1s 2{i}0ms/step - loss: 2.3\n", 0.255),
    "timm": ("Train: 0 [ {i}50/1251 ( 4%)]  Loss: 6.9 (6.9)  Time: 0.3{i}0s, 3400.1/s  (0.31s, 3300.1/s)\n", 0.355),
    "PyTorch's ImageNet example": (
        "Epoch: [0][ {i}0/5005]\tTime  0.3{i}0 ( 0.355)\tData  0.01 ( 0.05)\tLoss 7\n",
        0.355,
    ),
    "torchvision's references": (
        "Epoch: [0]  [ {i}0/5005]  eta: 0:30:00  loss: 6.9  time: 0.3{i}  data: 0.001\n",
        0.355,
    ),
    "MMEngine": (
        "mmengine - INFO - Epoch(train)  [1][{i}0/1000]  lr: 1  time: 0.4{i}  data_time: 0.01  loss: 1\n",
        0.455,
    ),
    "detectron2": (
        "d2: eta: 1:00:00  iter: {i}9  total_loss: 1.2  time: 0.4{i}  last_time: 0.9  data_time: 0.1\n",
        0.455,
    ),
    "InternEvo": (
        "2025-01-10 10:00:{s},123 INFO pipeline.py:9 in record -- tflops=180.5 step={i} loss=1.2 "
        "tgs (tokens/gpu/second)=3900.5 lr=1e-05 fwd_bwd_time=2.2\n",
        3.0,
    ),
    "PaddleNLP": (
        "[2022-08-31 16:12:{s},082] [    INFO] - loss: 0.9, global_step: {i}0, interval_runtime: 3.0, "
        "interval_samples_per_second: 2.5, interval_steps_per_second: 3.2{i}, epoch: 0.5\n",
        0.3072,
    ),
    "TensorFlow's Estimator": ("INFO:tensorflow:global_step/sec: 4.0{i}\n", 0.2466),
    "TensorFlow's Model Garden": ("I0101 train | step:    {i}00 | steps/sec:    4.0{i} | output: 'loss'\n", 0.2466),
    "slime": ("metric_utils.py:50 - perf {i}: {{'perf/train_time': 2.0, 'perf/step_time': 30.{i}}}\n", 30.55),
    "NeMo RL": ("Timing:\n  \u2022 Total step time: 30.{i}s\n  \u2022 generation: 9.10s (40.1%)\n", 30.55),
    "prime-rl": (
        "SUCCESS Step {i} | Time: 2.5{i}s | Loss: 1.2 | Grad. Norm: 1.0 | LR: 1e-5 | Throughput: 6553 tokens/s | "
        "MFU: 41.2% | Peak Mem.: 40.1/80.0 GiB (50.1%)\n",
        2.555,
    ),
    "TRL": ("{{'loss': 0.0, 'num_tokens': 9{i}0.0, 'reward': 0.5, 'step_time': 30.{i}, 'epoch': 0.1}}\n", 30.55),
    "Levanter": ("Progress on:train {i}0it/10.0kit rate:2.5it/s remaining:1:00 elapsed:00:40 postfix:loss=3\n", 0.4),
}


def test_each_framework_has_a_line():
    assert {row.framework for row in step_lines.LINES} - {"torchtune", "torch_xla's examples"} == set(LINES)


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "node3: "])
@pytest.mark.parametrize("framework", LINES)
def test_a_line_tells_a_step(tmp_path: Path, framework: str, prefix: str):
    line, seconds = LINES[framework]
    text = "".join(prefix + line.format(i=i, s=10 + 3 * i) for i in range(1, 10))
    read = told(tmp_path / "log", "starting\n" + text)
    assert read.framework == framework
    assert read.step_time_s == pytest.approx(seconds, rel=1e-3)


def test_torch_xlas_examples_log_rates_without_a_time(tmp_path: Path):
    line = "| Training Device=xla:0/0 Epoch=1 Step={i} Loss=6.9 Rate=512.5 GlobalRate=498.0 Time=14:20:0{i}\n"
    read = told(tmp_path / "log", "".join(line.format(i=i) for i in range(5)))
    assert read.step_time_s is None
    assert read.rates == {"samples/s of a device": 512.5, "samples/s of a device, mean of the run": 498.0}


def passes(every: int = 1) -> str:
    """LitGPT's lines: four passes a step, of 100 ms, the last of which takes 140."""
    return "".join(
        f"Epoch 1 | iter {i} step {i // 4} | loss train: 2.8, val: n/a | iter time: {140 if i % 4 == 0 else 100}.00 ms"
        f"{' (step)' if i % 4 == 0 else ''}\n"
        for i in range(1, 42)
        if i % every == 0
    )


def test_litgpts_passes_are_summed_to_steps(tmp_path: Path):
    read = told(tmp_path / "log", passes())
    assert read.step_time_s == pytest.approx(0.44)
    assert "each of 4 passes" in read.lines[0]


def test_litgpts_sampled_passes_are_said_to_be(tmp_path: Path):
    read = told(tmp_path / "log", passes(every=8))
    assert read.step_time_s == pytest.approx(4 * 0.14)
    assert "each 4 times a logged pass" in read.lines[0]


def test_torchtunes_file_of_rates_has_no_time(tmp_path: Path):
    lines = (
        f"Step {i} | loss:1.2 lr:2e-05 tokens_per_second_per_gpu:3456.7 peak_memory_active:12.3\n" for i in range(5)
    )
    read = told(tmp_path / "log", "".join(lines))
    assert (read.step_time_s, read.rates) == (None, {"tokens/s per GPU": 3456.7})


@pytest.mark.parametrize("head", ['{"epoch": 1.0, ', '{"log_history": [{"epoch": 0.1, "step": 10}, {"epoch": 1.0, '])
def test_the_trainers_json_has_the_mean_of_a_run(tmp_path: Path, head: str):
    text = head + '"train_runtime": 250.0, "train_samples_per_second": 12.8, "train_steps_per_second": 0.4}'
    assert told(tmp_path / "all_results.json", text).step_time_s == pytest.approx(2.5)


def test_a_line_of_megabytes_among_steps_is_looked_at_at_its_ends(tmp_path: Path):
    between = "x y: 'abc' 123, " * 100_000
    steps = "".join(f"iter {i}: loss 3.1, time 312.5ms, mfu 38.0%\n" for i in range(1, 4))
    text = f"{steps}{between}\n{steps.replace('iter ', 'iter 1')}"
    assert len(Head(text.encode()).text) < 3 * LONGEST_END
    assert told(tmp_path / "log", text).steps == 6


def test_the_trainers_state_in_one_long_line_is_read(tmp_path: Path):
    rows = ", ".join(f'{{"epoch": 0.1, "loss": 2.0, "learning_rate": 1e-05, "step": {i}}}' for i in range(4000))
    last = '{"train_runtime": 400.0, "train_samples_per_second": 64.0, "train_steps_per_second": 0.5}'
    read = told(tmp_path / "trainer_state.json", f'{{"global_step": 200, "log_history": [{rows}, {last}]}}')
    assert read.step_time_s == pytest.approx(2.0)


RESUMED = "INFO:transformers.trainer:  Total optimization steps = 200\n  Continuing training from global step 100\n"


def test_the_mean_of_a_run_that_was_resumed_leaves_out_what_was_done_before(tmp_path: Path):
    """The Trainer divides all steps by the time since then: half of them take twice as long."""
    last = "{'train_runtime': 50.0, 'train_samples_per_second': 64.0, 'train_steps_per_second': 4.0}\n"
    read = told(tmp_path / "resumed.log", RESUMED + last)
    assert (read.step_time_s, read.rates) == (pytest.approx(0.5), {})
    whole = told(tmp_path / "whole.log", RESUMED.splitlines()[0] + "\n" + last)
    assert whole.step_time_s == pytest.approx(0.25)
    at_its_end = last.replace("50.0", "0.002").replace("4.0}", "100000.0}")
    with pytest.raises(TraceError, match="no step time"):
        told(tmp_path / "end.log", at_its_end)
