"""What the published recipe of a measured hybrid-parallel step sets, where its row names it and not the setting.

NVIDIA's performance tables say model, GPU, degrees and release; layout, dispatcher and what is recomputed stand in the
scripts of that release. Nothing here is fitted. What a row itself says goes before it.

Left out of release 25.09's DeepSeek-V3: ``overlap_moe_expert_parallel_comm``, which takes minutes to play here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from clustersim.calibration.step_rows import Row
from clustersim.texts import Table


@dataclass(frozen=True)
class Recipe:
    """What one recipe sets.

    Parameters
    ----------
    words : pattern of a row's ``model framework version gpu``, in lower case. source : where it can be read.
    parallel : of ``[parallel]``. layouts : its ``layout`` by the number of chunks of the whole pipeline, for a model of
    ``layers``. mtp : blocks that predict further tokens.
    """

    words: str
    source: str
    parallel: Table = field(default_factory=dict)
    layouts: Mapping[int, str] = field(default_factory=dict)
    layers: int = 0
    mtp: int = 0

    def of(self, chunks: int, layers: int) -> Table:
        """The fields of ``[parallel]`` it sets in a pipeline of so many chunks, for a model of so many layers."""
        laid = layers == self.layers and chunks in self.layouts
        return {**self.parallel, **({"layout": self.layouts[chunks]} if laid else {})}


_DEEPSEEK = {4: "Et*16|(t*16|)*2t*13mL", 8: "Et*8|(t*8|)*6t*5mL", 16: "Et*4|(t*4|)*14tmL", 32: "Et|(tt|)*30mL"}
_UP = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge scripts/performance/configs/"

RECIPES = (
    Recipe(
        r"^deepseek-?v3 nemo",
        "NVIDIA/NeMo scripts/performance/llm/pretrain_deepseek_v3.py: one layer less on the first stage and two on the "
        "last, which has the predicted further token (recipes/deepseek_v3.py: use_mtp), MegatronTokenDropCallback of "
        "nemo/lightning/pytorch/callbacks/moe_token_drop.py: capacity factor 1, padded",
        {"capacity_factor": 1.0, "pad_to_capacity": True},
        {4: "Et*15|(t*16|)*2t*14mL", 8: "Et*7|(t*8|)*6t*6mL", 16: "Et*3|(t*4|)*14ttmL"},
        61, 1,
    ),
    Recipe(
        r"^deepseek-?v3 megatron-bridge .*h[128]00",
        f"{_BRIDGE}deepseek/deepseek_llm_pretrain.py@01328424: DeepEP, gradients reduced at the end; layouts of "
        "src/megatron/bridge/recipes/deepseek/deepseek_v3.py",
        {
            **_UP, "recompute_modules": ["mla_up_proj", "mlp"], "dispatcher": "flex", "overlap_grad_reduce": False,
            "overlap_param_gather": False,
        },
        _DEEPSEEK,
        61, 1,
    ),
    Recipe(
        r"^deepseek-?v3 megatron-bridge 25\.",
        f"{_BRIDGE}deepseek/deepseek_llm_pretrain.py@01328424: Blackwell without DeepEP",
        _UP, _DEEPSEEK, 61, 1,
    ),
    Recipe(
        r"^deepseek-?v3 megatron-bridge",
        f"{_BRIDGE}deepseek/deepseek_workload_base_configs.py@04264182: Blackwell with HybridEP",
        {**_UP, "dispatcher": "flex", "flex_backend": "hybridep"}, _DEEPSEEK, 61, 1,
    ),
    Recipe(
        r"^qwen3.* megatron-bridge .*gb[23]00",
        f"{_BRIDGE}qwen/qwen3_workload_base_configs.py@01b2977e: HybridEP on racks",
        {"dispatcher": "flex", "flex_backend": "hybridep"},
    ),
    Recipe(
        r"^qwen3-30b.* megatron-bridge",
        f"{_BRIDGE}qwen/qwen3_workload_base_configs.py@01b2977e: HybridEP everywhere",
        {"dispatcher": "flex", "flex_backend": "hybridep"},
    ),
)  # fmt: skip
"""Known recipes; the first whose words a row holds is its."""


def recipe_of(row: Row) -> Recipe | None:
    """The recipe a row names; None where it names none that is known."""
    named = " ".join(row.get(column, "") for column in ("model", "framework", "version", "gpu")).lower()
    return next((recipe for recipe in RECIPES if re.search(recipe.words, named)), None)
