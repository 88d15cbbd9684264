"""What every strategy shares: its row in the table, its knobs, and the passes over layers.

A strategy turns a :class:`Model` and its :class:`StepCost` into a :class:`Program`. It sees costs only as a StepCost,
so the same file serves a roofline, a fitted device and a measured profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from clustersim.core.errors import ProgramError
from clustersim.core.holding import Holding, always, everything
from clustersim.core.mesh import Mesh
from clustersim.core.mix import Mix
from clustersim.core.model import Model, StepCost
from clustersim.core.program import COMPUTE_STREAM, DTYPE_BYTES, Compute, Op, Program
from clustersim.core.repeated import PassRepeat, RepeatedOps
from clustersim.core.timeline import Timeline
from clustersim.core.topology import Topology
from clustersim.training.parallel.config import AtLeastOne

ParamDtype = Literal["fp32", "bf16", "fp16"]


class StrategyFigures(Protocol):
    """Figures that only one strategy has: a Struct that says itself to people, too."""

    def lines(self) -> Iterator[str]:
        """A line each."""


class StrategyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Knobs of every strategy.

    Parameters
    ----------
    micro_batch_size : samples of one rank in one forward and backward pass.
    gradient_accumulation_steps : passes per optimizer step.
    param_dtype : what parameters are kept in. Gradients have the same dtype: fp32 also under autocast (AMP), which
        casts inside each layer; bf16 for a model converted to bf16.
    """

    micro_batch_size: AtLeastOne = 1
    gradient_accumulation_steps: AtLeastOne = 1
    param_dtype: ParamDtype = "fp32"

    @property
    def rank_samples(self) -> int:
        """Samples of one rank in a step."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def state_dtype(self) -> str:
        """What the optimizer's parameters and states are in."""
        return self.param_dtype

    PLACES: ClassVar[Mapping[str, str]] = {}
    """Knobs that say where something is kept, by their path in the table, and what that is."""

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer runs on the host."""
        return False

    @property
    def offloads(self) -> bool:
        """Whether optimizer or parameters live on the host."""
        return self.offloads_optimizer

    @property
    def wire_dtype(self) -> str:
        """Element type in which gradients travel."""
        return self.param_dtype


def whole(model: Model, config: StrategyConfig) -> Holding:
    """What a rank keeps that has all of the model, and of its gradients, which later micro-batches add to."""
    size = DTYPE_BYTES[config.param_dtype]
    found = everything(model.gradients, size, frozen=model.frozen_bytes)
    if config.gradient_accumulation_steps == 1:
        return found
    return msgspec.structs.replace(found, gradients=always(float(size * model.trained), len(model.layers)), fresh="")


Build = Callable[[Model, StepCost, Mesh, Any, int, int], Program]
"""``(model, cost, mesh, config, steps, seed) -> Program``."""


class StepSample(msgspec.Struct, frozen=True):
    """What one rank does in a steady step, in as few passes as tell it.

    Of a step of one pass ``once`` is all. Of a step of p passes, p > 1, ``once`` is done once and ``between``, a pass
    that is neither the first nor the last, p - 2 times.
    """

    once: tuple[Op, ...]
    between: tuple[Op, ...] = ()

    def times(self, passes: int) -> tuple[tuple[tuple[Op, ...], int], ...]:
        """Ops of a step of so many passes, and how often they are done."""
        return (self.once, 1), (self.between, max(passes - 2, 0))


Sample = Callable[[Model, StepCost, Mesh, Any], StepSample]
"""``(model, cost, mesh, config) -> StepSample``, which tells by the config whether a step has more than one pass."""


class Strategy(msgspec.Struct, frozen=True):
    """A way to train: one file, one row in ``STRATEGIES``.

    Parameters
    ----------
    name : the ``kind`` of a scenario's ``[strategy]``.
    config : the Struct of its knobs.
    build : of its whole step; mostly :func:`clustersim.training.strategies.walk.walked`.
    world_size : the only world size it runs on, None for any.
    place : ``(topology, mesh, config) -> Mesh`` gives it ranks beyond one per GPU, such as servers on CPUs.
    launch : how its ranks are started where that is its nature and not the user's choice; as ``[run]`` names it.
    report : ``(program, timeline, topology, mesh, config) -> Figures``, which only this strategy has.
    holding : ``(model, mesh, config) -> Holding``, what one rank keeps in memory; everything where nothing is said.
    together : ``(config) -> bool``, whether its ranks wait for each other every step; else some may be ahead of others,
        and where nothing bounds by how much its Program says ``own_paces``.
    partly : it plays models of which a part is frozen.
    period : after how many steps what its ranks do repeats, a number or ``(config) -> int``; more than 1 where they
        exchange only in some steps (local SGD, DiLoCo). Figures of a step are means over whole periods.
    sample : its steady step in few passes, where each pass between the first and the last has the same kernels and
        collectives: :func:`clustersim.training.strategies.walk.sampled`. What a step takes at least is then told
        without writing all of it out; without ``sample`` it is written out.
    least_ops : ``(model, cost, mesh, config) -> int``, of one pass forward and backward, where more than a kernel a
        layer and way: what cannot be held is refused before it is written out.
    """

    name: str
    config: type[StrategyConfig]
    build: Build
    world_size: int | None = None
    place: Callable[[Topology, Mesh, Any], Mesh] | None = None
    launch: str | None = None
    report: Callable[[Program, Timeline, Topology, Mesh, Any], StrategyFigures] | None = None
    holding: Callable[[Model, Mesh, Any], Holding] = lambda model, mesh, config: whole(model, config)
    together: Callable[[Any], bool] = lambda config: True
    partly: bool = False
    period: int | Callable[[Any], int] = 1
    sample: Sample | None = None
    least_ops: Callable[[Model, StepCost, Mesh, Any], int] = lambda model, cost, mesh, config: 2 * len(model.layers)

    def period_of(self, config: StrategyConfig) -> int:
        """Steps after which what its ranks do repeats, with these knobs. Raises :class:`ProgramError` below 1."""
        steps = self.period(config) if callable(self.period) else self.period
        if steps < 1:
            raise ProgramError(f"strategy {self.name!r} repeats after {steps} steps; a period is at least 1")
        return steps


class OpList(msgspec.Struct):
    """An op list in the making: keeps the step number, and hands out op indices.

    kernel : the last op of a layer's pass (or what stands for it), -1 for none. waits : what the next one waits for.
    owed : seconds that the next kernel takes longer, for an overlap in what stands for a whole pass.
    passes : those that others repeat, and these, ascending.
    """

    step: int = 0
    ops: list[Op] = msgspec.field(default_factory=list)
    kernel: int = -1
    waits: tuple[int, ...] = ()
    owed: float = 0.0
    passes: list[PassRepeat] = msgspec.field(default_factory=list)

    def add(self, op: Op) -> int:
        """Append an op; returns its index, for others to wait on."""
        if self.owed and isinstance(op, Compute) and op.stream == COMPUTE_STREAM:
            op, self.owed = msgspec.structs.replace(op, duration=op.duration + self.owed), 0.0
        self.ops.append(op)
        return len(self.ops) - 1

    def compute(
        self,
        name: str,
        seconds: float,
        phase: str,
        bound: str = "memory",
        *,
        nbytes: float = 0.0,
        after: tuple[int, ...] = (),
    ) -> int:
        """Append a Compute op of ``seconds`` at a rank's usual pace to its kernels; returns its index."""
        mix = Mix(memory=seconds) if bound == "memory" else None
        return self.add(Compute(name, seconds, COMPUTE_STREAM, after, phase, bound, 0.0, nbytes, self.step, mix=mix))

    def made(self) -> Sequence[Op]:
        """The list, for a role."""
        return RepeatedOps(self.ops, self.passes) if any(each.shift for each in self.passes) else tuple(self.ops)

    @property
    def here(self) -> tuple[int, ...]:
        """The last op, for others to wait on; nothing before the first."""
        return (len(self.ops) - 1,) if self.ops else ()


def check(model: Model, cost: StepCost, steps: int) -> None:
    """Raise :class:`ProgramError` for costs of another model, or a run without a step."""
    if not len(cost.forward) == len(cost.backward) == len(model.layers):
        raise ProgramError(
            f"the costs are of {len(cost.forward)} layers forward and {len(cost.backward)} backward, "
            f"but {model.name} has {len(model.layers)}"
        )
    if steps < 1:
        raise ProgramError(f"a run needs at least one step, not {steps} (at $.run.steps)")


def begin_step(ops: OpList, cost: StepCost, step: int) -> None:
    """Open a step: what the host does outside the layers (loader hand-over, zero_grad, reading the loss)."""
    ops.step = step
    if cost.step_overhead:
        ops.kernel = ops.compute("input", cost.step_overhead, "input", "host")


def gradient_pass(traffic: float, cost: StepCost) -> float:
    """Seconds of an elementwise pass over gradients that reads and writes ``traffic`` bytes in all."""
    return traffic / cost.grad_copy_bandwidth if traffic else 0.0


def sample_bytes(model: Model) -> float:
    """Bytes of one input sample: fp32 pixels of an image, int64 tokens of a sequence and their labels."""
    if model.seq_len and model.sample != "image":
        return 16.0 * model.seq_len
    return 4.0 * model.layers[0].boundary_bytes


def output_elements(model: Model) -> float:
    """Elements of the model's output for one sample (logits): what its last matrix product writes."""
    products = [kernel for layer in model.layers for kernel in layer.kernels if kernel.kind == "gemm" and kernel.m]
    return float(products[-1].m * products[-1].n) if products else 0.0
