"""Tracing a module: its FLOPs are FlopCounterMode's, its peaks MemTracker's, its parameters its own; errors name lines.

What a CPU does and a GPU does not is left out: its fused attention has no formula in torch's counter (it is given
torch's own of the CUDA kernel), and autocast on it leaves GPT-2's powers in 16 bits.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch_peaks

from clustersim.app.cli import cli
from clustersim.core.device import device
from clustersim.core.errors import ClusterSimError, ModelError
from clustersim.core.model import AUTOCAST, FULL, HALF
from clustersim.model import from_hf, model
from clustersim.model.seconds import Execution, step_cost
from clustersim.model.seconds.memory_bound import moves_fp32
from clustersim.model.traced import read_model_file, read_traced
from clustersim.training.memory import Training, memory

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore:Module is None:UserWarning"),
    pytest.mark.filterwarnings("ignore:torchvision is installed"),
]
FOLDER = Path(__file__).parent / "data" / "traced"
CONFIGS = {
    "llama": {
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 500,
    },
    "gpt2": {"n_embd": 128, "n_head": 4, "n_layer": 3, "n_positions": 64, "vocab_size": 500}
    | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    "qwen3_moe": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 500,
    },
}
BATCH, TOKENS = 4, 64
RUNS = {
    HALF: Execution(dtype="bf16", param_dtype="bf16"),
    FULL: Execution(dtype="fp32"),
}
"""How a model runs in types of its file."""
EVERY_PEAK = [
    case for case in torch_peaks.CASES if case[0] not in ("qwen3", "bert") and case[:2] != ("gpt2", "autocast")
]
PEAKS = [case for case in torch_peaks.AGAIN if case in EVERY_PEAK] + [
    ("llama", "fp32", "eager", "full"),
    ("grouped", "bf16", "sdpa", "none"),
    ("opt", "fp32", "eager", "full"),
    ("gpt2", "bf16", "sdpa", "none"),
]
"""What is traced unless ``--every-peak`` is given: each takes seconds."""


def pytest_generate_tests(metafunc):
    """The peaks that are looked at."""
    if "peak_case" in metafunc.fixturenames:
        cases = EVERY_PEAK if metafunc.config.getoption("--every-peak") else PEAKS
        metafunc.parametrize("peak_case", cases, ids="-".join)


@pytest.fixture(autouse=True, scope="module")
def torch_is_there():
    """Everything here needs it."""
    pytest.importorskip("torch", reason="needs torch")


def trace(words, inputs, *, types=("fp32",), config=None, loss="", **arguments):
    """A file of what the command would trace."""
    from clustersim.model.tracing import trace_model
    from clustersim.model.tracing.inputs import read_input
    from clustersim.model.tracing.loading import Target, target_of

    target = Target(*target_of(words), config, arguments)
    return trace_model(target, tuple(map(read_input, inputs)), types, loss=loss)


def read(file, folder, types=FULL):
    """A file's model, as it is read back."""
    import msgspec

    path = folder / "x.model.json"
    path.write_bytes(msgspec.json.encode(file))
    return read_traced(path, types)


def flops(traced):
    """Of a sample, as FlopCounterMode counts: attention's square in full."""
    return sum(
        (k.flops + k.backward_flops) * (2 if k.kind == "attention" and k.causal else 1)
        for layer in traced.layers
        for k in layer.kernels
    )


def counted(run):
    """FLOPs of a step by torch's own counter."""
    import torch
    from torch.utils import flop_counter

    def ahead(q, k, v, *_, out_shape=None, **__):
        return flop_counter.sdpa_flop_count(q, k, v)

    def back(gradient, q, k, v, *_, out_shape=None, **__):
        return flop_counter.sdpa_backward_flop_count(gradient, q, k, v)

    aten = torch.ops.aten
    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: ahead,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: back,
    }
    with flop_counter.FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        run()
    return counter.get_total_flops()


def small_gpt(**sizes):
    sys.path.insert(0, str(FOLDER))
    try:
        import small_gpt as module
    finally:
        sys.path.remove(str(FOLDER))
    return module.build(**sizes)


@pytest.fixture
def hugging_face():
    return torch_peaks.hugging_face()


@functools.cache
def config_file(kind, folder):
    file = Path(folder) / f"{kind}.json"
    file.write_text(json.dumps({"model_type": kind} | CONFIGS[kind]))
    return file


def hf_trace(kind, folder, types=("fp32",), tokens=TOKENS):
    file = config_file(kind, str(folder))
    return trace("transformers:AutoModelForCausalLM", [f"tokens[{BATCH}, {tokens}]"], types=types, config=file)


def test_the_file_in_the_tree_is_what_is_traced_today():
    words = f"{FOLDER / 'small_gpt.py'}:build"
    new = trace(words, ["tokens[4, 64]"], types=("bf16", "autocast", "fp32"))
    old = read_model_file(FOLDER / "small_gpt.model.json")
    assert new.layers == old.layers
    assert (new.works[0].keys(), new.chained, new.seq_len) == (old.works[0].keys(), old.chained, old.seq_len)


@pytest.mark.parametrize("layers", [1, 3])
def test_parameters_and_flops_of_a_module_are_its_own(tmp_path, layers):
    import torch

    module = small_gpt(layers=layers)
    words = torch.zeros(BATCH, 64, dtype=torch.long)
    file = trace(f"{FOLDER / 'small_gpt.py'}:build", [f"tokens[{BATCH}, 64]"], types=("bf16", "fp32"), layers=layers)
    for types in (HALF, FULL):
        traced = read(file, tmp_path, types)
        assert traced.parameters == sum(parameter.numel() for parameter in module.parameters())
        names = [tensor.name for layer in traced.layers for tensor in layer.tensors]
        assert names == [name for name, _ in module.named_parameters(remove_duplicate=False)]
        assert BATCH * flops(traced) == counted(lambda: module(words).backward())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_parameters_and_flops_of_hugging_faces_models_are_their_own(hugging_face, tmp_path, kind):
    import torch

    config = hugging_face.AutoConfig.for_model(kind, **CONFIGS[kind])
    module = hugging_face.AutoModelForCausalLM.from_config(config)
    words = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    traced = read(hf_trace(kind, tmp_path), tmp_path)
    assert traced.parameters == sum(parameter.numel() for parameter in module.parameters())
    step = functools.partial(module, input_ids=words, labels=words, use_cache=False)
    assert BATCH * flops(traced) == counted(lambda: step().loss.backward())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_family_written_by_hand_is_its_trace(hugging_face, tmp_path, kind):
    """FLOPs and parameters to the last one, and the seconds of a step's kernels within 1 %; the rest is the gradient of
    a whole table of words, which does not grow with the samples."""
    llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    wide = llama if kind == "llama" else {"n_embd": 4096, "n_head": 32}
    longer = {"vocab_size": 32000} | ({"n_positions": 2048} if kind == "gpt2" else {})
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind} | CONFIGS[kind] | wide | longer))
    words = [f"tokens[{BATCH}, 2048]"]
    traced = trace("transformers:AutoModelForCausalLM", words, types=("bf16", "autocast", "fp32"), config=file)
    by_hand = from_hf(file, seq_len=2048, attention="flash", implementation="eager")
    for types, how in RUNS.items():
        by_trace = read(traced, tmp_path, types)
        assert by_trace.parameters == by_hand.parameters
        assert by_trace.flops_per_sample() == by_hand.flops_per_sample()
        costs = [step_cost(m, device("A100-SXM4-80GB"), BATCH, how) for m in (by_trace, by_hand)]
        seconds = [float((cost.forward + cost.backward).sum()) for cost in costs]
        assert seconds[0] == pytest.approx(seconds[1], rel=0.01)
    for types in (HALF, AUTOCAST, FULL):
        nbytes = [elementwise_bytes(m.layers[1].kernels, types) for m in (read(traced, tmp_path, types), by_hand)]
        assert nbytes[0] == pytest.approx(nbytes[1], rel=0.02)


def elementwise_bytes(kernels, types):
    """Bytes that bandwidth-bound kernels of a block move, forward and backward together."""
    total = 0.0
    for kernel in kernels:
        wide = types == FULL or (types == AUTOCAST and moves_fp32(kernel.name))
        usual = (4.0 if wide else 2.0,) * 3
        if kernel.kind == "memory":
            total += kernel.nbytes * (kernel.element or usual)[types]
            total += kernel.backward_nbytes * (kernel.backward_element or usual)[types]
    return total


@pytest.mark.slow
def test_a_peak_is_torchs_own_within_three_percent(hugging_face, tmp_path, peak_case):
    family, types, attention, checkpointing = peak_case
    config_class, model_class, fields = torch_peaks.FAMILIES[family]
    file = tmp_path / "config.json"
    config = getattr(hugging_face, config_class)(**fields)
    file.write_text(json.dumps({"model_type": config.model_type, "attn_implementation": attention} | fields))
    inputs = [f"tokens[{torch_peaks.BATCH}, {torch_peaks.TOKENS}]"]
    traced = trace(f"transformers:{model_class}", inputs, types=(types,), config=file)
    run = Training(
        micro_batch_size=torch_peaks.BATCH,
        dtype="fp32" if types == "fp32" else "bf16",
        param_dtype="bf16" if types == "bf16" else "fp32",
        activation_checkpointing=checkpointing,
    )
    place = {"bf16": HALF, "autocast": AUTOCAST, "fp32": FULL}[types]
    peak = torch_peaks.kept()[peak_case]
    assert memory(read(traced, tmp_path, place), run).allocated == pytest.approx(peak, rel=0.03)


def test_experts_are_grouped_products_of_all_tokens(hugging_face, tmp_path):
    traced = read(hf_trace("qwen3_moe", tmp_path, types=()), tmp_path, HALF)
    by_hand = from_hf(config_file("qwen3_moe", str(tmp_path)), seq_len=TOKENS)
    assert (traced.parameters, traced.n_blocks) == (by_hand.parameters, 2)
    assert traced.flops_per_sample() == pytest.approx(by_hand.flops_per_sample(), rel=1e-6)
    assert any(kernel.repeat == 8 for kernel in traced.layers[1].kernels)


LIBRARIES: list[object] = []
"""Operators live as long as the library that defines them."""


@pytest.fixture
def timm():
    """timm; a torchvision of another torch, which it needs, gets the operators that its import asks for."""
    import torch

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision" and not sys.modules[name]]:
        del sys.modules[name]  # another test has set it aside
    if find_spec("timm") is None or find_spec("torchvision") is None:
        pytest.skip("needs timm")
    try:
        import torchvision  # noqa: F401
    except Exception:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        LIBRARIES.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            LIBRARIES[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        import timm as library
    except Exception:
        pytest.skip("needs timm")
    return library


@pytest.mark.slow
@pytest.mark.parametrize(("name", "blocks"), [("vit_tiny_patch16_224", 12), ("resnet18", 8)])
def test_networks_of_timm_have_their_parameters_flops_and_blocks(timm, tmp_path, name, blocks):
    import torch

    module = timm.create_model(name)
    traced = read(trace(f"timm:{name}", ["images[2, 3, 224, 224]"]), tmp_path)
    assert traced.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert traced.n_blocks == blocks
    images = torch.zeros(2, 3, 224, 224)
    aims = torch.zeros(2, dtype=torch.long)
    loss = torch.nn.functional.cross_entropy
    assert 2 * flops(traced) == counted(lambda: loss(module(images), aims).backward())


MODULES = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x)


class Branches(Base):
    def forward(self, x):
        y = self.a(x)
        if y.sum() > 0:  # line 19
            y = y * 2
        return y


class Picks(Base):
    def forward(self, x):
        y = self.a(x)
        return y[y > 0].sum()  # line 27


class Reshapes(Base):
    def forward(self, x):
        return self.a(x).view(3, 5)  # line 32


class Frozen(Base):
    def __init__(self):
        super().__init__()
        self.a.weight.requires_grad_(False)


class Reads(Base):
    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]  # line 44


class Leaves(Base):
    def forward(self, x):
        raise SystemExit(3)  # line 49


class Checkpointed(Base):
    def forward(self, x):
        return checkpoint(self.a, x, use_reentrant=False) + checkpoint(self.a, x, use_reentrant=True)


class Twice(Base):
    def forward(self, x):
        return self.a(self.a(x))


class Unused(Base):
    def __init__(self):
        super().__init__()
        self.b = nn.Linear(8, 8)


class Synced(Base):
    def __init__(self):
        super().__init__()
        self.norm = nn.SyncBatchNorm(16)

    def forward(self, x):
        return self.a(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.cells(x)[0]


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))

    def forward(self, x):
        first = self.blocks[0](x)
        second = self.blocks[1](first)
        return self.blocks[3](self.blocks[2](second) + first)


class Flexes(Base):
    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention

        heads = self.a(x)[:, None]
        return flex_attention(heads, heads, heads).sum()


def number():
    return 5
"""


@pytest.fixture
def modules(tmp_path):
    file = tmp_path / "modules.py"
    file.write_text(MODULES)
    return file


WRONG = {
    "Branches": ["modules.py:19:", "if y.sum() > 0", "depends on the numbers", "torch.where"],
    "Picks": ["modules.py:27:", "return y[y > 0].sum()", "depends on the numbers"],
    "Reshapes": ["modules.py:32:", "RuntimeError", "floats[4, 16, 8]", "shape '[3, 5]' is invalid"],
    "Frozen": ["frozen", "a.weight", "requires_grad_(True)"],
    "Reads": ["modules.py:44:", "rate.item()", "depends on the numbers"],
    "Leaves": ["modules.py:49:", "ended the process"],
    "Flexes": ["flex_attention(heads, heads, heads)", "FlexAttention is not traced", "scaled_dot_product_attention"],
    "number": ["returns 5", "torch.nn.Module"],
    "Brnches": ["no 'Brnches'", "did you mean 'Branches'?"],
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_traced_names_the_line_and_what_to_do(modules, name):
    with pytest.raises(ModelError) as error:
        trace(f"{modules}:{name}", ["floats[4, 16, 8]"])
    for part in WRONG[name]:
        assert part in str(error.value)


def test_a_missing_import_and_a_syntax_error_are_said_of_their_line(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("\nimport no_such_thing\n")
    with pytest.raises(ModelError, match=r"broken\.py:2: .*no module 'no_such_thing' is installed; pip install"):
        trace(f"{file}:build", ["floats[4, 8]"])
    file.write_text("def build(:\n")
    with pytest.raises(ModelError, match=r"broken\.py:1: is not Python"):
        trace(f"{file}:build", ["floats[4, 8]"])


def test_nothing_from_the_internet_is_executed(hugging_face, tmp_path):
    from clustersim.model.tracing.loading import target_of

    with pytest.raises(ModelError, match="executed from the internet"):
        target_of("https://x.org/my.py:build")
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}))
    with pytest.raises(ModelError, match="only with --trust"):
        trace("transformers:AutoModelForCausalLM", ["tokens[1, 8]"], config=config)
    assert not (tmp_path / "ran").exists()


NOTED = {
    "Checkpointed": "activation checkpointing",
    "Unused": "b.weight",
    "Recurrent": "cells are traced one by one",
    "Base": "it returns no loss",
    "Synced": "SyncBatchNorm exchanges",
}


@pytest.mark.parametrize("name", NOTED)
def test_what_is_assumed_is_noted(modules, name):
    file = trace(f"{modules}:{name}", ["floats[4, 16, 8]"])
    assert any(NOTED[name] in note for note in file.notes)


def test_checkpoints_of_the_module_leave_no_trace(modules, tmp_path):
    traced = read(trace(f"{modules}:Checkpointed", ["floats[4, 16, 8]"]), tmp_path)
    assert flops(traced) == 2 * (2 + 2) * 16 * 8 * 8  # two products forward, and two weight gradients


def test_a_skip_over_blocks_is_no_chain(modules):
    assert not trace(f"{modules}:Skips", ["floats[4, 8]"]).chained
    assert trace(f"{modules}:Twice", ["floats[4, 8]"]).chained


def test_bytes_kept_are_those_that_autograd_packs(modules, tmp_path):
    kept = sum(
        k.kept_bytes(FULL)
        for layer in read(trace(f"{modules}:Twice", ["floats[4, 16, 8]"]), tmp_path).layers
        for k in layer.kernels
    )
    assert kept == 2 * 16 * 8 * 4 + 16 * 8 * 4  # inputs of both products, and an output that nobody gave away


def test_the_command_writes_a_file_or_nothing(modules, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["trace-model", f"{modules}:Base", "--input", "floats[4, 8]", "--types", "fp32"]
    cli.main(args=words, standalone_mode=False)
    assert model("modules.model.json").parameters == 72
    assert 'file = "modules.model.json"' in capsys.readouterr().out
    foreign = tmp_path / "foreign.model.json"
    foreign.write_text("mine")
    with pytest.raises(ClusterSimError, match="clustersim did not write it"):
        cli.main(args=[*words, "--out", str(foreign)], standalone_mode=False)
    assert foreign.read_text() == "mine"
    with pytest.raises(ModelError):
        cli.main(
            args=["trace-model", f"{modules}:Picks", "--input", "floats[4, 8]", "--out", "new.model.json"],
            standalone_mode=False,
        )
    assert not [path for path in tmp_path.iterdir() if "new" in path.name or path.name.startswith(".")]
    gc.collect()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("tokens", "KIND[SAMPLES, SIZE, ...]"),
        ("tokens[4, x]", "whole numbers above zero"),
        ("tokens[0]", "whole numbers above zero"),
        ("token[4]", "did you mean 'tokens'?"),
        ("tokens[99999999, 99999999]", "more than any batch"),
    ],
)
def test_an_input_that_cannot_be_is_said(text, part):
    from clustersim.model.tracing.inputs import read_input

    with pytest.raises(ModelError, match=r"--input") as error:
        read_input(text)
    assert part in str(error.value)


def test_a_torch_that_lacks_what_a_trace_reads_is_said(modules, monkeypatch):
    import torch

    monkeypatch.delattr(torch.autograd, "_get_sequence_nr")
    with pytest.raises(ClusterSimError, match=r"torch .*: has no torch\.autograd\._get_sequence_nr.*2\.13"):
        cli.main(args=["trace-model", f"{modules}:Base", "--input", "floats[4, 8]"], standalone_mode=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["olmo2", "gemma3_text", "qwen3"])
def test_blocks_of_other_norms_are_their_traces(hugging_face, tmp_path, kind):
    """Norms whose weight multiplies in fp32, and OLMo's rotation in it: seconds of a block in bf16 within 1 %."""
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    more = {"num_hidden_layers": 2, "vocab_size": 4000} | ({} if kind == "olmo2" else {"head_dim": 128})
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind} | sizes | more))
    traced = trace("transformers:AutoModelForCausalLM", [f"tokens[{BATCH}, 2048]"], types=("bf16",), config=file)
    models = (read(traced, tmp_path, HALF), from_hf(file, seq_len=2048, attention="flash", implementation="eager"))
    costs = [step_cost(m, device("A100-SXM4-80GB"), BATCH, RUNS[HALF]) for m in models]
    seconds = [float(cost.forward[1] + cost.backward[1]) for cost in costs]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.01)
