"""Predict every row of a table of measured training steps, its time or its peak memory, and say how far off we are.

Each row is played: model and device priced by :mod:`clustersim.model.seconds`, the strategy's Program run by the engine
on the row's machine. ``anchor="single"`` scales compute so that the *measured* one-GPU row of the same source, model,
batch and precision is met, which leaves only what data parallelism adds to be predicted.

Known to be off, and not understood:

* Lambda's eight A100s, up to twice as slow as four wherever gradients are reduced in one call (BERT, GNMT, WaveGlow) or
  the host paces the step (Tacotron 2). What two and four add is in :mod:`tests.evidence.software`.
* WaveGlow on V100, a quarter too fast; TensorFlow's GNMT, half the measured time; GNMT on A100, 10-20 % too fast.
* Steps of MXNet, TensorFlow 2 and PaddlePaddle that double from one GPU to several, and ResNet-50 in half precision on
  two and four nodes (15-25 % too fast): thousands of images a second, which the input pipeline may not give.
* TensorFlow on Pascal at 32 images per GPU, 8 % worse than at 64: some 20 us a kernel that V100s do not show.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from msgspec import UNSET

from clustersim import scenario
from clustersim.calibrate.score import (
    Dimension,
    Score,
    Table,
    evaluate,
    number,
    predicted,
    read_table,
    score,
    with_ranges,
)
from clustersim.calibrate.score import Row as ScoredRow
from clustersim.core.device import device
from clustersim.core.device_names import device_from_text
from clustersim.core.errors import ClusterSimError, TopologyError
from clustersim.core.memory_use import MemoryUse
from clustersim.core.ranges import PredictionRange, of_step
from clustersim.core.texts import data_table
from clustersim.scenario.result.trust import kind_in
from clustersim.scenario.run.held import held
from clustersim.scenario.run.parts import model_of
from clustersim.studies.what_if.folded import folded
from tests.evidence.hybrid_rows import is_hybrid, measured, played_as, scenario_table
from tests.evidence.sharded_rows import is_sharded, read_sharded, words_of
from tests.evidence.sized import BY_COUNT
from tests.evidence.software import Row, framework, sharded
from tests.evidence.step_play import costs_of, peak_memory, scaled, step_time, step_time_as_priced
from tests.evidence.step_rows import COLUMNS, StepRun, origin, publisher, read


def validate_steps(path: str | Path, anchor: str | None = None) -> Score:
    """Predict the step time of every row; ``anchor="single"`` takes the measured one-GPU time as given where the table
    has it."""
    table = read_table(path, COLUMNS)
    if anchor is not None and table and all(map(is_hybrid, table)):
        raise ClusterSimError(f"{path}: hybrid-parallel rows have no one-GPU row to anchor on; leave out --anchor")
    return validate_rows(table, anchor)


def validate_rows(table: list[dict[str, str]], anchor: str | None = None) -> Score:
    """:func:`validate_steps` of rows that are read already."""
    if table and all(map(is_hybrid, table)):
        # The largest take seconds each.
        workers = min(os.cpu_count() or 1, 1 + len(table) // ROWS_A_WORKER)
        rows = with_ranges(evaluate(table, _predict_hybrid, workers), _range)
        return score(rows, DIMENSIONS, _stand_ins(rows) or UNSET)
    anchors = _anchors(table) if anchor == "single" else None
    rows = evaluate(table, lambda row: _predict(row, anchors))
    return score(rows if anchor else with_ranges(rows, _range), DIMENSIONS)


def _stand_ins(rows: Iterable[ScoredRow]) -> tuple[str, ...]:
    """What was played in place of what predicted rows say, and of how many; the commonest first."""
    counts = Counter(said for row in predicted(rows) for said in played_as(row.cells))
    return tuple(f"{said} ({count} of the rows)" for said, count in counts.most_common())


def _range(row: Row) -> PredictionRange:
    try:
        arch = device_from_text(row["gpu"]).arch
    except TopologyError:  # the row names none, and was played on what its publisher had
        arch = ""
    return of_step(strategy_kind(row), origin(row), arch)


ROWS_A_WORKER = 16
"""Hybrid-parallel rows worth a further process."""


def predict_step(row: Table) -> tuple[float, float]:
    """Seconds of a row's step as measured and as predicted. Raises ValueError or a clustersim error for one that cannot
    be played."""
    return _predict_hybrid(row) if is_hybrid(row) else _predict(row, None)


STEP_KIND = "step_kind"
"""What the cells of a hybrid-parallel row that was played have besides: which steps it is like."""


def _predict_hybrid(row: Table) -> tuple[float, float]:
    table = scenario_table(row)
    seconds, kind = _folded_step(json.dumps(table, sort_keys=True))
    row[STEP_KIND] = kind
    return measured(row, table), seconds


@lru_cache(maxsize=1024)
def _folded_step(table: str) -> tuple[float, str]:
    """A step [s], and which steps it is like; rows that differ in what was measured only are played once."""
    asked = scenario.from_table(json.loads(table), "row.toml")
    gpu = device(json.loads(table)["cluster"]["device"])
    peak = gpu.peak[gpu.runs_as(asked.file.model.dtype)]
    kind = kind_in(asked, model_of(asked), peak, split=True)
    return folded(asked, roughly=True).step_time_s, kind


DIMENSIONS: dict[str, Dimension] = {
    "case": lambda row: str(row.cells["case_id"]),
    "source": lambda row: publisher(row.cells),
    "platform": lambda row: str(row.cells.get("topology", "")),
    "strategy": lambda row: str(row.cells["strategy"]),
    "kind": lambda row: degrees_of(row.cells) if is_hybrid(row.cells) else kind_of(row.cells["strategy"]),
    "hardware": lambda row: hardware(row.cells),
    "model": lambda row: str(row.cells["model"]),
    "size_class": lambda row: f"{row.cells['gpus']} GPUs",
}
"""What the error is split by."""


def strategy_kind(row: Row) -> str:
    """A row's strategy as the ``kind`` of a scenario's ``[strategy]``; ``"split"`` where the model is split, and
    ``"experts"`` where it is a mixture of experts; of one that was played, which steps it is like."""
    if STEP_KIND in row:
        return row[STEP_KIND]
    return "experts" if row.get("experts") else "split" if is_hybrid(row) else kind_of(row["strategy"])


def kind_of(strategy: str) -> str:
    """A table's strategy as the ``kind`` of a scenario's ``[strategy]``.

    >>> kind_of("fsdp-full"), kind_of("zero3 (ZeRO++: qwZ + hpZ=16 + qgZ)"), kind_of("dp (torch DataParallel)")
    ('fsdp', 'zero', 'data_parallel')
    """
    if "FSDP" in strategy or strategy.startswith(("fsdp", "hsdp")):
        return "fsdp"
    kinds = {"zero": "zero", "ps": "parameter_server", "dp": "data_parallel", "single": "single"}
    return next((kind for start, kind in kinds.items() if strategy.startswith(start)), "ddp")


def degrees_of(row: Row) -> str:
    """How a row's model is split.

    >>> degrees_of({"tp": "8", "pp": "4", "cp": "1", "ep": "1", "dp": "16"})
    'tp+pp+dp'
    """
    return "+".join(axis for axis in ("tp", "pp", "cp", "ep", "dp") if row.get(axis, "1") not in {"", "1"}) or "none"


def hardware(row: Row) -> str:
    """The kind of a row's model and of its GPU."""
    return f"{'mixture of experts' if row.get('experts') else 'dense'}, {gpu_family(row)}"


def gpu_family(row: Row) -> str:
    """A row's GPU without its board: ``"A100"``; ``"unnamed"`` where the source does not say."""
    found = re.search(r"[A-Z]+\d+[A-Z]?", row.get("gpu", ""))
    return found.group() if found else row.get("gpu", "") or "unnamed"


def identity(row: Row) -> tuple[object, ...]:
    """Rows for which this is equal measure the same thing."""
    columns = ("source", "model", "strategy", "gpu", "gpus", "nodes", "precision", "micro_batch_per_gpu", "seq_len")
    return tuple(row.get(column, "") for column in (*columns, "act_ckpt", "offload", "other"))


def measured_seconds(row: Row) -> float:
    """Seconds of a row's step, whoever predicts it. Raises ValueError or a clustersim error where it says none."""
    return measured(row, scenario_table(row)) if is_hybrid(row) else _run(row).measured


def _run(row: Row) -> StepRun:
    return read_sharded(row) if is_sharded(row) else read(row)


def _predict(row: Row, anchors: Mapping[tuple[str, ...], float] | None) -> tuple[float, float]:
    if anchors is None:
        run = _run(row)
        return run.measured, step_time_as_priced(run)
    if is_sharded(row):
        raise ValueError("FSDP and ZeRO rows have no one-GPU row to anchor on")
    run = read(row)
    if run.kind == "single":
        raise ValueError("is the anchor of its model, not a prediction")
    scale = anchors.get(_identity(row))
    if scale is None:
        raise ValueError("the table has no one-GPU row of the same source, model, batch and precision to anchor on")
    return run.measured, step_time(run, scaled(costs_of(run), scale))


def _identity(row: Row) -> tuple[str, ...]:
    """What an anchor and the rows it serves have in common: one source's software on one GPU with one batch.

    A source says in parentheses which of its tables a row is from: p50 and p75 of one benchmark share an anchor.
    """
    source = row.get("source", "").split("(")[0].strip()
    rest = tuple(row.get(column, "") for column in ("model", "precision", "gpu", "micro_batch_per_gpu", "seq_len"))
    return (source, framework(row).name, *rest)


def _anchors(table: list[dict[str, str]]) -> dict[tuple[str, ...], float]:
    """Measured over predicted compute of every one-GPU row that can be predicted."""
    found: dict[tuple[str, ...], float] = {}
    for row in table:
        if not row["strategy"].startswith("single"):
            continue
        try:
            run = read(row)
            found.setdefault(_identity(row), run.measured / step_time(run, costs_of(run)))
        except (ValueError, ClusterSimError):
            continue
    return found


# ---- Memory ----------------------------------------------------------------------------------------------------------


GIB = 2.0**30
FULL = 0.96
"""Share of a card above which what is reserved of it is no longer what a step needs."""


def validate_memory(path: str | Path) -> Score:
    """Predict ``peak_mem_GiB`` of every row.

    Three figures are published as "memory", and a row is compared with its own: what the framework's allocator had
    *allocated* at its peak; what it had *reserved* from the driver, which torchtitan logs; and what ``nvidia-smi``
    shows, with the driver's context and libraries beside it. A reservation of a full card says nothing, and is skipped.
    """
    table = [row for row in read_table(path, (*COLUMNS, "peak_mem_GiB")) if row["peak_mem_GiB"].strip()]
    return score(
        with_ranges(evaluate(table, _predict_memory), lambda row: of_memory(publisher(row))),
        {
            "case": lambda row: str(row.cells["case_id"]),
            "source": lambda row: publisher(row.cells),
            "figure": lambda row: figure(row.cells),
            "strategy": lambda row: str(row.cells["strategy"]),
            "model": lambda row: str(row.cells["model"]),
        },
    )


def of_memory(source: str = "") -> PredictionRange:
    """The range of what a framework has allocated at its peak."""
    memory = data_table("ranges")["memory"]
    if source in memory["published"]:
        return PredictionRange.of(memory["published"][source], "published")
    return PredictionRange.of(memory["similar"]["all"], "similar")


def figure(row: Row) -> str:
    """Which of the three a row states.

    >>> figure({"notes": "memory: nvidia-smi GB"}), figure({"framework": "torchtitan"}), figure({"strategy": "ddp"})
    ('nvidia-smi', 'reserved', 'allocated')
    """
    if "nvidia-smi" in row.get("notes", ""):
        return "nvidia-smi"
    named = f"{row.get('framework', '')} {row.get('other', '')}"
    if "torchtitan" in named:
        return "reserved"
    return sharded(words_of(row)).memory if is_sharded(row) else "allocated"


def _predict_memory(row: Row) -> tuple[float, float]:
    # Gigabytes are GiB in the table's column but where the row says that they are as printed.
    stated = number(row, "peak_mem_GiB") * (1e9 if "GB as printed" in row.get("notes", "") else GIB)
    which = figure(row)
    if which == "allocated":
        return stated, _use(row).allocated
    card = device_from_text(row["gpu"].split(" (")[0]).memory_bytes
    if stated > FULL * card:
        raise ValueError(f"the row shows a full card: {stated / GIB:.1f} GiB {which}, not what the step needs")
    use = _use(row)
    # Nobody takes more than there is: an allocator that is refused gives back what it has cached.
    return stated, min(use.reserved, card - use.context) if which == "reserved" else min(use.shown, card)


def _use(row: Row) -> MemoryUse:
    if is_hybrid(row):
        return _held(json.dumps(scenario_table(row), sort_keys=True))
    if not is_sharded(row):
        raise ValueError(f"the memory of strategy {row['strategy']!r} is not compared")
    run = read_sharded(row, timed=False)
    if any(BY_COUNT in note for note in run.model.notes):  # a step's time follows from the count, activations do not
        raise ValueError("the row gives no layers and d_model, which decide what activations take")
    return peak_memory(run)


@lru_cache(maxsize=256)
def _held(table: str) -> MemoryUse:
    return held(scenario.from_table(json.loads(table), "row.toml")).use
