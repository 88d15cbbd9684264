"""What of a scenario's model is trained, and how: frozen parts and adapters, packed samples, losses without logits."""

from __future__ import annotations

from collections.abc import Callable

from clustersim.core.errors import ScenarioError
from clustersim.core.memo import kept_with_first
from clustersim.core.model import Model
from clustersim.core.program import DTYPE_BYTES
from clustersim.model.adapters import Trained, with_trained
from clustersim.model.losses import with_loss
from clustersim.model.packing import with_packing
from clustersim.scenario import Scenario
from clustersim.scenario.file.splitting import splits
from clustersim.training.strategies import STRATEGIES
from clustersim.training.strategies.zero_config import ZeroConfig


def as_trained(scenario: Scenario, model: Model) -> Model:
    """The model as a scenario trains it: packed, with what of it is frozen, adapters beside that, and its loss.

    Raises :class:`ScenarioError` for what is not played so.
    """
    spec = scenario.file.model
    if spec.packing is not None:
        with scenario.at("$.model.packing"):
            refuse_split(scenario, "packing", "cp")
            model = _changed(model, with_packing, spec.packing)
    if spec.frozen or spec.adapter is not None:
        with scenario.at("$.model.adapter" if spec.adapter else "$.model.frozen"):
            _refuse_partly(scenario)
            model = _changed(model, with_trained, trained_of(scenario))
    if spec.loss is not None:
        with scenario.at("$.model.loss"):
            refuse_split(scenario, f"loss = {spec.loss!r}")
            model = _changed(model, with_loss, spec.loss, scenario.config.micro_batch_size)
    return model


@kept_with_first(maxsize=16)
def _changed(model: Model, change: Callable[..., Model], *how: object) -> Model:
    """A changed model; a sweep asks for it again and again."""
    return change(model, *how)


def refuse_split(scenario: Scenario, what: str, degree: str = "") -> None:
    """Raise :class:`ScenarioError` for what is not played in a split model, or at a ``degree`` above 1."""
    parallel = scenario.file.parallel
    if parallel is not None and (getattr(parallel, degree) > 1 if degree else splits(scenario)):
        split_text = f"with {degree} = {getattr(parallel, degree)}" if degree else "where [parallel] splits the model"
        raise ScenarioError(f"{what} is not played {split_text}; leave one of them out")


def trained_of(scenario: Scenario) -> Trained:
    """What of the model is trained."""
    spec = scenario.file.model
    config = scenario.config
    if spec.adapter is None:
        # A shard is kept in another type than it is gathered in; of ZeRO only the optimizer's copies are.
        dtype = config.state_dtype if scenario.strategy.name == "fsdp" else config.param_dtype
        return Trained(spec.frozen, None, float(DTYPE_BYTES[dtype]))
    dtype = compute_dtype(scenario)
    wide = dtype != "fp32" == config.param_dtype
    parallel = scenario.file.parallel
    again = spec.activation_checkpointing == "full" or (
        parallel is not None and parallel.recompute_granularity == "full"
    )
    return Trained((), spec.adapter, float(DTYPE_BYTES[dtype]), wide, again)


def compute_dtype(scenario: Scenario) -> str:
    """What the weights of products are in: the frozen ones' type beside adapters, else that of all parameters."""
    spec = scenario.file.model
    if spec.adapter is None:
        return scenario.config.param_dtype
    return spec.adapter.base_dtype or (spec.dtype if spec.dtype in {"bf16", "fp16"} else "fp32")


def _refuse_partly(scenario: Scenario) -> None:
    """Raise :class:`ScenarioError` for a strategy that does not play frozen parts."""
    partial_kinds = ", ".join(repr(name) for name, row in STRATEGIES.items() if row.partly)
    if not scenario.strategy.partly:
        raise ScenarioError(
            f"strategy {scenario.strategy.name!r} does not play frozen parts; use one of {partial_kinds}"
        )
    adapter = scenario.file.model.adapter
    config = scenario.config
    packed = adapter is not None and adapter.load_in_4bit
    if packed and isinstance(config, ZeroConfig) and config.zero_optimization.stage == 3:
        raise ScenarioError("load_in_4bit under ZeRO-3, which gathers weights by the element, is not played; use fsdp")
