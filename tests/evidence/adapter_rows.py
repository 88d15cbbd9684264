"""Published steps of low-rank adapters, and what is predicted of them.

The table is Qwen's own (QwenLM/Qwen README at 03cd81f5, "Profiling of Memory and Speed"): one A100 80 GB, PyTorch 2.0,
8 micro-batches of one sample, layers computed again, rank 64 beside every linear of the blocks with a dropout of 0.05
(finetune.py); queries, keys and values are one linear, and norms and rotation flash-attention's kernels
(modeling_qwen.py). ``LoRA (emb)`` trains embedding and head too. Rows in 4 bits are left out: their kernels are GPTQ's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from clustersim.scenario import Scenario, load
from tests.tables import table_rows

TABLE = Path(__file__).parents[1] / "data" / "measurements" / "adapter_steps.csv"
SIZES = {
    "Qwen-1.8B": {"layers": 24, "d_model": 2048, "heads": 16, "kv_heads": 16, "d_ff": 5504, "vocab": 151936},
    "Qwen-7B": {"vocab": 151936},
    "Qwen-14B": {"layers": 40, "d_model": 5120, "heads": 40, "kv_heads": 40, "d_ff": 13696, "vocab": 152064},
}
"""Of each model's config.json, what is not as in Llama-2-7B's."""


class AdapterRow(msgspec.Struct, frozen=True):
    """A published step: ``memory`` of the GPU [bytes] and ``seconds``, and the scenario of it."""

    model: str
    method: str
    tokens: int
    memory: float
    seconds: float

    def scenario(self) -> Scenario:
        """As the shipped scenario of the 7B has it."""
        saved = ["embed_tokens", "lm_head"] if self.method == "LoRA (emb)" else []
        changes = {
            "model.options": {**SIZES[self.model], "qkv_bias": True, "fused_norms": True},
            "model.seq_len": self.tokens,
            "model.adapter.modules_to_save": saved,
        }
        return load("lora_qwen_7b_1x1_a100", changes)


def adapter_rows() -> Iterator[AdapterRow]:
    """Every row of the table."""
    for row in table_rows(TABLE):
        memory = 1e9 * float(row["memory_gb"])
        yield AdapterRow(row["model"], row["method"], int(row["tokens"]), memory, float(row["step_s"]))
