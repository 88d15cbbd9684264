"""What every model of the catalog keeps, whatever its family."""

from __future__ import annotations

from pathlib import Path

import pytest

from clustersim import model as models
from clustersim.core.errors import ModelError
from clustersim.core.model import Model
from clustersim.core.paths import data_path, shipped

CONFIGS = shipped("data/models", ".json")
# Their blocks differ: the first are dense, every second has a window, or some have no attention.
_MIXED = {
    "deepseek-v2",
    "deepseek-v2-lite",
    "deepseek-v3",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "lfm2-350m",
    "nemotron-3-nano-30b-a3b",
}
"""Models whose blocks are not all alike."""
BLOCKY = [name for name in CONFIGS if name not in {"llama3-405b", *_MIXED}]


@pytest.fixture(scope="module", params=models.catalog())
def model(request: pytest.FixtureRequest) -> Model:
    return models.model(request.param)


def test_tensor_and_layer_names_are_unique(model: Model) -> None:
    tensors = [t.name for layer in model.layers for t in layer.tensors]
    assert len(set(tensors)) == len(tensors)
    assert len({layer.name for layer in model.layers}) == len(model.layers)


def test_tied_tensors_name_an_earlier_tensor_of_their_size(model: Model) -> None:
    seen: dict[str, int] = {}
    for layer in model.layers:
        for tensor in layer.tensors:
            if tensor.tied_to:
                assert seen[tensor.tied_to] == tensor.numel
            seen[tensor.name] = tensor.numel


def test_layers_add_up_and_every_tensor_has_elements(model: Model) -> None:
    sizes = [t.numel for layer in model.layers for t in layer.tensors if not t.tied_to]
    assert min(sizes) > 0
    assert model.parameters == sum(sizes)


def test_kernels_are_priceable(model: Model) -> None:
    for layer in model.layers:
        for k in layer.kernels:
            assert k.kind in {"gemm", "conv", "attention", "scan", "memory", "recurrent"}
            assert min(k.flops, k.backward_flops, k.nbytes, k.backward_nbytes, k.launches, k.backward_launches) >= 0
            assert k.nbytes + k.backward_nbytes > 0
            if k.kind in {"gemm", "conv"}:
                assert min(k.m, k.n, k.k) > 0
                assert k.flops > 0
            if k.kind == "attention":
                assert k.heads * k.head_dim * k.seq > 0


def test_weights_of_a_layer_are_the_weights_of_its_gemms(model: Model) -> None:
    for layer in model.layers:
        if layer.kind in {"block", "conv"}:
            gemms = sum(
                k.n * k.k * k.groups * k.repeat for k in layer.kernels if k.kind in {"gemm", "conv"} and not k.batch
            )
            # Transformer-XL projects its relative positions once a batch: no kernel of a sample.
            own = layer.parameters - sum(t.numel for t in layer.tensors if "r_net" in t.name)
            assert gemms <= own <= gemms * 1.08 + 8 * model.hidden


def test_backward_and_memory_are_positive(model: Model) -> None:
    assert any(kernel.flops + kernel.backward_flops > 0 for layer in model.layers for kernel in layer.kernels)
    assert model.flops_per_sample() > 0
    assert sum(layer.activation_bytes for layer in model.layers) > 0
    assert all(layer.boundary_bytes >= 0 for layer in model.layers)


@pytest.mark.parametrize("name", BLOCKY)
def test_flops_grow_linearly_with_layers(name: str) -> None:
    one, two, four = (models.model(name, layers=n, seq_len=256).flops_per_sample() for n in (1, 2, 4))
    assert four - two == pytest.approx(2 * (two - one))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shipped_config_reads_the_same_by_name_and_by_path(name: str) -> None:
    by_path = models.model(data_path("data") / "models" / f"{name}.json", name=name)
    assert by_path == models.model(name)


def test_names_are_read_without_regard_to_case_dashes_or_organisation() -> None:
    assert models.model("openai-community/GPT2").name == "gpt2"
    assert models.model("ResNet-50").name == "resnet50"
    assert models.model("llama3_8b", seq_len=4096).seq_len == 4096


def test_an_unknown_name_gets_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="unknown model 'lama3-8b'; did you mean 'llama3-8b'"):
        models.model("lama3-8b")
    with pytest.raises(ModelError, match="cannot be read"):
        models.model(tmp_path / "nothing.json")


def test_no_name_is_an_unknown_name_and_not_the_folder_that_we_are_in() -> None:
    for asked in (models.model, models.file, models.config_of):
        with pytest.raises(ModelError, match="unknown model ''"):
            asked("")


def test_an_unknown_name_like_no_other_gets_what_helps() -> None:
    """Of 'nope' it was said "known: open-llama-3b", and of 'foo' all names there are."""
    for name in ("nope", "foo"):
        with pytest.raises(ModelError) as raised:
            models.model(name)
        told = str(raised.value)
        assert "known: " not in told
        assert len(told) < 200
        assert "`clustersim list models` names all, and hf_config takes the path of any other's config.json" in told


def test_an_option_of_the_wrong_kind_of_model_is_refused() -> None:
    with pytest.raises(ModelError, match="unknown model option 'image_size'"):
        models.model("gpt2", image_size=224)
    with pytest.raises(ModelError, match=r"'seq_len'.*'image_size'"):
        models.model("resnet50", seq_len=128)


def test_a_folder_with_a_models_name_is_that_models_config_only_where_it_has_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert models.model("gpt2").parameters == 124_439_808
    (tmp_path / "gpt2" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="model_type"):
        models.model("gpt2")


@pytest.mark.parametrize("kind", ["nllb-moe", "switch_transformers"])
def test_the_config_of_an_encoder_decoder_with_experts_is_named_as_what_it_is(kind):
    with pytest.raises(ModelError, match="is an encoder-decoder"):
        models.from_hf({"model_type": kind})
