"""A way to run a step, looked at once for all machines, micro-batches and passes: what it holds and takes at least."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from clustersim.collectives import backends
from clustersim.core.arrays import Floats
from clustersim.core.errors import ClusterSimError
from clustersim.core.memory_states import DOES_NOT_FIT
from clustersim.core.memory_use import CONTEXT_BYTES, runs_out_at_least
from clustersim.core.mesh import Ints, Mesh
from clustersim.core.model import Model
from clustersim.core.program import DTYPE_BYTES
from clustersim.core.texts import data_table
from clustersim.core.units import format_bytes, parse_nccl_version
from clustersim.model.seconds.local import LocalCost
from clustersim.scenario import Scenario
from clustersim.scenario.file.splitting import split
from clustersim.scenario.run.hosts import host_memory
from clustersim.scenario.run.played import backend_of
from clustersim.scenario.run.replicas import activations as activation_dtype
from clustersim.scenario.run.replicas import check_replicas, replica_config, sharding_zero, state_bytes
from clustersim.scenario.run.split_notes import OF_REPLICAS
from clustersim.scenario.run.split_step import PARTIAL, local_cost, orders_of, parts_of, split_of
from clustersim.studies.plan.candidates import PlanCandidate
from clustersim.studies.plan.known import KnownMachines, Place
from clustersim.studies.plan.limits import SLACK, Bound
from clustersim.studies.plan.stages import LeastSeconds, MicroBatchTimes, activations, least_of, times_of
from clustersim.studies.plan.traffic import TrafficBounds, first_group
from clustersim.studies.what_if.folded import PERIODIC
from clustersim.training.builder.stage_memory import StateBytes
from clustersim.training.parallel import ModelShape, ParallelConfig
from clustersim.training.partition.base import Exchange, LocalLayer, Partition
from clustersim.training.schedules import Orders, Schedule
from clustersim.training.strategies.fsdp_config import FSDPConfig

UNIT = float(1 << 30)
BESIDE_STAGES = (*OF_REPLICAS, *data_table("parallel_fields")["beside_stages"])
"""Fields of ``[parallel]`` that stages do not depend on."""
OF_PIPELINE = tuple(data_table("parallel_fields")["pipeline"])
"""Those that say which stage a layer is on, and nothing of the layer."""
PLAIN = ParallelConfig()


def without(parallel: ParallelConfig, names: Sequence[str]) -> ParallelConfig:
    """The same with these fields as they are when nothing is said."""
    return msgspec.structs.replace(parallel, **{name: getattr(PLAIN, name) for name in names})


@dataclass(frozen=True)
class RefusedOption:
    """Why an option is none. ``state`` : ``"error"``, ``"limits"`` or ``"memory"``. ``reason`` : in words. ``needs`` :
    of one that does not fit, the memory of a GPU that it needs [bytes]."""

    state: str
    reason: str
    needs: float = 0.0


@dataclass(frozen=True, eq=False)
class _FormRun:
    """How an option runs a form: where, on which stages by which schedule, and in which order its ``passes`` of
    ``micro`` samples."""

    place: Place
    parts: Partition
    row: Schedule
    orders: Orders
    micro: int
    passes: int


@dataclass(eq=False)
class FormFamily:
    """Options that differ in machine, micro-batch and passes alone."""

    known: KnownMachines
    scenario: Scenario
    model: Model
    shape: ModelShape
    _meshes: dict[Place, Mesh | ClusterSimError] = field(default_factory=dict)
    _reach: dict[Place, tuple[bytes, ...]] = field(default_factory=dict)
    _traffic: dict[Place, TrafficBounds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parallel = self.scenario.file.parallel
        self.parallel = parallel if parallel is not None else ParallelConfig()
        check_replicas(self.scenario, self.parallel)
        self.element = DTYPE_BYTES[activation_dtype(self.scenario)]
        self._stagewise = without(self.parallel, BESIDE_STAGES)
        self._states_of = str(self.scenario.file.strategy), without(self.parallel, ("order",))
        self._layerwise = without(self._stagewise, OF_PIPELINE)
        self._kept = self.scenario.file.model.activation_checkpointing

    def look(self, option: PlanCandidate) -> Bound | RefusedOption:
        """Its bound. Raises :class:`ClusterSimError` where its knobs contradict each other."""
        place = self.known.place(option)
        mesh = self._mesh(place)
        if self.parallel.tp > mesh.nproc_per_node and not self.known.plan.limits.tp_across_nodes:
            return RefusedOption("limits", f"TP {self.parallel.tp} leaves the node of {mesh.nproc_per_node} GPUs")
        micro, passes = option.played
        key: object = (self._stagewise, self._kept, mesh.nproc_per_node)
        parts, row = self.known.parts(key, lambda: parts_of(self.scenario, self.parallel, mesh, self.model))
        orders = self._order(parts, row, passes, place)
        always, ending = self._states(place, mesh, parts, row)
        if self.parallel.deferral(passes) or getattr(self.parallel, PARTIAL) is not None:
            # Micro-batches that are not alike are walked as a run walks them.
            scenario = self._with(micro_batch_size=micro, gradient_accumulation_steps=passes)
            gpu = self.known.device(place[0], scenario, self.model)
            stage_bytes = np.array(
                [use.total for use in split_of(scenario, self.parallel, mesh, self.model, gpu).memory]
            )
        else:
            keeps = not self.parallel.deallocate_pipeline_outputs
            sample_bytes = self.known.once(
                "held", (key, id(orders)), lambda: activations(parts, orders, self.element, keeps_sent=keeps)
            )
            stage_bytes = np.maximum(always + micro * sample_bytes, ending) + CONTEXT_BYTES
        reason = self._too_much(place, stage_bytes, always) or self._host_too_small(place, mesh, parts, row)
        if reason:
            return RefusedOption("memory", reason, float(stage_bytes.max()))
        return self._bound(_FormRun(place, parts, row, orders, micro, passes), stage_bytes)

    def _with(self, **knobs: int) -> Scenario:
        """The scenario with other micro-batches or passes."""
        return replace(self.scenario, config=msgspec.structs.replace(self.scenario.config, **knobs))

    def _states(self, place: Place, mesh: Mesh, parts: Partition, row: Schedule) -> tuple[Floats, Floats]:
        """(ranks,) bytes beside activations during passes, and while the optimizer updates: whatever the passes."""

        def made() -> tuple[Floats, Floats]:
            """From the stages' states, copies and frozen parameters."""
            # Bytes per element are a stage's own only where units are gathered and freed one by one.
            units = isinstance(self.scenario.config, FSDPConfig) or sharding_zero(self.scenario) is not None
            own = parts.stages if units else parts.stages[:1]
            states = [state_bytes(self.scenario, self.parallel, mesh, stage, row) for stage in own]
            copies = np.array([row.versions(rank, len(parts.stages)) for rank in range(len(parts.stages))])
            counts = self.known.counts(parts)
            frozen = np.array([stage.frozen_bytes for stage in parts.stages])
            during, updating = (_always(counts, states, copies, updating=late) for late in (False, True))
            return during + frozen, updating + frozen

        return self.known.once("states", (self._states_of, self._kept, place), made)

    def _mesh(self, place: Place) -> Mesh:
        if place not in self._meshes:
            mesh = self.known.machines[place][1]
            try:
                self._meshes[place] = split(self.scenario, self.parallel, mesh, self.shape)
            except ClusterSimError as error:
                self._meshes[place] = error
        known_mesh = self._meshes[place]
        if isinstance(known_mesh, ClusterSimError):
            raise known_mesh
        return known_mesh

    def _order(self, parts: Partition, row: Schedule, passes: int, place: Place) -> Orders:
        """What ranks run; of a schedule that repeats itself, of as many micro-batches as show all of it."""
        p, v, plain = self.parallel, len(parts.stages[0].chunks), True
        if row.name in PERIODIC and p.microbatch_group_size_per_vp_stage is None and not p.deferral(passes):
            passes = passes if passes <= 2 * p.pp else 2 * p.pp + passes % p.pp
        elif any(option.name == "costs" for option in row.options):
            plain = False
        key: tuple[object, ...] = (row.name, p.pp, v, passes, p.microbatch_group_size_per_vp_stage, p.ep_overlap)
        key += () if plain else (self._stagewise, self._kept, self.scenario.config.micro_batch_size, place[0])

        def made() -> Orders:
            """From the schedule itself."""
            gpu = self.known.device(place[0], self.scenario, self.model)
            return orders_of(self._with(gradient_accumulation_steps=passes), p, parts, row, gpu)

        return self.known.once("orders", key, made)

    def _too_much(self, place: Place, stage_bytes: Floats, always: Floats) -> str:
        room = self.known.room(place)
        margin = self.known.plan.limits.memory_margin
        worst = int(np.argmax(stage_bytes))
        if stage_bytes[worst] <= (1.0 - margin) * room:
            return ""
        stage_text = f"stage {worst} " if len(stage_bytes) > 1 else ""
        return (
            f"{stage_text}needs {format_bytes(float(stage_bytes[worst]))} of {format_bytes(room)}, {margin:.0%} kept "
            f"free (model states {format_bytes(float(always[worst]))}, activations "
            f"{format_bytes(float(stage_bytes[worst] - always[worst] - CONTEXT_BYTES))})"
        )

    def _host_too_small(self, place: Place, mesh: Mesh, parts: Partition, row: Schedule) -> str:
        """Why a node's host has no room for what its ranks keep there; empty where it has, or nobody knows."""
        stage = parts.stages[0]  # whoever has several offloads nothing
        rank_bytes = state_bytes(self.scenario, self.parallel, mesh, stage, row).host * stage.trained
        host = host_memory(self.known.machines[place][0], mesh, rank_bytes)
        return host.in_words if host.state == DOES_NOT_FIT else ""

    def _bound(self, form_run: _FormRun, stage_bytes: Floats) -> Bound:
        times, traffic = self._time(form_run)
        first = times.first
        zero = np.zeros(1)
        row = form_run.row
        passes = form_run.passes
        head = np.concatenate([zero, np.cumsum(times.forward)])[first]
        tail = np.concatenate([zero, np.cumsum(times.backward)])[first]
        # Behind a rank's last pass the gradient goes down the pipeline, unless weight gradients are what comes last.
        full = row.placement == "loop" and not row.splits_backward and not self.parallel.deferral(passes)
        # Where the model is there twice, a micro-batch goes through one of a rank's two chunks.
        rounds = passes / 2 if row.placement == "both" else float(passes)
        ramp = (head * (row.placement != "both") + tail * full) * row.synchronous
        serial, beside, shard = self._data(traffic, form_run)
        local = self._local(form_run.place, form_run.micro)
        dense, expert = self.known.counts(form_run.parts)
        update = local.update(float((dense * shard[0] + expert * shard[1]).min()), 1)
        stage_s = ramp + rounds * times.whole + serial
        r = int(np.argmax(stage_s))
        compute = SLACK * (rounds * float(times.compute.min()) + update)
        step = SLACK * max(float(stage_s[r]) + update, beside)
        return Bound(
            compute,
            max(step, compute),
            rounds * float(times.whole[r] - times.compute[r]),
            float(ramp[r]),
            max(float(serial[r]), step / SLACK - float(stage_s[r]) - update),
            tuple(stage_bytes.tolist()),
            runs_out_at_least(float(stage_bytes.max()), self.known.room(form_run.place)),
        )

    def _time(self, form_run: _FormRun) -> tuple[MicroBatchTimes, TrafficBounds]:
        """Of one micro-batch. On more nodes the same groups are no nearer, so the fewest nodes tell for all."""
        place = form_run.place
        parts = form_run.parts
        row = form_run.row
        micro = form_run.micro
        if place not in self._traffic:
            self._traffic[place] = self._bounds(place)
        traffic = self._traffic[place]
        near = place[0], micro, row.name, self._groups(place, parts, traffic), self.scenario.config.param_dtype
        key = self._stagewise, self._kept, *near

        def made() -> MicroBatchTimes:
            """From each layer's least seconds."""
            local = self._local(place, micro)

            def least(layer: LocalLayer, kind: str) -> LeastSeconds:
                """A layer's least seconds; layers that do the same are asked once."""
                same = (
                    *near,
                    self._layerwise,
                    self._kept,
                    kind,
                    layer.kind,
                    len(layer.forward),
                    len(layer.backward),
                    layer.parameters,
                    layer.kept,
                    layer.kept_for_weights,
                    layer.repeated,
                )
                return self.known.once("least", same, lambda: least_of(layer, kind, local, traffic, self.element))

            paired = any(len(slot) > 1 for slot in form_run.orders[0])
            return times_of(parts, ("F", "I", "W") if row.splits_backward else ("F", "B"), paired, least)

        return self.known.once("times", key, made), traffic

    def _bounds(self, place: Place) -> TrafficBounds:
        """Of exchanges on a place; where the plan says what NCCL chooses, by line rates alone."""
        topology, mesh = self.known.machines[place]
        run = self.scenario.file.run
        planner = None
        if not run.tells_nccl:
            backend = backend_of(self.scenario, topology, mesh)
            planner = functools.partial(backends.plan, backend=backend)
        manner = self.scenario.strategy.launch or run.launch, parse_nccl_version(run.nccl_version)
        way_out = self.known.way_out(place)
        return TrafficBounds(topology, mesh, self._mesh(place).layout, way_out, planner, manner)

    def _groups(self, place: Place, parts: Partition, traffic: TrafficBounds) -> tuple[bytes, ...]:
        """The groups that exchanges inside the model are over."""
        if place not in self._reach:
            layers = {id(layer.backward): layer for stage in parts.stages for layer in stage.layers}.values()
            items = (item for layer in layers for item in (*layer.forward, *layer.backward))
            dims = sorted({item.dims for item in items if isinstance(item, Exchange)})
            self._reach[place] = tuple(first_group(traffic.dims, *dim).tobytes() for dim in dims)
        return self._reach[place]

    def _local(self, place: Place, micro: int) -> LocalCost:
        return local_cost(self._with(micro_batch_size=micro), self.known.device(place[0], self.scenario, self.model))

    def _data(self, traffic: TrafficBounds, form_run: _FormRun) -> tuple[Floats, float, tuple[float, float]]:
        """Of data parallelism: (ranks,) s that nothing hides, s that run beside a step, and which share of dense and
        of experts' parameters a rank updates."""
        dense, expert = self.known.counts(form_run.parts)
        dims = traffic.dims
        config = self.scenario.config

        def slope(kind: str, *names: str) -> float:
            """Seconds a byte that an exchange over these dimensions takes."""
            return traffic.seconds(kind, UNIT, names) / UNIT

        if isinstance(config, FSDPConfig):
            shard = ("dp_shard", "cp")
            blocks = [layer.parameters for layer in form_run.parts.stages[0].layers if layer.kind == "block"]
            again = 0.0 if dims.pp > 1 or config.keeps else float(sum(blocks) - max(blocks, default=0))
            often = 1 if dims.pp > 1 or config.keeps else form_run.passes
            moved = float(dense.max() + again) * DTYPE_BYTES[config.param_dtype] * often
            return np.zeros(len(dense)), moved * slope("all_gather", *shard), (1 / dims.size(*shard),) * 2
        if sharding_zero(self.scenario) is not None:
            return np.zeros(len(dense)), 0.0, (0.0, 0.0)
        knobs = replica_config(self._with(gradient_accumulation_steps=form_run.passes), self.parallel, form_run.row)
        if self.parallel.num_distributed_optimizer_instances > 1:
            return np.zeros(len(dense)), 0.0, (0.0, 0.0)
        kind = "reduce_scatter" if knobs.distributed else "all_reduce"
        per = slope(kind, "dp", "cp"), slope(kind, "edp") if expert.any() else 0.0
        reduced = (dense * per[0] + expert * per[1]) * DTYPE_BYTES[knobs.grad_dtype]
        per = slope("all_gather", "dp", "cp"), slope("all_gather", "edp") if expert.any() else 0.0
        gathered = (dense * per[0] + expert * per[1]) * DTYPE_BYTES[knobs.param_dtype] * knobs.distributed
        serial = reduced * (not self.parallel.overlap_grad_reduce) + gathered * (not self.parallel.overlap_param_gather)
        share = (1 / dims.size("dp", "cp"), 1 / dims.size("edp")) if knobs.distributed else (1.0, 1.0)
        return serial, float((reduced + gathered).max()), share


def _always(
    in_flight: tuple[Floats, Floats], states: Sequence[StateBytes], versions: Ints, *, updating: bool
) -> Floats:
    """(ranks,) bytes beside activations that a rank holds during its passes, or while its optimizer is ``updating``.

    in_flight : (ranks,) elements, dense and of experts. states : of each rank, or one for all. versions : (ranks,)
    copies."""
    total = np.zeros(len(versions))
    for i, count in enumerate(in_flight):
        rows = []
        for state in states:
            gradients = (state.reduced or state.gradients) if updating else state.gradients
            pairs = (state.parameters, state.gathered, state.masters, gradients, state.states)
            rows.append(sum(pair[i] for pair in pairs) + (state.workspace[i] if updating else 0.0))
        copied = (versions - 1) * np.array([state.parameters[i] for state in states])
        total += (np.array(rows) + copied) * count
    return total if updating else total + np.array([state.buckets for state in states])
