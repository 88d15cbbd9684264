"""NeMo 2's recipes: what those of a module have by default, for pre-training, for tuning and in performance mode.

Figures: data/exchange/recipes/nemo.toml.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from clustersim.core.errors import ScenarioError
from clustersim.core.paths import data_path
from clustersim.core.texts import toml

_TUNED_TOKENS = 2048
_TUNED_SAMPLES = 128
"""Of a step of ``finetune_recipe`` (finetune_default.py of nemo_toolkit 2.5.0)."""


class TunedRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``finetune_recipe`` of a module has otherwise where it trains all parameters."""

    nodes: int = 1
    tp: int = 1
    pp: int = 1


class FastRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``performance_mode`` sets of a module's recipe of pre-training."""

    overlap: bool = False
    deferred: int | None = None
    sixteen: bool = False
    dropping: bool = False
    tp: int | None = None
    ep: int | None = None
    sp: bool | None = None

    def options(self) -> dict[str, Any]:
        """Options as NeMo's YAML has them."""
        listed: dict[str, Any] = {
            "trainer.callbacks.tp_comm_overlap": self.overlap or None,
            "trainer.callbacks.defer_embedding_wgrad_compute": True if self.deferred else None,
            "trainer.callbacks.wgrad_deferral_limit": self.deferred,
            "trainer.plugins.grad_reduce_in_fp32": False if self.sixteen else None,
            "trainer.strategy.tensor_model_parallel_size": self.tp,
            "trainer.strategy.expert_model_parallel_size": self.ep,
            "trainer.strategy.sequence_parallel": self.sp,
        }
        listed |= dropped() if self.dropping else {}
        return {name: value for name, value in listed.items() if value is not None}


def dropped(given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options that ``MegatronTokenDropCallback`` sets, by its arguments (nemo/lightning/pytorch/callbacks)."""
    values = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True} | dict(given or {})
    return {f"model.config.{name}": value for name, value in values.items()}


class NemoRecipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``pretrain_recipe`` of a module has by default: see data/exchange/recipes/nemo.toml."""

    model: str
    seq: int
    batch: int
    micro: int = 1
    nodes: int = 1
    tp: int = 1
    pp: int = 1
    vp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool = False
    counted: bool = False
    again: bool = False
    late: bool = False
    open: bool = False
    tuned: TunedRecipe | None = None
    fast: FastRecipe | None = None

    def of_tuning(self) -> NemoRecipe | None:
        """What ``finetune_recipe`` has; None where the table does not say."""
        if self.tuned is None:
            return None
        return NemoRecipe(
            self.model,
            _TUNED_TOKENS,
            _TUNED_SAMPLES,
            nodes=self.tuned.nodes,
            tp=self.tuned.tp,
            pp=self.tuned.pp,
            etp=self.etp,
            late=True,
            open=self.open,
        )

    def options(self) -> dict[str, Any]:
        """Options as NeMo's YAML has them."""
        strategy = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "sequence_parallel": self.sp,
            "account_for_embedding_in_pipeline_split": self.counted,
            "account_for_loss_in_pipeline_split": self.counted,
            "ddp.overlap_grad_reduce": not self.late,
            "ddp.overlap_param_gather": not self.late,
        }
        listed: dict[str, Any] = {f"trainer.strategy.{name}": value for name, value in strategy.items()}
        listed |= {"model.config._target_": f"llm.{self.model}", "mixed_precision": "bf16_mixed"}
        listed |= {"trainer.num_nodes": self.nodes, "trainer.devices": 8, "trainer.plugins.grad_reduce_in_fp32": True}
        listed |= {
            "data.seq_length": self.seq,
            "data.global_batch_size": self.batch,
            "data.micro_batch_size": self.micro,
        }
        listed["optim.config.use_distributed_optimizer"] = True
        if self.again:
            again = {"granularity": "full", "method": "uniform", "num_layers": 1}
            listed |= {f"model.config.recompute_{name}": value for name, value in again.items()}
        return {name: value for name, value in listed.items() if value is not None}


@lru_cache(maxsize=1)
def recipes() -> dict[str, NemoRecipe]:
    """Recipes by the names of their modules."""
    path = data_path("data") / "exchange" / "recipes" / "nemo.toml"
    table = toml(path.read_text("utf-8"), str(path), ScenarioError)
    return {name: msgspec.convert(row, NemoRecipe) for name, row in table.items()}
