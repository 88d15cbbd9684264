"""Detection, speech and translation: parameters as published, and what recurrence costs."""

from __future__ import annotations

import pytest
from kernel_times import kernel_time

from clustersim.core.device import device
from clustersim.core.model import Kernel, Model
from clustersim.model import catalog, model
from clustersim.model.audio import waveglow
from clustersim.model.fastpitch import fastpitch
from clustersim.model.recurrent import gnmt, recurrence, tacotron2
from clustersim.model.seq2seq import seq2seq

# Ping et al., WaveFlow (arXiv:1912.01219), table 5: parameters of WaveGlow by residual channels, in millions.
WAVEGLOW = {64: 17.59, 128: 34.83, 256: 87.88, 512: 268.29}


@pytest.mark.parametrize(("channels", "millions"), WAVEGLOW.items())
def test_waveglow_has_the_parameters_that_waveflow_lists(channels: int, millions: float) -> None:
    assert waveglow(channels).parameters / 1e6 == pytest.approx(millions, abs=0.01)


# num_parameters() of Hugging Face's checkpoints of that name.
SEQ2SEQ = {
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
}


@pytest.mark.parametrize(("name", "parameters"), SEQ2SEQ.items())
def test_encoder_decoders_have_the_parameters_of_their_checkpoints(name: str, parameters: int) -> None:
    assert model(name).parameters == parameters


def test_a_t5_has_its_scores_in_memory_unless_asked() -> None:
    """transformers' T5 has no fused attention, so that its bias is added to scores in memory."""

    def scores(made: Model) -> bool:
        return any(kernel.name == "scores" for layer in made.layers for kernel in layer.kernels)

    assert [scores(model("t5-small")), scores(model("t5-small", attention="flash"))] == [True, False]
    assert [scores(model("bart-base")), scores(model("bart-base", attention="eager"))] == [False, True]


def test_a_name_means_one_model() -> None:
    """T5 and BART were described twice by one name: the older one knew no ``source_len``, and no flash attention."""
    names = catalog()
    assert sorted(names) == sorted(set(names))
    for name in SEQ2SEQ:
        assert model(name, source_len=256, seq_len=64).notes[0] == "256 tokens to 64"


def test_the_big_transformer_has_the_parameters_of_its_paper_but_for_the_words_it_leaves_out() -> None:
    # Vaswani et al., table 3: 213 million with a vocabulary of 37,000.
    assert model("transformer-big").parameters + (37_000 - 33_712) * 1024 == pytest.approx(213e6, rel=0.01)


def test_a_decoders_block_has_the_encoders_products_and_cross_attention() -> None:
    big = seq2seq("transformer-big", 128)
    encoder, decoder = (next(x for x in big.layers if x.name == f"{part}.1") for part in ("encoder", "decoder"))
    more = sum(k.flops for k in decoder.kernels) - sum(k.flops for k in encoder.kernels)
    t = 128
    h = 1024
    assert more == pytest.approx(2.0 * t * 4 * h * h + 4.0 * t * t * h)


def test_gnmt_has_the_parameters_that_its_training_logs_print() -> None:
    # MLPerf training 0.6, GNMT in PyTorch: "Number of parameters: 160671297".
    assert model("gnmt").parameters == 160_671_297


def test_tacotron_2_has_the_parameters_of_nvidias_checkpoint() -> None:
    # NVIDIA/tacotron2's modules counted in torch: 28.2 million.
    assert model("tacotron2").parameters == 28_193_153


def test_fastpitch_has_the_parameters_of_its_modules() -> None:
    # DeepLearningExamples FastPitch 1.1 with its defaults: fastpitch/{model,transformer,attention}.py.
    wide = 384
    head = 64
    inner = 1536
    predicted = 256
    mels = 80
    norm = 2 * wide
    block = 3 * head * (wide + 1) + head * wide + norm + inner * (3 * wide + 1) + wide * (3 * inner + 1) + norm
    predictor = predicted * (3 * wide + 1) + predicted * (3 * predicted + 1) + 4 * predicted + predicted + 1
    keys = 2 * wide * (3 * wide + 1) + mels * (2 * wide + 1)
    queries = 2 * mels * (3 * mels + 1) + mels * (2 * mels + 1) + mels * (mels + 1)
    between = 3 * predictor + 2 * wide * (3 + 1) + keys + queries + mels + 1
    assert model("fastpitch").parameters == 148 * wide + 12 * block + between + mels * (wide + 1)


def test_a_longer_clip_of_fastpitch_costs_more_than_its_share_of_blocks() -> None:
    short = fastpitch(566, 400).flops_per_sample()
    long = fastpitch(566, 800).flops_per_sample()
    assert 1.7 * short < long < 2.5 * short


def test_jasper_has_the_parameters_of_its_paper() -> None:
    assert model("jasper").parameters / 1e6 == pytest.approx(333, abs=0.5)  # arXiv:1904.03288, table 5


def test_ssd_has_8732_default_boxes() -> None:
    ssd = model("ssd300_resnet50")
    heads = [layer for layer in ssd.layers if layer.name.startswith("loc.")]
    assert sum(k.m * k.n // 4 for layer in heads for k in layer.kernels if k.kind == "conv") == 8732


def test_ssd_keeps_three_stages_of_resnet_50() -> None:
    kept = [t for layer in model("ssd300_resnet50").layers for t in layer.tensors]
    resnet = [t for layer in model("resnet50").layers for t in layer.tensors if not t.name.startswith(("layer4", "fc"))]
    assert kept[: len(resnet)] == resnet


def time(kernel: Kernel, batch: int, *, backward: bool = False) -> float:
    return kernel_time(kernel, device("V100-SXM2-16GB"), batch, "fp16", backward=backward)[0]


def test_a_recurrent_product_takes_its_steps_one_after_the_other() -> None:
    assert time(recurrence("state", 40, 1024), 64) == pytest.approx(2 * time(recurrence("state", 20, 1024), 64))


def test_steps_together_would_be_faster_than_one_after_the_other() -> None:
    alone = recurrence("state", 40, 1024)
    together = Kernel("gates", "gemm", m=40, n=4096, k=1024, flops=alone.flops, backward_flops=alone.backward_flops)
    assert time(alone, 64) > 2 * time(together, 64)
    assert time(alone, 64, backward=True) > time(together, 64, backward=True)


def test_padding_costs_time_and_counts_no_tokens() -> None:
    assert gnmt(28, 36).seq_len == gnmt(28, 28).seq_len == 56
    assert gnmt(28, 36).flops_per_sample() > 1.2 * gnmt(28, 28).flops_per_sample()
    assert tacotron2(566, 850).seq_len == 566
