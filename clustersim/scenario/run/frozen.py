"""What is not played of a split model of which parts are frozen, or that has adapters."""

from __future__ import annotations

from clustersim.core.errors import ScenarioError
from clustersim.scenario import Scenario
from clustersim.scenario.file.splitting import MEGATRON
from clustersim.scenario.run.replicas import sharding_zero
from clustersim.training.parallel import ParallelConfig, Recompute
from clustersim.training.partition import Partition
from clustersim.training.strategies.fsdp_config import FSDPConfig


def check_frozen(scenario: Scenario, parallel: ParallelConfig, repeats: Recompute) -> None:
    """Raise :class:`ScenarioError` for a layout of adapters, a sharding or a recomputation that is not described."""
    adapter = scenario.file.model.adapter
    if isinstance(scenario.config, FSDPConfig) or sharding_zero(scenario) is not None:
        raise ScenarioError(
            "frozen parts and adapters of a split model are played with replicas (strategy ddp, or zero with stage 0 "
            "or 1), not with FSDP or ZeRO stages 2 and 3; use one of those, or leave [parallel] out (at $.strategy)"
        )
    if adapter is not None and parallel.tp > 1:
        if parallel.framework != MEGATRON:
            raise ScenarioError(
                f"tp = {parallel.tp}: how {parallel.framework} divides adapters over tensor-parallel ranks is not "
                "described; Megatron-Bridge's are with framework = 'megatron' (at $.parallel.framework)"
            )
        if adapter.load_in_4bit:
            raise ScenarioError(
                f"tp = {parallel.tp}: linears of 4 bits (bitsandbytes) are not cut by tensor parallelism; use tp = 1, "
                "or leave load_in_4bit out (at $.model.adapter.load_in_4bit)"
            )
    if unknown := sorted(set(repeats.modules) - {"core_attn"}) if repeats.granularity == "selective" else []:
        raise ScenarioError(
            f"recompute of {', '.join(unknown)}: what these keep beside frozen products is not described; recompute "
            "core_attn, or all with recompute_granularity = 'full' (at $.parallel.recompute_modules)"
        )


def check_reached(parts: Partition) -> None:
    """Raise :class:`ScenarioError` where the first stage trains nothing, so that no gradient would come to it."""
    first = next(chunk for stage in parts.stages for chunk in stage.chunks if chunk.stage == 0)
    if not any(layer.trained or layer.expert_trained for layer in first.layers):
        raise ScenarioError(
            f"the first of the pipeline's stages ({first.layers[0].name} to {first.layers[-1].name}) trains nothing: a "
            "pipeline whose backward ends behind it is not played; freeze less, or use fewer stages (at $.parallel.pp)"
        )
