"""What a plan's space leaves out of what is usual: its best is the fastest of what was tried, and no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from clustersim.core.device import Device
from clustersim.core.texts import Table
from clustersim.scenario.run.parts import model_of, transformer_of
from clustersim.studies.plan.candidates import PlanCandidate, scenario_of
from clustersim.studies.plan.spec import PlanFile
from clustersim.training.strategies import STRATEGIES

BYTES_A_PARAMETER = 16
"""Of mixed-precision Adam, unsplit: parameters and gradients of 2, fp32 masters and two states of 4."""
WIDE = ("fp32", "tf32")
GATHERING = ("fsdp", "zero")
"""Strategies that share parameters or states out."""
OFFLOAD = "optimizer states on the host (offload_optimizer of zero, cpu_offload of fsdp)"
"""What is left where nothing fits. It is no usual alternative to what does: steps wait for the host."""


def offloads(strategy: Table) -> bool:
    """Whether a strategy keeps something on the host; none does whose knobs are refused, since it is not played."""
    try:
        return msgspec.convert(strategy, STRATEGIES[str(strategy["kind"])].config).offloads
    except msgspec.ValidationError:
        return False


def untried(plan: PlanFile, path: str | Path, options: Sequence[PlanCandidate], gpus: Sequence[Device]) -> list[str]:
    """Usual alternatives that no option has, each in words with the table where it belongs.

    Splits and sharding are usual for models whose states are more than a GPU holds; fused kernels, 16-bit parameters
    and fp8 for transformers.

    Parameters
    ----------
    options : all of the space. gpus : of its machines.
    """
    scenario = scenario_of(plan, path, options[0])
    if transformer_of(scenario) is None:
        return []
    large = BYTES_A_PARAMETER * model_of(scenario).parameters > min(gpu.memory_bytes for gpu in gpus)
    several = max(option.gpus for option in options) > 1
    return [
        *(_splits(scenario_has_experts(plan, path, options), options) if large and several else ()),
        *_computed(plan, options, gpus),
    ]


def scenario_has_experts(plan: PlanFile, path: str | Path, options: Sequence[PlanCandidate]) -> bool:
    """Whether the plan's model is a mixture of experts."""
    shape = transformer_of(scenario_of(plan, path, options[0]))
    return shape is not None and shape.experts is not None


def _splits(experts: bool, options: Sequence[PlanCandidate]) -> Iterator[str]:
    degrees = [option.form.degrees for option in options]
    if all(degree["tp"] == 1 for degree in degrees):
        yield "tensor parallelism (tp of [try.parallel])"
    if all(degree["pp"] == 1 for degree in degrees) and max(option.nodes for option in options) > 1:
        yield "a pipeline (pp of [try.parallel])"
    if experts and all(degree["ep"] == 1 for degree in degrees):
        yield "expert parallelism (ep of [try.parallel])"
    shared = (
        option.form.strategy["kind"] in GATHERING or option.form.parallel.get("use_distributed_optimizer")
        for option in options
    )
    if not any(shared):
        yield "states shared out over replicas (fsdp, zero, or use_distributed_optimizer)"


def _computed(plan: PlanFile, options: Sequence[PlanCandidate], gpus: Sequence[Device]) -> Iterator[str]:
    """Of numbers and kernels."""
    recipes = [{**plan.model, **recipe} for recipe in _once(option.form.recipe for option in options)]
    if all(recipe.get("implementation") != "fused" for recipe in recipes):
        yield 'fused kernels (implementation = "fused")'
    dtypes = {recipe.get("dtype", "fp32") for recipe in recipes}
    if dtypes <= {*WIDE}:
        yield "16-bit products (dtype of [try.recipe])"
        return
    gathers = [s for s in _once(option.form.strategy for option in options) if s["kind"] in GATHERING]
    if gathers and all(strategy.get("param_dtype", "fp32") in WIDE for strategy in gathers):
        yield "16-bit parameters of what is gathered (param_dtype)"
    if _gathers_wide(plan, options):
        yield "weights gathered in 8 bits beside fp8 (float8_all_gather, torchao's enable_fsdp_float8_all_gather)"
    if "fp8" not in dtypes and any("fp8" in gpu.peak for gpu in gpus):
        yield "fp8 (dtype of [try.recipe])"


def _gathers_wide(plan: PlanFile, options: Sequence[PlanCandidate]) -> bool:
    """Whether FSDP 2 is tried with fp8 of one scale a tensor, which torchao gathers in 8 bits, and never gathers so."""
    recipes = [({**plan.model, **option.form.recipe}, option.form.strategy) for option in options]
    able = [
        strategy.get("float8_all_gather", False)
        for recipe, strategy in recipes
        if recipe.get("dtype") == "fp8"
        and recipe.get("float8_recipe", "tensorwise") == "tensorwise"
        and strategy["kind"] == "fsdp"
        and strategy.get("version", 2) != 1
    ]
    return bool(able) and not any(able)


def _once(tables: Iterator[Table]) -> list[Table]:
    return list({repr(table): table for table in tables}.values())
