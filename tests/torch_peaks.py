"""Peak memory of a step of Hugging Face's models by torch's own MemTracker, under FakeTensorMode, kept as a table.

    python tests/torch_peaks.py

writes ``tests/data/torch_peaks.csv`` anew (two minutes; needs torch and transformers). So the table can be met where
neither is installed; ``tests/test_bytes_torch.py`` asks torch again for some of its rows.

Left out is what a CPU does and a GPU does not: dropout keeps a mask of the tensor's type there, attention with dropout
is no fused kernel, and autocast leaves BERT's softmax in 16 bits. Powers, which CUDA's autocast takes in fp32 and the
CPU's does not (aten/src/ATen/autocast_mode.h, ``AT_FORALL_FP32``), are cast as a GPU casts them.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from clustersim.model import from_hf
from clustersim.training.memory import Training, memory

Case: TypeAlias = tuple[str, str, str, str]
"""Family, types, attention and checkpointing."""

TABLE = Path(__file__).parent / "data" / "torch_peaks.csv"
COLUMNS = ("family", "types", "attention", "checkpointing", "bytes", "torch")
BATCH = 4
TOKENS = 512
SHARED = {
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 4000,
    "max_position_embeddings": 1024,
}
LLAMA = SHARED | {"intermediate_size": 1376, "num_key_value_heads": 8}
GPT2 = {"n_embd": 512, "n_head": 8, "n_layer": 2, "n_positions": 1024, "vocab_size": 4000}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "grouped": ("LlamaConfig", "LlamaForCausalLM", LLAMA | {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", LLAMA | {"num_key_value_heads": 2, "head_dim": 64}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2 | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        SHARED | {"ffn_dim": 2048, "word_embed_proj_dim": 512, "dropout": 0.0},
    ),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        SHARED | {"intermediate_size": 2048, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}
CASES = [
    (family, types, attention, checkpointing)
    for family in FAMILIES
    for types in ("bf16", "autocast", "fp32")
    for attention in ("eager", "sdpa")
    for checkpointing in ("none", "full")
    if (family, types, attention) != ("bert", "autocast", "eager")
]
AGAIN = [
    ("llama", "bf16", "eager", "none"),
    ("llama", "autocast", "sdpa", "full"),
    ("grouped", "fp32", "sdpa", "none"),
    ("grouped", "autocast", "eager", "full"),
    ("qwen3", "bf16", "sdpa", "full"),
    ("qwen3", "fp32", "eager", "none"),
    ("gpt2", "bf16", "eager", "full"),
    ("gpt2", "fp32", "sdpa", "none"),
    ("opt", "autocast", "eager", "none"),
    ("opt", "bf16", "sdpa", "full"),
    ("bert", "fp32", "eager", "full"),
    ("bert", "autocast", "sdpa", "none"),
]
"""Cases in which every two words of different columns that can meet do so at least once, or nearly: torch is asked."""


@functools.cache
def hugging_face() -> Any:
    """transformers without torchvision, of which a build for another torch fails as it is imported."""
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("torch.distributed._tools.mem_tracker", reason="needs torch's MemTracker")
    if "torchvision" not in sys.modules:
        try:
            import torchvision  # noqa: F401
        except Exception:
            sys.modules["torchvision"] = None  # type: ignore[assignment]
    found = pytest.importorskip("transformers", reason="needs transformers")
    found.logging.set_verbosity_error()
    return found


def predicted(family: str, types: str, attention: str, checkpointing: str) -> float:
    """What is said of it here."""
    config_class, _, fields = FAMILIES[family]
    config = {"model_type": config_class.removesuffix("Config").lower(), **fields}
    kernels = "eager" if attention == "eager" else "flash"
    head = {"head": "mlm"} if family == "bert" else {}
    model = from_hf(config, seq_len=TOKENS, attention=kernels, implementation="eager", **head)
    run = Training(
        micro_batch_size=BATCH,
        dtype="fp32" if types == "fp32" else "bf16",
        param_dtype="bf16" if types == "bf16" else "fp32",
        activation_checkpointing=checkpointing,
    )
    return memory(model, run).allocated


@contextlib.contextmanager
def powers_of_a_gpu() -> Iterator[None]:
    """Where a CPU's autocast is on, in a repeated forward too, powers are in fp32 as CUDA's has them."""
    import torch

    power = torch.pow

    def wide(base: Any, exponent: float) -> Any:
        return power(base.float() if torch.is_autocast_enabled("cpu") else base, exponent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "pow", wide)
        yield


def tracked(family: str, types: str, attention: str, checkpointing: str) -> int:
    """Bytes at the peak of the second step of AdamW."""
    transformers = hugging_face()
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    gc.collect()  # what an earlier case left would be counted
    config_class, model_class, fields = FAMILIES[family]
    config = getattr(transformers, config_class)(**fields)
    config._attn_implementation = attention
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16 if types == "bf16" else torch.float32)
        try:
            model = getattr(transformers, model_class)(config)
        finally:
            torch.set_default_dtype(torch.float32)
        model.train()
        if checkpointing == "full":
            model.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        words = torch.randint(0, 100, (BATCH, TOKENS))
        # Of GPT-2 the cache of a generation would be kept; without it a CPU copies grouped keys that have strides.
        more = {"use_cache": False} if family == "gpt2" else {}
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker, powers_of_a_gpu():
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
            del parameter
            gc.collect()
            tracker._peak_mem.clear()
            tracker._peak_mem_snap.clear()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=types == "autocast"):
                loss = model(input_ids=words, labels=words, **more).loss
            loss.backward()
            del loss
            optimizer.step()
            peak = tracker.get_tracker_snapshot("peak")
    return int(next(iter(peak.values()))["Total"])


@functools.cache
def kept() -> dict[Case, int]:
    """The table: bytes of each case."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["family"], row["types"], row["attention"], row["checkpointing"]): int(row["bytes"]) for row in rows}


def main() -> None:
    """Ask torch for every case, and keep what it says."""
    import torch

    rows = [(*case, tracked(*case), torch.__version__.partition("+")[0]) for case in CASES]
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
