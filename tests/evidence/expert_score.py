"""How good predictions of mixtures of experts are: the table that the work on them is judged by, line by line.

Rows of steps are those of a shared table that have experts; a group is a set of model, machine and degrees, and counts
once. Everything else is predicted by the same code that plays a step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np

from clustersim import collectives, scenario
from clustersim.calibrate import validate_nccl
from clustersim.calibrate.nccl_tables import TOPOLOGIES, measured_rows
from clustersim.calibrate.score import PredictedRow, Row, evaluate, grouped, number, predicted, read_table, reasons
from clustersim.collectives import fitted
from clustersim.collectives.base import Group, Request
from clustersim.core.arrays import Floats
from clustersim.core.errors import ClusterSimError
from clustersim.core.texts import Table, data_table
from clustersim.core.units import parse_time
from clustersim.model.seconds import host
from clustersim.scenario.file.reading import read_toml
from clustersim.studies.what_if.folded import folded
from clustersim.training.parallel import Routing
from clustersim.training.partition.dispatch import ExpertSpread, Mixture, hops
from clustersim.training.partition.routing import ExpertRouter, distinct, routed
from tests.evidence.hybrid_rows import measured, scenario_table
from tests.evidence.order import SAME
from tests.evidence.step_rows import COLUMNS, publisher

SHARED = Path(__file__).resolve().parents[3] / "shared" / "measurements"
ONE_NODE = Path(__file__).resolve().parents[1] / "data" / "measurements" / "nccl_one_node.csv.gz"
DEEPSEEK = "pp16_ep64_deepseek_v3_256x8_h800.toml"
DEEPSEEK_STEP = 19.926
"""Seconds of a step of 15,360 sequences on 2,048 H800 (DeepSeek-AI, Insights into DeepSeek-V3, arXiv 2505.09343)."""
DEEPSEEK_MICROBATCHES = 120
DEEPSEEK_SUBJECT = "DeepSeek-V3 on 2,048 H800"
HOSTS = np.array([0.25, 0.5, 1.0, 2.0])
"""Levels of the host's calls, over the shipped ones, at which rows are played; steps between are interpolated."""
BOUND = 1.1
"""How many times as long a step has to take when calls take twice as long, up to the shipped level, to say something of
a host. Where kernels hide the calls, the level that fits best makes up for what is wrong with the kernels."""
SHIPPED = 2
"""The place of the shipped level among them; the one before is half of it."""
MOST_GPUS = 64
"""Of runs that the host's level is asked of: larger ones take long to play, and say no more of a host."""
FINE_HOSTS = np.linspace(HOSTS[0], HOSTS[-1], 81)
ABSENT = "../shared/measurements is not here"


@dataclass(frozen=True)
class ScoreLine:
    """One line of the table.

    Parameters
    ----------
    subject : what is predicted. reached : what came out, in words. target : what is aimed for.
    value : the figure that ``target`` is about; NaN where it could not be had. met : whether the target is met.
    """

    subject: str
    reached: str
    target: str
    value: float
    met: bool


def score_lines(shared: Path = SHARED, steps: bool = True, deepseek: bool = False) -> Iterator[ScoreLine]:
    """The lines, one after the other. ``steps`` : play the measured steps too, which takes minutes. ``deepseek`` : and
    the step on 2,048 GPUs, which takes longer than all else together.

    Lines whose table is absent say so.
    """
    table = shared / "training_steps_hybrid.csv"
    if steps and table.exists():
        rows = [row for row in read_table(table, COLUMNS) if row["experts"]]
        played = evaluate(rows, play)
        yield from step_lines(played)
        yield left_out_line(played)
        yield pair_line(predicted(played))
    elif steps:
        for subject in ("shared expert rows", "the same, one publisher left out", "order in published pairs"):
            yield ScoreLine(subject, ABSENT, "", float("nan"), False)
    yield kernel_line(shared / "kernels" / "comm_moe.csv.gz")
    yield all_to_all_line()
    yield from cliff_lines()
    if deepseek:
        yield deepseek_line()
    else:
        target = f"{DEEPSEEK_STEP:.1f} s within 10 %"
        yield ScoreLine(DEEPSEEK_SUBJECT, "not played: ask with --deepseek", target, float("nan"), False)


# ---- Steps -----------------------------------------------------------------------------------------------------------


def play(row: Table) -> tuple[float, float]:
    """Seconds of a row's step as measured, and as it is played."""
    table = scenario_table(row)
    return measured(row, table), _step(json.dumps(table, sort_keys=True), 1.0)


def _step(table: str, level: float) -> float:
    """Seconds of a step on a host whose calls take ``level`` times the shipped ones."""
    levels = data_table("host")
    scaled = {
        stack: {**entry, "call": f"{parse_time(entry['call']) * level * 1e6} us"} for stack, entry in levels.items()
    }
    with patch.object(host, "data_table", lambda _name: scaled):
        return folded(scenario.from_table(json.loads(table), "row.toml"), roughly=True).step_time_s


def group_errors(rows: Iterable[PredictedRow]) -> Floats:
    """Of each group, the median of its rows' errors without their sign."""
    groups = grouped(rows, lambda row: row.cells["config_group"])
    return np.array([np.median([abs(row.rel_error) for row in group]) for group in groups.values()])


def step_lines(rows: list[Row]) -> Iterator[ScoreLine]:
    """How many rows are read, and how far their groups are off: all of them, and by publisher."""
    played = predicted(rows)
    share = len(played) / len(rows)
    errors = group_errors(played)
    middle, high = np.percentile(errors, (50, 90))
    reached = f"{len(played)} of {len(rows)} read, median {middle:.1%}, p90 {high:.1%} of {len(errors)} groups"
    met = share >= 0.95 and middle <= 0.10 and high <= 0.25
    yield ScoreLine("shared expert rows", reached, "95 % / 10 % / 25 %", float(middle), bool(met))
    for source, part in sorted(grouped(played, lambda row: publisher(row.cells)).items()):
        part_errors = group_errors(part)
        signed = np.median([row.rel_error for row in part])
        words = f"median {np.median(part_errors):.1%} (rows {signed:+.1%}) of {len(part_errors)} groups"
        yield ScoreLine(f"  {source}", words, "", float(np.median(part_errors)), True)
    for reason, count in reasons(rows):
        yield ScoreLine(f"  {count} not read", reason, "", float(count), True)


def left_out_line(rows: list[Row]) -> ScoreLine:
    """What is fitted on these rows is what calls take the host: each publisher with the level that the others ask for,
    by those of their rows whose step follows it (:data:`BOUND`)."""
    small = [row for row in predicted(rows) if int(row.cells["gpus"]) <= MOST_GPUS]
    first = [group[0] for group in grouped(small, lambda row: row.cells["config_group"]).values()]
    played = [(publisher(row.cells), row.measured, _at_levels(row)) for row in first]
    wrong = [(name, np.log(np.interp(FINE_HOSTS, HOSTS, steps) / seconds)) for name, seconds, steps in played]
    bound = [
        row for row, (_, _, steps) in zip(wrong, played, strict=True) if steps[SHIPPED] > BOUND * steps[SHIPPED - 1]
    ]
    names = sorted({name for name, _ in wrong})
    off: list[float] = []
    for name in names:
        others = [
            np.median([np.abs(error) for owner, error in bound if owner == other], axis=0)
            for other in sorted({owner for owner, _ in bound})
            if other != name
        ]
        level = int(np.argmin(np.mean(others, axis=0) if others else np.abs(FINE_HOSTS - HOSTS[SHIPPED])))
        off += [abs(float(np.expm1(error[level]))) for owner, error in wrong if owner == name]
    middle, high = np.percentile(off, (50, 90))
    reached = (
        f"median {middle:.1%}, p90 {high:.1%} of {len(off)} groups on up to {MOST_GPUS} GPUs, with the others' host"
    )
    return ScoreLine("the same, one publisher left out", reached, "15 %", float(middle), bool(middle <= 0.15))


def _at_levels(row: PredictedRow) -> Floats:
    text = json.dumps(scenario_table(row.cells), sort_keys=True)
    return np.array([row.predicted if level == 1.0 else _step(text, level) for level in HOSTS])


CHOICES = ("a2a_dispatcher", "ep", "ep_overlap")
"""What rows of a pair differ in."""


def pair_line(rows: list[PredictedRow]) -> ScoreLine:
    """Pairs of one publisher's rows that differ in dispatcher, degree of experts or overlap: is the faster one said?"""
    right = 0
    pairs = list(published_pairs(rows))
    for first, second in pairs:
        right += (first.measured < second.measured) == (first.predicted < second.predicted)
    share = right / len(pairs) if pairs else float("nan")
    reached = f"{right} of {len(pairs)} pairs"
    return ScoreLine("order of dispatchers, degrees and overlap in pairs", reached, "90 %", share, share >= 0.9)


def published_pairs(rows: Iterable[PredictedRow]) -> Iterator[tuple[PredictedRow, PredictedRow]]:
    """Rows of one release with equal work and micro-batch that differ in one of :data:`CHOICES`, and by 2 % at least.

    Which transport DeepEP has is in the remarks, and counts as the dispatcher.
    """
    equal = (*SAME, "micro_batch_per_gpu", "version", "precision_recipe")
    sets = grouped(rows, lambda row: (publisher(row.cells), *(row.cells.get(name, "") for name in equal)))
    for comparable in sets.values():
        for first, second in combinations(comparable, 2):
            differing = [name for name in CHOICES if _chosen(first, name) != _chosen(second, name)]
            if len(differing) == 1 and abs(first.measured / second.measured - 1.0) >= 0.02:
                yield first, second


def _chosen(row: PredictedRow, column: str) -> str:
    if column != "a2a_dispatcher":
        return row.cells.get(column, "")
    transport = re.search(r"over (\w+) on", row.cells.get("notes", ""))
    return row.cells.get(column, "") + (transport.group(1) if transport else "")


# ---- Kernels and collectives -----------------------------------------------------------------------------------------

TRAINED = ("deepep_normal", "trtllm_alltoall")
"""Kernels of the table that a training step may run; those of low latency serve requests."""
BYTES = {"bf16": 2.0, "fp8": 1.0 + 4.0 / 128.0, "nvfp4": 0.5 + 1.0 / 16.0}
"""Of an element, with the scales that travel with it."""
FULL_WIDTH = frozenset({"combine"})
"""Kinds whose rows are in 16 bits, whatever was dispatched."""
TIMED = frozenset({"dispatch", "combine"})


def kernel_line(path: Path) -> ScoreLine:
    """One dispatch or combine of DeepEP's normal kernels, or of one-sided NVLink all-to-all, by machine and size."""
    subject = "one DeepEP normal or NVLink all-to-all timing"
    if not path.exists():
        return ScoreLine(subject, ABSENT, "12 % median", float("nan"), False)
    rows = [row for row in read_table(path, ("system", "what", "kind")) if _trained(row)]
    errors = {row_set: [abs(error) for error in part] for row_set, part in _kernel_errors(rows[::7]).items()}
    parts = ", ".join(f"{name} {np.median(part):.0%}" for name, part in sorted(errors.items()))
    every = [error for part in errors.values() for error in part]
    middle = float(np.median(every))
    return ScoreLine(subject, f"median {middle:.1%} of {len(every)}: {parts}", "12 % median", middle, middle <= 0.12)


def _trained(row: Table) -> bool:
    """A kernel of a step, on a machine that is known: of two Hopper systems hold the same rows over nodes."""
    return row["what"] in TRAINED and row["kind"] in TIMED and row["device_sure"] == "1"


def _kernel_errors(rows: Iterable[Table]) -> dict[str, list[float]]:
    errors: dict[str, list[float]] = {}
    for row in rows:
        seconds = kernel_seconds(row)
        name = f"{row['what'].split('_')[0]} {row['system']} {row['ranks']} {row['kind']}"
        errors.setdefault(name, []).append(seconds / (number(row, "time_us") * 1e-6) - 1.0)
    return errors


def kernel_seconds(row: Table) -> float:
    """Seconds [s] that a step waits for a dispatch or combine of the row's sizes, if nothing else is on the links."""
    ranks = int(row["ranks"])
    nodes = int(row["nodes"])
    tokens = int(row["tokens"])
    mixture = Mixture(tokens, int(row["hidden"]), int(row["hidden"]), int(row["experts"]), int(row["topk"]))
    routing = Routing(kind="balanced")
    tokens_routed = routed(ExpertRouter(routing, mixture.experts, mixture.per_token, ranks, float(tokens)))
    reach = ranks // nodes if row["what"] == "deepep_normal" else ranks
    backend = "deepep" if row["what"] == "deepep_normal" else "hybridep"
    sms = int(row["sms"])
    spread = ExpertSpread(mixture, ranks, 1, float(tokens), tokens_routed, reach, "flex", backend, True, sms)
    more = _apart(mixture, ranks) if row["what"] == "trtllm_alltoall" else 1.0
    width = BYTES["bf16"] if row["kind"] in FULL_WIDTH else BYTES[row["dtype"]]
    return exchange_seconds(spread, group_of(TOPOLOGIES[row["system"]], nodes, ranks), row["kind"], width, more)


def exchange_seconds(spread: ExpertSpread, group: Group, kind: str, width: float, more: float = 1.0) -> float:
    """Seconds [s] of a dispatch or combine (``kind``) of elements of ``width`` bytes, with nothing else on the links.

    ``more`` : copies of a token, over those of a spread's.
    """
    planned = []
    for exchange in hops(spread, kind, "F", home=kind == "combine"):
        kernel = exchange.kernel
        if kernel is not None:  # scales and 8-bit elements make a row that many 16-bit ones
            kernel = msgspec.structs.replace(kernel, row=kernel.row * width / 2.0, copies=kernel.copies * more)
        nbytes = exchange.elements * more * width
        request = Request("all_to_all", nbytes, dtype="bf16", matrix=exchange.matrix, kernel=kernel)
        planned.append(collectives.plan(request, group).time(group.topology.link_bandwidth))
    return max(planned)


def _apart(mixture: Mixture, ranks: int) -> float:
    """Copies of a token whose experts are on ranks of their own, over those of one that chooses at random.

    So tokens of NVLink all-to-all timings choose: ai-dynamo/aiconfigurator collector/network/slurm/
    collect_trtllm_alltoall.py, ``generate_balanced_expert_ids``. DeepEP's test draws scores at random.
    """
    return min(ranks, mixture.per_token) / distinct(ranks, mixture.experts, mixture.per_token)


def group_of(topology: str, nodes: int, ranks: int) -> Group:
    """The first GPUs of each node, as many as ``ranks`` over ``nodes``."""
    machine = fitted.load(topology, nodes=nodes)
    each = ranks // nodes
    gpus = np.concatenate([machine.node_gpus(node)[:each] for node in range(nodes)])
    return Group(machine, gpus)


def all_to_all_line(path: Path = ONE_NODE) -> ScoreLine:
    """NCCL's all_to_all on 2 to 8 GPUs of a node, by size."""
    rows = [row for row in measured_rows([path]) if row["collective"] == "all_to_all"]
    played = predicted(evaluate(rows, validate_nccl._predict))
    parts: Mapping[str, Callable[[float], bool]] = {
        "below 1 MiB": lambda size: size < 2**20,
        "above": lambda size: size >= 2**20,
    }
    texts = []
    for name, inside in parts.items():
        part = [abs(row.rel_error) for row in played if inside(float(row.cells["size_bytes"]))]
        texts.append(f"{name} {np.median(part):.1%}")
    middle = float(np.median([abs(row.rel_error) for row in played]))
    reached = f"median {middle:.1%} of {len(played)}: {', '.join(texts)}"
    return ScoreLine("NCCL all-to-all on 2 to 8 GPUs of a node", reached, "12 %", middle, middle <= 0.12)


# ---- Whole jobs ------------------------------------------------------------------------------------------------------

CLIFFS = {
    "data parallelism 448 to 512 on H100": ("hgx-h100", 8, range(56, 65)),
    "data parallelism 504 to 576 on GB200": ("gb200-nvl72", 4, (126, 127, 128, 130, 132, 136, 140, 144)),
}
"""What must not jump: machine, GPUs a node, and nodes."""


def cliff_lines() -> Iterator[ScoreLine]:
    """Steps of an 8B model by DDP at neighbouring sizes: how far the slowest is over the fastest."""
    for subject, (topology, per_node, counts) in CLIFFS.items():
        steps = {count * per_node: _ddp_step(topology, count, per_node) for count in counts}
        worst = max(steps, key=lambda gpus: steps[gpus])
        best = min(steps, key=lambda gpus: steps[gpus])
        jump = steps[worst] / steps[best] - 1.0
        reached = f"{jump:.1%}: {steps[best]:.3f} s on {best} GPUs, {steps[worst]:.3f} s on {worst}"
        yield ScoreLine(subject, reached, "none above 5 %", jump, jump <= 0.05)


def _ddp_step(topology: str, nodes: int, per_node: int) -> float:
    table = {
        "cluster": {"topology": topology, "nodes": nodes, "gpus_per_node": per_node},
        "model": {"name": "llama-3-8b", "seq_len": 8192, "dtype": "bf16"},
        "strategy": {"kind": "ddp", "param_dtype": "bf16", "micro_batch_size": 1},
        "run": {"steps": 1, "jitter": 0.0, "optimizer": "adamw"},
    }
    return folded(scenario.from_table(table, "cliff.toml"), roughly=True).step_time_s


def deepseek_line() -> ScoreLine:
    """The step that DeepSeek-V3's authors publish, against the shipped scenario with their number of micro-batches."""
    path = Path(__file__).resolve().parents[2] / "scenarios" / DEEPSEEK
    subject = DEEPSEEK_SUBJECT
    target = f"{DEEPSEEK_STEP:.1f} s within 10 %"
    try:
        table = read_toml(path)
        table["parallel"]["microbatches"] = DEEPSEEK_MICROBATCHES
        seconds = folded(scenario.from_table(table, str(path)), roughly=True).step_time_s
    except ClusterSimError as error:
        return ScoreLine(subject, str(error), target, float("nan"), False)
    error = seconds / DEEPSEEK_STEP - 1.0
    return ScoreLine(subject, f"{seconds:.1f} s, {error:+.1%}", target, error, abs(error) <= 0.10)
