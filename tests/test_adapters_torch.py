"""What adapters and frozen parts leave of a step, beside torch itself: parameters, FLOPs, and the peak of memory.

The adapters are written here as PEFT writes them (peft/tuners/lora/layer.py), beside Hugging Face's models under
FakeTensorMode: FlopCounterMode counts products, MemTracker what is held.
"""

from __future__ import annotations

import gc
import re
from types import SimpleNamespace
from typing import Any

import pytest
from torch_peaks import BATCH, FAMILIES, TOKENS, hugging_face

from clustersim.core.model import Model
from clustersim.model import from_hf
from clustersim.model.adapter_setting import Adapter
from clustersim.model.adapters import Trained, with_trained
from clustersim.training.memory import Training, memory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore:Module is None:UserWarning"),
]

RANK = 8
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CASES = [
    ("grouped", "bf16", LINEARS, "full", False),
    ("qwen3", "bf16", ("o_proj",), "none", False),
    ("llama", "autocast", LINEARS, "none", False),
    ("opt", "fp32", ("fc1",), "none", False),
    ("llama", "bf16", LINEARS, "none", True),
]
"""Model, types, targets, checkpointing, and whether adapters are fp32 beside 16-bit weights (PEFT's default)."""


@pytest.fixture(autouse=True)
def frozen_parameters_have_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """MemTracker hangs a hook on every parameter, which torch refuses of a frozen one."""
    hugging_face()
    import torch

    def guarded(original: Any) -> Any:
        return lambda tensor, hook: (
            original(tensor, hook) if tensor.requires_grad else SimpleNamespace(remove=lambda: None)
        )

    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        monkeypatch.setattr(torch.Tensor, name, guarded(getattr(torch.Tensor, name)))


def adapted(model: Any, targets: tuple[str, ...], dtype: Any) -> Any:
    """The model with everything frozen and an adapter beside each target."""
    import torch

    class Lora(torch.nn.Module):
        """``W x + B A x``."""

        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base = base
            weight = base.weight
            n_out, n_in = weight.shape if isinstance(base, torch.nn.Linear) else weight.shape[::-1]
            self.lora_A = torch.nn.Linear(n_in, RANK, bias=False, dtype=dtype)
            self.lora_B = torch.nn.Linear(RANK, n_out, bias=False, dtype=dtype)

        def forward(self, x: Any) -> Any:
            result = self.base(x)
            return result + self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * 2.0

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, module in [*model.named_modules()]:
        if name.rpartition(".")[2] in targets:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], Lora(module))
    return model


def built(family: str, types: str, checkpointing: str) -> Any:
    """Hugging Face's model."""
    transformers = hugging_face()
    import torch

    config_class, model_class, fields = FAMILIES[family]
    config = getattr(transformers, config_class)(**fields)
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16 if types == "bf16" else torch.float32)
    try:
        model = getattr(transformers, model_class)(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.train()
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def tracked(model: Any, autocast: bool, more: dict[str, Any]) -> tuple[int, int]:
    """FLOPs of a step's forward and backward, and bytes at the peak of the second step of AdamW."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.utils.flop_counter import FlopCounterMode

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=True)
    words = torch.randint(0, 100, (BATCH, TOKENS))

    def passes() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(input_ids=words, labels=words, **more).loss
        loss.backward()

    counter = FlopCounterMode(display=False)
    with counter:
        passes()
    optimizer.zero_grad()
    gc.collect()
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        del parameter
        gc.collect()
        tracker._peak_mem.clear()
        tracker._peak_mem_snap.clear()
        passes()
        optimizer.step()
        peak = tracker.get_tracker_snapshot("peak")
    return counter.get_total_flops(), int(next(iter(peak.values()))["Total"])


def described(family: str, trained: Trained) -> Model:
    """The same model as it is said of here."""
    transformers = hugging_face()
    config_class, _, fields = FAMILIES[family]
    config = getattr(transformers, config_class)(**fields).to_dict()
    return with_trained(from_hf(config, seq_len=TOKENS, attention="flash", implementation="eager"), trained)


def flops(model: Model) -> float:
    """As FlopCounterMode counts, which knows no fused attention of a CPU."""
    kernels = [kernel for layer in model.layers for kernel in layer.kernels if kernel.kind == "gemm"]
    return BATCH * sum(kernel.flops + kernel.backward_flops for kernel in kernels)


def compared(family: str, types: str, trained: Trained, model: Any, checkpointing: str) -> None:
    """Hold parameters exactly, FLOPs within a thousandth (of no checkpointing) and the peak within 3 %."""
    mine = described(family, trained)
    assert mine.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    # A tied embedding is one parameter.
    assert mine.parameters == sum(p.numel() for p in model.parameters())
    more = {"use_cache": False} if family == "gpt2" else {}
    wide = trained.wide
    counted, peak = tracked(model, types == "autocast" or wide, more)
    if checkpointing == "none":
        assert flops(mine) == pytest.approx(counted, rel=1e-3)
    run = Training(
        micro_batch_size=BATCH,
        dtype="fp32" if types == "fp32" else "bf16",
        param_dtype="bf16" if types == "bf16" else "fp32",
        trained_dtype="bf16" if types == "bf16" and not wide else "fp32",
        activation_checkpointing=checkpointing,
    )
    assert memory(mine, run).allocated == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{len(case[2])}-{case[3]}-{case[4]}")
def test_adapters_are_counted_and_kept_as_torch_has_them(case: tuple[str, str, tuple[str, ...], str, bool]) -> None:
    family, types, targets, checkpointing, wide = case
    hugging_face()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype = torch.bfloat16 if types == "bf16" and not wide else torch.float32
    trained = Trained((), Adapter(rank=RANK, target_modules=targets), 2.0 if types == "bf16" else 4.0, wide)
    with FakeTensorMode():
        compared(family, types, trained, adapted(built(family, types, checkpointing), targets, dtype), checkpointing)


@pytest.mark.parametrize(
    "patterns",
    [
        ("model.embed_tokens", "model.layers.0"),
        ("model.layers.0.mlp", "*.q_proj.weight"),
    ],
    ids="-".join,
)
def test_frozen_parts_are_counted_and_kept_as_torch_has_them(patterns: tuple[str, ...]) -> None:
    hugging_face()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = built("llama", "bf16", "none")
        for name, parameter in model.named_parameters():
            frozen = any(re.match(pattern.replace(".", r"\.").replace("*", ".*"), name) for pattern in patterns)
            parameter.requires_grad_(not frozen)
        compared("llama", "bf16", Trained(patterns, None, 2.0), model, "none")
