"""Rows of measurement tables: names and columns become models, or a reason; exact parameter counts match."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from clustersim.core.errors import ModelError
from clustersim.core.model import Model
from clustersim.model import model
from tests.evidence.generic import from_row
from tests.tables import table_rows

TABLE = Path(__file__).parents[1].parent / "shared" / "measurements" / "training_steps.csv"
shared = pytest.mark.skipif(not TABLE.exists(), reason="../shared/measurements is not there")


@cache
def rows() -> list[dict[str, str]]:
    return table_rows(TABLE)


@shared
def test_every_exact_parameter_count_of_the_table_is_met() -> None:
    exact = [row for row in rows() if row["params"].isdigit()]
    assert len(exact) > 100
    wrong = {
        row["case_id"]: from_row(row).parameters for row in exact if from_row(row).parameters != int(row["params"])
    }
    assert wrong == {}


@shared
def test_every_row_gives_a_model_or_a_reason() -> None:
    reasons: list[str] = []
    for row in rows():
        try:
            assert from_row(row).parameters > 0
        except ModelError as error:
            reasons.append(str(error))
    assert len(reasons) < 0.25 * len(rows())
    assert all(reason.startswith("model '") for reason in reasons)


@shared
def test_dimensions_of_a_row_are_those_of_its_model() -> None:
    for row in rows():
        if row["layers"].isdigit() and row["d_model"].isdigit():
            try:
                made = from_row(row)
            except ModelError:
                continue
            assert (made.n_blocks, made.hidden) == (int(row["layers"]), int(row["d_model"]))
            assert not row["seq_len"] or made.seq_len == int(row["seq_len"])


def row(**columns: str) -> Model:
    return from_row(columns)


def kinds(made: Model) -> set[str]:
    return {k.name for layer in made.layers for k in layer.kernels}


NAMES = {
    "ResNet-50 v1.5 (224x224)": "resnet50",
    "InceptionV3": "inception_v3",
    "VGG-16": "vgg16",
    "ResNeXt101": "resnext101_32x8d",
    "resnext101_32x8d (torchvision, 224x224)": "resnext101_32x8d",
    "GPT-2 Medium": "gpt2-medium",
    "GPT2-large 0.77B": "gpt2-large",
    "GPT-2 1.5B": "gpt2-xl",
    "gpt2 (124M)": "gpt2",
    "OPT-13B": "opt-13b",
    "Llama 2 70B": "llama2-70b",
    "meta-llama/Llama-2-7b-hf": "llama2-7b",
    "Llama3-8B": "llama3-8b",
    "Mistral 7B": "mistral-7b-v0.1",
    "Mixtral 8x7B": "mixtral-8x7b",
    "transformerxlbase": "transformer-xl-base",
    "AlexNet": "alexnet",
    "SSD300 (ResNet-50 backbone)": "ssd300_resnet50",
    "Transformer (WMT14 en-de)": "transformer-big",
    "GNMT v2": "gnmt",
    "Jasper 10x5": "jasper",
    "ssd": "ssd300_resnet50",
}


@pytest.mark.parametrize(("name", "known"), NAMES.items())
def test_names_are_read_as_people_write_them(name: str, known: str) -> None:
    assert row(model=name).parameters == model(known).parameters


@pytest.mark.parametrize("variant", ["learned biases", "alibi bare"])
def test_an_exact_count_decides_between_the_variants_of_mpt(variant: str) -> None:
    h = 1024
    layers = 6
    vocab = 50368
    seq = 512
    bare = layers * 12 * h * h + vocab * h + (2 * layers + 1) * h
    count = bare + seq * h + layers * 9 * h + (2 * layers + 1) * h if variant == "learned biases" else bare
    made = row(
        model="MPT-test",
        params=str(count),
        layers=str(layers),
        d_model=str(h),
        heads="16",
        seq_len=str(seq),
        vocab=str(vocab),
    )
    assert made.parameters == count


def test_how_a_row_ran_is_read_from_its_words() -> None:
    gpt = {"model": "gpt2", "seq_len": "256"}
    assert "scores" in kinds(row(**gpt, other="HF eager attention"))
    assert "attention" in kinds(row(**gpt, other="torch.compile, flash SDPA"))
    assert "attention" in kinds(row(model="Llama2-7b", seq_len="256"))
    assert "scores" in kinds(row(model="SmolLM3-3B", seq_len="256", notes="no flash-attn, no compile"))


def test_bert_trains_its_task() -> None:
    squad = row(model="bert_large_squad", seq_len="384")
    phase1 = row(model="BERT-large", seq_len="128")
    assert "qa_outputs" in kinds(squad)
    logits = next(k for k in phase1.layers[-1].kernels if k.name == "logits")
    assert logits.m == 20
    every = row(model="BERT-large", seq_len="128", other="HF transformers")
    assert next(k for k in every.layers[-1].kernels if k.name == "logits").m == 128


def test_tensorflows_benchmark_has_the_early_stride_and_no_auxiliary_classifier() -> None:
    early = row(model="ResNet-50", other="sgd; tf_cnn_benchmarks")
    assert early.flops_per_sample() == model("resnet50_v1").flops_per_sample()
    assert row(model="InceptionV3", other="tf_cnn_benchmarks").parameters == 23_834_568


def test_dimensions_override_a_name() -> None:
    made = row(model="GPT3-XL", layers="24", d_model="3072", heads="24", seq_len="2048", vocab="50257")
    h = 3072
    assert made.parameters == 24 * (12 * h * h + 13 * h) + (50257 + 2048) * h + 2 * h


BAD = [
    ({"model": ""}, "names no model"),
    ({"model": "NCF"}, "recommender"),
    ({"model": "T5-11B"}, "gives no seq_len"),
    ({"model": "GPT-2 8B", "layers": "7"}, "gives no layers and d_model"),
    ({"model": "Llama-99B", "layers": "7", "d_model": "512", "heads": "8"}, "gated MLP"),
    ({"model": "BERT-large"}, "gives no seq_len"),
    ({"model": "frobnicator"}, "not a known name"),
    ({"model": "gpt2", "heads": "twelve"}, "heads = 'twelve'"),
    ({"model": "gpt2", "layers": "1.5"}, "layers = '1.5' is not a whole number"),
    ({"model": "gpt2", "params": "many"}, "params = 'many'"),
    ({"model": "gpt9", "layers": "2", "d_model": "100", "heads": "3"}, "3 heads do not divide d_model 100"),
]


@pytest.mark.parametrize(("columns", "message"), BAD)
def test_a_row_that_says_too_little_gives_its_reason(columns: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_row(columns)


def test_transformer_xl_base_has_the_192_million_parameters_nvidia_quotes() -> None:
    assert model("transformer-xl-base").parameters == pytest.approx(192e6, rel=1e-3)


def test_transformer_xl_without_adaptive_softmax_has_one_table_and_one_bias_per_word() -> None:
    adaptive = row(model="transformerxlbase", seq_len="192")
    plain = row(model="transformerxlbase", seq_len="192", source="github lambdal/deeplearning-benchmark")
    assert adaptive.parameters - plain.parameters == 3 * 512 + 3
    assert plain.flops_per_sample() > 1.5 * adaptive.flops_per_sample()


def test_a_pretraining_head_that_gathers_nothing_sees_every_token() -> None:
    columns = {"model": "BERT-base", "seq_len": "128"}
    gathered = from_row(columns)
    all_tokens = from_row(columns, gathers_masked=False)
    assert gathered.parameters == all_tokens.parameters
    assert 1.15 < all_tokens.flops_per_sample() / gathered.flops_per_sample() < 1.35


def test_electra_pretrains_a_generator_and_a_discriminator_of_the_published_size() -> None:
    made = row(model="ELECTRA-base", seq_len="128")
    small = [layer for layer in made.layers if layer.name.startswith("generator")]
    bert = [layer for layer in made.layers if layer not in small]
    # Hugging Face's ElectraModel of google/electra-base-discriminator, and its two products for every token.
    assert sum(layer.parameters for layer in bert) == 108_891_648 + 768 * 768 + 768 + 768 + 1
    h = 256
    blocks = 12 * (12 * 256**2 + 13 * 256)
    head = h * 768 + 768 + 2 * 768 + 30_522
    assert sum(layer.parameters for layer in small) == 2 * 768 + 768 * h + h + blocks + head
    logits = next(k for layer in small for k in layer.kernels if k.name == "logits")
    assert logits.m == 19
